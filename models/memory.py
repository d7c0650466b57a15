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
    accumulates: bool = True,
    gathers_once: bool = False,
) -> dict[str, int]:
    """Bytes on one device at the peak of a step, by what they hold, and their `total`.

    An estimate: what each compiled block keeps for its backward pass, counted, at the moment when the loss
    is computed. torch.compile keeps the inputs of matrix products and of attention, and computes again what
    is cheap; eager mode keeps up to twice as much of an attention with a gate or a convolution. The
    allocator's fragments, CUDA's context and workspaces come on top.

    Args:
        precision: Fabric's name (`32-true`, `bf16-mixed`, `bf16-true`, …).
        loss_chunk_tokens: tokens whose logits exist at a time; None for all of the micro-batch.
        sharded_over: devices that share parameters, gradients and optimizer (FSDP2), each of which holds two
            blocks and all that is in no block whole at a time.
        activation_checkpointing: each block's input is kept, and one block's activations at a time.
        accumulates: whether gradients of earlier micro-batches are there while a later one is computed.
        gathers_once: under sharding, a device holds all parameters, and its own gradient, whole for a step.
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
    at_once = n_weights - sum(sizes[:-2])  # two blocks, and what is in none
    embedding = config.padded_vocab_size * config.n_embd  # as many weights as the last layer has
    copies = (at_once if activation_checkpointing and sharded_over > 1 else n_weights) - embedding
    residual = (config.n_layer + 1) * config.n_embd  # each layer's input, in the weights' dtype
    logit = activation  # on a GPU, compiled, its gradient takes its place
    part = -(-n_weights // sharded_over)
    whole = (n_weights if gathers_once else at_once) if sharded_over > 1 else 0
    keeps_gradient = sharded_over == 1 or (gathers_once and accumulates)  # whole, to the end of the step
    held = {
        "activations": tokens * (kept * activation + residual * stored),
        "logits": logits_tokens * config.padded_vocab_size * logit,
        # What the last layer reads, and its gradient; and the gradient of that layer's weight, which the loss
        # has long before the others'.
        "loss": 2 * tokens * config.n_embd * stored + (embedding * gradient if keeps_gradient else 0),
    }
    # Of those that are whole under sharding the embedding's comes last, when the activations are gone.
    gradients = (n_weights if keeps_gradient else part + max(0, at_once - embedding)) * gradient
    if not accumulates:  # then they come while the activations go
        gradients = max(0, gradients - sum(held.values()))
    estimate = {
        "parameters": (part + whole) * stored + copies * (weight - stored),
        "gradients": gradients,
        "optimizer": part * stored * _OPTIMIZER_STATES[optimizer],
        **held,
    }
    return estimate | {"total": sum(estimate.values())}
