"""Where a run's numbers go: `metrics.jsonl`, always, and Weights & Biases, offline unless logged in."""

import json
import math
import netrc
import os
import uuid
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlparse

from lingpt.common.files import write_text
from lingpt.common.run_folder import METRICS, WANDB, read_metrics
from lingpt.train.config import Recipe
from lingpt.train.parallel import print_rank0


class Metrics:
    """Appends to `metrics.jsonl`. A resumed run first cuts what was written after the checkpoint's step."""

    def __init__(self, run: Path, resumed_step: int) -> None:
        kept = [line for line in read_metrics(run) if line["step"] <= resumed_step and resumed_step > 0]
        write_text(run / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(run / METRICS, "a")  # noqa: SIM115 (open as long as the run)

    def write(self, line: dict[str, Any]) -> None:
        """One line, at once; numbers that are not finite become null (JSON has no NaN)."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


WandBMode = Literal["online", "offline", "disabled", "shared"]


def wandb_mode() -> WandBMode:
    """`WANDB_MODE` where it is set; else online for a user who is logged in, and offline for all others.

    Looks for the key where wandb does (environment, then the netrc file); neither asks nor uses the network.
    """
    if mode := os.environ.get("WANDB_MODE"):
        return cast(WandBMode, mode)  # of another one wandb complains
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
    """A Weights & Biases run: grouped by model, the losses over training time, and one id for life.

    Tracking must not end a run: where wandb fails, one line says so and metrics.jsonl goes on.
    """

    def __init__(self, recipe: Recipe) -> None:
        import wandb

        self._run = None
        folder = recipe.run_folder / WANDB
        try:
            folder.mkdir(exist_ok=True)
            self._run = wandb.init(
                project=recipe.train.wandb_project,
                name=recipe.run_name,
                group=recipe.model.name,
                tags=[recipe.attention_label],
                id=_run_id(folder),
                resume="allow",
                dir=recipe.run_folder,
                config=recipe.to_dict(),
                mode=wandb_mode(),
                settings=wandb.Settings(console="off", silent=True, init_timeout=30, x_disable_stats=True),
            )
        except (wandb.errors.Error, OSError, TimeoutError) as error:
            reason = " ".join(str(error).split())
            print_rank0(f"wandb does not start ({reason}); {METRICS} has all numbers")
            return
        self._run.define_metric("train_time")
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu"):
            self._run.define_metric(f"train/{name}", step_metric="train_time")
        self._run.define_metric("val/loss", step_metric="train_time")

    def write(self, line: dict[str, Any]) -> None:
        if self._run is None:
            return
        kind, clocks = line["kind"], ("step", "tokens", "train_time")
        values = {f"{kind}/{k}": v for k, v in line.items() if k not in ("kind", *clocks) and v is not None}
        self._run.log({**values, **{k: line[k] for k in clocks}})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _run_id(folder: Path) -> str:
    """The id that this run has had from its first start on."""
    path = folder / "run_id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:8])
    return path.read_text().strip()
