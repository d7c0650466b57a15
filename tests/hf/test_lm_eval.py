"""lm-eval's own adapter of transformers' models scores an exported one as `lingpt eval` does."""

import random

import pytest
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, AutoTokenizer

import lingpt.hf  # noqa: F401
from lingpt.data import load_tokenizer
from lingpt.data.tokenizer import train_bpe
from lingpt.eval.lm import LinGPTLM
from lingpt.models import GPT, ModelArgs, export_hf, load_model


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ours", "hybrid"])
def test_lm_evals_scores_are_ours(form, tmp_path):
    """Log-likelihoods, whole texts, and greedy continuations of unequal prompts in one batch."""
    pytest.importorskip("accelerate", reason="lm-eval's HFLM needs accelerate")
    from lm_eval.models.huggingface import HFLM

    rng = random.Random(0)
    texts = [
        " ".join(rng.choices(["the", "river", "ran", "slowly", "past", "old", "mills"], k=9))
        for _ in range(30)
    ]
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "block_size": 64, "vocab_size": 300}
    model = GPT(ModelArgs("small", form, padding_multiple=64, **sizes).config())
    model.init_weights(0)
    export_hf(model, tmp_path, train_bpe(texts, 300).save(tmp_path))
    ours = LinGPTLM(load_model(tmp_path), load_tokenizer(tmp_path), batch_tokens=256, progress=False)
    exported, tokenizer = (kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    theirs = HFLM(pretrained=exported, tokenizer=tokenizer, batch_size=3, device="cpu")
    assert ours.max_length == theirs.max_length == 64
    pairs = [(text[:n], text[n:]) for text, n in zip(texts, range(3, 33), strict=True)]
    for kind, arguments in (("loglikelihood", pairs), ("loglikelihood_rolling", [(t,) for t in texts])):
        expected = getattr(theirs, kind)(instances(kind, arguments), disable_tqdm=True)
        found = getattr(ours, kind)(instances(kind, arguments))
        if kind == "loglikelihood":
            assert [flag for _, flag in found] == [flag for _, flag in expected]
            found, expected = ([value for value, _ in values] for values in (found, expected))
        assert found == pytest.approx(expected, abs=1e-4)
    asked = instances("generate_until", [(a, {"until": [], "max_gen_toks": 8}) for a, _ in pairs[:7]])
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
