"""The training loop.

Notable:
- gradient accumulation is exact: every token has the same weight, however the batch is split over devices
- the clock measures only training, without start-up, compiling, validation and checkpoints; a resumed run's
  clock continues
- the batch of step s is a pure function of (seed, s); on a CPU, a resumed run is bit-identical to one that
  never stopped
- a step whose loss or gradient is not finite is skipped and counted, and its blocks are logged; ten in a row
  end the run, and the same command then refuses to repeat them
- on Ctrl-C, SIGTERM and similar signals the run finishes the step, saves, and prints how to resume; a
  validation is cut short, and the same command repeats it
"""

import gc
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import Interrupted, UserError
from lingpt.common.format import duration
from lingpt.common.run_folder import PROFILE, read_metrics
from lingpt.data import BatchSampler, Dataset, prepare
from lingpt.models import GPT, Config
from lingpt.train import report
from lingpt.train.compilation import compiles
from lingpt.train.config import Recipe, check, shared_settings
from lingpt.train.console import print_rank0, progress_bar
from lingpt.train.determinism import deterministic
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.distributed.strategy import choose_strategy
from lingpt.train.loss import NextTokenLoss
from lingpt.train.model import (
    attention_kernels,
    begin_autotuning,
    fill_shards,
    make_model,
    model_config,
    other_tokens_message,
)
from lingpt.train.optim import learning_rate, make_optimizer
from lingpt.train.planning.machine import Machine, choose_machine
from lingpt.train.planning.memory_fit import check_machine, fits_here, out_of_memory, too_small_message
from lingpt.train.planning.plan import format_plan
from lingpt.train.planning.throughput import mfu
from lingpt.train.prefetch import Prefetcher
from lingpt.train.profile import COMMUNICATION, WAITING, Profiler, span
from lingpt.train.runs import checkpoint
from lingpt.train.runs.checkpoint_writer import CheckpointWriter
from lingpt.train.runs.environment import record_start
from lingpt.train.runs.resume import check_init_from, give_back_name, resume_or_create
from lingpt.train.runs.run_lock import RunLock
from lingpt.train.runs.trackers import Metrics, WandB
from lingpt.train.signals import Stop, stop_signals
from lingpt.train.step import optimizer_step

MAX_SKIPPED_IN_A_ROW = 10


@dataclass
class Progress:
    """A run's progress: optimiser steps, tokens, seconds of training, and skipped steps.

    skipped_in_a_row: number of consecutive skipped steps up to now.
    """

    step: int = 0
    tokens: int = 0
    train_time: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0


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
    if not recipe.train.dry_run:
        check_machine(machine, gpt, recipe)
        check_init_from(recipe)
        if machine.accelerator == "cpu":  # on a GPU it takes a context, so there each process checks its own
            attention_kernels(gpt.config, torch.device("cpu"), machine.precision)
    return gpt, machine, why


def _train(recipe: Recipe) -> Path:
    gpt, machine, why = check_recipe(recipe)
    if recipe.train.dry_run:
        print_rank0("\n".join([format_plan(recipe, machine, gpt), *([why] if why else [])]))
        return recipe.run_folder
    if why:
        print_rank0(why)
    if machine.accelerator == "cuda" and not fits_here(machine, gpt, recipe):
        print_rank0(f"memory: {too_small_message(machine, gpt, recipe)}")
    # Before the processes are launched, as a long tokenisation would exceed their timeouts.
    dataset = prepare(recipe.data, padded_vocab_size=gpt.config.padded_vocab_size)
    parallel = Parallel(machine, recipe.train.reduce_bf16, recipe.train.timeout_minutes)
    with RunLock(recipe.run_folder) as lock:
        with parallel.propagate_errors(), out_of_memory(machine, gpt, recipe):
            parallel.check_same_settings(machine, shared_settings(recipe) | {"the data": dataset.fingerprint})
            if differ := report.mixed_devices_message(parallel.all_gather_object(parallel.device_name)):
                print_rank0(differ)
            weights = parallel.on_rank_zero(
                lambda: _start(recipe, machine, gpt.config, dataset, parallel.device, lock)
            )
            try:
                run = Run(recipe, machine, gpt.config, dataset, parallel, *weights)
                run.warm_up()
                with run.writer, stop_signals() as stop:
                    finished = run.train(stop)
                    run.close()
            except BaseException:
                if parallel.rank == 0:
                    give_back_name(recipe.run_folder)
                raise
        if parallel.rank == 0:  # others exit with 0: another exit code would kill this process
            if not finished:
                raise Interrupted(stop.number, report.stopped_message(recipe, run.progress.step))
            report.final_report(recipe, dataset, parallel, run.progress.train_time)
    return recipe.run_folder


def _start(
    recipe: Recipe, machine: Machine, config: Config, dataset: Dataset, device: torch.device, lock: RunLock
) -> tuple[Path | None, Path | None]:
    """Prepares the run's folder and records this start; returns what `resume_or_create` does."""
    kernels = attention_kernels(config, device, machine.precision)
    resume_from, init_from = resume_or_create(recipe, dataset.fingerprint, lock)
    # A run that has already done more steps than requested trains nothing and keeps its record.
    if resume_from is None or checkpoint.load_manifest(resume_from)["step"] <= recipe.total_steps:
        record_start(recipe, machine, dataset.describe(), kernels)
    if init_from and (differ := other_tokens_message(init_from, dataset.tokenizer)):
        print_rank0(differ)
    return resume_from, init_from


class Run:
    """A run in progress: model, optimizer, data and trackers."""

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        config: Config,
        dataset: Dataset,
        parallel: Parallel,
        resume_from: Path | None = None,
        init_from: Path | None = None,
    ) -> None:
        t = recipe.train
        self.recipe, self.machine, self.dataset, self.parallel = recipe, machine, dataset, parallel
        self.folder, self.progress = recipe.run_folder, Progress()
        parallel.seed(t.seed)
        tunes = parallel.local_rank_zero
        self.tunings = begin_autotuning(recipe, config, machine.precision, parallel.device) if tunes else []
        self.gpt = make_model(recipe, config, parallel.device, resume_from, init_from, parallel.sharded)
        self.flops_per_token = self.gpt.flops_per_token(recipe.data.seq_len)
        self.model = parallel.wrap(NextTokenLoss(self.gpt, compiles(recipe, parallel.device)))
        if parallel.sharded:
            fill_shards(self.gpt, t.seed, resume_from, init_from)
        self.optimizer = parallel.wrap_optimizer(make_optimizer(self.gpt, t))
        if resume_from:
            manifest, state = checkpoint.load_manifest(resume_from), checkpoint.load_state(resume_from)
            parallel.load_optimizer(self.optimizer, state["optimizer"], resume_from)
            if parallel.rank < len(state["random"]):  # a new rank keeps its seed
                checkpoint.restore_random_state(state["random"][parallel.rank])
            self.progress = Progress(**{k: manifest.get(k, new) for k, new in asdict(self.progress).items()})
        self.batches = BatchSampler(dataset.train, t.seed, t.global_batch_size)
        own = [samples for samples, _ in parallel.micro_batches(t.global_batch_size, t.micro_batch_size)]
        self.micro_batches = Prefetcher(self.batches, own, parallel.device)
        self.writer = CheckpointWriter(parallel.host_mesh)
        self.last_save, self.save_due = time.monotonic(), False
        self.val_loss: float | None = None  # at this step
        self.best = parallel.on_rank_zero(lambda: checkpoint.best_loss(self.folder))
        self.trackers: list[Metrics | WandB] = []
        self.profiler = Profiler(self.folder / PROFILE, t.profile and parallel.rank == 0)
        parallel.on_rank_zero(self.open_trackers)

    def open_trackers(self) -> None:
        self.trackers.append(Metrics(self.folder, self.progress.step))
        if self.recipe.train.wandb:
            self.trackers.append(WandB(self.recipe))

    def train(self, stop: Stop) -> bool:
        """Trains to the last step, or until all ranks agree to stop; returns whether all steps are done."""
        t, total = self.recipe.train, self.recipe.total_steps
        validated = not self.validation_was_left() or self.validate_and_log(stop, saved=True)
        if self.progress.step >= total:
            at = f"the run is at step {self.progress.step} of {total}"
            print_rank0(f"nothing to train: {at} (raise --train.max_steps)")
            return validated
        kernels = attention_kernels(self.gpt.config, self.parallel.device, self.machine.precision)
        left = total - self.progress.step
        print_rank0(report.describe(self.recipe, self.machine, self.gpt, kernels, left))
        logged, speed = replace(self.progress), ""
        with progress_bar(total=total, initial=self.progress.step, unit="step", desc=self.folder.name) as bar:
            status = report.StatusLine(bar)
            while self.progress.step < total and not stop.agreed:
                began = time.perf_counter()
                with span("step"):
                    line = self.step(stop)
                self.progress.train_time += time.perf_counter() - began
                self.profiler.step()
                step, last = self.progress.step, self.progress.step == total
                if step % t.log_interval == 0 or last or stop.agreed or line.get("skipped"):
                    line |= self.throughput(logged)
                    self.log("train", **line)
                    speed = report.speed(line, self.recipe, step, self.parallel.peak_memory)
                    bar.set_postfix_str(f"loss {line['loss']:.3f}{speed}")
                    status.print_if_due(f"step {step}/{total} · loss {line['loss']:.4f}{speed}")
                    logged = replace(self.progress)
                bar.update()
                if self.progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                    self.log("diverged", skipped=self.progress.skipped_in_a_row)
                    self.parallel.on_rank_zero(self.raise_diverged)
                if step % t.eval_interval == 0 or last:
                    validated = self.validate_and_log(stop, f"loss {line['loss']:.4f} · ", speed)
                    status.restart()
                is_best = self.update_best()
                if (is_best and t.keep_best) or self.checkpoint_due() or last or stop.agreed:
                    self.save()
        self.finish_saving()
        return self.progress.step >= total and validated

    def raise_diverged(self) -> None:
        self.writer.wait()
        raise UserError(
            report.diverged_message(self.folder, self.progress.step, self.progress.skipped_in_a_row)
        )

    def step(self, stop: Stop) -> dict[str, Any]:
        """One optimiser step on the next global batch; returns its loss, learning rate and gradient norm.

        The ranks also agree on `stop` here: a request on one of them is agreed on by all.
        """
        t, parallel, tokens = self.recipe.train, self.parallel, self.recipe.tokens_per_step
        rate = learning_rate(self.progress.step, self.recipe.total_steps, t)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        n = len(self.micro_batches)
        micro_batches = map(self.micro_batch, range(n))
        numbers = optimizer_step(self, micro_batches, n, lambda: (stop.requested, self.save_requested()))
        # The only synchronisation of a step. The optimizer, launched before, keeps a GPU busy meanwhile.
        with span(COMMUNICATION if parallel.world_size > 1 else WAITING):
            total, stops, saves, grad_norm = numbers.wait()
        if stops:
            self.propagate_stop(stop)
        self.save_due, self.val_loss = saves > 0, None
        loss_mean = total / tokens
        line: dict[str, Any] = {"loss": loss_mean, "lr": rate, "grad_norm": grad_norm}
        if math.isfinite(loss_mean) and math.isfinite(grad_norm):
            self.progress.skipped_in_a_row = 0
        else:
            line |= {"skipped": True, "blocks": self.batches.indices(self.progress.step)}
            self.progress.skipped += 1
            self.progress.skipped_in_a_row += 1
            at = self.progress.step + 1
            print_rank0(f"step {at}: the loss or the gradient is not finite; the step is skipped")
        self.progress.step += 1
        self.progress.tokens += tokens
        return line

    def micro_batch(self, i: int) -> torch.Tensor:
        """This rank's i-th micro-batch of the next step."""
        with span("data"):
            return self.parallel.to_device(self.micro_batches.get(self.progress.step, i))

    def propagate_stop(self, stop: Stop) -> None:
        """Sets `stop` on all ranks, with the same signal, once they know that one was asked to stop."""
        stop.agreed, stop.number = True, max(self.parallel.all_gather_object(stop.number))

    def warm_up(self) -> None:
        """Compiles, and tunes for a GPU, before the clock starts, with one micro-batch whose gradient is
        dropped.

        It runs as the last micro-batch of a step, so that the communication is initialised, too.
        """
        on_gpu = self.parallel.device.type == "cuda"
        needed = on_gpu or compiles(self.recipe, self.parallel.device)
        if not needed or self.progress.step >= self.recipe.total_steps:
            return
        began = time.perf_counter()
        if on_gpu:
            self.parallel.on_checkpoint_ranks(lambda: self.writer.reserve(self.saved_tensors()))
            self.tune()
        with self.parallel.accumulate(self.model, enabled=False):
            loss = self.model(self.micro_batch(0))
            self.parallel.backward(loss, self.recipe.tokens_per_step)
        self.parallel.zero_gradients(self.optimizer)
        if on_gpu:
            torch.cuda.synchronize()
        print_rank0(f"ready after {duration(time.perf_counter() - began)} of compiling")

    def tune(self) -> None:
        """Tunes on the machine's first process; the others then read its choices from the cache."""
        for tuning in self.tunings:
            tuning.finish(print_rank0)
        self.parallel.all_gather_object(None)
        if not self.parallel.local_rank_zero:
            config, precision = self.gpt.config, self.machine.precision
            for tuning in begin_autotuning(self.recipe, config, precision, self.parallel.device):
                tuning.finish(print_rank0)

    def validation_was_left(self) -> bool:
        """Whether the run resumes at a step whose validation was cut short by a signal."""
        step, every = self.progress.step, self.recipe.train.eval_interval

        def missing() -> bool:
            lines = read_metrics(self.folder)
            return not any(line["kind"] == "val" and line["step"] == step for line in lines)

        due = step > 0 and (step % every == 0 or step >= self.recipe.total_steps)
        return due and self.parallel.on_rank_zero(missing)

    def validate_and_log(self, stop: Stop, trained: str = "", speed: str = "", saved: bool = False) -> bool:
        """Validates and logs; returns whether it finished, which it does not if all ranks agree to stop.

        trained, speed: parts of the printed line, on training. saved: the step's checkpoint exists already,
        and gets the loss. UserError on all ranks if its disk cannot be written.
        """
        val = self.validate(stop)
        if val is None:
            print_rank0("the validation is left for when the run goes on")
            return False
        print_rank0(
            f"step {self.progress.step}/{self.recipe.total_steps} · {trained}validation {val:.4f}{speed}"
        )
        if saved:  # before the log, whose line marks this validation as done
            self.parallel.on_rank_zero(lambda: checkpoint.add_val_loss(self.folder, self.progress.step, val))
            self.best = self.parallel.on_rank_zero(lambda: checkpoint.best_loss(self.folder))
        self.log("val", loss=val)
        self.val_loss = val
        return True

    @torch.no_grad()
    def validate(self, stop: Stop) -> float | None:
        """Nats per token on the first validation blocks, always the same ones; None if stopped."""
        if stop.agreed:
            return None
        val, parallel = self.dataset.val, self.parallel
        loss_sum, tokens = torch.zeros((), dtype=torch.float64, device=parallel.device), 0
        blocks = self.recipe.validation_blocks(len(val))
        batches = list(parallel.micro_batches(blocks, self.recipe.train.micro_batch_size))
        for batch, counts in progress_bar(batches, desc="validation", leave=False):
            loss = self.model(parallel.to_device(val.gather(batch)))
            if counts:
                loss_sum += loss
                tokens += len(batch) * val.seq_len
            if parallel.any_rank(stop.requested):  # checked at each batch, as all of them may take long
                self.propagate_stop(stop)
                return None
        total, all_tokens = parallel.all_reduce_sum(loss_sum, tokens)
        return total / all_tokens

    def save_requested(self) -> bool:
        """Whether `save_minutes` have passed, or too many saves have failed, so that the run must end."""
        minutes = self.recipe.train.save_minutes
        due = minutes > 0 and time.monotonic() - self.last_save >= 60 * minutes
        return due or self.writer.too_many_failures

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due at this step: by interval, by time, or before the decay of `wsd`."""
        step = self.progress.step
        at = step % self.recipe.train.save_interval == 0 or step == self.recipe.decay_start
        return at or self.save_due

    def update_best(self) -> bool:
        """Records this step's validation loss as the best if it is the lowest so far; whether it is."""
        if self.val_loss is None or not self.val_loss < self.best:
            return False
        self.best = self.val_loss
        return True

    def save(self) -> None:
        """Writes a checkpoint in the background; every rank raises UserError after too many failures."""
        self.last_save = time.monotonic()
        weights, optimizer = self.parallel.state(self.gpt, self.optimizer)
        state = {"optimizer": optimizer, "random": self.parallel.all_gather_object(checkpoint.random_state())}
        manifest = {
            **asdict(self.progress),
            "val_loss": self.val_loss,
            "config": self.recipe.to_dict(),
            "data_fingerprint": self.dataset.fingerprint,
            "world_size": self.parallel.world_size,
        }
        gpt, tokenizer, mesh = self.gpt, self.dataset.tokenizer, self.parallel.host_mesh
        retention = checkpoint.RetentionPolicy(
            self.recipe.train.keep_checkpoints, self.recipe.train.keep_best
        )

        def write(copies: tuple[dict, dict]) -> None:
            args = (self.folder, gpt, copies[0], tokenizer, copies[1], manifest, retention)
            checkpoint.save_shards(*args, mesh.get_group()) if mesh else checkpoint.save(*args)

        def submit() -> None:
            with report.how_to_go_on(self.recipe):
                self.writer.submit((weights, state), write)

        self.parallel.on_checkpoint_ranks(submit)

    def saved_tensors(self) -> list[torch.Tensor]:
        """Tensors like those that `save` will copy, in the same order, before AdamW has created its state."""
        weights, _ = self.parallel.state(self.gpt, self.optimizer)
        tensors = list(weights.values())
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:  # step count and two moments
                tensors += [torch.empty((), device=parameter.device), parameter, parameter]
        return tensors

    def finish_saving(self) -> None:
        """Waits for the last checkpoint; every rank raises UserError if it cannot be written."""

        def finish() -> None:
            with report.how_to_go_on(self.recipe):
                self.writer.finish()

        self.parallel.on_checkpoint_ranks(finish)

    def throughput(self, since: Progress) -> dict[str, Any]:
        """Tokens per second and MFU since the progress `since`."""
        seconds = self.progress.train_time - since.train_time
        rate = (self.progress.tokens - since.tokens) / max(seconds, 1e-9)
        used = mfu(rate, self.flops_per_token, self.machine.peak, self.machine.world_size)
        return {"tokens_per_second": rate, "mfu": used}

    def log(self, kind: str, **values: Any) -> None:
        clocks = {key: getattr(self.progress, key) for key in ("step", "tokens", "train_time")}
        for tracker in self.trackers:
            tracker.write({"kind": kind, **clocks, **values})

    def close_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def close(self) -> None:
        """Closes the trackers and the process group, and frees the memory of model and optimizer."""
        self.parallel.on_rank_zero(self.close_trackers)
        self.profiler.close()
        self.micro_batches.close()
        del self.model, self.gpt, self.optimizer
        gc.collect()
        self.parallel.close()
