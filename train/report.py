"""The messages of a run to its user: at the start, during training, when it stops, and the final report."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lingpt.common.errors import UserError
from lingpt.common.files import write_errors, write_text
from lingpt.common.format import counted, duration, scaled
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
from lingpt.plots.curve_figure import draw_curves
from lingpt.train.config import Recipe
from lingpt.train.console import print_rank0
from lingpt.train.distributed.launch import launched
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.planning.machine import Machine


def describe(recipe: Recipe, machine: Machine, gpt: GPT, kernels: dict[str, str], steps: int) -> str:
    """How a run begins: model, kernels of its attentions, devices, what is left to train, its teacher."""
    shared = "" if machine.strategy == "single" else f"{machine.strategy.upper()}, "
    by = [kernel if len(kernels) == 1 else f"{name} by {kernel}" for name, kernel in kernels.items()]
    text = (
        f"{recipe.model.name} with {recipe.attention_form} ({', '.join(by)}): "
        f"{gpt.num_parameters() / 1e6:.1f} M parameters on {machine.world_size} × {machine.name}, "
        f"{shared}{machine.precision}; {counted(steps, 'step')} of {recipe.tokens_per_step:,} tokens"
    )
    if recipe.train.teacher:
        text += f"\nlearns from {recipe.train.teacher}: only the validation loss is that of the next token"
    return text


def speed(line: dict[str, Any], recipe: Recipe, step: int) -> str:
    """Tokens per second, MFU, peak memory of a device, and the time left, as text."""
    rate = line["tokens_per_second"]
    used = f" · MFU {line['mfu']:.0%}" if line["mfu"] is not None else ""
    left = duration((recipe.total_steps - step) * recipe.tokens_per_step / max(rate, 1e-9))
    return f" · {scaled(rate, ' tokens/s')}{used} · {line['peak_memory'] / 1e9:.1f} GB · {left} left"


class StatusLine:
    """Says how far a run is: at its first step, at its tenth, and then once a minute.

    began: the step that this start resumes from.
    """

    EVERY = 60.0  # seconds

    def __init__(self, began: int) -> None:
        self._began, self._last = began, time.monotonic()

    def restart(self) -> None:
        """Restarts the minute: another line has just reported the progress."""
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        return step - self._began in (1, 10) or time.monotonic() - self._last >= self.EVERY

    def print_if_due(self, step: int, line: str) -> None:
        if self.is_due(step):
            print_rank0(line)
            self.restart()


def mixed_devices_message(devices: list[str]) -> str | None:
    """The message on devices of different kinds; None if they are equal."""
    names = sorted(set(devices))
    if len(names) == 1:
        return None
    kinds = ", ".join(f"{devices.count(name)} × {name}" for name in names)
    return f"the devices differ ({kinds}): every step waits for the slowest, and the MFU is not theirs"


def diverged_message(run: Path, step: int, skipped: int) -> str:
    """The message on why the run ended and the options; the same command would only repeat the same steps."""
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
    at = f"at step {step} of {recipe.total_steps}"
    if not recipe.train.keep_checkpoints:
        return f"stopped {at}; nothing is saved, as train.keep_checkpoints is 0"
    return f"stopped and saved {at}; {resume_message(recipe)}"


def resume_message(recipe: Recipe) -> str:
    """The command that resumes the run from its newest checkpoint: the same one, unless it started from
    scratch or from a named checkpoint and would do so again."""
    same = recipe.train.resume == "auto" or not newest_checkpoint(recipe.run_folder)
    if launched():  # the launcher's command line is not known here
        return f"the same command{'' if same else ' with --train.resume auto'} resumes it"
    argv = ["lingpt", *sys.argv[1:], *([] if same else ["--train.resume", "auto"])]
    return f"{'the same' if same else 'this'} command resumes it: {shlex.join(argv)}"


@contextlib.contextmanager
def how_to_resume(recipe: Recipe) -> Iterator[None]:
    """Adds to a UserError of the block how to resume the run once its cause is fixed."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; then {resume_message(recipe)}") from error


def final_report(recipe: Recipe, dataset: Dataset, parallel: Parallel, train_time: float) -> None:
    """Prints samples and the validation loss, and draws the curves, from the run's folder, so that rank zero
    needs no other rank.

    train_time: total seconds of training.
    """
    run, t = recipe.run_folder, recipe.train
    checkpoint = newest_checkpoint(run)
    if t.sample_tokens and checkpoint:
        try:
            gpt = load_model(checkpoint, device=parallel.device)
            text = sample_text(gpt, dataset, t.sample_tokens, parallel)
        except torch.OutOfMemoryError:  # another process uses the GPU; the run is complete anyway
            print_rank0(f"no samples: out of memory; `lingpt generate {run} --device cpu` needs no GPU")
        except UserError as error:  # the run diverged in its last steps, for example
            print_rank0(f"no samples: {error}")
        else:
            with write_errors(run / SAMPLES):
                write_text(run / SAMPLES, text)
            print_rank0(f"\n{text}\n")
    lines = read_metrics(run)
    validations = [line for line in lines if line["kind"] == "val" and line.get("loss") is not None]
    if validations:
        last = validations[-1]
        text = f"validation loss {last['loss']:.4f} nats/token after {counted(last['step'], 'step')}"
        bigram = baseline_loss(dataset, recipe.validation_blocks(len(dataset.val)))
        if bigram is not None:
            text += f"; an interpolated bigram model of the same tokens: {bigram:.4f}"
        print_rank0(text)
    draw_curves([run], run / CURVES)
    print_rank0(f"training took {duration(train_time)}\nrun   {run}\nplot  {run / CURVES}")


def sample_text(gpt: GPT, dataset: Dataset, max_tokens: int, parallel: Parallel) -> str:
    """Two samples: a continuation of the first validation tokens, and a document from its beginning."""
    tokenizer = dataset.tokenizer
    max_tokens = min(max_tokens, gpt.max_seq_length - 1)
    opening = dataset.val[0][: max(1, min(32, gpt.max_seq_length - max_tokens))]

    def complete(prompt: torch.Tensor) -> str:
        with parallel.autocast():
            # Eager: next to a training run that fills the memory, there is no room for graphs.
            idx_1N = prompt[None].to(parallel.device)
            known = tokenizer.vocab_size
            ids = generate(gpt, idx_1N, max_tokens, temperature=0.8, top_k=50, vocab_size=known, graph=False)
        return tokenizer.decode(ids[0, len(prompt) :].tolist())

    return (
        f"--- continued ---\n{tokenizer.decode(opening.tolist())}⟨…⟩{complete(opening)}\n"
        f"--- from the beginning ---\n⟨…⟩{complete(torch.tensor([tokenizer.eos_id]))}"
    )
