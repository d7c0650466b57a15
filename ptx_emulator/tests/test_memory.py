"""Global memory that a launch may touch, and shared memory that was never written."""

import pytest
import torch

from lingpt.ptx_emulator import MemcheckError, Memory

pytestmark = pytest.mark.nvrtc


def test_an_access_out_of_bounds_is_found(launch, probes) -> None:
    """Guards: the error names kernel, line, thread and address; the last element is still fine."""
    a, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    launch("past_the_end", a, out, 0)
    assert torch.equal(a, out)
    with pytest.raises(MemcheckError, match=r"past_the_end.*probes.cu:\d+.*thread 127: 4 bytes .* byte 512"):
        launch("past_the_end", a, out, 1)
    launch("prefetch_past_the_end", a, 0)
    with pytest.raises(MemcheckError, match=r"thread 127: 1 bytes .* byte 512"):
        launch("prefetch_past_the_end", a, 1)
    with pytest.raises(MemcheckError, match=r"thread 9: .* not a multiple of 4"):
        launch("misaligned", torch.arange(129, dtype=torch.int32), out)
    with pytest.raises(MemcheckError, match="thread 0"), Memory(a):
        freed = torch.zeros(128, dtype=torch.int32).data_ptr()
        probes.kernel("past_the_end", "PPi")((1, 1, 1), (128, 1, 1), 0, 0, a.data_ptr(), freed, 0)


def test_what_nobody_wrote_is_nan(launch) -> None:
    """Guards: a read of shared memory before any write shows in the result."""
    out = torch.zeros(32)
    launch("read_unwritten", out, threads=32)
    assert out[:16].eq(1).all() and out[16:].isnan().all()
