"""The forms of linear attention are one function: definition, chunkwise, recurrent; whole and in pieces."""

import subprocess
import sys

import pytest
import torch

from lingpt.kernels.linear_attention import (
    LinearAttentionState,
    linear_attention,
    linear_attention_with_state,
)
from lingpt.kernels.linear_attention.chunkwise import CHUNK
from lingpt.tests import oracles
from lingpt.tests.oracles import FORMS, assert_same, by_definition, randn, relative

AROUND_A_CHUNK = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7)


def inputs(N, B=2, H=3, D=8, dtype=torch.float64):
    """q, k and v."""
    return oracles.inputs(B, N, H, D, dtype)[:3]


def some_state(normalize_qk=True):
    return oracles.some_state(2, 3, 8, torch.float64, normalize_qk=normalize_qk)


def test_the_reference_is_the_definition():
    q, k, v = inputs(9)
    b, gamma = (torch.tensor(x, dtype=torch.float64) for x in ([0.8, 1.0, -0.5], [1.0, 0.7, 0.2]))
    o = linear_attention(q, k, v, b, log_decay=gamma.log(), backend="reference")
    torch.testing.assert_close(o, by_definition(q, k, v, b, gamma))


@pytest.mark.parametrize("backend", [form for form in FORMS if form != "reference"])
@pytest.mark.parametrize("N", AROUND_A_CHUNK)
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("normalize_qk", [True, False])
def test_every_form_equals_the_reference_in_float64(backend, N, decay, with_state, normalize_qk):
    q, k, v = inputs(N)
    k = k if normalize_qk else 0.05 * k
    options = dict(
        b=torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64),
        log_decay=torch.tensor([0.0, -0.01, -2.0], dtype=torch.float64) if decay else None,
        normalize_qk=normalize_qk,
        initial_state=some_state(normalize_qk=normalize_qk) if with_state else None,
    )
    expected = linear_attention_with_state(q, k, v, backend="reference", **options)
    assert_same(
        linear_attention_with_state(q, k, v, backend=backend, **options), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("N", [1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("with_state", [False, True])
def test_without_a_causal_mask_every_token_sees_all(N, with_state):
    q, k, v = inputs(N)
    state = some_state() if with_state else None
    options = dict(causal=False, initial_state=state)
    result = linear_attention_with_state(q, k, v, backend="chunkwise", **options)
    assert_same(
        result, linear_attention_with_state(q, k, v, backend="reference", **options), rtol=1e-10, atol=1e-10
    )
    # The last row of the causal form sees all too: its query, asked in place of every other, gives the same.
    causal = linear_attention(q, k, v, initial_state=state)
    torch.testing.assert_close(result[0][:, -1], causal[:, -1])


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_low_precision_is_rounded_once_and_no_more(backend, dtype, tolerance):
    q, k, v = inputs(200, dtype=dtype)
    exact, exact_state = linear_attention_with_state(*(x.double() for x in (q, k, v)), backend="reference")
    o, state = linear_attention_with_state(q, k, v, backend=backend)
    assert o.dtype == dtype and all(x.dtype == torch.float32 for x in state)
    torch.testing.assert_close(o.double(), exact, rtol=tolerance, atol=tolerance)
    for x, y in zip(state, exact_state, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("decay", [False, True])
def test_pieces_with_the_state_carried_equal_the_whole(backend, decay):
    q, k, v = inputs(150)
    options = dict(log_decay=[-0.1, -0.01, -1.0] if decay else None, backend=backend)
    whole = linear_attention_with_state(q, k, v, **options)
    state, outputs = None, []
    for piece in (slice(0, 1), slice(1, 70), slice(70, 70), slice(70, 134), slice(134, 150)):
        o, state = linear_attention_with_state(
            q[:, piece], k[:, piece], v[:, piece], initial_state=state, **options
        )
        outputs.append(o)
    assert_same((torch.cat(outputs, 1), state), whole, rtol=1e-10, atol=1e-10)


def test_states_add_up_each_decayed_to_the_end():
    q, k, v = inputs(100)
    log_decay = torch.tensor([0.0, -0.05, -0.3], dtype=torch.float64)

    def state(piece):
        options = dict(log_decay=log_decay, backend="chunkwise")
        return linear_attention_with_state(q[:, piece], k[:, piece], v[:, piece], **options)[1]

    first, second, whole = state(slice(0, 30)), state(slice(30, 100)), state(slice(0, 100))
    for x, y, total in zip(first, second, whole, strict=True):
        fade = (70 * log_decay).exp().view(1, -1, *[1] * (x.ndim - 2))
        torch.testing.assert_close(fade * x + y, total)


def test_the_count_is_the_number_of_tokens():
    q, k, v = inputs(70)
    assert linear_attention_with_state(q, k, v)[1].n.unique().tolist() == [70]


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("with_state", [False, True])
def test_no_tokens_leave_the_state_as_it_was(backend, with_state):
    q, k, v = (x.requires_grad_() for x in inputs(0))
    before = some_state() if with_state else LinearAttentionState.zeros(2, 3, 8, dtype=torch.float64)
    options = dict(backend=backend, log_decay=[-0.1] * 3)
    o, after = linear_attention_with_state(q, k, v, initial_state=before if with_state else None, **options)
    assert o.shape == (2, 0, 3, 8) and o.requires_grad
    for x, y in zip(after, before, strict=True):
        torch.testing.assert_close(x, y)


def opposite_and_zero_rows(N, dtype):
    """q = −k in head 0 (g would be 0 at the first token); zero rows of q, k and both in heads 1, 2 and 3."""
    q, k, v = inputs(N, H=4, dtype=dtype)
    # Every key the same and every query against it: each weight is the smallest there is.
    k[:, 1:, 0] = k[:, :1, 0]
    q[:, :, 0] = -k[:, :, 0]
    q[:, ::3, 1] = 0
    k[:, ::2, 2] = 0
    q[:, :, 3] = k[:, :, 3] = 0
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", FORMS)
def test_rows_without_direction_or_against_it_stay_within_the_values(backend, dtype):
    q, k, v = opposite_and_zero_rows(130, dtype)
    exact = linear_attention(*(x.double() for x in (q, k, v)), backend="reference")
    o = linear_attention(q, k, v, backend=backend)
    # A weight of 2⁻⁶, what is left of 1 − (1 − 2⁻⁶), has lost 6 bits. Then o is rounded once, to its dtype.
    inside = torch.float64 if dtype == torch.float64 else torch.float32
    rounding = 2**7 * torch.finfo(inside).eps + torch.finfo(dtype).eps
    assert o.isfinite().all() and o.abs().max() <= v.abs().max() * (1 + rounding)
    torch.testing.assert_close(o.double(), exact, rtol=rounding, atol=rounding)
    torch.testing.assert_close(o[:, 0], v[:, 0], rtol=rounding, atol=rounding)  # one token: its own value
    mean = v[:, :, 3].double().cumsum(1) / torch.arange(1, 131)[:, None]  # no direction: the mean
    torch.testing.assert_close(o[:, :, 3].double(), mean, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("decay", [None, [-0.1, -0.2]])
@pytest.mark.parametrize("backend", FORMS)
def test_a_key_that_is_nan_reaches_no_earlier_token(backend, decay):
    """Guards: a mask that multiplies: 0 · NaN is NaN."""
    q, k, v = (randn(1, 8, 2, 4, seed=seed) for seed in range(3))
    k[0, 5] = float("nan")
    o = linear_attention(q, k, v, log_decay=decay, backend=backend)
    assert o[:, :5].isfinite().all() and o[:, 5:].isnan().all()


@pytest.mark.parametrize("backend", FORMS)
def test_what_comes_out_is_laid_out_alike(backend):
    """Guards: `o.view(B, N, H * D)` failed with one backend; and resetting the count of one sequence, in
    place, reset that of all."""
    q, k, v = (randn(2, 8, 2, 4, seed=seed) for seed in range(3))
    o, state = linear_attention_with_state(q, k, v, backend=backend)
    assert o.is_contiguous() and all(x.is_contiguous() for x in state)


@pytest.mark.parametrize("backend", FORMS)
def test_a_form_runs_without_data_and_in_one_graph(backend):
    """On the meta device, and compiled. Guards: the reference did neither."""
    q, k, v = (randn(2, 8, 2, 4, seed=seed) for seed in range(3))
    assert linear_attention(*(x.to("meta") for x in (q, k, v)), backend=backend).shape == q.shape

    def attend(q):
        return linear_attention(q, k, v, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attend(q))


def test_a_long_sequence_does_not_drift():
    """The state is summed in fp32: a count in bf16 would stop at 256."""
    x = inputs(32768, B=1, H=1, D=16, dtype=torch.float32)
    q, k, v = ((y + mean).bfloat16() for y, mean in zip(x, (0.3, 0.3, 1.0), strict=True))
    o = linear_attention(q, k, v)[:, -2048:].double()
    state = linear_attention_with_state(*(x[:, :-2048].double() for x in (q, k, v)))[1]
    exact = linear_attention(*(x[:, -2048:].double() for x in (q, k, v)), initial_state=state)
    assert relative(o, exact) < 3e-3


def test_strided_views_are_taken_as_they_are():
    qkv = torch.randn(2, 70, 3, 3, 8, dtype=torch.float64)
    views = qkv.unbind(2)
    transposed = [x.mT.contiguous().mT for x in views]  # not even the last dimension contiguous
    expected = linear_attention(*(x.contiguous() for x in views))
    torch.testing.assert_close(linear_attention(*views), expected)
    torch.testing.assert_close(linear_attention(*transposed), expected)


def test_a_strong_decay_underflows_to_nothing_and_not_to_nan():
    q, k, v = inputs(130, dtype=torch.float32)
    o, state = linear_attention_with_state(q, k, v, log_decay=[-200.0] * 3, backend="chunkwise")
    torch.testing.assert_close(o, v)  # only the token itself is left
    assert all(x.isfinite().all() for x in state)


def test_one_token_with_a_state_decodes_recurrently_on_a_cpu(monkeypatch):
    from lingpt.kernels.linear_attention import recurrent

    called, forward = [], recurrent.forward
    monkeypatch.setattr(recurrent, "forward", lambda call: called.append(1) or forward(call))
    q, k, v = inputs(1)
    linear_attention(q, k, v)
    assert not called
    linear_attention(q, k, v, initial_state=some_state())
    assert called


def test_a_program_that_carries_a_state_is_exported(tmp_path):
    class Step(torch.nn.Module):
        def forward(self, q, k, v, state):
            return linear_attention_with_state(q, k, v, initial_state=state)

    q, k, v = (randn(1, 3, 2, 4, seed=seed) for seed in range(3))
    state = linear_attention_with_state(q, k, v)[1]
    torch.export.save(torch.export.export(Step(), (q, k, v, state)), tmp_path / "step.pt2")
    o, final = torch.export.load(tmp_path / "step.pt2").module()(q, k, v, state)
    expected = Step()(q, k, v, state)
    assert isinstance(final, LinearAttentionState)
    torch.testing.assert_close((o, *final), (expected[0], *expected[1]))


@pytest.mark.slow
def test_a_state_is_saved_and_loaded(tmp_path):
    """By torch.load as it is by default, which refuses classes that nobody has vouched for: in a process that
    has only imported this one."""
    path = tmp_path / "state.pt"
    torch.save(some_state(), path)
    load = (
        "from lingpt import LinearAttentionState as L; import torch; print(isinstance(torch.load({!r}), L))"
    )
    command = [sys.executable, "-P", "-c", load.format(str(path))]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.stdout.strip() == "True", shown.stderr
