"""cp.async: when its bytes may be read."""

import pytest
import torch

from lingpt.ptx_emulator import RaceError

pytestmark = pytest.mark.nvrtc


def test_a_copy_is_complete_for_those_who_wait(launch) -> None:
    """Guards: what cp.async copies may not be read before the wait, not even by the thread that copies."""
    a, out = torch.arange(128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    launch("copy", a, out, 1, threads=32)
    assert torch.equal(out, a[::4])
    with pytest.raises(RaceError, match="still in flight"):
        launch("copy", a, out, 0, threads=32)


def test_an_mbarrier_passes_on_a_copy_that_arrives_at_it(launch) -> None:
    """Guards: the arrival of the thread is not that of its copies."""
    a, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    launch("copy_arrives", a, out, 0, threads=64)
    assert torch.equal(out, a)
    with pytest.raises(RaceError, match="still in flight"):
        launch("copy_arrives", a, out, 1, threads=64)
