"""The sweep over peers and shapes, and the file that keeps what it found."""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lingpt.common.errors import UserError
from lingpt.kernels.bench.environment import environment, not_alone
from lingpt.kernels.bench.measure import Clock, Row, measure, measure_again, over_rounds
from lingpt.kernels.bench.peers import DEFAULT_PEERS, PEERS, Peer
from lingpt.kernels.bench.shapes import CUMSUM, QUICK, SWEEPS, Shape

ROUNDS = 5  # of the training shapes, whose times are compared as ratios


@dataclass
class Results:
    """One run: where it ran, what the memory gives, and a row a peer and shape."""

    environment: dict
    copy_bandwidth: float  # bytes a second, read and written both counted
    rows: list[Row] = field(default_factory=list)
    bytes_moved: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # peer → direction → bytes, by counters
    empty_node_ms: list[float] = field(default_factory=list)  # autograd doing nothing: forward, backward

    def row(self, peer: str, shape: Shape, field: str = "both_ms") -> Row | None:
        """The peer's row at this shape, if what `field` timed is right (by default forward and backward)."""
        return next((r for r in self.rows if r.cell == (peer, shape) and r.right(field)), None)

    def floor_ms(self, shape: Shape, units: int) -> float:
        """The time of moving `units` × U at the copy bandwidth."""
        return units * shape.unit_bytes() / self.copy_bandwidth * 1e3

    def has(self, peer: str, shape: Shape) -> bool:
        """Whether this cell is done, whatever came of it; what was skipped may be tried again."""
        return any(r.cell == (peer, shape) and r.status != "skipped" for r in self.rows)

    def keep(self, row: Row) -> None:
        """Takes the row in, in the place of an earlier one of this cell."""
        index = next((i for i, r in enumerate(self.rows) if r.cell == row.cell), len(self.rows))
        self.rows[index : index + 1] = [row]

    def save(self, path: Path) -> None:
        head = {
            "environment": self.environment,
            "copy_bandwidth": self.copy_bandwidth,
            "bytes_moved": self.bytes_moved,
            "empty_node_ms": self.empty_node_ms,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".part")
        aside.write_text(json.dumps(head | {"rows": [row.as_dict() for row in self.rows]}, indent=1) + "\n")
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            fields = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise UserError(f"no results at {path}: run `lingpt bench` first") from None
        return cls(**(fields | {"rows": [Row.from_dict(row) for row in fields["rows"]]}))


def run_bench(
    only: Iterable[str] = (),
    peers: Iterable[str] = (),
    *,
    quick: bool = False,
    budget: float = 1200.0,
    limit: float = 6.0,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    sweeps: dict[str, tuple[Shape, ...]] | None = None,
    save_to: Path | None = None,
    append: bool = False,
    progress: bool = True,
) -> Results:
    """Measures `peers` (names; default: all but the slow PyTorch ones) on the sweeps named in `only` (all).

    `quick` takes fewer shapes; `budget` is in seconds, and what does not fit is recorded as skipped; `limit`
    is the most that one peer may take at one shape in a round, predicted from its smaller ones. A shape of
    two sweeps is measured once. The results go to `save_to` after every row; `append` keeps the rows that are
    there, if they are of this card, these versions and this source.

    Hosts and clocks drift, by 5 % to twofold within a minute. So the training shapes, which are compared, are
    timed in ROUNDS rounds, each over all of them and all peers: ratios are drawn within a round, and no row
    has the bad minute alone. Once the budget is spent, no further timing begins. Rows kept by `append` are
    not timed again: a ratio is best drawn from two rows of one run.

    Raises UserError for a name that does not exist and for a machine without the device.
    """
    from tqdm import tqdm

    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "the benchmark needs a CUDA device, and there is none here (--device cpu measures PyTorch's)"
        )
    sweeps = sweeps or (QUICK if quick else SWEEPS)
    chosen = [PEERS[name] for name in known(peers, PEERS, "peer") or DEFAULT_PEERS]
    training = set(sweeps.get("training", ()))
    shapes = list(dict.fromkeys(s for name in known(only, sweeps, "sweep") or sweeps for s in sweeps[name]))
    if device.index is not None:
        torch.cuda.set_device(device)
    clock = Clock(device)
    if clock.cuda and (line := not_alone(device)):
        warnings.warn(line, stacklevel=2)
    results = _kept(save_to, device) if append and save_to and save_to.is_file() else None
    if results is None:
        results = Results(environment(device), clock.copy_bandwidth(1 << 30 if clock.cuda else 1 << 24))
        results.empty_node_ms = list(clock.empty_node())
    deadline = time.perf_counter() + budget
    cells = _in_rounds(shapes, chosen, training, results)
    found: dict[tuple[str, Shape], list[Row]] = defaultdict(list)  # a row a round
    bar = tqdm(cells, desc="bench", unit="timing", disable=None if progress else True)
    for n, shape, peer in bar:
        bar.set_postfix_str(f"{peer.name} {shape} round {n}")
        rows = found[peer.name, shape]
        spent = f"the budget of {budget:.0f} s is spent" if time.perf_counter() > deadline else None
        if n > 1 and (spent or not rows[-1].rounds):  # never timed, or failed since
            continue
        if n > 1:
            row = measure_again(rows[0], peer, dtype, clock)
        elif reason := spent or _too_slow(results.rows, peer, shape, limit):
            row = Row(peer.name, shape, str(dtype).removeprefix("torch."), "skipped", reason)
        else:
            graphs = shape in training and shape != CUMSUM
            row = measure(peer, shape, dtype, clock, limit=limit, graphs=graphs)
        rows.append(row)
        results.keep(over_rounds(rows))
        if save_to is not None:
            results.save(save_to)
    return results


def _in_rounds(
    shapes: list[Shape], peers: list[Peer], training: set[Shape], done: Results
) -> list[tuple[int, Shape, Peer]]:
    """Round, shape and peer of what is to be measured: all rounds of the training shapes, then the rest."""
    rounds = [(n, shape) for n in range(1, 1 + ROUNDS) for shape in shapes if shape in training]
    once = [(1, shape) for shape in shapes if shape not in training]
    return [
        (n, shape, peer)
        for n, shape in rounds + once
        for peer in peers
        if (shape in training or not peer.training_only) and not done.has(peer.name, shape)
    ]


def _kept(path: Path, device: torch.device) -> Results:
    """The results at `path`, if another run here would give the same."""
    results, now = Results.load(path), environment(device)
    differ = [key for key in now if key != "date" and results.environment.get(key) != now[key]]
    if differ:
        raise UserError(f"{path} is of another {', '.join(differ)}: measure anew, without --append")
    return results


def known(names: Iterable[str], there: Iterable[str], what: str) -> list[str]:
    """Each of the names once; UserError for one that is not there."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in there:
            raise UserError(f"unknown {what} {name!r}: there are {', '.join(there)}")
    return names


def _too_slow(rows: list[Row], peer: Peer, shape: Shape, limit: float) -> str | None:
    """Why the peer is not tried at this shape, going by the shapes that it was timed at."""
    predicted = _predict(rows, peer, shape)
    if predicted is None or 8 * predicted <= limit:  # one to warm, one to size, two, three to time and more
        return None
    return f"would take about {predicted:.1f} s a call, the limit is {limit:.0f} s in all"


def _predict(rows: list[Row], peer: Peer, shape: Shape) -> float | None:
    """Seconds of forward and backward at `shape`, scaled from the largest timed; None if none was."""
    timed = [row for row in rows if row.peer == peer.name and row.both_ms is not None]
    if not timed:
        return None

    def work(s: Shape) -> float:
        return s.B * s.H * s.D * s.N ** (2 if peer.quadratic else 1)

    largest = max(timed, key=lambda row: work(row.shape))
    return largest.both_ms / 1e3 * work(shape) / work(largest.shape)
