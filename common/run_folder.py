"""What a run's folder holds. `train` writes it; `eval`, `curves` and whoever goes on with a run read it.

    runs/<name>/
        config.yaml                  the resolved recipe
        environment.json             versions, hardware, git revision; of earlier starts too
        metrics.jsonl                the losses, a JSON object a line
        checkpoints/step-00000300/
            model.safetensors, config.json, tokenizer.json
            train_state.pt           optimizer and random states
            manifest.json            progress, recipe, fingerprint of the data, the size of every file
        eval/step-00000300.json      scores
        samples.txt, curves.png, wandb/

A checkpoint is whole when its manifest, which is written last, is there and every file has the size it names.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import read_yaml, write_json

CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
SAMPLES, CURVES = "samples.txt", "curves.png"
CHECKPOINTS, EVAL, WANDB = "checkpoints", "eval", "wandb"
WEIGHTS, TRAIN_STATE, MANIFEST = "model.safetensors", "train_state.pt", "manifest.json"
_STEP = re.compile(r"step-(\d+)")


def attention_label(attention: str | Sequence[str]) -> str:
    """The attention as one word; a hybrid's distinct mechanisms joined by `+`."""
    return attention if isinstance(attention, str) else "+".join(dict.fromkeys(attention))


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for a folder that is not named as one."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def scores_file(run: Path, step: int) -> Path:
    """Where the scores of the checkpoint of `step` are kept."""
    return run / EVAL / f"step-{step:08d}.json"


def checkpoints(run: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    return [folder for folder in _named_checkpoints(run) if read_manifest(folder) is not None]


def newest_checkpoint(run: Path) -> Path | None:
    """The run's whole checkpoint with the highest step; None where it has none."""
    whole = checkpoints(run)
    return whole[-1] if whole else None


def broken_checkpoints(run: Path) -> list[Path]:
    """Folders that carry a checkpoint's name and are not whole."""
    return [folder for folder in _named_checkpoints(run) if read_manifest(folder) is None]


def _named_checkpoints(run: Path) -> list[Path]:
    steps = [(step, f) for f in (run / CHECKPOINTS).glob("*") if (step := checkpoint_step(f)) is not None]
    return [folder for _, folder in sorted(steps)]


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """The checkpoint's manifest; None where the checkpoint is not whole."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        sizes = manifest["files"].items()
        whole = all((checkpoint / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def write_manifest(checkpoint: Path, values: dict[str, Any]) -> None:
    """Makes `checkpoint` whole: `values`, and the size of every file that is in it by now."""
    files = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir()) if path.name != MANIFEST}
    write_json(checkpoint / MANIFEST, {**values, "files": files})


def read_config(run: Path) -> dict[str, Any]:
    """The run's resolved recipe. UserError, naming the file, where it cannot be read."""
    config = read_yaml(run / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{run / CONFIG} does not hold a run's recipe")
    return config


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The run's lines, oldest first; a last line that a crash cut short is left out."""
    path = run / METRICS
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
