"""What the tests of the CUDA kernel share: the oracles on a GPU, and the builds that they meet."""

from functools import partial

import torch

from lingpt.tests import oracles

BF16, FP16 = torch.bfloat16, torch.float16

# dtype, head_dim, decay, rotated dimensions, and weights without a normaliser
DECAYS = ("NO_DECAY", "PER_HEAD", "PER_TOKEN")  # as in variants.py, which needs no import to collect tests
SEPARATE = [(dtype, D, decay, 0) for dtype in (BF16, FP16) for D in (64, 128) for decay in DECAYS]
ROTATED = [
    (BF16, 64, "PER_HEAD", 16),
    *((BF16, D, "NO_DECAY", rope) for D, rope in ((64, 64), (128, 32), (128, 128))),
]

FREE = [
    (dtype, D, decay, 0, weights)
    for weights in ("AFFINE", "PRODUCTS")
    for dtype, D, decay, _ in SEPARATE
    if dtype == BF16 or decay == "PER_TOKEN"
]
FREE_ROTATED = [(BF16, 64, "PER_TOKEN", 16, "AFFINE"), (BF16, 128, "NO_DECAY", 32, "PRODUCTS")]

randn = partial(oracles.randn, device="cuda")
inputs = partial(oracles.inputs, device="cuda")
some_state = partial(oracles.some_state, device="cuda")
run = partial(oracles.forward_backward, backend="cuda")


def log_decay(kind: str, B: int, N: int, H: int) -> torch.Tensor | None:
    """Of one of DECAYS."""
    return {"NO_DECAY": None, "PER_HEAD": decays(H), "PER_TOKEN": oracles.token_decays(B, N, H, "cuda")}[kind]


def decays(H: int) -> torch.Tensor:
    """From a memory of ten tokens to one without end."""
    log_decay = -torch.logspace(-1, -4, H, device="cuda")
    log_decay[-1] = 0.0
    return log_decay
