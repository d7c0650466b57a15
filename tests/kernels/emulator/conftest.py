"""The probes: small kernels of known result or known mistake, compiled by NVRTC and run as one block."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lingpt.kernels.emulator import Memory, Module


@pytest.fixture(scope="session")
def probes() -> Module:
    return Module(Path(__file__).with_name("probes.cu"), "sm_90a", {})


@pytest.fixture
def launch(probes: Module) -> Callable[..., None]:
    """`launch(name, *arguments, threads=128, shared=0)`: tensors become pointers to registered memory."""

    def launch(name: str, *arguments: torch.Tensor | int, threads: int = 128, shared: int = 0) -> None:
        signature = "".join("P" if isinstance(x, torch.Tensor) else "i" for x in arguments)
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        with Memory(arguments):
            probes.kernel(name, signature)((1, 1, 1), (threads, 1, 1), shared, 0, *values)

    return launch
