"""Every attention that is measured, by name: its inputs, its call, and its float64 oracle.

Each is checked against its *own* function (softmax is not expected to be linear attention), on the tensors
that were timed: `oracle` recomputes some (batch, head) slices of them in float64.

To add one, add an entry to IMPLEMENTATIONS at the end of this file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, normalize, pad, scaled_dot_product_attention

from lingpt.bench.kernels import forms, inputs, oracles
from lingpt.bench.kernels.inputs import Inputs
from lingpt.bench.kernels.shapes import Shape
from lingpt.common.install import install_command
from lingpt.kernels.gated_linear_attention import gated_linear_attention
from lingpt.kernels.linear_attention import linear_attention, linear_attention_qkv
from lingpt.kernels.numerics import B_SHRINK, state_dtype

BF16 = torch.bfloat16
GROUP = 64  # tokens, of Spec. Dec. LA
CHUNKS = (64, 128, 256, 512, 1024, 2048)  # tokens, of the chunked form

MakeInputs = Callable[[Shape, torch.dtype, torch.device], Inputs]
Attention = Callable[[Inputs], Tensor]
Need = Callable[[Shape | None, torch.dtype, torch.device], str | None]  # None if it is met, else why not


@dataclass(frozen=True)
class Implementation:
    """One attention under a name. `call` takes the inputs, `oracle` float64 slices of them."""

    name: str
    title: str
    inputs: MakeInputs
    call: Attention
    oracle: Attention
    needs: tuple[Need, ...] = ()
    backward_needs: tuple[Need, ...] = ()  # if they are not met, only forward is measured
    min_traffic: tuple[int, int] = (4, 8)  # tensors of U bytes that forward and backward must read or write
    quadratic: bool = False  # whether time grows with the square of N
    ours: bool = False
    tf32: bool = False  # whether PyTorch's switch of TF32 is on, in both passes
    tolerance: float = 2e-2  # relative RMS error of bf16; beyond it a result is wrong
    autotunes: bool = False  # takes minutes with a cold cache
    training_only: bool = False  # a variant: measured at the training shapes, not swept
    two_head_dims: bool = False  # whether v's may differ from that of q and k
    variant_of: str | None = None  # the implementation that its replays are interleaved with
    colour_of: str | None = None  # the name whose colour in plots/palette.py it takes; None: its own

    def takes(self, shape: Shape) -> bool:
        """Whether its function is defined there."""
        return self.two_head_dims or not shape.Dv

    def unsupported_reason(
        self, shape: Shape | None = None, dtype: torch.dtype = BF16, device: str | torch.device = "cuda"
    ) -> str | None:
        """Why it does not run here; None if it does."""
        return _first_reason(self.needs, shape, dtype, torch.device(device))

    def backward_unsupported_reason(
        self, shape: Shape | None = None, dtype: torch.dtype = BF16, device: str | torch.device = "cuda"
    ) -> str | None:
        """Why its backward pass does not run here; None if it does."""
        return _first_reason(self.backward_needs, shape, dtype, torch.device(device))


# What an implementation needs


def _first_reason(
    needs: tuple[Need, ...], shape: Shape | None, dtype: torch.dtype, device: torch.device
) -> str | None:
    return next((reason for need in needs if (reason := need(shape, dtype, device))), None)


def _cuda_device(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
    return None if device.type == "cuda" and torch.cuda.is_available() else "needs a CUDA device"


def _fp32(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
    return None if dtype == torch.float32 else "float32 only"


def _package(module: str, name: str, install: str) -> Need:
    def need(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
        installed = importlib.util.find_spec(module) is not None
        return None if installed else f"{name} is not installed: {install}"

    return need


def _sound_scalar_gates(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
    """FLA's gradients of scalar gates are wrong on Hopper before Triton 3.7.1 (its issues 640 and 984)."""
    found = importlib.metadata.version("triton")
    if torch.cuda.get_device_capability(device)[0] != 9 or _numbers(found) >= (3, 7, 1):
        return None
    return f"no backward pass: on Hopper it needs Triton 3.7.1 or newer, this is {found}"


def _whole_chunks(chunk: int) -> Need:
    def need(shape: Shape | None, dtype: torch.dtype, device: torch.device) -> str | None:
        return f"{chunk} tokens do not divide N" if shape and shape.N % chunk else None

    return need


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


# Calls of ours; with backend "chunkwise" they are also oracles, in the dtype of their inputs (float64)


PRODUCTS: dict[str, Any] = {"a": 0.0, "normalize": False, "normalize_qk": False}  # q·k only: simple GLA, SSD
AFFINE: dict[str, Any] = {"normalize": False}  # 1 + q̂·k̂: what `ours-gated+output_gate` trains with


def _ours(backend: str, **options: Any) -> Attention:
    def call(x: Inputs) -> Tensor:
        decay = x.get("log_decay")
        return linear_attention(x["q"], x["k"], x["v"], log_decay=decay, **options, backend=backend)

    return call


def _ours_packed(backend: str) -> Attention:
    return lambda x: linear_attention_qkv(x["qkv"], x["cos"], x["sin"], backend=backend)


def _ours_gla(x: Inputs) -> Tensor:
    return gated_linear_attention(x["q"], x["k"], x["v"], x["g"], backend="cuda")


# Calls of the baselines


def _cumsum(x: Inputs) -> Tensor:
    """Linear attention in plain PyTorch: all tokens' states by cumulative sums, the backward by autograd.

    What is summed is fp32, so that its gradient is, too: bf16 sums make it wrong by some percent.
    """
    dtype = state_dtype(x["q"].dtype)
    q, k, v = normalize(x["q"], dim=-1), normalize(x["k"], dim=-1).to(dtype), x["v"].to(dtype)
    S = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)  # [B, N, H, D, D]
    z, c = k.cumsum(1), v.cumsum(1)
    n = torch.arange(1, q.shape[1] + 1, device=q.device).view(1, -1, 1, 1)
    u = c + B_SHRINK * (q.to(dtype).unsqueeze(-2) @ S).squeeze(-2)
    g = n + B_SHRINK * (q * z).sum(-1, keepdim=True)
    return (u / g).to(x["q"].dtype)


def _speculative(x: Inputs) -> Tensor:
    """Spec. Dec. LA in plain PyTorch: linear attention by groups, and a masked depthwise convolution of v.

    You et al., "When Linear Attention Meets Autoregressive Decoding" (ICML 2024, arXiv 2406.07368): their
    augmented attention, with f(x) = x of q̂·k̂ within groups as between them (their code has relu² within),
    and of the convolution's 63 tokens only the 32 that the causal mask leaves.
    """
    q, k, v = normalize(x["q"], dim=-1), normalize(x["k"], dim=-1), x["v"]
    (_, N, H, _), T = v.shape, x["kernel"].shape[1]
    rest = (0, 0, 0, 0, 0, -N % GROUP)
    o = forms.chunked({n: pad(t, rest) for n, t in zip("qkv", (q, k, v), strict=True)}, GROUP)[:, :N]
    kernels = x["kernel"].transpose(1, 2)[:, :, None, :, None]  # [B, H, 1, T, 1]
    # by sequence: PyTorch's depthwise convolution takes at most 2³¹ numbers
    local = [
        conv2d(image, kernel, padding=(T - 1, 0), groups=H)[:, :N]
        for image, kernel in zip(v.transpose(1, 2), kernels, strict=True)
    ]
    return o + torch.stack(local).transpose(1, 2)


def _fla(function: str, names: str = "q k v", **options: Any) -> Attention:
    """A function of `fla.ops`, such as `gla.chunk_gla`, of the inputs with these names."""
    module, _, name = function.partition(".")

    def call(x: Inputs) -> Tensor:
        attend = getattr(importlib.import_module(f"fla.ops.{module}"), name)
        return attend(*(x[n] for n in names.split()), **options)[0]

    return call


def _mamba2(x: Inputs) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(x["v"], x["dt"], x["A"], x["k"], x["q"], chunk_size=256)


def _mlstm(x: Inputs) -> Tensor:
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk

    q, k, v, i, f = (x[name].transpose(1, 2) for name in "qkvif")
    dtype = x["q"].dtype
    o = mlstm_siging_chunkwise__xl_chunk(q, k, v, i, f, normalize=False, autocast_kernel_dtype=dtype)
    return o.transpose(1, 2)


def _sdpa(backend: str) -> Attention:
    def call(x: Inputs) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return call


# The registry

_GPU = (_cuda_device,)
_FLA = (_cuda_device, _package("fla", "fla-core", install_command("bench")))
_MAMBA = (_cuda_device, _package("mamba_ssm", "mamba-ssm", install_command("peers")))
_MLSTM = (_cuda_device, _package("mlstm_kernels", "mlstm-kernels", install_command("peers")))

_KERNELS = (
    Implementation("ours", "ours", inputs.random, _ours("cuda"), _ours("chunkwise"), _GPU, ours=True),
    Implementation("ours-tf32", "ours, in TF32", inputs.random, _ours("cuda"), _ours("chunkwise"),
                   (*_GPU, _fp32), ours=True, tf32=True, tolerance=2e-3, variant_of="ours",
                   colour_of="ours"),
    Implementation("ours-decay", "ours, with decay", inputs.decayed, _ours("cuda"), _ours("chunkwise"),
                   _GPU, ours=True, training_only=True, variant_of="ours"),
    Implementation("ours-gated", "ours, a decay of each token's own", inputs.token_decayed, _ours("cuda"),
                   _ours("chunkwise"), _GPU, ours=True, variant_of="ours"),
    Implementation("ours-linear", "ours, no decay, no normaliser (a = 0)", inputs.random,
                   _ours("cuda", **PRODUCTS), oracles.linear, _GPU, ours=True, variant_of="ours",
                   colour_of="ours"),
    Implementation("ours-lightning", "ours, a decay per head, no normaliser (a = 0)", inputs.lightning,
                   _ours("cuda", **PRODUCTS), oracles.linear, _GPU, ours=True, variant_of="ours",
                   colour_of="ours-decay"),
    Implementation("ours-unnormalised", "ours, a decay per token, no normaliser (a = 0)",
                   inputs.token_decayed, _ours("cuda", **PRODUCTS), oracles.linear, _GPU, ours=True,
                   variant_of="ours", colour_of="ours-gated"),
    Implementation("ours-affine", "ours, a decay per token, no normaliser (a = b = 1)", inputs.token_decayed,
                   _ours("cuda", **AFFINE), _ours("chunkwise", **AFFINE), _GPU, ours=True,
                   training_only=True, variant_of="ours", colour_of="ours-gated"),
    Implementation("ours-packed", "ours, packed qkv with RoPE", inputs.packed, _ours_packed("cuda"),
                   _ours_packed("chunkwise"), _GPU, ours=True, training_only=True, colour_of="ours"),
    Implementation("ours-gla", "ours, a decay of each channel (GLA)", inputs.gated, _ours_gla, oracles.gated,
                   _GPU, min_traffic=(5, 10), ours=True, two_head_dims=True, colour_of="gla"),
    Implementation("ours-chunkwise", "ours, chunkwise PyTorch", inputs.random, _ours("chunkwise"),
                   _ours("chunkwise"), colour_of="ours"),
    Implementation("torch-cumsum", "PyTorch, cumulative sums", inputs.random, _cumsum, _ours("chunkwise")),
    Implementation("spec-dec-la", "PyTorch, Spec. Dec. LA", inputs.augmented, _speculative,
                   oracles.augmented),
    Implementation("fla-linear", "FLA linear", inputs.random,
                   _fla("linear_attn.chunk_linear_attn", scale=1.0, normalize=False),
                   oracles.linear, _FLA, autotunes=True),
    Implementation("fla-linear-norm", "FLA linear, normalised", inputs.positive,
                   _fla("linear_attn.chunk_linear_attn", scale=1.0, normalize=True),
                   oracles.normalised, _FLA, autotunes=True),
    Implementation("fla-fused-linear", "FLA fused linear", inputs.random,
                   _fla("linear_attn.fused_chunk_linear_attn", scale=1.0, normalize=False),
                   oracles.linear, _FLA, autotunes=True),
    Implementation("fla-lightning", "FLA lightning", inputs.lightning,
                   _fla("lightning_attn.chunk_lightning_attn", layer_idx=0, num_layers=12, scale=1.0),
                   oracles.linear, _FLA, autotunes=True),
    Implementation("fla-gla", "FLA GLA", inputs.gated, _fla("gla.chunk_gla", "q k v g"),
                   oracles.gated, _FLA, autotunes=True, min_traffic=(5, 10), two_head_dims=True,
                   colour_of="gla"),
    Implementation("fla-simple-gla", "FLA simple GLA", inputs.token_decayed,
                   _fla("simple_gla.chunk_simple_gla", "q k v log_decay", scale=1.0),
                   oracles.linear, _FLA, (_sound_scalar_gates,), autotunes=True),
    Implementation("fla-delta-rule", "FLA Gated DeltaNet", inputs.delta_rule,
                   _fla("gated_delta_rule.chunk_gated_delta_rule", "q k v log_decay beta"),
                   oracles.delta_rule, _FLA, (_sound_scalar_gates,), autotunes=True),
    Implementation("mamba2", "Mamba-2's SSD", inputs.mamba2, _mamba2, oracles.mamba2, _MAMBA,
                   autotunes=True),
    Implementation("mlstm", "mLSTM, sigmoid input gates", inputs.mlstm, _mlstm, oracles.mlstm, _MLSTM),
    Implementation("sdpa-flash", "FlashAttention-2 (SDPA)", inputs.random, _sdpa("FLASH_ATTENTION"),
                   oracles.softmax, _GPU, quadratic=True, colour_of="softmax"),
    Implementation("sdpa-cudnn", "cuDNN attention (SDPA)", inputs.random, _sdpa("CUDNN_ATTENTION"),
                   oracles.softmax, _GPU, quadratic=True, colour_of="softmax-cudnn"),
    Implementation("sdpa-math", "softmax in PyTorch (SDPA)", inputs.random, _sdpa("MATH"), oracles.softmax,
                   quadratic=True, colour_of="softmax"),
)  # fmt: skip

_FORMS = (
    Implementation("form-quadratic", "all weights", inputs.random, forms.quadratic, oracles.linear,
                   quadratic=True, colour_of="softmax-cudnn"),
    Implementation("form-blocks", "weights in blocks", inputs.random, forms.quadratic_in_blocks,
                   oracles.linear, quadratic=True, colour_of="identity"),
    # Steps in turn: at a constant number of tokens, as in the sweep of forms, its time grows like N, too.
    Implementation("form-recurrent", "one state after another", inputs.random, forms.recurrent,
                   oracles.linear, quadratic=True, colour_of="gla"),
    Implementation("form-states", "all states", inputs.random, forms.all_states, oracles.linear,
                   colour_of="ours-decay"),
    *(Implementation(f"form-chunks-{C}", f"chunks of {C}", inputs.random,
                     functools.partial(forms.chunked, chunk=C), oracles.linear, (_whole_chunks(C),),
                     colour_of="ours-gated") for C in CHUNKS),
)  # fmt: skip

IMPLEMENTATIONS = {implementation.name: implementation for implementation in (*_KERNELS, *_FORMS)}
# What `lingpt bench` measures, our chunkwise form only if it is named; and `lingpt bench forms`.
KERNELS = tuple(implementation.name for implementation in _KERNELS)
DEFAULT_IMPLEMENTATIONS = tuple(name for name in KERNELS if name != "ours-chunkwise")
# By class of decay: ours, and the kernels of others that compute such a form; none has a normaliser.
DECAYS = {
    "no decay": ("ours-linear", "fla-linear", "fla-fused-linear"),
    "a decay per head": ("ours-lightning", "fla-lightning"),
    "a decay per token": ("ours-unnormalised", "fla-simple-gla", "mamba2", "mlstm"),
    "a decay per channel": ("ours-gla", "fla-gla"),
}
FORMS = ("sdpa-flash", "ours", *(implementation.name for implementation in _FORMS))
