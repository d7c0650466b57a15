"""How much memory a training step takes: an estimate, made before anything is allocated."""

from typing import NamedTuple

from lingpt.common.errors import UserError, unknown
from lingpt.models.config import Config
from lingpt.models.gpt import GPT


class _Bytes(NamedTuple):
    """Of a weight, of the copy that autocast makes of it, of its gradient, and of an activation."""

    weight: int
    copy: int
    gradient: int
    activation: int


_BYTES = {"32-true": _Bytes(4, 0, 4, 4), "bf16-mixed": _Bytes(4, 2, 4, 2), "bf16-true": _Bytes(2, 0, 2, 2)}
_MOMENTS = 2  # that AdamW keeps of each weight, in the weight's dtype


def memory_estimate(
    config: Config,
    micro_batch_size: int,
    seq_len: int,
    precision: str = "bf16-mixed",
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
        precision: Fabric's name (`32-true`, `bf16-mixed` or `bf16-true`).
        loss_chunk_tokens: tokens whose logits exist at a time; None for all of the micro-batch.
        sharded_over: devices that share parameters, gradients and optimizer (FSDP2), each of which holds two
            blocks and all that is in no block whole at a time.
        activation_checkpointing: each block's input is kept, and one block's activations at a time.
        accumulates: whether gradients of earlier micro-batches are there while a later one is computed.
        gathers_once: under sharding, a device holds all parameters, and its own gradient, whole for a step.
    """
    if precision not in _BYTES:
        raise unknown("precision", precision, _BYTES)
    if seq_len > config.block_size:
        raise UserError(f"sequences of {seq_len} tokens exceed the block size {config.block_size}")
    model = GPT.on_meta(config)
    size, tokens, sharded = _BYTES[precision], micro_batch_size * seq_len, sharded_over > 1
    n, at_once = model.num_parameters(), _gathered_at_once(model)
    embedding = config.padded_vocab_size * config.n_embd  # as many weights as the last layer has
    part = -(-n // sharded_over)
    whole = 0 if not sharded else n if gathers_once else at_once
    copied = (at_once if sharded and activation_checkpointing else n) - embedding
    keeps_gradient = not sharded or (gathers_once and accumulates)  # whole, to the end of the step
    held = {
        "activations": tokens * _activations(model, size, activation_checkpointing),
        # On a GPU, compiled, their gradient takes their place.
        "logits": min(tokens, loss_chunk_tokens or tokens) * config.padded_vocab_size * size.activation,
        # What the last layer reads, and its gradient; and the gradient of that layer's weight, which the loss
        # has long before the others'.
        "loss": 2 * tokens * config.n_embd * size.weight + keeps_gradient * embedding * size.gradient,
    }
    # Of those that are whole under sharding the embedding's comes last, when the activations are gone.
    gradients = (n if keeps_gradient else part + max(0, at_once - embedding)) * size.gradient
    if not accumulates:  # then they come while the activations go
        gradients = max(0, gradients - sum(held.values()))
    estimate = {
        "parameters": (part + whole) * size.weight + copied * size.copy,
        "gradients": gradients,
        "optimizer": part * size.weight * _MOMENTS,
        **held,
    }
    return estimate | {"total": sum(estimate.values())}


def _gathered_at_once(model: GPT) -> int:
    """The weights that are whole at a time under sharding: of the two largest blocks, and of no block."""
    sizes = sorted(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    return model.num_parameters() - sum(sizes[:-2])


def _activations(model: GPT, size: _Bytes, activation_checkpointing: bool) -> int:
    """Bytes a token that the blocks keep for their backward pass."""
    config = model.config
    # of each block: the outputs of both norms, the input and the output of GELU
    kept = [
        block.attn.saved_activations_per_token() + 2 * (config.n_embd + config.intermediate_size)
        for block in model.blocks
    ]
    inputs = (config.n_layer + 1) * config.n_embd  # of each layer, in the weights' dtype
    return (max(kept) if activation_checkpointing else sum(kept)) * size.activation + inputs * size.weight
