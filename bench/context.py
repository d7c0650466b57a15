"""`lingpt bench context`: steps of real runs whose sequences are divided over the devices of one host.

Each row is a run of `lingpt train` in processes of its own, so that one that fails leaves the others:

- `one`: the base length on one device, `ddp`: on each of them, with as many tokens a step
- `first`: the first step at a middle length, on one device and over all; of another loss it is `wrong`
- `pieces`: the long sequences, each over all devices; the third step is traced

A step has as many tokens a device in each row, or one sequence if that is more, so that gradients and
optimizer weigh the same. Beside each row are its plan's estimates: tokens/s, memory, and the share of
communication.
"""

import contextlib
import functools
import itertools
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from lingpt.bench.context_results import Results, Row
from lingpt.bench.processes import Processes
from lingpt.bench.results import BenchResults, Session, Skipped
from lingpt.bench.trace import draw_trace, read_trace
from lingpt.common.arguments import command_line
from lingpt.common.errors import UserError
from lingpt.common.files import write_errors
from lingpt.common.run_folder import PROFILE, read_metrics
from lingpt.train.config import TrainConfig
from lingpt.train.console import print_rank0
from lingpt.train.planning.machine import choose_machine
from lingpt.train.planning.memory_fit import fits_here
from lingpt.train.planning.plan import estimate
from lingpt.train.profile import SKIPPED, TRACE
from lingpt.train.recipe import parse_recipe
from lingpt.train.start import check_recipe

# The embedded text as bytes: the most tokens that need no download.
DATA = ["--data.source", "embedded", "--data.vocab_size", "257"]
OWN_TOKENS = 1 << 17  # at most, of a device in a step of `one` and `ddp`: the optimizer is 1 % of the step
LOSS_TOLERANCE = 1e-5  # relative; sums in another order make 1e-6, sequences that are cut 1e-4 and more
OVERHEAD = 1.5  # a run's warm-up and validation, in steps
OFFLOAD = "--train.offload_activations true"


def rows_of(
    model: str,
    attentions: Sequence[str],
    seq_lens: Sequence[int],
    base_len: int,
    check_len: int,
    devices: int,
) -> Iterator[Row]:
    """The rows, the longest last."""
    own = max(1, min(OWN_TOKENS, max(seq_lens) // devices) // base_len)
    for attention in attentions:
        yield Row(model, "one", attention, base_len, 1, batch=own)
        yield Row(model, "ddp", attention, base_len, devices, batch=own * devices)
        yield Row(model, "first", attention, check_len, 1)
        yield Row(model, "first", attention, check_len, devices, devices)
    for seq_len in sorted(seq_lens):
        batch = max(1, own * devices * base_len // seq_len)
        for attention in attentions:
            yield Row(model, "pieces", attention, seq_len, devices, devices, batch)


def bench_context(
    model: str,
    attentions: Sequence[str],
    seq_lens: Sequence[int],
    *,
    base_len: int,
    check_len: int,
    devices: int,
    accelerator: Literal["auto", "cpu", "cuda"],
    steps: int,
    budget: float,
    options: str,
    append: bool,
    save_to: Path,
) -> Results:
    """Measures all rows, none after `budget` seconds, and saves after each; `options`: more of `lingpt
    train`'s, for every row. UserError without so many devices, and for what one refuses to train: an unknown
    attention, a model that needs a GPU."""
    machine = choose_machine(TrainConfig(accelerator=accelerator, devices=devices, num_nodes=1))
    out = save_to.parent
    text = out / "validation.txt"  # as long as the longest row, which the embedded validation text is not
    common = ["--data.val_source", str(text), "--train.accelerator", accelerator, *options.split()]
    rows = list(rows_of(model, attentions, seq_lens, base_len, check_len, devices))
    for row in rows:
        if row.kind == "one":  # which fits if any does
            check_recipe(parse_recipe(_words(replace(row, steps=1), common, out)))
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        text.write_text("A line of text.\n" * (max(*seq_lens, base_len, check_len) // 16 + 1))
    precision = "bf16-mixed" if machine.accelerator == "cuda" else "32-true"
    results = Results.begin(torch.device(machine.accelerator), precision, save_to, append)
    if (former := results.environment.setdefault("options", options)) != options:
        raise UserError(f"{save_to} was measured with --options {former!r}: measure again, without --append")
    session = Session(results, torch.device("cpu"), budget, save_to)  # which holds no memory of a GPU
    rows = [row for row in rows if not results.is_done(*row.cell)]
    with contextlib.ExitStack() as stack:

        def start(row: Row) -> Processes:
            return stack.enter_context(Processes(row.devices, out / "logs" / _name(row)))

        waiting = start(rows[0]) if rows else None
        for row, then in itertools.zip_longest(rows, rows[1:]):
            own, waiting = waiting, start(then) if then else None
            assert own
            with own:  # those of a row that is left out still wait
                session.turn(row, functools.partial(_measure, own, session, steps, common, out))
            print_rank0(row.line())
    return results


def _measure(
    processes: Processes, session: Session[Row], steps: int, common: Sequence[str], out: Path, row: Row
) -> None:
    """Plans the row, trains it and reads what came of it."""
    row.steps = 1 if row.kind == "first" else steps
    seconds = _plan(row, common, out)
    left = session.deadline - time.perf_counter()
    if (row.steps + OVERHEAD) * seconds > left:
        row.steps = 1
    if (row.steps + OVERHEAD) * seconds > left:
        raise Skipped(f"a step takes {seconds:.0f} s by the plan, and {left:.0f} s of the budget are left")
    words = _words(row, common, out)
    run = parse_recipe(words).run_folder
    try:
        failed = processes.run(["train", *words], left)
        if failed:
            row.status, row.reason = "oom" if "out of memory" in failed else "error", failed
        else:
            _read(row, run, out)
    except TimeoutError:
        why = f"stopped after {left:.0f} s, the rest of the budget"
        if len(_steps(run)) < row.steps:
            raise Skipped(why) from None
        row.reason = f"{why}: its steps are whole"
        _read(row, run, out)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    _check_first_loss(row, session.results)


def _plan(row: Row, common: Sequence[str], out: Path) -> float:
    """Fills in a dry run's estimates, and OFFLOAD if the row does not fit without it; returns the seconds
    of a step."""
    recipe = parse_recipe(_words(row, common, out))
    gpt, machine, _ = check_recipe(recipe)
    if machine.accelerator == "cuda" and not fits_here(machine, gpt, recipe):
        row.options = OFFLOAD
        recipe = parse_recipe(_words(row, common, out))
        gpt, machine, _ = check_recipe(recipe)
    plan = estimate(recipe, machine, gpt)
    row.planned_tokens_per_second = plan.tokens_per_second / row.devices
    row.planned_memory, row.planned_sending = plan.memory, plan.sending
    return recipe.tokens_per_step / plan.tokens_per_second


def _check_first_loss(row: Row, results: BenchResults[Row]) -> None:
    one = results.row(row.model, "first", row.attention, row.seq_len, 1)
    if row.kind == "first" and row.losses and one and one.losses:
        own, expected = row.losses[0], one.losses[0]
        if not math.isclose(own, expected, rel_tol=LOSS_TOLERANCE):
            row.status, row.reason = "wrong", f"the loss is {own:.5f}, that of one device {expected:.5f}"


def _words(row: Row, common: Sequence[str], out: Path) -> list[str]:
    values = {
        "model.name": row.model, "model.attention": row.attention, "model.block_size": row.seq_len,
        "data.seq_len": row.seq_len, "train.global_batch_size": row.batch, "train.micro_batch_size": 1,
        "train.max_steps": row.steps, "train.eval_tokens": row.seq_len, "train.devices": row.devices,
        "train.context_parallel": row.context_parallel, "train.out_dir": str(out / "runs"),
        "train.resume": "never", "train.name": _name(row), "train.wandb": False, "train.sample_tokens": 0,
        "train.keep_checkpoints": 0, "train.learning_rate": 1e-5, "train.min_learning_rate": 0,
        "train.profile": row.kind == "pieces" and row.steps > SKIPPED,
    }  # fmt: skip
    return [*DATA, *command_line(values), *common, *row.options.split()]


def _read(row: Row, run: Path, out: Path) -> None:
    """The row's losses, rate and memory from its run, and its trace, which is kept and drawn."""
    lines = _steps(run)
    row.losses, row.peak_memory = [line["loss"] for line in lines], lines[-1]["peak_memory"]
    if row.kind != "first":
        timed = lines[1:] or lines
        row.tokens_per_second = max(line["tokens_per_second"] for line in timed) / row.devices
    trace = run / PROFILE / TRACE
    if trace.exists():
        trace = trace.rename(out / f"{_name(row)}.{TRACE}")
        step = read_trace(trace)
        row.sending = step.shares()
        title = f"{row.model} with {row.attention}, N = {row.seq_len:,} over {row.devices} devices: a step"
        draw_trace(step, title, out / f"{_name(row)}.png")


def _steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if line["kind"] == "train"]


def _name(row: Row) -> str:
    return f"{row.kind}-{row.attention}-{row.seq_len}-{row.devices}"
