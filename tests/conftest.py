"""What every test may use: real data where it is at hand, and skips that say their name."""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch

from lingpt.common.errors import UserError

pytest.register_assert_rewrite("lingpt.tests.oracles")

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

# `python -m pytest` puts the root on the path: bare names such as `data` would find our folders.
ROOT = Path(__file__).parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder named by LINGPT_TEST_DATA: Wikipedia articles, the NeoX tokenizer, benchmark splits."""
    folder = os.environ.get("LINGPT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("real data: LINGPT_TEST_DATA names no folder")
    return Path(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are skipped by name on a machine without the GPUs, or the CUDA compiler, that they need."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        need = 2 if "multigpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if gpus < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA device(s), found {gpus}"))
        if item.get_closest_marker("nvrtc") and (reason := no_compiler()):
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def no_compiler() -> str | None:
    """Why there is no CUDA compiler; None where there is one."""
    from lingpt.kernels.linear_attention.cuda.compile import compiler_version

    try:
        compiler_version()
    except UserError as error:
        return str(error)
    return None
