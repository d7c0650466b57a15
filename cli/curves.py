"""`lingpt curves`: the loss curves of runs as one picture, and the table of time-to-loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lingpt.common.files import write_errors, write_json
from lingpt.common.options import Option
from lingpt.plots.curve_figure import draw_curves
from lingpt.plots.curves import find_runs, format_table


@dataclass
class Options:
    """Draw the loss curves of runs, and print how long each took to the losses that all of them reach."""

    # fmt: off
    runs: Annotated[tuple[str, ...], Option(
        "folders of runs, or of studies (default: the runs in runs/, or those of its only study)",
        positional=True)] = ()
    baseline: Annotated[str | None, Option("run that times are relative to (default: the first)")] = None
    val: Annotated[str | None, Option(
        "a name in the runs' --data.val_sources: draw the losses on that text")] = None
    formats: Annotated[tuple[str, ...], Option(
        "more formats to write besides that of --out, such as pdf svg")] = ("pdf",)
    out: Annotated[str, Option("figure to write; the table goes next to it as JSON")] = "curves.png"
    # fmt: on


def run(options: Options) -> None:
    folders = find_runs(options.runs)
    rows = draw_curves(folders, options.out, options.baseline, options.formats, options.val)
    table = Path(options.out).with_suffix(".json")
    with write_errors(table):
        write_json(table, {"runs": [str(folder) for folder in folders], "time_to_loss": rows})
    print(format_table(rows, options.baseline) if options.baseline else format_table(rows))
    print(f"\nplot   {options.out}\ntable  {table}")
