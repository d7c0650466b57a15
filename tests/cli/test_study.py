"""Guards the command line of a study: a mistake on it is one line."""

from lingpt.cli.main import main
from lingpt.tests.study.tiny import TINY, write


def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(TINY)
    for words, message in [
        (["--model", "pythia-14m"], "no study 'study-pythia-14m' (did you mean 'study-pythia-1"),
        (
            ["--config", "study-tiny.yaml", "--attentions", "our"],
            "unknown attention 'our' (did you mean 'ours'?)",
        ),
        (["--config", "study-tiny.yaml", "--stages", "score"], "did you mean 'scores'"),
        (
            ["--config", "study-tiny.yaml", "--devices_per_run", "some"],
            "a number of GPUs, at least 1, or `all`",
        ),
        (["--config", "study-tiny.yaml", "--devices_per_run", "0"], "a number of GPUs, at least 1"),
        (["--config", "study-tiny.yaml", "--minutes", "-1"], "--minutes -1: give more than 0"),
    ]:
        assert main(["study", *words]) == 2
        assert message in capsys.readouterr().err
