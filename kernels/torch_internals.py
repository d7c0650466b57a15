"""All uses of PyTorch's private interface (`torch._C`, `torch.ops.aten._…`), each with its reason.

The operators work without them: they only save time per call, and `sdpa_choice` is for a record. If a
release of PyTorch lacks one, the public interface is used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from torch import _is_functional_tensor
    from torch._C import (
        _are_functorch_transforms_active,
        _AutoDispatchBelowAutograd,
        _is_tracing,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import is_legacy_batchedtensor

    HAS_SHORTCUTS = True  # else calls go through the dispatcher, with torch.library's autograd
except ImportError:
    HAS_SHORTCUTS = False
_raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)

# The types of an operator's arguments, excluding subclasses that override torch functions.
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), float, bool, int, str}


def name_for_export(namedtuple: type, name: str) -> None:
    """Lets `torch.export.save` keep programs that take or return this NamedTuple.

    The public registration is for classes that are not containers already.
    """
    if register := getattr(torch.utils._pytree, "_register_namedtuple", None):
        register(namedtuple, serialized_type_name=name)


def below_autograd() -> Any:
    """A context in which operators skip autograd's dispatch key.

    `torch.library.register_autograd` does the same, but spends 50 µs per call on a schema's defaults.
    """
    return _AutoDispatchBelowAutograd()


def is_plain_call(args: Sequence[Any]) -> bool:
    """Whether an operator may be called without the dispatcher, as nothing observes the call.

    The dispatcher costs several µs per call: for short sequences as much as the launches.
    """
    observed = (
        not HAS_SHORTCUTS
        or _len_torch_function_stack()
        or _profiler_enabled()
        or _is_tracing()  # by torch.jit
    )
    return not observed and is_unobserved(args)


def is_unobserved(args: Sequence[Any]) -> bool:
    """Whether all tensors are real, and no mode or transform that observes operators is active (a FLOP
    counter, a tracer, vmap). Autograd may be active."""
    if not HAS_SHORTCUTS:
        return False
    tensors = (x for x in args if isinstance(x, Tensor))
    real = _PLAIN_TYPES.issuperset(map(type, args)) and not (first := next(tensors)).is_meta
    observed = _len_torch_dispatch_stack() or _are_functorch_transforms_active()
    return real and not observed and not _is_functional_tensor(first)


def is_batched(gradients: Sequence[Tensor | None]) -> bool:
    """Whether these are gradients of a batch of losses (`is_grads_batched`), a vmap that `is_unobserved` does
    not see."""
    return any(x is not None and is_legacy_batchedtensor(x) for x in gradients)


def transforms_active() -> bool:
    """Whether a transform of torch.func is active here."""
    return _are_functorch_transforms_active()


def sdpa_choice(q: Tensor, k: Tensor, v: Tensor) -> int | None:
    """The number of the `SDPBackend` that causal `scaled_dot_product_attention` uses for `[B, H, N, D]`.

    PyTorch has no public function for it, and the choice depends on the card and on cuDNN's version. If none
    of the enabled backends can run: RuntimeError, after warnings that say why, or ERROR. None: this PyTorch
    does not tell.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    return choose and choose(q, k, v, is_causal=True)


def sdpa_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor] | None:
    """`scaled_dot_product_attention` with an additive mask, and the logsumexp of each row's scores.

    q [B, H, N, D], k and v [B, H, M, D], mask [B, H, N, M] of one dtype; expanded and strided views are fine.
    Returns o [B, H, N, D] and [B, H, N] in fp32. None: this PyTorch, or the device, has no such operator. The
    public function does not return the logsumexp, which is needed to combine splits of the keys.
    """
    names = {
        "cuda": "_scaled_dot_product_efficient_attention",
        "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    }
    operator = getattr(torch.ops.aten, names.get(q.device.type, ""), None)
    if operator is None:
        return None
    if q.is_cuda:
        o, logsumexp, *_ = operator(q, k, v, mask, True, scale=scale)
    else:
        o, logsumexp = operator(q, k, v, attn_mask=mask, scale=scale)
    return o, logsumexp[..., : q.shape[2]]  # on CUDA its rows are padded


def raw_stream(device: torch.device) -> int:
    """PyTorch's current stream as a raw handle, as in Inductor: a Stream object takes ten times as long."""
    return _raw_stream(device.index)
