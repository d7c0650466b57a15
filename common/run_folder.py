"""The layout of a run's folder. `train` writes it; `eval`, `curves` and a resumed run read it.

    runs/<name>/
        config.yaml                  the resolved recipe
        environment.json             versions, hardware, git revision; of earlier starts too
        metrics.jsonl                the losses, a JSON object a line
        checkpoints/step-00000300/
            model.safetensors, config.json, tokenizer.json
            tokenizer_config.json    the end of a text, if tokenizer.json does not tell
            train_state.pt           optimizer and random states
            manifest.json            progress, recipe, fingerprint of the data, size and SHA-256 of every file
        eval/step-00000300.json      scores
        samples.txt, curves.png, wandb/
        profile/                     trace.json.gz and summary.txt of --train.profile
        .lock                        host and process that train here now
        .eval.lock                   held while a score is written

A checkpoint is whole when its manifest, which is written last, is there and every file has the size it names.
The manifest also has the SHA-256 of every file, and of itself. No link is followed out of a run's folder.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import (
    file_sha256,
    is_regular,
    read_bytes,
    read_errors,
    read_json_object,
    read_yaml,
    write_json,
)

CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
SAMPLES, CURVES = "samples.txt", "curves.png"
CHECKPOINTS, EVAL, WANDB, PROFILE, LOCK = "checkpoints", "eval", "wandb", "profile", ".lock"
ABANDONED = "abandoned"  # before the name of a checkpoint, or of the losses, that the run has left
# Files of a checkpoint; the first three are those of any model folder.
MODEL_CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
TRAIN_STATE, MANIFEST = "train_state.pt", "manifest.json"
_STEP = re.compile(r"step-([0-9]{8,})")


def check_links(run: Path) -> None:
    """Raises UserError if the run's folder, or that of its checkpoints, holds a symbolic link out of it: what
    is written through such a link, or removed, is not the run's."""
    root = os.path.realpath(run)
    for path in [*run.glob("*"), *run.glob(f"{CHECKPOINTS}/*")]:
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise UserError(
                f"{path} is a symbolic link that leads out of the run's folder: remove it "
                "(--train.out_dir is where runs live)"
            )


def attention_label(attention: str | Sequence[str]) -> str:
    """The attention as one word; a hybrid's distinct mechanisms joined by `+`."""
    return attention if isinstance(attention, str) else "+".join(dict.fromkeys(attention))


def without_seed(name: str) -> str:
    """The run's name without its seed: `<row>` for the runs `<row>-seed0`, `<row>-seed1`, … of a study."""
    return re.sub(r"-seed\d+$", "", name)


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def checkpoint_step(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for a folder that is not named exactly as we name them."""
    match = _STEP.fullmatch(folder.name)
    step = int(match[1]) if match else None
    return step if step is not None and checkpoint_folder(Path(), step).name == folder.name else None


def scores_file(run: Path, step: int) -> Path:
    """The path of the scores of the checkpoint of `step`."""
    return run / EVAL / f"step-{step:08d}.json"


def valid_checkpoints(run: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    return [folder for folder in all_checkpoint_folders(run) if read_manifest(folder) is not None]


def newest_checkpoint(run: Path) -> Path | None:
    """The run's whole checkpoint with the highest step; None if it has none."""
    whole = valid_checkpoints(run)
    return whole[-1] if whole else None


def require_newest_checkpoint(run: Path, warn: bool = True) -> Path:
    """`newest_checkpoint`; UserError if there is none, with what is wrong with the last one.

    warn: name newer ones that are damaged on stderr.
    """
    if newest := newest_checkpoint(run):
        if warn:
            warn_skipped_checkpoints(newest)
        return newest
    if named := all_checkpoint_folders(run):
        wrong = f"{named[-1].name} {damage(named[-1])}"
        raise UserError(f"no checkpoint of {run} can be read ({wrong}): restore one from a copy")
    if not any((run / name).exists() for name in (CONFIG, METRICS, CHECKPOINTS)):
        raise UserError(f"{run} is not a run folder: give one, such as runs/demo-ours")
    raise UserError(f"{run} has no whole checkpoint yet: train on with the same command")


def warn_skipped_checkpoints(taken: Path) -> None:
    """Prints a line on stderr for each damaged checkpoint of the run that is newer than the one `taken`."""
    step = checkpoint_step(taken) or 0
    for newer in all_checkpoint_folders(taken.parent.parent):
        if (checkpoint_step(newer) or 0) > step and read_manifest(newer) is None:
            print(f"{newer} {damage(newer)} and is passed over for {taken.name}", file=sys.stderr)


def is_model_folder(path: Path) -> bool:
    """Whether `path` holds a model itself, and is no run's folder, which has its models in `checkpoints/`."""
    return (path / MODEL_CONFIG).is_file() and not (path / CONFIG).is_file()


def find_model_folder(path: Path, verify: bool = True) -> Path:
    """The folder of the model at `path`: the newest checkpoint of a run's folder, else `path` itself.

    verify: also compare the checksums, which reads every file of a checkpoint, and name newer checkpoints
        that are damaged on stderr.

    UserError for a run without a whole checkpoint, or if the checkpoint is damaged.
    """
    if not is_model_folder(path) and ((path / CHECKPOINTS).is_dir() or (path / METRICS).is_file()):
        path = require_newest_checkpoint(path, warn=verify)
    if verify:
        check_undamaged(path)
    return path


def all_checkpoint_folders(run: Path) -> list[Path]:
    """Folders that carry a checkpoint's name, whole or not, oldest first; not copies under other names.

    UserError if they cannot be listed.
    """
    folder = run / CHECKPOINTS
    with read_errors(folder):  # glob would treat an unreadable folder as empty
        found = list(folder.iterdir()) if folder.exists() else []
    steps = [(step, path) for path in found if (step := checkpoint_step(path)) is not None]
    return [folder for _, folder in sorted(steps)]


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """The checkpoint's manifest; None if the checkpoint is not whole, or a copy under another step's name."""
    manifest, _ = _whole(checkpoint)
    return manifest


def _whole(checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
    """The manifest of a whole checkpoint; else None, and the file that is missing or has another size, in
    brackets, if it is known."""
    try:
        manifest = read_json_object(checkpoint / MANIFEST)
        sizes, step = manifest["files"], checkpoint_step(checkpoint)
        whole = manifest["sha256"].keys() == sizes.keys() and manifest["checksum"] == _checksum(manifest)
        if not whole or step not in (None, manifest["step"]):
            return None, ""
        for name, size in sizes.items():
            path = checkpoint / name
            if Path(name).name != name or not is_regular(path):
                return None, f" ({name} is {'no file of its own' if path.exists() else 'missing'})"
            if (now := path.stat().st_size) != size:
                return None, f" ({name} has {now} bytes, and was written with {size})"
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):  # the manifest is damaged
        return None, ""
    return manifest, ""


def write_manifest(checkpoint: Path, values: dict[str, Any], sha256: Mapping[str, str] | None = None) -> None:
    """Completes `checkpoint`: writes `values` and the size and SHA-256 of every file in it.

    sha256: known checksums by file name; those files are not read again.
    """
    known = sha256 or {}
    files = [path for path in sorted(checkpoint.iterdir()) if path.name != MANIFEST]
    manifest = {
        **values,
        "files": {path.name: path.stat().st_size for path in files},
        "sha256": {path.name: known.get(path.name) or file_sha256(path) for path in files},
    }
    write_json(checkpoint / MANIFEST, manifest | {"checksum": _checksum(manifest)})


def _checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest's own values, whatever their order or formatting."""
    values = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the checkpoint, as `is …`; None if every file, all of which it reads, is as it was
    written."""
    manifest, wrong_file = _whole(checkpoint)
    if manifest is None:
        return f"is not whole{wrong_file}"
    for name, checksum in manifest["sha256"].items():
        try:
            if file_sha256(checkpoint / name) != checksum:
                return f"is damaged ({name} does not match its checksum)"
        except OSError as error:
            return f"is not readable ({name}: {error.strerror})"
    return None


def check_undamaged(model: Path) -> None:
    """Raises UserError if `model` is a checkpoint and one of its files is not as it was written."""
    if (model / MANIFEST).exists() and (reason := damage(model)):
        raise UserError(f"{model} {reason}: use another checkpoint, or an undamaged copy of this one")


def read_config(run: Path) -> dict[str, Any]:
    """The run's resolved recipe; the parts that it has are dictionaries. UserError, naming the file, if it
    cannot be read."""
    config = read_yaml(run / CONFIG)
    parts = ("model", "data", "train")
    if not isinstance(config, dict) or not all(isinstance(config.get(part, {}), dict) for part in parts):
        raise UserError(f"{run / CONFIG} does not hold a run's recipe")
    return config


def read_environment(run: Path, part: str) -> dict[str, Any]:
    """One `part` (`hardware`, `data`, …) of the run's record of its latest start; empty if it is missing or
    unreadable."""
    try:
        found = read_json_object(run / ENVIRONMENT).get(part)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def read_model(run: Path) -> tuple[str, str | tuple[str, ...]]:
    """The model's name and its attention (one, or one per layer), from the run's recipe.

    UserError, naming the file, if it cannot be read or does not say.
    """
    match read_config(run).get("model"):
        case {"name": str(name), "attention": str(attention)}:
            return name, attention
        case {"name": str(name), "attention": [*layers]} if all(isinstance(layer, str) for layer in layers):
            return name, tuple(layers)
    raise UserError(f"{run / CONFIG} does not say which model the run trained: it is damaged, or no run's")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics, oldest first: objects with a `kind` (`train`, `val`, `diverged`) and a
    `step`. Empty if there is no file.

    A last line that a crash cut short is left out; so are damaged ones before it, which stderr names.
    UserError if the file exists but cannot be read.
    """
    path = run / METRICS
    content = read_bytes(path) if path.exists() else b""
    *whole, last = content.split(b"\n")
    lines = [_metrics_line(line) for line in (*whole, last)]
    damaged = [str(number) for number, line in enumerate(whole, 1) if line and lines[number - 1] is None]
    if damaged:
        numbers = ", ".join(damaged if len(damaged) <= 8 else [*damaged[:8], f"… ({len(damaged)} in all)"])
        print(f"{path} is damaged, and these lines of it are left out: {numbers}", file=sys.stderr)
    return [line for line in lines if line is not None]


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    """The line's values; None if it is damaged."""
    try:
        values = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    whole = isinstance(values, dict) and type(values.get("kind")) is str and type(values.get("step")) is int
    return values if whole else None
