"""`pip install 'lingpt[hf]'` is enough: PyTorch and transformers, and nothing that only training needs.

In this environment, which has the oldest transformers that is claimed, the other packages are hidden.
LINGPT_HF_PYTHON names the Python of an environment without them: `.ci/run` makes one, with the newest.
"""

import os
import subprocess
import sys

import pytest
import torch

from lingpt.data.tokenizer import train_bpe
from lingpt.models import GPT, ModelArgs, export_hf, generate

TRAINING = ("litgpt", "lightning", "datasets", "wandb", "jsonargparse", "zstandard", "lm_eval")
PYTHONS = ["", *filter(None, [os.environ.get("LINGPT_HF_PYTHON")])]
SCRIPT = """
import importlib.util, sys
hide, folder, *names = sys.argv[1:]
for name in names:
    if hide == "hide":
        sys.modules[name] = None
    else:
        assert importlib.util.find_spec(name) is None, f"{name} is installed"
import torch, transformers
import lingpt.hf, lingpt.layers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, pipeline

expected = torch.load(f"{folder}/expected.pt")
model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
with torch.no_grad():
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"], rtol=0, atol=1e-5)
options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
assert torch.equal(model.generate(expected["ids"], **options), expected["greedy"])
batch = tokenizer(["the river ran", "old"], return_tensors="pt", padding=True)
assert model.generate(**batch, max_new_tokens=4, num_beams=2).shape[0] == 2
pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
assert pipe("the river", max_new_tokens=4)[0]["generated_text"].startswith("the river")
model(**batch, labels=batch["input_ids"]).loss.backward()
model.save_pretrained(f"{folder}/again")
again = AutoModelForCausalLM.from_pretrained(f"{folder}/again", dtype=torch.bfloat16, device_map=None)
assert all(x.isfinite().all() for x in again.buffers())

sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
llama = AutoModelForCausalLM.from_config(LlamaConfig(intermediate_size=96, **sizes))
lingpt.replace_attention(llama, "ours-gated").save_pretrained(f"{folder}/llama")
again, ids = AutoModelForCausalLM.from_pretrained(f"{folder}/llama"), expected["ids"]
assert torch.equal(again(ids).logits, llama.eval()(ids).logits)
print(transformers.__version__, "works")
"""


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_it_needs_pytorch_and_transformers_alone(tmp_path, python):
    """A hybrid loads, generates, is saved, and its numbers are ours; a Llama takes our attention."""
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "block_size": 96, "vocab_size": 300}
    model = GPT.create(ModelArgs("small", "hybrid", **sizes).config(), seed=0).eval()
    export_hf(model, tmp_path, train_bpe(["the river ran slowly past old mills"] * 9, 300).save(tmp_path))
    ids = torch.randint(1, 290, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = {"ids": ids, "logits": model(ids), "greedy": generate(model, ids, 24, temperature=0)}
    torch.save(expected, tmp_path / "expected.pt")
    words = [python or sys.executable, "-P", "-c", SCRIPT, "see" if python else "hide", str(tmp_path)]
    done = subprocess.run([*words, *TRAINING], capture_output=True, text=True)
    assert done.returncode == 0 and "works" in done.stdout, done.stderr
