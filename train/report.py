"""What a run tells its user: when it starts, while it trains, when it stops, and what came out."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.common.files import write_errors, write_text
from lingpt.common.format import counted, duration
from lingpt.common.run_folder import (
    CURVES,
    SAMPLES,
    checkpoint_step,
    newest_checkpoint,
    read_metrics,
    valid_checkpoints,
)
from lingpt.data import Dataset, baseline_loss
from lingpt.models import GPT, generate, load_model
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0
from lingpt.train.curve_figure import draw_curves
from lingpt.train.distributed.launch import launched
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.machine import Machine


def describe(recipe: Recipe, machine: Machine, gpt: GPT, kernels: dict[str, str], steps: int) -> str:
    """Model, devices, and what is left to train. kernels: each attention's."""
    shared = "" if machine.strategy == "single" else f"{machine.strategy.upper()}, "
    by = [kernel if len(kernels) == 1 else f"{name} by {kernel}" for name, kernel in kernels.items()]
    return (
        f"{recipe.model.name} with {recipe.attention_form} ({', '.join(by)}): "
        f"{gpt.num_parameters() / 1e6:.1f} M parameters on {machine.world_size} × {machine.name}, "
        f"{shared}{machine.precision}; {counted(steps, 'step')} of {recipe.tokens_per_step:,} tokens"
    )


def speed(line: dict[str, Any], recipe: Recipe, step: int, memory: int) -> str:
    """Tokens a second, the MFU, the most memory that a device has used (bytes), and the time that is left."""
    rate = line["tokens_per_second"]
    used = f" · MFU {line['mfu']:.0%}" if line["mfu"] is not None else ""
    left = duration((recipe.total_steps - step) * recipe.tokens_per_step / max(rate, 1e-9))
    return f" · {rate / 1e3:.1f} k tokens/s{used} · {memory / 1e9:.1f} GB · {left} left"


class StatusLine:
    """What the bar says, as a line of its own once a minute: for a batch job, which has no terminal."""

    EVERY = 60.0  # seconds

    def __init__(self, bar: tqdm) -> None:
        self.drawn = not bar.disable
        self.told()

    def told(self) -> None:
        """Another line has just said how far the run is."""
        self.last = time.monotonic()

    def tell(self, line: str) -> None:
        if not self.drawn and time.monotonic() - self.last >= self.EVERY:
            print_rank0(line)
            self.told()


def mixed_devices_message(devices: list[str]) -> str | None:
    """The line on devices that differ; None where they do not."""
    names = sorted(set(devices))
    if len(names) == 1:
        return None
    counted = ", ".join(f"{devices.count(name)} × {name}" for name in names)
    return f"the devices differ ({counted}): every step waits for the slowest, and the MFU is not theirs"


def diverged_message(run: Path, step: int, skipped: int) -> str:
    """Why the run has ended, and the ways from here; the same command would only do the same steps again."""
    newest = newest_checkpoint(run)
    left = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
    good = [c for c in valid_checkpoints(run) if (checkpoint_step(c) or 0) <= step - skipped]
    weights = f" --train.init_from {good[-1]}" if good else ""
    again = f"; --train.resume {good[-1]} tries once more" if good else ""
    return (
        f"the loss or the gradient was not finite for {skipped} steps up to step {step}; {left}: lower "
        f"--train.learning_rate, or try --train.precision 32-true, under another --train.name{weights}; "
        f"`lingpt replay {run} --step {step - skipped + 1}` shows the first of these steps{again}"
    )


def stopped_message(recipe: Recipe, step: int) -> str:
    return f"stopped and saved at step {step} of {recipe.total_steps}; {resume_message(recipe)}"


def resume_message(recipe: Recipe) -> str:
    """The command that goes on with the run from its newest checkpoint.

    That is not the same one where this start was from scratch (`resume never`) or from a named checkpoint: it
    would start over, or go back.
    """
    from_newest = recipe.train.resume == "auto" or not newest_checkpoint(recipe.run_folder)
    if launched():  # whose own command line is not known here
        return f"the same command{'' if from_newest else ' with --train.resume auto'} goes on"
    argv = sys.argv[1:]
    if from_newest:
        return f"the same command goes on: {shlex.join(['lingpt', *argv])}"
    option = "--train.resume"
    argv = [
        word
        for before, word in zip(["", *argv], argv, strict=False)
        if option not in (before, word) and not word.startswith(f"{option}=")
    ]
    return f"this command goes on: {shlex.join(['lingpt', *argv, option, 'auto'])}"


@contextlib.contextmanager
def how_to_go_on(recipe: Recipe) -> Iterator[None]:
    """A UserError of the block also says how the run goes on once its cause is gone."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; then {resume_message(recipe)}") from error


def final_report(recipe: Recipe, dataset: Dataset, parallel: Parallel, train_time: float) -> None:
    """Samples, the validation loss, the curves. From the run's folder, so that rank zero needs no other rank.

    train_time: seconds of training in all.
    """
    run, t = recipe.run_folder, recipe.train
    checkpoint = newest_checkpoint(run)
    if t.sample_tokens and checkpoint:
        try:
            gpt = load_model(checkpoint, device=parallel.device)
            text = sample_text(gpt, dataset, t.sample_tokens, parallel)
        except torch.OutOfMemoryError:  # something else has come to the GPU; the run is done all the same
            print_rank0(f"no samples: out of memory; `lingpt generate {run} --device cpu` needs no GPU")
        else:
            with write_errors(run / SAMPLES):
                write_text(run / SAMPLES, text)
            print_rank0(f"\n{text}\n")
    validations = [line for line in read_metrics(run) if line["kind"] == "val" and line["loss"] is not None]
    if validations:
        last = validations[-1]
        text = f"validation loss {last['loss']:.4f} nats/token after {last['step']} steps"
        bigram = baseline_loss(dataset, recipe.validation_blocks(len(dataset.val)))
        if bigram is not None:
            text += f"; an interpolated bigram model of the same tokens: {bigram:.4f}"
        print_rank0(text)
    draw_curves([run], run / CURVES)
    print_rank0(f"training took {duration(train_time)}\nrun   {run}\nplot  {run / CURVES}")


@torch.no_grad()
def sample_text(gpt: GPT, dataset: Dataset, max_tokens: int, parallel: Parallel) -> str:
    """Two samples: a continuation of the first validation tokens, and a document from its beginning."""
    tokenizer = dataset.tokenizer
    max_tokens = min(max_tokens, gpt.max_seq_length - 1)
    opening = dataset.val[0][: max(1, min(32, gpt.max_seq_length - max_tokens))]

    def complete(prompt: torch.Tensor) -> str:
        with parallel.autocast():
            # Eager: beside a training that fills the memory, graphs have no room.
            idx_1N = prompt[None].to(parallel.device)
            ids = generate(gpt, idx_1N, max_tokens, temperature=0.8, top_k=50, graph=False)
        return tokenizer.decode(ids[0, len(prompt) :].tolist())

    return (
        f"--- continued ---\n{tokenizer.decode(opening.tolist())}⟨…⟩{complete(opening)}\n"
        f"--- from the beginning ---\n⟨…⟩{complete(torch.tensor([tokenizer.eos_id]))}"
    )
