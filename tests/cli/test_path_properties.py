"""Anything in the file system where a verb wants a file or a folder: a result, or one line, in time."""

import contextlib
import io
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingpt.cli.main import main
from lingpt.common.options import NULLS
from lingpt.tests.properties import examples

SECONDS, MEMORY = 20, 8 << 30
DRY = ("--train.dry_run", "true")
VERBS = (  # PATH: what is given; {out}: a free name
    "train --config PATH", "train --data.source PATH", "train --data.val_source PATH",
    "train --data.tokenizer PATH", "train --data.cache_dir PATH", "train --train.out_dir PATH",
    "train --train.init_from PATH", "train --train.resume PATH", "linearize PATH",
    "data --data.source PATH", "data --data.source PATH --stats true", "data --data.tokenizer PATH",
    "eval --config PATH", "eval --runs PATH", "eval --runs_dir PATH --model demo", "study --config PATH",
    "curves PATH", "export PATH {out}", "export PATH {out} --hf true", "generate PATH",
    "generate PATH --document PATH", "generate PATH --state PATH", "replay PATH --step 1",
    "bench --redraw true --out PATH", "bench train --redraw true --out PATH",
    "bench decode --redraw true --out PATH", "mqar --redraw true --out PATH",
)  # fmt: skip
FILES = (
    "config.yaml", "metrics.jsonl", "model_config.yaml", "config.json", "manifest.json", "model.safetensors",
    "tokenizer.json", "lit_model.pth", "results.json", "decode.json", "text.jsonl", "train.parquet", ".lock",
)  # fmt: skip
CONTENTS = st.binary(max_size=60) | st.sampled_from(
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"a": ' * 5000,
        b"a: &a [*a]",
        b'{"text": "a"}\n',
        b"\xff\xfe",
        b"\x80\x02.",
    ]
)


MAKERS: dict[str, Callable[[Path, bytes], object]] = {
    "missing": lambda at, _: None,
    "file": Path.write_bytes,
    "fifo": lambda at, _: os.mkfifo(at),
    "link to itself": lambda at, _: at.symlink_to(at.name),
    "link to nothing": lambda at, _: at.symlink_to("nothing"),
    "link to an endless file": lambda at, _: at.symlink_to("/dev/zero"),
    "link outside": lambda at, _: at.symlink_to("../victim"),
    "folder": lambda at, _: at.mkdir(),
}
NAMES = st.sampled_from(
    ["x", "x.yaml", "x.json", "x.jsonl", "x.txt", "x.jsonl.xz", "x.parquet", " ", "-x", "é\u2028"]
)
NAMES |= st.text(min_size=1, max_size=20).filter(
    lambda name: not set(name) & {"/", "\0"} and name not in ("", ".", "..", *NULLS)
)
ENTRIES = st.dictionaries(st.sampled_from(FILES), st.tuples(st.sampled_from([*MAKERS]), CONTENTS), max_size=4)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """In this folder, for SECONDS at most, and with MEMORY: what has no end may be read in one call."""

    def stop(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} s")

    before, handler = Path.cwd(), signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    os.chdir(folder)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        os.chdir(before)


@pytest.mark.fault(
    "any file, link, FIFO or folder of such, as any path of any verb", "a result, or one line, in 20 s"
)
@examples(70)
@given(st.sampled_from(VERBS), NAMES, st.sampled_from([*MAKERS]), CONTENTS, ENTRIES)
def test_any_path_is_a_result_or_a_line(figures, verb, name, kind, content, entries):
    """Guards: tracebacks, hangs on what never ends, and writing through a link."""
    figures["faults"] += 1
    err = io.StringIO()
    with tempfile.TemporaryDirectory() as outside:
        (Path(outside) / "victim").write_bytes(b"precious")
        folder = Path(outside) / "here"
        folder.mkdir()
        try:
            MAKERS[kind](folder / name, content)
        except (OSError, UnicodeError):
            return  # not a name here
        if kind == "folder":
            for entry, (inner, inside) in entries.items():
                MAKERS[inner](folder / name / entry, inside)
        words = [{"PATH": name, "{out}": "out"}.get(word, word) for word in verb.split()]
        with working_in(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main([*words, *(DRY if words[0] in ("train", "linearize") else ())])
        assert (Path(outside) / "victim").read_bytes() == b"precious"
    lines = [line for line in err.getvalue().splitlines() if line.startswith("lingpt: ")]
    assert code == 0 or (code == 2 and len(lines) == 1), (code, err.getvalue())
