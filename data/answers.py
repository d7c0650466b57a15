"""Rows of prompts and answers, of which only the answers are learned.

The chat template of the tokenizer turns messages into text. A prompt and its completion are text as they
are, and the end of text after them is learned. Prompts and answers are tokenised apart, as they are when the
model answers. In the token cache a token that is not learned is stored as its bitwise complement, which is
negative, and after each row stands ROW_END.
"""

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lingpt.common.chat_template import CHAT_TEMPLATE
from lingpt.common.errors import UserError, one_line
from lingpt.common.files import write_text
from lingpt.data.corpus import hash_of
from lingpt.data.hub import only_errors
from lingpt.data.tokenizer import Tokenizer, find_tokenizer

ROW_END = int(np.iinfo(np.int32).min)


class AnswerTokenizer(Tokenizer):
    """A tokenizer whose documents are rows of `read_row`. UserError for messages without a chat template."""

    end_id = ROW_END

    def __init__(self, tokenizer: Tokenizer, source: str | None) -> None:
        """source: where the tokenizer is from, for its chat template."""
        super().__init__(tokenizer.raw, tokenizer.name, tokenizer.end_token)
        self._source = source

    @functools.cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        found = None
        if self._source:
            path = find_tokenizer(self._source)
            try:
                # An export of LinGPT's lies beside a model that transformers does not know, and warns of.
                with only_errors("transformers.configuration_utils"):
                    found = AutoTokenizer.from_pretrained(path.parent if path else self._source)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"transformers cannot read the tokenizer {self.name} ({one_line(error)}), whose chat "
                    "template messages need: give another with --data.tokenizer"
                ) from None
        if found is not None and isinstance(found.chat_template, dict):  # several, by their names
            found.chat_template = found.chat_template.get("default")
        if found is None or found.chat_template is None:
            raise UserError(
                f"the tokenizer {self.name} has no chat template, which messages need: put a {CHAT_TEMPLATE} "
                "beside it, give another with --data.tokenizer, or rows with prompt and completion"
            )
        found.eos_token = self.end_token
        return found

    @functools.cached_property
    def _template(self) -> str | None:
        try:
            return self._chat.chat_template
        except UserError:
            return None

    @functools.cached_property
    def hash(self) -> str:
        """Of the tokenizer and of its chat template, if it has one, with the tokens that this names."""
        template, tokens = self._template or "", self._named_tokens()
        tokens.pop("eos_token", None)  # the tokenizer's hash has it
        named = {name: token for name, token in tokens.items() if token and name in template}
        return hash_of([super().hash, self._template, *([named] if named else [])])

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        rows = [self.parts(json.loads(text)) for text in texts]
        ids = iter(self.encode_batch([part for row in rows for part in row]))
        return [[i if n % 2 else ~i for n in range(len(row)) for i in next(ids)] for row in rows]

    def parts(self, row: Any) -> list[str]:
        """The row's text in parts: a prompt, its answer, the next prompt, and so on to the last answer."""
        if isinstance(row, list):
            prompt, completion = row
            return [prompt, completion + self.end_token]
        messages, parts, done = row["messages"], list[str](), ""
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:i], add_generation_prompt=True)
                whole = self._render(messages[: i + 1])
                if not (prompt.startswith(done) and whole.startswith(prompt)):
                    raise UserError(
                        f"the chat template of {self.name} changes earlier messages when others follow: give "
                        "a conversation for each answer, or another tokenizer"
                    )
                parts += prompt[len(done) :], whole[len(prompt) :]
                done = whole
        return parts

    def save(self, folder: str | os.PathLike) -> Path:
        """Also the chat template, for `lingpt generate --chat`."""
        path = super().save(folder)
        if self._template is not None:
            write_text(path.with_name(CHAT_TEMPLATE), self._template)
        return path

    def _named_tokens(self) -> dict[str, str]:
        """With a chat template, the tokens that it may name; the end of a text is one of them."""
        if self._template is None:
            return super()._named_tokens()
        names = self._chat.special_tokens_map.items()
        return {name: token for name, token in names if isinstance(token, str)}

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._chat.apply_chat_template(messages, tokenize=False, **options)
        except TemplateError as error:
            begins = messages[0]["content"][:60]
            raise UserError(
                f"the chat template of {self.name} fails ({one_line(error)}) on the conversation that begins "
                f"{begins!r}: leave it out, or take another tokenizer"
            ) from None

    def __reduce__(self) -> tuple:
        return AnswerTokenizer, (Tokenizer(self.raw, self.name, self.end_token), self._source)
