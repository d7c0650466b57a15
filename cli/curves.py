"""`lingpt curves`: the loss curves of runs as one picture, and the table of time-to-loss."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lingpt.common.files import write_errors, write_json
from lingpt.common.run_folder import METRICS
from lingpt.train import draw_curves, format_table

HELP = "Draw the loss curves of runs, and print how long each took to the losses that all of them reach."


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", type=str, help="run folders (default: all in runs/)")
    parser.add_argument(
        "--baseline", type=str | None, help="run that times are relative to (default: the first)"
    )
    formats = "more formats to write besides that of --out, such as pdf svg"
    parser.add_argument("--formats", nargs="*", default=["pdf"], help=formats)
    parser.add_argument(
        "--out", type=str, default="curves.png", help="figure to write; the table goes next to it as JSON"
    )


def run(args: Namespace) -> None:
    folders = args.runs or sorted(str(path.parent) for path in Path("runs").glob(f"*/{METRICS}"))
    rows = draw_curves(folders, args.out, args.baseline, args.formats)
    table = Path(args.out).with_suffix(".json")
    with write_errors(table):
        write_json(table, {"runs": folders, "time_to_loss": rows})
    print(format_table(rows, args.baseline) if args.baseline else format_table(rows))
    print(f"\nplot   {args.out}\ntable  {table}")
