"""Threads that diverge and converge, barriers that some never reach, and launches that are refused."""

import pytest
import torch

from lingpt.ptx_emulator import DeadlockError, LaunchError, Memory

pytestmark = pytest.mark.nvrtc


def test_threads_diverge_and_converge(launch) -> None:
    """Guards: loops of different lengths, `continue` and `break`, before a shuffle of the warp."""
    out = torch.zeros(64, dtype=torch.int32)
    launch("branches", out, threads=64)
    x = []
    for i in range(64):
        value = 0
        for k in range(i % 7):
            if k % 2:
                value += k
            elif i % 3 == 0:
                continue
            else:
                value -= 1
            if value > 5:
                break
        x.append(value)
    assert out.tolist() == [x[i] + 1000 * x[i ^ 1] for i in range(64)]


def test_a_deadlock_names_who_waits_where(launch) -> None:
    """Guards: a barrier that some threads never reach."""
    out = torch.zeros(128, dtype=torch.int32)
    launch("leave_early", out, 0)
    with pytest.raises(DeadlockError, match=r"(?s)warps 1 2 3 wait at a barrier.*warps 0 have returned"):
        launch("leave_early", out, 32)


@pytest.mark.parametrize(
    "grid, threads, shared, reason",
    [
        ((1, 1, 1), 48, 0, "block .48, 1, 1."),
        ((1, 1, 1), 2048, 0, "of 1024 threads"),
        ((0, 1, 1), 128, 0, "grid .0, 1, 1."),
        ((1, 1, 1), 128, 228 * 1024, "there are 232448"),
    ],
    ids=["part of a warp", "too many threads", "empty grid", "too much shared memory"],
)
def test_a_launch_that_the_hardware_refuses(probes, grid, threads, shared, reason) -> None:
    """Guards: limits of the architecture end in an error that names the kernel."""
    kernel, out = probes.kernel("leave_early", "Pi"), torch.zeros(2048, dtype=torch.int32)
    with Memory(out), pytest.raises(LaunchError, match=f"leave_early.*{reason}"):
        kernel(grid, (threads, 1, 1), shared, 0, out.data_ptr(), 0)


def test_a_launch_needs_its_parameters_and_registered_memory(probes) -> None:
    """Guards: a signature that is not the kernel's, and a launch outside of any Memory."""
    out = torch.zeros(128, dtype=torch.int32)
    with Memory(out), pytest.raises(LaunchError, match=r"parameters of \[8, 4\]"):
        probes.kernel("leave_early", "PP")((1, 1, 1), (128, 1, 1), 0, 0, out.data_ptr(), 0)
    with pytest.raises(LaunchError, match="Memory"):
        probes.kernel("leave_early", "Pi")((1, 1, 1), (128, 1, 1), 0, 0, out.data_ptr(), 0)
