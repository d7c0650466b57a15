"""The plots, from results alone: time and memory against N and D, and the traffic over the least possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lingpt.kernels.bench.measure import Row
from lingpt.kernels.bench.peers import PEERS
from lingpt.kernels.bench.runner import Results
from lingpt.kernels.bench.shapes import REFERENCE, Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^vDPX*<>hp"
PANELS = (
    ("forward_ms", "forward", "ms"),
    ("backward_ms", "backward", "ms"),
    ("both_memory", "peak memory, forward + backward", "GB beyond the inputs"),
)


def draw(results: Results, folder: Path) -> list[Path]:
    """Draws what the results hold: `sweep-n.png`, `sweep-d.png`, `traffic.png`, `bytes.png`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, axis, fixed in (("sweep-n", "N", {"H": 16, "D": 128}), ("sweep-d", "D", {"H": 16, "N": 4096})):
        path = folder / f"{name}.png"
        if _draw_sweep(results, axis, fixed, path):
            drawn.append(path)
    for name, moved, label in (
        ("traffic", _in_the_time, "time × copy bandwidth / least possible bytes (an upper bound)"),
        ("bytes", _counted, "bytes to and from DRAM, counted by the GPU / least possible"),
    ):
        path = folder / f"{name}.png"
        if _draw_over_least(results, moved, label, path):
            drawn.append(path)
    return drawn


def style(peer: str) -> dict:
    """The same colour and marker for a peer in every plot; ours drawn thicker and on top."""
    import matplotlib

    index, ours = list(PEERS).index(peer), PEERS[peer].ours
    colour = "black" if peer == "ours" else matplotlib.colormaps["tab20"](2 * index % 20 + 2 * index // 20)
    return {
        "color": colour,
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 2.5 if ours else 1.3,
        "zorder": 3 if ours else 2,
        "markersize": 6 if ours else 4,
    }


def _draw_sweep(results: Results, axis: str, fixed: dict[str, int], path: Path) -> bool:
    """One line a peer, three panels. Only right results are drawn; the caption names what was not."""
    batches = [r.shape.B for r in results.rows if _on_sweep(r.shape, fixed)]
    fixed = {"B": max(batches, default=0)} | fixed
    rows = [r for r in results.rows if _on_sweep(r.shape, fixed) and not PEERS[r.peer].training_only]
    if len({getattr(r.shape, axis) for r in rows if r.status == "ok"}) < 2:
        return False
    figure, panels = _figure(len(PANELS), width=5.2)
    for panel, (field, title, unit) in zip(panels, PANELS, strict=True):
        for peer in dict.fromkeys(r.peer for r in rows):
            points = sorted(
                (getattr(r.shape, axis), _value(r, field))
                for r in rows
                if r.peer == peer and r.right(field) and getattr(r, field)
            )
            if points:
                panel.plot(*zip(*points, strict=True), label=PEERS[peer].title, **style(peer))
        if field.endswith("_ms"):
            _draw_floor(
                panel, results, sorted({r.shape for r in rows}), axis, 4 if field == "forward_ms" else 8
            )
        panel.set(xscale="log", yscale="log", title=title, xlabel=axis, ylabel=unit)
        _ticks(panel, axis, sorted({getattr(r.shape, axis) for r in rows}))
        panel.grid(True, which="major", alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    where = " ".join(f"{name}={value}" for name, value in fixed.items())
    figure.suptitle(f"{where}, {rows[0].dtype}, {results.environment['card']}", fontsize=11)
    _caption(figure, rows, axis)
    figure.savefig(path, dpi=130)
    return True


def _on_sweep(shape: Shape, fixed: dict[str, int]) -> bool:
    return all(getattr(shape, name) == value for name, value in fixed.items())


def _value(row, field: str) -> float:
    value = getattr(row, field)
    return value * row.shape.unit_bytes() / 1e9 if field.endswith("memory") else value


def _draw_floor(panel: Axes, results: Results, shapes: list[Shape], axis: str, units: int) -> None:
    shapes = sorted(shapes, key=lambda shape: getattr(shape, axis))
    floor = [results.floor_ms(shape, units) for shape in shapes]
    label = "least traffic at the copy bandwidth"
    panel.plot([getattr(s, axis) for s in shapes], floor, ":", color="grey", label=label)


def _ticks(panel: Axes, axis: str, values: list[int]) -> None:
    labels = [
        f"{v // 1024}k" if v >= 1024 and v % 1024 == 0 else f"{v // 1000}k" if v >= 1000 else str(v)
        for v in values
    ]
    panel.set_xticks(values, labels)
    panel.minorticks_off()


def _caption(figure, rows: list, axis: str) -> None:
    """What is missing from the lines, and why: a line that ends early would mislead otherwise."""
    lines = []
    words = {"oom": "out of memory", "wrong": "wrong result", "error": "failed"}
    found: dict[tuple[str, str], list[int]] = {}
    for r in rows:
        if r.status in words:
            half_right = r.status == "wrong" and r.right("forward_ms")
            word = "wrong gradient" if half_right else words[r.status]
            found.setdefault((PEERS[r.peer].title, word), []).append(getattr(r.shape, axis))
    for (title, word), where in found.items():
        lines.append(f"{title}: {word} at {axis} = {', '.join(map(str, sorted(where)))}")
    if any(r.status == "skipped" and r.reason.startswith("would take") for r in rows):
        lines.append("lines that end early: the next point would take longer than the run allows")
    if lines:
        import textwrap

        figure.supxlabel("\n".join(textwrap.wrap("; ".join(lines), 190)), fontsize=6.5, color="dimgrey")


def _in_the_time(results: Results, row: Row, direction: str) -> float:
    """Bytes that a copy moves in the row's time: for a kernel bound by something else, a loose bound."""
    return getattr(row, f"{direction}_ms") / 1e3 * results.copy_bandwidth


def _counted(results: Results, row: Row, direction: str) -> float | None:
    return results.bytes_moved.get(row.peer, {}).get(direction)


def _draw_over_least(
    results: Results, moved: Callable[[Results, Row, str], float | None], label: str, path: Path
) -> bool:
    """Bytes moved over the least that the peer's own operator must move, at the shape of the bars."""
    rows = [row for peer in PEERS if (row := results.row(peer, REFERENCE)) and moved(results, row, "forward")]
    if not rows:
        return False
    figure, panels = _figure(2, width=5.5, height=0.4 * len(rows) + 1.6)
    for panel, direction, index in zip(panels, ("forward", "backward"), (0, 1), strict=True):
        least = {row.peer: PEERS[row.peer].least[index] * row.shape.unit_bytes() for row in rows}
        bars = [(moved(results, row, direction) / least[row.peer], row.peer) for row in rows]
        ratios, peers = zip(*sorted(bars, reverse=True), strict=True)
        colours = [style(peer)["color"] for peer in peers]
        drawn = panel.barh([PEERS[peer].title for peer in peers], ratios, color=colours)
        panel.bar_label(drawn, fmt="%.2f×", padding=3, fontsize=8)
        panel.axvline(1, color="grey", linestyle=":")
        panel.set(title=direction, xlim=(0, 1.2 * max(ratios)))
    figure.supxlabel(label, fontsize=9)
    figure.suptitle(f"{REFERENCE}, {rows[0].dtype}, {results.environment['card']}", fontsize=11)
    figure.savefig(path, dpi=130)
    return True


def _figure(columns: int, width: float, height: float = 4.6):
    """A figure that belongs to no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, figure.subplots(1, columns)
