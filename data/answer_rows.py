"""Rows with prompts and answers, of JSON Lines or of a table.

A row has `messages`, each with a `role` and a `content`; or a `prompt` and a `completion`.
"""

import json
from typing import Any

from lingpt.common.errors import UserError, one_line

ANSWERS = "messages, or prompt and completion"  # the `text_key` of such rows
NEEDED = (
    'every row must have "messages", one of them, not the first, an assistant\'s, each with a role and a '
    'content in text; or a "prompt" and a "completion" in text'
)


def read_line(line: bytes, where: str) -> str:
    """`read_row` of one line of JSON."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON in UTF-8 ({one_line(error)}): {NEEDED}") from None
    return read_row(row, where)


def read_row(row: Any, where: str) -> str:
    """The row as JSON, without what is not used; null is as absent. UserError, which begins with `where`."""
    try:
        row = {key: value for key, value in row.items() if value is not None}
        if "messages" in row:
            messages = [{key: message[key] for key in ("role", "content")} for message in row["messages"]]
            texts = [text for message in messages for text in message.values()]
            answers = [message["content"] for message in messages if message["role"] == "assistant"]
            if answers and messages[0]["role"] == "assistant":  # no template gives the prompt of it
                raise UserError(f"{where} begins with an answer: {NEEDED}")
            kept = json.dumps({"messages": messages}, ensure_ascii=False)
        else:
            texts = [row["prompt"], row["completion"]]
            answers, kept = texts[1:], json.dumps(texts, ensure_ascii=False)
        if all(isinstance(text, str) for text in texts) and any(answers):
            kept.encode()
            return kept
        fault = "has no answer, or what is not text"
    except (KeyError, TypeError, AttributeError):
        fault = f"has no {ANSWERS}"
    except UnicodeEncodeError:
        fault = "has half a surrogate pair"
    raise UserError(f"{where} {fault}: {NEEDED}")
