"""The texts that a study publishes. A path in them says which file or folder it was, not where it lay."""

import re
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?P<option>[^/=]*=)?(?P<path>/.*)", re.DOTALL)  # `--data.source=/data/wiki`, too


def portable(value: Any) -> Any:
    """`value`, a string or a tree of them, with every absolute path as its last name; a file's, which has a
    suffix, as its last two: `wiki/test.jsonl`. The name of the home folder is left out."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if not isinstance(value, str) or not (found := _PATH.fullmatch(value)):
        return value
    path = Path(found["path"])
    names = path.parts[1:]  # without the root
    last = names[-2:] if path.suffix and path.parent != Path.home() else names[-1:]
    return (found["option"] or "") + "/".join(last)


def differs(before: Any, now: Any) -> bool:
    """Whether a record of `before` says otherwise than `now`, be it as it was recorded or as published."""
    return before != now and before != portable(now)
