"""Guards that a GPU gives the scores of the CPU, and fast enough."""

import random
import time

import pytest
import torch
from lm_eval.api.instance import Instance

from lingpt.common.run_folder import checkpoint_folder
from lingpt.data import load_tokenizer
from lingpt.eval.lm import LinGPTLM
from lingpt.models import ATTENTIONS, GPT, ModelArgs

from .conftest import evaluate, sentence, tiny_model, write_checkpoint, write_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gpu_scores_are_the_cpus(attention, tokenizer):
    """fp32, every attention, batches of several lengths."""
    rng = random.Random(0)
    pairs = [(sentence(rng, rng.randrange(1, 20)), " " + sentence(rng, 3)) for _ in range(30)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    model = tiny_model(attention)
    expected = LinGPTLM(model, tokenizer).loglikelihood(requests)
    found = LinGPTLM(model.cuda(), tokenizer, batch_tokens=300).loglikelihood(requests)
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=2e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "ours"])
def test_arc_easy_takes_less_than_a_minute(attention, real_data, tmp_path):
    """pythia-70m on all 2,376 questions."""
    folder = checkpoint_folder(tmp_path / "run", 1)
    model = GPT(ModelArgs("pythia-70m", attention=attention).config())
    model.init_weights(0)
    write_config(tmp_path / "run", "pythia-70m", attention)
    write_checkpoint(folder, model, load_tokenizer(real_data / "tokenizer"))
    start = time.monotonic()
    entry = evaluate(folder, ["arc_easy"], data=real_data / "eval").scores["arc_easy (0-shot)"]
    assert entry.documents == 2376 and entry.complete
    assert time.monotonic() - start < 60
    assert torch.cuda.get_device_name() == entry.device
