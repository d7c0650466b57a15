"""Tokenizers: any `tokenizer.json`, from a file, a folder or the hub, and the embedded corpus's own BPE."""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lingpt.common.end_of_text import END_OF_TEXT, KNOWN, TOKENIZER_CONFIG, find_end_token
from lingpt.common.errors import UserError, first_line
from lingpt.common.files import expand, read_bytes, write_json, write_text
from lingpt.common.run_folder import TOKENIZER
from lingpt.data.embedded import embedded_corpus
from lingpt.data.hub import hub_errors


class Tokenizer:
    """A `tokenizers.Tokenizer` and what a language model needs of it: ids, text and the end-of-text id.

    `encode` adds no tokens, and encodes a special token that is written out in the text as that token, as
    Hugging Face's tokenizers do. Documents of a corpus are plain text: see `for_documents`.
    """

    def __init__(self, raw: tokenizers.Tokenizer, name: str, end_token: str | None = None) -> None:
        """end_token: ends a text; by default what `find_end_token` finds. Raises `UserError` without one."""
        self.raw, self.name, end = raw, name, end_token or find_end_token(raw)
        eos_id = None if end is None else raw.token_to_id(end)
        if end is None or eos_id is None:
            raise UserError(
                f"the tokenizer {name} has no token {end or ' or '.join(KNOWN)}, to separate documents: name "
                "its own with --data.end_token"
            )
        self.end_token, self.eos_id = end, int(eos_id)

    @functools.cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included: the rows that an embedding must have."""
        return 1 + max(self.raw.get_vocab(with_added_tokens=True).values())

    @property
    def end_id(self) -> int:
        """The token that ends each document in the token cache."""
        return self.eos_id

    @functools.cached_property
    def hash(self) -> str:
        """The SHA-256 of all that decides the tokens."""
        end = "" if self.end_token == END_OF_TEXT else self.end_token
        return hashlib.sha256((self.raw.to_str() + end).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ids(self.raw, texts)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_batch`, with the end-of-text token in a text as plain text."""
        return self._ids(self.for_documents, texts)

    def _ids(self, raw: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [e.ids for e in raw.encode_batch_fast(list(texts), add_special_tokens=False)]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of `tokenizers`, which exports no such class
                raise
            raise UserError(
                f"the tokenizer {self.name} fails on this text ({first_line(error)}): take one with other "
                "regular expressions"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` (a list, array or tensor), special tokens written out."""
        return self.raw.decode([int(i) for i in ids], skip_special_tokens=False)

    @functools.cached_property
    def for_documents(self) -> tokenizers.Tokenizer:
        """A copy that encodes a written-out end-of-text token in a document as plain text. Do not change it.
        UserError if the tokenizer's vocabulary has no other tokens for it."""
        values, end = json.loads(self.raw.to_str()), self.end_token
        for token in values["added_tokens"]:
            token["special"] |= token["content"] == end  # others are never encoded as plain text
        copy = tokenizers.Tokenizer.from_str(json.dumps(values))
        copy.encode_special_tokens = True
        if self.eos_id in copy.encode(f"{end} a {end}a", add_special_tokens=False).ids:
            raise UserError(
                f"the tokenizer {self.name} takes the text {end} for the end of a document, which a "
                "document may contain: take one whose vocabulary has it as an added token only"
            )
        return copy

    def check_fits(self, padded_vocab_size: int) -> None:
        """Raises `UserError` unless every id is a row of the model's embedding."""
        if self.vocab_size > padded_vocab_size:
            raise UserError(
                f"the tokenizer {self.name} has {self.vocab_size} tokens, added ones included, and the "
                f"model's vocabulary only {padded_vocab_size}: take the model's own tokenizer, or add "
                f"--model.vocab_size {self.vocab_size}"
            )

    def count_differing_ids(self, other: "Tokenizer") -> int:
        """The number of ids here that are another token, or no token, in `other`."""
        own, others = (t.raw.get_vocab(with_added_tokens=True) for t in (self, other))
        return len(own.items() - others.items())

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `tokenizer.json` into `folder` and returns its path; also a tokenizer_config.json, if there
        are tokens for it to name. OSError if it cannot be written."""
        path = Path(folder) / TOKENIZER
        write_text(path, self.raw.to_str(pretty=True))
        if tokens := self._named_tokens():
            write_json(path.with_name(TOKENIZER_CONFIG), tokens)
        return path

    def _named_tokens(self) -> dict[str, str]:
        """The token that ends a text, if `tokenizer.json` alone does not say which."""
        return {} if find_end_token(self.raw) == self.end_token else {"eos_token": self.end_token}

    def __reduce__(self) -> tuple:
        return _from_string, (self.raw.to_str(), self.name, self.end_token)


def _from_string(text: str, name: str, end_token: str | None, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its settings that cut texts off or pad them. folder: where
    its configs are."""
    raw = tokenizers.Tokenizer.from_str(text)
    raw.no_truncation()
    raw.no_padding()
    return Tokenizer(raw, name, end_token or find_end_token(raw, folder))


def load_tokenizer(source: str | os.PathLike, end_token: str | None = None) -> Tokenizer:
    """The tokenizer at `source`: a `tokenizer.json`, a folder that holds one, or a name on the hub.

    end_token: ends a text; by default what a config beside tokenizer.json names, else one that is known.

    Raises:
        UserError: not found, not readable, or without an end-of-text token
    """
    path = find_tokenizer(source) or _from_hub(str(source))
    try:
        return _from_string(read_bytes(path).decode(), str(source), end_token, path.parent)
    except UserError:
        raise
    except Exception as error:  # `tokenizers` raises a bare Exception for what it cannot parse
        raise UserError(
            f"{path} is not a tokenizer.json ({error}): give one in the format of `tokenizers`"
        ) from None


def find_tokenizer(source: str | os.PathLike) -> Path | None:
    """The `tokenizer.json` that `source` names, or None if `source` may be a name on the hub. UserError if it
    is neither.
    """
    path, name = expand(source), str(source)
    if path.is_dir():
        path = path / TOKENIZER
        if not path.exists():
            raise UserError(
                f"the folder {source} holds no tokenizer.json: give one that does, or a name on the hub"
            )
    elif not path.exists():
        if name.count("/") <= 1 and not name.startswith(("/", ".", "~")) and not name.endswith(".json"):
            return None  # it looks like `owner/name`
        raise UserError(
            f"there is no tokenizer at {source}: give the path of a tokenizer.json, a folder that holds "
            "one, or a name on the hub"
        )
    return path


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    advice = "give the path of a tokenizer.json with --data.tokenizer <path> (make: TOKENIZER=<path>)"
    with hub_errors(f"the tokenizer {name}", advice):
        path = Path(hf_hub_download(name, TOKENIZER))
        with contextlib.suppress(EntryNotFoundError):
            hf_hub_download(name, TOKENIZER_CONFIG)  # into the same folder
    return path


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE like GPT-2's (Radford et al. 2019) with `<|endoftext|>` as id 0; encodes any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise UserError(
            f"--data.vocab_size {vocab_size} is too small: {len(alphabet)} bytes and {END_OF_TEXT} come first"
        )
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    return Tokenizer(raw, f"byte-level BPE of {vocab_size}")


def embedded_tokenizer(vocab_size: int, cache_dir: Path, end_token: str | None = None) -> Tokenizer:
    """The BPE of the embedded corpus's training modules: trained once, in seconds, then cached.

    Raises OSError if the cache cannot be written.
    """
    corpus = embedded_corpus()
    key = hashlib.sha256(f"{corpus.content_hash} {vocab_size} {tokenizers.__version__}".encode()).hexdigest()
    folder = cache_dir / "tokenizers" / key[:32]
    if not (folder / TOKENIZER).exists():
        train_bpe((d.text for d in corpus.train.read()), vocab_size).save(folder)
    return Tokenizer(load_tokenizer(folder).raw, f"embedded byte-level BPE of {vocab_size}", end_token)
