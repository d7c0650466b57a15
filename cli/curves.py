"""`lingpt curves`: the loss curves of runs as one picture, and the table of time-to-loss."""

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lingpt.common.files import write_errors, write_json
from lingpt.models import attention_form
from lingpt.plots.curve_figure import draw_curves
from lingpt.plots.curves import find_runs, format_table

HELP = "Draw the loss curves of runs, and print how long each took to the losses that all of them reach."


def configure(parser: ArgumentParser) -> None:
    runs = "folders of runs, or of studies (default: the runs in runs/, or those of its only study)"
    parser.add_argument("runs", nargs="*", type=str, help=runs)
    parser.add_argument(
        "--baseline", type=str | None, help="run that times are relative to (default: the first)"
    )
    formats = "more formats to write besides that of --out, such as pdf svg"
    parser.add_argument("--formats", nargs="*", default=["pdf"], help=formats)
    parser.add_argument(
        "--out", type=str, default="curves.png", help="figure to write; the table goes next to it as JSON"
    )


def run(args: Namespace) -> None:
    folders = find_runs(args.runs)
    rows = draw_curves(folders, args.out, args.baseline, args.formats, attention_form)
    table = Path(args.out).with_suffix(".json")
    with write_errors(table):
        write_json(table, {"runs": [str(folder) for folder in folders], "time_to_loss": rows})
    print(format_table(rows, args.baseline) if args.baseline else format_table(rows))
    print(f"\nplot   {args.out}\ntable  {table}")
