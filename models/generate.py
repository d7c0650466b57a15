"""Generates text with a model, token by token, with a decoding state."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.models import state_file
from lingpt.models.decoding_graph import DecodingGraph, has_static_step
from lingpt.models.gpt import GPT, DecodingState


@torch.no_grad()
def generate(model: GPT, idx_BN: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
    """Continues the prompts `[B, N]` (N ≥ 1) by up to `max_new_tokens`; returns prompt and continuation. The
    options are those of `stream`."""
    new_tokens = stream(model, idx_BN, max_new_tokens, **options)
    return torch.cat([idx_BN.cpu(), *new_tokens], dim=1).to(idx_BN.device)


@torch.no_grad()
def stream(
    model: GPT,
    idx_BN: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    seed: int = 0,
    graph: bool | None = None,
    state: DecodingState | None = None,
) -> Iterator[torch.Tensor]:
    """The tokens that continue the prompts `[B, N]`, one after another: `[B, 1]` on the CPU.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only.
        vocab_size: only ids below it are drawn: give the tokenizer's, which may have fewer tokens than the
            embedding has rows. By default the model's, without the rows of padding.
        eos_id: after this token a row is filled up with it; when all rows have drawn it, generation ends.
        seed: of the sampling, which is on the CPU: the same logits give the same text on any device.
        graph: replay a CUDA graph of one token's step (decoding_graph.py), with equal results up to rounding;
            by default on a GPU. If an attention has no static step, or the capture fails (with a warning),
            decoding is eager.
        state: of the tokens before the prompts (state_file.py), with room for prompt and continuation; it is
            updated.

    Raises UserError for an empty prompt, numbers out of range, logits that are not finite, or a prompt and
    continuation longer than the block size.
    """
    B, N = idx_BN.shape
    seen = 0 if state is None else state.position
    if N == 0:
        raise UserError("nothing to continue: give a prompt of at least one token")
    _check_arguments(model, seen + N, max_new_tokens, temperature, top_k)
    generator = torch.Generator().manual_seed(seed)
    state = state or model.new_state(B, N + max_new_tokens)
    if model.constant_state and N > state_file.PIECE:
        state_file.read(model, idx_BN[:, :-1], state)
    step: Callable[[torch.Tensor], torch.Tensor] = functools.partial(model.next_logits, state=state)
    if (idx_BN.is_cuda if graph is None else graph) and has_static_step(model):
        step = DecodingGraph(model, state)
    ended_B1, last_BN = torch.zeros(B, 1, dtype=torch.bool), idx_BN[:, state.position - seen :]
    V = vocab_size or model.config.vocab_size
    for _ in range(max_new_tokens):
        new_B1 = sample(step(last_BN)[:, :V], temperature, top_k, generator)
        if eos_id is not None:
            new_B1 = torch.where(ended_B1, eos_id, new_B1)
            ended_B1 |= new_B1 == eos_id
        yield new_B1
        if eos_id is not None and ended_B1.all():
            break
        last_BN = new_B1.to(idx_BN.device)


def _check_arguments(
    model: GPT, prompt_tokens: int, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 0),
        ("temperature", temperature, 0),
        ("top_k", top_k, 1),
    ):
        if value is not None and not value >= least:
            raise UserError(f"{name} is {value}; it must be at least {least}")
    if prompt_tokens + max_new_tokens > model.max_seq_length and not model.any_length:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones exceed block size "
            f"{model.max_seq_length}: shorten one of them"
        )


def sample(
    logits_BV: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """Samples one token id per row, `[B, 1]`, on the CPU; synchronises with the device."""
    if temperature == 0:
        best_B1 = logits_BV.argmax(dim=-1, keepdim=True)  # the first of equal ones, on any device; or a NaN
        # Marked on the device, so that one transfer brings the ids and what is wrong with them.
        best_B1 = best_B1.where(logits_BV.gather(-1, best_B1).isfinite(), -1).cpu()
        _check_finite(best_B1 >= 0)
        return best_B1
    ids_BK = None
    if top_k is None:
        logits_BK = logits_BV.float().cpu()
    else:
        logits_BK, ids_BK = stable_topk(logits_BV.float(), top_k)
    largest_B1 = logits_BK.amax(-1, keepdim=True)
    _check_finite(largest_B1.isfinite())
    # No overflow, and neither 0 / 0 nor inf / inf, at a temperature that is zero or infinite in fp32.
    fp32 = torch.finfo(torch.float32)
    scaled_BK = (logits_BK - largest_B1) / min(max(temperature, fp32.tiny), fp32.max)
    drawn_B1 = torch.multinomial(scaled_BK.softmax(dim=-1), 1, generator=generator)
    return drawn_B1 if ids_BK is None else ids_BK.gather(1, drawn_B1)


def _check_finite(finite_B1: torch.Tensor) -> None:
    """Raises UserError unless each row's largest logit, which is NaN if any is, is finite."""
    if not finite_B1.all():
        raise UserError("the model's logits are not finite: is it of a run that diverged?")


def stable_topk(logits_BV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of each row and their ids, in the order of the ids, `[B, K]` on the CPU.

    The other fifty thousand stay on the device: sampling from all took the CPU a millisecond per row. Which
    of several equal logits `topk` picks depends on the device, so all that equal the k-th are included, K ≥
    k. Rows with fewer than K are padded with −inf.
    """
    V = logits_BV.shape[-1]
    kth_B1 = logits_BV.topk(min(k, V), dim=-1).values[:, -1:]
    most = int((logits_BV < kth_B1).logical_not().sum(-1).max())
    logits_BK, ids_BK = (x.cpu() for x in logits_BV.topk(most, dim=-1))
    beyond_BK = logits_BK < kth_B1.cpu()
    ids_BK, order_BK = ids_BK.masked_fill(beyond_BK, V).sort(dim=-1)
    return logits_BK.masked_fill(beyond_BK, -torch.inf).gather(1, order_BK), ids_BK
