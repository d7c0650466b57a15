"""`make` is thin: each target is one line over the command, and that line parses to what was asked."""

import os
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from lingpt.cli import curves, data, evaluate, study, train
from lingpt.cli.main import parse
from lingpt.common.options import flatten
from lingpt.models import ALIASES, ATTENTIONS

ROOT = Path(__file__).parent.parent
VERBS = {"train": train, "data": data, "eval": evaluate, "curves": curves, "study": study}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words: str) -> str:
    """What make prints; without the variables that it inherits where `make test` started these tests."""
    env = {"PATH": os.environ["PATH"]}
    command = ["make", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def dry(*words: str) -> str:
    """What the target would run in the present environment."""
    return make("-n", "--no-print-directory", "VENV=", *words)


def parsed(*words: str) -> dict:
    """The target's options as its verb understands them, flat."""
    program, verb, *options = shlex.split(dry(*words))
    assert program == "lingpt"
    options = parse(verb, VERBS[verb], options)
    return flatten(type(options), asdict(options))


def test_train_with_nothing_is_the_demo():
    args = parsed("train")
    assert (args["model.name"], args["model.attention"], args["train.dry_run"]) == ("demo", "ours", False)


def test_every_variable_of_train_reaches_its_option():
    args = parsed(
        "train", "MODEL=pythia-160m", "ATTN=gla", "DATA=/my data/*.jsonl.gz", "TOKENIZER=/tok", "DEVICES=8",
        "RESUME=never", "NAME=one", "DRY=1", "ARGS=--train.max_steps 100 --train.seed 3",
    )  # fmt: skip
    wanted = {
        "model.name": "pythia-160m", "model.attention": "gla", "data.source": "/my data/*.jsonl.gz",
        "data.tokenizer": "/tok", "train.devices": 8, "train.resume": "never", "train.name": "one",
        "train.dry_run": True, "train.max_steps": 100, "train.seed": 3,
    }  # fmt: skip
    assert {key: args[key] for key in wanted} == wanted


def test_a_quote_in_a_value_stays_a_quote():
    """Guards: an unterminated string of the shell; a command of the shell's own."""
    args = parsed("train", "DATA=it's.jsonl", "NAME=a';touch x;'b", "MODEL=demo", "ATTN=ours")
    assert (args["data.source"], args["train.name"]) == ("it's.jsonl", "a';touch x;'b")


def test_hybrids_and_dry_0():
    args = parsed("train", "ATTN=[ours, softmax]", "DRY=0")
    assert args["model.attention"] == ["ours", "softmax"] and args["train.dry_run"] is False


def test_data_takes_the_recipe_and_eval_the_runs():
    assert parsed("data", "MODEL=pythia-70m", "DATA=x.jsonl")["data.source"] == "x.jsonl"
    args = parsed("eval", "RUNS=runs/a runs/b", "EVAL_DATA=/some where", "ARGS=--limit 5")
    assert (args["runs"], args["data"], args["limit"]) == (("runs/a", "runs/b"), "/some where", 5)
    assert parsed("eval")["model"] is None, "without MODEL the newest run's model is meant"
    assert parsed("curves", "RUNS=runs/a runs/b")["runs"] == ("runs/a", "runs/b")


def test_study_takes_its_variables():
    args = parsed(
        "study", "MODEL=pythia-1.4b", "TOKENS=1000", "ATTNS=softmax ours-gated", "SEEDS=2", "DEVICES=8",
        "DRY=1", "DATA=a b.jsonl", "EVAL_DATA=/e", "ARGS=--texts novels=n.jsonl --minutes 9",
    )  # fmt: skip
    wanted = {
        "model": "pythia-1.4b", "tokens": 1000, "attentions": ("softmax", "ours-gated"), "seeds": 2,
        "devices": 8, "dry_run": True, "source": "a b.jsonl", "eval_data": "/e", "texts": ("novels=n.jsonl",),
        "minutes": 9.0,
    }  # fmt: skip
    assert {key: args[key] for key in wanted} == wanted and parsed("study")["model"] == "demo"


def test_help_lists_every_target():
    lines = make("help")
    targets = "train data eval curves bench test test-all test-gpu check release-check"
    for target in targets.split():
        assert f"\n  {target} " in lines
        assert dry(target).strip()


def test_every_attention_is_named_to_the_reader():
    readme = (ROOT / "README.md").read_text()
    names = [*ATTENTIONS, *ALIASES]
    assert f"ATTN={'|'.join(names)} " in make("help")
    assert all(f"`{name}`" in readme for name in names)


def test_check_runs_every_tool_on_every_source():
    """Guards: CUDA files that clang-format never sees; a package that mypy knows by the clone's name."""
    lines = dry("check").splitlines()
    assert [line.split()[0] for line in lines] == ["ruff", "ruff", "clang-format", "mkdir", "mypy"]
    cuda = {
        path.relative_to(ROOT) for suffix in ("*.cu", "*.cuh") for path in ROOT.glob(f"[kpt]*/**/{suffix}")
    }
    assert {Path(word) for word in lines[2].split() if ".cu" in word} == cuda != set()
    assert "ln -sfn .. .types/lingpt" in lines[3]


def test_an_environment_is_made_once_and_by_the_constraints():
    """Guards: what is installed on first use is the tested set, and a changed pyproject.toml is noticed."""
    assert not dry("install").strip().startswith("python"), "VENV= makes no environment"
    lines = make("-n", "VENV=/nonexistent", "CUDA=13", "TORCH_INDEX=https://index", "curves")
    assert "index='https://index'" in lines and "pip install torch -c 'constraints.txt'" in lines
    assert "-e '.[train,cuda13]' -c 'constraints.txt'" in lines, "only what training needs"
    assert lines.rstrip().endswith("/nonexistent/bin/lingpt curves")
    assert "-e '.[bench,cuda13]'" in make("-n", "VENV=/nonexistent", "CUDA=13", "bench"), "FLA for it alone"
    for target, extra in {"bench": "train", "eval": "eval", "test": "dev"}.items():
        assert f"-e '.[{extra}]'" in make("-n", "VENV=/nonexistent", "CUDA=", target)


def test_a_newcomers_tests_are_those_that_are_not_slow():
    assert dry("test").strip().endswith('-m "not slow"') and "slow" not in dry("test-all")
