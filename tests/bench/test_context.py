"""The rows of `lingpt bench context`: what fails is a line, and the others are kept."""

import json
import subprocess
from pathlib import Path

from lingpt.bench import context
from lingpt.common.run_folder import METRICS
from lingpt.train.recipe import parse_recipe
from lingpt.train.start import check_recipe

OPTIONS = {"base_len": 128, "check_len": 256, "devices": 2, "accelerator": "cpu", "steps": 3, "budget": 60.0}


def test_a_row_that_fails_leaves_the_others(tmp_path: Path, monkeypatch):
    """Every command is one of `lingpt train`, with a recipe that can be trained on so many devices."""

    done = subprocess.CompletedProcess

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess:
        recipe = parse_recipe(words[words.index("train") + 1 :])
        check_recipe(recipe)
        if recipe.train.dry_run:
            return done(words, 0, "estimated share of a step on H100s: 0.1% over 2\n", "")
        if recipe.data.seq_len == 1024:
            return done(words, 2, "", "lingpt: out of memory: try a smaller model")
        rate = 100.0 * recipe.train.devices
        line = {"kind": "train", "tokens": 1, "train_time": 1.0, "loss": 7.0, "tokens_per_second": rate}
        recipe.run_folder.mkdir(parents=True)
        lines = [json.dumps({**line, "step": step + 1}) for step in range(recipe.train.max_steps)]
        (recipe.run_folder / METRICS).write_text("\n".join(lines) + "\n")
        return done(words, 0, "step 3/3 · 1 tokens/s · 1.5 GB · 0 s left\n", "")

    monkeypatch.setattr(context, "environment", dict)
    monkeypatch.setattr(context.subprocess, "run", run)
    rows = context.bench_context("demo", ["ours"], [512, 1024], **OPTIONS, options=[], out=tmp_path)
    assert [row.kind for row in rows] == ["one", "ddp", "pieces", "pieces", "first", "first"]
    failed = rows[3]
    assert failed.error == "lingpt: out of memory: try a smaller model" and failed.planned_share
    for row in (*rows[:3], *rows[4:]):
        assert row.error is None and row.losses[0] == 7.0 and row.memory == 1.5
    assert [row.relative for row in rows] == [1.0, 1.0, 1.0, None, None, None]
    saved = json.loads((tmp_path / "context.json").read_text())
    assert len(saved["rows"]) == 6 and "out of memory" in context.table(rows)
