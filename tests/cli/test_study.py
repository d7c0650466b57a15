"""Guards the command line of a study: a mistake on it is one line."""

from lingpt.cli.main import main
from lingpt.study import STAGES
from lingpt.tests.study.tiny import TINY, write


def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(TINY)
    for words, message in [
        (["--model", "pythia-14m"], "no study is named after the model 'pythia-14m'"),
        (["--model", "pythia-70m"], "(make study STUDY=…) give one of contexts ("),
        (["--config", "dem"], "no study 'dem' (did you mean 'demo'?)"),
        (["--config", "study-tiny.yaml", "--tokens", "1.5e0"], "tokens is 1.5e0; it must be a whole number"),
        (
            ["--config", "study-tiny.yaml", "--attentions", "our"],
            "unknown attention 'our' (did you mean 'ours'?)",
        ),
        (["--config", "study-tiny.yaml", "--stages", "score"], "did you mean 'scores'"),
        (
            ["--config", "study-tiny.yaml", "--devices_per_run", "some"],
            "devices_per_run is some; it must be a whole number from 1 to 1,024 or all",
        ),
        (["--config", "study-tiny.yaml", "--devices_per_run", "0"], "devices_per_run is 0; it must be"),
        (["--config", "study-tiny.yaml", "--minutes", "-1"], "minutes is -1; it must be a number above 0"),
    ]:
        assert main(["study", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_file_of_ones_own_for_another_model(tmp_path, monkeypatch, capsys):
    """What the line on a model without a study says to do."""
    monkeypatch.chdir(tmp_path)
    write(TINY | {"recipe": "pythia-14m", "attentions": ["ours", "softmax"], "options": {}}, "mine.yaml")
    assert main(["study", "--config", "mine.yaml", "--dry_run", "true"]) == 0
    assert "study mine: 2 rows" in capsys.readouterr().out


def test_the_options_reach_the_study(tmp_path, monkeypatch):
    """Guards: an option of the command line that the study is run without."""
    monkeypatch.chdir(tmp_path)
    write(TINY)
    asked = []
    monkeypatch.setattr("lingpt.study.run_study", lambda *words, **options: asked.append((words, options)))
    command = ["study", "--config", "study-tiny.yaml"]
    words = "--tokens 600 --seeds 3 --eval_data bench --name other --texts a=a.jsonl --source s --tokenizer t"
    words += " --attentions mixed --baseline mixed --devices_per_run all"
    running = "--out there --stages data page --devices 2 --minutes 5 --publish docs --dry_run"
    assert main([*command, *words.split(), *running.split()]) == 0
    assert main([*command, "--devices_per_run", "2"]) == main(command) == 0
    (study, out), options = asked[0]
    found = study.tokens, study.seeds, study.eval_data, study.name, study.texts, study.devices_per_run
    assert found == (600, 3, "bench", "other", {"a": "a.jsonl"}, None)
    assert (list(study.attentions), study.baselines) == (["mixed"], ("mixed",))
    assert study.options == TINY["options"] | {"data.source": "s", "data.tokenizer": "t"}
    assert (out, options.pop("stages")) == ("there", ("data", "page"))
    assert options == {"devices": 2, "minutes": 5, "publish": "docs", "dry_run": True}
    assert [study.devices_per_run for (study, _), _ in asked[1:]] == [2, 1]
    unasked = {"stages": STAGES, "devices": None, "minutes": None, "publish": None, "dry_run": False}
    assert asked[2][1] == unasked and asked[2][0][0].options == TINY["options"]
