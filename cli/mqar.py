"""`lingpt mqar`: trains small models on associative recall, side by side, and shows how much each recalls."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lingpt.cli.jobs import as_word

if TYPE_CHECKING:
    from lingpt.eval.mqar import Trial

HELP = "Train small models on associative recall (MQAR), and show how much each attention recalls."
RESULTS = "mqar.json"
_WITH_CONV = ("gla", "ours", "ours-decay", "ours-gated", "ours-gated+output_gate")
DEFAULT = ("softmax", *(name + conv for name in _WITH_CONV for conv in ("", "+short_conv")))
PER_CARD = 8  # processes that share a GPU: models this small leave most of it idle


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    names = "attentions, `+` their options: ours-gated+output_gate+short_conv"
    add("--attentions", nargs="+", default=list(DEFAULT), help=names)
    add("--widths", nargs="+", type=int, default=[64, 128], help="of the models")
    pairs = "of key and value in a sequence; it is 8 times as long"
    add("--pairs", nargs="+", type=int, default=[16, 32], help=pairs)
    rates = "peak learning rates; the best counts"
    add("--rates", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2], help=rates)
    add("--steps", type=int, default=4000, help="at most; training ends where all is right")
    add("--batch_size", type=int, default=256, help="sequences a step")
    add("--vocabulary", type=int, default=8192, help="half of it keys, half values")
    add("--workers", type=int | None, help="processes (8 a GPU; 1 without one)")
    add("--out", type=str, default="runs/mqar", help="folder of mqar.json, the table and the figure")


def asked_trials(args: Namespace) -> "list[Trial]":
    """The models that the arguments ask for. UserError where they make none."""
    from lingpt.common.errors import UserError
    from lingpt.eval.mqar import make_trials

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: give at least 1")
    for name in ("steps", "batch_size", "widths", "pairs", "rates"):
        values = args[name] if isinstance(args[name], list) else [args[name]]
        if min(values) <= 0:
            raise UserError(f"--{name} is {min(values)}: give more than 0")
    sizes = {"steps": args.steps, "batch_size": args.batch_size, "vocabulary": args.vocabulary}
    return make_trials(args.attentions, args.widths, args.pairs, args.rates, **sizes)


def command_line(options: Mapping[str, Any]) -> list[str]:
    """The arguments that a study's `mqar: {steps: 500, widths: [64]}` means."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    given = {key: values for key, values in lists.items() if values != [None]}
    return [word for key, values in given.items() for word in (f"--{key}", *map(as_word, values))]


def run(args: Namespace) -> None:
    from lingpt.common.errors import UserError
    from lingpt.common.files import write_errors, write_json
    from lingpt.eval.mqar_results import mqar_table, save_mqar

    trials = asked_trials(args)
    path, failed = Path(args.out) / RESULTS, []
    others, known = _known(path, trials)
    left = [trial for trial in trials if trial.key not in known]
    print(f"{len(trials)} models, {len(left)} to train; {path}")
    for trial, result in _trained(left, args.workers):
        if isinstance(result, Exception):
            failed.append(f"{trial.key}: {' '.join(str(result).split())[:200]}")
            print(f"failed: {failed[-1]}")
            continue
        known[trial.key] = result
        with write_errors(path):
            write_json(path, {"results": [*others, *known.values()]}, indent=1)
        print(f"{trial.key}: accuracy {100 * result['accuracy']:.2f} after {result['trained_steps']} steps")
    results = [known[trial.key] for trial in trials if trial.key in known]
    if results:
        table = mqar_table(results)
        print(f"\n{table.text()}\n\nWritten: " + ", ".join(str(p) for p in save_mqar(results, path.parent)))
    if failed:
        raise UserError(
            f"{len(failed)} of {len(trials)} models failed, the same command tries again: {failed[0]}"
        )


def _known(path: Path, trials: "list[Trial]") -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """`read_known`; a damaged file is kept aside."""
    from lingpt.common.errors import UserError
    from lingpt.common.files import set_aside

    try:
        return read_known(path, trials)
    except UserError:
        print(f"{path} is damaged; it is kept as {set_aside(path, 'damaged').name}")
        return [], {}


def read_known(path: Path, trials: "list[Trial]") -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """What the file holds: results of other trials, and those of these by key. UserError if damaged."""
    from dataclasses import asdict

    from lingpt.common.errors import UserError
    from lingpt.common.files import read_json_object

    if not path.exists():
        return [], {}
    try:
        found = read_json_object(path)["results"]
        same = [(t, r) for t in trials for r in found if asdict(t).items() <= r.items() and "accuracy" in r]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: remove it") from error
    others = [result for result in found if all(result is not known for _, known in same)]
    return others, {trial.key: result for trial, result in same}


def _trained(trials: "list[Trial]", workers: int | None) -> "Iterator[tuple[Trial, Any]]":
    """(trial, its result or the error), as they are done: in this process, or in several on all GPUs."""
    import torch

    from lingpt.eval.mqar import is_tuned_first, train_trial, tune

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    workers = min(workers or max(1, PER_CARD * cards), max(1, len(trials)))
    if workers == 1:
        for trial in trials:
            try:
                yield trial, train_trial(trial, "cuda" if cards else "cpu")
            except Exception as error:
                yield trial, error
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def in_a_pool(left: "list[Trial]") -> "Iterator[tuple[Trial, Any]]":
        devices = context.Queue()
        for i in range(workers):
            devices.put(f"cuda:{i % cards}" if cards else "cpu")
        with ProcessPoolExecutor(workers, context, initializer=_take_device, initargs=(devices,)) as pool:
            tuned_first = [trial for trial in left if cards and is_tuned_first(trial)]
            try:
                yield from _as_trained(pool, _train_here, left, tuned_first, tune)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    yield from _in_new_pools(trials, in_a_pool)


def _in_new_pools(
    trials: "list[Trial]", in_a_pool: "Callable[[list[Trial]], Iterator[tuple[Trial, Any]]]"
) -> "Iterator[tuple[Trial, Any]]":
    """What `in_a_pool` yields; those that were left when a process of the pool died are trained in a new one,
    for as long as each pool trains any."""
    left = trials
    while left:
        lost = []
        for trial, result in in_a_pool(left):
            if isinstance(result, BrokenProcessPool):
                lost.append((trial, result))
            else:
                yield trial, result
        if len(lost) == len(left):
            yield from lost
            return
        left = [trial for trial, _ in lost]
        if left:
            print(f"a process has died; the {len(left)} models that are left go on in new ones")


def _as_trained(
    pool: Executor,
    train: "Callable[[Trial], dict[str, Any]]",
    trials: "list[Trial]",
    tuned_first: "list[Trial]",
    tune: "Callable[[Trial], None]",
) -> "Iterator[tuple[Trial, Any]]":
    """(trial, its result or the error), as they are done in `pool`.

    Those of `tuned_first` come last: one of each attention and width is tuned for, one after the other as
    each takes all cores, while the pool trains the rest.
    """
    from lingpt.eval.mqar import without_conv

    done: SimpleQueue[tuple[Trial, Any]] = SimpleQueue()

    def put(trial: "Trial", future: Future[dict[str, Any]]) -> None:
        if not future.cancelled():
            done.put((trial, future.exception() or future.result()))

    def submit(trial: "Trial") -> None:
        try:
            future = pool.submit(train, trial)
        except RuntimeError as error:  # the pool has lost a process, or is shut
            done.put((trial, error))
        else:
            future.add_done_callback(lambda future: put(trial, future))

    def tune_and_submit() -> None:
        by_size: dict[tuple[str, int], list[Trial]] = {}
        for trial in tuned_first:
            by_size.setdefault((without_conv(trial.attention), trial.width), []).append(trial)
        for alike in by_size.values():
            try:
                tune(alike[0])
            except Exception as error:
                for trial in alike:
                    done.put((trial, error))
                continue
            for trial in alike:
                submit(trial)

    for trial in trials:
        if trial not in tuned_first:
            submit(trial)
    Thread(target=tune_and_submit, daemon=True).start()
    for _ in trials:
        yield done.get()


def _take_device(devices: Any) -> None:
    """Of a worker process: the device that it keeps, and no more threads than its share."""
    import torch

    device = os.environ["LINGPT_MQAR_DEVICE"] = devices.get()
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)


def _train_here(trial: "Trial") -> dict[str, Any]:
    from lingpt.eval.mqar import train_trial

    return train_trial(trial, os.environ["LINGPT_MQAR_DEVICE"])
