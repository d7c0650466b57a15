"""`lingpt replay`: looks at a step of a run: the samples of its batch, their losses, the gradient's norm."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

PATHS = ("source", "val_source", "tokenizer", "cache_dir")  # where the data is, not which data it is
HELP = "Show what a step of a run was trained on: a loss spike, or a step that was skipped."


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=str, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="the step, as in metrics.jsonl")
    parser.add_argument("--samples", type=int, default=8, help="number of its samples to show")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    for key in PATHS:
        moved = f"the run's --data.{key} where it has moved since"
        parser.add_argument(f"--data.{key}", type=str | None, help=moved)


def run(args: Namespace) -> None:
    from lingpt.train.runs.replay import replay

    moved = {key: args[f"data.{key}"] for key in PATHS if args[f"data.{key}"] is not None}
    print(replay(Path(args.run), args.step, args.samples, args.device, moved))
