"""A decoding state in a file: a long document is read once and asked many times."""

import hashlib
from pathlib import Path

import torch
from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.common.files import replacing, write_errors
from lingpt.models.attention.softmax import KVCache
from lingpt.models.gpt import GPT, DecodingState
from lingpt.models.model_folder import read_pickle

PIECE = 4096  # tokens that `read` steps through at a time


def read(model: GPT, idx_BN: torch.Tensor, state: DecodingState) -> None:
    """Steps the state through the tokens `[B, N]`, in pieces, so that memory does not grow with N, and with a
    progress bar on a terminal. Raises UserError as `GPT.hidden` does."""
    model.check_length(state.position + idx_BN.shape[1])
    with torch.no_grad(), tqdm(total=idx_BN.shape[1], unit="token", desc="reading", disable=None) as bar:
        for piece_BN in idx_BN.split(PIECE, dim=1):
            model.hidden(piece_BN, state)
            bar.update(piece_BN.shape[1])


def save_state(file: Path, model: GPT, state: DecodingState) -> None:
    """Writes the state; of keys and values only those that it has seen. UserError if that cannot be done."""
    layers = [dict(vars(layer)) for layer in state.layers]
    for layer, values in zip(state.layers, layers, strict=True):
        if isinstance(layer, KVCache):
            values |= {name: values[name][:, :, : layer.length].clone() for name in "kv"}
    content = {"of": _fingerprint(model), "position": state.position, "layers": layers}
    with write_errors(file), replacing(file) as partial:
        torch.save(content, partial)


def load_state(file: Path, model: GPT, room: int) -> DecodingState:
    """The state of `save_state` for one row, on the model's device, to be continued by up to `room` tokens.

    Raises UserError for a file that holds none, or one of another model or dtype.
    """
    device = model.lm_head.weight.device
    try:
        content = read_pickle(file, device)
        of, position, layers = (content[name] for name in ("of", "position", "layers"))
    except Exception as error:
        raise UserError(f"{file} holds no state, or a damaged one: give another file") from error
    own = _fingerprint(model)
    if of["dtype"] != own["dtype"]:
        raise UserError(
            f"{file} is a state in {of['dtype']}, and the model is in {own['dtype']}: give --dtype "
            f"{of['dtype']}"
        )
    if of != own:
        raise UserError(f"{file} is a state of another model: give that one, or read the document again")
    state = model.new_state(1, position + room)
    state.position = position
    for layer, values in zip(state.layers, layers, strict=True):
        if isinstance(layer, KVCache):
            for name in "kv":
                getattr(layer, name)[:, :, :position] = values.pop(name)
        vars(layer).update(values)
    return state


def _fingerprint(model: GPT) -> dict[str, str]:
    """The dtype, and a hash of the first numbers of each parameter: two models do not have the same ones."""
    numbers = [x.detach().flatten()[:1024].float().cpu() for x in model.parameters()]
    content = torch.cat(numbers).numpy().tobytes() + repr(model.config.to_dict()).encode()
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    return {"model": hashlib.sha256(content).hexdigest(), "dtype": dtype}
