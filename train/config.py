"""The configuration of a run: a `Recipe` of model, data and training options."""

import math
from collections.abc import Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lingpt.common.errors import UserError
from lingpt.common.format import counted
from lingpt.common.run_folder import attention_label
from lingpt.data import DataConfig
from lingpt.models import ALIASES, ModelArgs, attention_form, form_parts


@dataclass
class TrainConfig:
    """How to train. Batch sizes are in sequences of `data.seq_len` tokens, steps are optimiser steps.

    Args:
        name: name of the run's folder in `out_dir`; by default `<recipe>-<attention>`, with the attention's
            options that are not at their defaults, and the model sizes given on the command line. A recipe is
            named after its file, or else after its model.
        out_dir: folder of the runs.
        max_steps: optimiser steps; or give `max_tokens`. On the command line, either one overrides the
            recipe's.
        max_tokens: tokens to train on, rounded up to whole steps, if `max_steps` is not given.
        global_batch_size: sequences per optimiser step, over all devices.
        micro_batch_size: sequences per forward and backward pass on each device; gradients are accumulated
            exactly.
        optimizer: `adamw`, or `muon`: Muon for the matrices of the blocks, AdamW for the rest.
        learning_rate: the peak learning rate, reached after `warmup_steps`.
        muon_learning_rate: the peak of Muon's rate, which follows the same schedule; by default
            `learning_rate`, as Muon's steps are scaled to AdamW's size (arXiv 2502.16982).
        min_learning_rate: the learning rate at the last step.
        warmup_steps: steps of linear warm-up, at most a tenth of the run's.
        schedule: after the warm-up, `cosine` falls from the peak to the minimum over the whole run; `wsd`
            (warm-up, stable, decay) stays at the peak and falls over the last `decay_steps`: a run can be
            extended from the checkpoint where its decay began, which is kept.
        decay_steps: length of the decay of `wsd`; by default a fifth of all steps.
        weight_decay: decoupled weight decay, on matrices and the filter of a short convolution, not on
            biases, norms and a learnable b.
        beta1: AdamW's beta1.
        beta2: AdamW's beta2.
        grad_clip: maximum norm of the gradient over all parameters.
        seed: seed of the initial weights and of the order of the samples.
        precision: `auto` is bf16-mixed if the device has bf16 tensor cores, else 32-true; or one of 32-true,
            bf16-mixed, bf16-true.
        deterministic: make two runs with the same seed on the same device bit-identical; slower on a GPU
            (docs/reliability.md).
        compile: when to use torch.compile for the blocks and the loss: on a GPU (`auto`), always or never.
        accelerator: `auto`, `cpu` or `cuda`.
        devices: processes on this machine, one per GPU; `auto` takes every GPU, or one CPU process, or what
            torchrun or SLURM has started here.
        num_nodes: number of machines; `auto` is what torchrun or SLURM has started.
        strategy: how several devices share the work: `ddp`, each with the whole model; `fsdp`, each with a
            part of parameters, gradients and optimizer (FSDP2); `auto` uses DDP if it fits the memory.
        activation_checkpointing: save only each block's input, and recompute the block in the backward pass:
            less memory, a third more computation.
        timeout_minutes: how long one process waits for another before the run ends.
        reduce_bf16: sum gradients over the devices in bf16: half the bytes of each sum, less exact. With FSDP
            this sums in every micro-batch, while fp32 gradients are summed once per step if memory allows.
        eval_interval: steps between validations; the last step is always validated.
        eval_tokens: validation tokens, the same ones every time; 0 for all of them.
        save_interval: steps between checkpoints; the last step is always saved.
        save_minutes: also save when this many minutes have passed since the last checkpoint; 0 for never.
        keep_checkpoints: how many of the newest are kept, besides those where a decay of `wsd` began.
        keep_best: also save when the validation loss is the lowest so far, and keep that checkpoint.
        log_interval: steps between training lines in metrics.jsonl.
        resume: `auto` resumes from the newest whole checkpoint of the run, `never` starts from scratch (the
            old run is moved aside), a checkpoint folder resumes from that checkpoint.
        init_from: start a new run from these weights: a Hugging Face Pythia folder, a model folder, or a
            run's folder (its newest checkpoint).
        wandb: also track in Weights & Biases, offline unless logged in.
        wandb_project: project in Weights & Biases.
        wandb_group: group in Weights & Biases; by default the model's name.
        sample_tokens: tokens of text to generate at the end; 0 for none.
        profile: profile two steps, after the first two: writes a trace (Perfetto) and a table to the run's
            folder.
        dry_run: print the plan, and stop.
    """

    name: str | None = None
    out_dir: str = "runs"
    max_steps: int | None = None
    max_tokens: int | None = None
    global_batch_size: int = 256
    micro_batch_size: int = 4
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    muon_learning_rate: float | None = None
    min_learning_rate: float = 5e-5
    warmup_steps: int = 100
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_steps: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    seed: int = 0
    precision: str = "auto"
    deterministic: bool = False
    compile: Literal["auto", "always", "never"] = "auto"
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    devices: int | Literal["auto"] = "auto"
    num_nodes: int | Literal["auto"] = "auto"
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    activation_checkpointing: bool = False
    reduce_bf16: bool = False
    timeout_minutes: float = 30.0
    eval_interval: int = 100
    eval_tokens: int = 1_000_000
    save_interval: int = 500
    save_minutes: float = 0.0
    keep_checkpoints: int = 2
    keep_best: bool = False
    log_interval: int = 1
    resume: str = "auto"
    init_from: str | None = None
    wandb: bool = True
    wandb_project: str = "lingpt"
    wandb_group: str | None = None
    sample_tokens: int = 160
    profile: bool = False
    dry_run: bool = False


# Keys that may change when a run resumes: how long, how often, on which devices, where. Losses stay
# comparable.
MAY_CHANGE = {
    "train.name", "train.out_dir", "train.max_steps", "train.max_tokens", "train.micro_batch_size",
    "train.decay_steps", "train.deterministic", "train.save_minutes", "train.keep_best",
    "train.compile", "train.accelerator", "train.devices", "train.num_nodes", "train.strategy",
    "train.activation_checkpointing", "train.timeout_minutes", "train.eval_interval",
    "train.save_interval", "train.keep_checkpoints", "train.log_interval", "train.resume", "train.init_from",
    "train.wandb", "train.wandb_project", "train.wandb_group", "train.sample_tokens", "train.profile",
    "train.dry_run", "data.cache_dir", "data.num_workers",
}  # fmt: skip


# Where the data is; its fingerprint identifies it.
DATA_PATHS = {"data.source", "data.val_source", "data.tokenizer"}

# Keys that may differ between the processes of a run: where each machine has its copy of the data, and how it
# tokenises it.
NODE_LOCAL = DATA_PATHS | {"data.cache_dir", "data.num_workers"}


@dataclass
class Recipe:
    """Everything that defines a run."""

    model: ModelArgs = field(default_factory=ModelArgs)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def attention_label(self) -> str:
        return attention_label(self.model.attention)

    @property
    def attention_form(self) -> str:
        """The attention and its options that are not at their defaults."""
        return attention_form(self.model.attention, vars(self.model))

    @property
    def run_name(self) -> str:
        return self.default_name(self.model.name) if self.train.name is None else self.train.name

    def default_name(self, of: str) -> str:
        """`<of>-<attention>`, then its options that are not at their defaults; or `<of>-hybrid` if the form
        has an alias.
        """
        if self.attention_form in ALIASES:
            return f"{of}-{self.attention_form}"
        label, options = form_parts(self.model.attention, vars(self.model))
        changed = [name if value is True else f"{name}_{value}" for name, value in options.items()]
        return "-".join([of, label, *changed])

    @property
    def run_folder(self) -> Path:
        return Path(self.train.out_dir) / self.run_name

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.seq_len

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run; UserError if the recipe does not say."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        if self.train.max_tokens is None:
            raise UserError("how long to train? give --train.max_steps or --train.max_tokens")
        return -(-self.train.max_tokens // self.tokens_per_step)

    @property
    def decay_start(self) -> int | None:
        """The number of steps before the decay of `wsd`; None for a schedule without a plateau."""
        if self.train.schedule != "wsd":
            return None
        return max(0, self.total_steps - decay_steps(self.train, self.total_steps))

    def validation_blocks(self, available: int) -> int:
        """The number of validation blocks used, the first ones of those `available`."""
        return min(self.train.eval_tokens // self.data.seq_len or available, available)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def recipe_from_dict(values: dict[str, Any]) -> Recipe:
    """The recipe of a run's config.yaml or manifest; UserError if it holds none.

    Missing keys get their defaults: the option is newer than the run.
    """
    try:
        return Recipe(
            ModelArgs(**values["model"]), DataConfig(**values["data"]), TrainConfig(**values["train"])
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"the run's recipe is damaged, or of another version of LinGPT ({error})") from error


def warmup_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of the warm-up: at most a tenth of all."""
    return min(config.warmup_steps, max(1, total_steps // 10))


def decay_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of `wsd`'s decay: by default a fifth of all, as in Hägele et al. 2024."""
    return max(1, total_steps // 5) if config.decay_steps is None else config.decay_steps


_RANGES = {  # (minimum, maximum)
    "min_learning_rate": (0, 1000),
    "warmup_steps": (0, 10**12),
    "weight_decay": (0, 1000),
    "eval_tokens": (0, 10**15),
    "sample_tokens": (0, 10**9),
    "seed": (0, 2**32 - 1),
    "timeout_minutes": (0, 525_600),  # a year
}
_LARGEST_BATCH = 1 << 20  # sequences; larger ones are typing errors, and each sequence takes an index


def _check_name(name: str) -> None:
    """Raises UserError unless `name` is the name of a single folder: a run must be directly in `out_dir`."""
    one_name = name.strip() and Path(name).name == name and not name.startswith(".")
    if not one_name or not name.isprintable() or len(name.encode()) > 200:
        raise UserError(
            f"the run's name {name[:80]!r} cannot be a folder's: give one without '/' as --train.name "
            "(--train.out_dir is where runs live)"
        )


def check(recipe: Recipe, world_size: int) -> None:
    """Raises UserError for invalid numbers, before any work."""
    recipe.data.check()
    _check_name(recipe.run_name)
    t = recipe.train
    if not t.out_dir.strip():
        raise UserError("train.out_dir is blank: name the folder where runs live")
    if t.init_from == "":
        raise UserError("train.init_from is empty: name a model's or a run's folder, or leave it out")
    for name, (least, most) in _RANGES.items():
        value = getattr(t, name)
        if not least <= value <= most:
            bound = f"at most {most:,}" if value > most else f"at least {least}"
            raise UserError(f"train.{name} is {value}; it must be {bound}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(t, name) < 1:
            raise UserError(f"train.{name} is {getattr(t, name)}; it must be at least 0 and below 1")
    positive = ("global_batch_size", "micro_batch_size", "keep_checkpoints", "log_interval", "eval_interval")
    for name in (*positive, "save_interval", "num_nodes"):
        if getattr(t, name) != "auto" and getattr(t, name) < 1:
            raise UserError(f"train.{name} is {getattr(t, name)}; it must be at least 1")
    if t.global_batch_size > _LARGEST_BATCH:
        raise UserError(
            f"train.global_batch_size is {t.global_batch_size}; "
            f"it must be at most {_LARGEST_BATCH:,} sequences"
        )
    for name in ("learning_rate", "grad_clip", "timeout_minutes"):
        if not 0 < getattr(t, name) < math.inf:
            raise UserError(f"train.{name} is {getattr(t, name)}; it must be above 0")
    if t.muon_learning_rate is not None:
        if t.optimizer != "muon":
            raise UserError(
                "train.muon_learning_rate is for train.optimizer muon: leave it out, or give that"
            )
        if not 0 < t.muon_learning_rate < math.inf:
            raise UserError(f"train.muon_learning_rate is {t.muon_learning_rate}; it must be above 0")
    if t.min_learning_rate > t.learning_rate:
        raise UserError(
            f"train.min_learning_rate is {t.min_learning_rate:g}, above the peak, train.learning_rate "
            f"{t.learning_rate:g}: lower it"
        )
    if t.decay_steps is not None and t.schedule != "wsd":
        raise UserError(
            f"train.decay_steps is of the schedule wsd, and train.schedule is {t.schedule}: leave it out, or "
            "give --train.schedule wsd"
        )
    longest_decay = max(1, recipe.total_steps - warmup_steps(t, recipe.total_steps))
    if t.decay_steps is not None and not 1 <= t.decay_steps <= longest_decay:
        bound = f"1 to {longest_decay}, the steps after the warm-up"
        raise UserError(f"train.decay_steps is {t.decay_steps}; it must be {bound}")
    if not t.save_minutes >= 0:
        raise UserError(f"train.save_minutes is {t.save_minutes}; it must be 0 (never) or more")
    if recipe.total_steps < 1:
        raise UserError("no step to train: raise train.max_steps or train.max_tokens above 0")
    if t.eval_tokens and t.eval_tokens < recipe.data.seq_len:
        raise UserError(
            f"train.eval_tokens is {t.eval_tokens}, less than one sequence of {recipe.data.seq_len}"
        )
    if t.global_batch_size % (t.micro_batch_size * world_size):
        raise UserError(_what_divides(t.global_batch_size, t.micro_batch_size, world_size))


def _what_divides(batch: int, micro: int, world_size: int) -> str:
    over = f"micro_batch_size {micro} × {counted(world_size, 'device')}"
    if batch % world_size:
        fix = f"use a global batch that is a multiple of {world_size}, or a number of devices that divides it"
    else:
        share = batch // world_size
        sizes = [str(m) for m in range(1, share + 1) if share % m == 0]
        sizes = sizes if len(sizes) <= 8 else [*sizes[:7], "…", sizes[-1]]
        fix = f"--train.micro_batch_size {', '.join(sizes)} would divide"
    return f"global_batch_size {batch} does not divide by {over}: {fix}"


def differences(old: dict[str, Any], new: dict[str, Any], may_change: Set[str] = MAY_CHANGE) -> list[str]:
    """`key: old → new` for each key that a resumed run must keep and in which the configs differ."""
    old, new = with_defaults(old), flatten(new)
    keys = sorted((old.keys() | new.keys()) - may_change)
    missing = "not there"
    return [
        f"{k}: {old.get(k, missing)} → {new.get(k, missing)}"
        for k in keys
        if old.get(k, missing) != new.get(k, missing)
    ]


def shared_settings(recipe: Recipe) -> dict[str, object]:
    """The settings that must be the same in all processes of a run, as `{"train.seed": 0}`."""
    return {key: value for key, value in flatten(recipe.to_dict()).items() if key not in NODE_LOCAL}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config, flattened. Missing keys get their defaults: the option is newer than the run."""
    return flatten(Recipe().to_dict()) | flatten(config)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` → `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
