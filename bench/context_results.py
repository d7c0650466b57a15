"""The results of `lingpt bench context`: a JSON file, a table, and a figure over length and devices."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lingpt.bench.results import BenchResults, BenchRow, length_axis, made_on, markdown, missing, number
from lingpt.common.format import join_distinct
from lingpt.plots.figures import add_caption, legend_beside, new_figure, save_formats
from lingpt.plots.palette import MARKERS, line_styles

COLUMNS = (
    "model", "kind", "attention", "N", "devices", "first loss", "tokens/s a device", "of one", "planned",
    "ratio", "GB a device", "planned", "ratio", "sending", "planned",
)  # fmt: skip


@dataclass
class Row(BenchRow):
    """A run of one attention: `devices` processes, and over how many of them a sequence is divided. Rates and
    memory are a device's.

    status: "wrong" (the first loss is not that of one device), or one of BenchRow's.
    planned_…: a dry run's estimates. sending: the share of a step that each kind of communication takes,
    of one rank.
    """

    KEY: ClassVar[tuple[str, ...]] = ("model", "kind", "attention", "seq_len", "devices")

    model: str
    kind: str
    attention: str
    seq_len: int
    devices: int
    context_parallel: int = 1
    batch: int = 1  # sequences of a step
    steps: int = 0
    options: str = ""  # of `lingpt train`, beyond those of the kind
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float | None = None
    planned_tokens_per_second: float | None = None
    peak_memory: float | None = None  # bytes
    planned_memory: int | None = None
    sending: dict[str, float] = field(default_factory=dict)
    planned_sending: float | None = None

    def line(self) -> str:
        what = f"{self.kind} {self.attention} N = {self.seq_len:,} on {self.devices}"
        if self.status != "ok" or not self.losses:
            return f"{what}: {self.failure}"
        rate = f", {self.tokens_per_second:,.0f} tokens/s a device" if self.tokens_per_second else ""
        if self.sending:
            rate += f", sending {sum(self.sending.values()):.1%} (planned {self.planned_sending or 0:.1%})"
        return f"{what}: first loss {self.losses[0]:.5f}{rate}"


@dataclass
class Results(BenchResults[Row]):
    """The environment, and a row for each run."""

    ROW = Row
    COMMAND = "lingpt bench context"
    NAME = "context"

    def of_one(self, row: Row) -> float | None:
        """The row's rate over that of `one`, the base length on one device; None if they are of two calls."""
        for one in self.rows:
            if (one.kind, one.model, one.attention, one.session) == (
                "one", row.model, row.attention, row.session,
            ):  # fmt: skip
                return _ratio(row.tokens_per_second, one.tokens_per_second)
        return None

    def as_dict(self, row: Row) -> dict[str, Any]:
        return super().as_dict(row) | {"of_one": self.of_one(row)}

    def table(self) -> str:
        return (
            f"# Sequences over several devices\n\n{made_on(self.environment)}.\n\n"
            "one: the base length on one device; ddp: the same on each; first: only the first loss, which is "
            "that of one device; pieces: each sequence over all. Of one: the rate over that of `one`. "
            "Planned: what a dry run foretells, and the ratio to it. Sending: the share of a step of rank 0, "
            "with the time in which it waits for the others.\n\n"
            + markdown(COLUMNS, [self._cells(row) for row in self.rows])
        )

    def _cells(self, row: Row) -> list[str]:
        cells = [row.model, row.kind, row.attention, f"{row.seq_len:,}", str(row.devices)]
        if row.status != "ok" or not row.losses:
            return [*cells, row.failure]
        cells.append(f"{row.losses[0]:.5f}")
        if row.kind == "first":
            return cells
        return [
            *cells,
            number(row.tokens_per_second, ",.0f"),
            number(self.of_one(row), ".3f"),
            number(row.planned_tokens_per_second, ",.0f"),
            number(_ratio(row.tokens_per_second, row.planned_tokens_per_second), ".2f"),
            number(row.peak_memory, ".1f", 1e9),
            number(row.planned_memory, ".1f", 1e9),
            number(_ratio(row.peak_memory, row.planned_memory), ".2f"),
            ", ".join(f"{kind} {share:.1%}" for kind, share in row.sending.items()) or "–",
            number(row.planned_sending, ".1%"),
        ]

    def draw(self, folder: Path) -> list[Path]:
        """Rate and memory of a device over N, as measured and as planned."""
        rows = [row for row in self.rows if row.tokens_per_second]
        if not rows:
            return []
        figure = new_figure(11, 4.2, dpi=130)
        rate, memory = figure.subplots(1, 2)
        _draw_panel(rate, rows, "k tokens/s a device", "tokens_per_second", "planned_tokens_per_second", 1e3)
        _draw_panel(memory, rows, "GB a device", "peak_memory", "planned_memory", 1e9)
        legend_beside(figure, *rate.get_legend_handles_labels())
        models = join_distinct(row.model for row in rows)
        note = missing(row.tokens_per_second for row in self.rows if row.kind != "first")
        about = f"{models}; hollow: what the plan foretells. {note}\n{made_on(self.environment)}."
        add_caption(figure, about)
        return save_formats(figure, folder, "context")


def _draw_panel(panel: Any, rows: list[Row], label: str, measured: str, planned: str, unit: float) -> None:
    forms = list(dict.fromkeys((row.model, row.attention) for row in rows))
    styles = dict(zip(forms, line_styles([attention for _, attention in forms]), strict=True))
    counts, one_model = sorted({row.devices for row in rows}), len({row.model for row in rows}) == 1
    for model, attention, devices in dict.fromkeys((row.model, row.attention, row.devices) for row in rows):
        mine = [r for r in rows if (r.model, r.attention, r.devices) == (model, attention, devices)]
        mine.sort(key=lambda row: row.seq_len)
        lengths = [row.seq_len for row in mine]
        style = styles[model, attention] | {"marker": MARKERS[counts.index(devices) % len(MARKERS)]}
        hollow = style | {"linestyle": "none", "fillstyle": "none"}
        name = f"{attention} on {devices}" if one_model else f"{model} {attention} on {devices}"
        panel.plot(lengths, _in(unit, mine, measured), label=name, **style)
        panel.plot(lengths, _in(unit, mine, planned), **hollow)
    ticks = sorted({row.seq_len for row in rows})
    length_axis(panel, ticks, xlabel="N (tokens of a sequence)", ylabel=label)
    panel.set_ylim(bottom=0)


def _in(unit: float, rows: list[Row], name: str) -> list[float]:
    return [math.nan if getattr(row, name) is None else getattr(row, name) / unit for row in rows]


def _ratio(value: float | None, than: float | None) -> float | None:
    return value / than if value and than else None
