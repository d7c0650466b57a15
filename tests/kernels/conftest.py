"""Fixtures of the tests of the CUDA kernel."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lingpt.tests.kernels.on_gpu import ROTATED, SEPARATE


@pytest.fixture(scope="session")
def compiled_builds() -> None:
    """Every build that the GPU tests meet, all at once: one after the other they would take minutes."""
    from lingpt.kernels.linear_attention.cuda import compile as nvrtc
    from lingpt.kernels.linear_attention.cuda.launch import has_token_decay, kernel_build

    arch = nvrtc.native_arch()
    builds = [
        kernel_build(arch, dtype, D, decay, rope).spec(arch)
        for dtype, D, decay, rope in (*ROTATED[::-1], *SEPARATE)
        if decay != "PER_TOKEN" or has_token_decay(arch, rope)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda spec: spec.compile(arch), builds))
