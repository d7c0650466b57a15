"""`lingpt generate`: a trained model continues a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lingpt.common.options import Option

if TYPE_CHECKING:
    from lingpt.data import Tokenizer
    from lingpt.models import GPT


@dataclass
class Options:
    """Continue a text with a trained model."""

    # fmt: off
    model: Annotated[str, Option(
        "a run's folder (its newest checkpoint), a checkpoint, or a folder of `lingpt export`",
        positional=True)]
    prompt: Annotated[str, Option("text to continue; by default a new document begins", blank=True)] = ""
    document: Annotated[str | None, Option(
        "text file that comes before the prompt; of any length if no layer is softmax")] = None
    state: Annotated[str | None, Option(
        "file of what the model remembers of the document: written with --document, and read without it, so "
        "that a document is read once and asked many times")] = None
    max_new_tokens: Annotated[int, Option(
        "most tokens to generate; it stops earlier at the block size or at the end of the document",
        least=1)] = 160
    temperature: Annotated[float, Option("sampling temperature; 0 takes the likeliest token", least=0)] = 0.8
    top_k: Annotated[int | None, Option("sample from so many likeliest tokens; null for all", least=1)] = 50
    seed: Annotated[int, Option("seed of the sampling: the same text each time", least=0, most=2**32 - 1)] = 0
    device: Annotated[str, Option("auto, cpu, cuda, cuda:1")] = "auto"
    dtype: Annotated[str | None, Option(
        "float32, bfloat16 or float16 (default: bfloat16 on a GPU that has it, else the checkpoint's)"
    )] = None
    graph: Annotated[bool, Option(
        "on a GPU, replay a CUDA graph of each token's step; false runs slower, eager steps")] = True
    chat: Annotated[bool, Option(
        "talk to a model that was fine-tuned with a chat template: a line is a message, Ctrl-D ends")] = False
    # fmt: on


def run(options: Options) -> None:
    from lingpt.cli.chat import chat
    from lingpt.common.chat_template import read_chat_template
    from lingpt.common.devices import decoding_dtype, find_device
    from lingpt.common.errors import UserError
    from lingpt.common.run_folder import TOKENIZER, find_model_folder
    from lingpt.data import load_tokenizer
    from lingpt.models import check_source, load_model

    folder, device = find_model_folder(Path(options.model)), find_device(options.device)
    dtype = decoding_dtype(options.dtype, device)
    check_source(folder)
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder} has no tokenizer.json: copy that of the run into it")
    if options.chat and (options.prompt or options.document or options.state):
        raise UserError("--chat reads messages from the terminal: leave out --prompt, --document and --state")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    template, tokens = read_chat_template(folder) if options.chat else ("", {})
    if template is None:
        raise UserError(f"{folder} has no chat template: fine-tune the model with one (docs/fine-tuning.md)")
    tokens = {"bos_token": tokenizer.end_token} | tokens | {"eos_token": tokenizer.end_token}
    model = load_model(folder, device=device, dtype=dtype)
    tokenizer.check_fits(model.config.padded_vocab_size)
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "seed": options.seed}
    sampling |= {"vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id}
    sampling["graph"] = options.graph and device.type == "cuda"
    model.any_length = model.constant_state
    if options.chat:
        chat(model, tokenizer, template, tokens, options.max_new_tokens, sampling)
    else:
        _complete(options, model, tokenizer, sampling)


def _complete(options: Options, model: "GPT", tokenizer: "Tokenizer", sampling: dict[str, Any]) -> None:
    """Prints the prompt, maybe behind a document or the state of one, and what continues it."""
    import torch

    from lingpt.common.errors import UserError
    from lingpt.common.files import read_text
    from lingpt.common.format import scaled
    from lingpt.models import generate, load_state, read, save_state

    device, state = model.lm_head.weight.device, None
    document = tokenizer.encode(read_text(Path(options.document))) if options.document else []
    if options.document and not document:
        raise UserError(f"{options.document} is empty: give another document, or leave out --document")
    prompt = tokenizer.encode(options.prompt)
    if options.state:
        file = Path(options.state)
        if file.exists() == bool(document):
            fix = "remove it, or leave out --document" if document else "give the --document to read"
            raise UserError(f"{file} {'exists already' if document else 'does not exist'}: {fix}")
        if document:
            state = model.new_state(1, len(document))
            read(model, torch.tensor([document], device=device), state)
            save_state(file, model, state)
            print(f"{file}: {len(document):,} tokens, {scaled(file.stat().st_size, 'B')}")
            if not prompt:
                return
        state, document = load_state(file, model, len(prompt) + options.max_new_tokens), []
    prompt = document + prompt or [tokenizer.eos_id]
    room = model.max_seq_length - len(prompt) - (state.position if state else 0)
    if model.any_length:
        room = options.max_new_tokens
    if room < 1:
        raise UserError(
            f"a prompt of {len(prompt)} tokens fills block size {model.max_seq_length}: shorten it"
        )
    new = min(options.max_new_tokens, room)
    ids = generate(model, torch.tensor([prompt], device=device), new, state=state, **sampling)
    text = ids[0, len(document) if options.prompt or document else 1 :].tolist()
    print(tokenizer.decode(text[:-1] if text[-1] == tokenizer.eos_id else text))
