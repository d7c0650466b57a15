"""`lingpt data`, as a user types it."""

import re
from pathlib import Path

import numpy as np
import pytest

from lingpt.cli.data import parse
from lingpt.cli.main import main
from lingpt.data.statistics import Statistics


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path / "cache"))


def test_it_reports_what_was_prepared(write_jsonl, texts, tokenizer_path, capsys):
    """Source, counts, split, cache path, time, and how the text begins."""
    source = str(write_jsonl(texts(300), "mine.jsonl"))
    words = ["data", "--data.source", source, "--data.tokenizer", tokenizer_path, "--data.seq_len=32"]
    assert main(words) == 0
    facts, sample = capsys.readouterr().out.split("\n\nit begins:\n")
    report = dict(line.split(maxsplit=1) for line in facts.splitlines())
    assert report["source"] == source and report["split"] == "held out: the documents of the lowest hashes"
    documents = [int(report[name].split()[0]) for name in ("train", "val")]
    assert sum(documents) == 300 and min(documents) > 0
    assert Path(report["cache"]).is_dir() and report["took"].endswith(" s")
    _, _, tokens, _, num_bytes, *_ = report["val"].replace(",", "").split()
    ratio = float(report["bytes/token"].split()[0])
    assert ratio == pytest.approx(int(num_bytes) / int(tokens), abs=0.01)
    assert main([*words, "--data.stream"]) == 0  # prepared whole all the same
    assert capsys.readouterr().out.split("took")[0] == facts.split("took")[0]
    assert any(text.startswith(sample.strip()[:30]) for text in texts(300))


def test_a_bad_line_is_one_line_and_exit_code_2(tmp_path: Path, capsys):
    """File, line number, no traceback."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "no text"}\n')
    assert main(["data", "--data.source", str(path), "--data.vocab_size", "300"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f'lingpt: {path}, line 2 has no "text"')


def test_stats_is_listed_and_read_as_every_option(capsys):
    """Guards: `--stats` was a word that `--help` named in a sentence alone, and that took no value."""
    assert main(["data", "--help"]) == 0
    assert "\n  --stats  " in capsys.readouterr().out
    assert main(["data", "--stats", "maybe"]) == 2
    assert capsys.readouterr().err == "lingpt: stats is maybe; it must be true or false\n"
    assert main(["data", "--stat"]) == 2
    assert "unknown key 'stat' (did you mean 'stats'?)" in capsys.readouterr().err
    assert not parse(["--stats", "false"]).stats and parse(["--stats"]).stats


def test_it_names_what_was_asked_for_and_what_is_not_read(write_jsonl, texts, tokenizer_path, capsys):
    """Guards: text that another folder has cached was refused under that folder's name."""
    for folder in ("first", "second"):
        path = write_jsonl(texts(20), f"{folder}/a.jsonl")
        (path.parent / "b.csv").write_text("text\n")
        ask = ["data", "--data.source", str(path.parent), "--data.tokenizer", tokenizer_path]
        assert main([*ask, "--data.seq_len", "5000"]) == 2
        said = capsys.readouterr().err
        assert f"the train split of {path.parent} has" in said
        assert (f"{path.parent}: not read: b.csv\n" in said) == (folder == "first")  # when it is tokenised
        assert main([*ask, "--data.seq_len", "32"]) == 0
        assert "\nnot read     b.csv\n" in capsys.readouterr().out


def test_statistics_and_dedup(
    write_jsonl, texts, tokenizer, tokenizer_path, tmp_path: Path, monkeypatch, capsys
):
    """Lengths are those of the documents, copies are counted by hand; with `--data.dedup` none is left, nor
    what is validated on in the text to train on."""
    monkeypatch.chdir(tmp_path)
    (longest,), (shared,) = texts(1, seed=8, words=90), texts(1, seed=9)
    some = [longest, *texts(39), *[" "] * 7, *texts(10), shared]
    source, val = str(write_jsonl(some, "a.jsonl")), str(write_jsonl([shared] * 9, "v.jsonl"))
    words = ["data", "--data.source", source, "--data.val_source", val, "--data.tokenizer", tokenizer_path]
    words += ["--data.seq_len", "32"]
    assert main([*words, "--stats"]) == 0
    out = capsys.readouterr().out
    lengths = [len(tokenizer.encode(text)) + 1 for text in some if text.strip()]
    assert f"shortest {min(lengths):,}, " in out and f"longest {max(lengths):,} tokens" in out
    lines = [line for text in some for line in text.splitlines() if line.strip()]
    copies = [1 - len(set(items)) / len(items) for items in ([t for t in some if t.strip()], lines)]
    assert f"duplicates   {copies[0]:.2%} of documents, {copies[1]:.2%} of lines\n" in out
    assert "empty        7 documents" in out
    rejects = [f"{n} is empty" for n in range(41, 46)] + [f"{n} is a copy" for n in range(48, 53)]
    assert re.findall(r"^  document (\d+ is (?:empty|a copy))", out, re.M) == rejects  # five of each kind
    assert f"  document 48 is a copy: {some[47][:80].strip()} …\n" in out
    assert "…" in out.split("tokens a document:")[1] and sum(
        int(line.rsplit(maxsplit=1)[-1]) for line in out.split("document:\n")[1].splitlines() if "…" in line
    ) == len(lengths)
    picture = tmp_path / "runs/lengths.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and out.endswith("\npicture runs/lengths.png\n")
    picture.unlink()
    assert main([*words, "--data.dedup", "true"]) == 0
    out = capsys.readouterr().out
    assert "train        40 documents" in out and "val          1 document, " in out
    assert "dropped      19 copies" in out and not picture.exists()
    other = str(write_jsonl(texts(60, seed=2), "b.jsonl"))
    two = f"{source}*0.5,{other}*0.5"
    words = ["data", "--data.source", two, "--data.tokenizer", tokenizer_path, "--data.seq_len", "32"]
    assert main([*words, "--data.source", other, "--data.dedup", "true"]) == 0
    assert "dropped      0 copies" in capsys.readouterr().out
    assert main([*words, "--data.packing", "documents"]) == 0
    assert re.search(r"^blocks       .* next one, \d+\.\d%, \d+\.\d% full$", capsys.readouterr().out, re.M)
    assert main([*words, "--stats", "--out", "pictures"]) == 0
    assert sorted(map(str, Path().rglob("*.png"))) == ["pictures/lengths-1.png", "pictures/lengths-2.png"]
    assert main([*words, "--stats", "--out", source]) == 2
    assert f"lingpt: cannot write to {source}/lengths-1.png (" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [[1], [7], [1, 2], [300, 500, 900]])
def test_the_histogram_begins_with_the_shortest_document(lengths: list[int]):
    """Guards: an axis from one token, of documents that all have hundreds."""
    found = Statistics(np.array(lengths))
    counts, borders = found.histogram()
    assert counts.sum() == len(lengths) and (borders[0], borders[-1]) == (lengths[0], lengths[-1] + 1)
    assert not found.bars()[0].endswith(" 0")


def test_the_bars_of_a_histogram():
    """Their ranges, their lengths, and the documents of each."""
    assert [line.split() for line in Statistics(np.array([2, 3, 3, 8, 1024])).bars()[::3]] == [
        ["2", "…", "3", "█" * 40, "3"],
        ["16", "…", "31", "0"],
        ["128", "…", "255", "0"],
        ["1,024", "…", "2,047", "█" * 13, "1"],
    ]
