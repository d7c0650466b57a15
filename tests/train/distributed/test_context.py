"""Pieces of sequences on several processes are the whole sequences: outputs, losses and every gradient."""

import os
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
from lingpt.tests.forked import fork_script, free_port
from lingpt.train.distributed.context import apply, connect, own_piece
from lingpt.train.loss import NextTokenLoss, cross_entropy_sum
from lingpt.train.start import check_recipe

FORMS = (
    "ours", "ours+learnable_b+short_conv+conv_silu", "ours-decay+output_gate+constant=false", "ours-gated",
    "ours-gated+output_gate+short_conv+learnable_b", "gla", "gla+short_conv+input_gate+value_residual",
    "softmax", "softmax-best", "hybrid+value_residual", "ours-gated+output_gate+short_conv+input_gate",
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


def perturbed(form: str) -> GPT:
    """In float64, as some gradients are small sums of large terms; gates and offsets are rounded to fp32."""
    sizes = {"n_layer": 4, "n_query_groups": 1} if form.startswith("hybrid") else {"n_layer": 2}
    model = GPT.create(ModelArgs("demo", form, n_embd=32, n_head=2, vocab_size=64, **sizes).config(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # also what starts at zero
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def sequences(groups: int) -> torch.Tensor:
    """Two for each group of pieces."""
    return torch.randint(64, (2 * groups, N + 1), generator=torch.Generator().manual_seed(2))


def loss_and_gradients(model: GPT, batches: list[torch.Tensor], packed: bool) -> torch.Tensor:
    """Summed loss and each parameter's gradient, flat; of whole sequences or documents packed into them."""

    def loss(blocks: torch.Tensor) -> torch.Tensor:
        if not packed:
            return NextTokenLoss(model)(blocks)
        borders = torch.tensor([0, 1, 30, N, 2 * N - 41, 2 * N, 2 * N, 2 * N])  # in the two sequences
        hidden = model.hidden(blocks[:, :-1], cu_seqlens=borders)
        return cross_entropy_sum(hidden, model.lm_head.weight, blocks[:, 1:])

    total = sum(loss(blocks) for blocks in batches)
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return torch.cat([total.detach()[None], *(x.flatten() for x in gradients)])


def check_model(form: str, context: Context, first: int, expected: list[torch.Tensor]) -> None:
    """Loss and gradients of two sequences per group of pieces, whole ones and documents packed into them (as
    many kinds as are expected); this group's are those from `first`."""
    model = perturbed(form)
    apply(model, context)
    own = own_piece(sequences(RANKS // context.size)[first : first + 2], context)
    for packed, whole in enumerate(expected):
        model.recompute_blocks = not packed
        together = loss_and_gradients(model, [own], bool(packed))
        dist.all_reduce(together)  # once, as each takes longer than the model
        torch.testing.assert_close(together[0], whole[0], rtol=1e-9, atol=0)
        sizes = [1, *(parameter.numel() for parameter in model.parameters())]
        parts = zip(together.split(sizes)[1:], whole.split(sizes)[1:], strict=True)
        for (name, _), (found, gradient) in zip(model.named_parameters(), parts, strict=True):
            error = (found - gradient).norm() / gradient.norm().clamp(min=1e-3)
            assert error < 2e-7, (form, name, context.size, error)


def check_rank(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    cases = [(size, FORMS[-1], False) for size in (2, 4)]
    cases += [(RANKS, form, packed) for form in FORMS for packed in (False, True)]
    # Each rank computes some of what is expected, and tells the others.
    share = {}
    for size, form, packed in cases[rank::RANKS]:
        batches = list(sequences(RANKS // size).split(2))
        share[size, form, packed] = loss_and_gradients(perturbed(form), batches, packed)
    shares: list[dict] = [{}] * RANKS
    dist.all_gather_object(shares, share)
    expected = {case: whole for share in shares for case, whole in share.items()}
    for size in (2, 4, RANKS):
        context = connect(size, rank, timedelta(minutes=2))
        check_operators(context)
        for form in FORMS if size == RANKS else FORMS[-1:]:
            wholes = [expected[size, form, packed] for packed in (False, True)[: 1 + (size == RANKS)]]
            check_model(form, context, 2 * (rank // size), wholes)
    dist.destroy_process_group()


@pytest.mark.slow
def test_pieces_are_the_whole(tmp_path: Path):
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    code = f"import sys\nfrom {MODULE} import check_rank\ncheck_rank(int(sys.argv[1]))"
    started = [fork_script(code, str(rank), folder=tmp_path, env=env) for rank in range(RANKS)]
    outcomes = [process.end() for process in started]
    assert [outcome.code for outcome in outcomes] == [0] * RANKS, outcomes[0].output[-3000:]


def test_what_cannot_be_divided_is_one_line(make_recipe, monkeypatch):
    for options, line in (
        ({"devices": 1}, "context_parallel is 2, and the run has 1 device, no multiple of it"),
        ({"devices": 3}, "the run has 3 devices, no multiple of it"),
        ({"devices": 6, "context_parallel": 6}, "does not divide into 6 pieces of 4 tokens or more"),
        ({"devices": 16, "context_parallel": 16}, "does not divide into 16 pieces of 4 tokens or more"),
        ({"devices": 2, "teacher": "runs/t"}, "train.teacher needs whole sequences"),
        ({"devices": 6}, "micro_batch_size 4 × 3 groups of 2"),
    ):
        with pytest.raises(UserError, match=line):
            check_recipe(make_recipe(**{"context_parallel": 2, **options}))
    check_recipe(make_recipe(context_parallel=2, devices=2))
    monkeypatch.setattr(ATTENTIONS["ours"], "context_parallel", False)
    with pytest.raises(UserError, match="ours needs whole sequences"):
        check_recipe(make_recipe(context_parallel=2, devices=2))
