"""`lingpt replay`: what a step of a run was trained on, and what it does to the weights that it met.

What a step trains on depends on nothing but the seed and the step, so any step can be looked at, skipped or
not. The weights are those of the nearest checkpoint before it: the step's own where a checkpoint lies right
before it, or where the steps between were skipped.
"""

from pathlib import Path
from typing import Any

import torch

from lingpt.common.devices import find_device
from lingpt.common.errors import UserError
from lingpt.common.run_folder import check_undamaged, checkpoint_step, checkpoints, read_metrics
from lingpt.data import Batches, prepare
from lingpt.models import load_model
from lingpt.train.checkpoint import load_manifest
from lingpt.train.config import recipe_from_dict
from lingpt.train.loss import NextTokenLoss

TEXT_TOKENS = 64  # of a sample that are shown


def replay(run: Path, step: int, samples: int = 8, device: str = "auto") -> str:
    """Step `step` (1-based, as in metrics.jsonl) as text: loss, gradient norm, and the worst `samples`.

    In fp32, on `device`. Raises UserError where the run has no checkpoint before the step.
    """
    if step < 1:
        raise UserError(f"--step {step}: steps count from 1, as in metrics.jsonl")
    if samples < 1:
        raise UserError(f"--samples {samples}: show at least 1")
    before = [path for path in checkpoints(run) if (checkpoint_step(path) or 0) < step]
    if not before:
        raise UserError(f"{run} has no checkpoint before step {step}: give a later one, or train it again")
    check_undamaged(before[-1])
    manifest = load_manifest(before[-1])
    recipe = recipe_from_dict(manifest["config"])
    where = find_device(device)
    dataset = prepare(recipe.data)
    if dataset.fingerprint != manifest["data_fingerprint"]:
        raise UserError(
            f"{run} was trained on other data (fingerprint {manifest['data_fingerprint']}, now "
            f"{dataset.fingerprint}): restore the corpus and the tokenizer it had"
        )
    gpt = load_model(before[-1], device=where, dtype=torch.float32)
    batches = Batches(dataset.train, recipe.train.seed, recipe.train.global_batch_size)
    model, tokens = NextTokenLoss(gpt), recipe.tokens_per_step
    losses: list[float] = []
    for position in range(recipe.train.global_batch_size):
        block = batches.get(step - 1, [position]).to(where)
        loss = model(block)
        (loss / tokens).backward()
        losses.append(loss.item() / dataset.train.seq_len)
    norm = torch.nn.utils.get_total_norm([p.grad for p in gpt.parameters() if p.grad is not None]).item()
    blocks = batches.indices(step - 1)
    worst = sorted(range(len(losses)), key=lambda i: -losses[i] if losses[i] == losses[i] else -torch.inf)
    lines = [
        f"{run.name}, step {step}, with the weights of {before[-1].name}, in fp32",
        f"loss {sum(losses) / len(losses):.4f} nats/token, gradient norm {norm:.4g} before clipping at "
        f"{recipe.train.grad_clip:g}; when it was trained: {_as_logged(run, step)}",
        f"the {min(samples, len(losses))} samples of the highest loss, of {len(losses)}:",
    ]
    for position in worst[:samples]:
        sample = batches.get(step - 1, [position])[0][:TEXT_TOKENS]
        text = " ".join(dataset.tokenizer.decode(sample.tolist()).split())
        lines.append(f"  {losses[position]:8.4f}  position {position}, block {blocks[position]}: {text} …")
    return "\n".join(lines)


def _as_logged(run: Path, step: int) -> str:
    found = [line for line in read_metrics(run) if line["step"] == step and line.get("kind") == "train"]
    return _numbers(found[-1]) if found else "not logged"


def _numbers(line: dict[str, Any]) -> str:
    if line.get("skipped") or None in (line["loss"], line["grad_norm"]):
        return "not finite, and skipped"
    return f"loss {line['loss']:.4f}, gradient norm {line['grad_norm']:.4g}"
