"""One peer at one shape: time, memory and correctness of the same call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from lingpt.kernels.bench.peers import PEERS, Peer
from lingpt.kernels.bench.shapes import LONG, REFERENCE, Shape

TAIL = (
    256  # rows of a softmax that its oracle computes: the last ones, whose keys' gradients they alone decide
)
ONE_SLICE = 65536  # tokens, from which on the oracle takes one slice, not four
TIMES = ("forward_ms", "backward_ms", "both_ms", "forward_graph_ms", "backward_graph_ms")


@dataclass
class Row:
    """What came of one peer at one shape. Times are in ms: the median of a round's runs, and over several
    rounds the median of theirs. Memory is in U (one [B, N, H, D] tensor).

    status: "ok"; "wrong" (timed, but its result is not its function's: no ratio is drawn from it); "oom";
    "skipped" (`reason` says why); "error".
    """

    peer: str
    shape: Shape
    dtype: str
    status: str = "ok"
    reason: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    both_ms: float | None = None  # forward and backward, one after the other
    forward_graph_ms: float | None = None  # replayed from a CUDA graph
    backward_graph_ms: float | None = None
    graph: str = ""  # why there is no replay
    forward_memory: float | None = None  # peak beyond the inputs and do
    both_memory: float | None = None
    forward_flops: int = 0
    repeats: int = 0  # runs of each time in a round
    rounds: int = 0  # that went into the times; 0: not timed
    by_round: dict[str, list[float]] = field(default_factory=dict)  # the times of each, if several
    beside: list[float] = field(default_factory=list)  # forward and backward, of those of `_base`, in turn
    errors: dict[str, float] = field(default_factory=dict)  # relative RMS of o and of each gradient
    tolerance: float = 0.0

    @property
    def cell(self) -> tuple[str, Shape]:
        return self.peer, self.shape

    def right(self, field: str) -> bool:
        """Whether what `field` timed is its function: a wrong gradient tells nothing of a forward pass."""
        if self.status == "wrong" and field.startswith("forward"):
            return self.errors.get("o", float("inf")) <= self.tolerance
        return self.status == "ok"

    def as_dict(self) -> dict:
        return asdict(self) | {"shape": self.shape._asdict()}

    @classmethod
    def from_dict(cls, fields: dict) -> Row:
        before_rounds = {"rounds": int(fields["both_ms"] is not None)}  # older files: one, if timed
        return cls(**(before_rounds | fields | {"shape": Shape(**fields["shape"])}))


class Clock:
    """Times work: by events on CUDA, with the L2 cache flushed before each, by the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        # Larger than any L2; writing it also gives the host time to queue the launch that is timed.
        self._flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if self.cuda else None

    def time(
        self, work: Callable[[], object], before: Callable[[], object] | None = None, repeats: int = 1
    ) -> list:
        """Milliseconds of each of `repeats` runs of `work`; `before` runs untimed ahead of each."""
        spans = []
        for _ in range(repeats):
            if before is not None:
                before()
            spans.append(self._span(work))
        if not self.cuda:
            return spans
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in spans]

    def _span(self, work: Callable[[], object]) -> object:
        if not self.cuda:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        work()
        end.record()
        return start, end

    def copy_bandwidth(self, size: int = 1 << 30) -> float:
        """Bytes a second of a large copy, read and written both counted: what the memory gives now."""
        source = torch.randint(0, 127, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        self.time(lambda: target.copy_(source), repeats=3)
        milliseconds = statistics.median(self.time(lambda: target.copy_(source), repeats=20))
        return 2 * size / (milliseconds / 1e3)

    def empty_node(self) -> tuple[float, float]:
        """Milliseconds of a forward and a backward that do nothing: autograd's part of an eager call."""
        x = torch.zeros(1, device=self.device, requires_grad=True)
        do = torch.ones(1, device=self.device)
        made: list[Tensor] = []

        def forward() -> None:
            made[:] = [_EmptyNode.apply(x)]

        def backward() -> None:
            torch.autograd.grad(made[0], x, do)

        times = self.time(forward, repeats=50), self.time(backward, forward, repeats=50)
        return tuple(statistics.median(spans) for spans in times)


class _EmptyNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, do: Tensor) -> Tensor:
        return do


class Call:
    """A peer's forward and backward on one set of inputs."""

    def __init__(self, peer: Peer, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.peer = peer
        self.inputs = peer.inputs(shape, dtype, device)
        self.leaves = {name: x for name, x in self.inputs.items() if x.requires_grad}
        generator = torch.Generator(device).manual_seed(21)
        self.do = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        self.o: Tensor | None = None
        self.grads: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        self.clear()  # or two outputs would live at once
        self.o = self.peer.call(self.inputs)

    def backward(self) -> None:
        self.grads = ()
        self.grads = torch.autograd.grad(self.o, list(self.leaves.values()), self.do)

    def both(self) -> None:
        self.forward()
        self.backward()

    def clear(self) -> None:
        self.o, self.grads = None, ()


def measure(
    peer: Peer,
    shape: Shape,
    dtype: torch.dtype,
    clock: Clock,
    *,
    limit: float = 10.0,
    graphs: bool = False,
    seconds: float = 0.15,
) -> Row:
    """Never raises for what the peer does. `seconds`: to aim for; `limit`: the most, compiling apart.

    This is the first round; `measure_again` gives more, and `over_rounds` makes one row of them.
    """
    row = Row(peer.name, shape, str(dtype).removeprefix("torch."), tolerance=peer.tolerance)
    row.forward_flops = peer.flops(shape)
    reason = peer.available(shape, dtype, clock.device)
    if reason is not None:
        row.status, row.reason = "skipped", reason
        return row
    return _filled(
        row, peer, dtype, clock, lambda call: _first_round(row, call, clock, limit, graphs, seconds)
    )


def measure_again(first: Row, peer: Peer, dtype: torch.dtype, clock: Clock) -> Row:
    """A later round of what `first` timed: the times alone, on inputs made anew, in a row of their own."""
    row = Row(first.peer, first.shape, first.dtype, repeats=first.repeats)
    graphs = first.forward_graph_ms is not None
    return _filled(row, peer, dtype, clock, lambda call: _round(row, call, clock, graphs))


def over_rounds(rows: list[Row]) -> Row:
    """The first round's row, with each time the median over the rounds. A later round in which anything
    failed does not count, and `reason` says so."""
    first, *later = rows
    if not later:
        return first
    whole = [first, *(row for row in later if row.rounds and not row.graph)]
    lost = [f"round {n}: {row.reason or row.graph}" for n, row in enumerate(later, 2) if row not in whole]
    times = {name: [getattr(row, name) for row in whole] for name in TIMES}
    medians = {name: statistics.median(ms) for name, ms in times.items() if None not in ms}
    by_round = {name: times[name] for name in medians}
    reason = "; ".join(filter(None, [first.reason, *lost]))
    return replace(first, rounds=len(whole), by_round=by_round, reason=reason, **medians)


def _filled(row: Row, peer: Peer, dtype: torch.dtype, clock: Clock, work: Callable[[Call], None]) -> Row:
    """The row, which `work` fills from a call on new inputs; what that raises becomes the row's status."""
    try:
        work(Call(peer, row.shape, dtype, clock.device))
    except torch.OutOfMemoryError:
        row.status, row.reason = "oom", "out of memory"
    except Exception as error:  # a peer that cannot take this shape is a row, not the end of the run
        row.status, row.reason = "error", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        if clock.cuda:
            torch.cuda.empty_cache()
    return row


def _first_round(row: Row, call: Call, clock: Clock, limit: float, graphs: bool, seconds: float) -> None:
    """Compiles, measures memory and correctness, finds how many runs fit, and times them."""
    call.both()  # compiles, autotunes: no time of measuring
    start = time.perf_counter()
    if clock.cuda:
        torch.cuda.synchronize(clock.device)
        _memory(row, call, clock.device)
    row.errors = errors(call, row.shape)
    if not all(error <= row.tolerance for error in row.errors.values()):
        worst = max(row.errors, key=lambda name: _nan_last(row.errors[name]))
        row.status, row.reason = "wrong", f"{worst} is off by {row.errors[worst]:.1e} (relative RMS)"
    call.clear()

    once = sum(clock.time(call.both)) / 1e3
    left = max(limit - (time.perf_counter() - start), 0.0)
    row.repeats = int(max(3, min(50, seconds / once, left / (3 * once))))
    _round(row, call, clock, graphs, check=True)


def _round(row: Row, call: Call, clock: Clock, graphs: bool, check: bool = False) -> None:
    """The times, after two runs that are not timed; `check`, in the first round: see `_graphs`."""
    clock.time(call.both, repeats=2)
    row.forward_ms = statistics.median(clock.time(call.forward, call.clear, row.repeats))
    call.clear()
    row.backward_ms = statistics.median(clock.time(call.backward, call.forward, row.repeats))
    row.both_ms = statistics.median(clock.time(call.both, call.clear, row.repeats))
    row.rounds = 1
    call.clear()
    if graphs and clock.cuda:
        _graphs(row, call, clock, check)


def _nan_last(x: float) -> float:
    return float("inf") if x != x else x


def _memory(row: Row, call: Call, device: torch.device) -> None:
    """Peak memory beyond what is there before the call: the inputs, do and the benchmark's own buffers."""
    call.clear()
    base, unit = torch.cuda.memory_allocated(device), row.shape.unit_bytes(call.do.element_size())
    torch.cuda.reset_peak_memory_stats(device)
    call.forward()
    row.forward_memory = (torch.cuda.max_memory_allocated(device) - base) / unit
    call.backward()
    row.both_memory = (torch.cuda.max_memory_allocated(device) - base) / unit


def _graphs(row: Row, call: Call, clock: Clock, check: bool) -> None:
    """Replays of CUDA graphs: the same work without Python.

    `check`: whether they are right, and those of `_base` beside them.
    """
    try:
        forward, backward = graphs = _capture(call, clock)
        forward.replay()
        backward.replay()
        if check and not all(error <= row.tolerance for error in errors(call, row.shape).values()):
            row.graph = "a replay gives another result"
            return
        row.forward_graph_ms = statistics.median(clock.time(forward.replay, repeats=row.repeats))
        row.backward_graph_ms = statistics.median(clock.time(backward.replay, forward.replay, row.repeats))
        if check and (base := _base(call.peer, row.shape)) is not None:
            graphs_of_base = _capture(Call(*base, call.do.dtype, clock.device), clock)
            row.beside = _beside(graphs, graphs_of_base, clock, turns=max(1, row.repeats // 2))
    except torch.OutOfMemoryError:
        row.graph = "out of memory"
    except Exception as error:
        row.graph = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        call.clear()


Graphs = tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]  # of forward and of backward


def _capture(call: Call, clock: Clock) -> Graphs:
    """Graphs of forward and, captured after it, of backward."""
    stream = torch.cuda.Stream(clock.device)
    stream.wait_stream(torch.cuda.current_stream(clock.device))
    with torch.cuda.stream(stream):
        call.both()
    torch.cuda.current_stream(clock.device).wait_stream(stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward, stream=stream):
        call.forward()
    with torch.cuda.graph(backward, stream=stream, pool=forward.pool()):
        call.backward()
    return forward, backward


def _base(peer: Peer, shape: Shape) -> tuple[Peer, Shape] | None:
    """What a cell is also timed in turn with: a variant with its base, our long sequences with REFERENCE."""
    if peer.variant_of is not None:
        return PEERS[peer.variant_of], shape
    return (peer, REFERENCE) if peer.ours and shape in LONG else None


def _beside(graphs: Graphs, base: Graphs, clock: Clock, turns: int) -> list[float]:
    """The times of forward and of backward, of those of `base`: replays of both, a few at a time in turn.

    A few per cent between two cells are less than what clocks drift from one to the next.
    """
    ratios: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        times = [
            (clock.time(forward.replay, repeats=5), clock.time(backward.replay, forward.replay, 5))
            for forward, backward in (graphs, base)
        ]
        for found, ours, others in zip(ratios, *times, strict=True):
            found.append(statistics.median(ours) / statistics.median(others))
    return [statistics.median(found) for found in ratios]


# Correctness


def errors(call: Call, shape: Shape) -> dict[str, float]:
    """Relative RMS errors of o and of the gradients against the peer's oracle in float64, on up to four
    (batch, head) slices, the outermost: a wrong offset shows in the last."""
    batches, heads = (
        ([-1], [-1]) if shape.N >= ONE_SLICE else (sorted({0, shape.B - 1}), sorted({0, shape.H - 1}))
    )
    take = lambda x: _slice(x.detach(), batches, heads)  # noqa: E731
    exact = {name: take(x).double().requires_grad_(x.requires_grad) for name, x in call.inputs.items()}
    o, do = take(call.o), take(call.do).double()
    got = {f"d{name}": take(grad) for name, grad in zip(call.leaves, call.grads, strict=True)}
    leaves = [exact[name] for name in call.leaves]
    if call.peer.quadratic:
        rows = slice(-min(TAIL, shape.N), None)
        expected = call.peer.oracle(exact | {"q": exact["q"][:, rows]})
        o, do = o[:, rows], do[:, rows]
        grads = torch.autograd.grad(expected, leaves, do)
        got, grads = {name: x[:, rows] for name, x in got.items()}, [x[:, rows] for x in grads]
    else:
        expected = call.peer.oracle(exact)
        grads = torch.autograd.grad(expected, leaves, do)
    pairs = [("o", o, expected), *((name, x, y) for (name, x), y in zip(got.items(), grads, strict=True))]
    return {name: _relative_rms(x, y.detach()) for name, x, y in pairs}


def _slice(x: Tensor, batches: list[int], heads: list[int]) -> Tensor:
    """Of [B, N, H, D], [B, N, 3, H, D] or [H] the chosen batches and heads; [N, R] as it is."""
    if x.ndim == 1:
        return x[heads]
    return x if x.ndim == 2 else x[batches][..., heads, :]


def _relative_rms(x: Tensor, exact: Tensor) -> float:
    return (torch.linalg.vector_norm(x.double() - exact) / torch.linalg.vector_norm(exact)).item()
