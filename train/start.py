"""The start of a run: checks the recipe, prepares data, processes and the run's folder, and trains."""

from pathlib import Path

import torch

from lingpt.common.devices import device_name
from lingpt.common.errors import Interrupted, UserError
from lingpt.data import Dataset, check_packing, prepare
from lingpt.models import GPT, Config
from lingpt.train import report
from lingpt.train.config import Recipe, check, shared_settings
from lingpt.train.console import print_rank0
from lingpt.train.determinism import deterministic
from lingpt.train.distillation import check_teacher
from lingpt.train.distributed.context import check_context_parallel
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.distributed.strategy import choose_strategy
from lingpt.train.loop import Run
from lingpt.train.model import attention_kernels, model_config, other_tokens_message
from lingpt.train.planning.machine import Machine, choose_machine
from lingpt.train.planning.memory_fit import check_machine, fits_here, out_of_memory, too_small_message
from lingpt.train.planning.plan import format_plan
from lingpt.train.runs import checkpoint
from lingpt.train.runs.environment import record_start
from lingpt.train.runs.resume import check_init_from, check_resume, give_back_name, refusal, resume_or_create
from lingpt.train.runs.run_lock import RunLock
from lingpt.train.signals import stop_signals


def train(recipe: Recipe) -> Path:
    """Trains or resumes the run that `recipe` describes; returns its folder.

    Raises UserError for what the user can fix, and KeyboardInterrupt, with the message to show, if a signal
    stopped the run.
    """
    with deterministic(recipe.train.deterministic):
        return _train(recipe)


def check_recipe(recipe: Recipe) -> tuple[GPT, Machine, str | None]:
    """The model, on the meta device; the machine, with how its devices share the model; and why they do (None
    if there is nothing to explain). UserError, before any work, for what cannot be trained here; a dry run
    may be for another machine: too large for this one, or with kernels or weights that it lacks.
    """
    gpt = GPT.on_meta(model_config(recipe))
    machine, why = choose_strategy(choose_machine(recipe.train), gpt, recipe)
    check(recipe, machine.world_size)
    check_packing(recipe.data)
    check_context_parallel(recipe, gpt, machine.world_size)
    _check_segments(recipe, gpt.config)
    if recipe.train.attention_learning_rate is not None and not gpt.config.has_linear_attention:
        raise UserError(
            f"train.attention_learning_rate is for linear attentions, and {recipe.attention_label} is none: "
            "leave it out"
        )
    transfers_attention = recipe.train.teacher is not None and recipe.train.imitate == "attention"
    if transfers_attention and gpt.config.shared_values_width is not None:
        raise UserError(
            "train.imitate attention trains attentions alone, and value_residual has a part outside of them: "
            "imitate blocks, or logits"
        )
    if not recipe.train.dry_run:
        check_machine(machine, gpt, recipe)
        check_resume(recipe)
        check_init_from(recipe, gpt.config)
        check_teacher(recipe, gpt.config)
        if machine.accelerator == "cpu":  # on a GPU it takes a context, so there each process checks its own
            attention_kernels(gpt.config, torch.device("cpu"), machine.precision)
    return gpt, machine, why


def _check_segments(recipe: Recipe, config: Config) -> None:
    """Raises UserError if the recipe's sequences cannot be trained on in segments."""
    t, seq_len = recipe.train, recipe.data.seq_len
    if t.segments == 1:
        return
    option = f"train.segments is {t.segments}"
    if seq_len % t.segments:
        raise UserError(f"{option}, which does not divide data.seq_len {seq_len}: change one of them")
    if not config.has_linear_attention:
        raise UserError(f"{option}, and {recipe.attention_label} has no state to carry: leave it out")
    others = {"context_parallel": t.context_parallel > 1, "teacher": t.teacher is not None}
    for name, given in others.items():
        if given:
            raise UserError(f"{option}, and train.{name} needs whole sequences: leave one of them out")
    if recipe.data.packing == "documents":
        raise UserError(f"{option}, and packed documents begin with empty states: leave one of them out")


def _train(recipe: Recipe) -> Path:
    gpt, machine, why = check_recipe(recipe)
    if recipe.train.dry_run:
        lines = format_plan(recipe, machine, gpt), why, refusal(recipe, gpt.config)
        print_rank0("\n".join(filter(None, lines)))
        return recipe.run_folder
    if why:
        print_rank0(why)
    if machine.accelerator == "cuda" and not fits_here(machine, gpt, recipe):
        print_rank0(f"memory: {too_small_message(machine, gpt, recipe)}")
    # Before the processes are launched, as a long tokenisation would exceed their timeouts.
    dataset = prepare(recipe.data, padded_vocab_size=gpt.config.padded_vocab_size)
    _check_validation(recipe, dataset)
    t = recipe.train
    parallel = Parallel(machine, t.reduce_bf16, t.timeout_minutes, t.context_parallel)
    with RunLock(recipe.run_folder) as lock:
        with parallel.propagate_errors(), out_of_memory(machine, gpt, recipe):
            parallel.check_same_settings(machine, shared_settings(recipe) | {"the data": dataset.fingerprint})
            if differ := report.mixed_devices_message(
                parallel.all_gather_object(device_name(parallel.device))
            ):
                print_rank0(differ)
            weights = parallel.on_rank_zero(
                lambda: _start(recipe, machine, gpt.config, dataset, parallel.device, lock)
            )
            try:
                run = Run(recipe, machine, gpt.config, dataset, parallel, lock, *weights)
                run.warm_up()
                with run.writer, stop_signals() as stop:
                    finished = run.train(stop)
                    run.close()
            except BaseException:
                dataset.close()  # else the thread that reads ahead may wait for text, and the exit for it
                if parallel.rank == 0 and not lock.is_lost:
                    give_back_name(recipe.run_folder)
                raise
        if parallel.rank == 0:  # others exit with 0: another exit code would kill this process
            if not finished:
                raise Interrupted(stop.number, report.stopped_message(recipe, run.progress.step))
            report.final_report(recipe, dataset, parallel, run.progress.train_time)
    return recipe.run_folder


def _check_validation(recipe: Recipe, dataset: Dataset) -> None:
    """Raises UserError if the run would validate on prompts alone."""
    for name, blocks in {"the validation": dataset.val, **dataset.val_sources}.items():
        if not blocks.num_targets(range(recipe.validation_blocks(len(blocks)))):
            raise UserError(
                f"{name} has no answer in the tokens that are validated on: raise --train.eval_tokens or "
                "--data.seq_len, or give another text"
            )


def _start(
    recipe: Recipe, machine: Machine, config: Config, dataset: Dataset, device: torch.device, lock: RunLock
) -> tuple[Path | None, Path | None]:
    """Prepares the run's folder and records this start; returns what `resume_or_create` does."""
    kernels = attention_kernels(config, device, machine.precision)
    resume_from, init_from = resume_or_create(recipe, dataset.fingerprint, lock)
    # A run that has already done more steps than requested trains nothing and keeps its record.
    if resume_from is None or checkpoint.load_manifest(resume_from)["step"] <= recipe.total_steps:
        record_start(recipe, machine, dataset.describe(), kernels)
    if said := dataset.repetitions(recipe.total_steps * recipe.train.global_batch_size):
        print_rank0(said)
    if init_from and (differ := other_tokens_message(init_from, dataset.tokenizer)):
        print_rank0(differ)
    return resume_from, init_from
