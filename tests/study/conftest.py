"""What the tests of a study share: a folder with its file and its texts, and children in this process."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lingpt.cli.main import main
from lingpt.data.tokenizer import train_bpe
from lingpt.plots import figures
from lingpt.study import stages
from lingpt.study.jobs import Failure
from lingpt.tests.study.tiny import TINY, write
from lingpt.train import report

SAVEFIG = Figure.savefig


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Children in this process; each command that ran is in `ran`."""
    ran = []

    def run_jobs(jobs, slots, deadline=None, report=print):
        failures = []
        for job in jobs:
            ran.append(job.name)
            if main(job.arguments) != 0:
                failures.append(Failure(job.name, "it failed"))
        return failures

    monkeypatch.setattr(stages, "run_jobs", run_jobs)
    # Pictures take seconds, and few tests look at them: each run's own, and what the study's show.
    monkeypatch.setattr(report, "draw_curves", lambda *_, **__: [])
    monkeypatch.setattr(Figure, "savefig", lambda _, path, **options: Path(path).touch())
    monkeypatch.setattr(figures, "_reduce_colours", lambda png: None)
    monkeypatch.chdir(tmp_path)
    words = "the sun warms stone cold water runs under old bridges birds sing rain"
    rows = [json.dumps({"text": f"{words} {number} " * 40}) for number in range(30)]
    Path("train.jsonl").write_text("\n".join(rows[4:]))
    Path("held-out.jsonl").write_text("\n".join(rows[:4]))
    train_bpe(rows, 300).save(Path("."))
    write(TINY)
    return ran


@pytest.fixture
def pictures(here, monkeypatch):
    """The study's are drawn, where a test looks at them."""
    monkeypatch.setattr(Figure, "savefig", SAVEFIG)
