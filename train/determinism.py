"""`--train.deterministic true`: bit-identical repetition of a run."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, cast

import torch


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Makes PyTorch compute everything in a fixed order inside the block, if enabled.

    The same device, processes, micro-batches and versions then give the same bits. Enter before CUDA starts.
    """
    if not enabled:
        yield
        return
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before, fill = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    flags = cudnn.deterministic, cudnn.benchmark
    # cuBLAS reads it when it starts; processes launched later inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        # Nothing here reads uninitialised memory: filling every new tensor would only cost time.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = flags
