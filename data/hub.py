"""Turns errors of the Hugging Face hub into one line for the user."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lingpt.common.errors import UserError, first_line


@contextmanager
def hub_errors(what: str, fix: str) -> Iterator[None]:
    """Turns a failed download of `what` into a `UserError` that says how to `fix` it.

    Without a network many classes of error are raised, some of them wrong (huggingface_hub 1.3 raises
    RuntimeError about a closed client on the second try), so whatever is neither "not found" nor a full disk
    counts as no network.
    """
    from datasets.exceptions import DatasetNotFoundError
    from httpx import HTTPError
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with _quiet("huggingface_hub"):
            yield
    except UserError:  # a ValueError, too, and a line already
        raise
    # A subclass of EntryNotFoundError that means: not in the cache, and no network.
    except LocalEntryNotFoundError:
        raise UserError(_unreachable(what, "no network", fix)) from None
    except (DatasetNotFoundError, RepositoryNotFoundError, EntryNotFoundError, HFValidationError):
        raise UserError(
            f"{what} is neither a path nor on the hub: check the name, log in if it is private, or {fix}"
        ) from None
    except (OSError, RuntimeError, ValueError, HTTPError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(_unreachable(what, hub_reason(error), fix)) from None


def _unreachable(what: str, why: str, fix: str) -> str:
    return (
        f"{what} is not in this machine's cache and cannot be had from the Hugging Face hub ({why}): "
        f"go online (and unset HF_HUB_OFFLINE), or {fix}"
    )


def hub_reason(error: Exception) -> str:
    """Why the hub did not answer, in one line; the final error of huggingface_hub 1.3 may not say it."""
    reason = first_line(error)
    return "no network" if "the client has been closed" in reason else reason


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silences the log lines of every retry: the error is enough."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
