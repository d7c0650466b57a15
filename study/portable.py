"""Makes the paths in a study's published texts portable: they name the file or folder, not its location."""

import re
from pathlib import Path
from typing import Any

_PATH = re.compile(r"(?P<option>[^/=]*=)?(?P<path>/.*)", re.DOTALL)  # also `--data.source=/data/wiki`


def portable(value: Any) -> Any:
    """`value`, a string or a tree of them, with every absolute path cut to its last name, or if it has a
    suffix (a file) to the last two: `wiki/test.jsonl`. The name of the home folder is left out; so are packed
    answers, which may begin with a `/`."""
    if isinstance(value, dict):
        return {key: item if key == "correct" else portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, str) and "," in value:  # a mixture: each source has its path
        return ",".join(map(portable, value.split(",")))
    if not isinstance(value, str) or not (found := _PATH.fullmatch(value)):
        return value
    path = Path(found["path"])
    names = path.parts[1:]  # without the root
    last = names[-2:] if path.suffix and path.parent != Path.home() else names[-1:]
    return (found["option"] or "") + "/".join(last)


def differs(before: Any, now: Any) -> bool:
    """Whether the recorded value `before` differs from `now`, both as it is and as published (`portable`)."""
    return before != now and before != portable(now)
