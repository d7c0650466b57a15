"""Guards a study as it is published: small, without paths of the machine, and resumed elsewhere."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from lingpt.cli.main import main
from lingpt.common.run_folder import read_metrics
from lingpt.plots.curves import read_curve, smooth
from lingpt.study.page import MARKER
from lingpt.study.portable import differs, portable
from lingpt.study.publish import POINTS, _without, thin
from lingpt.tests.study.tiny import COMMAND, FOLDER, PIQA, TINY, fake_run, write, write_scores, write_tiny


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


@pytest.mark.slow
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
    config.write_text(config.read_text().replace("train.jsonl", "cache/old/other.jsonl"))
    above = tmp_path / "runs/study-tiny/README.md"
    above.write_text(f"# Of {tmp_path}/train.jsonl\n\n{MARKER}\n")
    assert main([*COMMAND, *out, "--stages", "page", "--publish", "copy/study-tiny"]) == 0
    copy = Path("copy/study-tiny")
    assert not (copy / ".lock").exists()
    shown = re.findall(r"\]\((\S+\.png)\)", (copy / "README.md").read_text())
    assert "positions.png" in shown and all((copy / name).is_file() for name in (*shown, "suites.md"))
    assert paths_in(tmp_path / "runs", str(tmp_path)) and not paths_in(copy, str(tmp_path))
    study = json.loads((copy / "study.json").read_text())
    assert (study["options"]["data.source"], study["texts"]) == ("train.jsonl", {"words": "held-out.jsonl"})
    assert yaml.safe_load((copy / "softmax-seed0/config.yaml").read_text())["data"]["source"] == "train.jsonl"
    assert "(data.source: old/other.jsonl → train.jsonl): " in (copy / "README.md").read_text()

    shutil.rmtree(copy / "mixed-seed0")
    here.clear()
    assert main([*COMMAND, "--out", "copy", "--seeds", "2"]) == 0
    assert here == ["data", "mixed-seed0", "softmax-seed1", "mixed-seed1", "scores"]
    page = (copy / "README.md").read_text()
    assert "Not in the tables" not in page and "softmax, step 4, 2 seeds" in page


@pytest.mark.slow
def test_a_published_study_goes_on_with_a_run_that_was_not_done(here, tmp_path):
    """Guards: it has no weights, and begins anew; its record was taken for that of other data."""
    write(absolute(tmp_path, suites=[], attentions=["softmax"]))
    out = ["--out", str(tmp_path / "runs"), "--stages", "data", "runs", "page"]
    assert main([*COMMAND, *out, "--publish", "copy/study-tiny"]) == 0
    metrics = Path("copy/study-tiny/softmax-seed0/metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    assert main([*COMMAND, "--out", "copy", *out[2:]]) == 0
    assert "Not in the tables" not in Path("copy/study-tiny/README.md").read_text()


def test_metrics_are_thinned_to_what_a_figure_shows(tmp_path):
    """At most `POINTS` training losses, each the mean of its part; validations, skipped steps and divergence
    stay; thinned again nothing changes. The curve is that of all steps."""
    steps, loss = np.arange(1, 1921), np.random.default_rng(0).normal(0, 0.1, 1920)
    loss += 3 + 7 * np.exp(-steps / 300)
    every = [
        {"kind": "train", "step": step, "tokens": 9 * step, "train_time": 0.53 * step, "loss": x}
        | {"mfu": 0.31, "peak_memory": 10**9}
        for step, x in zip(steps.tolist(), loss.tolist(), strict=True)
    ]
    others = [
        {"kind": "train", "step": 900, "train_time": 450.0, "loss": None, "skipped": True},
        {"kind": "val", "step": 1920, "tokens": 128 * 1920, "train_time": 960.0, "loss": 3.01},
        {"kind": "diverged", "step": 1920},
    ]
    kept = thin([*every[:950], others[0], *every[950:], *others[1:]], POINTS)
    train = [line for line in kept if line not in others]
    assert len(train) == POINTS and [line for line in kept if line in others] == others
    assert (train[0]["step"], train[0]["loss"]) == (7, pytest.approx(loss[:13].mean(), abs=1e-4))
    assert kept[0] == every[6] | {"train_time": 3.71, "loss": kept[0]["loss"]} and thin(kept, POINTS) == kept
    assert thin(kept, 0) == others == thin(others, POINTS)
    for name, lines in (("all", every), ("thin", kept)):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    whole, some = (read_curve(tmp_path / name).train for name in ("all", "thin"))
    drawn = np.interp(some[:, 0], whole[:, 0], smooth(whole[:, 2]))
    assert np.abs(smooth(some[:, 2]) - drawn)[1:-1].max() < 0.05


def test_scores_are_published_as_they_are(here):
    """Packed answers may begin with a `/`: they are no path. Only what a page is made of is published, and a
    person's text on a page that is there stays."""
    write_tiny(suites=["table2"], attentions=["softmax", "gla"])
    fake_run("softmax-seed0")
    write_scores(
        "softmax-seed0",
        4,
        **{"piqa (0-shot)": PIQA | {"correct": {"acc": "/w=="}, "data": {"path": "/data/p.jsonl"}}},
    )
    mqar = {"mqar/mqar-table.md", "mqar/mqar.json", "mqar/mqar.png"}
    for name in (*mqar, "mqar/log.txt", "notes.txt"):
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text("{}")
    page = Path("copy/README.md")
    page.parent.mkdir()
    page.write_text(f"# Softmax\n\n{MARKER}\n")
    assert main([*COMMAND, "--stages", "page", "--publish", "copy"]) == 0
    found = {str(path.relative_to("copy")) for path in Path("copy").rglob("*") if path.is_file()}
    run = {f"softmax-seed0/{name}" for name in ("config.yaml", "metrics.jsonl", "eval/step-00000004.json")}
    files = {"README.md", "study.json", "summary.json", "curves.png", "table2.md", "table2.json"}
    assert found == run | files | mqar
    kinds = [line["kind"] for line in read_metrics(Path("copy/softmax-seed0"))]
    assert (kinds.count("train"), kinds.count("val")) == (4, 2)
    entry = json.loads(Path("copy/softmax-seed0/eval/step-00000004.json").read_text())["scores"][
        "piqa (0-shot)"
    ]
    assert entry["correct"] == {"acc": "/w=="} and entry["data"] == {"path": "data/p.jsonl"}
    assert page.read_text().startswith(f"# Softmax\n\n{MARKER}\n\nA test.\n\n## Setting\n")


def test_a_path_in_a_text_is_that_path_alone():
    """Not the end of another, nor the beginning of a name; with what means something else in a pattern."""
    text = "/data/a*(1).jsonl, not my/data/a*(1).jsonl, /data/a*(1).jsonl-old"
    assert _without(["/data/a*(1).jsonl"], text) == "data/" + text.removeprefix("/data/")


def test_a_study_is_not_published_over_itself(here, capsys):
    """Guards: its runs' losses were thinned, and the paths in their records cut."""
    write_tiny(suites=[], attentions=["softmax"])
    fake_run("softmax-seed0")
    before = (FOLDER / "softmax-seed0/config.yaml").read_text()
    assert main([*COMMAND, "--stages", "page", "--publish", "runs/../runs/study-tiny"]) == 2
    line = capsys.readouterr().err.strip()
    assert "is the study's own folder" in line and "\n" not in line
    assert (FOLDER / "softmax-seed0/config.yaml").read_text() == before


def test_tables_of_an_earlier_page_are_not_published_any_more(here):
    """Guards: the scores of a suite that the study no longer has, beside a page without them."""
    write_tiny(suites=["table2"], attentions=["softmax"])
    fake_run("softmax-seed0")
    write_scores("softmax-seed0", 4, **{"piqa (0-shot)": PIQA})
    for suites, tables in ((["table2"], {"table2.md", "table2.json"}), ([], set())):
        write_tiny(suites=suites, attentions=["softmax"])
        assert main([*COMMAND, "--stages", "page", "--publish", "copy"]) == 0
        assert {path.name for path in Path("copy").glob("table2.*")} == tables
        assert Path("copy/softmax-seed0/eval/step-00000004.json").is_file()


def test_a_page_of_another_kind_is_not_overwritten(here, capsys):
    """Guards: `--publish docs/results/study` took the place of the index there. It is refused before anything
    is trained; the page that an earlier start has published is replaced."""
    write_tiny(suites=[], attentions=["softmax"])
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
        # Guards: a mixture of which the last source alone was published.
        ("/data/wiki/a.jsonl*0.7,/data/novels/b.jsonl*0.3", "wiki/a.jsonl*0.7,novels/b.jsonl*0.3"),
        ("one=/data/wiki,two=/data/novels", "one=wiki,two=novels"),
        (f"{Path.home()}/corpus.jsonl", "corpus.jsonl"),
        ("wiki/test.jsonl", "wiki/test.jsonl"),
        ("tokens/s", "tokens/s"),
        ({"texts": ["/data/novels", 3, None]}, {"texts": ["novels", 3, None]}),
    ],
)
def test_a_path_is_published_by_its_last_names(path, published):
    assert portable(path) == published and not differs(published, path)
    assert differs("/data/elsewhere", path)
