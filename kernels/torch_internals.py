"""All that is used of PyTorch's private interface (`torch._C`), each with its reason.

The operators must stay what they are without these: each saves host time in a call, nothing more; and
`sdpa_choice` is for a record.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The types of an operator's arguments, without those that override what torch does.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), float, bool, int, str}


def below_autograd() -> Any:
    """A context in which operators skip autograd's dispatch key.

    `torch.library.register_autograd` does the same inside, but spends 50 µs a call on a schema's defaults.
    """
    return torch._C._AutoDispatchBelowAutograd()


def is_plain_call(args: Sequence[Any]) -> bool:
    """Whether an operator may be called past the dispatcher, as nothing would notice.

    The dispatcher costs several µs a call: of short sequences, as much as the launches.
    """
    observed = (
        torch._C._len_torch_function_stack()
        or torch._C._autograd._profiler_enabled()
        or torch._C._is_tracing()  # by torch.jit
    )
    return not observed and is_unobserved(args)


def is_unobserved(args: Sequence[Any]) -> bool:
    """Whether all tensors are real ones, and no mode or transform is active that wants to see the operator (a
    FLOP counter, a tracer, vmap). Autograd may be."""
    tensors = (x for x in args if isinstance(x, Tensor))
    real = _PLAIN_TYPES.issuperset(map(type, args)) and not (first := next(tensors)).is_meta
    observed = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return real and not observed and not torch._is_functional_tensor(first)


def sdpa_choice(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The number of the `SDPBackend` that causal `scaled_dot_product_attention` takes for `[B, H, N, D]`.

    PyTorch has no public question for it, and its answer depends on the card and on cuDNN's version.
    RuntimeError, after warnings that say why, where none of those that are enabled can run; or ERROR.
    """
    return torch._fused_sdp_choice(q, k, v, is_causal=True)


def raw_stream(device: torch.device) -> int:
    """PyTorch's current stream as a raw handle, as Inductor gets it: a Stream object costs ten times that."""
    return torch._C._cuda_getCurrentRawStream(device.index)
