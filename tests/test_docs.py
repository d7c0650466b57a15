"""What the documents say that a program can check: tables of measurements, links, commands."""

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

from lingpt.bench.decoding_results import DecodeResults
from lingpt.bench.kernels.results import Results as KernelResults
from lingpt.bench.results import BenchResults
from lingpt.bench.step_results import Results as StepResults
from lingpt.cli.main import VERBS, parse
from lingpt.common.errors import UserError

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HISTORY = {"CHANGELOG.md"}  # its commands are those of their day
MARKS = {"$attn": "ours", "$ATTN": "ours"}  # variables of loops
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")  # code in a line; it may be broken once


class Command(NamedTuple):
    page: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


# Tables


def bench_tables() -> list[tuple[Path, type[BenchResults]]]:
    """(a committed JSON, the results that it holds), by what its rows are."""
    kinds = {"shape": KernelResults, "share_of_identity": StepResults, "state_bytes": DecodeResults}
    found = []
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        fields = json.loads(path.read_text())
        rows = fields.get("rows") if isinstance(fields, dict) and "environment" in fields else None
        found += [(path, kind) for field, kind in kinds.items() if rows and field in rows[0]]
    return found


@pytest.mark.parametrize(
    ("path", "kind"),
    bench_tables(),
    ids=lambda x: str(x.relative_to(ROOT)) if isinstance(x, Path) else x.NAME,
)
def test_a_table_is_what_its_results_give(path: Path, kind: type[BenchResults]) -> None:
    """Guards: a number that was edited by hand, results without their table or that no longer load."""
    assert path.with_suffix(".md").read_text() == kind.load(path).table()


def test_the_tables_are_found() -> None:
    """Guards: a search that finds nothing, so that nothing is compared."""
    names = {path.relative_to(ROOT / "docs" / "results").as_posix() for path, _ in bench_tables()}
    assert names >= {"kernels/results.json", "training/bench.json", "decoding/decode.json"}


# Links


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`code`", without_blocks(text))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub names them."""
    headings = re.findall(r"^#+ +(.*)$", without_blocks(page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Guards: a file that was moved, a heading that was renamed."""
    broken = []
    for target in re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", without_code(page.read_text())):
        if re.match(r"[a-z][a-z+.-]*:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


# Commands


def shell_lines(text: str) -> list[str]:
    """Lines of blocks (fenced, or indented by four), continuations joined; and what stands in backticks."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.M | re.S)
    prose = without_blocks(text)
    blocks += re.findall(r"^    (.*\n)", prose, flags=re.M)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]
    lines = [part.strip() for line in lines for part in line.split("; do ")]
    return lines + [" ".join(span.split()) for span in SPAN.findall(prose)]


def commands(program: str) -> list[Command]:
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for line in shell_lines(page.read_text()) if name not in HISTORY else []:
            line = line.partition("srun --kill-on-bad-exit=1 ")[2] or line
            if not line.startswith(f"{program} ") or re.search(r"[<…]|=\*\*", line):
                continue  # a placeholder is for the reader to fill
            for mark, value in MARKS.items():
                line = line.replace(mark, value)
            words = shlex.split(line.partition("; done")[0], comments=True)
            if "--help" not in words:
                found.append(Command(name, words))
    return found


def check_lingpt(words: list[str]) -> None:
    """Raises where the command has no such verb, or the verb no such option or value."""
    verb, *rest = words
    if rest and f"{verb} {rest[0]}" in VERBS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    parse(verb, importlib.import_module(VERBS[verb][0]), rest)


# In backticks a verb alone, without the options that it must have, is its name.
LINGPT = [command for command in commands("lingpt") if len(command.words) > 2]
NAMED = sorted({(command.page, command.words[1]) for command in commands("lingpt")})


@pytest.mark.parametrize("command", LINGPT, ids=str)
def test_a_command_is_one(command: Command) -> None:
    """Guards: an option that was renamed, a verb that is gone."""
    check_lingpt(command.words[1:])


def test_verbs_that_pages_name_exist() -> None:
    assert len(NAMED) > 10 and [found for found in NAMED if found[1] not in VERBS] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_does_what_pages_say() -> None:
    """Guards: a target or a variable that the Makefile does not have, options that its verb does not take."""
    makefile = (ROOT / "Makefile").read_text()
    found = {tuple(command.words): command for command in commands("make")}
    assert len(found) > 20
    for words, command in found.items():
        asked = [word for word in words[1:] if not word.startswith("VENV=")]
        for variable in (word.partition("=")[0] for word in asked if re.match(r"[A-Z_]+=", word)):
            known = f"$({variable})" in makefile or variable.startswith("LINGPT_")  # those are for the tests
            assert known, f"{command}: the Makefile has no {variable}"
        line = ["make", "-n", "--no-print-directory", "VENV=", *asked]
        env = {"PATH": os.environ["PATH"]}  # without the variables of a `make test` that started this
        shown = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
        assert shown.returncode == 0, f"{command}: {shown.stderr}"
        for run in shown.stdout.splitlines():
            if run.startswith("lingpt "):
                try:
                    check_lingpt(shlex.split(run)[1:])
                except UserError as error:
                    raise AssertionError(f"{command}: {error}") from error


def test_modules_that_pages_run_exist() -> None:
    named = {word for page in PAGES for word in re.findall(r"python -m (lingpt[\w.]*)", page.read_text())}
    assert named and [name for name in sorted(named) if find_spec(name) is None] == []


# The table of methods


def test_the_methods_are_those_of_the_registry() -> None:
    """Guards: a recurrence that was added or changed without its row."""
    page = runpy.run_path(str(ROOT / "docs" / "methods_table.py"))
    assert page["MARK"] + page["table"]() + "\n" in page["PAGE"].read_text(encoding="utf-8")
