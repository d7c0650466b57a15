"""The targets of our kernels as a table, from results alone: each target, what was reached, met or not.

Times are of eager calls, including host time, unless a target's text says that graphs were replayed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lingpt.bench.kernels.results import Cell, Results, Row
from lingpt.bench.kernels.shapes import BATCH_1, CUMSUM, LONG, REFERENCE, SWEEPS, Shape

UNNORMALISED = ("fla-linear", "fla-fused-linear", "fla-lightning")
FLA = (*UNNORMALISED, "fla-linear-norm", "fla-gla")
DIRECTIONS = ("forward_ms", "backward_ms")

Reached = Callable[[Any], list[float]]  # raises Missing if the results lack the numbers


@dataclass(frozen=True)
class Target:
    """A number to reach: at least `required`, ideally `aim`. `lingpt bench train` has its own targets of this
    class."""

    what: str
    required: float | None  # None: reported, not judged
    aim: float | None
    reached: Reached
    at_least: bool = False  # else at most
    format: str = "{:.2f}×"

    def met(self, values: list[float], bound: float) -> bool:
        return all(value >= bound if self.at_least else value <= bound for value in values)

    def verdict(self, values: list[float]) -> str:
        if self.required is None:
            return "reported"
        if not self.met(values, self.required):
            return "**not met**"
        return "aim met" if self.aim is not None and self.met(values, self.aim) else "met"

    def line(self, results: Any) -> str:
        """The target's line of the table."""
        sign = "≥" if self.at_least else "≤"
        bounds = " | ".join(f"{sign} {x:g}" if x is not None else "" for x in (self.required, self.aim))
        try:
            values = self.reached(results)
        except Missing as missing:
            return f"| {self.what} | {bounds} | not measured: {missing} | – |"
        reached = " / ".join(self.format.format(value) for value in values)
        return f"| {self.what} | {bounds} | {reached} | {self.verdict(values)} |"


class Missing(LookupError):
    """A number is in no row; the message says which."""


def targets_table(results: Results) -> str:
    """The targets as a Markdown table; "each" in a row means forward / backward."""
    env = results.environment
    driver = f"driver {env['driver']}, " if env["driver"] else ""
    nvrtc = f"NVRTC {env['nvrtc']}, " if env["nvrtc"] else ""
    sources = ", ".join(f"{name} {number}" for name, number in env["versions"].items())
    head = (
        f"{env['card']}, {driver}{nvrtc}{sources}; "
        f"kernels {env['source_hash']}, {env['date']}. The memory copies at "
        f"{results.copy_bandwidth / 1e12:.2f} TB/s in this run. "
    )
    training = [row for row in results.rows if row.shape in SWEEPS["training"]]
    if not training:
        return head + "No target was measured: they are set at the training shapes, on a CUDA device.\n"
    conditions = (
        f"bf16, H = 16, D = 128; {_medians(training)}, L2 flushed. "
        "A row is judged by eager calls, unless it says that CUDA graphs were replayed."
    )
    lines = [head + conditions, "", "| | required | aim | reached | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(target.line(results) for target in TARGETS)]) + "\n"


def _medians(rows: list[Row]) -> str:
    """What the times of these rows are medians of, with the number of rounds if there are several."""
    rounds = [row.rounds for row in rows if row.rounds]
    fewest, most = min(rounds, default=1), max(rounds, default=1)
    if most == 1:
        return "medians"
    return f"medians over {most if fewest == most else f'{fewest} to {most}'} interleaved rounds"


# What was reached


def _row(results: Results, cell: Cell, field: str) -> Row:
    """The cell's row, with a correct number in `field`."""
    row = results.correct_row(*cell, field)
    if row is None or getattr(row, field) is None:
        tried = next((r for r in results.rows if r.cell == cell), None)
        raise Missing(
            f"{cell[0]} at {cell[1]}: {(tried.reason or tried.graph_reason) if tried else 'no row'}"
        )
    return row


def _value(results: Results, cell: Cell, field: str) -> float:
    return getattr(_row(results, cell, field), field)


def _ratio(results: Results, cell: Cell, base_cell: Cell, field: str) -> float:
    """The ratio of two times: the median of the ratios within rounds, as clocks drift less there than
    between.

    Missing if the two were measured in different sessions (`--append`): no round has both.
    """
    row, base = (_row(results, x, field) for x in (cell, base_cell))
    if row.session != base.session:
        raise Missing(f"{cell[0]} at {cell[1]} and {base_cell[0]} at {base_cell[1]} in one session")
    rounds = row.by_round.get(field, []), base.by_round.get(field, [])
    if len(rounds[0]) == len(rounds[1]) > 1:
        return statistics.median(x / y for x, y in zip(*rounds, strict=True))
    return getattr(row, field) / getattr(base, field)


def _multiple_of_floor(direction: str, units: int, name: str = "ours") -> Reached:
    return lambda r: [_value(r, (name, REFERENCE), direction) / r.floor_ms(REFERENCE, units)]


def _faster(
    baselines: tuple[str, ...], shape: Shape, fields: tuple[str, ...] = DIRECTIONS, graph: bool = False
) -> Reached:
    """How many times faster ours is than the fastest of `baselines`, for each of `fields`.

    Missing if one of them has no correct time: it might be the fastest.
    """

    def ratio(results: Results, field: str) -> float:
        name = field.replace("_ms", "_graph_ms") if graph else field
        _row(results, ("ours", shape), name)
        if not any((row := results.correct_row(x, shape, name)) and getattr(row, name) for x in baselines):
            raise Missing(f"none of {', '.join(baselines)} at {shape}")
        return min(_ratio(results, (baseline, shape), ("ours", shape), name) for baseline in baselines)

    return lambda results: [ratio(results, field) for field in fields]


def _empty_node(results: Results) -> list[float]:
    """The share of eager calls at B = 1 that an empty autograd node takes on this host."""
    if not results.empty_node_ms:
        raise Missing("an empty autograd node")
    nodes = zip(results.empty_node_ms, DIRECTIONS, strict=True)
    return [node / _value(results, ("ours", BATCH_1), direction) for node, direction in nodes]


def _per_token(ratio: float, shape: Shape) -> float:
    """The ratio of a time at `shape` to one at REFERENCE, per token."""
    return ratio * (REFERENCE.B * REFERENCE.N) / (shape.B * shape.N)


def _eager_per_token(cell: Cell) -> Reached:
    """A cell's eager times per token relative to those of ours at REFERENCE."""
    return lambda r: [_per_token(_ratio(r, cell, ("ours", REFERENCE), d), cell[1]) for d in DIRECTIONS]


def _interleaved(cell: Cell) -> Reached:
    """A cell's times per token relative to those of ours at REFERENCE, by interleaved replays."""

    def ratios(results: Results) -> list[float]:
        row = _row(results, cell, "both_ms")
        if not row.ratio_to_base:
            raise Missing(row.graph_reason or f"{cell[0]} at {cell[1]} interleaved with ours at {REFERENCE}")
        return [_per_token(ratio, cell[1]) for ratio in row.ratio_to_base]

    return ratios


def _memory(field: str) -> Reached:
    return lambda r: [_value(r, ("ours", REFERENCE), field)]


# The target in words, the required number, the aim, and what was reached.
TARGETS = (
    Target("forward, B=4 N=8192, multiple of the 4 U floor", 2.2, 1.3, _multiple_of_floor("forward_ms", 4)),
    Target("backward, B=4 N=8192, multiple of the 8 U floor", 3.6, 2.0, _multiple_of_floor("backward_ms", 8)),
    Target("gated without the normaliser (a = 0), forward, multiple of 4 U (eager)", 1.6, 1.3,
           _multiple_of_floor("forward_ms", 4, "ours-unnormalised")),
    Target("the same, replayed from CUDA graphs", None, None,
           _multiple_of_floor("forward_graph_ms", 4, "ours-unnormalised")),
    Target("gated without the normaliser (a = 0), backward, multiple of 8 U (eager)", 2.1, 1.7,
           _multiple_of_floor("backward_ms", 8, "ours-unnormalised")),
    Target("the same, replayed from CUDA graphs", None, None,
           _multiple_of_floor("backward_graph_ms", 8, "ours-unnormalised")),
    Target("faster than FLA GLA, forward and backward each", 5, 9,
           _faster(("fla-gla",), REFERENCE), at_least=True),
    Target("faster than FLA normalised linear attention, each", 2.7, 5,
           _faster(("fla-linear-norm",), REFERENCE), at_least=True),
    Target("faster than the fastest FLA linear attention without normaliser, each", 1.6, 2.5,
           _faster(UNNORMALISED, REFERENCE), at_least=True),
    Target("B=1 N=8192, faster than the fastest FLA, each (eager)", 1.8, 3,
           _faster(FLA, BATCH_1), at_least=True),
    Target("the same, both replayed from CUDA graphs", None, None,
           _faster(FLA, BATCH_1, graph=True), at_least=True),
    Target("B=1 N=8192, eager: an empty autograd node's share of ours, each", None, None,
           _empty_node, format="{:.0%}"),
    Target("time per token, B=1 N=32768 over B=4 N=8192, each (interleaved replays)", 1.15, None,
           _interleaved(("ours", LONG[0]))),
    Target("the same, eager", None, None, _eager_per_token(("ours", LONG[0]))),
    Target("time per token, B=1 N=131072 over B=4 N=8192, each (interleaved replays)", 1.15, None,
           _interleaved(("ours", LONG[1]))),
    Target("the same, eager", None, None, _eager_per_token(("ours", LONG[1]))),
    Target("time with a decay per head over the time without, each (interleaved replays)", 1.05, None,
           _interleaved(("ours-decay", REFERENCE))),
    Target("the same, eager", None, None, _eager_per_token(("ours-decay", REFERENCE))),
    Target("peak memory beyond inputs and do, forward", 1.15, None,
           _memory("forward_memory"), format="{:.2f} U"),
    Target("peak memory beyond inputs and do, forward + backward", 4.5, None,
           _memory("both_memory"), format="{:.2f} U"),
    Target("faster than PyTorch's cumulative sums, forward, B=1 N=4096", 50, None,
           _faster(("torch-cumsum",), CUMSUM, ("forward_ms",)), at_least=True),
)  # fmt: skip
