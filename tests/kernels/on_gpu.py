"""What the tests of the CUDA kernel share: the oracles on a GPU, and the builds that they meet."""

from functools import partial

import torch

from lingpt.tests import oracles

BF16, FP16 = torch.bfloat16, torch.float16

# dtype, head_dim, decay, rotated dimensions
SEPARATE = [(dtype, D, decay, 0) for dtype in (BF16, FP16) for D in (64, 128) for decay in (False, True)]
ROTATED = [(BF16, 64, True, 16), (BF16, 64, False, 64), (BF16, 128, False, 32), (BF16, 128, False, 128)]

randn = partial(oracles.randn, device="cuda")
inputs = partial(oracles.inputs, device="cuda")
some_state = partial(oracles.some_state, device="cuda")
run = partial(oracles.forward_backward, backend="cuda")


def decays(H: int) -> torch.Tensor:
    """From a memory of ten tokens to one without end."""
    log_decay = -torch.logspace(-1, -4, H, device="cuda")
    log_decay[-1] = 0.0
    return log_decay
