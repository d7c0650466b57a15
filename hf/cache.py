"""The decoding states of a model's layers, as transformers' `generate` and its beam search handle them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lingpt.models.attention.softmax import KVCache
from lingpt.models.gpt import tensors_in


class LinGPTCache:
    """Each layer's state: of a linear attention one of constant size, of softmax keys and values.

    `seen` is the number of columns of the batch so far, the padding on the left of shorter rows included.
    """

    is_compileable = False
    is_linear = (False,)  # the number of columns seen is known, so `generate` need not begin again

    def __init__(self, layers: list[Any], seen: int = 0) -> None:
        self.layers, self.seen = layers, seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # no limit of its own

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` in all, twice as much each time."""
        for layer in self.layers:
            if isinstance(layer, KVCache) and (more := columns - layer.k.shape[2]) > 0:
                more = max(more, layer.k.shape[2])
                layer.k, layer.v = (F.pad(x, (0, 0, 0, more)) for x in (layer.k, layer.v))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        select = lambda x: x.index_select(0, indices.to(x.device))  # noqa: E731
        self.layers = [map_tensors(select, layer) for layer in self.layers]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.layers = [map_tensors(lambda x: x.repeat_interleave(repeats, 0), layer) for layer in self.layers]

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in tensors_in(self.layers))


def join_rows(parts: Sequence[list[Any]], rows: torch.Tensor) -> list[Any]:
    """The layers' states of one batch from those of its parts; `rows`: the parts' rows, one after another."""
    order = rows.argsort()

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensors).index_select(0, order.to(tensors[0].device))

    return [map_tensors(join, *layers) for layers in zip(*parts, strict=True)]


def map_tensors(function: Callable[..., torch.Tensor], *states: Any) -> Any:
    """A copy of a state with the function's results for its tensors; of several states, for those at the same
    place."""
    first = states[0]
    if isinstance(first, torch.Tensor):
        return function(*states)
    if isinstance(first, tuple):
        values = [map_tensors(function, *parts) for parts in zip(*states, strict=True)]
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    if not hasattr(first, "__dict__"):
        return first
    result = copy.copy(first)
    for name in vars(first):
        setattr(result, name, map_tensors(function, *(getattr(state, name) for state in states)))
    return result
