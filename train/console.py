"""Printing during a run."""

import shutil
import sys
import threading
from collections.abc import Iterable
from typing import Any, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_only
from tqdm import tqdm

from lingpt.common.files import discard

T = TypeVar("T")
# tqdm's own lock starts a process when the first line is printed.
tqdm.set_lock(threading.RLock())


def print_rank0(message: str) -> None:
    """Prints to stdout, without breaking the progress bar, on rank zero only; also before the launch."""
    if not _is_rank_zero():
        return
    try:
        with tqdm.get_lock():  # where `write` takes it, an interrupt meanwhile becomes another error
            tqdm.write(message, nolock=True)
        sys.stdout.flush()
    except OSError:  # the reader is gone (a closed terminal, `| head`): no reason to end a run
        discard(sys.stdout.fileno())


def progress_bar(iterable: Iterable[T] | None = None, **options: Any) -> tqdm:
    """A tqdm bar, drawn on rank zero only, and only on a terminal."""
    disable = None if _is_rank_zero() else True
    size = shutil.get_terminal_size()  # 80 × 24 where a terminal does not say: tqdm would draw nothing
    return tqdm(iterable, disable=disable, ncols=size.columns, nrows=size.lines, **options)


def print_stderr(line: str) -> None:
    """Prints from this process, whichever it is."""
    print(f"lingpt: {line}", file=sys.stderr, flush=True)


def _is_rank_zero() -> bool:
    """Whether this is rank zero, as Fabric knows it from the environment even before the launch."""
    return getattr(rank_zero_only, "rank", 0) == 0
