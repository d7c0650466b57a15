"""Trains MQAR's models in parallel; each result is saved as it comes."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

import torch

from lingpt.common.errors import UserError, one_line
from lingpt.common.files import set_aside, write_errors, write_json
from lingpt.common.format import counted
from lingpt.common.locks import file_lock
from lingpt.common.run_folder import LOCK
from lingpt.eval.recall.mqar import TRIALS_PER_GPU, Trained, Trial, train_trial
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
    print(f"{counted(len(trials), 'model')}, {len(left)} to train; {path}")
    for trial, result in _trained(left, workers):
        if isinstance(result, BaseException):
            failed.append(f"{trial.key}: {one_line(result)}")
            print(f"failed: {failed[-1]}")
            continue
        known[trial.key] = result
        with write_errors(path), file_lock(folder / LOCK):
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
    else:
        devices = [f"cuda:{i % cards}" if cards else "cpu" for i in range(workers)]
        yield from in_processes(trials, [Worker(device) for device in devices])


class Worker:
    """A process of its own that trains on one device; a new one takes its place if it dies."""

    def __init__(self, device: str) -> None:
        self.device, self._pool = device, self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        # CUDA does not survive a fork. Models this small gain nothing from more threads.
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))

    def train(self, trial: Trial) -> Trained:
        try:
            return self._pool.submit(train_trial, trial, self.device).result()
        except BrokenProcessPool:
            self._pool = self._new_pool()
            raise


def in_processes(trials: list[Trial], workers: Sequence[Worker]) -> Iterator[Outcome]:
    """(trial, its result or the error), as they finish."""
    idle = SimpleQueue[Worker]()
    not_ours = set(multiprocessing.active_children())
    for worker in workers:
        idle.put(worker)

    def train(trial: Trial) -> Trained:
        worker = idle.get()
        try:
            return worker.train(trial)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(len(workers))
    futures = {threads.submit(train, trial): trial for trial in trials}
    try:
        for future in as_completed(futures):
            yield futures[future], future.exception() or future.result()
    finally:  # after a signal, too: do not wait for results that would be discarded
        threads.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - not_ours:
            process.terminate()
