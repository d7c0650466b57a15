"""The Hugging Face hub: what goes wrong there, as one line."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lingpt.common.errors import UserError


@contextmanager
def hub_errors(what: str, mend: str) -> Iterator[None]:
    """Around a download of `what`: a failure becomes a `UserError` that says `mend`.

    No network shows itself as many classes of error, some of them wrong (huggingface_hub 1.3 raises
    RuntimeError about a closed client on the second try), so whatever is neither "not there" nor a full disk
    counts as it.
    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with _quiet("huggingface_hub"):
            yield
    except (
        LocalEntryNotFoundError
    ):  # a subclass of EntryNotFoundError that means: not in the cache, and no network
        raise UserError(_unreachable(what, "no network", mend)) from None
    except (DatasetNotFoundError, RepositoryNotFoundError, EntryNotFoundError, HFValidationError):
        raise UserError(
            f"{what} is neither a path nor on the hub: check the name, log in if it is private, or {mend}"
        ) from None
    except (OSError, RuntimeError, ValueError, *_http_errors()) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(_unreachable(what, hub_reason(error), mend)) from None


def _unreachable(what: str, why: str, mend: str) -> str:
    return (
        f"{what} is not in this machine's cache and cannot be had from the Hugging Face hub ({why}): "
        f"go online (and unset HF_HUB_OFFLINE), or {mend}"
    )


def _http_errors() -> tuple[type[Exception], ...]:
    import httpx

    return (httpx.HTTPError,)


def hub_reason(error: Exception) -> str:
    """Why the hub did not answer, in a line. What huggingface_hub 1.3 ends its retries with hides it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "no network" if "the client has been closed" in lines[0] else lines[0][:160]


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the log lines of every retry: the error says it."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
