"""Estimates the memory of a training step before anything is allocated."""

from typing import NamedTuple

from lingpt.common.errors import UserError, unknown
from lingpt.models.gpt import GPT


class _Bytes(NamedTuple):
    """Bytes of a weight, of autocast's copy of it, of its gradient, and of an activation."""

    weight: int
    copy: int
    gradient: int
    activation: int


_BYTES = {"32-true": _Bytes(4, 0, 4, 4), "bf16-mixed": _Bytes(4, 2, 4, 2), "bf16-true": _Bytes(2, 0, 2, 2)}


def memory_estimate(
    model: GPT,
    micro_batch_size: int,
    seq_len: int,
    precision: str = "bf16-mixed",
    loss_chunk_tokens: int | None = None,
    sharded_over: int = 1,
    activation_checkpointing: bool = False,
    offload_activations: bool = False,
    accumulates: bool = True,
    gathers_once: bool = False,
    context_parallel: int = 1,
    moments: int | None = None,
) -> dict[str, int]:
    """Bytes on one device at the peak of a step, by their use, and their `total`.

    The estimate counts the activations that each compiled block saves for backward, at the moment when the
    loss is computed. torch.compile saves the inputs of matrix products and of attention, and recomputes what
    is cheap; eager mode saves up to twice as much in an attention with a gate or a convolution.
    Fragmentation, CUDA's context and workspaces are not included.

    Args:
        model: on any device; only its shapes count.
        precision: Fabric's name (`32-true`, `bf16-mixed` or `bf16-true`).
        loss_chunk_tokens: tokens whose logits exist at a time; None for the whole micro-batch.
        sharded_over: number of devices that shard parameters, gradients and optimizer (FSDP2); each has two
            blocks, and all parameters outside of blocks, unsharded at a time.
        activation_checkpointing: save each block's input, and one block's activations at a time.
        offload_activations: keep these inputs in the host's memory, but for two, and the embeddings that make
            shared values.
        accumulates: whether gradients of earlier micro-batches are in memory while a later one is computed.
        gathers_once: when sharding, each device has all parameters, and its own gradient, unsharded for a
            step.
        context_parallel: number of devices that hold pieces of the same sequences, each of `seq_len` tokens;
            what a layer gathers from them is kept for its backward pass.
        moments: numbers that the optimizer keeps; None for AdamW's, two per weight.
    """
    config = model.config
    if precision not in _BYTES:
        raise unknown("precision", precision, _BYTES)
    if context_parallel * seq_len > config.block_size:
        raise UserError(
            f"sequences of {context_parallel * seq_len} tokens exceed the block size {config.block_size}"
        )
    size, tokens, sharded = _BYTES[precision], micro_batch_size * seq_len, sharded_over > 1
    n, at_once = model.num_parameters(), _gathered_at_once(model)
    embedding = config.padded_vocab_size * config.n_embd  # number of weights; the last layer has as many
    part = -(-n // sharded_over)
    whole = 0 if not sharded else n if gathers_once else at_once
    copied = at_once if sharded and activation_checkpointing else n
    if not config.tie_embeddings:  # the head, whose weight is copied, has one of its own
        copied -= embedding
    keeps_gradient = not sharded or (gathers_once and accumulates)  # unsharded, to the end of the step
    held = {
        "activations": tokens * _activations(model, size, activation_checkpointing, offload_activations)
        + micro_batch_size * _gathered(model, size, seq_len, context_parallel, activation_checkpointing),
        # Compiled on a GPU, their gradient overwrites them.
        "logits": min(tokens, loss_chunk_tokens or tokens) * config.padded_vocab_size * size.activation,
        # The last layer's input and its gradient; and the gradient of that layer's weight, which exists long
        # before the others.
        "loss": 2 * tokens * config.n_embd * size.weight + keeps_gradient * embedding * size.gradient,
    }
    # Of the unsharded gradients, the embedding's is computed last, when the activations are freed.
    gradients = (n if keeps_gradient else part + max(0, at_once - embedding)) * size.gradient
    if not accumulates:  # they are then allocated while activations are freed
        gradients = max(0, gradients - sum(held.values()))
    estimate = {
        "parameters": (part + whole) * size.weight + copied * size.copy,
        "gradients": gradients,
        "optimizer": -(-(2 * n if moments is None else moments) // sharded_over) * size.weight,
        **held,
    }
    return estimate | {"total": sum(estimate.values())}


def _gathered(model: GPT, size: _Bytes, seq_len: int, pieces: int, activation_checkpointing: bool) -> int:
    """Bytes per sequence that the layers get from all pieces, of `seq_len` tokens each."""
    sent = [0 if pieces == 1 else block.attn.sent_elements(seq_len, pieces) for block in model.blocks]
    return (max(sent) if activation_checkpointing else sum(sent)) * pieces * size.activation


def _gathered_at_once(model: GPT) -> int:
    """Number of weights that sharding gathers at a time: of the two largest blocks and outside of blocks."""
    sizes = sorted(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    return model.num_parameters() - sum(sizes[:-2])


def _activations(model: GPT, size: _Bytes, activation_checkpointing: bool, offloads: bool) -> int:
    """Bytes per token that the blocks save for their backward pass."""
    config = model.config
    # per block: the attention's, the outputs of both norms, the inputs of GELU (or SwiGLU) and its output
    hidden = (2 if config.mlp_class_name == "GptNeoxMLP" else 3) * config.intermediate_size
    kept = [block.attn.saved_activations_per_token() + 2 * config.n_embd + hidden for block in model.blocks]
    shared, layers = config.shared_values_width, config.n_layer
    if offloads:  # the shared values keep the embeddings, the first layer's input
        layers = min(2 + (shared is not None), layers)
    inputs = (layers + 1) * config.n_embd  # inputs of each layer, in the weights' dtype
    if not config.parallel_residual:  # and that of the second norm
        inputs += (1 if activation_checkpointing else config.n_layer) * config.n_embd
    saved = max(kept) if activation_checkpointing else sum(kept)
    if shared is not None:  # these values, and the input of their projection
        saved += shared + config.n_embd
    return saved * size.activation + inputs * size.weight
