"""What a run prints."""

import os
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_only
from tqdm import tqdm

T = TypeVar("T")


def print_rank0(message: str) -> None:
    """To stdout, around the progress bar, from the first process alone; also before there are others."""
    if not _is_rank_zero():
        return
    try:
        tqdm.write(message)
        sys.stdout.flush()
    except OSError:  # nobody reads it any more (a closed terminal, `| head`): no reason to end a run
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def progress_bar(iterable: Iterable[T] | None = None, **options: Any) -> tqdm:
    """tqdm's, drawn by the first process alone, and only on a terminal."""
    return tqdm(iterable, disable=None if _is_rank_zero() else True, **options)


def print_stderr(line: str) -> None:
    """By this process, whichever it is."""
    print(f"lingpt: {line}", file=sys.stderr, flush=True)


def _is_rank_zero() -> bool:
    """Fabric's answer: from its import on it has the rank that the environment says, before it launches."""
    return getattr(rank_zero_only, "rank", 0) == 0
