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
import re
from dataclasses import replace

from lingpt.common.errors import UserError
from lingpt.data.corpus import Corpus
from lingpt.data.hub import ADVICE, hub_corpus

HUB_NAME, HUB_CONFIG = "google/wiki40b", "en"
CLEANING = 1  # increase it when the same rows would give other text
_OTHER = f"this copy of Wiki-40B has another format: {ADVICE}"
_KNOWN = ("_START_ARTICLE_", "_START_SECTION_", "_START_PARAGRAPH_")
_MARKER = re.compile(r"(?<![A-Za-z0-9])_(?:START|END)_[A-Z_]*[A-Z]_(?![A-Za-z0-9])")


def wiki40b_corpus() -> Corpus:
    """Wiki-40B with its own training and validation splits. Raises `UserError`."""
    corpus = hub_corpus(f"{HUB_NAME}:{HUB_CONFIG}", clean=clean, cleaning=CLEANING)
    return replace(corpus, name="wiki40b")


def clean(text: str, where: str) -> str:
    """One article as plain text. Raises `UserError`, which begins with `where`, if it has unknown markup."""
    if text.startswith(("b'", 'b"')):
        text = _decode_repr(text, where)
    for marker in _MARKER.findall(text.replace("_NEWLINE_", "\n")):
        if marker not in _KNOWN:
            raise UserError(
                f"{where} has unknown markup {marker} (known: _NEWLINE_, {', '.join(_KNOWN)}): {_OTHER}"
            )
    lines = (line for line in text.split("\n") if line.strip() not in _KNOWN)
    parts = (line.replace("_NEWLINE_", "\n").strip() for line in lines)
    return "\n\n".join(part for part in parts if part)


def _decode_repr(text: str, where: str) -> str:
    try:
        return ast.literal_eval(text).decode()
    except (ValueError, SyntaxError):  # a UnicodeDecodeError is a ValueError
        raise UserError(f"{where} begins like the repr of bytes but is none: {_OTHER}") from None
