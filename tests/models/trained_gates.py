"""How far the rounding of `gla`'s kernel moves its results on a trained model, gates' gradients among them.

    python -m lingpt.tests.models.trained_gates RECORD.json

A short run trains the model (trained_gradients.py); then each layer's q, k, v and log decays of one more
sequence, and the gradient of its output, go through the kernel, FLA's (on a GPU), and the definition with
factors rounded to bf16: of the whole sequence, and in chunks of 64 tokens, where states are rounded, too. An
error is ‖x − exact‖ / ‖exact‖, exact in float64 of the same 16-bit inputs.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lingpt.common.files import write_json
from lingpt.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_with_state,
)
from lingpt.models import GPT
from lingpt.models.attention import gla
from lingpt.tests.models.trained_gradients import gradients, record
from lingpt.tests.oracles import gated_quantised, relative

NAMES = "o", "dq", "dk", "dv", "dgate"


def run(call: dict[str, Any], dtype: torch.dtype, backend: str) -> dict[str, torch.Tensor]:
    inputs = [x.to(dtype).requires_grad_() for x in call["inputs"]]
    o = gated_linear_attention(*inputs, backend=backend)
    return dict(zip(NAMES, (o, *torch.autograd.grad(o, inputs, call["do"].to(dtype))), strict=True))


def rounded(call: dict[str, Any], chunk: int) -> dict[str, torch.Tensor]:
    """The quadratic form within chunks, of 16-bit factors, exact states before and after each among them."""
    chunks = list(zip(*(x.split(chunk, 1) for x in (*call["inputs"], call["do"])), strict=True))
    q, _, v, *_ = chunks[0]
    state = torch.zeros(q.shape[0], *q.shape[2:], v.shape[3], dtype=torch.float64, device=q.device)
    states, outputs = [state.requires_grad_()], []
    for *inputs, _ in chunks:
        x = [t.double() for t in inputs]
        o, state = gated_linear_attention_with_state(*x, initial_state=states[-1], backend="chunkwise")
        outputs.append(o), states.append(state)
    ends = torch.autograd.grad(outputs, states[:-1], [do.double() for *_, do in chunks])
    after = (*ends[1:], torch.zeros_like(ends[0]))
    scale = q.shape[-1] ** -0.5
    found = [
        gated_quantised(*inputs, states[i].detach(), do, after[i], scale)
        for i, (*inputs, do) in enumerate(chunks)
    ]
    return {name: torch.cat([x[name] for x in found], 1) for name in NAMES}


def layer_errors(call: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Result → the error of the kernel, and of the rounded form, whole and in chunks; of one layer."""
    exact = run(call, torch.float64, "chunkwise")
    forms = {"kernel": run(call, torch.bfloat16, "auto")}
    if call["do"].is_cuda:
        forms["fla"] = run(call, torch.bfloat16, "fla")
    forms |= {"rounded": rounded(call, len(call["do"][0])), "in_chunks": rounded(call, 64)}
    return {name: {form: relative(x[name], y) for form, x in forms.items()} for name, y in exact.items()}


def compare(gpt: GPT, block: torch.Tensor) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []

    def recorded(*inputs: torch.Tensor, **_: Any) -> torch.Tensor:
        call: dict[str, Any] = {"inputs": [x.detach().bfloat16() for x in inputs]}
        o = gated_linear_attention(*inputs)
        o.register_hook(lambda do: call.update(do=do.bfloat16()))
        calls.append(call)
        return o

    with mock.patch.object(gla, "gated_linear_attention", recorded):
        gradients(gpt, block, mixed=True)
    return {"layers": [layer_errors(call) for call in calls]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--model", default="pythia-160m")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--attentions", nargs="+", default=["gla", "linear-best"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        found = record(args.model, args.seq_len, args.steps, args.attentions, Path(runs), compare)
    write_json(args.record, found)
    for name, row in found["attentions"].items():
        for layer, errors in enumerate(row["layers"]):
            print(
                f"{name:12} layer {layer:2}  "
                + ", ".join(f"{x} {' / '.join(f'{y:.1e}' for y in e.values())}" for x, e in errors.items())
            )
