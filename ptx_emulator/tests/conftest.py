"""The probes: small kernels of known result or known mistake, compiled by NVRTC and run as one block."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.kernels.linear_attention.cuda.compile import compile_ptx
from lingpt.kernels.linear_attention.cuda.toolchain import compiler_version
from lingpt.ptx_emulator import Memory, Module


@pytest.fixture(scope="session")
def probes() -> Module:
    try:
        compiler_version()
    except UserError as error:
        pytest.skip(str(error))
    source = Path(__file__).with_name("probes.cu")
    return Module(partial(compile_ptx, source, "sm_90a", {}), "sm_90a")


@pytest.fixture
def launch(probes: Module) -> Callable[..., None]:
    """`launch(name, *arguments, threads=128, shared=0)`: tensors become pointers to registered memory."""

    def launch(name: str, *arguments: torch.Tensor | int, threads: int = 128, shared: int = 0) -> None:
        signature = "".join("P" if isinstance(x, torch.Tensor) else "i" for x in arguments)
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        with Memory(arguments):
            probes.kernel(name, signature)((1, 1, 1), (threads, 1, 1), shared, 0, *values)

    return launch
