"""The chat template beside a tokenizer, by which a conversation becomes text."""

from pathlib import Path

from lingpt.common.end_of_text import TOKENIZER_CONFIG
from lingpt.common.files import read_json_object, read_text

CHAT_TEMPLATE = "chat_template.jinja"


def read_chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The template as transformers saves it, None if there is none, and the tokens that it may name:
    `bos_token` and others of tokenizer_config.json. UserError for a damaged config."""
    path, config = folder / CHAT_TEMPLATE, folder / TOKENIZER_CONFIG
    values = read_json_object(config) if config.is_file() else {}
    template = read_text(path) if path.is_file() else values.get("chat_template")
    texts = {name: x.get("content") if isinstance(x, dict) else x for name, x in values.items()}
    tokens = {name: x for name, x in texts.items() if name.endswith("_token") and isinstance(x, str)}
    return template if isinstance(template, str) else None, tokens
