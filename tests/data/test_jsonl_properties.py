"""JSONL of any bytes, and a token cache with any damage: what was meant, or one line that names the file."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingpt.data import DataConfig, prepare
from lingpt.data.jsonl import read_documents
from lingpt.tests.properties import examples, result_or_line

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
ROWS = st.fixed_dictionaries({"text": st.text() | JSON}, optional={"id": JSON}) | JSON
LINES = ROWS.map(lambda row: json.dumps(row).encode()) | st.binary(max_size=80)


@pytest.mark.fault("JSONL of any bytes", "the documents, or one line that names the file and the line")
@examples(30)
@given(st.lists(LINES, max_size=6), st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst"]))
def test_any_lines_are_documents_or_a_line_that_names_them(figures, tmp_path_factory, lines, suffix):
    """Never another exception; a document is the `text` of its line."""
    figures["faults"] += 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{suffix}"
        path.write_bytes(b"\n".join(lines))
        documents = result_or_line(lambda: list(read_documents(path)))
        if documents is not None and suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in b"\n".join(lines).split(b"\n") if line.strip()]
            assert [d.text for d in documents] == [text if text.strip() else "" for text in texts]


@pytest.mark.fault("any damage to a token cache", "its tokens, or one line that says what to delete")
@examples(12)
@given(st.data())
def test_a_cache_with_any_damage_gives_its_tokens_or_says_what_to_delete(
    figures, monkeypatch, write_jsonl, texts, tokenizer_path, data
):
    """Bytes changed, cut or put in, anywhere in any of its files."""
    figures["faults"] += 1
    monkeypatch.setattr("lingpt.data.stream.ROWS", 1000)
    with tempfile.TemporaryDirectory() as folder:
        config = DataConfig(str(write_jsonl(texts(60))), tokenizer_path, 32, cache_dir=folder)
        whole = prepare(config, progress=False)
        tokens = {split: getattr(whole, split).stream(0, 10**9) for split in ("train", "val")}
        path = data.draw(st.sampled_from(sorted(whole.parts[0].cache.folder.iterdir())))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.sampled_from([0, 1, 1, 1, 50, len(content)]))
        content[at : at + length] = data.draw(st.binary(min_size=0, max_size=max(1, min(length, 50))))
        path.write_bytes(content)
        for split, expected in tokens.items():
            got = result_or_line(
                lambda split=split: getattr(prepare(config, progress=False), split).stream(0, 10**9)
            )
            assert got is None or np.array_equal(got, expected)
