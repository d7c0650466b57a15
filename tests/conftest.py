"""What every test may use: real data where it is at hand, and skips that say their name."""

import functools
import gc
import json
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.tests.forked import Forked, fork_script

if TYPE_CHECKING:
    from lingpt.data import DataConfig

pytest.register_assert_rewrite("lingpt.tests.oracles")

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

# `python -m pytest` puts the root on the path: bare names such as `data` would find our folders.
ROOT = Path(__file__).parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]


# Imported modules never become garbage: scanning them costs a third of the time until the first test.
gc.disable()


def pytest_collection_finish() -> None:
    """All that is imported by now stays: the collector, which each training calls, leaves it alone."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_a_module_leaves_stays() -> Iterator[None]:
    """Modules, graphs and caches: each training would scan those of all tests before it."""
    yield
    gc.collect()
    gc.freeze()


WORDS = (
    "the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "home", "and", "sang", "of", "rain",
)  # fmt: skip


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder named by LINGPT_TEST_DATA: Wikipedia articles, the NeoX tokenizer, benchmark splits."""
    folder = os.environ.get("LINGPT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("real data: LINGPT_TEST_DATA names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> "DataConfig":
    """400 short documents of random words, their tokenizer, and a token cache that all tests share."""
    from lingpt.data import DataConfig
    from lingpt.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    rows = [json.dumps({"text": " ".join(rng.choices(WORDS, k=80))}) for _ in range(400)]
    (folder / "train.jsonl").write_text("\n".join(rows[:360]))
    (folder / "val.jsonl").write_text("\n".join(rows[360:]))
    return DataConfig(
        source=str(folder / "train.jsonl"),
        tokenizer=str(train_bpe([" ".join(WORDS)], 300).save(folder / "tokenizer")),
        val_source=str(folder / "val.jsonl"),
        seq_len=32,
        num_workers=1,
        cache_dir=str(folder / "cache"),
    )


@pytest.fixture
def few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded corpus with fewer modules to train on: its tokenizer is trained in a moment."""
    monkeypatch.setattr("lingpt.data.embedded.TRAIN_MODULES", "argparse ast inspect tarfile")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """What a test marked `fault` counts for the record of `make soak`; `most …` are maxima."""
    counts: dict[str, float] = defaultdict(int)
    if marker := request.node.get_closest_marker("fault"):
        request.node.user_properties.append(("fault", marker.args))
    yield counts
    request.node.user_properties.append(("figures", dict(counts)))


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """`start_script(code, *argv, **env)`: a process that runs it; killed at the test's end, if it is left."""
    with ExitStack() as stack:

        def start(code: str, *argv: str, **env: str) -> Forked:
            process = fork_script(code, *argv, folder=tmp_path, env={**os.environ, **env})
            stack.callback(process.send_group, signal.SIGKILL)
            return process

        yield start


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, also where the tests run in the background and were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are skipped by name on a machine without the GPUs, or the CUDA compiler, that they need."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        need = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA device(s), found {gpus}"))
        if item.get_closest_marker("nvrtc") and (reason := no_compiler()):
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def no_compiler() -> str | None:
    """Why there is no CUDA compiler; None where there is one."""
    from lingpt.kernels.linear_attention.cuda.toolchain import compiler_version

    try:
        compiler_version()
    except UserError as error:
        return str(error)
    return None
