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
from torch.profiler import record_function

from lingpt.common.errors import UserError
from lingpt.common.format import duration
from lingpt.common.run_folder import PROFILE, read_metrics
from lingpt.data import Batch, BatchSampler, Dataset, Prefetcher
from lingpt.models import Config
from lingpt.train import report
from lingpt.train.compilation import compiles
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0, progress_bar
from lingpt.train.distillation import LogitsLoss, training_loss
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.model import attention_kernels, fill_shards, make_model
from lingpt.train.planning.machine import Machine
from lingpt.train.planning.throughput import flops_per_token, mfu
from lingpt.train.profile import COMMUNICATION, WAITING, Profiler
from lingpt.train.runs import checkpoint
from lingpt.train.runs.checkpoint_writer import MAX_FAILURES, CheckpointWriter
from lingpt.train.runs.run_lock import RunLock
from lingpt.train.runs.trackers import CLOCKS, Trackers
from lingpt.train.signals import Stop
from lingpt.train.step import (
    learning_rates,
    make_optimizer,
    optimizer_step,
    segment_losses,
    set_learning_rate,
)
from lingpt.train.validation import validate

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


class Run:
    """A run in progress: model, optimizer, data and trackers."""

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        config: Config,
        dataset: Dataset,
        parallel: Parallel,
        lock: RunLock,
        resume_from: Path | None = None,
        init_from: Path | None = None,
    ) -> None:
        t, self.tokens_per_step, self.total_steps = recipe.train, recipe.tokens_per_step, recipe.total_steps
        self.recipe, self.machine, self.dataset, self.parallel = recipe, machine, dataset, parallel
        self.folder, self.lock, self.progress = recipe.run_folder, lock, Progress()
        parallel.seed(t.seed)
        self.gpt = make_model(recipe, config, parallel.device, resume_from, init_from, parallel.sharded)
        self.flops_per_token = flops_per_token(self.gpt, recipe)
        self.loss = training_loss(recipe, self.gpt, compiles(recipe, parallel.device))
        self.model = parallel.wrap(self.loss)
        if parallel.sharded:
            fill_shards(self.gpt, t.seed, resume_from, init_from)
        self.optimizer = parallel.wrap_optimizer(make_optimizer(self.gpt, t))
        self.learning_rate = learning_rates(t, self.total_steps)
        if resume_from:
            manifest, state = checkpoint.load_manifest(resume_from), checkpoint.load_state(resume_from)
            parallel.load_optimizer(self.optimizer, state["optimizer"], resume_from)
            if parallel.rank < len(state["random"]):  # a new rank keeps its seed
                checkpoint.restore_random_state(state["random"][parallel.rank])
            self.progress = Progress(**{key: manifest[key] for key in asdict(self.progress)})
        self.batches = BatchSampler(dataset.train, t.seed, t.global_batch_size)
        own = [samples for samples, _ in parallel.micro_batches(t.global_batch_size, t.micro_batch_size)]
        self.micro_batches = Prefetcher(self.batches, own, parallel.device)
        self.writer = CheckpointWriter(parallel.host_mesh)
        self.last_save, self.save_due = time.monotonic(), False
        self.val_loss: float | None = None  # at this step
        self.best = parallel.on_rank_zero(lambda: checkpoint.best_loss(self.folder))
        self.trackers = Trackers(lock)
        self.profiler = Profiler(self.folder / PROFILE, t.profile and parallel.rank == 0)
        parallel.on_rank_zero(lambda: self.trackers.open(recipe, self.progress.step))

    def train(self, stop: Stop) -> bool:
        """Trains to the last step, or until all ranks agree to stop; returns whether all steps are done."""
        t, total = self.recipe.train, self.total_steps
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
            status = report.StatusLine(self.progress.step)
            while self.progress.step < total and not stop.agreed:
                began = time.perf_counter()
                with record_function("step"):
                    line = self.step(stop)
                self.progress.train_time += time.perf_counter() - began
                self.profiler.step()
                step, last = self.progress.step, self.progress.step == total
                logs = step % t.log_interval == 0 or last or stop.agreed or "skipped" in line
                if logs or status.is_due(step):
                    line |= {**self.throughput(logged), "peak_memory": self.parallel.peak_memory}
                    speed = report.speed(line, self.recipe, step)
                    bar.set_postfix_str(f"loss {line['loss']:.3f}{speed}", refresh=False)
                    status.print_if_due(step, f"step {step}/{total} · loss {line['loss']:.4f}{speed}")
                if logs:
                    self.log("train", **line)
                    logged = replace(self.progress)
                bar.update()
                if self.progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                    self.log("diverged", skipped=self.progress.skipped_in_a_row)
                    self.parallel.on_rank_zero(self.raise_diverged)
                if step % t.eval_interval == 0 or last:
                    validated = self.validate_and_log(stop, f"loss {line['loss']:.4f} · ", speed)
                    status.restart()
                if self.checkpoint_due() or last or stop.agreed:
                    self.save()
        self.parallel.on_checkpoint_ranks(self.finish_saving)
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
        parallel, rate = self.parallel, self.learning_rate(self.progress.step)
        set_learning_rate(self.optimizer, rate)
        if isinstance(self.loss, LogitsLoss):
            self.loss.progress = self.progress.step / self.total_steps
        n = len(self.micro_batches)
        micro_batches = map(self.micro_batch, range(n))
        targets = self.batches.num_targets(self.progress.step)
        numbers = optimizer_step(self, micro_batches, n, lambda: (stop.requested, self.must_save()), targets)
        # The only synchronisation of a step. The optimizer, launched before, keeps a GPU busy meanwhile.
        with record_function(COMMUNICATION if parallel.world_size > 1 else WAITING):
            total, stops, saves, grad_norm = numbers.wait()
        if stops:
            stop.agree(parallel.all_gather_object(stop.number))
        self.save_due, self.val_loss = saves > 0, None
        loss_mean = total / targets
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
        self.progress.tokens += self.tokens_per_step
        return line

    def micro_batch(self, i: int) -> torch.Tensor | Batch:
        """This rank's i-th micro-batch of the next step."""
        with record_function("data"):
            return self.parallel.to_device(self.micro_batches.get(self.progress.step, i))

    def warm_up(self) -> None:
        """Compiles, and tunes for a GPU, before the clock starts, with one micro-batch whose gradient is
        dropped.

        It runs as the last micro-batch of a step, so that the communication is initialised, too.
        """
        on_gpu = self.parallel.device.type == "cuda"
        needed = on_gpu or compiles(self.recipe, self.parallel.device)
        if not needed or self.progress.step >= self.total_steps:
            return
        began = time.perf_counter()
        if on_gpu and self.recipe.train.keep_checkpoints:
            weights = self.gpt.state_dict()
            self.parallel.on_checkpoint_ranks(lambda: self.writer.reserve(weights, self.optimizer))
        with self.parallel.accumulate(self.model, enabled=False):
            first = segment_losses(self.model, self.gpt, self.micro_batch(0), self.recipe.train.segments)
            self.parallel.backward(next(first), self.tokens_per_step)
            first.close()
        self.parallel.zero_gradients(self.optimizer)
        if on_gpu:
            torch.cuda.synchronize()
        print_rank0(f"ready after {duration(time.perf_counter() - began)} of compiling")

    def validation_was_left(self) -> bool:
        """Whether the run resumes at a step whose validation was cut short by a signal."""
        step, every = self.progress.step, self.recipe.train.eval_interval

        def missing() -> bool:
            lines = read_metrics(self.folder)
            return not any(line["kind"] == "val" and line["step"] == step for line in lines)

        due = step > 0 and (step % every == 0 or step >= self.total_steps)
        return due and self.parallel.on_rank_zero(missing)

    def validate_and_log(self, stop: Stop, trained: str = "", speed: str = "", saved: bool = False) -> bool:
        """Validates and logs; returns whether it finished, which it does not if all ranks agree to stop.

        trained, speed: parts of the printed line, on training. saved: the step's checkpoint exists already,
        and gets the loss. UserError on all ranks if its disk cannot be written.
        """
        step, others = self.progress.step, self.dataset.val_sources
        texts = (self.dataset.val, *others.values())
        found = [result for blocks in texts if (result := validate(self, blocks, stop))]
        if len(found) < len(texts):
            print_rank0("the validation is left for when the run is resumed")
            return False
        (val, by_segment), *more = found
        losses = {name: loss for name, (loss, _) in zip(others, more, strict=True)}
        each = "".join(f", {name} {loss:.4f}" for name, loss in losses.items())
        print_rank0(f"step {step}/{self.total_steps} · {trained}validation {val:.4f}{each}{speed}")
        if saved:  # before the log, whose line marks this validation as done
            self.parallel.on_rank_zero(lambda: checkpoint.add_val_loss(self.folder, step, val))
            self.best = self.parallel.on_rank_zero(lambda: checkpoint.best_loss(self.folder))
        details = {"losses": losses, "by_segment": by_segment if len(by_segment) > 1 else []}
        self.log("val", loss=val, **{name: numbers for name, numbers in details.items() if numbers})
        self.val_loss = val
        return True

    def must_save(self) -> bool:
        """Whether `save_minutes` have passed; or the run must end, and `save` says why."""
        minutes = self.recipe.train.save_minutes
        due = minutes > 0 and time.monotonic() - self.last_save >= 60 * minutes
        return due or self.writer.failures >= MAX_FAILURES or self.trackers.lost

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due: by interval or time, before `wsd` decays, or as the best so far."""
        t, step = self.recipe.train, self.progress.step
        is_best = self.val_loss is not None and self.val_loss < self.best
        self.best = min(self.best, math.inf if self.val_loss is None else self.val_loss)
        at = step % t.save_interval == 0 or step == self.recipe.decay_start
        return at or self.save_due or (is_best and t.keep_best)

    def save(self) -> None:
        """Writes a checkpoint in the background, if the run keeps any; every rank raises UserError after too
        many failures, or if the run's folder is not its own any more."""
        self.last_save = time.monotonic()
        t, mesh = self.recipe.train, self.parallel.host_mesh
        if not t.keep_checkpoints:
            self.parallel.on_checkpoint_ranks(self.lock.check)
            return
        weights, random = self.gpt.state_dict(), self.parallel.all_gather_object(checkpoint.random_state())
        state = {"optimizer": self.optimizer.state_dict(), "random": random}
        manifest = {
            **asdict(self.progress),
            "val_loss": self.val_loss,
            "config": self.recipe.to_dict(),
            "data_fingerprint": self.dataset.fingerprint,
            "world_size": self.parallel.world_size,
        }
        retention = checkpoint.RetentionPolicy(t.keep_checkpoints, t.keep_best)
        gpt, tokenizer, group = self.gpt, self.dataset.tokenizer, mesh.get_group() if mesh else None

        def write(copies: tuple[dict, dict]) -> None:
            if group or not self.lock.is_lost:  # it may be tried again much later
                checkpoint.save(self.folder, gpt, copies[0], tokenizer, copies[1], manifest, retention, group)

        def submit() -> None:
            self.lock.check()
            with report.how_to_resume(self.recipe):
                self.writer.submit((weights, state), write)

        self.parallel.on_checkpoint_ranks(submit)

    def finish_saving(self) -> None:
        """Waits for the last checkpoint; UserError if it cannot be written."""
        with report.how_to_resume(self.recipe):
            self.writer.finish()
        self.lock.check()

    def throughput(self, since: Progress) -> dict[str, Any]:
        """Tokens per second and MFU since the progress `since`."""
        seconds = self.progress.train_time - since.train_time
        rate = (self.progress.tokens - since.tokens) / max(seconds, 1e-9)
        used = mfu(rate, self.flops_per_token, self.machine.peak, self.machine.world_size)
        return {"tokens_per_second": rate, "mfu": used}

    def log(self, kind: str, **values: Any) -> None:
        clocks = {key: getattr(self.progress, key) for key in CLOCKS}
        self.trackers.write({"kind": kind, **clocks, **values})

    def close(self) -> None:
        """Closes the trackers and the process group, and frees the memory of model and optimizer."""
        self.parallel.on_rank_zero(self.trackers.close)
        self.profiler.close()
        self.dataset.close()  # what is read ahead may wait for text
        self.micro_batches.close()
        del self.model, self.gpt, self.loss, self.optimizer
        gc.collect()
        self.parallel.close()
