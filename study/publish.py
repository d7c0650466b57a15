"""Publishes a study's folder: page, tables, figures and small files, without weights and without paths of the
machine."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lingpt.common.errors import UserError
from lingpt.common.files import read_json, read_text, read_yaml, write_errors, write_text
from lingpt.common.run_folder import CONFIG, ENVIRONMENT, EVAL, LOCK, METRICS, SAMPLES
from lingpt.study.page import PAGE, TITLE
from lingpt.study.portable import portable
from lingpt.study.runs import StudyRun

_READ = {".json": read_json, ".yaml": read_yaml}


def check_target(target: Path) -> None:
    """Raises UserError if `target` is not a folder, or if the page would overwrite a README.md that is not a
    study's page."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is not a folder: give another one to publish to")
    there = target / PAGE
    if there.exists() and not there.read_bytes().startswith(TITLE.encode()):
        raise UserError(
            f"{there} is not a study's page, and publishing would overwrite it: give a folder of its own"
        )


def publish_study(folder: Path, target: Path, runs: Sequence[StudyRun]) -> Path:
    """Copies the page, tables, figures and the runs' small files to `target`, with `portable` paths. Raises
    UserError if a file is damaged, or `target` cannot be written or has another README."""
    check_target(target)
    names = [path for path in folder.iterdir() if path.name != LOCK]
    names += list((folder / "mqar").glob("mqar*"))
    for run in runs:
        names += [run.folder / name for name in (CONFIG, ENVIRONMENT, METRICS, SAMPLES)]
        names += sorted((run.folder / EVAL).glob("step-*.json"))
    names = [path for path in names if path.is_file()]
    texts = {text for path in names if path.suffix in _READ for text in _texts(_READ[path.suffix](path))}
    moved = {text: short for text in sorted(texts, key=len)[::-1] if (short := portable(text)) != text}
    with write_errors(target):
        for path in names:
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if moved and path.suffix in (".md", *_READ):
                write_text(copy, _without(moved, path))
            else:
                shutil.copyfile(path, copy)
    return target


def _texts(tree: Any) -> Iterator[str]:
    """The strings in a file, without its scores: packed answers may begin with a `/`."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from () if key == "scores" else _texts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value)


def _without(moved: Mapping[str, str], path: Path) -> str:
    """The text of a file with the strings replaced as in `moved` (longest first)."""
    if path.suffix == ".yaml":  # long strings may be broken into lines
        return yaml.safe_dump(portable(read_yaml(path)), sort_keys=False, allow_unicode=True)
    content = read_text(path)
    for old, new in moved.items():
        if path.suffix == ".json":
            old, new = (json.dumps(text, ensure_ascii=False) for text in (old, new))
            content = content.replace(old, new)
        elif old.startswith("/"):  # a path within text
            content = re.sub(rf"(?<![\w./~-]){re.escape(old)}(?![\w-])", new.replace("\\", r"\\"), content)
    return content
