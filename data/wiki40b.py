"""Wiki-40B (Guo et al. 2020), English, from the Hugging Face hub through `datasets`, its markup cleaned.

A row is `{"wikidata_id", "text", "version_id"}`, all strings. Some lines of the text are markers, which say
what the lines after them are:

    _START_ARTICLE_    the title
    _START_SECTION_    a heading
    _START_PARAGRAPH_  text, in which _NEWLINE_ stands for a line break

Copies made from TFDS hold `repr` of the UTF-8 bytes (`b'\\n_START_ARTICLE_\\n...'`), the hub's copies text;
both are read. A cleaned document is its title, headings and paragraphs as plain text, separated by blank
lines.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lingpt.common.errors import UserError
from lingpt.data.corpus import Corpus, Document, Split
from lingpt.data.hub import hub_errors

if TYPE_CHECKING:
    import datasets

HUB_NAME, HUB_CONFIG = "google/wiki40b", "en"
CLEANING = 1  # increase it when the same rows would give other text
_FIELDS = {"wikidata_id", "text", "version_id"}
_KNOWN = ("_START_ARTICLE_", "_START_SECTION_", "_START_PARAGRAPH_")
_MARKER = re.compile(r"(?<![A-Za-z0-9])_(?:START|END)_[A-Z_]*[A-Z]_(?![A-Za-z0-9])")
_ADVICE = "train on text of your own with DATA=<jsonl>, or on DATA=embedded"


def wiki40b_corpus() -> Corpus:
    """Wiki-40B with its own training and validation splits. Raises `UserError`."""
    import datasets

    with hub_errors(f"Wiki-40B ({HUB_NAME}, {HUB_CONFIG})", _ADVICE):
        splits = datasets.load_dataset(HUB_NAME, HUB_CONFIG)
    for name in ("train", "validation"):
        if name not in splits or not set(splits[name].column_names) >= _FIELDS:
            raise UserError(
                f"this copy of {HUB_NAME} has no {name} split with {', '.join(sorted(_FIELDS))}: {_ADVICE}"
            )
    return Corpus(
        name="wiki40b",
        content_hash=_content_hash(splits["train"].info),
        train=_split(splits["train"]),
        val=_split(splits["validation"]),
        rule="Wiki-40B's own validation split is held out; its test split is left alone",
    )


def _content_hash(info: "datasets.DatasetInfo") -> str:
    """Hash of the `datasets` record of the source files: names with revision, sizes, numbers of rows."""
    splits = {name: [split.num_examples, split.num_bytes] for name, split in (info.splits or {}).items()}
    record = [CLEANING, HUB_NAME, HUB_CONFIG, splits, info.download_checksums]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _split(rows: "datasets.Dataset") -> Split:
    def read() -> Iterator[Document]:
        for batch in rows.select_columns(["wikidata_id", "text"]).iter(batch_size=1000):
            for wikidata_id, text in zip(batch["wikidata_id"], batch["text"], strict=True):
                if cleaned := clean(text, wikidata_id):
                    yield Document(cleaned, 1)

    return Split(read, total=len(rows), unit="doc")


def clean(text: str, wikidata_id: str) -> str:
    """One article as plain text. Raises `UserError` naming the document if it has unknown markup."""
    if text.startswith(("b'", 'b"')):
        text = _decode_repr(text, wikidata_id)
    for marker in _MARKER.findall(text.replace("_NEWLINE_", "\n")):
        if marker not in _KNOWN:
            raise UserError(
                f"the Wiki-40B document {wikidata_id} has unknown markup {marker} (known: _NEWLINE_, "
                f"{', '.join(_KNOWN)}), so this copy of the data set has another format: {_ADVICE}"
            )
    lines = (line for line in text.split("\n") if line.strip() not in _KNOWN)
    parts = (line.replace("_NEWLINE_", "\n").strip() for line in lines)
    return "\n\n".join(part for part in parts if part)


def _decode_repr(text: str, wikidata_id: str) -> str:
    try:
        return ast.literal_eval(text).decode()
    except (ValueError, SyntaxError):  # a UnicodeDecodeError is a ValueError
        raise UserError(
            f"the Wiki-40B document {wikidata_id} begins like the repr of bytes but is none, "
            f"so this copy of the data set has another format: {_ADVICE}"
        ) from None
