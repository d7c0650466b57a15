"""Which token of a tokenizer ends a text."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingpt.common.files import read_json_object

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"  # of LinGPT's own tokenizers, GPT-2's, Pythia's, Qwen's
# Then Llama 3's, Llama 2's, Gemma's, DeepSeek's.
KNOWN = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"


def find_end_token(raw: "tokenizers.Tokenizer", folder: Path | None = None) -> str | None:
    """The token that ends a text, of those that `raw` has: the one that the tokenizer's or the generation's
    config in `folder` names; else END_OF_TEXT; else the first other of KNOWN that is a special token. None if
    there is none. UserError for a damaged config."""
    special = {token.content for token in raw.get_added_tokens_decoder().values() if token.special}
    known = [token for token in KNOWN if token in special | {END_OF_TEXT}]
    named = _named(raw, folder) if folder else []
    return next((token for token in [*named, *known] if raw.token_to_id(token) is not None), None)


def _named(raw: "tokenizers.Tokenizer", folder: Path) -> list[str]:
    """The end of text that each config in `folder` names."""
    tokenizer, generation = (
        read_json_object(folder / name) if (folder / name).is_file() else dict[str, Any]()
        for name in (TOKENIZER_CONFIG, GENERATION_CONFIG)
    )
    token, ids = tokenizer.get("eos_token"), generation.get("eos_token_id")
    token = token.get("content") if isinstance(token, dict) else token
    first = ids[0] if isinstance(ids, list) and ids else ids
    by_id = raw.id_to_token(first) if type(first) is int and 0 <= first < 1 << 32 else None
    return [found for found in (token, by_id) if isinstance(found, str)]
