"""Fixtures of the tests of the CUDA kernel."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lingpt.tests.kernels.on_gpu import FREE, FREE_ROTATED, ROTATED, SEPARATE


@pytest.fixture(scope="session")
def compiled_builds() -> None:
    """Every build that the GPU tests meet, all at once: one after the other they would take minutes."""
    from lingpt.kernels.linear_attention.cuda import compile as nvrtc
    from lingpt.kernels.linear_attention.cuda.launch import has_every_form, kernel_build

    arch = nvrtc.native_arch()
    builds = [
        kernel_build(arch, dtype, D, decay, rope, *weights).spec(arch)
        for dtype, D, decay, rope, *weights in (*ROTATED[::-1], *SEPARATE, *FREE, *FREE_ROTATED)
        if (not weights and decay != "PER_TOKEN") or has_every_form(arch, rope)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda spec: spec.compile(arch), builds))
