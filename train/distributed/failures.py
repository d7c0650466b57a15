"""Detects errors caused by the failure of another process, and words the messages about them."""

import socket

RESUME_HINT = "the run ends, and the same command resumes it from its newest checkpoint"
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "recvValue",
    "Connection was likely closed",
    "remote process exit",  # NCCL's
)


def connection_lost(error: BaseException) -> bool:
    """Whether `error` is raised, directly or indirectly, by waiting for a process that has died."""
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST):
        return True
    return error.__context__ is not None and connection_lost(error.__context__)


def failure_message(error: BaseException, rank: int, world_size: int) -> str:
    """The message on a failure of NCCL or gloo in this process, which other processes may not notice."""
    lines = str(error).splitlines() or [type(error).__name__]
    if "Last error:" in lines[:-1]:  # NCCL's own message
        lines[0] += f": {lines[lines.index('Last error:') + 1].strip()}"
    return f"{_name(rank, world_size)}: the communication failed: {lines[0]}; NCCL_DEBUG=INFO says more"


def lost_message(rank: int, world_size: int) -> str:
    """The message of a process that waited for a dead one; the launcher on that one's machine says which."""
    return (
        f"{_name(rank, world_size)}: the connection to another process is lost, it has ended or does not "
        f"answer: {RESUME_HINT}"
    )


def _name(rank: int, world_size: int) -> str:
    return f"process {rank} of {world_size} (on {socket.gethostname()})"


def straggler_message(rank: int, world_size: int, where: str, seconds: float) -> str:
    """The message on the process that the others have waited for."""
    return (
        f"process {rank} of {world_size} ({where}) has kept the others waiting for {seconds / 60:.3g} min "
        f"(--train.timeout_minutes): {RESUME_HINT}"
    )
