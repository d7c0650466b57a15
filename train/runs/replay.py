"""`lingpt replay`: shows what a step of a run was trained on, with losses and gradient norm.

The batch of a step depends only on the seed and the step, so any step can be replayed, even a skipped one.
The weights are those of the nearest checkpoint before it; they are exactly the step's weights if the
checkpoint is right before it, or the steps between were skipped.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lingpt.common.devices import device_name, find_device
from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object
from lingpt.common.format import counted
from lingpt.common.run_folder import (
    ENVIRONMENT,
    check_undamaged,
    checkpoint_step,
    read_metrics,
    require_newest_checkpoint,
    valid_checkpoints,
)
from lingpt.data import Batch, BatchSampler, prepare
from lingpt.models import GPT, Config, load_model
from lingpt.train.config import Recipe, recipe_from_dict
from lingpt.train.loss import NextTokenLoss
from lingpt.train.model import attention_kernels
from lingpt.train.runs.checkpoint import load_manifest
from lingpt.train.step import segment_losses

TEXT_TOKENS = 64  # tokens shown of each sample


def replay(
    run: Path, step: int, samples: int = 8, device: str = "auto", moved: Mapping[str, Any] | None = None
) -> str:
    """Step `step` (1-based, as in metrics.jsonl) as text: loss, gradient norm, and the worst `samples`.

    Computed in fp32, on `device`, by the kernels named in the first line; another line says how this differs
    from training. `moved`: where the data is now, by fields of `DataConfig`. Raises UserError if the run has
    not trained the step or has no checkpoint before it, if that is damaged, or if the data has changed.
    """
    if step < 1:
        raise UserError(f"--step {step}: steps count from 1, as in metrics.jsonl")
    if samples < 1:
        raise UserError(f"--samples {samples}: show at least 1")
    checkpoint = _checkpoint_before(run, step)
    manifest = load_manifest(checkpoint)
    recipe = recipe_from_dict(manifest["config"])
    where = find_device(device)
    dataset = prepare(replace(recipe.data, **(moved or {})))
    if dataset.fingerprint != manifest["data_fingerprint"]:
        raise UserError(
            f"{run} was trained on other data (fingerprint {manifest['data_fingerprint']}, now "
            f"{dataset.fingerprint}): restore the corpus and the tokenizer it had, or say where they are "
            "(--data.source, --data.tokenizer)"
        )
    # In evaluation mode: the recipe's training kernel may not support fp32 (flash, cudnn).
    gpt = load_model(checkpoint, device=where, dtype=torch.float32).eval()
    any_kernel = Config.from_dict(
        gpt.config.to_dict() | dict.fromkeys(("sdpa", "backend", "gla_backend"), "auto")
    )
    kernels = attention_kernels(any_kernel, where, "32-true")
    otherwise = _not_as_trained(run, step, checkpoint, kernels, where, recipe.train.teacher)
    batches = BatchSampler(dataset.train, recipe.train.seed, recipe.train.global_batch_size)
    blocks, targets = batches.indices(step - 1), batches.num_targets(step - 1)
    gathered = (dataset.train.gather([block]).to(where) for block in blocks)
    sums, norm = _losses_and_norm(gpt, recipe, gathered, targets)
    losses = [x / max(1, dataset.train.num_targets([b])) for x, b in zip(sums, blocks, strict=True)]
    worst = sorted(range(len(losses)), key=lambda i: -losses[i] if losses[i] == losses[i] else -torch.inf)
    lines = [
        f"{run.name}, step {step}, with the weights of {checkpoint.name}, in fp32 ({_by(kernels)})",
        f"loss {sum(sums) / targets:.4f} nats/token, gradient norm {norm:.4g} before clipping at "
        f"{recipe.train.grad_clip:g}; when it was trained: {_as_logged(run, step)}",
        *otherwise,
        f"{counted(min(samples, len(losses)), 'sample')} of the highest loss, of {len(losses)}:",
    ]
    for position in worst[:samples]:
        sample = dataset.train[blocks[position]][:TEXT_TOKENS]
        text = " ".join(dataset.tokenizer.decode(sample.tolist()).split())
        lines.append(f"  {losses[position]:8.4f}  position {position}, block {blocks[position]}: {text} …")
    return "\n".join(lines)


def _losses_and_norm(
    gpt: GPT, recipe: Recipe, samples: Iterable[torch.Tensor | Batch], targets: int
) -> tuple[list[float], float]:
    """Each sample's loss, summed over its tokens, and the norm of the gradient of all over `targets`."""
    model, sums = NextTokenLoss(gpt, z_loss=recipe.train.z_loss), list[float]()
    for sample in samples:
        sums.append(0.0)
        for loss in segment_losses(model, gpt, sample, recipe.train.segments):
            (loss / targets).backward()
            sums[-1] += loss.item()
    gradients = [p.grad for p in gpt.parameters() if p.grad is not None]
    return sums, torch.nn.utils.get_total_norm(gradients).item()


def _checkpoint_before(run: Path, step: int) -> Path:
    whole, lines = valid_checkpoints(run), read_metrics(run)
    steps = [checkpoint_step(path) or 0 for path in whole]
    before = [path for path, saved in zip(whole, steps, strict=True) if saved < step]
    if not before:
        require_newest_checkpoint(run)
        raise UserError(f"{run} has no checkpoint before step {step}: its oldest is of step {steps[0]}")
    if step > (newest := max([*steps, *(line["step"] for line in lines)])):
        raise UserError(f"--step {step}: {run} has {counted(newest, 'step')}")
    check_undamaged(before[-1])
    return before[-1]


def _not_as_trained(
    run: Path, step: int, checkpoint: Path, kernels: dict[str, str], device: torch.device, teacher: str | None
) -> list[str]:
    """A line on why the numbers may differ from those in training; none if they do not."""
    why = []
    skipped = {line["step"] for line in read_metrics(run) if line.get("skipped")}
    if between := set(range((checkpoint_step(checkpoint) or 0) + 1, step)) - skipped:
        why.append(f"{counted(len(between), 'step')} of training between these weights and those that it met")
    if teacher is not None:  # it may be gone, and this loss says more about a text
        why.append(f"to imitate {teacher} then, the loss of the next token now")
    here = _made_on({"name": device_name(device), "precision": "32-true"}, kernels)
    try:
        record = read_json_object(run / ENVIRONMENT)
        starts = [
            _made_on(start["hardware"], start["attention_kernels"])
            for start in [*record.get("earlier", []), record]
        ]
    except (UserError, KeyError, TypeError, AttributeError):
        why.append(f"{run / ENVIRONMENT} does not say on what then, on {here} now")
    else:
        if others := list(dict.fromkeys(start for start in starts if start != here)):
            why.append(f"on {', '.join(others)} then, on {here} now")
    return [f"not as it was trained: {'; '.join(why)}"] if why else []


def _made_on(hardware: dict[str, Any], kernels: dict[str, str]) -> str:
    """What determines rounding, as `NVIDIA H200 in bf16-mixed (softmax by cudnn)`."""
    name = "CPU" if str(hardware["name"]).lower().startswith("cpu") else hardware["name"]
    return f"{name} in {hardware['precision']} ({_by(kernels)})"


def _by(kernels: dict[str, str]) -> str:
    return ", ".join(f"{attention} by {kernel}" for attention, kernel in kernels.items())


def _as_logged(run: Path, step: int) -> str:
    found = [line for line in read_metrics(run) if line["step"] == step and line["kind"] == "train"]
    if not found:
        return "not logged"
    line = found[-1]
    if line.get("skipped") or None in (line["loss"], line["grad_norm"]):
        return "not finite, and skipped"
    return f"loss {line['loss']:.4f}, gradient norm {line['grad_norm']:.4g}"
