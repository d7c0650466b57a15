"""Trackers of a run's numbers: `metrics.jsonl`, always, and Weights & Biases, offline unless logged in."""

import contextlib
import json
import math
import netrc
import os
import re
import uuid
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from lingpt.common.errors import one_line
from lingpt.common.files import set_aside, write_errors, write_text
from lingpt.common.run_folder import ABANDONED, METRICS, WANDB, read_metrics
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0
from lingpt.train.runs.run_lock import RunLock

CLOCKS = ("step", "tokens", "train_time")


class Trackers:
    """The trackers of a run, on rank zero; other ranks open none.

    lost: whether the run's folder was found not to be its own any more, so that nothing more is written.
    """

    def __init__(self, lock: RunLock) -> None:
        self._lock, self._trackers, self.lost = lock, list[Metrics | WandB](), False

    def open(self, recipe: Recipe, resumed_step: int) -> None:
        self._trackers.append(Metrics(recipe.run_folder, resumed_step))
        if recipe.train.wandb:
            self._trackers.append(WandB(recipe))

    def write(self, line: dict[str, Any]) -> None:
        """line: with its `kind` and the `CLOCKS`."""
        self.lost = self.lost or self._lock.is_lost
        for tracker in () if self.lost else self._trackers:
            tracker.write(line)

    def close(self) -> None:
        for tracker in () if self._lock.is_lost else self._trackers:
            tracker.close()


class Metrics:
    """Appends to `metrics.jsonl`. A resumed run first removes lines after the checkpoint's step.

    A failing disk does not end training: the lines wait in memory, in order.
    """

    def __init__(self, run: Path, resumed_step: int) -> None:
        self._path = run / METRICS
        lines = read_metrics(run)
        kept = [line for line in lines if line["step"] <= resumed_step and resumed_step > 0]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        with write_errors(self._path):
            if lines and not kept:  # from a start without a checkpoint, or whose checkpoints are gone
                print_rank0(f"the metrics of the start before are now {set_aside(self._path, ABANDONED)}")
            write_text(self._path, text)
        self._size = len(text.encode())  # bytes in the file
        self._waiting, self._failed = b"", False

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line immediately; numbers that are not finite become null (JSON has no NaN)."""
        self._waiting += (json.dumps(finite(line)) + "\n").encode()
        try:
            self._append()
        except OSError as error:
            if not self._failed:
                reason = error.strerror or error
                print_rank0(
                    f"{self._path} cannot be written ({reason}); its lines wait, and training goes on"
                )
            self._failed = True

    def close(self) -> None:
        """Writes the remaining lines; UserError if they cannot be written."""
        with write_errors(self._path):
            self._append()

    def _append(self) -> None:
        """Writes the waiting lines. Opens the file each time, as its disk may have gone and come back."""
        if not self._waiting:
            return
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            self._size = min(self._size, os.fstat(handle).st_size)
            while self._waiting:
                written = os.pwrite(handle, self._waiting, self._size)
                self._size, self._waiting = self._size + written, self._waiting[written:]
        finally:
            os.close(handle)
        if self._failed:
            print_rank0(f"{self._path} is written again")
        self._failed = False


def finite(line: dict[str, Any]) -> dict[str, Any]:
    """The line with null for numbers that are not finite."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


PANELS = {"train_time": "loss over time", "tokens": "loss over tokens", "step": "loss over steps"}  # by axis
WandBMode = Literal["online", "offline", "disabled", "shared"]


def wandb_mode() -> WandBMode:
    """`WANDB_MODE` if it is set; else online for a user who is logged in, and offline for all others.

    Looks for the key where wandb does (environment, then the netrc file), without a prompt or network access.
    """
    if mode := os.environ.get("WANDB_MODE"):
        return cast(WandBMode, mode)  # wandb reports an invalid one
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for path in [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return "online"
        except (OSError, netrc.NetrcParseError):
            continue
    return "offline"


class WandB:
    """A Weights & Biases run with a permanent id, grouped by model or by study.

    The losses are logged three times, over training time, tokens and steps: its panels are the paper's figure
    5.

    It gets the lines of metrics.jsonl, each at its step; for a resumed run also earlier lines that it lacks.
    Tracking must not end a run: if wandb fails, one line says so and metrics.jsonl continues.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._run = None
        folder = recipe.run_folder / WANDB
        try:
            import wandb

            folder.mkdir(exist_ok=True)
            self._run = wandb.init(
                project=recipe.train.wandb_project,
                name=recipe.run_name,
                group=recipe.train.wandb_group or recipe.model.name,
                # One tag per option: wandb rejects tags of more than 64 characters.
                tags=list(dict.fromkeys([recipe.attention_label, *recipe.attention_form.split(" + ")])),
                id=_run_id(folder),
                resume="allow",
                dir=recipe.run_folder,
                config=recipe.to_dict(),
                mode=wandb_mode(),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    init_timeout=30,
                    x_disable_stats=True,
                    disable_git=True,  # a diff or a remote's URL may hold a password
                    disable_code=True,
                    # A killed run loses only its last second of the record, not its last 15.
                    x_transaction_log_flush_interval=1.0,
                ),
            )
        except Exception as error:
            print_rank0(f"wandb does not start ({one_line(error)}); {METRICS} has all numbers")
            return
        for clock in CLOCKS:
            self._run.define_metric(clock)
        for clock, panel in PANELS.items():
            self._run.define_metric(f"{panel}/*", step_metric=clock)
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "peak_memory"):
            self._run.define_metric(f"train/{name}", step_metric="train_time")
        self._run.define_metric("val/loss", step_metric="train_time")
        for line in read_metrics(recipe.run_folder):
            whole = line.keys() >= set(CLOCKS)
            if whole and line["step"] >= self._run.step:  # 0 offline; online, it is what the server has
                self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        if self._run is None:
            return
        kind = line["kind"]
        known = {key: value for key, value in finite(line).items() if value is not None}
        values = {f"{kind}/{key}": value for key, value in known.items() if key not in ("kind", *CLOCKS)}
        if "loss" in known:
            values |= {f"{panel}/{kind}": known["loss"] for panel in PANELS.values()}
        try:
            self._run.log({**values, **{key: line[key] for key in CLOCKS}}, step=line["step"])
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        try:
            if self._run is not None:
                self._run.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Handles any failure in wandb, or in the process that it runs next to this one."""
        import wandb

        self._run = None
        with contextlib.suppress(Exception):  # otherwise wandb tries it at exit, with a traceback
            wandb.teardown()
        print_rank0(
            f"wandb has failed and is left out from here on ({one_line(error)}); {METRICS} has all numbers"
        )


def _run_id(folder: Path) -> str:
    """The id that this run has had since its first start."""
    path = folder / "run_id"
    try:
        known = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        known = ""
    if not re.fullmatch(r"[\w-]{1,64}", known):  # a new run, or a damaged file
        known = uuid.uuid4().hex[:8]
        write_text(path, known)
    return known
