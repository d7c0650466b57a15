"""The targets of the kernel as a table: what each asks, what was reached, met or not, from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from lingpt.kernels.bench.measure import Row
from lingpt.kernels.bench.runner import Results
from lingpt.kernels.bench.shapes import BATCH_1, CUMSUM, LONG, REFERENCE, SWEEPS, Shape

UNNORMALISED = ("fla-linear", "fla-fused-linear", "fla-lightning")
FLA = (*UNNORMALISED, "fla-linear-norm", "fla-gla")
DIRECTIONS = ("forward_ms", "backward_ms")


@dataclass(frozen=True)
class Bar:
    """One target. `reached` gives its numbers, or raises Missing where the results don't hold them."""

    what: str
    bar: float | None  # None: reported, not judged
    aim: float | None
    reached: Callable[[Results], list[float]]
    at_least: bool = False  # else at most
    format: str = "{:.2f}×"

    def met(self, values: list[float], target: float) -> bool:
        return all(value >= target if self.at_least else value <= target for value in values)


class Missing(LookupError):
    """A number that no row holds, and which."""


def bars_table(results: Results) -> str:
    """The targets as a Markdown table; "each" in a row means forward / backward."""
    env = results.environment
    driver = f"driver {env['driver']}, " if env["driver"] else ""
    sources = ", ".join(f"{name} {number}" for name, number in env["versions"].items())
    head = (
        f"{env['card']}, {driver}NVRTC {env['nvrtc']}, {sources}; "
        f"kernels {env['source_hash']}, {env['date']}. The memory copies at "
        f"{results.copy_bandwidth / 1e12:.2f} TB/s in this run. "
    )
    training = [row for row in results.rows if row.shape in SWEEPS["training"]]
    if not training:
        return head + "No target was measured: they are set at the training shapes, on a CUDA device.\n"
    conditions = f"bf16, H = 16, D = 128; {_medians(training)}, L2 flushed."
    lines = [head + conditions, "", "| | bar | aim | reached | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(_line(bar, results) for bar in BARS)]) + "\n"


def _medians(rows: list[Row]) -> str:
    """What the times of these rows are, and over how many rounds, if that is more than one."""
    rounds = [row.rounds for row in rows if row.rounds]
    few, most = min(rounds, default=1), max(rounds, default=1)
    if most == 1:
        return "medians"
    return f"medians over {most if few == most else f'{few} to {most}'} interleaved rounds"


def _line(bar: Bar, results: Results) -> str:
    sign = "≥" if bar.at_least else "≤"
    bound, aim = (f"{sign} {x:g}" if x is not None else "" for x in (bar.bar, bar.aim))
    try:
        values = bar.reached(results)
    except Missing as missing:
        return f"| {bar.what} | {bound} | {aim} | not measured: {missing} | – |"
    reached = " / ".join(bar.format.format(value) for value in values)
    return f"| {bar.what} | {bound} | {aim} | {reached} | {_verdict(bar, values)} |"


def _verdict(bar: Bar, values: list[float]) -> str:
    if bar.bar is None:
        return "reported"
    if not bar.met(values, bar.bar):
        return "**not met**"
    return "aim met" if bar.aim is not None and bar.met(values, bar.aim) else "met"


Cell = tuple[str, Shape]  # a peer at a shape


def _row(results: Results, cell: Cell, field: str) -> Row:
    """The cell's row, with a right number in `field`."""
    row = results.row(*cell, field)
    if row is None or getattr(row, field) is None:
        found = next((r for r in results.rows if r.cell == cell), None)
        raise Missing(f"{cell[0]} at {cell[1]}: {(found.reason or found.graph) if found else 'no row'}")
    return row


def _value(results: Results, peer: str, shape: Shape, field: str) -> float:
    return getattr(_row(results, (peer, shape), field), field)


def _ratio(results: Results, cell: Cell, base_cell: Cell, field: str) -> float:
    """Of two times: the median of the rounds' ratios, as clocks drift less within a round than between."""
    row, base = (_row(results, x, field) for x in (cell, base_cell))
    rounds = row.by_round.get(field, []), base.by_round.get(field, [])
    if len(rounds[0]) == len(rounds[1]) > 1:
        return statistics.median(x / y for x, y in zip(*rounds, strict=True))
    return getattr(row, field) / getattr(base, field)


def _floor(direction: str, units: int) -> Callable[[Results], list[float]]:
    return lambda r: [_value(r, "ours", REFERENCE, direction) / r.floor_ms(REFERENCE, units)]


def _faster(peers: tuple[str, ...], shape: Shape, fields: tuple[str, ...] = DIRECTIONS, graph: bool = False):
    """How many times faster than the fastest of `peers` that is right, for each of `fields`."""

    def ratio(results: Results, field: str) -> float:
        name = field.replace("_ms", "_graph_ms") if graph else field
        _row(results, ("ours", shape), name)
        there = [peer for peer in peers if (row := results.row(peer, shape, name)) and getattr(row, name)]
        if not there:
            raise Missing(f"none of {', '.join(peers)} at {shape}")
        return min(_ratio(results, (peer, shape), ("ours", shape), name) for peer in there)

    return lambda results: [ratio(results, field) for field in fields]


def _empty_node(results: Results) -> list[float]:
    """Of eager calls at B = 1, what PyTorch's autograd takes on this host without doing anything."""
    if not results.empty_node_ms:
        raise Missing("an empty autograd node")
    nodes = zip(results.empty_node_ms, DIRECTIONS, strict=True)
    return [node / _value(results, "ours", BATCH_1, direction) for node, direction in nodes]


def _per_token(ratio: float, shape: Shape) -> float:
    """The ratio of a time at `shape` to one at REFERENCE, for as many tokens."""
    return ratio * (REFERENCE.B * REFERENCE.N) / (shape.B * shape.N)


def _eager(cell: Cell) -> Callable[[Results], list[float]]:
    """A cell's times per token over those of ours at REFERENCE."""
    return lambda r: [_per_token(_ratio(r, cell, ("ours", REFERENCE), d), cell[1]) for d in DIRECTIONS]


def _in_turn(cell: Cell) -> Callable[[Results], list[float]]:
    """The same of replays in turn with it."""

    def ratios(results: Results) -> list[float]:
        row = _row(results, cell, "both_ms")
        if not row.beside:
            raise Missing(row.graph or f"{cell[0]} at {cell[1]} in turn with ours at {REFERENCE}")
        return [_per_token(ratio, cell[1]) for ratio in row.beside]

    return ratios


def _memory(field: str) -> Callable[[Results], list[float]]:
    return lambda r: [_value(r, "ours", REFERENCE, field)]


BARS = (
    Bar("forward, B=4 N=8192, multiple of the 4 U floor", 2.2, 1.3, _floor("forward_ms", 4)),
    Bar("backward, B=4 N=8192, multiple of the 8 U floor", 3.6, 2.0, _floor("backward_ms", 8)),
    Bar("faster than FLA GLA, forward and backward each", 5, 9, _faster(("fla-gla",), REFERENCE), True),
    Bar("faster than FLA normalised linear attention, each", 2.7, 5,
        _faster(("fla-linear-norm",), REFERENCE), True),
    Bar("faster than the fastest FLA linear attention without normaliser, each", 1.6, 2.5,
        _faster(UNNORMALISED, REFERENCE), True),
    Bar("B=1 N=8192, faster than the fastest FLA, each (eager)", 1.8, 3, _faster(FLA, BATCH_1), True),
    Bar("the same, both replayed from CUDA graphs", None, None, _faster(FLA, BATCH_1, graph=True), True),
    Bar("there, eager: an empty autograd node's share of ours, each", None, None, _empty_node,
        format="{:.0%}"),
    Bar("time per token, B=1 N=32768, of that of B=4 N=8192, each (replays in turn)", 1.15, None,
        _in_turn(("ours", LONG[0]))),
    Bar("the same, eager", None, None, _eager(("ours", LONG[0]))),
    Bar("time per token, B=1 N=131072, of that of B=4 N=8192, each (replays in turn)", 1.15, None,
        _in_turn(("ours", LONG[1]))),
    Bar("the same, eager", None, None, _eager(("ours", LONG[1]))),
    Bar("with a decay per head, of the time without, each (replays in turn)", 1.05, None,
        _in_turn(("ours-decay", REFERENCE))),
    Bar("the same, eager", None, None, _eager(("ours-decay", REFERENCE))),
    Bar("peak memory beyond inputs and do, forward", 1.15, None, _memory("forward_memory"),
        format="{:.2f} U"),
    Bar("peak memory beyond inputs and do, forward + backward", 4.5, None, _memory("both_memory"),
        format="{:.2f} U"),
    Bar("faster than PyTorch's cumulative sums, forward, B=1 N=4096", 50, None,
        _faster(("torch-cumsum",), CUMSUM, ("forward_ms",)), True),
)  # fmt: skip
