"""Pieces of sequences on several processes are the whole sequences: outputs, losses and every gradient."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lingpt.common.errors import UserError
from lingpt.kernels.context_parallel import Context
from lingpt.kernels.gated_linear_attention import gated_linear_attention
from lingpt.kernels.linear_attention import linear_attention
from lingpt.models import ATTENTIONS, GPT, ModelArgs
from lingpt.tests.forked import fork_script
from lingpt.train.distributed.context import apply, connect, own_piece
from lingpt.train.loss import NextTokenLoss, cross_entropy_sum
from lingpt.train.start import check_recipe

FORMS = (
    "ours", "ours+learnable_b+short_conv+conv_silu", "ours-decay+output_gate+constant=false", "ours-gated",
    "ours-gated+output_gate+short_conv+learnable_b", "gla", "gla+short_conv+input_gate", "softmax",
    "softmax-best", "hybrid", "ours-gated+output_gate+short_conv+input_gate",
    "softmax-best+softmax_window=8", "softmax+softmax_window=25",
)  # fmt: skip
RANKS, N = 8, 72
MODULE = "lingpt.tests.train.distributed.test_context"


def operators(context: Context | None) -> list[list[torch.Tensor]]:
    """For each form of the operators o and the gradients of its inputs, in float64; with a context of the
    piece, without of the whole."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for form in ("plain", "per head", "per token", "free", "gla"):
        q, k, v, gate, do = (torch.randn(2, N, 2, 4, generator=generator).double() for _ in range(5))
        a, b = (torch.randn(2, generator=generator).double().requires_grad_() for _ in "ab")
        inputs = [x if context is None else piece(x, context) for x in (q, k, v, gate)]
        q, k, v, gate = (x.detach().requires_grad_() for x in inputs)
        log_decay = -gate[..., 0].square()
        reset = torch.zeros(N, dtype=torch.bool).index_fill(0, torch.tensor([N // 2 + 3]), True)
        reset = reset if context is None else piece(reset[None], context)[0]
        if form == "gla":
            o = gated_linear_attention(q, k, v, -gate.square(), context=context)
        else:
            options = {
                "plain": {"b": b.tanh()},
                "per head": {"b": 0.5, "log_decay": torch.tensor([-0.1, -0.5]).double()},
                "per token": {"b": b.tanh(), "log_decay": log_decay},
                "free": {
                    "a": a, "b": b, "normalize": False,
                    "log_decay": log_decay.masked_fill(reset[None, :, None], -torch.inf),
                },
            }[form]  # fmt: skip
            o = linear_attention(q, k, v, context=context, **options)
        (o * (do if context is None else piece(do, context))).sum().backward()
        for x in (a, b):
            if x.grad is not None and context is not None:
                dist.all_reduce(x.grad, group=context.group)
        found.append([o.detach(), *(x.grad for x in (q, k, v, gate, a, b) if x.grad is not None)])
    return found


def piece(x_BN: torch.Tensor, context: Context) -> torch.Tensor:
    return x_BN.chunk(context.size, dim=1)[context.rank]


def check_operators(context: Context) -> None:
    for whole, parts in zip(operators(None), operators(context), strict=True):
        for expected, got in zip(whole, parts, strict=True):
            expected = expected if expected.ndim == 1 else piece(expected, context)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def check_model(form: str, context: Context, first: int, packed: bool) -> None:
    """Loss and gradients of two sequences per group of pieces, whole ones or documents packed into them; this
    group's are those from `first`."""
    sizes = {"n_layer": 4, "n_query_groups": 1} if form == "hybrid" else {"n_layer": 2}
    model = GPT.create(ModelArgs("demo", form, n_embd=32, n_head=2, vocab_size=64, **sizes).config(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # also what starts at zero
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    blocks = torch.randint(64, (2 * RANKS // context.size, N + 1), generator=generator)

    def loss(blocks: torch.Tensor, borders: list[int]) -> torch.Tensor:
        if not packed:
            return NextTokenLoss(model)(blocks)
        hidden = model.hidden(blocks[:, :-1], cu_seqlens=torch.tensor(borders))
        return cross_entropy_sum(hidden, model.lm_head.weight, blocks[:, 1:])

    borders = [0, 1, 30, N, 2 * N - 41, 2 * N, 2 * N, 2 * N]  # in the two sequences of a group
    whole = sum(loss(blocks[i : i + 2], borders) for i in range(0, len(blocks), 2))
    whole.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.recompute_blocks = not packed
    apply(model, context)
    part = loss(own_piece(blocks[first : first + 2], context), borders)
    part.backward()
    total = part.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, whole.detach(), rtol=1e-6, atol=0)
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        assert parameter.grad is not None and gradient is not None, (form, name)
        dist.all_reduce(parameter.grad)
        error = (parameter.grad - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert error < 2e-5, (form, name, context.size, error)


def check_rank(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for size in (2, 4, RANKS):
        context = connect(size, rank, timedelta(minutes=2))
        check_operators(context)
        for i, form in enumerate(FORMS * 2 if size == RANKS else FORMS[-1:]):
            check_model(form, context, first=2 * (rank // size), packed=i >= len(FORMS))
    dist.destroy_process_group()


@pytest.mark.slow
def test_pieces_are_the_whole(tmp_path: Path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    code = f"import sys\nfrom {MODULE} import check_rank\ncheck_rank(int(sys.argv[1]))"
    started = [fork_script(code, str(rank), folder=tmp_path, env=env) for rank in range(RANKS)]
    outcomes = [process.end() for process in started]
    assert [outcome.code for outcome in outcomes] == [0] * RANKS, outcomes[0].output[-3000:]


def test_what_cannot_be_divided_is_one_line(make_recipe, monkeypatch):
    for options, line in (
        ({"devices": 1}, "context_parallel is 2, and the run has 1 device, no multiple of it"),
        ({"devices": 3}, "the run has 3 devices, no multiple of it"),
        ({"devices": 6, "context_parallel": 6}, "does not divide into 6 pieces of 4 tokens or more"),
        ({"devices": 6}, "micro_batch_size 4 × 3 groups of 2"),
    ):
        with pytest.raises(UserError, match=line):
            check_recipe(make_recipe(**{"context_parallel": 2, **options}))
    check_recipe(make_recipe(context_parallel=2, devices=2))
    monkeypatch.setattr(ATTENTIONS["ours"], "context_parallel", False)
    with pytest.raises(UserError, match="ours needs whole sequences"):
        check_recipe(make_recipe(context_parallel=2, devices=2))
