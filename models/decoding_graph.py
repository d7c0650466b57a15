"""Decoding on a GPU: one token's step captured in a CUDA graph, which costs the host one launch per token.

In eager mode the hundreds of launches of a step take several times as long as the GPU needs to read the
weights. A graph repeats the same kernels on the same addresses, so it captures a static step:

- the token and its position are tensors on the device, where the rotary tables are looked up
- a softmax layer writes the key and the value at the position, and attends with a mask to a bucket of its
  cache: a power of two of keys, at least LEAST_BUCKET, or the whole. Each bucket has a graph, captured when
  first needed
- all other states keep their tensors: those that a layer replaces are copied back at the end of the step.
  This reads and writes a linear attention's state once more, but needs no special operator

On a CPU the same step runs without a capture; there it is tested against the eager one.
"""

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from lingpt.common.errors import UserError, first_line
from lingpt.models.attention.softmax import KVCache, StaticPosition
from lingpt.models.gpt import GPT, DecodingState, tensors_in

LEAST_BUCKET = 256  # keys; fewer are not faster
WARMUP_STEPS = 2
_one_at_a_time = threading.Lock()  # captures share a stream: a graph would include another thread's step


class Step(Protocol):
    """A static step; without `keep` the states are unchanged (a warm-up). Returns logits `[B, V]`."""

    def __call__(self, *, keep: bool) -> torch.Tensor: ...


class DecodingGraph:
    """Steps a model through a decoding state: single tokens by CUDA graphs, several tokens eagerly.

    The graphs and their memory live as long as this object. Once there is a graph, weights must not move,
    autocast must not change, and nothing else may step the state.

    Raises UserError if an attention of the model has no `static_step` (attention/base.py).
    """

    def __init__(self, model: GPT, state: DecodingState) -> None:
        if not has_static_step(model):
            raise UserError("an attention of this model has no static step: it cannot decode by a CUDA graph")
        self.model, self.state = model, state
        self.device = model.lm_head.weight.device
        self.captures = self.device.type == "cuda"
        self.failed = False
        self._caches = [layer for layer in state.layers if isinstance(layer, KVCache)]
        self._idx_B1 = torch.zeros(state.batch_size, 1, dtype=torch.long, device=self.device)
        self._position_1 = torch.zeros(1, dtype=torch.long, device=self.device)
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}  # bucket → graph, and the logits it writes
        # One memory pool for all graphs: they never run concurrently, and only their logits are kept.
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    @torch.no_grad()
    def __call__(self, idx_BN: torch.Tensor) -> torch.Tensor:
        """Steps through the next tokens `[B, N]`; returns the logits `[B, padded_vocab_size]` after the last
        one, which the next call overwrites.

        The first tokens, several at once, those beyond the block size and, with softmax, rows that are padded
        on the left run eagerly; so does everything after a failed capture, which warns once. Raises UserError
        for more tokens than there is room for.
        """
        beyond = self.state.position >= self.model.max_seq_length  # of the rotary tables
        padded = any(cache.start is not None for cache in self._caches)  # the mask is of all rows
        if idx_BN.shape[1] != 1 or self.state.position == 0 or self.failed or beyond or padded:
            self._graphs.clear()  # an eager step replaces the state's tensors
            return self.model.next_logits(idx_BN, self.state)
        bucket = self._bucket(self.state.position + 1)
        self.state.check_step(*idx_BN.shape)
        self._idx_B1.copy_(idx_BN)
        self._position_1.fill_(self.state.position)  # also needed by a capture, whose warm-up writes there
        if not self.captures:
            logits_BV = self._step(bucket, keep=True)
        elif self._can_capture(bucket):
            graph, logits_BV = self._graphs[bucket]
            graph.replay()
        else:
            return self(idx_BN)
        self.state.position += 1
        for cache in self._caches:
            cache.length = self.state.position
        return logits_BV

    @torch.no_grad()
    def prepare(self, length: int) -> None:
        """Captures now all graphs for steps up to `length` tokens; the state must have seen a token. Raises
        the error of a capture that fails."""
        tokens = self.state.position + 1
        self._position_1.fill_(self.state.position)
        while self.captures and tokens <= length:
            bucket = self._bucket(tokens)
            self._capture(bucket)
            tokens = (bucket or length) + 1

    @property
    def buckets(self) -> list[int]:
        """The buckets that have a graph now; [0] for a model without softmax layers."""
        return list(self._graphs)

    def _bucket(self, length: int) -> int:
        """The number of keys that softmax layers attend to at token `length`; 0 without such layers."""
        self.model.check_length(length)
        if not self._caches:
            return 0
        self._caches[0].check_length(length)
        return min(max(LEAST_BUCKET, 1 << (length - 1).bit_length()), self._caches[0].k.shape[2])

    def _can_capture(self, bucket: int) -> bool:
        """Captures the bucket's graph; False, with a warning, if that fails."""
        try:
            self._capture(bucket)
        except RuntimeError as error:  # of PyTorch or CUDA, or out of memory; never a UserError
            self.failed = True
            message = f"decoding is eager, as no CUDA graph could be captured: {first_line(error)}"
            warnings.warn(message, stacklevel=3)
        return not self.failed

    def _capture(self, bucket: int) -> None:
        """Captures the bucket's graph if there is none yet. The states are unchanged, even if it fails."""
        if bucket not in self._graphs:
            with _without_autocast_cache(self.device):
                step = functools.partial(self._step, bucket)
                self._graphs[bucket] = capture(step, self.device, self._pool)

    def _step(self, bucket: int, *, keep: bool) -> torch.Tensor:
        """The static step of `_idx_B1` at `_position_1`: the states keep their attributes and tensors, which
        get new values. Without `keep` only the key and value at that position change, which a step
        overwrites."""
        model, layers, position = self.model, self.state.layers, self._position_1
        before = [dict(vars(layer)) for layer in layers]
        try:
            static = StaticPosition.of(position, bucket, self._caches[0].k.dtype) if self._caches else None
            for cache in self._caches:
                cache.static = static
            cos_1R, sin_1R = model.cos.index_select(0, position), model.sin.index_select(0, position)
            hidden_B1C = model.hidden_with_state(self._idx_B1, cos_1R, sin_1R, layers)
            for cache in self._caches:
                cache.static = None
            _copy_back(before, [vars(layer) for layer in layers], keep)
            return model.lm_head(hidden_B1C[:, -1])
        finally:
            for layer, attributes in zip(layers, before, strict=True):
                vars(layer).update(attributes)


def has_static_step(model: GPT) -> bool:
    """Whether every layer's attention declares `static_step`."""
    return all(getattr(block.attn, "static_step", False) for block in model.blocks)


def capture(step: Step, device: torch.device, pool: Any) -> tuple[Any, torch.Tensor]:
    """A CUDA graph of `step(keep=True)`, captured but not run, and the logits that replays write.

    A warm-up comes first, on the same stream, to compile, tune and load kernels and to allocate workspaces,
    which cannot be captured. RuntimeError if the step cannot be captured.
    """
    here, side = torch.cuda.current_stream(device), _side_stream(device)
    with _one_at_a_time:
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):  # also leaves the stream if the capture fails
                for _ in range(WARMUP_STEPS):
                    step(keep=False)
                graph = torch.cuda.CUDAGraph()
                # thread_local: other threads, such as NCCL's or a data loader's, may still call CUDA.
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    logits_BV = step(keep=True)
        except RuntimeError:
            # PyTorch leaves its generator in capture mode, in which this process draws no random numbers.
            generator = torch.cuda.default_generators[here.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            here.wait_stream(side)
    return graph, logits_BV


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace for each stream it has run on."""
    return torch.cuda.Stream(device)


@contextmanager
def _without_autocast_cache(device: torch.device) -> Iterator[None]:
    """Disables autocast's cache: a graph must cast the weights itself, as cached casts are freed when
    autocast's context ends."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def _copy_back(before: list[dict[str, Any]], after: list[dict[str, Any]], keep: bool) -> None:
    """Copies the tensors of the states after a step into those before it; without `keep` in the other
    direction: the same kernels, but unchanged states. RuntimeError if number, shapes or dtypes differ.
    """
    old, new = list(tensors_in(before)), list(tensors_in(after))
    if [(x.shape, x.dtype) for x in old] != [(x.shape, x.dtype) for x in new]:
        raise RuntimeError("a decoding state changes its tensors' shapes or dtypes from token to token")
    pairs = [(x, y) for x, y in zip(old, new, strict=True) if x is not y]
    for dtype in dict.fromkeys(x.dtype for x, _ in pairs):  # one kernel per dtype copies all
        into, source = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
        torch._foreach_copy_(*((into, source) if keep else (source, into)))
