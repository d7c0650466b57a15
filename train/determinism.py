"""`--train.deterministic true`: bit-identical repetition of a run."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Makes PyTorch compute everything in a fixed order inside the block, if enabled.

    The same device, processes, micro-batches and versions then give the same bits. Enter before CUDA starts.
    """
    if not enabled:
        yield
        return
    before, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    empty: Any = torch.utils.deterministic
    fill = empty.fill_uninitialized_memory
    # cuBLAS reads it when it starts; processes launched later inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        # Nothing here reads uninitialised memory: filling every new tensor would only cost time.
        empty.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        empty.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = flags
