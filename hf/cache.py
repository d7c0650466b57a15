"""The decoding states of a model's layers, as transformers' `generate` and its beam search handle them."""

from typing import Any

import torch
import torch.nn.functional as F

from lingpt.models.attention.softmax import KVCache
from lingpt.models.gpt import map_tensors, tensors_in


class LinGPTCache:
    """Each layer's state: of a linear attention one of constant size, of softmax keys and values.

    `seen` is the number of columns of the batch so far, the padding on the left of shorter rows included.
    """

    is_compileable = False
    is_linear = (False,)  # the number of columns seen is known, so `generate` need not begin again

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.seen = layers, 0

    def check(self, rows: int, layers: int) -> None:
        """Raises ValueError if it is of another number of rows or layers."""
        own = {len(x) for x in tensors_in(self.layers)} or {rows}  # a layer may make its state later
        if len(self.layers) != layers or own != {rows}:
            found = f"{len(self.layers)} layers and {max(own)} rows"
            raise ValueError(f"a cache of {found} for {layers} and {rows}: begin without one")

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
        return sum(x.nbytes for x in tensors_in(self.layers))
