"""Guards a study as it is published: no path of the machine it was made on, and gone on with elsewhere."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lingpt.cli.main import main
from lingpt.study.portable import differs, portable
from lingpt.study.publish import publish_study
from lingpt.tests.study.tiny import COMMAND, TINY, fake_run, write


def paths_in(folder, machine):
    """The lines of its text files that have a path of the `machine`'s folder."""
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml", ".md", ".txt")]
    assert files
    return [(path.name, line) for path in files for line in path.read_text().splitlines() if machine in line]


def absolute(tmp_path, **changes):
    """The tiny study with every path absolute; as a notebook or a scheduler's script has them."""
    options = TINY["options"] | {
        "data.source": str(tmp_path / "train.jsonl"),
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "data.cache_dir": str(tmp_path / "cache"),
    }
    texts = {"words": str(tmp_path / "held-out.jsonl")}
    return TINY | {"learning_rates": [], "seeds": 1, "options": options, "texts": texts, **changes}


def test_a_published_study_has_no_absolute_path(here, tmp_path, monkeypatch):
    """Guards: study.json and the runs' files said where on the machine the data, texts and runs were; so did
    the page of a run that it leaves out. A study goes on from the copy, scores and all, and its new seeds
    are averaged with the old ones: by their paths they were of another card, and scored elsewhere."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)  # its name is somebody's
    write(absolute(tmp_path))
    out = ["--out", str(tmp_path / "runs")]
    assert main([*COMMAND, *out, "--attentions", "softmax"]) == 0
    fake_run("mixed-seed0", steps=2, root=tmp_path / "runs/study-tiny")
    config = tmp_path / "runs/study-tiny/mixed-seed0/config.yaml"
    config.write_text(config.read_text().replace("train.jsonl", "other.jsonl"))
    assert main([*COMMAND, *out, "--stages", "page", "--publish", "copy/study-tiny"]) == 0
    copy = Path("copy/study-tiny")
    assert not (copy / ".lock").exists()
    assert paths_in(tmp_path / "runs", str(tmp_path)) and not paths_in(copy, str(tmp_path))
    study = json.loads((copy / "study.json").read_text())
    assert (study["options"]["data.source"], study["texts"]) == ("train.jsonl", {"words": "held-out.jsonl"})
    assert yaml.safe_load((copy / "softmax-seed0/config.yaml").read_text())["data"]["source"] == "train.jsonl"
    assert "(data.source: other.jsonl → train.jsonl): " in (copy / "README.md").read_text()

    shutil.rmtree(copy / "mixed-seed0")
    here.clear()
    assert main([*COMMAND, "--out", "copy", "--seeds", "2"]) == 0
    assert here == ["data", "mixed-seed0", "softmax-seed1", "mixed-seed1", "scores"]
    page = (copy / "README.md").read_text()
    assert "Not in the tables" not in page and "softmax, step 4, 2 seeds" in page


def test_a_published_study_goes_on_with_a_run_that_was_not_done(here, tmp_path):
    """Guards: it has no weights, and begins anew; its record was taken for that of other data."""
    write(absolute(tmp_path, suites=[], attentions=["softmax"]))
    out = ["--out", str(tmp_path / "runs"), "--stages", "data", "runs", "page"]
    assert main([*COMMAND, *out, "--publish", "copy/study-tiny"]) == 0
    metrics = Path("copy/study-tiny/softmax-seed0/metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    assert main([*COMMAND, "--out", "copy", *out[2:]]) == 0
    assert "Not in the tables" not in Path("copy/study-tiny/README.md").read_text()


def test_scores_are_published_as_they_are(tmp_path):
    """Packed answers may begin with a `/`: they are no path."""
    scores = {"checkpoint": {"path": "/data/runs/x/step-4"}, "scores": {"piqa": {"correct": "/9A/b="}}}
    (tmp_path / "study").mkdir()
    (tmp_path / "study/table.json").write_text(json.dumps(scores, indent=3))
    publish_study(tmp_path / "study", tmp_path / "copy", [])
    text = (tmp_path / "copy/table.json").read_text()
    assert text == json.dumps(scores, indent=3).replace("/data/runs/x/step-4", "step-4")


def test_a_page_of_another_kind_is_not_overwritten(here, capsys):
    """Guards: `--publish docs/results/study` took the place of the index there. It is refused before anything
    is trained; the page that an earlier start has published is replaced."""
    write(TINY | {"learning_rates": [], "seeds": 1, "suites": [], "attentions": ["softmax"]})
    fake_run("softmax-seed0")
    index = Path("docs/README.md")
    index.parent.mkdir()
    index.write_text("# The study\n")
    assert main([*COMMAND, "--publish", "docs"]) == 2
    line = capsys.readouterr().err.strip()
    assert "docs/README.md is not a study's page" in line and "\n" not in line and not here
    assert index.read_text() == "# The study\n" and list(index.parent.iterdir()) == [index]
    assert main([*COMMAND, "--publish", str(index)]) == 2
    assert "docs/README.md is not a folder" in capsys.readouterr().err and not here
    for _ in range(2):
        assert main([*COMMAND, "--stages", "page", "--publish", "docs/tiny"]) == 0
    assert Path("docs/tiny/README.md").read_text().startswith("# Study tiny\n")


@pytest.mark.parametrize(
    ("path", "published"),
    [
        ("/data/wiki", "wiki"),
        ("/data/wiki/test.jsonl.xz", "wiki/test.jsonl.xz"),
        ("/data/my wiki/train-*.jsonl", "my wiki/train-*.jsonl"),
        ("--data.source=/data/a=b", "--data.source=a=b"),
        ("/corpus.jsonl", "corpus.jsonl"),
        (f"{Path.home()}/corpus.jsonl", "corpus.jsonl"),
        ("wiki/test.jsonl", "wiki/test.jsonl"),
        ("tokens/s", "tokens/s"),
        ({"texts": ["/data/novels", 3, None]}, {"texts": ["novels", 3, None]}),
    ],
)
def test_a_path_is_published_by_its_last_names(path, published):
    assert portable(path) == published and not differs(published, path)
    assert differs("/data/elsewhere", path)
