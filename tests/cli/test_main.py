"""The command line: help without PyTorch, and every mistake answered with one line and an exit code."""

import contextlib
import errno
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lingpt.cli import main as cli
from lingpt.cli.main import main
from lingpt.common.files import write_json
from lingpt.common.install import install_command
from lingpt.common.run_folder import read_metrics, scores_file
from lingpt.models import GPT, ModelArgs, save_model
from lingpt.train.config import recipe_from_dict
from lingpt.train.recipe import parse_recipe


@pytest.fixture
def project(tmp_path, few_modules, monkeypatch, tmp_path_factory) -> Path:
    """A working folder with a small corpus, and the arguments of a run on it in `tiny.yaml`."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path_factory.getbasetemp() / "cli-cache"
    rows = [
        json.dumps({"text": f"number {i} is followed by number {i + 1} and so on " * 4}) for i in range(300)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows))
    recipe = {
        "model": {"name": "demo"},
        "data": {"source": "corpus.jsonl", "seq_len": 32, "cache_dir": str(cache), "val_fraction": 0.1},
        "train": {
            "max_steps": 4, "global_batch_size": 8, "micro_batch_size": 4, "warmup_steps": 2,
            "eval_interval": 2, "eval_tokens": 160, "save_interval": 2, "sample_tokens": 8,
            "wandb": False, "accelerator": "cpu",
        },
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def complaint(capsys, *argv: str, code: int = 2) -> str:
    """Runs a command that must fail; returns its one line."""
    assert main(argv) == code
    err = capsys.readouterr().err
    line = err.strip().splitlines()[-1]
    assert "Traceback" not in err and line.startswith("lingpt: ")
    assert sum(part.startswith("lingpt: ") for part in err.splitlines()) == 1
    return line


def test_a_process_s_start_and_end_collect_no_garbage(monkeypatch):
    """Guards: a quarter of the time of `lingpt train --help`. Who calls `main` keeps its own way."""
    called = []
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    monkeypatch.setattr("lingpt.cli.bench.run", lambda args: called.append(gc.isenabled()))
    monkeypatch.setattr(sys, "argv", ["lingpt", "bench", "--redraw"])
    monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)  # pytest's own Ctrl-C stays
    assert main() == 0 and called == ["freeze", True, "freeze"] and gc.isenabled()
    assert main(sys.argv[1:]) == 0 and called[3:] == [True]


def test_a_ctrl_c_while_python_ends_makes_no_traceback(monkeypatch):
    """Guards: the second Ctrl-C, just after `stopped and saved`. Who calls `main` keeps its own handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "argv", ["lingpt", "--help"])
        assert main(sys.argv[1:]) == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert main() == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does
        assert main() == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_lists_the_verbs_without_pytorch():
    code = "import sys; from lingpt.cli.main import main; main([]); assert 'torch' not in sys.modules"
    out = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for verb in ("train", "data", "eval", "curves", "kernels", "bench"):
        assert f"\n  {verb} " in out


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_its_help(verb, capsys, monkeypatch):
    """Guards: a verb without help, lines wider than the terminal, an option's notes in two brackets."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*verb.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert main([*verb.split(), "-h"]) == 0 and capsys.readouterr().out == out
    out = " ".join(out.split())
    assert f"lingpt {verb}" in out and not re.search(r"\(default: [^()]*\) \(", out)


def test_trains_draws_and_goes_on(project, capsys):
    """The whole way of a user: train, curves, and the same command again."""
    assert main(["train", "--config", "tiny.yaml"]) == 0
    out = capsys.readouterr().out
    run = project / "runs/tiny-ours"
    assert "new run" in out and "validation loss" in out and "runs/tiny-ours/curves.png" in out
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["train"]["max_steps"] == 4 and resolved["train"]["beta2"] == 0.95
    assert main(["curves", "runs/tiny-ours", "--out", "both.png"]) == 0
    assert (project / "both.png").exists() and json.loads((project / "both.json").read_text())["runs"]
    for option, line in (("baseline", "unknown baseline 'x'"), ("val", "was not validated on 'x'")):
        assert line in complaint(capsys, "curves", "runs/tiny-ours", f"--{option}=x")
    newest = str(run / "checkpoints/step-00000004")
    assert main(["export", str(run), "exported"]) == 0 and f"from {newest}: " in capsys.readouterr().out
    # safetensors has its metadata in any order: the tensors are compared, not the bytes.
    weights = [load_file(Path(folder, "model.safetensors")) for folder in (newest, "exported")]
    assert weights[0].keys() == weights[1].keys() and Path("exported/tokenizer.json").is_file()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "exported exists" in complaint(capsys, "export", newest, "exported")
    write_json(scores_file(run, 4), {"scores": {"piqa (0-shot)": {"acc": 0.5}}})
    assert main(["export", str(run), "hf", "--hf"]) == 0
    card = Path("hf/README.md").read_text()
    capsys.readouterr()
    assert "Step 4 of a run on corpus.jsonl, 1,024 tokens. " in card and '"acc": 0.5' in card
    example, options = re.findall(r"```(?:python|yaml)\n(.*?)```", card, re.S)
    assert example.startswith("import lingpt.hf\n")
    with contextlib.chdir("hf"):
        exec(example, {})
    Path("card.yaml").write_text(options)
    assert parse_recipe(["--config", "card.yaml"]) == recipe_from_dict(resolved) and "null" not in options
    assert "max_steps: 4" in options and "beta2" not in options
    Path("empty.txt").touch()  # with which it asked for a --document
    assert "empty.txt is empty" in complaint(
        capsys, "generate", str(run), "--document", "empty.txt", "--state", "new"
    )
    for model in (str(run), "exported", "hf"):  # the run's newest checkpoint, and folders of its own
        assert (
            main(["generate", model, "--prompt", "number 7", "--max_new_tokens", "8", "--device", "cpu"]) == 0
        )
    texts = capsys.readouterr().out
    assert texts.startswith("number 7") and texts == 3 * texts[: len(texts) // 3]
    assert (
        main(["generate", str(run), "--max_new_tokens", "8", "--device", "cpu", "--dtype", "bfloat16"]) == 0
    )
    assert capsys.readouterr().out.strip()
    Path("corpus.jsonl").rename("moved.jsonl")
    cpu = ["--step", "4", "--device", "cpu"]
    assert "no documents at corpus.jsonl" in complaint(capsys, "replay", str(run), *cpu)
    assert main(["replay", str(run), *cpu, "--data.source", "moved.jsonl"]) == 0
    assert "tiny-ours, step 4, with the weights of step-00000002" in capsys.readouterr().out
    Path("moved.jsonl").rename("corpus.jsonl")
    # An override wins wherever it stands; of two files the later one does.
    Path("longer.yaml").write_text("train: {max_steps: 5}")
    files = ["--config", "tiny.yaml", "--train.max_steps", "6", "--config=longer.yaml"]
    assert main(["train", *files]) == 0
    assert "step-00000004, step 4 of 6 (1.02 k tokens, " in capsys.readouterr().out
    assert read_metrics(run)[-1]["step"] == 6


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["trian"], "unknown verb 'trian' (did you mean 'train'?)"),
        (["bench", "trian"], "unknown verb 'bench trian' (did you mean 'bench train'?)"),
        (["train", "--confg", "demo"], "unknown key 'confg' (did you mean 'config'?)"),
        (["train", "--config", "demmo"], "no recipe 'demmo' (did you mean 'demo'?)"),
        (["train", "--config", "tiny.yaml", "--train.max_stepz", "3"], "did you mean 'train.max_steps'?"),
        (["train", "--train.lr", "1"], "unknown key 'train.lr'; "),  # no 'train.z_loss'
        (["train", "--model.z_loss", "1"], "unknown key 'model.z_loss' (did you mean 'train.z_loss'?)"),
        (["train", "--profile"], "unknown key 'profile' (did you mean 'train.profile'?)"),
        (["train", "--train.seed"], "--train.seed needs a value: a whole number from 0 to 4,294,967,295"),
        (["train", "--config", "wrong-key.yaml"], "(did you mean 'train.learning_rate'?)"),
        (["train", "--config", "wrong-group.yaml"], "unknown key 'trian.seed' (did you mean 'train.seed'?)"),
        (["train", "--config", "broken.yaml"], "broken.yaml is not YAML"),
        (["train", "--config", "tiny.yaml", "--train.max_steps", "many"],
         "train.max_steps is many; it must be a whole number"),
        (["train", "--config", "tiny.yaml", "--train.devices", "x"], "number from 1 to 1,024 or auto"),
        (["train", "--config", "tiny.yaml", "--train.max_steps", "5", "--train.max_tokens", "512"],
         "--train.max_steps and --train.max_tokens both say how long to train: give one"),
        # The same where the one is what the recipe says already.
        (["train", "--config", "tiny.yaml", "--train.max_steps", "4", "--train.max_tokens=512"],
         "--train.max_steps and --train.max_tokens both say how long to train: give one"),
        (["train", "--config", "tiny.yaml", "--train.compile", "maybe"], "one of auto, always, never"),
        (["train", "--config", "tiny.yaml", "--train.beta1", "two"], "beta1 is two; it must be a number"),
        (["train", "--config", "tiny.yaml", "--train.wandb", "x"], "wandb is x; it must be true or false"),
        (["train", "--config", "tiny.yaml", "--model.attention", "{}"], "unknown attention '{}'"),
        (["train", "--config", "tiny.yaml", "--train", "null"], "unknown key 'train'"),
        (["train", "--config", "tiny.yaml", "--train.name", "../../x"], "'../../x' cannot be a folder's"),
        (["train", "--config", "tiny.yaml", "--train.name", ""], 'train.name is ""; it must be text'),
        (["train", "--config", "tiny.yaml", "--train.beta1", "2"], "train.beta1 is 2; it must be"),
        (["train", "--config", "tiny.yaml", "--train.weight_decay", "-1"], "weight_decay is -1; it must"),
        (["train", "--config", "tiny.yaml", "--model.block_size", "100000000"], "whole number from 1"),
        (["train", "--config", "tiny.yaml", "--model.block_size", "16000000", "--data.seq_len", "16000000",
          "--train.eval_tokens", "0"], "which no card that is known here has"),
        (["train", "--config", "tiny.yaml", "--data.vocab_size", "10000000000"], "number from 257"),
        (["train", "--config", "tiny.yaml", "--data.seq_len", "0"], "seq_len is 0; it"),
        (["train", "--config", "tiny.yaml", "--data.tokenizer", "/no/where"], "there is no tokenizer at"),
        (["train", "--config", "binary.yaml"], "binary.yaml is not YAML"),
        (["train", "--config", "null.yaml"], "'model' is not a group of keys"),
        (["train", "--config", "wrong-type.yaml"], "train.max_steps is ['many']; it must be a whole number"),
        (["kernels"], "lingpt kernels needs <action>: list"),
        (["replay", "runs/x"], "lingpt replay needs --step: the step"),
        (["train", "--config", "tiny.yaml", "--model.name", "pythia-1.4"], "did you mean 'pythia-1.4b'"),
        (["train", "--config", "tiny.yaml", "--model.attention", "our"], "did you mean 'ours'"),
        (["train", "--config", "tiny.yaml", "--data.source", "nowhere/*.jsonl"], "nowhere"),
        (["train", "--config", "tiny.yaml", "--data.seq_len", "512"], "block size 256 of demo"),
        (["train", "--config", "tiny.yaml", "--train.micro_batch_size", "3"], "1, 2, 4, 8 would divide"),
        (["train", "--config", "tiny.yaml", "--train.precision", "fp8"], "precision is fp8; it must be"),
        (["train", "--config", "tiny.yaml", "--train.init_from", "nowhere"], "nowhere"),
        (["train", "--config", "tiny.yaml", "--train.resume", "nowhere"], "step-…, auto or never"),
        (["train", "--config", "tiny.yaml", "--model.vocab_size", "100"], "vocab"),
        (["train", "--config", "tiny.yaml", "--data.source", "caf\udce9.jsonl"], "is not UTF-8: convert"),
        (["train", "--config", "tiny.yaml", "--train.max_steps", "1e30"], "max_steps is 1e30; it must be"),
        (["train", "--config", "tiny.yaml", "--train.devices", "9999999"], "devices is 9999999; it must be"),
        (["train", "--config", "tiny.yaml", "--train.wandb_project", "a/b"], "it must be text without '/'"),
        (["train", "--config", "tiny.yaml", "--model.name", ""], "it must be text that is not blank"),
        (["study", "--config", "demo", "--seeds", "1e9"], "seeds is 1e9; it must be a whole number from 1"),
        (["study", "--config", "demo", "--devices", "9999999"], "devices is 9999999; it must be"),
        (["curves", "nowhere"], "no losses in nowhere"),
        (["curves", "nowhere", "--out", "."], "--out . is a folder: name a file, such as curves.png"),
        (["curves", "nowhere", "--out", ""], 'out is ""; it must be text'),
        (["curves", "nowhere", "--out", "a.pgf"], "cannot draw a .pgf: end --out in one of"),
        (["curves", "nowhere", "--formats", ""], "it must be a list, each text that is not blank"),
        (["curves", "nowhere", "--formats", "svg", "a/b"], "cannot draw a 'a/b': give --formats of"),
        (["generate", "nowhere"], "no model in nowhere: there is no such folder"),
        (["linearize", "nowhere"], "no model in nowhere: there is no such folder"),
        (["export", ".", "out"], "no model in .: it has no config.json"),
        (["generate", "nowhere", "--top_k", "0"], "top_k is 0; it must be a whole number of at least 1"),
        (["generate", "nowhere", "--temperature", "inf"], "temperature is inf; it must"),
        (["generate", "nowhere", "--seed", "99999999999999999999"], "from 0 to 4,294,967,295"),
        (["generate", "nowhere", "--prompt", "caf\udce9"], r"'caf\udce9' is not UTF-8: convert it"),
        (["generate", "nowhere", "--device", "meta"], "use --device auto"),
        (["bench", "--device", "tpu"], "unknown device 'tpu': use cuda, cuda:1 … or cpu"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(project, capsys, argv, line):
    (project / "wrong-key.yaml").write_text("train:\n  learning_rat: 1e-3\n")
    (project / "wrong-group.yaml").write_text("trian:\n  seed: 1\n")
    (project / "broken.yaml").write_text("train:\n  seed: [1\n")
    (project / "binary.yaml").write_bytes(b"\x89PNG\x00\x01\xff")
    (project / "null.yaml").write_text("model: null\n")
    (project / "wrong-type.yaml").write_text("train: {max_steps: [many]}\n")
    assert line in complaint(capsys, *argv)


def test_a_recipe_of_ones_own_gives_sizes_and_names_its_run(project, capsys):
    """Guards: `a YAML file of your own`, which could give no size and collided with the demo."""
    recipe = yaml.safe_load((project / "tiny.yaml").read_text())
    recipe["model"] = {"name": "mine", "n_layer": 1, "n_embd": 32, "n_head": 2, "rotary_percentage": 0.5}
    recipe["model"] |= {"vocab_size": 2048, "intermediate_size": 48, "attention": ["ours"]}
    (project / "my-model.yaml").write_text(yaml.safe_dump(recipe))
    for name in ("my-model", "tiny"):
        assert main(["train", "--config", f"{name}.yaml", "--train.max_steps", "1"]) == 0
    assert sorted(run.name for run in (project / "runs").iterdir()) == ["my-model-ours", "tiny-ours"]
    capsys.readouterr()
    # The recipe that a run resolved to goes on with that run.
    resolved = str(project / "runs/my-model-ours/config.yaml")
    assert main(["train", "--config", resolved, "--train.max_steps", "2"]) == 0
    assert "resume: runs/my-model-ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("", "tiny-ours"),
        ("--model.n_layer 4", "tiny-ours"),  # the demo's own
        ("--model.n_layer 3 --model.learnable_b true", "tiny-ours-learnable_b-n_layer_3"),
        ("--model.n_embd 64 --model.n_head 1", "tiny-ours-n_embd_64-n_head_1"),  # nor what follows from it
        ("--model.name pythia-14m", "tiny-pythia-14m-ours"),
        (
            "--model.rope_adjustments "
            '{"factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_seq_len":2048}',
            "tiny-ours-rope_adjustments_8_1_4_2048",
        ),
    ],
)
def test_a_size_of_the_command_line_is_in_the_runs_name(project, capsys, argv, name):
    """Guards: `--model.n_layer 3` that is refused, since the demo's run has the name."""
    assert main(["train", "--config", "tiny.yaml", "--train.dry_run", "true", *argv.split()]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("config", "argv", "run"),
    [
        ("tiny.yaml", "--train.max_tokens 513", "3 steps, 768 tokens"),
        ("demo", "--train.max_tokens 1e9", "488,282 steps, 1 B tokens"),
        ("pythia-160m", "--train.max_steps 2", "2 steps, 4.19 M tokens"),
        ("both.yaml", "", "5 steps, 1.28 k tokens"),
        ("both.yaml", "--train.max_tokens 512", "2 steps, 512 tokens"),
    ],
)
def test_how_long_the_command_line_says_is_how_long_it_trains(project, capsys, config, argv, run):
    """Guards: `--train.max_tokens` that is ignored where the recipe has `max_steps`."""
    recipe = yaml.safe_load((project / "tiny.yaml").read_text())
    recipe["train"] |= {"max_steps": 5, "max_tokens": 999}  # as in the config.yaml of older runs
    (project / "both.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--config", config, "--train.dry_run", "true", *argv.split()]) == 0
    assert re.search(r"^run +(.*), ", capsys.readouterr().out, re.M)[1] == run


def test_a_size_of_the_recipe_is_not_in_the_runs_name(project, capsys):
    """It is the recipe's own; the command line may change it, also back to the named model's."""
    recipe = yaml.safe_load((project / "tiny.yaml").read_text()) | {"model": {"name": "demo", "n_layer": 3}}
    (project / "config.yaml").write_text(yaml.safe_dump(recipe))  # called as a run's, and none
    for argv, name in (([], "config-ours"), (["--model.n_layer", "null"], "config-ours-n_layer_4")):
        assert main(["train", "--config", "config.yaml", "--train.dry_run", "true", *argv]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("model", "words", "parameters"),
    [
        ("{name: mine, n_layer: 3, n_embd: 192, n_head: 3}", "", "2,121,408"),
        ("{name: mine, n_layer: 3, n_embd: 192, n_head: 3}", "--data.vocab_size 1024", "1,728,192"),
        ("{name: mine, n_layer: 3, n_embd: 192, n_head: 3, vocab_size: 50254}", "", "20,651,712"),
        ("{name: pythia-14m}", "", "14,067,712"),
    ],
)
def test_the_vocabulary_of_ones_own_model_is_the_tokenizers(
    tmp_path, monkeypatch, capsys, model, words, parameters
):
    """Guards: the manual's small model that had 20.7 M parameters, of a vocabulary it did not use."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"model: {model}\ntrain: {{max_steps: 1}}")
    assert main(["train", "--config", "mine.yaml", "--train.dry_run", "true", *words.split()]) == 0
    assert f"{parameters} parameters" in capsys.readouterr().out


def test_a_tokenizer_that_does_not_fit_says_what_to_add(project, capsys):
    words = ["train", "--config", "tiny.yaml", "--data.vocab_size", "2100"]
    line = complaint(capsys, *words)
    assert complaint(capsys, "data", *words[1:]) == line
    size = re.search(r"add --model.vocab_size (\d+)", line)[1]
    assert main([*words, "--model.vocab_size", size, "--train.max_steps", "1"]) == 0


def test_another_end_of_text_goes_all_the_way(project, capsys):
    """Guards: a tokenizer whose documents end with `<stop>`, which generation and export do not know. The
    checkpoint's config names it, so that generation stops and transformers has it."""
    from transformers import AutoTokenizer

    from lingpt.data.tokenizer import train_bpe

    text = train_bpe(["number 1 is followed by number 2"] * 9, 300).raw.to_str()
    Path("tokenizer.json").write_text(text.replace("<|endoftext|>", "<stop>"))
    words = ["train", "--config", "tiny.yaml", "--data.tokenizer", "tokenizer.json"]
    assert "name its own with --data.end_token" in complaint(capsys, *words)
    assert main([*words, "--data.end_token", "<stop>"]) == 0
    assert main(["export", "runs/tiny-ours", "own"]) == main(["export", "runs/tiny-ours", "hf", "--hf"]) == 0
    capsys.readouterr()
    for model in ("runs/tiny-ours", "own", "hf"):
        assert main(["generate", model, "--max_new_tokens", "8", "--device", "cpu"]) == 0
    texts = capsys.readouterr().out
    assert texts and texts == 3 * texts[: len(texts) // 3]
    theirs = AutoTokenizer.from_pretrained("hf")
    model = json.loads(Path("hf/config.json").read_text())
    assert (theirs.eos_token, theirs.eos_token_id, model["eos_token_id"]) == ("<stop>", 0, 0)


@pytest.mark.parametrize(
    ("attention", "sizes", "stock"),
    [("softmax+sdpa=flash", {}, True), ("softmax", {"bias": False}, False), ("ours", {}, False)],
)
def test_a_models_card_imports_what_its_type_needs(tmp_path, monkeypatch, attention, sizes, stock):
    """Guards: an example that fails, of plain softmax in a shape that no stock model has; a model that was
    trained elsewhere, or by another version, called trained by this one."""
    monkeypatch.chdir(tmp_path)
    save_model(GPT.create(ModelArgs("demo", attention, n_layer=1, **sizes).config(), seed=0), "own")
    with pytest.warns(UserWarning, match="gets no tokenizer"):
        assert main(["export", "own", "hf", "--hf"]) == 0
    card = Path("hf/README.md").read_text()
    assert ("import lingpt.hf" not in card) == stock and "Trained" not in card
    assert (json.loads(Path("hf/config.json").read_text())["model_type"] != "lingpt") == stock


def test_a_folder_of_transformers_gives_the_sizes(project, capsys):
    """Training starts from a Llama without a word about its sizes; a recipe that names another model is a
    line before any work."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 2048, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained("llama")
    words = ["train", "--config", "tiny.yaml", "--train.init_from", "llama"]
    line = complaint(capsys, *words)
    assert "llama is another model than 'demo': n_layer is 2, not 4, n_embd is 64, not 128" in line
    recipe = yaml.safe_load(Path("tiny.yaml").read_text())
    recipe["model"] = {"attention": "ours-gated"}
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe))
    for _ in range(2):  # the second time it resumes
        assert main(words) == 0
        out = capsys.readouterr().out
    assert "step 4 of 4" in out and Path("runs/tiny-ours-gated").is_dir()


def test_pythia_1b_without_a_gpu_says_what_it_needs(project, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = complaint(capsys, "train", "--config", "pythia-1.4b")
    assert "needs a GPU" in line and "40 GB or more" in line
    assert "(--train.dry_run true, or make's DRY=1)" in line
    assert not (project / "runs").exists()
    assert "no CUDA device" in complaint(capsys, "train", "--config", "demo", "--train.accelerator", "cuda")


def test_dry_run_of_pythia_1b_needs_no_gpu_no_network_and_no_memory(project, capsys, monkeypatch):
    """Every number a user decides by, and nothing left behind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    assert main(["train", "--config", "pythia-1.4b", "--train.dry_run", "true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("pythia-1.4b-ours: "), "the recipe's block size is its own, and not in the name"
    assert "1,414,647,808 parameters" in out and "GFLOP per token" in out
    assert "1,431 steps, 3 B tokens" in out and "at 40% MFU" in out and "checkpoint" in out
    rows = {row.split("  ")[0].strip(): row for row in out.splitlines() if " GB  " in row}
    assert "fits" in rows["RTX A6000"] and "does not fit" in rows["A100 40GB"] and "H200" in rows
    assert list(project.glob("runs/*")) == []


def test_dry_run_on_a_cpu_says_how_long_and_whether_the_data_are_there(project, capsys):
    assert main(["train", "--config", "tiny.yaml", "--train.dry_run", "true"]) == 0
    out = capsys.readouterr().out
    assert "1 file, " in out
    assert re.search(
        r"here: about \d0* ([kM] )?tokens/s at 40% of .* \(\d0* [MGT]FLOP/s, measured\), \d+0* \w+$",
        out,
        re.M,
    )
    nowhere = ["--data.source", "nowhere.jsonl"]
    assert main(["train", "--config", "tiny.yaml", "--train.dry_run", "true", *nowhere]) == 0
    assert "NOT FOUND: there are no documents at nowhere.jsonl" in capsys.readouterr().out


def test_a_full_disk_is_one_line(project, capsys, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/tiny-ours/metrics.jsonl")

    monkeypatch.setattr("lingpt.train.runs.trackers.Metrics.write", full)
    assert "the disk is full writing runs/tiny-ours/metrics.jsonl" in complaint(
        capsys, "train", "--config", "tiny.yaml"
    )


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_at_the_start_is_one_line(project, capsys, monkeypatch, number):
    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number), "runs/demo-ours/.lock")

    monkeypatch.setattr("lingpt.train.start.resume_or_create", fail)
    assert f"runs/demo-ours/.lock: {os.strerror(number)}" in complaint(
        capsys, "train", "--config", "tiny.yaml"
    )


def test_a_closed_stream_drops_what_is_printed(monkeypatch):
    """Guards: `lingpt train … >&-`, which ended in a traceback; and `lingpt generate --chat <&-`."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(cli, "_overview", lambda: f"{sys.stdout.isatty()} {sys.stderr.isatty()}")
    assert (main(["--help"]), main(["trian"]), sys.stdin.read()) == (0, 2, "")


def test_stdin_that_was_read_before_stays_as_it_is(monkeypatch, tmp_path: Path):
    """Guards: a script that has read its input and then calls `main`."""
    (tmp_path / "in").write_text("a\nb\n")
    with open(tmp_path / "in") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert (stdin.readline(), main(["--help"]), stdin.read()) == ("a\n", 0, "b\n")


def test_what_is_left_to_print_at_the_end_has_nowhere_to_go():
    """Guards: exit code 120 and "Exception ignored in" of `lingpt … | head`, and on a full disk; also where a
    verb has printed and fails."""
    code = """
import sys
from lingpt.cli import main
dispatch = main._dispatch
main._dispatch = lambda words: print("so far") or dispatch(words)
sys.exit(main.main(sys.argv[1:]))
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reads, closed = os.pipe()
    os.close(reads)
    full, unknown = os.open("/dev/full", os.O_WRONLY), "lingpt: unknown verb 'trian'"
    for out, word, exit_code, line in (
        (closed, "--help", 128 + signal.SIGPIPE, ""),
        (full, "--help", 2, "lingpt: the disk is full: free some space and start again\n"),
        (closed, "trian", 2, unknown),
        (full, "trian", 2, unknown),
    ):
        command = [sys.executable, "-P", "-c", code, word]
        done = subprocess.run(command, env=env, stdout=out, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (exit_code, len(line) > 0)
        assert done.stderr.startswith(line)
    os.close(closed), os.close(full)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_one_process_of_a_machine_says_it(monkeypatch, capsys, name):
    """Guards: the same line from each of eight processes."""
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv(name, rank)
        assert main(["trian"]) == 2 and capsys.readouterr().err.count("lingpt: ") == lines


def test_a_thread_sets_no_handlers():
    """Guards: `signal only works in main thread`, of a command that a program calls in another one."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["--version"]).result() == 0


def test_a_stream_of_another_encoding_gets_question_marks(monkeypatch):
    """Guards: a run that trains, and ends in a traceback as it prints its text."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    monkeypatch.setattr(cli, "_overview", lambda: "naïve 水")
    assert main(["--help"]) == 0
    sys.stdout.flush()
    assert written.getvalue() == "naïve ?\n".encode("latin-1")


def test_ascii_with_surrogates_gets_question_marks():
    """Guards: `×` in a plan, and a traceback, where Python takes stdout for ASCII (a C locale)."""
    code = "import sys; from lingpt.cli.main import _open_streams; _open_streams(); print('4 × 2 · 1')"
    env = os.environ | {"PYTHONIOENCODING": "ascii:surrogateescape"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "4 ? 2 ? 1\n", done.stderr


@pytest.mark.slow
def test_a_recipe_is_read_as_utf_8_in_any_locale(tmp_path):
    """Guards: `größer` in a recipe under a Latin-1 locale, of which a wrong name was recorded."""
    (tmp_path / "mine.yaml").write_text("train: {name: größer}", encoding="utf-8")
    code = "from lingpt.train.recipe import parse_recipe as parse\n"
    code += "print(ascii(parse(['--config', 'mine.yaml']).train.name))"
    env = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == ascii("größer") + "\n", done.stderr


def test_a_missing_package_is_one_line_with_its_extra(capsys, monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval.api")

    monkeypatch.setattr(cli.importlib, "import_module", import_module)
    assert complaint(capsys, "eval") == f"lingpt: lm_eval is not installed: {install_command('eval')}"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lingpt.cli.train", None)
    with pytest.raises(ModuleNotFoundError):  # a file of ours that is missing is a bug
        main(["train"])


def test_a_bug_keeps_its_traceback(project, monkeypatch):
    """Only a user's mistakes become one line; LINGPT_TRACEBACK shows what is behind these."""
    monkeypatch.setattr("lingpt.train.loop.Run.step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--config", "tiny.yaml"])
    monkeypatch.setenv("LINGPT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown verb"):
        main(["trian"])


def test_ctrl_c_while_preparing_is_130_and_no_traceback(project, capsys, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lingpt.train.start.prepare", interrupted)
    assert "interrupted" in complaint(capsys, "train", "--config", "tiny.yaml", code=130)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_a_library_makes_another_error_of_is_one(project, capsys, monkeypatch, number):
    """Guards: a traceback and exit code 1; safetensors makes a ValueError of what interrupts it."""

    def prepare(*_args, **_kwargs):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    monkeypatch.setattr("lingpt.train.start.prepare", prepare)
    own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, own)
    try:
        assert "interrupted" in complaint(capsys, "train", "--config", "tiny.yaml", code=128 + number)
        assert signal.getsignal(number) == own
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_while_preparing_interrupts_as_ctrl_c_does(project, capsys, monkeypatch, number):
    """What is half-written goes; the default kills at once. One that is ignored (nohup) stays ignored."""

    def prepare(*_args, **_kwargs):
        try:
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(number)
        raise RuntimeError("not interrupted")

    cleaned = []
    monkeypatch.setattr("lingpt.train.start.prepare", prepare)
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        assert "interrupted" in complaint(capsys, "train", "--config", "tiny.yaml", code=128 + number)
        assert cleaned and signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with pytest.raises(RuntimeError, match="not interrupted"):
            main(["train", "--config", "tiny.yaml"])
    finally:
        signal.signal(number, before)
