"""The results of `lingpt bench decode`: a JSON file, a table, and a figure over the context length."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lingpt.bench.results import BenchResults, BenchRow, length_axis, made_on, markdown, missing, number
from lingpt.common.format import scaled
from lingpt.plots.figures import add_caption, legend_beside, new_figure, save_formats
from lingpt.plots.palette import DASHES, line_styles

COLUMNS = (
    "model", "attention", "batch", "context", "step", "ms a token (fastest)", "tokens/s",
    "of it the draw, ms", "state of a sequence, MB", "memory GB",
)  # fmt: skip
TICKS = {  # unit → ticks of a panel's axis
    "ms": tuple(digit * 10.0**n for n in range(-1, 4) for digit in (1, 1.5, 2, 3, 5, 7)),
    "MB": tuple(digit * 10.0**n for n in range(-2, 7) for digit in (1, 3)),
}


@dataclass
class DecodeRow(BenchRow):
    """One attention in one model at one batch size and context; the last timed token fills the context."""

    KEY: ClassVar[tuple[str, ...]] = ("model", "attention", "batch_size", "context", "graph", "transformers")

    model: str
    attention: str
    batch_size: int
    context: int  # tokens of each sequence
    graph: bool = False  # whether the step is the replay of a CUDA graph
    transformers: bool = False  # whether transformers' `generate` made the tokens
    ms: float | None = None  # per token (one for each sequence of the batch): the model's step and sampling
    fastest_ms: float | None = None
    draw_ms: float | None = None  # of sampling alone
    tokens: int = 0  # number of timed tokens
    state_bytes: int | None = None  # of the decoding state of one sequence
    # Bytes on the card: weights, states and temporary memory of a step; of transformers also of its prompt.
    peak_memory: int | None = None

    @property
    def step(self) -> str:
        return "transformers" if self.transformers else "graph" if self.graph else "eager"

    def line(self) -> str:
        what = f"{self.model} {self.attention}, batch {self.batch_size}, context {self.context}, {self.step}"
        if self.ms is None or self.state_bytes is None:
            return f"{what}: {self.failure}"
        return f"{what}: {self.ms:.2f} ms a token, {scaled(self.state_bytes, 'B')} of state a sequence"


@dataclass
class DecodeResults(BenchResults[DecodeRow]):
    """The environment, and a row for each attention, batch size and context."""

    ROW = DecodeRow
    COMMAND = "lingpt bench decode"
    NAME = "decode"

    def table(self) -> str:
        head = (
            f"# Decoding\n\n{made_on(self.environment)}.\n\n"
            "A token as `lingpt generate` makes it, of a model with random weights: a step through the "
            "decoding state (the replay of a CUDA graph, or eager), and the draw; or one of transformers' "
            "`generate` with the exported model. One for each sequence of "
            "the batch; the median, and the fastest. State: what decoding carries for a sequence as long as "
            "the context. Memory: the most that was used, with the weights.\n\n"
        )
        return head + markdown(COLUMNS, list(map(_cells, self.rows)))

    def draw(self, folder: Path) -> list[Path]:
        """Time and size of the state over the context, two panels per model."""
        rows = [row for row in self.rows if row.ms is not None]
        models = list(dict.fromkeys(row.model for row in rows))
        if not rows:
            return []
        figure = new_figure(13.6, 4.2 * len(models), dpi=130)
        panels = figure.subplots(len(models), 2, squeeze=False)
        for axes, model in zip(panels, models, strict=True):
            _draw_model([row for row in rows if row.model == model], *axes)
            axes[0].set_title(f"{model}: time of a token")
            axes[1].set_title(f"{model}: decoding state of a sequence")
        legend_beside(figure, *panels[0][0].get_legend_handles_labels())
        note = missing(row.ms for row in self.rows)
        add_caption(figure, f"A model with random weights; medians. {note}\n{made_on(self.environment)}.")
        return save_formats(figure, folder, "decode")


def _cells(row: DecodeRow) -> list[str]:
    cells = [row.model, row.attention, str(row.batch_size), str(row.context), row.step]
    if row.ms is None or row.state_bytes is None:
        return [*cells, row.failure]
    return [
        *cells,
        f"{row.ms:.2f} ({row.fastest_ms:.2f})",
        f"{1e3 * row.batch_size / row.ms:.0f}",
        number(row.draw_ms, ".2f"),
        f"{row.state_bytes / 1e6:.2f}",
        number(row.peak_memory, ".1f", 1e9),
    ]


def _draw_model(rows: list[DecodeRow], times: Any, states: Any) -> None:
    """Draws a line for each attention; in `times` also for each batch size and kind of step, by dashes."""
    attentions, batch_sizes, contexts, steps = (
        list(dict.fromkeys(getattr(row, name) for row in rows))
        for name in ("attention", "batch_size", "context", "step")
    )
    kinds = list(itertools.product(batch_sizes, steps))
    styles = dict(zip(attentions, line_styles(attentions), strict=True))
    with_state: set[str] = set()
    for attention, (batch, step) in itertools.product(attentions, kinds):
        style = styles[attention] | {"linestyle": DASHES[kinds.index((batch, step)) % len(DASHES)]}
        own = sorted(
            (row for row in rows if (row.attention, row.batch_size, row.step) == (attention, batch, step)),
            key=lambda row: row.context,
        )
        if not own:
            continue
        x, label = [row.context for row in own], f"{attention}, batch {batch}"
        label += f", {step}" if len(steps) > 1 else ""
        times.plot(x, [row.ms for row in own], label=label, markersize=4, linewidth=1.5, **style)
        if attention not in with_state:
            with_state.add(attention)
            y = [(row.state_bytes or 0) / 1e6 for row in own]
            states.plot(x, y, markersize=4, linewidth=1.5, **style)
    for panel, what, unit in ((times, "time", "ms"), (states, "state", "MB")):
        length_axis(panel, contexts, yscale="log", xlabel="context (tokens)", ylabel=f"{what} ({unit})")
        low, high = panel.get_ylim()
        ticks = [y for y in TICKS[unit] if low <= y <= high]
        panel.set_yticks(ticks, [f"{y:g}" for y in ticks])
