"""`lingpt bench train`: the time of a whole training step with each attention, and with an identity instead.

It times real training: a run's model, compiled blocks, precision, loss, gradient clipping and optimizer, on
random tokens and without logging. The identity keeps the linear layers around the attention: its time divided
by an attention's is the share of the step outside of the attention itself. Its gradients of q and k are
zeros, which a card multiplies faster than other numbers; `identity-dense` uses v's gradient instead, with as
many bytes.

Notable:
- at each shape the attentions take turns, in rounds (results.py); later rounds reuse what the first one
  compiled
- one model is in memory at a time; all attentions of a shape have the same micro-batch size, and activation
  checkpointing if all of them need it
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from lingpt.bench.environment import warn_if_shared
from lingpt.bench.results import Session, chosen
from lingpt.bench.step_results import DENSE_IDENTITY, IDENTITIES, OUTPUT_GATE, SHORT_CONV, Results, Row
from lingpt.common.errors import UserError
from lingpt.data import Batch, DataConfig
from lingpt.models import ALIASES, ATTENTIONS, GPT, MODELS, ModelArgs
from lingpt.models.attention.base import QKVAttention
from lingpt.train.compilation import compiles
from lingpt.train.config import Recipe, TrainConfig
from lingpt.train.console import print_rank0
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.loss import NextTokenLoss
from lingpt.train.model import attention_kernels, make_model
from lingpt.train.planning.machine import Machine, choose_machine
from lingpt.train.planning.memory_fit import largest_that_fits, memory_needed, micro_batch_sizes
from lingpt.train.planning.throughput import mfu
from lingpt.train.step import make_optimizer, optimizer_step

# The model options of a recipe, for each name that is compared.
COMPARED: dict[str, dict[str, Any]] = {
    **{name: {"attention": "softmax"} for name in IDENTITIES},  # which keep its linear layers
    **{
        name: {"attention": name}
        for name in ("ours", "ours-gated", OUTPUT_GATE, SHORT_CONV, "hybrid", "ours-decay")
    },
    "softmax-flash": {"attention": "softmax", "sdpa": "flash"},
    "softmax-cudnn": {"attention": "softmax", "sdpa": "cudnn"},
    "gla": {"attention": "gla"},
    "gla-fla": {"attention": "gla", "gla_backend": "fla"},
}
# The same on packed documents, timed only where they are asked for.
PACKED = {
    f"{name}-packed": COMPARED[name] for name in ("ours", "ours-gated", "hybrid", "softmax-flash", "gla")
}
NAMED = COMPARED | PACKED
DOCUMENT = 700  # tokens of a packed document, about the mean of Wiki-40B
SIZES = ("pythia-70m", "pythia-160m", "pythia-410m", "pythia-1.4b")
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
USUAL_LENGTH, SWEPT = 8192, ("pythia-160m", "pythia-1.4b")  # every size at this, and these at every length
TOKENS, ROUNDS = 131072, 2
# A turn is WARMUP_STEPS untimed steps, then at least MIN_STEPS and MIN_SECONDS, at most MAX_SECONDS.
WARMUP_STEPS, MIN_STEPS, MIN_SECONDS, MAX_SECONDS = 2, 3, 2.0, 15.0


class Shape(NamedTuple):
    model: str
    seq_len: int


class _GradientOfV(torch.autograd.Function):
    """Returns qkv [B, N, 3C] unchanged; backward uses v's gradient for q and k, too."""

    @staticmethod
    def forward(qkv: torch.Tensor) -> torch.Tensor:
        return qkv.view_as(qkv)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dqkv: torch.Tensor) -> torch.Tensor:
        return dqkv[..., -(dqkv.shape[-1] // 3) :].repeat(1, 1, 3)


class Identity(nn.Module):
    """No attention: o = v between the linear layers of the attention that it replaces."""

    def __init__(self, replaced: QKVAttention, dense: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj, self.dense = replaced.qkv, replaced.proj, dense

    def forward(self, x_BNC: torch.Tensor, *_: Any) -> torch.Tensor:
        qkv = self.qkv(x_BNC)
        if self.dense:
            qkv = _GradientOfV.apply(qkv)
        return self.proj(qkv[..., -x_BNC.shape[-1] :])

    def flops_per_token(self, seq_len: int) -> int:
        return 0


class Trained:
    """A model in training: a run's steps, repeated on the same random tokens."""

    def __init__(self, recipe: Recipe, attention: str, parallel: Parallel) -> None:
        self.recipe, self.parallel, config = recipe, parallel, recipe.model.config()
        self.tokens_per_step = recipe.tokens_per_step
        self.gpt = make_model(recipe, config, parallel.device)
        if attention in IDENTITIES:
            for block in self.gpt.blocks:
                assert isinstance(block.attn, QKVAttention)
                block.add_module("attn", Identity(block.attn, dense=attention == DENSE_IDENTITY))
        self.model = parallel.wrap(NextTokenLoss(self.gpt, compiles(recipe, parallel.device)))
        self.optimizer = parallel.wrap_optimizer(make_optimizer(self.gpt, recipe.train))
        B, N = recipe.train.micro_batch_size, recipe.data.seq_len
        self.micro_batch: torch.Tensor | Batch = torch.randint(
            config.vocab_size, (B, N + 1), device=parallel.device
        )
        if attention in PACKED:
            borders = torch.randint(B * N, (B * N // DOCUMENT,), device=parallel.device)
            rows = torch.arange(0, B * N + 1, N, device=parallel.device)
            cu_seqlens = torch.cat((borders, rows)).sort().values.int()
            self.micro_batch = Batch(self.micro_batch[:, :-1], self.micro_batch[:, 1:], cu_seqlens)

    def step(self) -> None:
        """One optimiser step. RuntimeError if its loss is not finite, as only real training is timed."""
        n = self.recipe.train.global_batch_size // self.recipe.train.micro_batch_size
        numbers = optimizer_step(self, itertools.repeat(self.micro_batch, n), n)
        if not all(map(math.isfinite, numbers.wait())):  # waits for the device, as in a run
            raise RuntimeError("the loss or the gradient is not finite")


def bench_steps(
    models: Sequence[str] = (),
    seq_lens: Sequence[int] = (),
    attentions: Sequence[str] = (),
    *,
    tokens_per_step: int = TOKENS,
    micro_batch_tokens: int | None = None,
    rounds: int = ROUNDS,
    budget: float = 1500.0,
    accelerator: Literal["auto", "cpu", "cuda"] = "auto",
    save_to: Path | None = None,
    append: bool = False,
) -> Results:
    """Times a training step of each of the `attentions` at each model and length: names of NAMED, by default
    all of COMPARED, or forms such as `hybrid+value_residual`.

    Args:
        models, seq_lens: every model at every length; if not given, SIZES at USUAL_LENGTH, and those SWEPT at
            all LENGTHS.
        tokens_per_step: tokens per optimiser step, the same everywhere.
        micro_batch_tokens: maximum tokens of a micro-batch; by default as many as fit the memory by the
            estimate.
        budget: seconds; once it is spent, no further turn begins, and attentions without any are "skipped".
        save_to: a JSON file, written after every turn.
        append: keep the results in `save_to`, if they are of this card, these versions and this code, and
            measure what is missing. Ratios compare only what one session has measured.

    Raises UserError for invalid names and numbers.
    """
    forms = [name for name in attentions if "+" in name]  # their recipes check them
    known = dict.fromkeys([*NAMED, *ALIASES, *ATTENTIONS, *forms])
    names = chosen("attention", attentions, known, COMPARED)
    shapes = choose_shapes(models, seq_lens, tokens_per_step)
    machine = choose_machine(TrainConfig(accelerator=accelerator, devices=1, num_nodes=1))
    parallel = Parallel(machine)
    parallel.seed(0)
    warn_if_shared(parallel.device)
    results = Results.begin(parallel.device, machine.precision, save_to, append)
    if others := {row.tokens for row in results.rows} - {tokens_per_step}:
        raise UserError(
            f"{save_to} has steps of {others.pop()} tokens, not to be compared with those of "
            f"{tokens_per_step}: give the same --tokens_per_step, or leave out --append"
        )
    session = Session(results, parallel.device, budget, save_to)
    for shape in shapes:
        todo = [name for name in names if not results.is_done(*shape, name)]
        recipes = _recipes(shape, tokens_per_step, micro_batch_tokens, machine, names) if todo else {}
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # instead of running eagerly
            for n, name in itertools.product(range(1, rounds + 1), todo):
                row = results.row(*shape, name) if n > 1 else None
                row = row or _new_row(name, recipes[name], machine)
                work = functools.partial(
                    _time_round, recipe=recipes[name], machine=machine, parallel=parallel
                )
                if session.turn(row, work):
                    print_rank0(f"{row.line()}, round {n}")
    return results


def choose_shapes(models: Sequence[str], seq_lens: Sequence[int], tokens_per_step: int) -> list[Shape]:
    """The shapes as documented in `bench_steps`; UserError for an unknown model or an impossible length."""
    models = chosen("model", models, MODELS, SIZES)
    shapes = [Shape(model, seq_len) for model in models for seq_len in seq_lens or (USUAL_LENGTH,)]
    if not seq_lens:
        shapes += [Shape(model, seq_len) for model in SWEPT if model in models for seq_len in LENGTHS]
    for shape in shapes:
        if tokens_per_step % shape.seq_len:
            raise UserError(
                f"--tokens_per_step {tokens_per_step} is not a multiple of the length {shape.seq_len}"
            )
    return list(dict.fromkeys(shapes))


def _recipes(
    shape: Shape,
    tokens_per_step: int,
    micro_batch_tokens: int | None,
    machine: Machine,
    names: Sequence[str] = (),
) -> dict[str, Recipe]:
    """The recipe of each attention, all with the same settings (`_largest_micro_batch`): those that fit all
    of NAMED and of the `names`."""
    sequences = tokens_per_step // shape.seq_len
    train = TrainConfig(
        global_batch_size=sequences,
        micro_batch_size=1,
        learning_rate=1e-5,  # as in the first step of a warm-up
        min_learning_rate=0.0,
        precision=machine.precision,
        max_steps=1,
    )
    data = DataConfig(seq_len=shape.seq_len)
    recipes = {
        name: Recipe(ModelArgs(name=shape.model, block_size=shape.seq_len, **model), data, train)
        for name, model in ({name: {"attention": name} for name in names} | NAMED).items()
    }
    sizes = micro_batch_sizes(next(iter(recipes.values())), machine.world_size)
    if micro_batch_tokens is not None:
        size = max((size for size in sizes if size * shape.seq_len <= micro_batch_tokens), default=1)
        train = replace(train, micro_batch_size=size)
    else:
        train = _largest_micro_batch(list(recipes.values()), machine, sizes)
    return {name: replace(recipe, train=train) for name, recipe in recipes.items()}


def _largest_micro_batch(recipes: Sequence[Recipe], machine: Machine, sizes: Sequence[int]) -> TrainConfig:
    """The recipes' settings with the largest micro-batch that fits each of them, or one sequence; with
    activation checkpointing only if one sequence fits none of them without it."""
    train = recipes[0].train
    for checkpointing in (False, True):
        train = replace(train, activation_checkpointing=checkpointing)
        fitting = [
            largest_that_fits(
                machine.memory,
                machine.precision,
                GPT.on_meta(recipe.model.config()),
                replace(recipe, train=train),
                sizes,
            )
            for recipe in recipes
        ]
        if any(fitting):
            return replace(train, micro_batch_size=max(1, min(fitting)))
    return train


def _new_row(attention: str, recipe: Recipe, machine: Machine) -> Row:
    size, estimate = recipe.train.micro_batch_size, None
    if attention not in IDENTITIES:  # there is no estimate for these
        gpt = GPT.on_meta(recipe.model.config())
        estimate = memory_needed(gpt, recipe, machine.precision, size)["total"]
    return Row(
        recipe.model.name,
        recipe.data.seq_len,
        attention,
        micro_batch_size=size,
        activation_checkpointing=recipe.train.activation_checkpointing,
        tokens=recipe.tokens_per_step,
        estimated_memory=estimate,
    )


def _time_round(row: Row, recipe: Recipe, machine: Machine, parallel: Parallel) -> None:
    """Times another round of the row."""
    device, kernels = parallel.device, {}
    if row.attention not in IDENTITIES:
        config = recipe.model.config()
        kernels = attention_kernels(config, device, machine.precision)
    # The pieces of a block that a graph break (of `gla-fla`) leaves in the cache would serve others, too.
    torch.compiler.reset()
    began = time.perf_counter()
    trained = Trained(recipe, row.attention, parallel)
    trained.step()
    first = time.perf_counter() - began
    for _ in range(WARMUP_STEPS - 1):
        trained.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    spans: list[float] = []
    while sum(spans) < (MAX_SECONDS if len(spans) < MIN_STEPS else MIN_SECONDS):
        began = time.perf_counter()
        trained.step()
        spans.append(time.perf_counter() - began)  # from one synchronisation to the next
    row.add_round(ms=1e3 * statistics.median(spans))
    assert row.ms is not None
    row.kernel = " and ".join(dict.fromkeys(kernels.values())) or None
    row.fastest_ms = min(1e3 * min(spans), row.fastest_ms or math.inf)
    row.steps += len(spans)
    row.first_step_seconds = row.first_step_seconds or first
    row.tokens_per_second = 1e3 * row.tokens / row.ms
    flops = trained.gpt.flops_per_token(_sequence_length(trained.micro_batch))
    row.mfu = mfu(row.tokens_per_second, flops, machine.peak)
    row.peak_memory = parallel.peak_memory if device.type == "cuda" else None


def _sequence_length(micro_batch: torch.Tensor | Batch) -> int:
    """N; of packed documents, the mean over their tokens: the FLOPs of softmax grow with its square."""
    if isinstance(micro_batch, torch.Tensor):
        return micro_batch.shape[1] - 1
    lengths = micro_batch.cu_seqlens.diff().double()
    return round((lengths.square().sum() / lengths.sum()).item())
