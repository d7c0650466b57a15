"""The configuration of a run: a `Recipe` of model, data and training options."""

from collections.abc import Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from lingpt.common.errors import UserError
from lingpt.common.format import counted
from lingpt.common.options import RARE, Option, build, check_options, flatten, options_of, read_values
from lingpt.common.run_folder import attention_label
from lingpt.data import DataConfig
from lingpt.models import ModelArgs, attention_form

LARGEST_BATCH = 1 << 20  # sequences; larger ones are typing errors, and each sequence takes an index
YEAR = 525_600  # minutes


@dataclass
class TrainConfig:
    """How to train. Batch sizes are in sequences of `data.seq_len` tokens, steps are optimiser steps."""

    # fmt: off
    max_steps: Annotated[int | None, Option(
        "optimiser steps; or give `max_tokens`. On the command line, either one overrides the recipe's",
        least=1, most=10**12, may_change=True, heading="training length")] = None
    max_tokens: Annotated[int | None, Option(
        "tokens to train on, rounded up to whole steps, if `max_steps` is not given",
        least=1, most=10**15, may_change=True)] = None
    global_batch_size: Annotated[int, Option(
        "sequences per optimiser step, over all devices", least=1, most=LARGEST_BATCH)] = 256
    micro_batch_size: Annotated[int, Option(
        "sequences per forward and backward pass on each device; gradients are accumulated exactly",
        least=1, most=LARGEST_BATCH, may_change=True)] = 4
    optimizer: Annotated[Literal["adamw", "muon"], Option(
        "`muon` is Muon for the matrices of linear layers but the head, AdamW for the rest",
        heading="optimiser")] = "adamw"
    learning_rate: Annotated[float, Option(
        "peak learning rate, reached after `warmup_steps`", above=0, most=1000)] = 1e-3
    muon_learning_rate: Annotated[float | None, Option(
        "the peak of Muon's rate, which follows the same schedule; by default `learning_rate`, as Muon's "
        "steps are scaled to AdamW's size (arXiv 2502.16982)", above=0, most=1000)] = None
    attention_learning_rate: Annotated[float | None, Option(
        "the peak of AdamW's rate for linear attentions, which follows the same schedule; by default "
        "`learning_rate`", above=0, most=1000)] = None
    min_learning_rate: Annotated[float, Option("learning rate at the last step", least=0, most=1000)] = 5e-5
    warmup_steps: Annotated[int, Option(
        "steps of linear warm-up, at most a tenth of the run's", least=0, most=10**12)] = 100
    schedule: Annotated[Literal["cosine", "wsd"], Option(
        "after the warm-up, `cosine` falls from the peak to the minimum over the whole run; `wsd` (warm-up, "
        "stable, decay) stays at the peak and falls over the last `decay_steps`: a run can be extended from "
        "the checkpoint where its decay began, which is kept")] = "cosine"
    decay_steps: Annotated[int | None, Option(
        "length of the decay of `wsd`; by default a fifth of all steps", least=1, may_change=True)] = None
    weight_decay: Annotated[float, Option(
        "decoupled weight decay, on matrices and the filter of a short convolution, not on biases, norms and "
        "a learnable b", least=0, most=1000)] = 0.1
    z_loss: Annotated[float, Option(
        "adds this · logsumexp(logits)² of each token to what is minimised, not to the losses that are shown "
        "(PaLM: 1e-4)", least=0, most=1)] = 0.0
    seed: Annotated[int, Option(
        "seed of the initial weights and of the order of the samples", least=0, most=2**32 - 1)] = 0
    name: Annotated[str | None, Option(
        "name of the run's folder in `out_dir`; by default `<recipe>-<attention>`, with the attention's "
        "options that are not at their defaults, and the model sizes given on the command line. A recipe is "
        "named after its file, or else after its model",
        may_change=True, heading="runs and checkpoints")] = None
    out_dir: Annotated[str, Option("folder of the runs", may_change=True)] = "runs"
    resume: Annotated[str, Option(
        "`auto` resumes from the newest whole checkpoint of the run, `never` starts from scratch (the old "
        "run is moved aside), a checkpoint folder resumes from that checkpoint", may_change=True)] = "auto"
    init_from: Annotated[str | None, Option(
        "start a new run from these weights: a Hugging Face folder (Pythia, Llama, SmolLM, Qwen), a model "
        "folder, or a run's folder (its newest checkpoint). Sizes that the recipe does not give, nor a model "
        "that it names, are those of this model", may_change=True)] = None
    teacher: Annotated[str | None, Option(
        "a run or a model folder that the run imitates, instead of learning the next token: "
        "`lingpt linearize`")] = None
    imitate: Annotated[Literal["attention", "blocks", "logits"], Option(
        "what of the teacher: each attention's output; the distribution of the next token, and each block's "
        "output ever less; or the distribution alone")] = "logits"
    eval_interval: Annotated[int, Option(
        "steps between validations; the last step is always validated", least=1, may_change=True)] = 100
    eval_tokens: Annotated[int, Option(
        "validation tokens, the same ones every time; 0 for all of them", least=0, most=10**15)] = 1_000_000
    save_interval: Annotated[int, Option(
        "steps between checkpoints; the last step is always saved", least=1, may_change=True)] = 500
    save_minutes: Annotated[float, Option(
        "also save when this many minutes have passed since the last checkpoint; 0 for never",
        least=0, most=YEAR, may_change=True)] = 0.0
    keep_checkpoints: Annotated[int, Option(
        "how many of the newest are kept, besides those where a decay of `wsd` began; 0 saves nothing, for a "
        "trial that no run resumes",
        least=0, may_change=True)] = 2
    keep_best: Annotated[bool, Option(
        "also save when the validation loss is the lowest so far, and keep that checkpoint",
        may_change=True)] = False
    devices: Annotated[int | Literal["auto"], Option(
        "processes on this machine, one per GPU; `auto` takes every GPU, or one CPU process, or what "
        "torchrun or SLURM has started here",
        least=1, most=1024, may_change=True, heading="devices")] = "auto"
    num_nodes: Annotated[int | Literal["auto"], Option(
        "number of machines; `auto` is what torchrun or SLURM has started",
        least=1, most=1 << 16, may_change=True)] = "auto"
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Option("kind of device", may_change=True)] = "auto"
    precision: Annotated[Literal["auto", "32-true", "bf16-mixed", "bf16-true"], Option(
        "`auto` is bf16-mixed if the device has bf16 tensor cores, else 32-true")] = "auto"
    strategy: Annotated[Literal["auto", "ddp", "fsdp"], Option(
        "how several devices share the work: `ddp`, each with the whole model; `fsdp`, each with a part of "
        "parameters, gradients and optimizer (FSDP2); `auto` uses DDP if it fits the memory",
        may_change=True)] = "auto"
    context_parallel: Annotated[int, Option(
        "devices that hold the pieces of the same sequences, for sequences too long for one "
        "(docs/long-context.md)", least=1, most=1024, may_change=True)] = 1
    segments: Annotated[int, Option(
        "truncated back-propagation: a sequence is trained on in so many segments, each from the states that "
        "the one before has left (docs/long-context.md)", least=1, most=1 << 20, may_change=True)] = 1
    activation_checkpointing: Annotated[bool, Option(
        "save only each block's input, and recompute the block in the backward pass: less memory, a third "
        "more computation", may_change=True)] = False
    offload_activations: Annotated[bool, Option(
        "with `activation_checkpointing`, keep the blocks' inputs in the host's memory, for long sequences "
        "(docs/long-context.md)", may_change=True)] = False
    compile: Annotated[Literal["auto", "always", "never"], Option(
        "when to use torch.compile for the blocks and the loss: on a GPU (`auto`), always or never",
        may_change=True)] = "auto"
    dry_run: Annotated[bool, Option("print the plan, and stop", may_change=True, heading=RARE)] = False
    beta1: Annotated[float, Option("AdamW's beta1", least=0, below=1)] = 0.9
    beta2: Annotated[float, Option("AdamW's beta2", least=0, below=1)] = 0.95
    grad_clip: Annotated[float, Option("maximum norm of the gradient over all parameters", above=0)] = 1.0
    deterministic: Annotated[bool, Option(
        "make two runs with the same seed on the same device bit-identical; slower on a GPU "
        "(docs/reliability.md)", may_change=True)] = False
    reduce_bf16: Annotated[bool, Option(
        "sum gradients over the devices in bf16: half the bytes of each sum, less exact. With FSDP this sums "
        "in every micro-batch, while fp32 gradients are summed once per step if memory allows")] = False
    timeout_minutes: Annotated[float, Option(
        "how long one process waits for another before the run ends",
        above=0, most=YEAR, may_change=True)] = 30.0
    log_interval: Annotated[int, Option(
        "steps between training lines in metrics.jsonl", least=1, may_change=True)] = 1
    wandb: Annotated[bool, Option(
        "also track in Weights & Biases, offline unless logged in", may_change=True)] = True
    wandb_project: Annotated[str, Option("project in Weights & Biases", may_change=True)] = "lingpt"
    wandb_group: Annotated[str | None, Option(
        "group in Weights & Biases; by default the model's name", may_change=True)] = None
    sample_tokens: Annotated[int, Option(
        "tokens of text to generate at the end; 0 for none", least=0, most=10**9, may_change=True)] = 160
    profile: Annotated[bool, Option(
        "profile two steps, after the first two: writes a trace (Perfetto) and a table to the run's folder",
        may_change=True)] = False
    # fmt: on


# Where the data is; its fingerprint identifies it.
DATA_PATHS = {"data.source", "data.val_source", "data.val_sources", "data.tokenizer"}

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
        """`<of>-<attention>`, then options that are not at their defaults: `demo-hybrid-value_residual`."""
        return "-".join([of, *self.attention_form.replace("=", "_").split(" + ")])

    @property
    def run_folder(self) -> Path:
        return Path(self.train.out_dir) / self.run_name

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.seq_len

    @property
    def piece_len(self) -> int:
        """Tokens of each sequence that one device has at a time."""
        return self.data.seq_len // self.train.context_parallel // self.train.segments

    def data_parallel(self, world_size: int) -> int:
        """Over how many (groups of) devices the sequences of a batch are divided."""
        return max(1, world_size // self.train.context_parallel)

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
        return build(Recipe, read_values(Recipe, flatten(Recipe, values)))
    except UserError as error:
        raise UserError(f"the run's recipe is damaged, or of another version of LinGPT ({error})") from error


# Keys that may change when a run resumes: how long, how often, on which devices, where. Losses stay
# comparable.
MAY_CHANGE = {key for key, declared in options_of(Recipe).items() if declared.option.may_change}


def warmup_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of the warm-up: at most a tenth of all."""
    return min(config.warmup_steps, max(1, total_steps // 10))


def decay_steps(config: TrainConfig, total_steps: int) -> int:
    """Steps of `wsd`'s decay: by default a fifth of all, as in Hägele et al. 2024."""
    return max(1, total_steps // 5) if config.decay_steps is None else config.decay_steps


def _check_name(name: str) -> None:
    """Raises UserError unless `name` is the name of a single folder: a run must be directly in `out_dir`."""
    one_name = name and Path(name).name == name and not name.startswith(".")
    if not one_name or not name.isprintable() or len(name.encode()) > 200:
        raise UserError(
            f"the run's name {name[:80]!r} cannot be a folder's: give one without '/' as --train.name "
            "(--train.out_dir is where runs live)"
        )


def check(recipe: Recipe, world_size: int) -> None:
    """Raises UserError for invalid numbers, before any work."""
    check_options(recipe)
    _check_name(recipe.run_name)
    t = recipe.train
    if taken := set(t.wandb_project) & set("/\\#?%:"):
        raise UserError(f"train.wandb_project is {t.wandb_project}; it must be text without {taken.pop()!r}")
    if t.z_loss and t.teacher is not None:
        raise UserError("train.z_loss is for the loss of the next token: leave it out, or train.teacher")
    if t.imitate != "logits" and t.teacher is None:
        raise UserError(f"train.imitate {t.imitate} is for what a teacher has: give --train.teacher, too")
    if t.muon_learning_rate is not None and t.optimizer != "muon":
        raise UserError("train.muon_learning_rate is for train.optimizer muon: leave it out, or give that")
    if t.offload_activations and not t.activation_checkpointing:
        raise UserError(
            "train.offload_activations is for the inputs that --train.activation_checkpointing true keeps: "
            "give that, too"
        )
    if t.keep_best and not t.keep_checkpoints:
        raise UserError("train.keep_best saves, and train.keep_checkpoints 0 does not: leave one of them out")
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
    if t.decay_steps is not None and t.decay_steps > longest_decay:
        bound = f"1 to {longest_decay}, the steps after the warm-up"
        raise UserError(f"train.decay_steps is {t.decay_steps}; it must be {bound}")
    if t.eval_tokens and t.eval_tokens < recipe.data.seq_len:
        raise UserError(
            f"train.eval_tokens is {t.eval_tokens}, less than one sequence of {recipe.data.seq_len}"
        )
    if t.global_batch_size % (t.micro_batch_size * recipe.data_parallel(world_size)):
        ways = t.global_batch_size, t.micro_batch_size, recipe.data_parallel(world_size)
        raise UserError(_what_divides(*ways, t.context_parallel))


def _what_divides(batch: int, micro: int, world_size: int, pieces: int) -> str:
    devices = counted(world_size, "device") if pieces == 1 else f"{counted(world_size, 'group')} of {pieces}"
    over = f"micro_batch_size {micro} × {devices}"
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
    old, new = with_defaults(old), flatten(Recipe, new)
    keys = sorted((old.keys() | new.keys()) - may_change)
    missing = "not there"
    return [
        f"{k}: {old.get(k, missing)} → {new.get(k, missing)}"
        for k in keys
        if old.get(k, missing) != new.get(k, missing)
    ]


def shared_settings(recipe: Recipe) -> dict[str, object]:
    """The settings that must be the same in all processes of a run, as `{"train.seed": 0}`."""
    return {key: value for key, value in flatten(Recipe, recipe.to_dict()).items() if key not in NODE_LOCAL}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config, flattened. Missing keys get their defaults: the option is newer than the run."""
    return flatten(Recipe, Recipe().to_dict()) | flatten(Recipe, config)
