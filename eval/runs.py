"""Finds what to evaluate: the newest run of each attention form (attention and options) of a model, and the
run's newest whole checkpoint."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lingpt.common.errors import UserError, name_on_stderr, nearest, skip_failing
from lingpt.common.files import read_errors, read_json_object
from lingpt.common.run_folder import (
    CONFIG,
    MODEL_CONFIG,
    TOKENIZER,
    WEIGHTS,
    checkpoint_step,
    is_model_folder,
    newest_checkpoint,
    read_config,
    read_manifest,
    read_model,
    require_newest_checkpoint,
    warn_skipped_checkpoints,
)
from lingpt.models import (
    GPT,
    SHARDS,
    Config,
    attention_form,
    is_sharded,
    read_model_config,
    sharded_dtype,
    sharded_parameters,
)

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
        """The checkpoint `runs/<name>/checkpoints/step-XXXXXXXX`; UserError if it is not whole."""
        folder = Path(folder)
        step, run = checkpoint_step(folder), folder.parent.parent
        run = run.resolve() if run.name in ("", "..") else run  # the run of `.` has its name, too
        if step is None or read_manifest(folder) is None:
            raise UserError(
                f"{folder} is not a complete checkpoint (step-XXXXXXXX with a manifest and all the files "
                "that it lists)"
            )
        return cls(folder, run, step, *read_model(run))

    @property
    def name(self) -> str:
        return f"{self.run.name} step {self.step}"

    @cached_property
    def form(self) -> str:
        """The attention and its options that are not at their defaults."""
        return attention_form(self.attention, read_config(self.run)["model"])

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder) or {}

    @cached_property
    def _shapes(self) -> dict[str, tuple[list[int], str]]:
        """The shape and dtype of each tensor of an unsharded checkpoint; UserError if it is damaged."""
        try:
            with safe_open(self.folder / WEIGHTS, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder / WEIGHTS} is damaged: {error}") from error

    @cached_property
    def dtype(self) -> str:
        """The dtype of the weights (of the largest tensor), as PyTorch names it."""
        if is_sharded(self.folder):
            return str(sharded_dtype(self.folder)).removeprefix("torch.")
        _, largest = max(self._shapes.values(), key=lambda tensor: math.prod(tensor[0]))
        return DTYPES.get(largest, largest)

    @cached_property
    def parameters(self) -> int:
        if is_sharded(self.folder):
            return sharded_parameters(self.folder)
        return sum(math.prod(shape) for shape, _ in self._shapes.values())

    @cached_property
    def seq_len(self) -> int | None:
        """Tokens of a training sample; None if it is not recorded."""
        return self._recipe("data").get("seq_len")

    @property
    def seed(self) -> int | None:
        return self._recipe("train").get("seed")

    @property
    def tokens(self) -> int | None:
        """The number of tokens that it was trained on."""
        return self.manifest.get("tokens")

    def _recipe(self, section: str) -> dict[str, Any]:
        return (self.manifest.get("config") or {}).get(section) or {}

    @cached_property
    def train_length(self) -> int:
        """Tokens of a training sample; if not recorded, the model's block size."""
        return self.seq_len or read_json_object(self.folder / MODEL_CONFIG)["block_size"]

    @property
    def weights(self) -> str:
        """A fingerprint of the checkpoint's files, weights among them."""
        hashes = json.dumps(self.manifest.get("sha256", {}), sort_keys=True)
        return hashlib.sha256(hashes.encode()).hexdigest()


class ModelFolder(Checkpoint):
    """A model without a run: what `lingpt export` wrote, or a model of transformers that LinGPT reads. Its
    scores lie in its `eval/`."""

    @classmethod
    def open(cls, folder: str | Path) -> "ModelFolder":
        """UserError if LinGPT cannot read the model, or there is no tokenizer beside it."""
        folder = Path(folder)
        config = read_model_config(folder)
        if not (folder / TOKENIZER).is_file():
            raise UserError(f"{folder} has no {TOKENIZER}: copy that of the run into it")
        attention = config.attention if isinstance(config.attention, str) else tuple(config.attention)
        return cls(folder, folder.resolve(), 0, config.name, attention)

    @property
    def name(self) -> str:
        return self.run.name

    @cached_property
    def _config(self) -> Config:
        return read_model_config(self.folder)

    @cached_property
    def form(self) -> str:
        return attention_form(self.attention, self._config.to_dict())

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return {}

    @cached_property
    def dtype(self) -> str:
        config = read_json_object(self.folder / MODEL_CONFIG)
        return config.get("dtype") or config.get("torch_dtype") or super().dtype

    @cached_property
    def parameters(self) -> int:
        return GPT.on_meta(self._config).num_parameters()

    @cached_property
    def train_length(self) -> int:
        return self._config.block_size

    @cached_property
    def weights(self) -> str:
        hashes = hashlib.sha256()
        decides = (MODEL_CONFIG, "tokenizer*.json", "*.safetensors", "*.bin")
        for path in sorted(path for pattern in decides for path in self.folder.glob(pattern)):
            with read_errors(path), path.open("rb") as file:
                hashes.update(hashlib.file_digest(file, "sha256").digest())
        return hashes.hexdigest()


def find_checkpoints(
    root: str | Path,
    model: str | None = None,
    runs: Iterable[str | Path] = (),
    left_out: Callable[[str], None] = name_on_stderr,
) -> list[Checkpoint]:
    """The checkpoints that `lingpt eval` evaluates.

    Args:
        root: the folder of runs.
        model: selects the newest run of each attention form of this model; by default the newest run's model.
        runs: evaluate all of these runs (or checkpoint folders of runs, or model folders) instead, each once.
        left_out: called with a line on each run that cannot be read, which is skipped.

    Raises UserError if nothing can be evaluated, naming what can.
    """
    if runs := list(runs):
        return list(dict.fromkeys(skip_failing(_require_checkpoint, [Path(run) for run in runs], left_out)))
    every = [path.parent for path in sorted(Path(root).glob(f"*/{CONFIG}"))]

    def newest_of(run: Path) -> Checkpoint | None:
        """The run's newest whole checkpoint; None if it has none yet."""
        newest = newest_checkpoint(run)
        return Checkpoint.open(newest) if newest else None

    newest_of_each = skip_failing(newest_of, every, left_out)
    found = sorted((c for c in newest_of_each if c is not None), key=_time, reverse=True)
    if not found:
        raise UserError(f"no run with a checkpoint in {root}: train one first (lingpt train), or give --runs")
    models = list(dict.fromkeys(checkpoint.model for checkpoint in found))
    model = model or models[0]
    if model not in models:
        raise UserError(
            f"no run of {model} with a checkpoint in {root}{nearest(model, models)}: there are "
            f"{', '.join(sorted(models))}"
        )
    newest: dict[tuple[str | tuple[str, ...], str], Checkpoint] = {}
    for checkpoint in found:
        if checkpoint.model == model:
            newest.setdefault((checkpoint.attention, checkpoint.form), checkpoint)
    for checkpoint in newest.values():
        warn_skipped_checkpoints(checkpoint.folder)
    return sorted(newest.values(), key=lambda checkpoint: checkpoint.form)


def _require_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that a `--runs` argument names."""
    if checkpoint_step(path) is not None:
        return Checkpoint.open(path)
    if not path.is_dir():
        raise UserError(f"no run at {path}")
    if not (path / CONFIG).exists() and (within := sorted(path.glob(f"*/{CONFIG}"))):
        names = ", ".join(config.parent.name for config in within)
        raise UserError(f"{path} is a folder of runs ({names}), and no run: give some of them, {path}/…")
    if is_model_folder(path):
        return ModelFolder.open(path)
    return Checkpoint.open(require_newest_checkpoint(path))


def _time(checkpoint: Checkpoint) -> int:
    weights = SHARDS if is_sharded(checkpoint.folder) else WEIGHTS
    return (checkpoint.folder / weights).stat().st_mtime_ns
