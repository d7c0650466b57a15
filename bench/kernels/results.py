"""The results of `lingpt bench`: their JSON file, table, and figures of sweeps and traffic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from lingpt.bench.clock import Clock
from lingpt.bench.kernels.call import nan_first
from lingpt.bench.kernels.implementations import CHUNKS, DECAYS, FORMS, IMPLEMENTATIONS
from lingpt.bench.kernels.shapes import REFERENCE, TABLE_1, Shape
from lingpt.bench.results import BenchResults, BenchRow, length_axis, made_on, markdown, missing, number
from lingpt.plots.figures import add_caption, legend_beside, new_figure, save_figures
from lingpt.plots.palette import colours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("forward", "backward")
COLUMNS = (
    "shape", "implementation", "ms", "replayed, ms", "× base", "× ours", "× lower bound", "memory, U",
    "error",
)  # fmt: skip
MARKERS = "os^vDPX*<>hp"
LABELS = {
    "forward_ms": "forward: time (ms)",
    "forward_memory": "forward: memory beyond the inputs (GB)",
    "backward_ms": "backward: time (ms)",
    "both_memory": "both passes: memory beyond the inputs (GB)",
}
TRAFFIC = {"forward_ms": 0, "backward_ms": 1}  # the index in an implementation's `min_traffic`
AXES = {"N": "N (tokens of a sequence)", "D": "D (width of a head)"}
COLOUR_NAMES = {name: i.colour_of or name for name, i in IMPLEMENTATIONS.items()}
COLOURS = colours(COLOUR_NAMES.values())
Panel = tuple[list["Row"], str, str, str]  # the rows of a sweep, its axis, a title, the field that is drawn


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
        item_size = getattr(torch, self.environment["precision"]).itemsize
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
        return head + markdown(COLUMNS, lines) + (f"{below}\n" if below else "") + self._table_1()

    def _table_1(self) -> str:
        """The paper's table 1: forward passes of the rows at its shape; empty without any."""
        lines = []
        for row in (row for row in self.rows if row.shape == TABLE_1 and row.status != "skipped"):
            inputs = IMPLEMENTATIONS[row.implementation].min_traffic[0] - 1
            memory = None if row.forward_memory is None else inputs + row.forward_memory
            cells = [number(row.forward_ms, ".3f"), number(memory and memory * row.unit_bytes, ".2f", 1e9)]
            measured = row.is_correct("forward_ms")
            lines.append([IMPLEMENTATIONS[row.implementation].title, *(cells if measured else [row.failure])])
        head = f"\n## The paper's table 1\n\nForward at {TABLE_1}; the memory has the inputs in it.\n\n"
        return head + markdown(("implementation", "ms", "GB"), lines) if lines else ""

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
            whole = correct and not row.shape.Dv  # the units are tensors of one size
            bounds.append(ms / self.lower_bound_ms(row.shape, units) if whole else None)
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
            number(max(row.errors.values(), key=nan_first, default=None), ".1e"),
        ]

    def draw(self, folder: Path) -> list[Path]:
        """Draws the figures, as far as they were measured."""
        estimated = "time × copy bandwidth / least possible bytes (an upper bound)"
        counted = "bytes to and from DRAM, counted by the GPU / least possible"
        figures = {
            "forward": _sweeps(self, "forward_ms", "forward_memory"),
            "backward": _sweeps(self, "backward_ms", "both_memory"),
            "decays": _decays(self),
            "batch-32": _batch_32(self),
            "traffic": _traffic(self, _bytes_in_the_time(self), estimated),
            "bytes": _traffic(self, self.bytes_moved, counted),
            "movement": _movement(self),
            "forms": _forms(self),
        }
        return save_figures(figures, folder)


class FormResults(Results):
    """Those of `lingpt bench forms`."""

    COMMAND = "lingpt bench forms"


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


def _swept(results: Results, axis: str, names: Collection[str], **fixed: int) -> list[Row]:
    """The rows of a sweep over `axis`, in order; none if it has fewer than two points."""
    rows = [row for row in results.rows if row.implementation in names and row.shape != TABLE_1]
    rows = [row for row in rows if fixed.items() <= row.shape._asdict().items()]
    rows.sort(key=lambda row: getattr(row.shape, axis))
    return rows if len({getattr(row.shape, axis) for row in rows if row.status == "ok"}) > 1 else []


def _sweeps(results: Results, *fields: str) -> Figure | None:
    """The fields over N, and below over D, with a line per implementation. Of variants in the colour of
    another, `_decays` has the lines."""
    names = {
        name for name, i in IMPLEMENTATIONS.items()
        if not i.training_only and not (i.variant_of and i.colour_of)
    }  # fmt: skip
    over_n = _swept(results, "N", names, B=4, H=16, D=128), "N", "B=4 H=16 D=128"
    over_d = _swept(results, "D", names, B=4, H=16, N=4096), "D", "B=4 N=4096 H=16"
    return _grid(results, [[(*sweep, field) for field in fields] for sweep in (over_n, over_d) if sweep[0]])


def _decays(results: Results) -> Figure | None:
    """Forward, backward and memory over N, a column for each class of decay."""
    columns = [
        (rows, "N", f"{decay}: B=4 H=16 D=128")
        for decay, names in DECAYS.items()
        if (rows := _swept(results, "N", names, B=4, H=16, D=128))
    ]
    fields = ("forward_ms", "backward_ms", "both_memory") if columns else ()
    return _grid(results, [[(*column, field) for column in columns] for field in fields])


def _batch_32(results: Results) -> Figure | None:
    rows = _swept(results, "N", IMPLEMENTATIONS, B=32, H=16, D=64)
    fields = (("forward_ms", "forward_memory"), ("backward_ms", "both_memory")) if rows else ()
    return _grid(results, [[(rows, "N", "B=32 H=16 D=64", field) for field in pair] for pair in fields])


def _grid(results: Results, grid: list[list[Panel]]) -> Figure | None:
    """A panel for each sweep and field, a line per implementation. Only correct results are drawn."""
    if not grid:
        return None
    figure = new_figure(4.4 * len(grid[0]) + 3, 3.9 * len(grid) + 0.7, dpi=130)
    axes = figure.subplots(len(grid), len(grid[0]), squeeze=False)
    legend: dict[str, Any] = {}
    panels = [panel for row in grid for panel in row]
    for panel, (rows, axis, title, name) in zip(axes.flat, panels, strict=True):
        for implementation in (i for i in IMPLEMENTATIONS if any(row.implementation == i for row in rows)):
            own = [row for row in rows if row.implementation == implementation and row.is_correct(name)]
            x, y = [getattr(row.shape, axis) for row in own], [_value(row, name) for row in own]
            (line,) = panel.plot(x, y, **style(implementation))
            if own:
                legend.setdefault(IMPLEMENTATIONS[implementation].title, line)
        if name in TRAFFIC:
            units = min(IMPLEMENTATIONS[row.implementation].min_traffic[TRAFFIC[name]] for row in rows)
            shapes = {getattr(row.shape, axis): row.shape for row in rows}
            bounds = [results.lower_bound_ms(shape, units) for shape in shapes.values()]
            (least,) = panel.plot(list(shapes), bounds, ":", color="grey")
        lengths = sorted({getattr(row.shape, axis) for row in rows})
        length_axis(panel, lengths, yscale="log", title=title, xlabel=AXES[axis], ylabel=LABELS[name])
        panel.title.set_fontsize(10)
    legend_beside(figure, [*legend.values(), least], [*legend, "least traffic at the copy bandwidth"])
    figure.suptitle(f"{panels[0][0][0].dtype}, {results.environment['card']}", fontsize=11)
    if note := missing(_correct(row, name) for rows, *_, name in panels for row in rows):
        add_caption(figure, note)
    return figure


def _forms(results: Results) -> Figure | None:
    """Time over N of each form, of the chunked one with its best chunk; and that chunk over N."""
    chunked = {f"form-chunks-{chunk}": chunk for chunk in CHUNKS}
    if not any(row.implementation == FORMS[-1] for row in results.rows):
        return None
    shapes = sorted({row.shape for row in results.rows if row.implementation in chunked}, key=lambda s: s.N)

    def timed(shape: Shape, names: Iterable[str]) -> list[tuple[float, str]]:
        rows = (results.correct_row(name, shape) for name in names)
        return [(row.both_ms, row.implementation) for row in rows if row and row.both_ms]

    best = [(shape.N, *min(found)) for shape in shapes if (found := timed(shape, chunked))]
    if len(best) < 2:
        return None
    lengths, best_ms, names = zip(*best, strict=True)
    figure = new_figure(10.4, 4.6, dpi=130)
    times, chunks = figure.subplots(1, 2)
    for name in FORMS:
        points = [(shape.N, ms) for shape in shapes for ms, _ in timed(shape, [name])]
        if points and name not in chunked:
            times.plot(*zip(*points, strict=True), label=IMPLEMENTATIONS[name].title, **style(name))
    look = style(names[0])
    times.plot(lengths, best_ms, label="chunks, the best size", **look)
    chunks.plot(lengths, [chunked[name] for name in names], **look)
    ticks = [shape.N for shape in shapes]
    log = {"yscale": "log", "xlabel": AXES["N"]}
    length_axis(times, ticks, title="forward + backward", ylabel="time (ms)", **log)
    length_axis(chunks, ticks, title="the chunked form", ylabel="best chunk (tokens)", **log)
    chunks.set(ylim=(CHUNKS[0] / 1.3, CHUNKS[-1] * 1.3))
    chunks.set_yticks(CHUNKS, list(map(str, CHUNKS)))
    figure.legend(*times.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    first = shapes[0]
    tokens = f"{first.B * first.N:,} tokens, H={first.H} D={first.D}"
    figure.suptitle(f"{tokens}, {results.rows[0].dtype}, {results.environment['card']}", fontsize=11)
    if note := missing(_correct(row, "both_ms") for row in results.rows):
        add_caption(figure, note)
    return figure


def _correct(row: Row, field: str) -> float | None:
    return _value(row, field) if row.is_correct(field) else None


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
    panels: dict[str, dict[str, float]] = {}
    for index, direction in enumerate(DIRECTIONS):
        panels[direction] = {
            name: moved[name][direction] / (IMPLEMENTATIONS[name].min_traffic[index] * row.unit_bytes)
            for name in IMPLEMENTATIONS
            if direction in moved.get(name, ())
            if (row := results.correct_row(name, REFERENCE, f"{direction}_ms"))
        }
    return _bars(results, panels, label, "%.2f×", least=1)


def _movement(results: Results) -> Figure | None:
    """The time of moving the counted bytes at the speed of a copy, forward at REFERENCE: its share of the run
    time, and itself."""
    rows = {
        name: row
        for name in results.bytes_moved
        if (row := results.correct_row(name, REFERENCE, "forward_ms")) and row.forward_ms
    }
    ms = {name: results.bytes_moved[name]["forward"] / results.copy_bandwidth * 1e3 for name in rows}
    share = {name: ms[name] / (row.forward_ms or 0) for name, row in rows.items()}
    label = "time of moving the bytes that the GPU counted at the speed of a copy, forward"
    return _bars(results, {"share of the run time": share, "ms": ms}, label, "%.2f")


def _bars(
    results: Results, panels: dict[str, dict[str, float]], label: str, format: str, least: float | None = None
) -> Figure | None:
    """A panel for each title, with a bar for each implementation; a line at the `least` possible value."""
    if not any(panels.values()):
        return None
    bars_in_panel = max(map(len, panels.values()))
    figure = new_figure(5.5 * len(panels), 0.4 * bars_in_panel + 1.6, dpi=130)
    for panel, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        names = sorted(values, key=lambda name: values[name], reverse=True)
        titles = [IMPLEMENTATIONS[name].title for name in names]
        colors = [style(name)["color"] for name in names]
        bars = panel.barh(titles, [values[name] for name in names], color=colors)
        panel.bar_label(bars, fmt=format, padding=3, fontsize=8)
        if least is not None:
            panel.axvline(least, color="grey", linestyle=":")
        low, high = min(values.values(), default=1), max(values.values(), default=1)
        if high > 50 * low:  # otherwise most bars are too short to see
            panel.set(xscale="log", xlim=(low / 2, 5 * high))
        else:
            panel.set_xlim(0, 1.2 * high)
        panel.set_title(title)
    figure.supxlabel(label, fontsize=9)
    precision, card = results.environment["precision"], results.environment["card"]
    figure.suptitle(f"{REFERENCE}, {precision}, {card}", fontsize=11)
    return figure
