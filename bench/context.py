"""`lingpt bench context`: steps of real runs whose sequences are divided over the devices of one host.

Each row is a run of `lingpt train` in processes of its own, so that one that fails leaves the others:

- `one`: the base length on one device, with as many tokens a step as a device has of the longest sequence;
  `ddp`: the same on each of them
- `first`: the first step at a middle length, on one device and over all, whose losses must be equal
- `pieces`: the long sequences, one at a time, over all devices

Rows are written to a JSON file as they come, with the share of communication that the plan of each expects.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lingpt.bench.environment import environment
from lingpt.bench.results import markdown
from lingpt.common.files import write_json
from lingpt.common.run_folder import read_metrics
from lingpt.train.console import print_rank0

# The embedded text as bytes: the most tokens that need no download.
DATA = ["--data.source", "embedded", "--data.vocab_size", "257"]


@dataclass
class Row:
    """A run: the attention, tokens per sequence, devices, and over how many a sequence is divided. Rates are
    per device; memory is a device's peak in GB; `error` is why it has none."""

    kind: str
    attention: str
    seq_len: int
    devices: int
    context_parallel: int = 1
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float | None = None
    memory: float | None = None
    relative: float | None = None  # the rate over that of `one`
    planned_share: str | None = None
    error: str | None = None

    def line(self) -> str:
        said = self.error or f"first loss {self.losses[0]:.5f}"
        if self.tokens_per_second:
            said += f", {self.tokens_per_second:,.0f} tokens/s a device"
        if self.relative:
            said += f", {self.relative:.3f} × one"
        return f"{self.kind} {self.attention} N = {self.seq_len:,} on {self.devices}: {said}"


def rows_of(
    attentions: Sequence[str], seq_lens: Sequence[int], base_len: int, check_len: int, devices: int
) -> Iterator[Row]:
    for attention in attentions:
        yield Row("one", attention, base_len, 1)
        yield Row("ddp", attention, base_len, devices)
        yield from (Row("pieces", attention, n, devices, devices) for n in sorted(seq_lens))
        yield Row("first", attention, check_len, 1)
        yield Row("first", attention, check_len, devices, devices)


def bench_context(
    model: str,
    attentions: Sequence[str],
    seq_lens: Sequence[int],
    *,
    base_len: int,
    check_len: int,
    devices: int,
    accelerator: str,
    steps: int,
    budget: float,
    options: Sequence[str],
    out: Path,
) -> list[Row]:
    """Runs all rows, none after `budget` seconds; `options`: more of `lingpt train`'s, for every row."""
    until, rows, base = time.monotonic() + budget, list[Row](), dict[str, float]()
    out.mkdir(parents=True, exist_ok=True)
    text = out / "validation.txt"  # as long as the longest row, which the embedded validation text is not
    text.write_text("A line of text.\n" * (max(*seq_lens, base_len, check_len) // 16 + 1))
    options = ["--data.val_source", str(text), *options]
    settings = {"model": model, "steps": steps, "options": list(options), "environment": environment()}
    for row in rows_of(attentions, seq_lens, base_len, check_len, devices):
        tokens = max(seq_lens) // devices  # of a device in a step, but for the first losses
        words = _command(row, tokens, model, steps, accelerator, options, out)
        left = until - time.monotonic()
        if left < 1:
            row.error = "skipped: the budget is spent"
        else:
            _run(row, words, out, left)
        if row.kind == "one" and row.tokens_per_second:
            base[row.attention] = row.tokens_per_second
        if row.tokens_per_second and row.attention in base:
            row.relative = row.tokens_per_second / base[row.attention]
        rows.append(row)
        print_rank0(row.line())
        write_json(out / "context.json", settings | {"rows": [asdict(row) for row in rows]})
    return rows


def _command(
    row: Row, tokens: int, model: str, steps: int, accelerator: str, options: Sequence[str], out: Path
) -> list[str]:
    """The command that trains the row; with sequences of their own, devices have `tokens` in a step."""
    groups, own = row.devices // row.context_parallel, row.kind in ("one", "ddp")
    sequences = groups * (max(1, tokens // row.seq_len) if own else 1)
    values = {
        "model.name": model, "model.attention": row.attention, "model.block_size": row.seq_len,
        "data.seq_len": row.seq_len, "train.global_batch_size": sequences, "train.micro_batch_size": 1,
        "train.max_steps": 1 if row.kind == "first" else steps, "train.eval_tokens": row.seq_len,
        "train.devices": row.devices, "train.context_parallel": row.context_parallel,
        "train.accelerator": accelerator, "train.out_dir": out / "runs", "train.resume": "never",
        "train.name": f"{row.kind}-{row.attention}-{row.seq_len}-{row.devices}", "train.wandb": "false",
        "train.sample_tokens": 0, "train.save_interval": 10**9, "train.learning_rate": 1e-5,
        "train.min_learning_rate": 0,
    }  # fmt: skip
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-P", "-m", "lingpt.cli.main", "train", *DATA, *words, *options]


def _run(row: Row, words: list[str], out: Path, seconds: float) -> None:
    """Trains the row and reads what came of it."""
    if row.context_parallel > 1:
        plan = subprocess.run([*words, "--train.dry_run", "true"], capture_output=True, text=True)
        found = re.search(r"share of a step on H100s: (.*)", plan.stdout)
        row.planned_share = found and found.group(1)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        row.error = f"stopped after {seconds:.0f} s, the budget"
        return
    if done.returncode:
        row.error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return
    run = out / "runs" / words[words.index("--train.name") + 1]
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    shutil.rmtree(run)  # its checkpoint is 12 bytes a parameter
    row.losses = [line["loss"] for line in lines]
    rates = [line["tokens_per_second"] / row.devices for line in lines[1:]]  # without the first
    row.tokens_per_second = max(rates, default=None)
    if printed := re.findall(r" · ([\d.]+) GB · ", done.stdout):
        row.memory = float(printed[-1])


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("kind", "attention", "N", "devices", "tokens/s a device", "of one", "GB a device", "first loss")
    cells = [
        [
            row.kind,
            row.attention,
            f"{row.seq_len:,}",
            str(row.devices),
            row.error or (f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else ""),
            f"{row.relative:.3f}" if row.relative else "",
            f"{row.memory:.1f}" if row.memory else "",
            f"{row.losses[0]:.5f}" if row.losses else "",
        ]
        for row in rows
    ]
    return markdown(head, cells)
