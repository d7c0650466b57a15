"""The training loop.

Notable:
- gradient accumulation is exact: every token weighs the same, however the batch is cut over devices
- the clock counts training alone: start-up, compiling, validation and checkpoints stand apart, and a resumed
  run's clock goes on from where it was
- what step s trains on is a pure function of (seed, s); on a CPU, a resumed run equals, bit by bit, one that
  never stopped
- a step whose loss or gradient is not finite changes nothing and is counted; ten in a row end the run
- Ctrl-C or SIGTERM: the step is finished, saved, and one line says how to go on; a second one leaves at once
"""

import gc
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.data import Batches, Dataset, prepare
from lingpt.models import Config
from lingpt.train import checkpoint, report
from lingpt.train.config import Recipe, check
from lingpt.train.environment import record_start
from lingpt.train.loss import NextTokenLoss
from lingpt.train.machine import Machine, check_machine, choose_machine, duration, out_of_memory
from lingpt.train.model import make_model, model_config
from lingpt.train.optim import learning_rate, make_optimizer
from lingpt.train.parallel import Parallel, print_rank0, progress_bar
from lingpt.train.plan import format_plan
from lingpt.train.resume import resume_or_create
from lingpt.train.signals import Stop, stop_signals
from lingpt.train.throughput import mfu
from lingpt.train.trackers import Metrics, WandB

MAX_SKIPPED_IN_A_ROW = 10


@dataclass
class Progress:
    """How far a run is: optimiser steps, tokens, seconds of training, and steps that were skipped."""

    step: int = 0
    tokens: int = 0
    train_time: float = 0.0
    skipped: int = 0


def train(recipe: Recipe) -> Path:
    """Trains, or goes on with, the run that `recipe` describes; returns its folder.

    Raises UserError for what the user can fix, and KeyboardInterrupt, with the line to show, where a signal
    stopped the run.
    """
    machine = choose_machine(recipe.train)
    config = model_config(recipe)
    check(recipe, machine.world_size)
    if recipe.train.dry_run:
        print_rank0(format_plan(recipe, machine, config))
        return recipe.run_folder
    check_machine(machine, config, recipe)
    # Before the processes are launched: a long tokenisation would run into their timeouts.
    dataset = prepare(recipe.data, padded_vocab_size=config.padded_vocab_size)
    parallel = Parallel(machine)

    def start() -> Path | None:
        resume_from = resume_or_create(recipe, dataset.fingerprint)
        record_start(recipe, machine, dataset.describe())
        return resume_from

    run = Run(recipe, machine, config, dataset, parallel, parallel.on_rank_zero(start))
    with stop_signals() as stop, out_of_memory(recipe.train.micro_batch_size):
        run.train(stop)
    run.close()
    if parallel.rank == 0:  # the others leave quietly: an exit code of theirs would kill this process
        if run.progress.step < recipe.total_steps:
            raise KeyboardInterrupt(report.stopped(run.progress.step, recipe.total_steps))
        report.final_report(recipe, dataset, parallel, run.progress.train_time)
    return recipe.run_folder


class Run:
    """A run in progress: model, optimizer, data and trackers, and what happens to them."""

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        config: Config,
        dataset: Dataset,
        parallel: Parallel,
        resume_from: Path | None,
    ) -> None:
        t = recipe.train
        self.recipe, self.machine, self.dataset, self.parallel = recipe, machine, dataset, parallel
        self.folder, self.progress = recipe.run_folder, Progress()
        parallel.seed(t.seed)
        self.gpt = make_model(recipe, config, resume_from, parallel.device)
        self.flops_per_token = self.gpt.flops_per_token(recipe.data.seq_len)
        self.model = parallel.wrap(NextTokenLoss(self.gpt))
        self.optimizer = parallel.wrap_optimizer(make_optimizer(self.gpt, t))
        if resume_from:
            manifest, state = checkpoint.load_manifest(resume_from), checkpoint.load_state(resume_from)
            parallel.load_optimizer(self.optimizer, state["optimizer"])
            if parallel.rank < len(state["random"]):  # a rank that is new keeps its seed
                checkpoint.restore_random_state(state["random"][parallel.rank])
            self.progress = Progress(**{key: manifest[key] for key in asdict(self.progress)})
        self.batches = Batches(dataset.train, t.seed, t.global_batch_size)
        self.trackers: list[Metrics | WandB] = []
        if parallel.rank == 0:
            self.trackers.append(Metrics(self.folder, self.progress.step))
            if t.wandb:
                self.trackers.append(WandB(recipe))

    def train(self, stop: Stop) -> None:
        """Optimiser steps until the last one, or until all ranks have agreed to stop."""
        t, total = self.recipe.train, self.recipe.total_steps
        if self.progress.step >= total:
            at = f"the run is at step {self.progress.step} of {total}"
            print_rank0(f"nothing to train: {at} (raise --train.max_steps)")
            return
        print_rank0(report.describe(self.recipe, self.machine, self.gpt, total - self.progress.step))
        if self.parallel.device.type == "cuda":
            self.warm_up()
        skipped_in_a_row, logged = 0, replace(self.progress)
        with progress_bar(total=total, initial=self.progress.step, unit="step", desc=self.folder.name) as bar:
            while self.progress.step < total and not stop.agreed:
                began = time.perf_counter()
                line = self.step(stop)
                self.progress.train_time += time.perf_counter() - began
                step, last = self.progress.step, self.progress.step == total
                skipped_in_a_row = skipped_in_a_row + 1 if line.get("skipped") else 0
                if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                    raise UserError(report.diverged(self.folder, step, skipped_in_a_row))
                if step % t.log_interval == 0 or last or stop.agreed:
                    line |= self.throughput(logged)
                    self.log("train", **line)
                    bar.set_postfix_str(report.postfix(line))
                    logged = replace(self.progress)
                bar.update()
                if step % t.eval_interval == 0 or last:
                    val = self.validate()
                    print_rank0(f"step {step}/{total} · loss {line['loss']:.4f} · validation {val:.4f}")
                    self.log("val", loss=val)
                if step % t.save_interval == 0 or last or stop.agreed:
                    self.save()

    def step(self, stop: Stop) -> dict[str, Any]:
        """One optimiser step on the next global batch; its loss, learning rate and gradient norm.

        Here the ranks agree on `stop`: what was requested on one of them is agreed on by all.
        """
        t, parallel, tokens = self.recipe.train, self.parallel, self.recipe.tokens_per_step
        rate = learning_rate(self.progress.step, self.recipe.total_steps, t)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=parallel.device)
        micro_batches = list(parallel.pieces(t.global_batch_size, t.micro_batch_size))
        for i, (positions, _) in enumerate(micro_batches):
            block = parallel.to_device(self.batches.get(self.progress.step, positions))
            with parallel.accumulate(self.model, enabled=i < len(micro_batches) - 1):
                loss = self.model(block)
                parallel.backward(loss, tokens)
            loss_sum += loss.detach()
        norm = parallel.clip_gradients(self.gpt, t.grad_clip)
        total, stops = parallel.sum(loss_sum, stop.requested)  # the step's one synchronisation
        stop.agreed = stops > 0
        line = {"loss": total / tokens, "lr": rate, "grad_norm": norm.item()}
        if math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]):
            self.optimizer.step()
        else:
            line["skipped"] = True
            self.progress.skipped += 1
            at = self.progress.step + 1
            print_rank0(f"step {at}: the loss or the gradient is not finite; the step is skipped")
        self.progress.step += 1
        self.progress.tokens += tokens
        return line

    def warm_up(self) -> None:
        """Compiles and tunes before the clock starts: one micro-batch, whose gradient is dropped."""
        began, t = time.perf_counter(), self.recipe.train
        positions, _ = next(self.parallel.pieces(t.global_batch_size, t.micro_batch_size))
        with self.parallel.accumulate(self.model, enabled=True):
            loss = self.model(self.parallel.to_device(self.batches.get(self.progress.step, positions)))
            self.parallel.backward(loss, self.recipe.tokens_per_step)
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        print_rank0(f"ready after {duration(time.perf_counter() - began)} of compiling")

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token on the first validation blocks, the same ones every time."""
        val, parallel = self.dataset.val, self.parallel
        loss_sum, tokens = torch.zeros((), dtype=torch.float64, device=parallel.device), 0
        batches = list(
            parallel.pieces(self.recipe.validation_blocks(len(val)), self.recipe.train.micro_batch_size)
        )
        for blocks, counts in progress_bar(batches, desc="validation", leave=False):
            loss = self.model(parallel.to_device(val.gather(blocks)))
            if counts:
                loss_sum += loss
                tokens += len(blocks) * val.seq_len
        total, all_tokens = parallel.sum(loss_sum, tokens)
        return total / all_tokens

    def save(self) -> None:
        """Writes a checkpoint; where that fails, every rank raises UserError."""
        weights, optimizer = self.parallel.whole_state(self.gpt, self.optimizer)
        state = {"optimizer": optimizer, "random": self.parallel.gather(checkpoint.random_state())}
        manifest = {
            **asdict(self.progress),
            "config": self.recipe.to_dict(),
            "data_fingerprint": self.dataset.fingerprint,
            "world_size": self.parallel.world_size,
        }
        tokenizer, keep = self.dataset.tokenizer, self.recipe.train.keep_checkpoints
        self.parallel.on_rank_zero(
            lambda: checkpoint.save(self.folder, self.gpt, weights, tokenizer, state, manifest, keep)
        )

    def throughput(self, since: Progress) -> dict[str, Any]:
        """Tokens a second, and the MFU, since then."""
        seconds = self.progress.train_time - since.train_time
        rate = (self.progress.tokens - since.tokens) / max(seconds, 1e-9)
        used = mfu(rate, self.flops_per_token, self.machine.peak, self.machine.world_size)
        return {"tokens_per_second": rate, "mfu": used}

    def log(self, kind: str, **values: Any) -> None:
        clocks = {key: getattr(self.progress, key) for key in ("step", "tokens", "train_time")}
        for tracker in self.trackers:
            tracker.write({"kind": kind, **clocks, **values})

    def close(self) -> None:
        """Ends the trackers and the other processes, and frees the memory of model and optimizer."""
        for tracker in self.trackers:
            tracker.close()
        del self.model, self.gpt, self.optimizer
        gc.collect()
        self.parallel.close()
