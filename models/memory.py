"""How much memory a training step takes: an estimate, made before anything is allocated."""

import torch

from lingpt.common.errors import UserError, unknown
from lingpt.models.config import Config
from lingpt.models.gpt import GPT

# Bytes of a weight (with the copy that autocast makes of it), of its gradient and of an activation.
_BYTES = {
    "32-true": (4, 4, 4),
    "bf16-mixed": (4 + 2, 4, 2),
    "16-mixed": (4 + 2, 4, 2),
    "bf16-true": (2, 2, 2),
    "16-true": (2, 2, 2),
}
_OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}  # per weight, in the weight's own dtype


def memory_estimate(
    config: Config,
    micro_batch_size: int,
    seq_len: int,
    precision: str = "bf16-mixed",
    optimizer: str = "adamw",
    loss_chunk_tokens: int | None = None,
    sharded_over: int = 1,
    activation_checkpointing: bool = False,
) -> dict[str, int]:
    """Bytes on one device at the peak of a step, by what they hold, and their `total`.

    An estimate: what each layer keeps for its backward pass, counted (eager mode). The allocator's
    fragments, workspaces and DDP's buckets come on top; compiled blocks keep less.

    Args:
        precision: Fabric's name (`32-true`, `bf16-mixed`, `bf16-true`, …).
        loss_chunk_tokens: tokens whose logits exist at a time; None for all of the micro-batch.
        sharded_over: devices that share parameters, gradients and optimizer (FSDP2), each of which holds two
            blocks and all that is in no block whole at a time.
        activation_checkpointing: each block's input is kept, and one block's activations at a time.
    """
    if precision not in _BYTES:
        raise unknown("precision", precision, _BYTES)
    if optimizer not in _OPTIMIZER_STATES:
        raise unknown("optimizer", optimizer, _OPTIMIZER_STATES)
    if seq_len > config.block_size:
        raise UserError(f"sequences of {seq_len} tokens exceed the block size {config.block_size}")
    with torch.device("meta"):
        model = GPT(config)
    weight, gradient, activation = _BYTES[precision]
    stored = 2 if precision in ("bf16-true", "16-true") else 4
    tokens, n_weights = micro_batch_size * seq_len, model.num_parameters()
    logits_tokens = min(tokens, loss_chunk_tokens or tokens)
    # of each block: the outputs of both norms, the input and the output of GELU
    of_block = [
        block.attn.saved_per_token() + 2 * (config.n_embd + config.intermediate_size)
        for block in model.blocks
    ]
    kept = max(of_block) if activation_checkpointing else sum(of_block)
    sizes = sorted(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    whole = n_weights - sum(sizes[:-2])  # two blocks, and what is in none
    copies = whole if activation_checkpointing and sharded_over > 1 else n_weights
    residual = (config.n_layer + 1) * config.n_embd  # each layer's input, in the weights' dtype
    # a logit as computed, its fp32 log-probability, and the gradients of both
    logit = 2 * 4 + (0 if activation == 4 else 2 * activation)
    part = -(-n_weights // sharded_over)
    whole = whole if sharded_over > 1 else 0
    estimate = {
        "parameters": (part + whole) * stored + copies * (weight - stored),
        "gradients": (part + whole) * gradient,
        "optimizer": part * stored * _OPTIMIZER_STATES[optimizer],
        "activations": tokens * (kept * activation + residual * stored),
        "logits": logits_tokens * config.padded_vocab_size * logit,
    }
    return estimate | {"total": sum(estimate.values())}
