"""Finds what to evaluate: the newest run of each attention of a model, and its newest whole checkpoint.

A run is a folder with `config.yaml`; its checkpoints are `checkpoints/step-XXXXXXXX`, written aside and
renamed. What an interrupted copy or a full disk left half-written is passed over all the same: a checkpoint
counts only when its files are there and `model.safetensors` is as long as its own header says.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lingpt.common.errors import UserError

STEP = re.compile(r"step-(\d+)")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of one run. `attention` is what it was trained with: one name, or a name per layer."""

    folder: Path
    run: Path
    step: int
    model: str
    attention: str | tuple[str, ...]

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """The checkpoint `runs/<name>/checkpoints/step-XXXXXXXX`; UserError where it is not whole."""
        folder = Path(folder)
        step, run = STEP.fullmatch(folder.name), folder.parent.parent
        if step is None or not is_whole(folder):
            raise UserError(
                f"{folder} is no whole checkpoint (step-XXXXXXXX with model, config and tokenizer)"
            )
        return cls(folder, run, int(step[1]), *_trained_as(run))

    @property
    def label(self) -> str:
        """The attention as one word; a hybrid's mechanisms joined by `+`."""
        return self.attention if isinstance(self.attention, str) else "+".join(dict.fromkeys(self.attention))

    @cached_property
    def dtype(self) -> str:
        """The dtype of the weights, as PyTorch names it."""
        header, _ = _header(self.folder / "model.safetensors")
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        largest = max(tensors, key=lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0])
        return DTYPES.get(largest["dtype"], largest["dtype"])

    @cached_property
    def weights(self) -> str:
        """A fingerprint of the weights: SHA-256 of the header and of 64 blocks spread over the tensors.

        Tells apart any two trainings (every weight moves at every step) without reading gigabytes. The header
        counts as what it says: safetensors writes its metadata in any order.
        """
        file = self.folder / "model.safetensors"
        header, end = _header(file)
        digest = hashlib.sha256(json.dumps([end, header], sort_keys=True).encode())
        start = end - max(
            entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
        )
        with file.open("rb") as data:
            for i in range(64):
                data.seek(start + (end - start) * i // 64)
                digest.update(data.read(4096))
        return digest.hexdigest()


def find_checkpoints(
    root: str | Path, model: str | None = None, runs: Iterable[str | Path] = ()
) -> list[Checkpoint]:
    """What `lingpt eval` evaluates.

    Args:
        root: the folder of runs.
        model: the newest run of each attention of this model; by default the model of the newest run of all.
        runs: these runs instead (or checkpoint folders of theirs), all of them.

    Raises UserError where there is nothing to evaluate, saying what there is.
    """
    if runs := list(runs):
        return [_newest_or_error(Path(run)) for run in runs]
    found = sorted(_newest_of_each_run(Path(root)), key=lambda c: _time(c.folder), reverse=True)
    if not found:
        raise UserError(f"no run with a checkpoint in {root}: train one first (lingpt train), or give --runs")
    models = list(dict.fromkeys(checkpoint.model for checkpoint in found))
    model = model or models[0]
    if model not in models:
        nearest = difflib.get_close_matches(model, models, n=1, cutoff=0.5)
        hint = (
            f"did you mean {nearest[0]!r}?" if nearest else f"there are runs of {', '.join(sorted(models))}"
        )
        raise UserError(f"no run of {model} with a checkpoint in {root}: {hint}")
    newest: dict[Any, Checkpoint] = {}
    for checkpoint in found:
        if checkpoint.model == model:
            newest.setdefault(checkpoint.attention, checkpoint)
    return sorted(newest.values(), key=lambda checkpoint: checkpoint.label)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint folder holds a model (of its full length), its configuration and its tokenizer."""
    try:
        _header(folder / "model.safetensors")
        for name in ("config.json", "tokenizer.json"):
            json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return False
    return True


def _newest_or_error(path: Path) -> Checkpoint:
    """The checkpoint that a `--runs` argument means."""
    if STEP.fullmatch(path.name):
        return Checkpoint.open(path)
    if not path.is_dir():
        raise UserError(f"no run at {path}")
    checkpoint = _newest(path)
    if checkpoint is None:
        raise UserError(f"{path} has no whole checkpoint yet: let it train on to its first one")
    return checkpoint


def _newest_of_each_run(root: Path) -> Iterator[Checkpoint]:
    for config in sorted(root.glob("*/config.yaml")):
        checkpoint = _newest(config.parent)
        if checkpoint is not None:
            yield checkpoint


def _newest(run: Path) -> Checkpoint | None:
    """A run's whole checkpoint with the highest step."""
    folders = [(int(step[1]), f) for f in run.glob("checkpoints/*") if (step := STEP.fullmatch(f.name))]
    for _, folder in sorted(folders, reverse=True):
        if is_whole(folder):
            return Checkpoint.open(folder)
    return None


def _trained_as(run: Path) -> tuple[str, str | tuple[str, ...]]:
    """Model and attention from the run's resolved configuration."""
    file = run / "config.yaml"
    try:
        model = yaml.safe_load(file.read_text(encoding="utf-8"))["model"]
        name, attention = model["name"], model["attention"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} does not say which model the run trained ({type(error).__name__}: {error})"
        ) from error
    return name, attention if isinstance(attention, str) else tuple(attention)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Header and size of a safetensors file; ValueError where the two do not agree."""
    size = file.stat().st_size
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if length > size:
            raise ValueError(f"{file} is cut off")
        header = json.loads(data.read(length))
    end = (
        8 + length + max((e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
    )
    if end != size:
        raise ValueError(f"{file} has {size} bytes; its header asks for {end}")
    return header, size


def _time(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_mtime_ns
