"""Guards that our numbers are lm-eval's: equal to HFLM on the same weights, whatever the batch."""

import copy
import random

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance

from lingpt.common.errors import UserError
from lingpt.data import load_tokenizer
from lingpt.eval.lm import LinGPTLM
from lingpt.models import export_hf

from .conftest import BLOCK_SIZE, sentence, tiny_model


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def pairs(seed=0):
    """Contexts and continuations with every kind of edge: spaces, nothing, newlines, too long to fit."""
    rng = random.Random(seed)
    made = [
        (sentence(rng, rng.randrange(1, 12)), " " + sentence(rng, rng.randrange(1, 6))) for _ in range(20)
    ]
    return [
        *made,
        ("Question: the sun?\nAnswer:", " A"),
        ("Question: the sun?\nAnswer:", " B"),  # shares its row with the one above
        ("trailing spaces  ", "belong to the next word"),
        ("trailing newline\n\n", "stone"),
        ("no space bet", "ween"),
        ("", "nothing before"),
        ("", "<|endoftext|>the end first"),
        ("<|endoftext|>", " rain"),
        (sentence(rng, 90), " " + sentence(rng, 3)),  # cut on the left
        (sentence(rng, 90), " " + sentence(rng, 30)),
    ]


def make_hflm(folder):
    """lm-eval's own adapter over a GPT-NeoX folder; it needs `accelerate`, one of our dev dependencies."""
    pytest.importorskip("accelerate", reason="lm-eval's HFLM needs accelerate: pip install -e .[dev]")
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    model = transformers.GPTNeoXForCausalLM.from_pretrained(folder)
    # Rows of the embedding beyond the tokenizer's are padding: LinGPT never generates them.
    model.generation_config.suppress_tokens = list(range(len(tokenizer), model.config.vocab_size))
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, device="cpu")


@pytest.fixture(scope="module")
def hflm(hf_folder):
    return make_hflm(hf_folder)


@pytest.fixture(scope="module")
def ours(softmax_model, hf_folder):
    return LinGPTLM(softmax_model, load_tokenizer(hf_folder), batch_tokens=256)


def test_loglikelihood_is_hflms(ours, hflm):
    """Values within 1e-4 and the same greedy flags, with a context cut to the block size among them."""
    assert ours.max_length == hflm.max_length == BLOCK_SIZE
    expected = hflm.loglikelihood(instances("loglikelihood", pairs()), disable_tqdm=True)
    ours.cut_prompts = 0
    found = ours.loglikelihood(instances("loglikelihood", pairs()))
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-4)
    assert [f[1] for f in found] == [e[1] for e in expected]
    ours._loglikelihood_tokens([(None, [1] * BLOCK_SIZE, [2])])  # which just fits
    assert ours.cut_prompts == 2
    assert len({round(f[0], 3) for f in found}) > 20  # random weights do tell the pairs apart


def test_greedy_flags(ours, hflm):
    """A continuation that greedy decoding gives is flagged, one with another first or last token is not."""
    text = hflm.generate_until(
        instances("generate_until", [("the sun warms", {"until": [], "max_gen_toks": 4})]), disable_tqdm=True
    )[0]
    tokens = ours.tok_encode("the sun warms")
    for _ in range(4):
        tokens.append(int(ours.model(torch.tensor([tokens]))[0, -1].argmax()))
    best = tokens[-4:]
    assert text == ours.text_tokenizer.decode(best)
    other = [*best[:-1], (best[-1] + 1) % 320]
    begins = [(best[0] + 1) % 320]
    begins.append(int(ours.model(torch.tensor([tokens[:-4] + begins]))[0, -1].argmax()))
    request = [(None, tokens[:-4], continuation) for continuation in (best, other, begins)]
    found, expected = (
        ours._loglikelihood_tokens(request),
        hflm._loglikelihood_tokens(request, disable_tqdm=True),
    )
    assert [flag for _, flag in found] == [flag for _, flag in expected] == [True, False, False]


def test_rolling_is_hflms(ours, hflm):
    """Whole texts: empty, shorter than a window, exactly one, one token more, several windows."""
    rng = random.Random(3)
    long = ours.tok_encode(sentence(rng, 200))
    exact = [ours.text_tokenizer.decode(long[:n]) for n in (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1)]
    texts = [("",), ("rain",), *((text,) for text in exact), (ours.text_tokenizer.decode(long),)]
    expected = hflm.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-5)


def test_generation_is_hflms(ours, hflm):
    """Greedy text, cut at the stop sequence; contexts of several lengths in one call."""
    rng = random.Random(4)
    contexts = [sentence(rng, n) for n in (2, 5, 5, 9, 60)]
    options = [{"until": [" "], "max_gen_toks": 12}, {"until": ["ar", "\n"], "max_gen_toks": 20}]
    requests = [(context, option) for context in contexts for option in options]
    # HFLM pads a batch on the left, which moves its positions: one at a time it is the definition.
    expected = [hflm.generate_until(instances("generate_until", [r]), disable_tqdm=True)[0] for r in requests]
    assert ours.generate_until(instances("generate_until", requests)) == expected


@pytest.mark.parametrize("attention", ["ours", ["ours-gated", "softmax"], ["gla", "unified"]], ids=str)
def test_padding_does_not_change_what_is_generated(attention, tokenizer):
    """Contexts of several lengths in one batch, and one at a time: no state reads the padding."""
    rng = random.Random(5)
    options = {"until": [], "max_gen_toks": 8}
    requests = [(sentence(rng, n), options) for n in (1, 3, 3, 7, 30)]
    lm = LinGPTLM(tiny_model(attention), tokenizer)
    expected = [lm.generate_until(instances("generate_until", [request]))[0] for request in requests]
    assert lm.generate_until(instances("generate_until", requests)) == expected


def test_a_batch_of_generation_has_room_for_the_longest(softmax_model, tokenizer, monkeypatch):
    """Guards: batches larger than asked for where a short context comes before a long one. End-of-text is a
    stop sequence."""
    rng, sizes = random.Random(6), list[int]()
    lm = LinGPTLM(softmax_model, tokenizer, batch_tokens=100)

    def generate(contexts, new, until):
        assert until == (tokenizer.decode([tokenizer.eos_id]),)
        sizes.append(len(contexts) * (max(map(len, contexts)) + new))
        return [""] * len(contexts)

    monkeypatch.setattr(lm, "_generate", generate)
    options = {"until": [], "max_gen_toks": 8}
    lm.generate_until(instances("generate_until", [(sentence(rng, n), options) for n in (2, 20, 3, 9, 4)]))
    assert max(sizes) <= 100 and len(sizes) < 5


def test_encoding_is_lm_evals(ours):
    """The batched encoding cuts every pair where lm-eval's own `_encode_pair` does."""
    for (context, continuation), found in zip(pairs(), ours.encode_pairs(pairs()), strict=True):
        if context:
            assert found == ours._encode_pair(context, continuation)
    assert ours.encode_pairs([("", "rain")])[0][0] == [ours.eot_token_id]


@pytest.mark.parametrize("batch_tokens", [1, 100, 256, 4096])
def test_scores_do_not_depend_on_the_batch(linear_model, tokenizer, batch_tokens):
    """One row at a time or everything at once: the same to 1e-5, in the same order; padding does not leak."""
    reference = LinGPTLM(linear_model, tokenizer, batch_tokens=1000)
    lm = LinGPTLM(linear_model, tokenizer, batch_tokens=batch_tokens)
    expected = reference.loglikelihood(instances("loglikelihood", pairs()))
    shuffled = random.Random(0).sample(range(len(expected)), len(expected))
    found = lm.loglikelihood(instances("loglikelihood", [pairs()[i] for i in shuffled]))
    assert [f[0] for f in found] == pytest.approx([expected[i][0] for i in shuffled], rel=1e-5, abs=1e-5)
    assert [f[1] for f in found] == [expected[i][1] for i in shuffled]


def test_a_shared_context_is_computed_once(softmax_model, tokenizer, monkeypatch):
    """Four one-token answers to one question are one row through the model."""
    lm = LinGPTLM(softmax_model, tokenizer)
    rows, hidden = [], softmax_model.hidden
    monkeypatch.setattr(softmax_model, "hidden", lambda idx: rows.append(len(idx)) or hidden(idx))
    scores = lm._loglikelihood_tokens([(None, [5, 6, 7], [token]) for token in range(10, 14)])
    assert rows == [1]
    logprob = softmax_model(torch.tensor([[5, 6, 7]]))[0, -1].log_softmax(-1)
    assert [score for score, _ in scores] == pytest.approx(logprob[10:14].tolist(), abs=1e-5)


def test_a_continuation_longer_than_the_block(softmax_model, tokenizer):
    """HFLM stops with an assertion; ours follows the chain rule, each piece after what fits before it."""
    lm = LinGPTLM(softmax_model, tokenizer)
    tokens = lm.tok_encode(sentence(random.Random(6), 100))
    context, continuation = tokens[:5], tokens[5 : 5 + BLOCK_SIZE + 7]
    first = lm._loglikelihood_tokens([(None, context, continuation[:BLOCK_SIZE])])[0][0]
    second = lm._loglikelihood_tokens(
        [(None, context + continuation[:BLOCK_SIZE], continuation[BLOCK_SIZE:])]
    )[0][0]
    whole = lm._loglikelihood_tokens([(None, context, continuation)])[0][0]
    assert whole == pytest.approx(first + second, abs=1e-4)


def test_only_scored_positions_reach_lm_head(softmax_model, tokenizer, monkeypatch):
    """The vocabulary is the dear part of a small model: one row for each token scored."""
    lm = LinGPTLM(softmax_model, tokenizer)
    seen, lm_head = [], softmax_model.lm_head.forward
    monkeypatch.setattr(softmax_model.lm_head, "forward", lambda x: seen.append(x.shape[0]) or lm_head(x))
    lm._loglikelihood_tokens([(None, [1] * 30, [2, 3]), (None, [4] * 20, [5])])
    assert sum(seen) == 3


def test_bf16_stays_close(softmax_model, tokenizer):
    """The model runs in the dtype of its weights; the log-softmax stays in fp32."""
    half = copy.deepcopy(softmax_model).bfloat16()
    lm, exact = LinGPTLM(half, tokenizer), LinGPTLM(softmax_model, tokenizer)
    found = [score for score, _ in lm.loglikelihood(instances("loglikelihood", pairs()))]
    expected = [score for score, _ in exact.loglikelihood(instances("loglikelihood", pairs()))]
    assert lm.dtype == torch.bfloat16
    assert found == pytest.approx(expected, rel=0.05, abs=0.5)
    assert found != expected


def test_attention_changes_the_scores(tokenizer):
    """The same weights under another attention score differently: nothing runs as softmax unseen."""
    softmax, linear = tiny_model("softmax"), tiny_model("ours")
    linear.load_state_dict(softmax.state_dict())
    scores = [
        LinGPTLM(model, tokenizer).loglikelihood(instances("loglikelihood", pairs()))
        for model in (softmax, linear)
    ]
    differences = [abs(a[0] - b[0]) for a, b in zip(*scores, strict=True)]
    assert max(differences) > 1e-2


def test_exported_model_scores_the_same_in_hflm(tokenizer, tmp_path):
    """The way back: our softmax model, exported, evaluated by HFLM."""
    model = tiny_model("softmax")
    export_hf(model, tmp_path)
    tokenizer.save(tmp_path)
    expected = make_hflm(tmp_path).loglikelihood(instances("loglikelihood", pairs(1)), disable_tqdm=True)
    found = LinGPTLM(model, tokenizer).loglikelihood(instances("loglikelihood", pairs(1)))
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-4)


def test_mistakes(softmax_model, tokenizer):
    """Sampling, no room for a context, nothing to score: one line each."""
    lm = LinGPTLM(softmax_model, tokenizer)
    with pytest.raises(UserError, match="greedy"):
        lm.generate_until(instances("generate_until", [("a", {"do_sample": True, "temperature": 1.0})]))
    with pytest.raises(UserError, match="block size is 64"):
        lm.generate_until(instances("generate_until", [("a", {"max_gen_toks": 64})]))
    with pytest.raises(UserError, match="nothing to score"):
        lm.loglikelihood(instances("loglikelihood", [("stone", "")]))


def test_out_of_memory_says_what_to_lower(softmax_model, tokenizer, monkeypatch):
    """Guards: `lower --batch_tokens` of a needle's text that is a batch of its own."""

    def hidden(idx):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(softmax_model, "hidden", hidden)
    lm = LinGPTLM(softmax_model, tokenizer)
    for rows, mend in (([[1] * 40], "40 tokens: lower --max_length_factor"), ([[1], [2]], "--batch_tokens")):
        with pytest.raises(UserError, match=f"out of memory with a batch of .*{mend}$"):
            lm.score([(row, [3]) for row in rows])


def test_several_devices_share_the_batches_and_change_no_bit(softmax_model, hf_folder):
    """Three copies of a model on as many threads: every score, flag and count is that of one copy."""
    tokenizer = load_tokenizer(hf_folder)
    one = LinGPTLM(softmax_model, tokenizer, batch_tokens=256)
    three = LinGPTLM([copy.deepcopy(softmax_model) for _ in range(3)], tokenizer, batch_tokens=256)
    requests = instances("loglikelihood", pairs())
    assert three.loglikelihood(requests) == one.loglikelihood(requests)
    assert three.cut_prompts == one.cut_prompts != 0
