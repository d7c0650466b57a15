"""The results of `lingpt bench train`: a JSON file, a table, and figures over the sequence length."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lingpt.bench.results import BenchResults, BenchRow, in_k, length_axis, made_on, markdown, missing, number
from lingpt.common.format import join_distinct
from lingpt.plots.figures import add_caption, legend_beside, new_figure, save_figures
from lingpt.plots.palette import line_styles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IDENTITY, DENSE_IDENTITY, FLASH = "identity", "identity-dense", "softmax-flash"
IDENTITIES = (IDENTITY, DENSE_IDENTITY)
OUTPUT_GATE, SHORT_CONV = "ours-gated+output_gate", "ours-gated+output_gate+short_conv"
COLUMNS = (
    "model", "N", "micro-batch", "attention", "ms a step (fastest)", "k tokens/s", "MFU", "share", "× FA2",
    "memory GB", "estimate",
)  # fmt: skip


@dataclass
class Row(BenchRow):
    """One attention in one model at one sequence length."""

    KEY: ClassVar[tuple[str, ...]] = ("model", "seq_len", "attention")

    model: str
    seq_len: int
    attention: str
    kernel: str | None = None  # the attention kernel that ran
    micro_batch_size: int = 0  # sequences
    activation_checkpointing: bool = False
    tokens: int = 0  # of an optimiser step
    ms: float | None = None  # of an optimiser step
    fastest_ms: float | None = None
    steps: int = 0  # number of timed steps
    first_step_seconds: float | None = None  # including building the model, compiling and tuning
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None  # bytes on the card, after compilation
    estimated_memory: int | None = None

    def line(self) -> str:
        what = f"{self.model} N = {self.seq_len}, {self.attention}"
        if self.status != "ok" or self.ms is None:
            return f"{what}: {self.failure}"
        return f"{what}: {self.ms:.1f} ms, {(self.tokens_per_second or 0) / 1e3:.1f} k tokens/s"


@dataclass
class Results(BenchResults[Row]):
    """The environment, and a row for each attention, model and length."""

    ROW = Row
    COMMAND = "lingpt bench train"
    NAME = "bench"

    def times_faster(self, row: Row, than: str) -> float | None:
        """The time of `than` at the row's shape divided by the row's; None if they cannot be compared."""
        return self.ratio(self.row(row.model, row.seq_len, than), row)

    def as_dict(self, row: Row) -> dict[str, Any]:
        return super().as_dict(row) | {"share_of_identity": self.times_faster(row, IDENTITY)}

    def table(self) -> str:
        head = (
            f"# A training step\n\n{made_on(self.environment)}.\n\n"
            "Share: the time of the identity over the attention's. × FA2: how many times faster than softmax "
            "by FlashAttention-2. Memory: the most that was used, and the estimate over it.\n\n"
        )
        if len({row.session for row in self.rows}) > 1:
            head += "Measured in several sessions (`--append`): share and × FA2 are taken within one.\n\n"
        if note := _recomputed_lengths(self):
            head += f"{note}, as one sequence does not fit without it.\n\n"
        return head + markdown(COLUMNS, [_cells(row, self) for row in _sorted(self)])

    def draw(self, folder: Path) -> list[Path]:
        """Draws the figures `speed-up` and `throughput`, with the models that have several lengths."""
        return save_figures({"speed-up": _speed_up(self), "throughput": _throughput(self)}, folder)


def _speed_up(results: Results) -> "Figure | None":
    """The speed-up over FlashAttention-2 against N, a panel for each model."""

    def ratio(row: Row) -> float | None:
        return results.times_faster(row, FLASH)

    panels = {model: lines for model in _models(results) if (lines := _over_lengths(results, model, ratio))}
    if not panels:
        return None
    figure = new_figure(6.4 * len(panels), 4.6, dpi=130)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (model, lines) in zip(axes, panels.items(), strict=True):
        _draw_lines(panel, lines)
        panel.set(yscale="log", title=model, xlabel="N (tokens of a sequence)")
        low, high = panel.get_ylim()
        marks = [y for y in (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30) if low <= y <= high]
        panel.set_yticks(marks, [f"{y:g}×" for y in marks])
        panel.minorticks_off()
    axes[0].set_ylabel("a training step, × as fast as by FlashAttention-2")
    return _with_legend(results, figure, axes[0], [ratio(row) for row in results.rows if row.model in panels])


def _throughput(results: Results) -> "Figure | None":
    """Tokens a second and memory over N and micro-batch, a row of panels for each model: GLA's figure 6."""
    fields: dict[str, Callable[[Row], float | None]] = {
        "throughput (k tokens/s)": lambda row: row.tokens_per_second and row.tokens_per_second / 1e3,
        "peak memory (GB)": lambda row: row.peak_memory and row.peak_memory / 1e9,
    }
    models = [m for m in _models(results) if all(_over_lengths(results, m, f) for f in fields.values())]
    if not models:
        return None
    figure = new_figure(12, 4 * len(models) + 0.6, dpi=130)
    axes = figure.subplots(len(models), len(fields), squeeze=False)
    for panels, model in zip(axes, models, strict=True):
        sizes = {row.seq_len: row.micro_batch_size for row in _sorted(results) if row.model == model}
        for panel, (label, value) in zip(panels, fields.items(), strict=True):
            _draw_lines(panel, _over_lengths(results, model, value))
            panel.set_xticks(list(sizes), [f"{in_k(n)}×{size}" for n, size in sizes.items()])
            panel.set(title=model, xlabel="N × micro-batch", ylabel=label)
            panel.set_ylim(bottom=0)
    return _with_legend(results, figure, axes[0, 0], [row.ms for row in results.rows if row.model in models])


def _sorted(results: Results) -> list[Row]:
    """The rows sorted by model (in order of appearance), then by length."""
    models = _models(results)
    return sorted(results.rows, key=lambda row: (models.index(row.model), row.seq_len))


def _cells(row: Row, results: Results) -> list[str]:
    recomputed = ", recomputed" if row.activation_checkpointing else ""
    micro_batch = f"{row.micro_batch_size or '–'}{recomputed}"
    cells = [row.model, str(row.seq_len), micro_batch, row.attention]
    if row.kernel and row.kernel not in row.attention:
        cells[-1] += f" ({row.kernel})"
    if row.ms is None or row.tokens_per_second is None:
        return [*cells, row.failure]
    ratio = row.estimated_memory / row.peak_memory if row.estimated_memory and row.peak_memory else None
    failed = f", then {row.failure}" if row.failure else ""
    return [
        *cells,
        f"{row.ms:.1f} ({row.fastest_ms:.1f}){failed}",
        f"{row.tokens_per_second / 1e3:.1f}",
        number(row.mfu, ".3f"),
        number(results.times_faster(row, IDENTITY), ".3f"),
        number(results.times_faster(row, FLASH), ".2f"),
        number(row.peak_memory, ".1f", 1e9),
        number(ratio, ".2f"),
    ]


def _draw_lines(panel: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    """A line for each attention over the lengths, on a logarithmic axis."""
    for (name, points), style in zip(lines.items(), line_styles(list(lines)), strict=True):
        x, y = zip(*points, strict=True)
        width = 2.5 if name.startswith("ours") else 1.3
        panel.plot(x, y, label=name, linewidth=width, markersize=4, **style)
    ticks = sorted({n for points in lines.values() for n, _ in points})
    length_axis(panel, ticks)


def _with_legend(results: Results, figure: "Figure", panel: Any, drawn: Iterable[float | None]) -> "Figure":
    """The figure of these values with the panel's legend and a caption."""
    legend_beside(figure, *panel.get_legend_handles_labels())
    batches = join_distinct(sorted({row.tokens for row in results.rows if row.ms}))
    note = f" {note}." if (note := _recomputed_lengths(results)) else ""
    about = f"{batches} tokens a step.{note} {missing(drawn)}"
    add_caption(figure, f"{about}\n{made_on(results.environment)}.")
    return figure


def _recomputed_lengths(results: Results) -> str:
    """`At N = 131,072 blocks are recomputed (activation checkpointing)`; empty if no row has it."""
    lengths = sorted({row.seq_len for row in results.rows if row.activation_checkpointing})
    return (
        f"At N = {join_distinct(lengths)} blocks are recomputed (activation checkpointing)" if lengths else ""
    )


def _models(results: Results) -> list[str]:
    return list(dict.fromkeys(row.model for row in results.rows))


def _over_lengths(
    results: Results, model: str, value: Callable[[Row], float | None]
) -> dict[str, list[tuple[int, float]]]:
    """Attention → [(N, value)]; empty unless one has two lengths or more."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in _sorted(results):
        if row.model == model and (found := value(row)):
            lines.setdefault(row.attention, []).append((row.seq_len, found))
    return lines if any(len(points) > 1 for points in lines.values()) else {}
