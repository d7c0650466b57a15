"""Text from a model, token by token, through its decoding state."""

import torch

from lingpt.common.errors import UserError
from lingpt.models.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    idx_BN: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_id: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Continues the prompts `[B, N]` (N ≥ 1) by up to `max_new_tokens`; returns prompt and continuation.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        eos_id: a row that has drawn this token goes on with it; when all rows have, generation ends.
        seed: of the draws, made on the CPU: the same logits give the same text on any device.

    Raises UserError for an empty prompt, or where prompt and continuation exceed the block size.
    """
    B, N = idx_BN.shape
    if N == 0:
        raise UserError("nothing to continue: give a prompt of at least one token")
    if N + max_new_tokens > model.max_seq_length:
        raise UserError(
            f"a prompt of {N} tokens and {max_new_tokens} new ones exceed block size {model.max_seq_length}: "
            "shorten one of them"
        )
    generator = torch.Generator().manual_seed(seed)
    state = model.new_state(B, N + max_new_tokens)
    ended = torch.zeros(B, 1, dtype=torch.bool, device=idx_BN.device)
    tokens = [idx_BN]
    for _ in range(max_new_tokens):
        last_hidden_BC = model.hidden(tokens[-1], state)[:, -1]  # of a prompt, only its last logits
        new = sample(model.lm_head(last_hidden_BC), temperature, top_k, generator).to(idx_BN.device)
        if eos_id is not None:
            new = torch.where(ended, eos_id, new)
            ended |= new == eos_id
        tokens.append(new)
        if eos_id is not None and ended.all():
            break
    return torch.cat(tokens, dim=1)


def sample(
    logits_BV: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """One token id per row, `[B, 1]`."""
    logits_BV = logits_BV.float().cpu()
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    logits_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # no overflow, however small the temperature
    return torch.multinomial((logits_BV / temperature).softmax(dim=-1), 1, generator=generator)
