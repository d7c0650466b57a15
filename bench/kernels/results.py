"""The results of `lingpt bench`: their JSON file, table, and figures of sweeps and traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.kernels.implementations import CHUNKS, FORMS, IMPLEMENTATIONS
from lingpt.bench.kernels.shapes import REFERENCE, Shape
from lingpt.bench.results import BenchResults, BenchRow, in_k, made_on, markdown, number
from lingpt.plots.figures import add_caption, new_figure, save_formats, style_axes
from lingpt.plots.palette import colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("forward", "backward")
COLUMNS = (
    "shape", "implementation", "ms", "replayed, ms", "× base", "× ours", "× lower bound", "memory, U",
    "error",
)  # fmt: skip
MARKERS = "os^vDPX*<>hp"
PANELS = (
    ("forward_ms", "forward", "time (ms)"),
    ("backward_ms", "backward", "time (ms)"),
    ("both_memory", "peak memory, forward + backward", "memory beyond the inputs (GB)"),
)
TRAFFIC = {"forward_ms": 4, "backward_ms": 8}  # the least, in tensors of U bytes
AXES = {"N": "N (tokens of a sequence)", "D": "D (width of a head)"}
COLOUR_NAMES = {name: i.colour_of or name for name, i in IMPLEMENTATIONS.items()}
COLOURS = colours(COLOUR_NAMES.values())


@dataclass
class Row(BenchRow):
    """One implementation at one shape. Times are in ms, memory is in U (one [B, N, H, D] tensor).

    status: "ok" (forward only if `reason` says why there is no backward pass); "wrong" (timed once, but its
    result is not its function's: ratios do not use it), or one of BenchRow's.
    """

    KEY: ClassVar[tuple[str, ...]] = ("implementation", "shape")

    implementation: str
    shape: Shape
    dtype: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    both_ms: float | None = None  # forward and backward, one after the other
    forward_graph_ms: float | None = None  # replayed from a CUDA graph
    backward_graph_ms: float | None = None
    graph_reason: str = ""  # why there is no replay time
    forward_memory: float | None = None  # peak beyond the inputs and do
    both_memory: float | None = None
    repeats: int = 0  # runs per time and round
    # Forward and backward: replay time over that of the base (call.base_of), both replayed interleaved.
    ratio_to_base: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS of o and of each gradient
    tolerance: float = 0.0

    def is_correct(self, field: str) -> bool:
        """Whether what `field` timed was correct: a wrong gradient does not invalidate a forward time."""
        if getattr(self, field) is None:
            return False
        if self.status == "wrong" and field.startswith("forward"):
            return self.errors.get("o", float("inf")) <= self.tolerance
        return self.status == "ok"

    @property
    def unit_bytes(self) -> int:
        """U."""
        return self.shape.unit_bytes(getattr(torch, self.dtype).itemsize)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict(values | {"shape": Shape(**values["shape"])})


@dataclass
class Results(BenchResults[Row]):
    """One run: its environment, the memory bandwidth, and a row for each implementation and shape."""

    ROW = Row
    COMMAND = "lingpt bench"
    NAME = "results"

    copy_bandwidth: float = field(kw_only=True)  # bytes per second, read plus written
    # implementation → direction → bytes, from the GPU's counters
    bytes_moved: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def new(cls, here: dict[str, Any], device: torch.device) -> Self:
        size = 1 << 30 if device.type == "cuda" else 1 << 24
        return cls(here, copy_bandwidth=Clock(device).copy_bandwidth(size))

    def correct_row(self, implementation: str, shape: Shape, field: str = "both_ms") -> Row | None:
        """The cell's row, if what `field` timed is correct (by default forward and backward)."""
        row = self.row(implementation, shape)
        return row if row is not None and row.is_correct(field) else None

    def lower_bound_ms(self, shape: Shape, units: int) -> float:
        """The time of moving `units` × U at the copy bandwidth."""
        item_size = getattr(torch, self.environment.get("precision", "bfloat16")).itemsize
        return units * shape.unit_bytes(item_size) / self.copy_bandwidth * 1e3

    def as_dict(self, row: Row) -> dict[str, Any]:
        return super().as_dict(row) | {"shape": row.shape._asdict()}

    def table(self) -> str:
        """A line for each row; what runs nowhere is listed below with its reason."""
        head = (
            f"# Kernels\n\n{made_on(self.environment)}, kernels {self.environment['source_hash']}.\n\n"
            "Forward / backward, of eager calls and of replayed CUDA graphs; medians, the L2 cache flushed. "
            f"× base: of a variant over ours, of a long sequence over {REFERENCE}, replays of both in turns. "
            "× ours: eager, within a round. Lower bound: the least possible memory traffic at the speed of a "
            f"copy, here {self.copy_bandwidth / 1e12:.3g} TB/s. Memory: the peak beyond the inputs, of "
            "forward and of both passes; U is one tensor [B, N, H, D]. Error: the largest relative RMS, "
            "against float64.\n\n"
        )
        ran = {row.implementation for row in self.rows if row.status != "skipped"}
        lines = [self._cells(row) for row in self.rows if row.implementation in ran]
        absent = {row.implementation: row.failure for row in self.rows if row.implementation not in ran}
        below = "".join(f"\n- {name}: {reason}" for name, reason in absent.items())
        return head + markdown(COLUMNS, lines) + (f"{below}\n" if below else "")

    def _cells(self, row: Row) -> list[str]:
        cells = [str(row.shape), row.implementation]
        if row.forward_ms is None:
            return [*cells, row.failure]
        ours = self.row("ours", row.shape)
        eager, replayed, ratios, bounds = [], [], [], []
        for direction, units in zip(DIRECTIONS, IMPLEMENTATIONS[row.implementation].min_traffic, strict=True):
            field = f"{direction}_ms"
            ms, correct = getattr(row, field), row.is_correct(field)
            eager.append(ms)
            replayed.append(getattr(row, f"{direction}_graph_ms"))
            bounds.append(ms / self.lower_bound_ms(row.shape, units) if correct else None)
            comparable = correct and ours is not None and ours.is_correct(field)
            ratios.append(self.ratio(row, ours, field) if comparable else None)
        note = row.failure or row.reason
        return [
            *cells,
            _pair(eager, ".3f") + (f", {note}" if note else ""),
            row.graph_reason or _pair(replayed, ".3f"),
            _pair(row.ratio_to_base, ".2f"),
            _pair(ratios, ".2f"),
            _pair(bounds, ".2f"),
            _pair([row.forward_memory, row.both_memory], ".2f"),
            number(max(row.errors.values(), default=None), ".1e"),
        ]

    def draw(self, folder: Path) -> list[Path]:
        """Draws the figures `sweep-n`, `sweep-d`, `traffic`, `bytes` and `forms`, as far as measured."""
        estimated = "time × copy bandwidth / least possible bytes (an upper bound)"
        counted = "bytes to and from DRAM, counted by the GPU / least possible"
        figures = {
            "sweep-n": _sweep(self, "N", {"H": 16, "D": 128}),
            "sweep-d": _sweep(self, "D", {"H": 16, "N": 4096}),
            "traffic": _traffic(self, _bytes_in_the_time(self), estimated),
            "bytes": _traffic(self, self.bytes_moved, counted),
            "forms": _forms(self),
        }
        drawn = [save_formats(figure, folder, name) for name, figure in figures.items() if figure is not None]
        return [path for paths in drawn for path in paths]


def _pair(values: Sequence[float | None], format: str) -> str:
    return " / ".join(number(value, format) for value in values) if any(values) else "–"


# Figures


def style(name: str) -> dict[str, Any]:
    """An implementation's colour and marker, the same in every plot; ours are thicker and on top. If several
    share a colour, the first has a solid line."""
    ours, index = IMPLEMENTATIONS[name].ours, list(IMPLEMENTATIONS).index(name)
    shared = COLOUR_NAMES[name] in list(COLOUR_NAMES.values())[:index]
    return {
        "color": COLOURS[COLOUR_NAMES[name]],
        "linestyle": "--" if shared else "-",
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 2.5 if ours else 1.3,
        "zorder": 3 if ours else 2,
        "markersize": 6 if ours else 4,
    }


def _sweep(results: Results, axis: str, fixed: dict[str, int]) -> Figure | None:
    """Three panels, a line per implementation. Only correct results are drawn; the caption lists the rest."""
    batches = [row.shape.B for row in results.rows if _matches(row.shape, fixed)]
    fixed = {"B": max(batches, default=0)} | fixed
    swept = [name for name, implementation in IMPLEMENTATIONS.items() if not implementation.training_only]
    rows = [row for row in results.rows if row.implementation in swept and _matches(row.shape, fixed)]
    rows.sort(key=lambda row: getattr(row.shape, axis))
    if len({getattr(row.shape, axis) for row in rows if row.status == "ok"}) < 2:
        return None
    figure, panels = _figure(len(PANELS), width=5.2)
    values = sorted({getattr(row.shape, axis) for row in rows})
    for panel, (name, title, label) in zip(panels, PANELS, strict=True):
        for implementation in dict.fromkeys(row.implementation for row in rows):
            own = [row for row in rows if row.implementation == implementation and row.is_correct(name)]
            if own:
                x, y = [getattr(row.shape, axis) for row in own], [_value(row, name) for row in own]
                panel.plot(x, y, label=IMPLEMENTATIONS[implementation].title, **style(implementation))
        if units := TRAFFIC.get(name):
            shapes = {getattr(row.shape, axis): row.shape for row in rows}
            bounds = [results.lower_bound_ms(shape, units) for shape in shapes.values()]
            panel.plot(list(shapes), bounds, ":", color="grey", label="least traffic at the copy bandwidth")
        _log_axes(panel, values, title=title, xlabel=AXES[axis], ylabel=label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    where = " ".join(f"{name}={value}" for name, value in fixed.items())
    figure.suptitle(f"{where}, {rows[0].dtype}, {results.environment['card']}", fontsize=11)
    if any(row.status != "ok" for row in rows):
        add_caption(
            figure, "A point is missing where an implementation failed or was left out: the table says why."
        )
    return figure


def _forms(results: Results) -> Figure | None:
    """Time over N of each form, of the chunked one with its best chunk; and that chunk over N."""
    chunked = {f"form-chunks-{chunk}": chunk for chunk in CHUNKS}
    shapes = sorted({row.shape for row in results.rows if row.implementation in chunked}, key=lambda s: s.N)

    def timed(shape: Shape, names: Iterable[str]) -> list[tuple[float, str]]:
        rows = (results.correct_row(name, shape) for name in names)
        return [(row.both_ms, row.implementation) for row in rows if row and row.both_ms]

    best = [(shape.N, *min(found)) for shape in shapes if (found := timed(shape, chunked))]
    if len(best) < 2:
        return None
    lengths, best_ms, names = zip(*best, strict=True)
    figure, (times, chunks) = _figure(2, width=5.2)
    for name in FORMS:
        points = [(shape.N, ms) for shape in shapes for ms, _ in timed(shape, [name])]
        if points and name not in chunked:
            times.plot(*zip(*points, strict=True), label=IMPLEMENTATIONS[name].title, **style(name))
    look = style(names[0])
    times.plot(lengths, best_ms, label="chunks, the best size", **look)
    chunks.plot(lengths, [chunked[name] for name in names], **look)
    ticks = [shape.N for shape in shapes]
    _log_axes(times, ticks, title="forward + backward", xlabel=AXES["N"], ylabel="time (ms)")
    _log_axes(chunks, ticks, title="the chunked form", xlabel=AXES["N"], ylabel="best chunk (tokens)")
    chunks.set(ylim=(CHUNKS[0] / 1.3, CHUNKS[-1] * 1.3))
    chunks.set_yticks(CHUNKS, list(map(str, CHUNKS)))
    figure.legend(*times.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    first = shapes[0]
    tokens = f"{first.B * first.N:,} tokens, H={first.H} D={first.D}"
    figure.suptitle(f"{tokens}, {results.rows[0].dtype}, {results.environment['card']}", fontsize=11)
    return figure


def _log_axes(panel: Any, ticks: Sequence[int], **labels: str) -> None:
    panel.set(xscale="log", yscale="log", **labels)
    panel.set_xticks(ticks, list(map(in_k, ticks)))
    panel.minorticks_off()
    style_axes(panel)


def _matches(shape: Shape, fixed: dict[str, int]) -> bool:
    return all(getattr(shape, name) == value for name, value in fixed.items())


def _value(row: Row, field: str) -> float:
    value = getattr(row, field)
    return value * row.unit_bytes / 1e9 if field.endswith("memory") else value


def _bytes_in_the_time(results: Results) -> dict[str, dict[str, float]]:
    """Bytes that a copy moves in an implementation's time, by implementation and direction: an upper bound of
    its traffic, loose if its kernel is not memory-bound."""
    return {
        name: {d: getattr(row, f"{d}_ms") / 1e3 * results.copy_bandwidth for d in DIRECTIONS}
        for name in IMPLEMENTATIONS
        if (row := results.correct_row(name, REFERENCE))
    }


def _traffic(results: Results, moved: dict[str, dict[str, float]], label: str) -> Figure | None:
    """Bytes moved relative to the minimum that an implementation's operator must move, at REFERENCE."""
    rows = [
        row for name in IMPLEMENTATIONS if name in moved and (row := results.correct_row(name, REFERENCE))
    ]
    if not rows:
        return None
    figure, panels = _figure(len(DIRECTIONS), width=5.5, height=0.4 * len(rows) + 1.6)
    for index, (panel, direction) in enumerate(zip(panels, DIRECTIONS, strict=True)):
        ratios = {}
        for row in rows:
            least = IMPLEMENTATIONS[row.implementation].min_traffic[index] * row.unit_bytes
            ratios[row.implementation] = moved[row.implementation][direction] / least
        names = sorted(ratios, key=lambda name: ratios[name], reverse=True)
        titles = [IMPLEMENTATIONS[name].title for name in names]
        bars = panel.barh(titles, [ratios[n] for n in names], color=[style(n)["color"] for n in names])
        panel.bar_label(bars, fmt="%.2f×", padding=3, fontsize=8)
        panel.axvline(1, color="grey", linestyle=":")
        panel.set(title=direction, xlim=(0, 1.2 * max(ratios.values())))
    figure.supxlabel(label, fontsize=9)
    figure.suptitle(f"{REFERENCE}, {rows[0].dtype}, {results.environment['card']}", fontsize=11)
    return figure


def _figure(columns: int, width: float, height: float = 4.6) -> tuple[Figure, Any]:
    """A figure with a row of panels, each `width` by `height` inches."""
    figure = new_figure(width * columns, height, dpi=130)
    return figure, figure.subplots(1, columns)
