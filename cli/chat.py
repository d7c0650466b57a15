"""`lingpt generate --chat`: a conversation in a terminal with a model that has a chat template."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lingpt.common.errors import UserError, first_line
from lingpt.data import Tokenizer
from lingpt.models import GPT, stream


def chat(
    model: GPT,
    tokenizer: Tokenizer,
    template: str,
    tokens: dict[str, str],
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> None:
    """Answers each line of stdin, token by token; the whole conversation is the prompt."""
    template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # marks for training
    messages: list[dict[str, str]] = []
    while True:
        print("> " if sys.stdin.isatty() else "", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        names = tokens | {"messages": messages, "add_generation_prompt": True}
        try:
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            text = environment.from_string(template).render(names)
        except Exception as error:  # a template computes: `TypeError`, for example
            raise UserError(f"the chat template fails: {first_line(error)}") from error
        answer = ""
        for piece in replies(model, tokenizer, tokenizer.encode(text), max_new_tokens, sampling):
            print(piece if answer else piece.lstrip(), end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer.strip()})


def replies(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], max_new_tokens: int, sampling: dict[str, Any]
) -> Iterator[str]:
    """The text that continues the prompt, in pieces of whole characters."""
    device, ids, text, said = model.lm_head.weight.device, list[int](), "", ""
    if not model.any_length:
        max_new_tokens = max(1, min(max_new_tokens, model.max_seq_length - len(prompt)))
    for token in stream(model, torch.tensor([prompt], device=device), max_new_tokens, **sampling):
        if token.item() == tokenizer.eos_id:
            break
        ids.append(int(token))
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else within a character
            yield text[len(said) :]
            said = text
    yield text[len(said) :]
