"""Writes a model as a folder that transformers reads: config, weights, tokenizer, defaults of `generate`.

Plain softmax models become stock GPT-NeoX, Llama or Qwen ones. Others have a `model_type` of their own, which
`import lingpt.hf` registers; their tensors are those of a LinGPT checkpoint, which `load_model` reads, too.
"""

import warnings
from pathlib import Path
from typing import Any

import tokenizers

from lingpt.common.chat_template import CHAT_TEMPLATE, read_chat_template
from lingpt.common.end_of_text import GENERATION_CONFIG, KNOWN, TOKENIZER_CONFIG, find_end_token
from lingpt.common.errors import UserError, first_line
from lingpt.common.files import read_text, write_errors, write_json, write_text
from lingpt.common.run_folder import TOKENIZER
from lingpt.models.gpt import GPT
from lingpt.models.gpt_neox import is_gpt_neox, write_gpt_neox
from lingpt.models.llama import llama_kind, write_llama
from lingpt.models.model_folder import write_model_folder


def export_hf(
    model: GPT, folder: str | Path, tokenizer: str | Path | None = None, card: str | None = None
) -> None:
    """Writes the folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    tokenizer: a `tokenizer.json`, or a folder that holds one, such as the model's checkpoint; a config
        beside it may name the token that ends a text, and its chat template is kept. As in LinGPT, it puts
        no tokens around a text. Without a tokenizer, `AutoTokenizer` would silently give an empty one, so
        there is a warning.
    card: the text of its README.md.

    Raises UserError for a file that is not a tokenizer, or of more tokens than the model has.
    """
    folder = Path(folder)
    text, end, eos_id, vocab_size = None, "", 0, model.config.vocab_size
    chat_template, tokens = None, dict[str, str]()
    if tokenizer:
        path = Path(tokenizer) / TOKENIZER if Path(tokenizer).is_dir() else Path(tokenizer)
        text, end, eos_id, vocab_size = _read_tokenizer(path)
        chat_template, tokens = read_chat_template(path.parent)
    rows = model.config.padded_vocab_size
    if vocab_size > rows:
        raise UserError(f"{path} has {vocab_size} tokens, the model {rows}: give the model's own tokenizer")
    unused = {"suppress_tokens": [*range(vocab_size, rows)]} if vocab_size < rows else {}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_id)
    _write_model(model, folder, ids)
    with write_errors(folder):
        write_json(folder / GENERATION_CONFIG, ids | unused)
        if card is not None:
            write_text(folder / "README.md", card)
        if text is None:
            warnings.warn(
                f"{folder} gets no tokenizer, and AutoTokenizer makes an empty one of it: give export_hf one",
                stacklevel=2,
            )
            return
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), end)
        if chat_template is not None:
            write_text(folder / CHAT_TEMPLATE, chat_template)
            names |= tokens | {"eos_token": end}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
        write_text(folder / TOKENIZER, text)
        write_json(
            folder / TOKENIZER_CONFIG, names | settings | {"model_max_length": model.config.block_size}
        )


def stock_type(model: GPT) -> str | None:
    """The `model_type` of transformers that computes this model; None if it needs `import lingpt.hf`."""
    if not all(block.attn.hf_exportable for block in model.blocks):
        return None
    return "gpt_neox" if is_gpt_neox(model.config) else llama_kind(model.config)


def _write_model(model: GPT, folder: Path, token_ids: dict[str, int]) -> None:
    """Writes config.json and the weights, as GPT-NeoX's or Llama's if the model is one."""
    about: dict[str, Any] = {"dtype": str(model.lm_head.weight.dtype).removeprefix("torch."), **token_ids}
    if (stock := stock_type(model)) == "gpt_neox":
        write_gpt_neox(model, folder, about)
    elif stock:
        write_llama(model, folder, about)
    else:
        own = {
            "model_type": "lingpt",
            "architectures": ["LinGPTForCausalLM"],
            "network": model.config.to_dict(),
            "vocab_size": model.config.padded_vocab_size,
            "tie_word_embeddings": model.config.tie_embeddings,
        }
        write_model_folder(folder, own | about, model.state_dict(), metadata={})


def _read_tokenizer(path: Path) -> tuple[str, str, int, int]:
    """A tokenizer.json's content, the token that ends a text and its id, and the highest id plus 1."""
    text = read_text(path)
    try:
        raw = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises a bare Exception for what it cannot parse
        raise UserError(f"{path} is not a tokenizer.json: {first_line(error)}") from error
    if raw.num_special_tokens_to_add(False):  # as Llama's begin of text, which LinGPT puts before none
        raw.post_processor = None
        text = raw.to_str(pretty=True)
    vocabulary, end = raw.get_vocab(with_added_tokens=True), find_end_token(raw, path.parent)
    if end is None:
        raise UserError(
            f"{path} has no token {' or '.join(KNOWN)}: give the model's own, or name its eos_token in a "
            f"{TOKENIZER_CONFIG} beside it"
        )
    return text, end, vocabulary[end], 1 + max(vocabulary.values())
