"""Inputs of the benchmarked attentions: signed random numbers from a fixed seed, as in training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from lingpt.bench.kernels.shapes import Shape

# Name → tensor: q, k, v … [B, N, H, D]; qkv [B, N, 3, H, D]; values per token and head [B, N, H], per head
# [H]; cos and sin [N, R]
Inputs = dict[str, Tensor]


def random(shape: Shape, dtype: torch.dtype, device: torch.device, names: str = "qkv") -> Inputs:
    generator = torch.Generator(device).manual_seed(20)
    return {
        name: torch.randn(
            shape.tensor(name), generator=generator, device=device, dtype=dtype
        ).requires_grad_()
        for name in names
    }


def positive(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Non-negative unit q and k: a normaliser without L2 norm and constant needs positive features."""
    x = random(shape, dtype, device)
    with torch.no_grad():
        return {
            n: (normalize(t.abs(), dim=-1) if n in "qk" else t).detach().requires_grad_()
            for n, t in x.items()
        }


def packed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Inputs as the model has them: a fused projection, and RoPE on a quarter of the dimensions (Pythia)."""
    B, N, H, D = shape.tensor("q")
    generator = torch.Generator(device).manual_seed(20)
    qkv = torch.randn((B, N, 3, H, D), generator=generator, device=device, dtype=dtype)
    R = D // 4
    frequency = 10000.0 ** (-torch.arange(0, R, 2, device=device) / R)
    angle = (torch.arange(N, device=device)[:, None] * frequency).repeat(1, 2)
    return {"qkv": qkv.requires_grad_(), "cos": angle.cos(), "sin": angle.sin()}


def augmented(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """A convolution of 32 tokens for each head, [B, 32, H], the last weight for the token itself.

    It is copied for each sequence, so that a slice of the batch has its own gradient to check.
    """
    kernel = _per_token(Shape(1, 32, shape.H, shape.D), device).to(dtype).repeat(shape.B, 1, 1)
    return random(shape, dtype, device) | {"kernel": kernel.requires_grad_()}


# Decays per head


def decayed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """RetNet-like decays γ = 1 − 2^(−5 − 8h/H), as `ours-decay` trains with."""
    head = torch.arange(shape.H, device=device, dtype=torch.float32)
    return random(shape, dtype, device) | {"log_decay": torch.log1p(-torch.exp2(-5 - 8 * head / shape.H))}


def lightning(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The decays of chunk_lightning_attn for layer 0, for the oracle only: the call computes its own."""
    head = torch.arange(shape.H, device=device, dtype=torch.float32)
    return random(shape, dtype, device) | {"log_decay": -8 / shape.H * head}


# Gates: decays per token


def token_decayed(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Decays log σ(x + ln(γ_h / (1 − γ_h))) in fp32, as `ours-gated` has them at initialisation."""
    x = decayed(shape, dtype, device)
    before = _per_token(shape, device) + torch.logit(x["log_decay"].exp())
    return x | {"log_decay": logsigmoid(before).requires_grad_()}


def mamba2(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same decays in Mamba-2's form, exp(dt·A), with A = −1; dt is in fp32."""
    x = token_decayed(shape, dtype, device)
    dt = (-x.pop("log_decay")).detach().requires_grad_()
    return x | {"dt": dt, "A": torch.full((shape.H,), -1.0, device=device)}


def mlstm(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same decays in mLSTM's form, σ(f), and input gates σ(i).

    In memory, heads come before tokens, as its kernels expect: they need not copy.
    """
    x = {
        name: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for name, t in random(shape, dtype, device).items()
    }
    bias = torch.logit(decayed(shape, dtype, device)["log_decay"].exp())
    f, i = _per_token(shape, device) + bias, _per_token(shape, device, seed=22)
    return x | {"f": f.requires_grad_(), "i": i.requires_grad_()}


def delta_rule(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """The same decays, unit keys, and β = σ(x) in the model's dtype."""
    x = token_decayed(shape, dtype, device)
    with torch.no_grad():
        k = normalize(x["k"], dim=-1)
        beta = torch.sigmoid(_per_token(shape, device, seed=22)).to(dtype)
    return x | {"k": k.requires_grad_(), "beta": beta.requires_grad_()}


def gated(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """GLA's gates, log σ(x)/16, in the model's dtype: half the traffic of fp32 gates, to its advantage."""
    x = random(shape, dtype, device, "qkvg")
    with torch.no_grad():
        x["g"] = (logsigmoid(x["g"]) / 16).detach().requires_grad_()
    return x


def _per_token(shape: Shape, device: torch.device, seed: int = 21) -> Tensor:
    """Random numbers [B, N, H] in fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape[:3], generator=generator, device=device)
