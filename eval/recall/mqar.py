"""Multi-query associative recall (MQAR): generates sequences, trains small models on them and scores these.

The task is that of Arora et al. 2023 ("Zoology", arXiv 2312.04927), which arXiv 2312.06635 §5.2 (figure 4)
uses: a sequence begins with key–value pairs; later each key occurs again, once, and the model must predict
its value. The gaps before it follow a power law; all other positions hold random tokens.

The models are trained on sequences that are never repeated, each attention with every learning rate, and the
best rate counts. The blocks are Pythia's, MLP included (Zoology's have none).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from lingpt.common.devices import device_name
from lingpt.common.errors import UserError
from lingpt.models import ATTENTIONS, GPT, Config, ModelArgs, attention_form, parse_form
from lingpt.models.weight_decay import parameter_groups

POWER = 0.01  # Zoology's exponent of the gaps
TEST_SEED, TEST_SEQUENCES, TEST_BATCH = 2**31, 1024, 256
EVERY = 250  # steps between evaluations of the accuracy
ENOUGH = 0.999  # accuracy at which training ends
TRIALS_PER_GPU = 8  # processes that share a GPU: models this small leave most of it idle


class Batch(NamedTuple):
    """tokens `[B, N]`; positions `[B, P]` of the queries in them; values `[B, P]`, the right answers."""

    tokens: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor


def make_batch(
    size: int, pairs: int, length: int, vocabulary: int, seed: int, device: torch.device | str = "cpu"
) -> Batch:
    """`size` sequences, a function of the seed (and of the type of device). Keys are from the lower half of
    the vocabulary, values from the upper; none occurs twice in a sequence's pairs.
    """
    half, room = vocabulary // 2, (length - 2 * pairs) // 2
    if pairs < 1 or room < pairs or half <= pairs:
        raise UserError(
            f"{pairs} pairs need sequences of {4 * pairs} tokens and a vocabulary of {2 * pairs + 2}, at "
            f"least; these are {length} and {vocabulary}"
        )
    random = torch.Generator(device).manual_seed(seed)
    keys = _distinct(torch.zeros(size, half - 1, device=device), pairs, random) + 1
    values = _distinct(torch.zeros(size, half, device=device), pairs, random) + half
    gaps = torch.arange(1, room + 1, device=device).log() * (POWER - 1)
    positions = 2 * pairs + 2 * _distinct(gaps.expand(size, room), pairs, random)
    tokens = torch.randint(vocabulary, (size, length), generator=random, device=device)
    tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    return Batch(tokens.scatter_(1, positions, keys), positions, values)


def _distinct(logits: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    """`count` distinct columns of each row, with probabilities ∝ exp(logits): the Gumbel top-k trick."""
    noise = torch.rand(logits.shape, generator=random, device=logits.device).clamp_min(1e-20)
    return (logits - (-noise.log()).log()).topk(count, dim=1).indices


@dataclass(frozen=True)
class Trial:
    """One model to train: its attention, its width, the pairs of a sequence, the peak learning rate.

    attention: one of `ATTENTIONS`, with options of its own if any: `ours-gated+output_gate+short_conv`.
    """

    attention: str
    width: int
    pairs: int
    rate: float
    steps: int = 4000
    batch_size: int = 256
    vocabulary: int = 8192
    heads: int = 2
    layers: int = 2
    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens of a sequence: eight times the pairs, so that the queries are spread over three times as
        many places."""
        return 8 * self.pairs

    @property
    def key(self) -> str:
        return f"{self.attention}, width {self.width}, {self.pairs} pairs, rate {self.rate:g}"

    def config(self) -> Config:
        """The model's configuration. Raises UserError for an unknown attention or option."""
        name, options = parse_form(self.attention)
        heads: dict[str, Any] = {}
        if "gla_n_head" in ATTENTIONS[name].options():
            heads["gla_n_head"] = options.get("gla_n_head", self.heads)
        args = ModelArgs(
            "mqar",
            self.attention,
            block_size=self.length,
            vocab_size=self.vocabulary,
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            **heads,
        )
        return args.config()


@dataclass(frozen=True, kw_only=True)
class Trained(Trial):
    """A trained model: the accuracy per query on held-out sequences and its standard error over these; the
    accuracies during training, as (step, accuracy)."""

    accuracy: float
    accuracy_stderr: float
    parameters: int
    curve: tuple[tuple[int, float], ...]
    trained_steps: int
    seconds: float
    device: str = ""


def make_trials(
    attentions: Sequence[str],
    widths: Sequence[int],
    pairs: Sequence[int],
    rates: Sequence[float],
    **sizes: int,
) -> list[Trial]:
    """Every combination, once; an attention given in two spellings counts as one."""
    names = dict.fromkeys(attention_form(*parse_form(name)).replace(" ", "") for name in attentions)
    trials = [
        Trial(name, width, count, rate, **sizes)
        for width in dict.fromkeys(widths)
        for count in dict.fromkeys(pairs)
        for name in names
        for rate in dict.fromkeys(rates)
    ]
    for trial in trials:
        trial.config()  # raises now, not in training
        make_batch(1, trial.pairs, trial.length, trial.vocabulary, 0)
    return trials


def train_trial(trial: Trial, device: str = "cpu") -> Trained:
    """Trains one model and scores it on 1,024 held-out sequences. Stops early at an accuracy of `ENOUGH`."""
    started, where = time.monotonic(), torch.device(device)
    model = GPT.create(trial.config(), trial.seed, device=where)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=trial.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, trial.steps))
    every, curve, found, step = min(EVERY, trial.steps), [], (0.0, 0.0), 0
    for step in range(1, trial.steps + 1):
        batch = make_batch(
            trial.batch_size, trial.pairs, trial.length, trial.vocabulary, trial.seed * 10**7 + step, where
        )
        with torch.autocast("cuda", torch.bfloat16, enabled=where.type == "cuda"):
            logits = answer(model, batch)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.values.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == trial.steps:
            found = accuracy(model, trial, where)
            curve.append((step, round(found[0], 5)))
            if found[0] >= ENOUGH or not math.isfinite(loss.item()):
                break
    return Trained(
        **asdict(trial),
        accuracy=found[0],
        accuracy_stderr=found[1],
        parameters=model.num_parameters(),
        curve=tuple(curve),
        trained_steps=step,
        seconds=round(time.monotonic() - started, 1),
        device=device_name(where),
    )


def rate_factor(step: int, steps: int) -> float:
    """The learning-rate factor: linear warm-up over a tenth of the steps, then a cosine down to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def answer(model: GPT, batch: Batch) -> torch.Tensor:
    """Logits `[B, P, V]` at the queries only."""
    hidden = model.hidden(batch.tokens)
    index = batch.positions[..., None].expand(-1, -1, hidden.shape[-1])
    return model.lm_head(hidden.gather(1, index))


@torch.no_grad()
def accuracy(model: GPT, trial: Trial, device: torch.device) -> tuple[float, float]:
    """The share of queries whose value is the arg-max, and its standard error over sequences."""
    right = []
    for part in range(0, TEST_SEQUENCES, TEST_BATCH):
        batch = make_batch(TEST_BATCH, trial.pairs, trial.length, trial.vocabulary, TEST_SEED + part, device)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            right.append((answer(model, batch).argmax(-1) == batch.values).float().mean(1))
    shares = torch.cat(right)
    return shares.mean().item(), (shares.std() / math.sqrt(len(shares))).item()
