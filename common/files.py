"""Files and folders written whole or not at all: under a temporary name, synced to the disk, then renamed.

A reader finds the old content or the new, never a part of it, whenever the writer is killed. A failing disk
is an OSError here; `write_errors` makes it a UserError.
"""

import contextlib
import copy
import errno
import functools
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lingpt.common.errors import UserError, one_line

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# Errors of a disk that is read-only, failing, gone, or not ours to write: not bugs of LinGPT.
DISK_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV)
_MOST_NODES = 100_000  # values in a YAML file
PARTIAL = ".partial"  # the suffix of files that are not whole yet
STALE = 3600.0  # seconds after which such a file is assumed to have no writer any more


def cache_dir() -> Path:
    """The folder of cached tokens and compiled kernels: `$LINGPT_CACHE`, else `~/.cache/lingpt`."""
    return expand(os.environ.get("LINGPT_CACHE") or "~/.cache/lingpt")


def expand(path: str | os.PathLike) -> Path:
    """`path` with its `~` expanded. UserError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise UserError(
            f"{path}: this machine knows no home folder {user}: write the path out (the cache: LINGPT_CACHE)"
        ) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in `path`'s folder; it takes `path`'s place if the block ends without an error.

    Removes what killed writers of `path` left behind, once it is `STALE`. Creates the folder if it is
    missing, except a temporary one of `new_folder`: that is missing only if its disk has gone.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.parent.suffix != PARTIAL:
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another user's, for example: it does no harm
        remove_partial(path.parent, f"{path.name}.", older_than=STALE)
    temporary = _partial_name(path)
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # less the umask
    mode = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    try:
        yield temporary
        temporary.chmod(mode)  # a library may have written another file there, hidden from other users
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Writes `value` as JSON in UTF-8; values of other types become strings."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str) + "\n"
    # A file's name that is not UTF-8 has lone surrogates in Python, whose escape of one is JSON's too.
    write_bytes(path, text.encode(errors="backslashreplace"))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill with files; it becomes `path` if the block ends without an error.

    `path` must not exist by then. Subfolders are not synced.
    """
    temporary = _partial_name(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            sync(file)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _partial_name(path: Path) -> Path:
    """The name of a new temporary file or folder beside `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def remove_partial(folder: Path, name: str = "", older_than: float = 0.0) -> None:
    """Removes what killed writers of `name…` (by default of any name) left in `folder`.

    older_than: only files unchanged for more than so many seconds. Without it, no writer may be active.
    """
    for path in folder.glob(f".{glob.escape(name)}*{PARTIAL}"):
        with contextlib.suppress(FileNotFoundError):
            if older_than and time.time() - path.stat().st_mtime <= older_than:
                continue
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def others_can_write(path: Path) -> bool:
    """Whether `path` may be the work of someone whom this user does not trust: others can write to it, or it
    belongs neither to this user, nor root, nor the owner of its folder."""
    found = path.stat()
    trusted = {os.geteuid(), 0, path.parent.stat().st_uid}
    writable = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return bool(writable) or found.st_uid not in trusted


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal. Releases the GIL."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_aside(path: Path, prefix: str) -> Path:
    """`<prefix>-<its name>`, beside `path`, with a number if that exists."""
    aside, number = path.with_name(f"{prefix}-{path.name}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{prefix}-{path.name}.{number}")
    return aside


def set_aside(path: Path, prefix: str) -> Path:
    """Renames `path` to its `name_aside`; returns the new path."""
    return path.rename(name_aside(path, prefix))


def disk_fix(error: OSError, path: Path | str) -> str:
    """Advice to the user about a disk that `path` cannot be written to."""
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"make {path} writable"
    if error.errno in (None, *FULL_DISK):
        return f"free some space on the disk of {path}"
    return f"check the disk of {path}"


def discard(descriptor: int) -> None:
    """Redirects a file descriptor to /dev/null: what is written to it from now on is dropped."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def write_errors(path: Path, fix: str = "free some space, or choose another place") -> Iterator[None]:
    """Turns an OSError in writing `path` (a full or failing disk) into a UserError that ends with `fix`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write to {path} ({reason}), and nothing half-written was kept: {fix}"
        ) from error


@contextlib.contextmanager
def read_errors(
    path: str | os.PathLike, fix: str = "make it readable, or give another path"
) -> Iterator[None]:
    """Turns an OSError in reading or listing `path` into a UserError that ends with `fix`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {path} ({reason}): {fix}") from error


def is_regular(path: Path) -> bool:
    """Whether `path` is a file: no link, no device (which may have no end), no FIFO (which may block)."""
    with contextlib.suppress(OSError, ValueError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def read_bytes(path: Path) -> bytes:
    """UserError, naming the file, where it cannot be read, or is a device or a FIFO."""
    with read_errors(path):
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise OSError(errno.EINVAL, "it is no regular file")
        return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a file that a person may have written; UserError if it is not readable UTF-8."""
    content = read_bytes(path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error


def read_json(path: Path) -> Any:
    """The content of a JSON file; UserError, naming the file, if it cannot be read or is not JSON."""
    content = read_bytes(path)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise UserError(f"{path} is damaged or not JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """`read_json` of a file that holds an object; UserError if it holds anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; UserError, naming the file, if it cannot be read or is not YAML."""
    content = read_bytes(path)
    try:
        return copy.deepcopy(_parsed_yaml(content))
    # Not UTF-8, or not YAML; an impossible date is a ValueError, `!!bool maybe` one of the next two.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {one_line(error)}") from error


@functools.lru_cache(maxsize=128)  # a study reads the same recipes and configs for every run
def _parsed_yaml(content: bytes) -> Any:
    loader = yaml.SafeLoader(content.decode())
    node = loader.get_single_node()
    if node is None:
        return None
    _count_nodes(node, {})
    return loader.construct_document(node)


def _count_nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """The number of values of a YAML tree, those of an anchor as often as it is used.

    ValueError for more than `_MOST_NODES`, for an anchor inside itself and for a key that stands twice.
    """
    if id(node) not in counted:
        counted[id(node)] = _MOST_NODES  # while it is counted: inside itself it is too many
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, times in keys.items() if times > 1]:
                raise ValueError(f"the key {twice[0]!r} stands twice")
            inside = [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_count_nodes(part, counted) for part in inside)
    if counted[id(node)] > _MOST_NODES:
        raise ValueError(f"its anchors make more than {_MOST_NODES:,} values of it")
    return counted[id(node)]
