"""The environment of a result: the card, its driver, the versions, the source."""

from __future__ import annotations

import datetime
import platform
import subprocess
import warnings
from typing import Any

import torch

from lingpt.common.install import installed_version
from lingpt.kernels.linear_attention.cuda.source_hash import source_hash

PACKAGES = (
    "lingpt", "torch", "triton", "fla-core", "mamba-ssm", "mlstm-kernels", "transformers", "cuda-bindings",
)  # fmt: skip
CONTEXT_GIB = 1.5  # more than a process uses outside of PyTorch's allocator


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Card, driver, versions, the hashes of the kernels' and all source, the commit, and the date."""
    from lingpt.train.runs.environment import git_revision, package_hash  # needs the extra `train`

    cuda = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return {
        "card": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "nvrtc": _nvrtc(),
        "python": platform.python_version(),
        "versions": {name: number for name in PACKAGES if (number := installed_version(name))}
        | {"torch": torch.__version__},
        "source_hash": source_hash(),
        "source": package_hash(),
        "git": git_revision(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def warn_if_shared(device: torch.device) -> None:
    """Warns if another process holds memory of this card, as it may distort every timing."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    others = (total - free - torch.cuda.memory_reserved(device)) / 2**30
    if others >= CONTEXT_GIB:
        warnings.warn(
            f"another process holds {others:.1f} GiB of this card: end it, or the timings may be wrong",
            stacklevel=2,
        )


def _driver() -> str | None:
    """The driver's version, as `nvidia-smi` reports it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _nvrtc() -> str | None:
    try:
        from cuda.bindings import nvrtc

        return "{}.{}".format(*nvrtc.nvrtcVersion()[1:])
    except (ImportError, RuntimeError):
        return None
