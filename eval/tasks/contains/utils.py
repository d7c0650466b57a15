"""What the YAML files beside this one refer to."""

from typing import Any


def answerable(rows: Any) -> Any:
    """SQuAD v2 without the questions that its passage does not answer."""
    return rows.select([i for i, found in enumerate(rows["answers"]) if found["text"]])


def answers(row: dict[str, Any]) -> list[str]:
    return row["answers"]["text"] if "answers" in row else [row["value"].strip()]


def contains(row: dict[str, Any], results: list[str]) -> dict[str, int]:
    """Whether an answer stands in the continuation, whatever the case."""
    (continuation,) = results
    return {"contains": int(any(answer.lower() in continuation.lower() for answer in answers(row)))}
