"""How far the rounding of an attention's kernel moves the gradients of a trained model.

    python -m lingpt.tests.models.trained_gradients RECORD.json [--model pythia-160m] [--seq-len 8192]

A short run trains the model; then its parameters' gradients of one more batch, in fp32 with the attention's
PyTorch form in fp32, are compared with those where the attention alone computes in bf16 by its kernel, and
where all of the model does (bf16-mixed). An error is ‖g − exact‖ / ‖exact‖, of all parameters together and of
each layer's projection to q, k and v. Where tokens give decays, `gates` has each layer's error of what they
are made of (z of `gate_bias`), by the kernel and the PyTorch form, against float64 of the same 16-bit inputs.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lingpt.cli.main import main
from lingpt.common.files import write_json
from lingpt.common.run_folder import read_metrics
from lingpt.kernels.linear_attention.call import split_projection
from lingpt.kernels.numerics import state_dtype
from lingpt.models import GPT
from lingpt.models.attention import ours
from lingpt.train import loop

OURS, SDPA = ours.linear_attention_qkv, F.scaled_dot_product_attention
Attend = Callable[..., torch.Tensor]
Compare = Callable[[GPT, torch.Tensor], dict[str, Any]]


def exact_ours(qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return OURS(qkv, *args, **options, backend="chunkwise")


def rounded_ours(qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    backend = "cuda" if qkv.is_cuda else "chunkwise"
    return OURS(qkv.bfloat16(), *args, **options, backend=backend).to(qkv.dtype)


def exact_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return SDPA(q, k, v, **options)


def rounded_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return SDPA(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options).to(q.dtype)


@contextmanager
def attention(of_ours: Attend, of_softmax: Attend) -> Iterator[None]:
    """In place of the models' own."""
    with (
        mock.patch.object(ours, "linear_attention_qkv", of_ours),
        mock.patch.object(F, "scaled_dot_product_attention", of_softmax),
    ):
        yield


def gradients(gpt: GPT, block: torch.Tensor, mixed: bool = False) -> dict[str, torch.Tensor]:
    """Of the mean loss of `block` [B, N + 1]; mixed: as bf16-mixed computes it."""
    gpt.zero_grad()
    with torch.autocast(block.device.type, torch.bfloat16, enabled=mixed):
        logits = gpt(block[:, :-1])
    F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten()).backward()
    return {name: p.grad.double() for name, p in gpt.named_parameters() if p.grad is not None}


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, Any]:
    squares = {
        name: [(found[name] - g).square().sum().item(), g.square().sum().item()] for name, g in exact.items()
    }

    def error(names: list[str]) -> float:
        return (sum(squares[n][0] for n in names) / sum(squares[n][1] for n in names)) ** 0.5

    return {
        "all": error(list(exact)),
        "qkv": [error([name]) for name in exact if name.endswith("qkv.weight")],
    }


def recording(calls: list[dict[str, Any]]) -> Attend:
    """`rounded_ours`, which records what its calls with gates were given, and the gradient of each output."""

    def recorded(qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        o = rounded_ours(qkv, *args, **options)
        if options.get("gate_bias") is not None:
            call = {"qkv": qkv.detach().bfloat16(), "args": args, "options": options}
            o.register_hook(lambda do: call.update(do=do.bfloat16()))
            calls.append(call)
        return o

    return recorded


def gate_errors(call: dict[str, Any]) -> dict[str, float]:
    """Of one call of `recording`."""
    bias = call["options"]["gate_bias"]

    def of_z(dtype: torch.dtype, backend: str) -> torch.Tensor:
        qkv = call["qkv"].to(dtype).requires_grad_()
        options = call["options"] | {"gate_bias": bias.detach().to(state_dtype(dtype)), "backend": backend}
        (d,) = torch.autograd.grad(OURS(qkv, *call["args"], **options), qkv, call["do"].to(dtype))
        return split_projection(d, bias.shape[0], call["options"]["head_size"])[1].double()

    exact, kernel = of_z(torch.float64, "chunkwise"), "cuda" if bias.is_cuda else "chunkwise"
    found = {"kernel": of_z(torch.bfloat16, kernel), "chunkwise": of_z(torch.bfloat16, "chunkwise")}
    return {name: ((d - exact).norm() / exact.norm()).item() for name, d in found.items()}


def compare(gpt: GPT, block: torch.Tensor) -> dict[str, Any]:
    with attention(exact_ours, exact_sdpa):
        exact = gradients(gpt, block)
    calls: list[dict[str, Any]] = []
    with attention(recording(calls), rounded_sdpa):
        alone = gradients(gpt, block)
    return {
        "attention_in_bf16": errors(alone, exact),
        "bf16_mixed": errors(gradients(gpt, block, mixed=True), exact),
        "gates": [gate_errors(call) for call in calls],
    }


def measure(argv: list[str], compare: Compare) -> dict[str, Any]:
    """Trains with `lingpt train *argv`, then compares on the batch that would have been next."""
    train, found = loop.Run.train, {}

    def watched(self: loop.Run, stop: Any) -> bool:
        finished = train(self, stop)
        batch = self.micro_batches.get(self.progress.step, 0)
        assert isinstance(batch, torch.Tensor)
        block = self.parallel.to_device(batch[:1])
        torch.set_float32_matmul_precision("highest")
        found.update(compare(self.gpt, block))
        return finished

    with mock.patch.object(loop.Run, "train", watched):
        if main(["train", "--train.compile", "never", *argv]):
            raise SystemExit("the training failed")
    return found


def record(
    model: str, seq_len: int, steps: int, attentions: list[str], folder: Path, compare: Compare = compare
) -> dict[str, Any]:
    sizes = {
        "--config": model, "--model.block_size": seq_len, "--data.seq_len": seq_len,
        "--data.source": "embedded", "--data.tokenizer": "null", "--train.out_dir": folder,
        "--train.max_steps": steps, "--train.max_tokens": "null", "--train.warmup_steps": steps // 5,
        "--train.micro_batch_size": 2, "--train.global_batch_size": 16, "--train.wandb": "false",
        "--train.eval_interval": 10**6, "--train.eval_tokens": seq_len, "--train.save_interval": 10**6,
        "--train.sample_tokens": 0,
    }  # fmt: skip
    options = [str(word) for pair in sizes.items() for word in pair]
    rows = {}
    for name in attentions:
        rows[name] = measure([*options, "--model.attention", name, "--train.name", name], compare)
        rows[name]["loss"] = read_metrics(folder / name)[-1]["loss"]
    return {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "model": model,
        "seq_len": seq_len,
        "steps": steps,
        "tokens_per_step": 16 * seq_len,
        "attentions": rows,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--model", default="pythia-160m")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--attentions", nargs="+", default=["softmax", "ours", "ours-gated"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        write_json(args.record, record(args.model, args.seq_len, args.steps, args.attentions, Path(runs)))
    for name, row in json.loads(args.record.read_text())["attentions"].items():
        for where in ("attention_in_bf16", "bf16_mixed"):
            found = row[where]
            print(f"{name:12} {where:18} all {found['all']:.2e}, qkv at most {max(found['qkv']):.2e}")
        for layer, found in enumerate(row["gates"]):
            print(
                f"{name:12} gates of layer {layer:2}  " + ", ".join(f"{k} {x:.1e}" for k, x in found.items())
            )
