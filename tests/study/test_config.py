"""Guards what a study's file may say: a mistake is one line, before anything is trained."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lingpt.cli.main import main
from lingpt.common.errors import UserError
from lingpt.study import find_study, read_study, studies, with_rows
from lingpt.study.config import with_started_runs
from lingpt.study.runs import rate_runs, study_runs
from lingpt.tests.study.tiny import COMMAND, TINY, write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": 3}, "unknown key 'token' (did you mean 'tokens'?)"),
        ({"tokens": 0}, "tokens is 0; it must be a whole number from 1"),
        ({"seeds": 0}, "seeds is 0; it must be a whole number from 1 to 1,000"),
        ({"seeds": 10**9}, "seeds is 1000000000; it must be a whole number from 1 to 1,000"),
        ({"attentions": 3}, "attentions is 3; it must be `key: value`"),
        ({"attentions": ["softmax", {"ours": {"model.b": 1}}]}, "it must be `key: value`"),
        ({"attentions": ["ours/x"]}, "cannot name a run's folder"),
        ({"name": "../x"}, "'../x' cannot name the study's folder"),
        ({"name": ""}, "'' cannot name the study's folder"),
        ({"name": 3}, "name is 3; it must be text"),
        ({"attentions": ["softmx"]}, "unknown attention 'softmx'"),
        ({"options": {"train.warm_up": 3}}, "softmax: unknown key 'train.warm_up' (did you mean"),
        ({"options": {"data.seq_len": None}}, "softmax: data.seq_len is null; it must be a whole number"),
        ({"rate_tokens": 0}, "`learning_rates` need `rate_tokens`"),
        ({"rate_tokens": None}, "`learning_rates` need `rate_tokens`"),
        ({"learning_rates": [1e-3, 0.001]}, "`learning_rates` has 0.001 twice"),
        ({"baselines": ["gla"]}, "baselines names 'gla', which is not one of its rows"),
        ({"runs_per_device": 0}, "runs_per_device is 0"),
        ({"runs_per_device": 2, "devices_per_run": None}, "is for runs on one card each"),
        ({"devices_per_run": 0}, "devices_per_run is 0; it must be a whole number from 1"),
        ({"row_by_row": 3}, "row_by_row is 3; it must be true or false"),
        ({"recipe": None}, "does not say `recipe`"),
        ({"tokens": None}, "does not say `tokens`"),
        ({"suites": ["table2"], "tasks": []}, "`tasks` is empty; the suite table2 needs some"),
        ({"options": {"train.learning_rate": "fast"}}, "softmax: train.learning_rate is fast; it must be"),
        ({"suites": "language"}, "suites is language; it must be a list, each text"),
        ({"suites": ["langauge"]}, "did you mean 'language'"),
        ({"learning_rates": 1e-3}, "learning_rates is 0.001; it must be a list"),
        (
            {"learning_rates": ["fast"]},
            "learning_rates is ['fast']; it must be a list, each a number above 0",
        ),
        ({"rate_tokens": "many"}, "rate_tokens is many; it must be a whole number"),
        ({"options": 3}, "options is 3; it must be `key: value`"),
        ({"attentions": {"ours": 3}}, "attentions is {'ours': 3}; it must be `key: value`"),
        ({"options": {"train.seed": 3}}, "leave out train.seed"),
        ({"attentions": {"ours": {"train.max_steps": 3}}}, "leave out train.max_steps"),
        ({"baselines": "softmax"}, "baselines is softmax; it must be a list"),
        ({"limit": -1}, "limit is -1; it must be a whole number from 1"),
        ({"max_length_factor": "x"}, "max_length_factor is x"),
        ({"recipe": 5}, "recipe is 5; it must be text"),
        ({"mqar": 3}, "mqar is 3; it must be `key: value`"),
        ({"mqar": {"step": 3}}, "the study's `mqar`: unknown key 'step' (did you mean 'steps'?)"),
        ({"mqar": {"steps": "many"}}, "the study's `mqar`: steps is many; it must be a whole number"),
        ({"mqar": {"widths": [0]}}, "widths is ['0']; it must be a list, each a whole number of at least 1"),
        ({"mqar": {"attentions": ["our"]}}, "unknown attention 'our'"),
        ({"eval_data": "nowhere"}, "no folder nowhere"),
        ({"eval_data": 3}, "eval_data is 3; it must be text"),
        ({"suites": ["table2"], "tasks": ["arc_eazy"], "eval_data": "."}, "a task 'arc_eazy'"),
        ({"suites": ["table2"], "tasks": ["piqa"], "eval_data": "."}, "has no piqa_valid.jsonl"),
        ({"suites": ["table2"], "tasks": ["mmlu:five"]}, "after the colon stands the number of examples"),
        ({"suites": ["table2"], "tasks": [5]}, "tasks is [5]; it must be a list, each text"),
        ({"texts": {"words": "gone.jsonl"}}, "there are no documents at gone.jsonl"),
        ({"text_key": "body"}, 'held-out.jsonl, line 1 has no "body"'),
        ({"texts": {"words": 3}}, "texts is {'words': 3}; it must be `key: value`"),
        ({"texts": {"a=b": "embedded"}}, "'a=b' cannot name a text"),
        ({"texts": {"-a": "embedded"}}, "'-a' cannot name a text"),
        ({"texts": {"": "embedded"}}, "'' cannot name a text"),
        ({"options": TINY["options"] | {"data.source": "gone.jsonl"}}, "there are no documents at gone"),
        ({"options": TINY["options"] | {"data.tokenizer": "gone.json"}}, "there is no tokenizer at gone"),
    ],
)
def test_a_mistake_in_the_file_is_refused_before_anything_is_trained(here, change, message, capsys):
    """One line. Guards: found after hours of training, or a traceback."""
    write(TINY | change)
    assert main(COMMAND) == 2 and not here
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err


def test_a_key_without_a_value_is_none(here):
    """Guards: `learning_rates:` with nothing behind it was a traceback."""
    empty = {"learning_rates": None, "options": None, "suites": None, "rate_tokens": None, "name": None}
    write(TINY | empty | {"seeds": None})
    study = read_study(Path("study-tiny.yaml"))
    assert (study.name, study.seeds) == ("tiny", 1)
    assert (study.learning_rates, study.options, study.suites, study.rate_tokens) == ((), {}, ("table2",), 0)


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("study.json")), ids=lambda path: path.parent.name)
def test_a_published_study_is_read(path, tmp_path):
    """As a study's file, and as that of a folder to resume."""
    study = read_study(find_study(str(path)))
    assert json.loads(json.dumps(asdict(study))) == json.loads(path.read_text())
    shutil.copy(path, tmp_path)
    assert with_started_runs(study, tmp_path) == study
    with pytest.raises(UserError, match="another `learning_rates`"):
        with_started_runs(replace(study, learning_rates=(7.0,)), tmp_path)


def test_some_rows_of_a_study_are_a_study(tmp_path):
    """Guards: a study.json that names a baseline which is none of its rows, and cannot be read again."""
    study = with_rows(read_study(find_study("search-160m")), ["softmax", "hybrid"])
    (tmp_path / "study.json").write_text(json.dumps(asdict(with_started_runs(study, tmp_path))))
    assert read_study(tmp_path / "study.json").baselines == ("softmax",)


def test_a_study_that_is_no_study(tmp_path):
    (tmp_path / "study-x.yaml").write_text("recipe: demo\ntokens: 5\n")
    with pytest.raises(UserError, match="does not say `attentions`"):
        read_study(tmp_path / "study-x.yaml")
    (tmp_path / "study-x.yaml").write_text("- 3\n")
    with pytest.raises(UserError, match="is not a study"):
        read_study(tmp_path / "study-x.yaml")
    for text in ("5", "attentions", "- attentions"):
        (tmp_path / "study-x.yaml").write_text(text)
        with pytest.raises(UserError, match="is not a study"):
            read_study(find_study(str(tmp_path / "study-x.yaml")))
    assert json.dumps(asdict(read_study(find_study("demo"))))


@pytest.mark.parametrize("name", studies())
def test_the_studies_that_ship(name, tmp_path):
    """Each run's options make a recipe; a paper's own numbers; a hybrid has as many layers as its model."""
    study = read_study(find_study(name))
    for one in [
        *study_runs(study, tmp_path, {}, 1)[: len(study.attentions)],
        *rate_runs(study, tmp_path, 1)[:1],
    ]:
        assert one.recipe.model.config().attention_per_layer
    first = study_runs(study, tmp_path, {}, 1)[0].recipe
    if name == "pythia-1.4b":
        assert (first.train.max_tokens, first.data.seq_len, first.data.source) == (3 * 10**9, 8192, "wiki40b")
        assert (first.train.global_batch_size, first.train.learning_rate) == (256, 1e-3)
    if name == "pythia-1.4b-short":
        assert first.data.seq_len == 8192 and study.tokens >= 100e6
        assert 250_000 <= first.tokens_per_step <= 500_000
    if name == "gate":
        assert (first.data.seq_len, first.model.block_size, first.model.name) == (2048, 2048, "pythia-70m")
        names = [run.name for run in study_runs(study, tmp_path, {}, 1)[:4]]
        assert names == ["softmax-seed0", "softmax-seed1", "softmax-seed2", "gla-seed0"]
    if name == "pythia-160m":
        assert first.data.seq_len == 2048 and study.tokens >= 250e6 and study.seeds == 2
        five = {"softmax", "gla", "ours", "ours-decay", "ours-gated"}
        assert five <= set(study.attentions) and len(study.learning_rates) == 3
