"""`--train.deterministic true`: the same bits again."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """While inside, and where enabled, PyTorch computes everything in an order that is always the same.

    The same device, processes, micro-batches and versions then give the same bits. Before CUDA starts.
    """
    if not enabled:
        yield
        return
    before, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    empty: Any = torch.utils.deterministic
    fill = empty.fill_uninitialized_memory
    # cuBLAS reads it when it starts; the processes that are launched later inherit it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        # Nothing here reads memory that it has not written: filling every new tensor would only cost time.
        empty.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        empty.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = flags
