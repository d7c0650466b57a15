"""Every attention that is measured, by name: its inputs, its call, and what is correct for it in float64.

Each is held to its *own* function (a softmax is no worse for not being linear attention), on the very tensors
that were timed: `oracle` recomputes, in float64, some (batch, head) slices of them.

To add one: an entry of IMPLEMENTATIONS, at the end of this file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

from lingpt.kernels.bench.shapes import Shape
from lingpt.kernels.gated_linear_attention import gated_linear_attention
from lingpt.kernels.linear_attention import linear_attention, linear_attention_flops, linear_attention_qkv
from lingpt.kernels.linear_attention.cuda import why_unsupported
from lingpt.kernels.linear_attention.numerics import B_SHRINK

# By name: q, k, v … [B, N, H, D]; qkv [B, N, 3, H, D]; per-head values [H]; cos and sin [N, R]
Inputs = dict[str, Tensor]
MakeInputs = Callable[[Shape, torch.dtype, torch.device], Inputs]
Attention = Callable[[Inputs], Tensor]
Need = Callable[[Shape | None, torch.dtype, torch.device], str | None]  # None where it is met, else why not


@dataclass(frozen=True)
class Implementation:
    """One attention under a name. `call` takes the inputs, `oracle` float64 slices of them."""

    name: str
    title: str
    inputs: MakeInputs
    call: Attention
    oracle: Attention
    needs: tuple[Need, ...] = ()
    min_traffic: tuple[int, int] = (4, 8)  # tensors of U bytes that forward and backward must read or write
    quadratic: bool = False  # in N: time grows with its square
    ours: bool = False
    tolerance: float = 2e-2  # relative RMS error of bf16; beyond it a result is wrong
    autotunes: bool = False  # for minutes, on a cold cache
    training_only: bool = False  # a variant: measured at the training shapes, not swept
    variant_of: str | None = None  # the implementation that its replays are interleaved with
    colour_of: str | None = None  # whose colour in common/palette.py it takes; None: that of its own name

    def why_not(
        self,
        shape: Shape | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
    ) -> str | None:
        """None where it runs here, else the reason why not."""
        device = torch.device(device)
        return next((reason for need in self.needs if (reason := need(shape, dtype, device))), None)

    def flops(self, shape: Shape) -> int:
        """Of forward: matrix products only, causal ones counted once."""
        B, N, H, D = shape
        return 2 * B * H * N * N * D if self.quadratic else linear_attention_flops(B, N, H, D)


# What an implementation needs


def _cuda_device(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
    return None if device.type == "cuda" and torch.cuda.is_available() else "needs a CUDA device"


def _fla_package(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
    installed = importlib.util.find_spec("fla") is not None
    return None if installed else "fla-core is not installed: pip install 'lingpt[gla]'"


def _our_kernel(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
    return why_unsupported(dtype, shape.D if shape else 128, device)


# Inputs: signed random numbers, a fixed seed, gradients asked of what gets one in training


def _random(shape: Shape, dtype: torch.dtype, device: torch.device, names: str = "qkv") -> Inputs:
    generator = torch.Generator(device).manual_seed(20)
    return {
        name: torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()
        for name in names
    }


def _positive(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Non-negative unit q and k: a normaliser without L2 norm and constant needs positive features."""
    x = _random(shape, dtype, device)
    with torch.no_grad():
        return {
            n: (normalize(t.abs(), dim=-1) if n in "qk" else t).detach().requires_grad_()
            for n, t in x.items()
        }


def _decayed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """RetNet-like decays γ = 1 − 2^(−5 − 8h/H), as `ours-decay` trains with."""
    head = torch.arange(shape.H, device=device, dtype=torch.float32)
    return _random(shape, dtype, device) | {"log_decay": torch.log1p(-torch.exp2(-5 - 8 * head / shape.H))}


def _packed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The model's own call: a fused projection, and RoPE on a quarter of the dimensions as Pythia has it."""
    B, N, H, D = shape
    generator = torch.Generator(device).manual_seed(20)
    qkv = torch.randn((B, N, 3, H, D), generator=generator, device=device, dtype=dtype)
    R = D // 4
    frequency = 10000.0 ** (-torch.arange(0, R, 2, device=device) / R)
    angle = (torch.arange(N, device=device)[:, None] * frequency).repeat(1, 2)
    return {"qkv": qkv.requires_grad_(), "cos": angle.cos(), "sin": angle.sin()}


def _gated(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """GLA's gates, log σ(x)/16, in the model's dtype: half the traffic of fp32 gates, to its advantage."""
    x = _random(shape, dtype, device, "qkvg")
    with torch.no_grad():
        x["g"] = (logsigmoid(x["g"]) / 16).detach().requires_grad_()
    return x


def _lightning(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The decays that chunk_lightning_attn gives layer 0: for the oracle, the call makes them itself."""
    head = torch.arange(shape.H, device=device, dtype=torch.float32)
    return _random(shape, dtype, device) | {"log_decay": -8 / shape.H * head}


# Calls of ours; with backend "chunkwise" they are oracles, too, in the dtype they are given (float64)


def _ours(backend: str) -> Attention:
    def call(x: Inputs) -> Tensor:
        decay = x.get("log_decay")
        return _output(linear_attention(x["q"], x["k"], x["v"], log_decay=decay, backend=backend))

    return call


def _ours_packed(backend: str) -> Attention:
    return lambda x: _output(linear_attention_qkv(x["qkv"], x["cos"], x["sin"], backend=backend))


def _output(o: object) -> Tensor:
    """o of an operator that returns (o, state) only where it is asked for the state."""
    assert isinstance(o, Tensor)
    return o


# Calls of the baselines


def _cumsum(x: Inputs) -> Tensor:
    """Linear attention as PyTorch has it: all tokens' states by cumulative sums, autograd for the rest.

    The sums are fp32: kept in bf16 they make the gradients wrong (dk by 3.6 % at N = 8192 on an H200).
    """
    dtype = torch.promote_types(x["q"].dtype, torch.float32)
    q, k, v = normalize(x["q"], dim=-1), normalize(x["k"], dim=-1), x["v"]
    S = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1, dtype=dtype)  # [B, N, H, D, D]
    z, c = k.cumsum(1, dtype=dtype), v.cumsum(1, dtype=dtype)
    n = torch.arange(1, q.shape[1] + 1, device=q.device).view(1, -1, 1, 1)
    u = c + B_SHRINK * (q.to(dtype).unsqueeze(-2) @ S).squeeze(-2)
    g = n + B_SHRINK * (q * z).sum(-1, keepdim=True)
    return (u / g).to(x["q"].dtype)


def _fla_linear(function: str, normalize: bool) -> Attention:
    def call(x: Inputs) -> Tensor:
        from fla.ops import linear_attn

        return getattr(linear_attn, function)(x["q"], x["k"], x["v"], scale=1.0, normalize=normalize)[0]

    return call


def _fla_lightning(x: Inputs) -> Tensor:
    from fla.ops.lightning_attn import chunk_lightning_attn

    return chunk_lightning_attn(x["q"], x["k"], x["v"], layer_idx=0, num_layers=12, scale=1.0)[0]


def _fla_gla(x: Inputs) -> Tensor:
    from fla.ops.gla import chunk_gla

    return chunk_gla(x["q"], x["k"], x["v"], x["g"])[0]


def _sdpa(backend: str) -> Attention:
    def call(x: Inputs) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return call


# Oracles of the baselines


def _oracle_linear(x: Inputs) -> Tensor:
    """Linear attention without normaliser: the gated form with gates of one, or of the heads' decays."""
    q, k, v = x["q"], x["k"], x["v"]
    gate = x["log_decay"][:, None].expand_as(q) if "log_decay" in x else torch.zeros_like(q)
    return _output(gated_linear_attention(q, k, v, gate, scale=1.0, backend="chunkwise"))


def _oracle_normalised(x: Inputs) -> Tensor:
    return _oracle_linear(x) / (x["q"] * x["k"].cumsum(1)).sum(-1, keepdim=True)


def _oracle_gated(x: Inputs) -> Tensor:
    return _output(gated_linear_attention(x["q"], x["k"], x["v"], x["g"], backend="chunkwise"))


def _oracle_softmax(x: Inputs) -> Tensor:
    """Rows of q may be fewer than those of k: then they are the last."""
    q, k, v = (x[n].transpose(1, 2) for n in "qkv")
    rows, N = q.shape[2], k.shape[2]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.ones(rows, N, device=q.device, dtype=torch.bool).tril(N - rows)
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


# The registry

_OUR_KERNEL, _FLA = (_cuda_device, _our_kernel), (_cuda_device, _fla_package)

_ALL = (
    Implementation("ours", "ours", _random, _ours("cuda"), _ours("chunkwise"), _OUR_KERNEL, ours=True),
    Implementation("ours-decay", "ours, with decay", _decayed, _ours("cuda"), _ours("chunkwise"), _OUR_KERNEL,
                   ours=True, training_only=True, variant_of="ours"),
    Implementation("ours-packed", "ours, packed qkv with RoPE", _packed, _ours_packed("cuda"),
                   _ours_packed("chunkwise"), _OUR_KERNEL, ours=True, training_only=True, colour_of="ours"),
    Implementation("ours-chunkwise", "ours, chunkwise PyTorch", _random, _ours("chunkwise"),
                   _ours("chunkwise"), colour_of="ours"),
    Implementation("torch-cumsum", "PyTorch, cumulative sums", _random, _cumsum, _ours("chunkwise")),
    Implementation("fla-linear", "FLA linear", _random, _fla_linear("chunk_linear_attn", False),
                   _oracle_linear, _FLA, autotunes=True),
    Implementation("fla-linear-norm", "FLA linear, normalised", _positive,
                   _fla_linear("chunk_linear_attn", True), _oracle_normalised, _FLA, autotunes=True),
    Implementation("fla-fused-linear", "FLA fused linear", _random,
                   _fla_linear("fused_chunk_linear_attn", False), _oracle_linear, _FLA, autotunes=True),
    Implementation("fla-lightning", "FLA lightning", _lightning, _fla_lightning, _oracle_linear, _FLA,
                   autotunes=True),
    Implementation("fla-gla", "FLA GLA", _gated, _fla_gla, _oracle_gated, _FLA, autotunes=True,
                   min_traffic=(5, 10), colour_of="gla"),
    Implementation("sdpa-flash", "FlashAttention-2 (SDPA)", _random, _sdpa("FLASH_ATTENTION"),
                   _oracle_softmax, (_cuda_device,), quadratic=True, colour_of="softmax"),
    Implementation("sdpa-cudnn", "cuDNN attention (SDPA)", _random, _sdpa("CUDNN_ATTENTION"),
                   _oracle_softmax, (_cuda_device,), quadratic=True),
    Implementation("sdpa-math", "softmax in PyTorch (SDPA)", _random, _sdpa("MATH"), _oracle_softmax,
                   quadratic=True, colour_of="softmax"),
)  # fmt: skip

IMPLEMENTATIONS = {implementation.name: implementation for implementation in _ALL}
DEFAULT_IMPLEMENTATIONS = tuple(
    name for name in IMPLEMENTATIONS if name not in ("sdpa-math", "ours-chunkwise")
)
