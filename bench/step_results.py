"""The results of `lingpt bench train`: a JSON file, a table, and a figure over the sequence length."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lingpt.bench.model_rows import ModelBenchResults, made_on, markdown, number
from lingpt.bench.rows import BenchRow
from lingpt.plots.figures import add_caption, new_figure, save_formats, style_axes
from lingpt.plots.palette import line_styles

IDENTITY, DENSE_IDENTITY, FLASH = "identity", "identity-dense", "softmax-flash"
IDENTITIES = (IDENTITY, DENSE_IDENTITY)
OUTPUT_GATE, SHORT_CONV = "ours-gated+output_gate", "ours-gated+output_gate+short_conv"
COLUMNS = (
    "model", "N", "micro-batch", "attention", "ms a step (fastest)", "k tokens/s", "MFU", "share", "× FA2",
    "memory GB", "estimate",
)  # fmt: skip


@dataclass
class Row(BenchRow):
    """One attention in one model at one sequence length. Times are medians over the rounds.

    If a later round fails, the row gets its status and keeps the times of the earlier ones.
    """

    KEY: ClassVar[tuple[str, ...]] = ("model", "seq_len", "attention")

    model: str
    seq_len: int
    attention: str
    session: str = ""  # start time of the command that measured it; unknown in older files
    kernel: str | None = None  # the attention kernel that ran
    micro_batch_size: int = 0  # sequences
    activation_checkpointing: bool = False
    tokens: int = 0  # of an optimiser step
    ms: float | None = None  # of an optimiser step
    fastest_ms: float | None = None
    by_round: list[float] = field(default_factory=list)  # each round's median
    steps: int = 0  # number of timed steps
    first_step_seconds: float | None = None  # including building the model, compiling and tuning
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory: int | None = None  # bytes on the card, after compilation
    estimated_memory: int | None = None

    def line(self) -> str:
        """The row as a line for the terminal."""
        what = f"{self.model} N = {self.seq_len}, {self.attention}"
        if self.status != "ok" or self.ms is None:
            return f"{what}: {self.status}: {self.reason}"
        return f"{what}: {self.ms:.1f} ms, {(self.tokens_per_second or 0) / 1e3:.1f} k tokens/s"


@dataclass
class Results(ModelBenchResults[Row]):
    """The environment, and a row for each attention, model and length."""

    ROW = Row
    COMMAND = "lingpt bench train"

    def times_faster(self, row: Row, than: str) -> float | None:
        """The time of `than` at the row's shape divided by the row's: the median of the rounds' ratios.

        None if one of the two was not measured, or in another session: no round has both.
        """
        other = self.row(row.model, row.seq_len, than)
        if other is None or other.session != row.session or not other.by_round or not row.by_round:
            return None
        return statistics.median(a / b for a, b in zip(other.by_round, row.by_round, strict=False))

    def as_dict(self, row: Row) -> dict[str, Any]:
        return super().as_dict(row) | {"share_of_identity": self.times_faster(row, IDENTITY)}


def table(results: Results) -> str:
    """A Markdown table with one line per row, and the conditions of the measurement."""
    head = (
        f"# A training step\n\n{made_on(results.environment)}.\n\n"
        "Share: the time of the identity over the attention's. × FA2: how many times faster than softmax by "
        "FlashAttention-2. Memory: the most that was used, and the estimate over it.\n\n"
    )
    if len({row.session for row in results.rows}) > 1:
        head += "Measured in several sessions (`--append`): share and × FA2 are taken within one.\n\n"
    if note := _recomputed_lengths(results):
        head += f"{note}, as one sequence does not fit without it.\n\n"
    return head + markdown(COLUMNS, [_cells(row, results) for row in _sorted(results)])


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
        return [*cells, f"{row.status}: {row.reason.replace('|', '/')}"]
    ratio = row.estimated_memory / row.peak_memory if row.estimated_memory and row.peak_memory else None
    failed = "" if row.status == "ok" else f", then {row.status}: {row.reason.replace('|', '/')}"
    return [
        *cells,
        f"{row.ms:.1f} ({row.fastest_ms:.1f}){failed}",
        f"{row.tokens_per_second / 1e3:.1f}",
        number(row.mfu, ".3f"),
        number(results.times_faster(row, IDENTITY), ".3f"),
        number(results.times_faster(row, FLASH), ".2f"),
        number(row.peak_memory and row.peak_memory / 1e9, ".1f"),
        number(ratio, ".2f"),
    ]


def draw(results: Results, folder: Path) -> list[Path]:
    """Draws the speed-up over FlashAttention-2 against N, one panel per model with several lengths:
    the figure `speed-up` in the folder. Returns its paths; none if there is nothing to draw."""
    panels = {model: lines for model in _models(results) if (lines := _speed_ups(results, model))}
    if not panels:
        return []
    figure = new_figure(6.4 * len(panels), 4.6, dpi=130)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (model, lines) in zip(axes, panels.items(), strict=True):
        for (name, points), style in zip(lines.items(), line_styles(list(lines)), strict=True):
            x, y = zip(*points, strict=True)
            width = 2.5 if name.startswith("ours") else 1.3
            panel.plot(x, y, label=name, linewidth=width, markersize=4, **style)
        ticks = sorted({n for points in lines.values() for n, _ in points})
        panel.set(xscale="log", yscale="log", title=model, xlabel="N (tokens of a sequence)")
        panel.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
        low, high = panel.get_ylim()
        marks = [y for y in (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30) if low <= y <= high]
        panel.set_yticks(marks, [f"{y:g}×" for y in marks])
        panel.minorticks_off()
        style_axes(panel)
    axes[0].set_ylabel("a training step, × as fast as by FlashAttention-2")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8, handlelength=4)
    batches = " and ".join(f"{tokens:,}" for tokens in sorted({row.tokens for row in results.rows if row.ms}))
    note = f" {note}." if (note := _recomputed_lengths(results)) else ""
    add_caption(figure, f"{batches} tokens a step.{note}\n{made_on(results.environment)}.")
    return save_formats(figure, folder, "speed-up")


def _recomputed_lengths(results: Results) -> str:
    """`At N = 131,072 blocks are recomputed (activation checkpointing)`; empty if no row has it."""
    lengths = sorted({row.seq_len for row in results.rows if row.activation_checkpointing})
    names = " and ".join(f"{length:,}" for length in lengths)
    return f"At N = {names} blocks are recomputed (activation checkpointing)" if lengths else ""


def _models(results: Results) -> list[str]:
    return list(dict.fromkeys(row.model for row in results.rows))


def _speed_ups(results: Results, model: str) -> dict[str, list[tuple[int, float]]]:
    """Attention → [(N, speed-up over FlashAttention-2)]; empty unless one has two lengths or more."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in _sorted(results):
        if row.model == model and (ratio := results.times_faster(row, FLASH)):
            lines.setdefault(row.attention, []).append((row.seq_len, ratio))
    return lines if any(len(points) > 1 for points in lines.values()) else {}
