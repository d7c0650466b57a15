"""Fixtures of the tests of the CUDA kernel."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lingpt.tests.kernels.linear_attention.cuda.on_gpu import FREE, FREE_ROTATED, ROTATED, SEPARATE


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """On the emulator tests of one build follow each other: a process compiles and parses it once."""
    at = [i for i, item in enumerate(items) if item.path.name == "test_emulated.py" and "[" in item.name]
    by_build = sorted((items[i] for i in at), key=lambda item: str(item.callspec.params.get("build")))
    for i, item in zip(at, by_build, strict=True):
        items[i] = item


@pytest.fixture(scope="session")
def compiled_builds() -> None:
    """Every build that the GPU tests meet, all at once: one after the other they would take minutes."""
    from lingpt.kernels.linear_attention.cuda import toolchain
    from lingpt.kernels.linear_attention.cuda.variants import variant_for

    specs = [
        (variant_for(arch, dtype, D, decay, rope, *weights).spec(arch), arch)
        for arch in sorted({toolchain.native_arch(), toolchain.native_arch().rstrip("a")}, reverse=True)
        for dtype, D, decay, rope, *weights in (*ROTATED[::-1], *SEPARATE, *FREE, *FREE_ROTATED)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda spec: spec[0].compile(spec[1]), specs))


@pytest.fixture(params=["own scan", "sm_80's scan", "sm_80's scan in small chunks"])
def scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The card's own; on Hopper (without sm_90a's instructions) also the one of all other cards, and that as
    it is where shared memory is small."""
    from lingpt.kernels.linear_attention.cuda import plan, toolchain, variants

    def forget_the_plans() -> None:
        plan.make_plan.cache_clear()
        variants.variant_for.cache_clear()

    if request.param != "own scan":
        if toolchain.native_arch() != "sm_90a":
            pytest.skip("the own scan is sm_80's")
        if "small" in request.param:
            if request.node.callspec.params["D"] == 64:
                pytest.skip("chunks are small with a head_dim of 128")
            monkeypatch.setattr(variants, "SMALL_SHARED", (*variants.SMALL_SHARED, "sm_90"))
        processors = toolchain.card(torch.device("cuda"))[1]
        monkeypatch.setattr(plan, "card", lambda device: ("sm_90", processors))
    forget_the_plans()
    yield request.param
    monkeypatch.undo()
    forget_the_plans()
