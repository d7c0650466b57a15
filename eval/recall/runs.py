"""Trains MQAR's models in parallel; each result is saved as it comes."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.files import set_aside, write_errors, write_json
from lingpt.common.locks import file_lock
from lingpt.common.run_folder import LOCK
from lingpt.eval.recall.mqar import (
    TRIALS_PER_GPU,
    Trained,
    Trial,
    is_tuned_first,
    train_trial,
    tune,
    without_conv,
)
from lingpt.eval.recall.results import RESULTS, mqar_table, read_known, save_mqar

Outcome = tuple[Trial, Trained | BaseException]


def run_mqar(trials: list[Trial], folder: Path, workers: int | None = None) -> list[Trained]:
    """Trains and scores the trials without a result in `folder`; writes mqar.json, the table and the figure.

    Args:
        trials: from `make_trials`.
        folder: for the results; those of other trials are kept, a damaged file is set aside.
        workers: processes; by default `TRIALS_PER_GPU` per GPU, and only this one without a GPU.

    Returns each trial's result, in the order of `trials`. Raises UserError at the end if some failed.
    """
    path, failed = folder / RESULTS, []
    _, known = _known(path, trials)
    left = [trial for trial in trials if trial.key not in known]
    print(f"{len(trials)} models, {len(left)} to train; {path}")
    for trial, result in _trained(left, workers):
        if isinstance(result, BaseException):
            failed.append(f"{trial.key}: {' '.join(str(result).split())[:200]}")
            print(f"failed: {failed[-1]}")
            continue
        known[trial.key] = result
        with _locked(folder):
            others, found = _known(path, trials)  # another command may have written there meanwhile
            known = found | known
            write_json(path, {"results": [asdict(one) for one in [*others, *known.values()]]}, indent=1)
        print(f"{trial.key}: accuracy {100 * result.accuracy:.2f} after {result.trained_steps} steps")
    results = [known[trial.key] for trial in trials if trial.key in known]
    if results:
        table = mqar_table(results)
        print(f"\n{table.text()}\n\nWritten: " + ", ".join(str(p) for p in save_mqar(results, folder)))
    if failed:
        raise UserError(
            f"{len(failed)} of {len(trials)} models failed, the same command tries again: {failed[0]}"
        )
    return results


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one command at a time read the results and write them; UserError if they cannot be written."""
    with write_errors(folder / RESULTS), file_lock(folder / LOCK):
        yield


def _known(path: Path, trials: list[Trial]) -> tuple[list[Trained], dict[str, Trained]]:
    """`read_known`; a damaged file is set aside."""
    try:
        return read_known(path, trials)
    except UserError:
        print(f"{path} is damaged; it is kept as {set_aside(path, 'damaged').name}")
        return [], {}


def _trained(trials: list[Trial], workers: int | None) -> Iterator[Outcome]:
    """(trial, its result or the error), as they finish: in this process, or in several on all GPUs."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    workers = min(workers or max(1, TRIALS_PER_GPU * cards), max(1, len(trials)))
    if workers == 1:
        for trial in trials:
            try:
                yield trial, train_trial(trial, "cuda" if cards else "cpu")
            except Exception as error:
                yield trial, error
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def in_a_pool(left: list[Trial]) -> Iterator[Outcome]:
        devices = context.Queue()
        for i in range(workers):
            devices.put(f"cuda:{i % cards}" if cards else "cpu")
        not_ours = multiprocessing.active_children()
        with ProcessPoolExecutor(workers, context, initializer=_take_device, initargs=(devices,)) as pool:
            tuned_first = [trial for trial in left if cards and is_tuned_first(trial)]
            try:
                yield from _as_trained(pool, _train_here, left, tuned_first, tune)
            except BaseException:  # such as a signal: do not wait for results that would be discarded
                for process in multiprocessing.active_children():
                    if process not in not_ours:
                        process.terminate()
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    yield from _in_new_pools(trials, in_a_pool)


def _in_new_pools(
    trials: list[Trial], in_a_pool: Callable[[list[Trial]], Iterator[Outcome]]
) -> Iterator[Outcome]:
    """What `in_a_pool` yields. If a process dies, the remaining trials are trained in a new pool, as long as
    each pool finishes at least one."""
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
    train: Callable[[Trial], Trained],
    trials: list[Trial],
    tuned_first: list[Trial],
    tune: Callable[[Trial], None],
) -> Iterator[Outcome]:
    """(trial, its result or the error), as they finish in `pool`.

    Those of `tuned_first` start last: the kernels of each attention and width are autotuned first, one after
    another as each takes all cores, while the pool trains the rest.
    """
    done: SimpleQueue[Outcome] = SimpleQueue()

    def put(trial: Trial, future: Future[Trained]) -> None:
        if not future.cancelled():
            done.put((trial, future.exception() or future.result()))

    def submit(trial: Trial) -> None:
        try:
            future = pool.submit(train, trial)
        except RuntimeError as error:  # a process of the pool died, or it is shut down
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
    """Initialises a worker process: takes its device from the queue and limits PyTorch to one thread."""
    device = os.environ["LINGPT_MQAR_DEVICE"] = devices.get()
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)


def _train_here(trial: Trial) -> Trained:
    return train_trial(trial, os.environ["LINGPT_MQAR_DEVICE"])
