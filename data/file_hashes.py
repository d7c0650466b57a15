"""Cached SHA-256 of a corpus's files, so that not every process reads gigabytes again at every start.

    <cache_dir>/file-hashes.json     {path: [size, time of last change of the content, of the file, SHA-256]}

A file whose size and both times (in ns) are those from when it was hashed counts as unchanged; every write to
a file sets the second time (ctime), which cannot be set back. A file that changed within the last seconds is
not cached: it could change once more within the clock's resolution.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lingpt.common.errors import UserError
from lingpt.common.files import read_errors, read_json_object, write_json

NAME = "file-hashes.json"
SETTLED = 2.0  # seconds: file systems keep times to 2 s at the coarsest (FAT)

Stamp = list[int]  # size, mtime and ctime


def file_hashes(files: Sequence[Path], cache_dir: Path | None) -> list[str]:
    """The SHA-256 of each file as it is on disk, several in parallel; cached in `cache_dir`, if given.

    Raises UserError, naming the file, if one cannot be read. A cache that cannot be written is no error.
    """
    known = _read(cache_dir / NAME) if cache_dir else {}
    new: dict[str, list] = {}
    stop = threading.Event()

    def sha256(path: Path) -> str:
        name = str(path.resolve())
        with read_errors(path):
            stamp = file_stamp(path)
            if name in known and known[name][:-1] == stamp:
                return known[name][-1]
            _, _, changed = stamp
            settled = time.time() - changed / 1e9 > SETTLED  # a change from here on gives another stamp
            digest = _sha256(path, stop)
            if settled:
                new[name] = [*stamp, digest]
        return digest

    with ThreadPoolExecutor() as pool:
        try:
            hashes = list(pool.map(sha256, files))
        except BaseException:  # lets Ctrl-C stop without hashing the rest of large files
            stop.set()
            raise
    if cache_dir and new:
        kept = {name: entry for name, entry in known.items() if not _is_gone(name)}
        with contextlib.suppress(OSError):
            write_json(cache_dir / NAME, kept | new, indent=0)
    return hashes


def _sha256(path: Path, stop: threading.Event) -> str:
    """SHA-256 of the file's content; of part of it if `stop` is set meanwhile."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while not stop.is_set() and (piece := file.read(1 << 20)):
            digest.update(piece)
    return digest.hexdigest()


def _is_gone(name: str) -> bool:
    """Whether the file is gone; False if the system cannot tell: an unmounted disk, another user's folder."""
    try:
        return not Path(name).exists()
    except OSError:
        return False


def file_stamp(path: Path) -> Stamp:
    """What changes whenever the file is written to. UserError if it cannot be had."""
    with read_errors(path):
        stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(path: Path) -> dict[str, list]:
    """The cached entries; empty if the file is missing or damaged."""
    try:
        entries = read_json_object(path)
    except UserError:
        return {}
    return {name: entry for name, entry in entries.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 4 and isinstance(entry[3], str) and len(entry[3]) == 64
