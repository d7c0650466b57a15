"""Losses that imitate a teacher, a model of the same sizes with another attention: `lingpt linearize`.

The whole model learns the teacher's distribution of the next token (RADLADS, arXiv 2505.03005), and at first
the outputs of its blocks. Before, each new attention alone may learn its teacher's outputs from its teacher's
inputs (attention transfer: LoLCATs, arXiv 2410.10254). Without gradients, in a validation, all are the loss
of the next token.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lingpt.common.errors import UserError
from lingpt.common.run_folder import find_model_folder
from lingpt.data import Batch
from lingpt.data.packing import NO_TARGET
from lingpt.models import GPT, Config, load_model, read_model_config
from lingpt.train.compilation import compile_blocks, compile_options
from lingpt.train.config import Recipe
from lingpt.train.loss import NextTokenLoss, cross_entropy_sum, inputs_and_targets

BLOCKS_WEIGHT = 2.0  # docs/results/linearize


def check_teacher(recipe: Recipe, config: Config) -> None:
    """Raises UserError if the recipe's teacher does not exist, or cannot teach a model of `config`; reads no
    weights."""
    t = recipe.train
    if t.teacher is None:
        return
    theirs = read_model_config(find_model_folder(Path(t.teacher), verify=False))
    sizes = ("n_layer", "n_embd", "padded_vocab_size")
    for name in sizes[2:] if t.imitate == "logits" else sizes:
        if (other := getattr(theirs, name)) != (own := getattr(config, name)):
            raise UserError(f"the teacher {t.teacher} has {name} {other}, this model {own}")
    if recipe.data.seq_len > theirs.block_size:
        raise UserError(
            f"data.seq_len {recipe.data.seq_len} is longer than the teacher's block size "
            f"{theirs.block_size}: lower it"
        )
    if t.imitate == "attention" and config.attention_per_layer == theirs.attention_per_layer:
        raise UserError(
            "the model has its teacher's attention in every layer: give another --model.attention"
        )


def training_loss(recipe: Recipe, gpt: GPT, compiled: bool) -> nn.Module:
    """The loss that the recipe trains `gpt` with; `check_teacher` has found no mistake."""
    if recipe.train.teacher is None:
        return NextTokenLoss(gpt, compiled, recipe.train.z_loss)
    teacher = load_model(find_model_folder(Path(recipe.train.teacher)), device=gpt.lm_head.weight.device)
    teacher.eval().requires_grad_(False)  # by any kernel: the one that trained it may not run here
    if recipe.train.imitate == "attention":
        return AttentionTransferLoss(gpt, teacher, compiled)
    return LogitsLoss(gpt, teacher, compiled, blocks=recipe.train.imitate == "blocks")


class _TeacherLoss(nn.Module):
    def __init__(self, gpt: GPT, teacher: GPT, compiled: bool) -> None:
        super().__init__()
        self.next_token = NextTokenLoss(gpt, compiled)
        self._teacher = [teacher]  # in a list: no part of what is trained, wrapped and saved

    @property
    def gpt(self) -> GPT:
        return self.next_token.gpt

    @property
    def teacher(self) -> GPT:
        return self._teacher[0]


def where_targets(batch: torch.Tensor | Batch, x_BNC: torch.Tensor) -> torch.Tensor:
    """x at the tokens that have a target, as in the loss of the next token, and 0 at the others of a packed
    batch, where student and teacher then agree."""
    if isinstance(batch, torch.Tensor):
        return x_BNC
    return x_BNC.masked_fill((batch.targets == NO_TARGET)[..., None], 0)


class AttentionTransferLoss(_TeacherLoss):
    """A batch → the sum over its targets of the squared error of an attention's output, relative to the mean
    square of the teacher's; the mean over the layers whose attention is another one. Only those are
    trained."""

    def __init__(self, gpt: GPT, teacher: GPT, compiled: bool = False) -> None:
        super().__init__(gpt, teacher, compiled)
        pairs = zip(gpt.blocks, teacher.blocks, strict=True)
        self.transferred = [
            i for i, (own, other) in enumerate(pairs) if type(own.attn) is not type(other.attn)
        ]
        gpt.requires_grad_(False)
        self._calls: list[tuple[tuple, torch.Tensor]] = []  # of the teacher's attentions: arguments, output
        for i in self.transferred:
            gpt.blocks[i].attn.requires_grad_(True)
            teacher.blocks[i].attn.register_forward_hook(lambda _, args, out: self._calls.append((args, out)))

    def forward(self, batch: torch.Tensor | Batch) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.next_token(batch)
        idx_BN, targets_BN, cu_seqlens = inputs_and_targets(batch)
        self._calls.clear()
        with torch.no_grad():
            self.teacher.hidden(idx_BN, cu_seqlens=cu_seqlens)
        errors = []
        # The model's own rotary tables: its rope_base, for example, may be another.
        cos_NR, sin_NR = (table[: idx_BN.shape[1]] for table in (self.gpt.cos, self.gpt.sin))
        for i, ((x_BNC, _, _, *rest), wanted_BNC) in zip(self.transferred, self._calls, strict=True):
            found_BNC = self.gpt.blocks[i].attn(x_BNC, cos_NR, sin_NR, *rest)
            found_BNC = where_targets(batch, found_BNC.float())
            wanted_BNC = where_targets(batch, wanted_BNC.float())
            # No target at all, as in a batch of prompts: nothing to learn, and not NaN.
            size = wanted_BNC.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
            errors.append(F.mse_loss(found_BNC, wanted_BNC) / size)
        return torch.stack(errors).mean() * (targets_BN != NO_TARGET).sum()


class LogitsLoss(_TeacherLoss):
    """A batch → the sum over its targets of KL(teacher ‖ model) of the next token's distribution, nats.

    blocks: plus the mean squared error of each block's output, normalised to zero mean and unit variance; its
    mean over the blocks times BLOCKS_WEIGHT, falling to 0 with `progress`, the part of the run that is done.
    """

    def __init__(self, gpt: GPT, teacher: GPT, compiled: bool = False, blocks: bool = False) -> None:
        super().__init__(gpt, teacher, compiled)
        self.blocks, self.progress = blocks, 0.0
        self.divergence: Callable = divergence_and_gradient
        if compiled:
            compile_blocks(teacher)
            self.divergence = torch.compile(divergence_and_gradient, **compile_options())

    def forward(self, batch: torch.Tensor | Batch) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.next_token(batch)
        idx_BN, _, cu_seqlens = inputs_and_targets(batch)
        own: list[torch.Tensor] | None = [] if self.blocks else None
        wanted: list[torch.Tensor] | None = [] if self.blocks else None
        with torch.no_grad():
            theirs_BNC = self.teacher.hidden(idx_BN, cu_seqlens=cu_seqlens, outputs=wanted)
        hidden_BNC = self.gpt.hidden(idx_BN, cu_seqlens=cu_seqlens, outputs=own)
        hidden_BNC, theirs_BNC = (where_targets(batch, x) for x in (hidden_BNC, theirs_BNC))

        def chunk_loss(logits_RV: torch.Tensor, theirs_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weight_VC = self.teacher.lm_head.weight.to(logits_RV.dtype)
            return self.divergence(logits_RV, theirs_RC.to(logits_RV.dtype) @ weight_VC.T)

        loss = cross_entropy_sum(hidden_BNC, self.gpt.lm_head.weight, theirs_BNC, chunk_loss=chunk_loss)
        if own is None or wanted is None:
            return loss

        def normalised(x_BNC: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(where_targets(batch, x_BNC).float(), x_BNC.shape[-1:])

        errors = [F.mse_loss(normalised(x), normalised(y)) for x, y in zip(own, wanted, strict=True)]
        weight = BLOCKS_WEIGHT * (1 - self.progress)
        return loss + weight * torch.stack(errors).mean() * idx_BN.numel()


def divergence_and_gradient(
    logits_RV: torch.Tensor, teacher_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over rows of KL(softmax(teacher) ‖ softmax(logits)), in fp32 or wider, and its gradient by the
    logits, in their dtype."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    log_p_RV, log_t_RV = (F.log_softmax(x, dim=-1, dtype=wide) for x in (logits_RV, teacher_RV))
    loss = F.kl_div(log_p_RV, log_t_RV, reduction="sum", log_target=True)
    return loss, (log_p_RV.exp() - log_t_RV.exp()).to(logits_RV.dtype)
