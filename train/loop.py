"""The training loop, on Lightning Fabric.

Notable:
- gradient accumulation is exact: every token weighs the same, however the batch is cut over devices
- the clock counts training alone: start-up, compiling, validation and checkpoints stand apart, and a resumed
  run's clock goes on from where it was
- what step s trains on is a pure function of (seed, s); on a CPU, a resumed run equals, bit by bit, one that
  never stopped
- a step whose loss or gradient is not finite changes nothing and is counted; ten in a row end the run
- Ctrl-C or SIGTERM: the step is finished, saved, and one line says how to go on; a second one leaves at once
"""

import contextlib
import inspect
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.data import Batches, Dataset, bigram_loss, prepare
from lingpt.models import GPT, Config, generate, load_model, load_weights
from lingpt.train import checkpoint, run_folder
from lingpt.train.config import Recipe, check
from lingpt.train.curves import draw_curves
from lingpt.train.loss import cross_entropy_sum
from lingpt.train.machine import Machine, check_machine, choose_machine, duration
from lingpt.train.optim import learning_rate, make_optimizer
from lingpt.train.plan import format_plan
from lingpt.train.throughput import mfu
from lingpt.train.trackers import Metrics, WandB, read_metrics

MAX_SKIPPED_IN_A_ROW = 10


class NextTokenLoss(nn.Module):
    """`[B, N+1]` token ids → the sum over B·N targets of −log p(token | the ones before), nats."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, block_BN1: torch.Tensor) -> torch.Tensor:
        hidden_BNC = self.gpt.hidden(block_BN1[:, :-1])
        return cross_entropy_sum(hidden_BNC, self.gpt.lm_head.weight, block_BN1[:, 1:])


@dataclass
class Progress:
    """How far a run is: optimiser steps, tokens, seconds of training, and steps that were skipped."""

    step: int = 0
    tokens: int = 0
    train_time: float = 0.0
    skipped: int = 0


def train(recipe: Recipe) -> Path:
    """Trains, or goes on with, the run that `recipe` describes; returns its folder.

    Raises UserError (or the models' and the data's errors) for what the user can mend, and
    KeyboardInterrupt, with the line to show, where a signal stopped the run.
    """
    machine = choose_machine(recipe.train)
    config = model_config(recipe)
    check(recipe, machine.world_size)
    if recipe.train.dry_run:
        say(format_plan(recipe, machine, config))
        return recipe.run_folder
    check_machine(machine, config, recipe)
    # Before the processes are launched: a long tokenisation would run into their timeouts.
    dataset = prepare(recipe.data, padded_vocab_size=config.padded_vocab_size)
    fabric = make_fabric(machine)
    fabric.launch()
    start = on_rank_zero(fabric, lambda: _claim(recipe, machine, dataset))
    run = Run(recipe, machine, config, dataset, fabric, start)
    with stop_signals() as stop, out_of_memory(recipe):
        run.train(stop)
    if run.progress.step < recipe.total_steps:
        run.close()
        if fabric.is_global_zero:  # the others leave quietly: an exit code of theirs would kill this process
            raise KeyboardInterrupt(
                f"stopped and saved at step {run.progress.step} of {recipe.total_steps}; the same command "
                "goes on: "
                f"{_command()}"
            )
        return recipe.run_folder
    run.finish()
    return recipe.run_folder


def model_config(recipe: Recipe) -> Config:
    """The model's config, once the sequence is known to fit it."""
    config = recipe.model.config()
    if recipe.data.seq_len > config.block_size:
        raise UserError(
            f"data.seq_len {recipe.data.seq_len} is longer than the block size {config.block_size} of "
            f"{recipe.model.name}: lower it, or raise --model.block_size"
        )
    return config


def compile_blocks(gpt: GPT, **options: Any) -> None:
    """torch.compile, block by block and in place: one compilation serves all layers, and no key changes."""
    for block in gpt.transformer.h:
        block.compile(dynamic=False, **options)


def make_fabric(machine: Machine) -> Fabric:
    """Fabric over the machine's devices: DDP as soon as there are two processes."""
    several = machine.world_size > 1
    if several:  # Fabric builds DDP on a stream of its own, and autograd's last nodes stay there: harmless
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    # The buffers are constants: no need to broadcast them at every forward. PyTorch 2.13 renamed the option.
    known = inspect.signature(DistributedDataParallel).parameters
    no_broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    strategy = DDPStrategy(**{no_broadcast: False, "gradient_as_bucket_view": True}) if several else "auto"
    return Fabric(
        accelerator=machine.accelerator,
        devices=machine.devices,
        num_nodes=machine.num_nodes,
        strategy=strategy,
        precision=machine.precision,
    )


def _claim(recipe: Recipe, machine: Machine, dataset: Dataset) -> Path | None:
    start = run_folder.claim(recipe, dataset.fingerprint, say)
    run_folder.record(recipe, machine, dataset.describe())
    return start


class Run:
    """A run in progress: model, optimizer, data and trackers, and what happens to them."""

    def __init__(
        self,
        recipe: Recipe,
        machine: Machine,
        config: Config,
        dataset: Dataset,
        fabric: Fabric,
        resume_from: Path | None,
    ) -> None:
        self.recipe, self.machine, self.dataset, self.fabric = recipe, machine, dataset, fabric
        self.folder, self.progress = recipe.run_folder, Progress()
        fabric.seed_everything(recipe.train.seed + fabric.global_rank, verbose=False)
        self.gpt = self._weights(config, resume_from)
        self.flops_per_token = self.gpt.flops_per_token(recipe.data.seq_len)
        if {"auto": machine.accelerator == "cuda", "always": True, "never": False}[recipe.train.compile]:
            compile_blocks(self.gpt)
        self.model = fabric.setup_module(NextTokenLoss(self.gpt))
        optimizer = make_optimizer(self.gpt, recipe.train)
        self.optimizer = fabric.setup_optimizers(optimizer)
        if resume_from:
            told, state = checkpoint.manifest(resume_from), checkpoint.load_state(resume_from)
            optimizer.load_state_dict(state["optimizer"])
            checkpoint.restore_random_state(state["random"], fabric.global_rank)
            self.progress = Progress(**{key: told[key] for key in asdict(self.progress)})
        self.batches = Batches(dataset.train, recipe.train.seed, recipe.train.global_batch_size)
        self.trackers: list[Metrics | WandB] = []
        if fabric.is_global_zero:
            self.trackers.append(Metrics(self.folder, self.progress.step))
            if recipe.train.wandb:
                self.trackers.append(WandB(recipe, self.folder, say))

    def _weights(self, config: Config, resume_from: Path | None) -> GPT:
        device, init_from = self.fabric.device, self.recipe.train.init_from
        if resume_from:
            return load_model(resume_from, attention=self.recipe.model.attention, device=device)
        gpt = GPT.create(config, self.recipe.train.seed, device)
        if init_from:
            say(f"init_from: {load_weights(gpt, init_from)}")
        return gpt

    # -- steps ----------------------------------------------------------------------------------------------

    def train(self, stop: "Stop") -> None:
        """Optimiser steps until the last one, or until `stop` is requested on any rank."""
        t, total = self.recipe.train, self.recipe.total_steps
        if self.progress.step >= total:
            say(
                f"nothing to train: the run is at step {self.progress.step} of {total} "
                "(raise --train.max_steps)"
            )
            return
        self._describe()
        if self.machine.accelerator == "cuda":
            self._warm_up()
        skipped_in_a_row, logged = 0, Progress(**asdict(self.progress))
        bar = tqdm(
            total=total, initial=self.progress.step, unit="step", desc=self.folder.name, disable=self._quiet
        )
        with bar:
            while self.progress.step < total and not stop.requested:
                began = time.perf_counter()
                line = self.step(stop)
                self.progress.train_time += time.perf_counter() - began
                skipped_in_a_row = skipped_in_a_row + 1 if line.get("skipped") else 0
                if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                    raise UserError(self._diverged())
                step, last = self.progress.step, self.progress.step == total
                if step % t.log_interval == 0 or last or stop.requested:
                    seconds = self.progress.train_time - logged.train_time
                    rate = (self.progress.tokens - logged.tokens) / max(seconds, 1e-9)
                    used = mfu(rate, self.flops_per_token, self.machine.peak, self.machine.world_size)
                    line |= {"tokens_per_second": rate, "mfu": used}
                    self.log("train", **line)
                    bar.set_postfix_str(_postfix(line))
                    logged = Progress(**asdict(self.progress))
                bar.update()
                if step % t.eval_interval == 0 or last:
                    line |= {"val": self.validate()}
                    say(f"step {step}/{total} · loss {line['loss']:.4f} · validation {line['val']:.4f}")
                    self.log("val", loss=line["val"])
                if step % t.save_interval == 0 or last or stop.requested:
                    self.save()

    def step(self, stop: "Stop") -> dict[str, Any]:
        """One optimiser step on the next global batch; its loss, learning rate and gradient norm."""
        t, n_rank = self.recipe.train, self.fabric.world_size
        rate = learning_rate(self.progress.step, self.recipe.total_steps, t)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        micro_batches = list(self._micro_batches())
        for i, positions in enumerate(micro_batches):
            block = self._to_device(self.batches.get(self.progress.step, positions))
            with self.fabric.no_backward_sync(self.model, enabled=n_rank > 1 and i < len(micro_batches) - 1):
                loss = self.model(block)
                # DDP takes the mean over ranks; this makes it the mean over all tokens of the global batch.
                self.fabric.backward(loss * (n_rank / self.recipe.tokens_per_step))
            loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.gpt.parameters(), t.grad_clip)
        told = torch.stack([loss_sum, loss_sum.new_tensor(float(stop.requested))])
        loss_sum, stopped = self.fabric.all_reduce(
            told, reduce_op="sum"
        ).tolist()  # the step's one synchronisation
        stop.requested = stopped > 0
        line = {"loss": loss_sum / self.recipe.tokens_per_step, "lr": rate, "grad_norm": norm.item()}
        if math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]):
            self.optimizer.step()
        else:
            line["skipped"] = True
            self.progress.skipped += 1
            say(f"step {self.progress.step + 1}: the loss or the gradient is not finite; the step is skipped")
        self.progress.step += 1
        self.progress.tokens += self.recipe.tokens_per_step
        return line

    def _micro_batches(self) -> Iterator[range]:
        """This rank's positions in the global batch, a micro-batch at a time."""
        micro, share = (
            self.recipe.train.micro_batch_size,
            self.recipe.train.global_batch_size // self.fabric.world_size,
        )
        first = self.fabric.global_rank * share
        for start in range(first, first + share, micro):
            yield range(start, start + micro)

    def _to_device(self, block: torch.Tensor) -> torch.Tensor:
        if self.machine.accelerator == "cuda":
            block = block.pin_memory()
        return block.to(self.fabric.device, non_blocking=True)

    def _warm_up(self) -> None:
        """Compiles and tunes before the clock starts: one micro-batch, whose gradient is dropped."""
        began = time.perf_counter()
        with self.fabric.no_backward_sync(self.model, enabled=self.fabric.world_size > 1):
            block = self._to_device(self.batches.get(self.progress.step, next(self._micro_batches())))
            self.fabric.backward(self.model(block))
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        say(f"ready after {duration(time.perf_counter() - began)} of compiling")

    # -- between steps --------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token on the fixed validation blocks, each on one rank, reduced over all."""
        blocks = self._validation_blocks()
        own = blocks[self.fabric.global_rank :: self.fabric.world_size]
        total = torch.zeros(2, dtype=torch.float64, device=self.fabric.device)
        loss_of = NextTokenLoss(self.gpt)  # not through DDP: ranks may have unequal numbers of blocks
        micro = self.recipe.train.micro_batch_size
        for start in tqdm(range(0, len(own), micro), desc="validation", leave=False, disable=self._quiet):
            block = torch.stack([self.dataset.val[i] for i in own[start : start + micro]])
            with self.fabric.autocast():
                loss = loss_of(self._to_device(block))
            total += torch.stack([loss.double(), loss.new_tensor(block[:, 1:].numel(), dtype=torch.float64)])
        loss_sum, tokens = self.fabric.all_reduce(total, reduce_op="sum").tolist()
        return loss_sum / tokens

    def _validation_blocks(self) -> range:
        wanted = self.recipe.train.eval_tokens // self.recipe.data.seq_len or len(self.dataset.val)
        return range(min(wanted, len(self.dataset.val)))

    def save(self) -> None:
        """Writes a checkpoint; where that fails, every rank raises UserError."""
        random = checkpoint.random_states()
        told = {
            **asdict(self.progress),
            "config": self.recipe.to_dict(),
            "data_fingerprint": self.dataset.fingerprint,
            "world_size": self.fabric.world_size,
        }
        on_rank_zero(
            self.fabric,
            lambda: checkpoint.save(
                self.folder,
                self.gpt,
                self.dataset.tokenizer.save,
                {"optimizer": self.optimizer.state_dict(), "random": random},
                told,
                self.recipe.train.keep_checkpoints,
            ),
        )

    def log(self, kind: str, **values: Any) -> None:
        clocks = {key: getattr(self.progress, key) for key in ("step", "tokens", "train_time")}
        for tracker in self.trackers:
            tracker.write({"kind": kind, **clocks, **values})

    @property
    def _quiet(self) -> bool | None:
        """tqdm's `disable`: only rank zero draws, and only on a terminal."""
        return None if self.fabric.is_global_zero else True

    def _describe(self) -> None:
        m, r = self.machine, self.recipe
        left = r.total_steps - self.progress.step
        say(
            f"{r.model.name} with {r.attention}: {self.gpt.num_parameters() / 1e6:.1f} M parameters on "
            f"{m.world_size} × {m.name}, {m.precision}; {left} steps of {r.tokens_per_step:,} tokens"
        )

    def _diverged(self) -> str:
        whole = checkpoint.checkpoints(self.folder)
        newest = f"the newest checkpoint is {whole[-1]}" if whole else "there is no checkpoint yet"
        return (
            f"the loss or the gradient was not finite for {MAX_SKIPPED_IN_A_ROW} steps up to step "
            f"{self.progress.step}; {newest}: lower --train.learning_rate, or try --train.precision 32-true, "
            "under another --train.name"
        )

    # -- the end --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Samples, plot, and what the run came to."""
        lines = read_metrics(self.folder) if self.fabric.is_global_zero else []
        self.close()
        if not self.fabric.is_global_zero:
            return
        if self.recipe.train.sample_tokens:
            text = sample_text(self.gpt, self.dataset, self.recipe.train.sample_tokens, self.fabric)
            (self.folder / "samples.txt").write_text(text)
            say(f"\n{text}\n")
        val = next((line["loss"] for line in reversed(lines) if line["kind"] == "val"), None)
        if val is not None:
            say(f"validation loss {val:.4f} nats/token after {self.progress.step} steps", end="")
            if self.recipe.data.source == "embedded":
                bigram = bigram_loss(self.dataset, num_blocks=len(self._validation_blocks()))
                say(f"; an interpolated bigram model of the same tokens: {bigram:.4f}", end="")
            say("")
        plot = self.folder / "curves.png"
        draw_curves([self.folder], plot)
        say(f"training took {duration(self.progress.train_time)}\nrun   {self.folder}\nplot  {plot}")

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.fabric.barrier()
            # DDP's reducer must not be the last to hold the group: it would destroy it with the GIL held, and
            # gloo's thread, which is waited for there, may be waiting for the GIL.
            del self.model
            torch.distributed.destroy_process_group()


@torch.no_grad()
def sample_text(gpt: GPT, dataset: Dataset, max_tokens: int, fabric: Fabric) -> str:
    """Two samples: a continuation of the first validation tokens, and a document from its beginning."""
    tokenizer = dataset.tokenizer
    max_tokens = min(max_tokens, gpt.max_seq_length - 1)
    opening = dataset.val[0][: max(1, min(32, gpt.max_seq_length - max_tokens))]
    parts = []
    for title, prompt in (("continued", opening), ("from the beginning", torch.tensor([tokenizer.eos_id]))):
        # Eager: decoding would compile anew for every length.
        with fabric.autocast(), torch.compiler.set_stance("force_eager"):
            ids = generate(gpt, prompt[None].to(fabric.device), max_tokens, temperature=0.8, top_k=50)[
                0
            ].tolist()
        told = tokenizer.decode(ids[: len(prompt)]) if title == "continued" else ""
        parts.append(f"--- {title} ---\n{told}⟨…⟩{tokenizer.decode(ids[len(prompt) :])}")
    return "\n".join(parts)


@dataclass
class Stop:
    """Whether a signal has asked the run to end."""

    requested: bool = False


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """While inside, the first SIGINT or SIGTERM sets `requested`; a second one acts as it always does."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        stop.requested = True
        for number, handler in before.items():
            signal.signal(number, handler)
        say("stopping: the step is finished and saved first; once more to leave at once")

    try:
        for number in before:
            signal.signal(number, request)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def out_of_memory(recipe: Recipe) -> Iterator[None]:
    """Turns a GPU's running out of memory into a UserError that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        micro = recipe.train.micro_batch_size
        mend = (
            f"--train.micro_batch_size {micro // 2}" if micro > 1 else "a smaller model or shorter sequences"
        )
        raise UserError(f"the GPU's memory is too small for micro-batches of {micro}: try {mend}") from error


def on_rank_zero(fabric: Fabric, function) -> Any:
    """`function()` on rank zero, its result or its UserError on all ranks: none is left waiting."""
    result = error = None
    if fabric.is_global_zero:
        try:
            result = function()
        except UserError as failed:
            error = str(failed)
    result, error = fabric.broadcast((result, error))
    if error is not None:
        raise UserError(error)
    return result


def say(message: str, end: str = "\n") -> None:
    """To stdout, around the progress bar, from the first process alone."""
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0:
        tqdm.write(message, end=end)
        sys.stdout.flush()


def _postfix(line: dict[str, Any]) -> str:
    used = f" · MFU {line['mfu']:.0%}" if line["mfu"] is not None else ""
    return f"loss {line['loss']:.3f} · {line['tokens_per_second'] / 1e3:.1f} k tokens/s{used}"


def _command() -> str:
    return shlex.join(["lingpt", *sys.argv[1:]])
