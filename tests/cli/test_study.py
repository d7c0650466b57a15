"""Guards the command line of a study: a mistake on it is one line."""

from lingpt.cli.main import main
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
