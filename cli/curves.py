"""`lingpt curves`: the loss curves of runs as one picture, and the table of time-to-loss."""

import json
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lingpt.train import draw_curves, format_table

HELP = "Draw the loss curves of runs into one PNG, and print how long each took to the losses that all reach."


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=str, help="run folders; by default all of runs/")
    parser.add_argument(
        "--out", type=str, default="curves.png", help="the picture; the table goes beside it as JSON"
    )


def run(args: Namespace) -> None:
    folders = args.runs or sorted(str(path.parent) for path in Path("runs").glob("*/metrics.jsonl"))
    rows = draw_curves(folders, args.out)
    table = Path(args.out).with_suffix(".json")
    table.write_text(json.dumps({"runs": folders, "time_to_loss": rows}, indent=1))
    print(format_table(rows))
    print(f"\nplot   {args.out}\ntable  {table}")
