"""mbarriers: what is written before an arrival may be read behind the wait."""

import pytest
import torch

from lingpt.ptx_emulator import DeadlockError

pytestmark = pytest.mark.nvrtc


def test_the_wait_ends_with_the_last_arrival(launch) -> None:
    """Guards: a warp's values reach those who wait; with an arrival too few, they wait for ever."""
    a, out = torch.arange(32, dtype=torch.int32), torch.zeros(96, dtype=torch.int32)
    launch("hand_over", a, out, 32)
    assert torch.equal(out, a.repeat(3))
    missing = r"(?s)warps 1 2 3 wait for an mbarrier.* 33 arrivals 1 are to come"
    with pytest.raises(DeadlockError, match=missing):
        launch("hand_over", a, out, 33)
