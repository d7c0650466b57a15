"""`lingpt replay`: looks at a step of a run: the samples of its batch, their losses, the gradient's norm."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from lingpt.common.options import Option


@dataclass
class Paths:
    """Where the data is, not which data it is."""

    # fmt: off
    source: Annotated[str | None, Option("the run's --data.source where it has moved since")] = None
    val_source: Annotated[str | None, Option("the same for --data.val_source")] = None
    tokenizer: Annotated[str | None, Option("the same for --data.tokenizer")] = None
    cache_dir: Annotated[str | None, Option("the same for --data.cache_dir")] = None
    # fmt: on


@dataclass
class Options:
    """Show what a step of a run was trained on: a loss spike, or a step that was skipped."""

    # fmt: off
    run: Annotated[str, Option("the run's folder", positional=True)]
    step: Annotated[int, Option(
        "the step, as in metrics.jsonl, later than the oldest checkpoint that the run has", least=1)]
    samples: Annotated[int, Option("number of its samples to show", least=1)] = 8
    device: Annotated[str, Option("auto, cpu, cuda, cuda:1")] = "auto"
    data: Paths = field(default_factory=Paths)
    # fmt: on


def run(options: Options) -> None:
    from lingpt.train.runs.replay import replay

    moved = {key: path for key, path in vars(options.data).items() if path is not None}
    print(replay(Path(options.run), options.step, options.samples, options.device, moved))
