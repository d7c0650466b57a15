"""Curves: drawn from metrics.jsonl alone, and a table whose numbers can be checked by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from lingpt.common.errors import UserError
from lingpt.plots.curve_figure import caption, draw, draw_curves
from lingpt.plots.curves import (
    find_curve,
    find_runs,
    format_table,
    labels,
    mean_over_seeds,
    read_curve,
    smooth,
    spikes,
)
from lingpt.plots.palette import COLOURS, SHADES, shade


@pytest.fixture
def written():
    """For a test that looks at the files of the figures; each takes a second."""


@pytest.fixture(autouse=True)
def saved(request, monkeypatch):
    """The figures that were saved."""
    kept, save = [], Figure.savefig

    def keep(figure, path, **options):
        kept.append(figure)
        save(figure, path, **options) if "written" in request.fixturenames else Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    if "written" not in request.fixturenames:
        monkeypatch.setattr("lingpt.plots.figures._reduce_colours", lambda png: None)
    return kept


def write_run(folder, attention, seconds_per_step, val, record=None, **config):
    """A run with validation losses `{step: loss}` and training losses on the line through them. config: parts
    of its recipe; record: its environment."""
    folder.mkdir(parents=True)
    config["model"] = {"name": "demo", "attention": attention} | config.get("model", {})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if record:
        (folder / "environment.json").write_text(json.dumps(record))
    steps = sorted(val)
    losses = np.interp(range(1, steps[-1] + 1), steps, [val[s] for s in steps])
    lines = []
    for step, loss in enumerate(losses, 1):
        clock = {"step": step, "tokens": step, "train_time": step * seconds_per_step}
        lines.append({"kind": "train", **clock, "loss": float(loss)})
        if step in val:
            lines.append({"kind": "val", **clock, "loss": val[step]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read_seeds(folder, recipes, attention="ours"):
    """The curves of a-seed0, a-seed1 …, each of a recipe with these parts, and its `record`."""
    runs = []
    for seed, recipe in enumerate(recipes):
        train = {"seed": seed} | recipe.get("train", {})
        name, config = folder / f"a-seed{seed}", recipe | {"train": train}
        runs.append(write_run(name, attention, 1.0, {2: 4.0, 4: 3.0}, **config))
    return [read_curve(run) for run in runs]


def test_time_to_loss_by_hand(tmp_path):
    """`a` falls 4 → 2 over steps 10 … 20 at 2 s a step; `b` needs twice the steps at 1 s: the same times."""
    a = write_run(tmp_path / "a", "ours", 2.0, {10: 4.0, 20: 2.0})
    b = write_run(tmp_path / "b", "softmax", 1.0, {10: 4.0, 30: 3.0, 50: 2.0})
    rows = draw_curves([a, b], tmp_path / "out.png")
    assert [row["loss"] for row in rows] == [3.6, 3.2, 2.8, 2.4, 2.0]
    row = rows[1]
    assert row["runs"]["ours"] == {"time": pytest.approx(28.0), "step": pytest.approx(14.0), "ratio": 1.0}
    assert row["runs"]["softmax"]["step"] == pytest.approx(26.0)
    assert row["runs"]["softmax"]["ratio"] == pytest.approx(26 / 28)
    table = format_table(rows)
    assert "3.20" in table and "28.0 s" in table and "0.93×" in table


def test_only_losses_that_all_reach(tmp_path):
    """Guards: "too few points" of two runs of 20 steps, one of which ended above where the other began."""
    a = write_run(tmp_path / "a", "ours", 1.0, {10: 4.0, 20: 2.0})
    b = write_run(tmp_path / "b", "gla", 1.0, {10: 4.5, 20: 3.1})
    rows = draw_curves([a, b], tmp_path / "out.png")
    assert rows and all(3.1 <= row["loss"] <= 4.0 for row in rows)
    never = write_run(tmp_path / "c", "softmax", 1.0, {10: 9.0, 20: 8.0})
    assert (rows := draw_curves([a, never], tmp_path / "out.png")) == []
    line = "time to loss: the runs have no loss in common, or one has fewer than two points"
    assert format_table(rows) == line


def test_the_picture_has_both_panels_and_one_colour_an_attention(tmp_path, saved, written):
    """Loss against time and against step; one attention has one colour, its runs differ in its shade, dashes
    and markers. Guards: rows that no legend told apart."""
    runs = [write_run(tmp_path / n, "ours", 1.0, {10: 4.0, 40: 3.0}) for n in ("x", "y")]
    draw_curves([*runs, write_run(tmp_path / "z", "softmax", 9.0, {10: 4.0, 40: 3.0})], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    time_panel, token_panel, step_panel = saved[0].axes
    assert "minutes" in time_panel.get_xlabel() and step_panel.get_xlabel() == "step"
    assert token_panel.get_xlabel() == "tokens"
    assert time_panel.get_ylabel() == "loss (nats per token)"
    texts = [text.get_text() for text in step_panel.get_legend().get_texts()]
    assert [text.split()[0] for text in texts] == ["x", "y", "z"]
    lines = step_panel.get_legend().get_lines()
    drawn = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]
    ours, softmax = COLOURS["ours"], COLOURS["softmax"]
    assert drawn == [(ours, "-", "o"), (shade(ours, SHADES[1]), "--", "s"), (softmax, "-", "o")]
    assert step_panel.get_legend().get_title().get_text() == "last validation loss"
    assert step_panel.xaxis.get_major_formatter()(2000) == "2,000"
    points = [line for line in time_panel.lines if line.get_marker() == "o" and len(line.get_xdata())]
    np.testing.assert_allclose(points[-1].get_xdata(), [90 / 60, 360 / 60])


def test_all_of_the_training_is_shown_and_its_end_larger(tmp_path):
    """Guards: axes that cut off the start; rows in one line at the end, below the first fall."""
    losses = {1: 9.0, 40: 6.0, 100: 4.2, 400: 4.0}
    panels = draw([read_curve(write_run(tmp_path / "a", "ours", 1.0, losses))]).axes
    for panel in panels:
        (low, high), (left, right) = panel.get_ylim(), panel.get_xlim()
        assert low < 4.0 and high > 9.0 and left == 0 and right >= 400 / 60
    (inset,) = panels[0].child_axes
    assert 3.9 < inset.get_ylim()[0] < 4.0 and 4.2 < inset.get_ylim()[1] < 4.4
    flat = {1: 4.4, 100: 4.2, 400: 4.0}
    assert not draw([read_curve(write_run(tmp_path / "b", "ours", 1.0, flat))]).axes[0].child_axes


def test_the_legend_has_the_order_of_the_curves_ends(tmp_path):
    ends = {"softmax": 3.0, "ours": 3.2, "gla": 3.1}
    curves = [read_curve(write_run(tmp_path / n, n, 1.0, {1: 9.0, 40: end})) for n, end in ends.items()]
    texts = [text.get_text() for text in draw(curves).axes[-1].get_legend().get_texts()]
    assert texts == ["ours  3.200", "gla  3.100", "softmax  3.000"]


def test_runs_of_different_validation_texts_are_marked(tmp_path, capsys):
    """Guards: losses of different texts, or of more and fewer tokens of one, drawn as if one were better."""
    runs = []
    for name, documents, tokens in [("a", 10, 100), ("b", 10, 100), ("c", 11, 100), ("d", 10, 900)]:
        text = {"documents": documents, "bytes": 1000, "tokens": 900}
        record = {"data": {"tokenizer_hash": "1f", "val": text, "fingerprint": name}}
        losses, train = {10: 4.0, 20: 2.0}, {"eval_tokens": tokens}
        runs.append(write_run(tmp_path / name, "ours", 1.0, losses, record, train=train))
    draw_curves(runs[:2], tmp_path / "out.png")
    assert capsys.readouterr().err == ""
    rows = draw_curves(runs, tmp_path / "out.png")
    assert [set(row["runs"]) for row in rows] == [{"a", "b"}] * len(rows), "times to losses of other texts"
    unknown = write_run(tmp_path / "e", "ours", 1.0, {10: 4.0, 20: 2.0})
    assert set(draw_curves([runs[0], unknown], tmp_path / "out.png")[0]["runs"]) == {"a", "e"}
    line = "not comparable, as the validation texts differ: a, b | c | d"
    assert capsys.readouterr().err == f"{line}\n"
    assert caption([read_curve(run) for run in runs]).startswith(f"{line}.\nLines: ")
    rows = draw_curves(runs[1:3], tmp_path / "out.png")
    assert rows and [set(row["runs"]) for row in rows] == [{"b"}] * len(rows), "the name in the figure"


def test_the_losses_of_one_of_several_validation_texts(tmp_path, capsys):
    """`--val`: of the runs that have a text of this name, compared where it is the same text."""
    runs = []
    for name, entry, tokens in (("a", "1f", 9), ("b", "1f", 9), ("c", "2e", 9), ("d", "1f", 5)):
        record = {"data": {"val_sources": {"books": {"entry": entry, "tokens": 9}}}}
        train = {"eval_tokens": tokens}
        run = write_run(tmp_path / name, "ours", 1.0, {10: 4.0, 20: 2.0}, record, train=train)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"losses": {"books": line["loss"] + 1}} for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(run)
    assert read_curve(runs[0], val="books").val[:, 2].tolist() == [5.0, 3.0]
    draw_curves(runs[:2], tmp_path / "out.png", val="books")
    assert capsys.readouterr().err == ""
    draw_curves(runs, tmp_path / "out.png", val="books")
    assert capsys.readouterr().err == "not comparable, as the validation texts differ: a, b | c | d\n"
    with pytest.raises(UserError, match="was not validated on 'poems'"):
        read_curve(runs[0], val="poems")


def test_the_runs_that_are_drawn(tmp_path, capsys):
    """Those in runs/, else those of its only study, without its short runs of other rates; a study that is
    named stands for its runs. Guards: "no runs to draw" of a study of ten; two studies in one figure."""
    root, losses = tmp_path / "runs", {2: 4.0, 4: 3.0}
    with pytest.raises(UserError, match="no runs to draw"):
        draw_curves(find_runs([], root), tmp_path / "out.png")
    study = [write_run(root / "study-a" / f"ours-seed{i}", "ours", 1.0, losses) for i in range(2)]
    write_run(root / "study-a" / "ours-rate0.001", "ours", 1.0, losses)
    assert find_runs([], root) == study == find_runs([root / "study-a"])
    other = write_run(root / "study-b" / "mine", "ours", 1.0, losses)
    with pytest.raises(UserError, match=r"runs has several studies: name one, lingpt curves .*/study-a"):
        find_runs([], root)
    alone = write_run(root / "demo-ours", "ours", 1.0, losses)
    assert find_runs([], root) == [alone]
    assert f"not drawn: the runs of {root}/study-a, " in capsys.readouterr().err
    assert find_runs([alone, root / "study-b", alone, tmp_path / "x"]) == [alone, other, tmp_path / "x"]


def test_labels_are_attentions_only_where_these_tell_runs_apart(tmp_path):
    a = read_curve(write_run(tmp_path / "a", "ours", 1.0, {2: 4.0, 4: 3.0}))
    b = read_curve(write_run(tmp_path / "b", ["ours", "softmax"], 1.0, {2: 4.0, 4: 3.0}))
    c = write_run(tmp_path / "c", "gla", 1.0, {2: 4.0, 4: 3.0}, model={"name": "pythia-70m"})
    c = read_curve(c)
    assert labels([a, b]) == ["ours", "ours + softmax_every=2"]
    assert labels([a, c]) == ["a", "c"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    """Guards: `a/demo-ours` and `b/demo-ours`, of which table, JSON and picture had the second alone."""
    monkeypatch.chdir(tmp_path)
    names = ["x/a/demo-ours", "y/a/demo-ours", "b/demo-ours", "b/demo-softmax"]
    runs = [
        write_run(tmp_path / name, name.split("-")[-1], 1.0 + i, {2: 4.0, 4: 3.0})
        for i, name in enumerate(names)
    ]
    curves = [read_curve(run) for run in names]  # relative paths
    assert labels(curves) == ["x/a/demo-ours", "y/a/demo-ours", "b/demo-ours", "demo-softmax"]
    assert labels(curves[1:]) == ["a/demo-ours", "b/demo-ours", "demo-softmax"]
    monkeypatch.chdir(tmp_path / "b/demo-ours")
    assert labels([read_curve("."), curves[0]]) == ["b/demo-ours", "a/demo-ours"]
    (row, *_) = draw_curves(runs[1:3], tmp_path / "out.png", "b/demo-ours")
    assert {name: run["ratio"] for name, run in row["runs"].items()} == {
        "a/demo-ours": pytest.approx(2 / 3),
        "b/demo-ours": 1.0,
    }
    for name in ("b/demo-ours", "../../b/demo-ours", str(runs[2])):  # the label, or a path to the folder
        assert find_curve(curves, name) == 2
    assert find_curve(curves, "demo-softmax") == find_curve(curves, "softmax") == 3


def test_means_of_one_name_are_told_apart(tmp_path):
    """Guards: in one folder, seeds of one rate and of another, whose means are called alike."""
    curves = read_seeds(tmp_path, [{"train": {"learning_rate": seed // 2}} for seed in range(4)])
    means = mean_over_seeds(curves)
    assert [mean.runs for mean in means] == [2, 2] and labels(means) == ["a-seed0", "a-seed2"]


def test_forms_of_one_attention_have_their_options_as_labels(tmp_path):
    """Guards: a run with the output gate that stood in the legend under the name of one without."""
    losses = {2: 4.0, 4: 3.0}
    plain = write_run(tmp_path / "a", "ours-gated", 1.0, losses)
    gated = write_run(tmp_path / "b", "ours-gated", 1.0, losses, model={"output_gate": True})
    curves = [read_curve(plain), read_curve(gated)]
    assert labels(curves) == ["ours-gated", "ours-gated + output_gate"]
    assert find_curve([curves[1]], "ours-gated") == 0  # its attention names it, too


def test_a_student_is_drawn_by_its_validation(tmp_path):
    """Guards: the distance to a teacher, near 0, drawn as a loss of the next token."""
    run = write_run(tmp_path / "a", "ours", 1.0, {10: 4.0, 20: 3.0}, train={"teacher": "runs/b"})
    student, teacher = read_curve(run), read_curve(write_run(tmp_path / "b", "softmax", 1.0, {20: 3.0}))
    assert not len(student.train) and student.val[:, 2].tolist() == [4.0, 3.0]
    assert caption([student]).startswith("Lines: validation; open markers: validation.")
    assert "Lines: training loss, centred average (of ours validation); open" in caption([student, teacher])


def test_a_loss_that_hardly_changes_is_written_out(tmp_path):
    """Guards: `1e−6+1.084e1` above the axis."""
    figure = draw([read_curve(write_run(tmp_path / "a", "ours", 1.0, {10: 10.8412876, 20: 10.8412898}))])
    panel = figure.axes[0]
    panel.set_ylim(10.841287, 10.84129)
    figure.draw_without_rendering()
    assert panel.yaxis.get_offset_text().get_text() == ""


def test_a_step_that_is_there_twice_counts_once(tmp_path):
    """The last line. Guards: seeds of different lengths, and a traceback, where one was written twice."""
    a = write_run(tmp_path / "a", "ours", 1.0, {2: 4.0, 4: 3.0})
    whole = read_curve(a)
    lines = (a / "metrics.jsonl").read_text()
    (a / "metrics.jsonl").write_text(lines + lines.splitlines()[-1].replace("3.0", "2.5") + "\n")
    again = read_curve(a)
    assert again.val[:, 2].tolist() == [4.0, 2.5] and np.array_equal(again.train, whole.train)


def test_a_seed_without_training_losses_is_drawn(tmp_path, written):
    """Guards: a seed whose metrics were damaged and that went on from its last checkpoint: one validation."""
    names = [tmp_path / f"a-seed{i}" for i in range(2)]
    runs = [write_run(n, "ours", 1.0, {2: 4.0, 4: 3.0}, train={"seed": i}) for i, n in enumerate(names)]
    (runs[1] / "metrics.jsonl").write_text(
        '{"kind": "val", "step": 4, "tokens": 4, "train_time": 4.0, "loss": 3.0}\n'
    )
    draw_curves(runs, tmp_path / "out.png")
    (mean,) = mean_over_seeds([read_curve(run) for run in runs])
    assert mean.val[:, 2].tolist() == [3.0] and len(mean.train) == 0


def test_seeds_that_share_no_step_stay_apart(tmp_path):
    """Guards: an IndexError, where each was logged at steps of its own."""
    runs = []
    for seed in (0, 1):
        losses = {1 + seed: 3.0, 3 + seed: 1.0}
        run = write_run(tmp_path / f"a-seed{seed}", "ours", 1.0, losses, train={"seed": seed})
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(line for line in lines if '"val"' in line))
        runs.append(run)
    assert len(draw_curves(runs, tmp_path / "out.png")) > 1
    curves = mean_over_seeds([read_curve(run) for run in runs])
    assert labels(curves) == ["a-seed0", "a-seed1"] and [curve.runs for curve in curves] == [1, 1]


def test_runs_of_one_seed_are_compared(tmp_path):
    """Guards: a run before a change of the kernels and one after it, drawn as a `mean of 2 seeds`; another
    seed beside them makes no mean of either."""
    curves = []
    for name, seed in (("before", 0), ("after", 0), ("after-seed1", 1)):
        train = {"seed": seed, "name": name}
        run = write_run(tmp_path / name, "ours", 1.0, {2: 4.0, 4: 3.0}, train=train)
        curves.append(read_curve(run))
    for found in (curves[:2], curves):
        apart = mean_over_seeds(found)
        assert [curve.runs for curve in apart] == [1] * len(found) and "seeds" not in caption(apart)
        assert labels(apart) == ["before", "after", "after-seed1"][: len(found)]
    assert [curve.runs for curve in mean_over_seeds(curves[1:])] == [2]


def test_texts_of_one_name_are_told_apart(tmp_path):
    """Guards: `train.jsonl` under runs of two texts that are both called so; a text that has moved is one."""
    curves = []
    for i, (source, fingerprint) in enumerate(
        [("/data/wiki/train.jsonl", "1f"), ("wiki/train.jsonl", "1f"), ("/data/books/train.jsonl", "2e")]
    ):
        record = {"data": {"fingerprint": fingerprint}}
        run = write_run(tmp_path / f"{i}", "ours", 1.0, {2: 4.0}, record, data={"source": source})
        curves.append(read_curve(run))
    assert caption(curves[:2]).endswith("\ntrain.jsonl.")
    assert caption(curves).endswith("\nwiki/train.jsonl and books/train.jsonl.")


def test_seeds_whose_data_has_moved_are_one_curve(tmp_path):
    """Guards: a study that went on with its data elsewhere had a row `on different cards`, and no mean. A run
    of other data is apart, though its path is the same."""
    recipes = [
        {"data": {"source": source}, "record": {"data": {"fingerprint": fingerprint}}}
        for source, fingerprint in (("/old/wiki", "1f"), ("wiki", "1f"), ("wiki", "2e"))
    ]
    curves = read_seeds(tmp_path, recipes)
    assert [curve.runs for curve in mean_over_seeds(curves)] == [2, 1]


def test_seeds_recorded_before_and_after_an_option_came_are_one_curve(tmp_path):
    """Guards: a second seed, trained a week later with one option more in its recipe, had no mean with the
    first. An option that is given is still a difference, and so is a size of the model."""
    recipes = [
        {},
        {"model": {"softmax_gate": False, "constant": True}, "train": {"reduce_bf16": False}},
        {"model": {"softmax_gate": True}},
        {"train": {"reduce_bf16": True}},
        {"model": {"n_layer": 9}},
    ]
    curves = read_seeds(tmp_path, recipes, "softmax")
    assert [curve.runs for curve in mean_over_seeds(curves)] == [2, 1, 1, 1]


def test_seeds_with_other_bookkeeping_are_one_curve(tmp_path):
    """Guards: no mean of two seeds of which one kept more checkpoints. What changes time, length or the
    first weights is a difference."""
    runs = [
        {},
        {"keep_checkpoints": 9, "save_minutes": 5.0, "keep_best": True, "timeout_minutes": 1.0},
        {"wandb_project": "mine", "profile": True, "log_interval": 2, "eval_interval": 7},
        {"compile": "never"},
        {"max_steps": 4},
        {"init_from": "runs/other"},
    ]
    curves = read_seeds(tmp_path, [{"train": train} for train in runs])
    assert [curve.runs for curve in mean_over_seeds(curves)] == [3, 1, 1, 1]


def test_a_legend_that_does_not_fit_stands_beside_the_panels(tmp_path):
    """Guards: long names of runs across the curves; ticks cut at the right edge."""
    name = "pythia-160m-ours-gated-output_gate-short_conv"
    runs = [write_run(tmp_path / f"{name}-{i}", "ours", 1.0, {10: 4.0, 40: 3.0}) for i in range(2)]
    curves = [read_curve(run) for run in runs]
    figure = draw(curves)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert all(panel.get_legend() is None for panel in figure.axes)
    box = legend.get_window_extent()
    assert figure.axes[-1].get_window_extent().x1 < box.x0 and box.x1 <= figure.bbox.width


def test_spikes_and_skipped_steps_are_marked(tmp_path, saved):
    """A spike stands out of the noise before it; neither the first fall nor the noise is one."""
    rng = np.random.default_rng(0)
    loss = 3 + 5 * np.exp(-np.arange(400) / 40) + 0.05 * rng.normal(size=400)
    assert spikes(loss).tolist() == []
    loss[[200, 300]] += 2
    assert spikes(loss).tolist() == [200, 300] and spikes(loss[:10]).tolist() == []
    run = tmp_path / "a"
    run.mkdir()
    clock = [{"kind": "train", "step": i + 1, "tokens": 1, "train_time": 2.0 * i} for i in range(401)]
    rows = [line | {"loss": float(x)} for line, x in zip(clock, loss, strict=False)]
    rows.append(clock[-1] | {"loss": None, "skipped": True})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_curves([run], tmp_path / "out.png")
    by_step = saved[0].axes[2]
    marks = {line.get_marker(): list(line.get_xdata()) for line in by_step.lines if len(line.get_xdata())}
    assert marks["v"] == [201, 301] and marks["x"] == [401]
    assert "▾ loss spike" in saved[0].texts[-1].get_text()


def test_a_long_run_is_drawn_with_few_points(tmp_path):
    """Guards: a figure of a few runs that takes megabytes; a spike, or the end, that is left out for it."""
    losses = {1: 9.0, 4000: 4.0, 4001: 20.0, 4002: 4.0, 9000: 3.0}
    panel = draw([read_curve(write_run(tmp_path / "a", "ours", 1.0, losses))]).axes[-1]
    every, averaged = panel.lines[:2]
    assert len(every.get_xdata()) <= 400 and len(averaged.get_xdata()) == 200
    assert every.get_ydata().max() == 20 and averaged.get_xdata()[[0, -1]].tolist() == [1, 9000]


def test_smoothing_does_not_lag_and_takes_noise_away():
    """Of a line it is the line, nearly so where the window is cut off; of noise, a fraction, also at the
    ends."""
    np.testing.assert_allclose(smooth(np.full(500, 3.0)), 3.0)
    falling = np.linspace(5, 3, 500)
    np.testing.assert_allclose(smooth(falling)[5:-5], falling[5:-5])
    assert np.abs(smooth(falling) - falling).max() < 0.1
    noise = np.random.default_rng(0).normal(size=5000)
    assert smooth(noise).std() < 0.2 and np.abs(smooth(noise)[[0, -1]]).max() < 0.5
    assert len(smooth(noise[:3])) == 3


def test_a_crash_mid_line_and_null_losses_are_passed_over(tmp_path):
    run = write_run(tmp_path / "a", "ours", 1.0, {2: 4.0, 4: 3.0})
    with open(run / "metrics.jsonl", "a") as file:
        for loss in ("null", "NaN"):
            file.write(f'{{"kind": "train", "step": 5, "tokens": 5, "train_time": 5.0, "loss": {loss}}}\n')
        file.write('{"kind": "tr')
    assert len(read_curve(run).train) == 4


def test_a_folder_without_losses_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no losses in"):
        draw_curves([tmp_path], tmp_path / "out.png")


def test_a_sick_run_is_named_and_the_others_are_drawn(tmp_path, capsys):
    """Guards: one cut file anywhere in runs/ that nobody can draw curves for until it is found."""
    well = [write_run(tmp_path / n, a, 1.0, {10: 4.0, 20: 2.0}) for n, a in (("a", "ours"), ("z", "gla"))]
    sick = {n: write_run(tmp_path / n, "softmax", 1.0, {10: 4.0, 20: 2.0}) for n in ("b", "c", "d")}
    (sick["b"] / "metrics.jsonl").write_text("")
    (sick["c"] / "config.yaml").write_text("model: {name: demo, atten")
    (sick["d"] / "config.yaml").write_text("model: 3")
    rows = draw_curves([well[0], *sick.values(), well[1]], tmp_path / "out.png")
    assert rows == draw_curves(well, tmp_path / "well.png") != []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("left out: ") for line in lines)
    for folder, line in zip(sick.values(), lines, strict=True):
        assert str(folder) in line
    with pytest.raises(UserError, match=r"config.yaml is not YAML"):
        draw_curves([sick["c"]], tmp_path / "out.png")


def test_damage_in_the_middle_is_named_and_costs_its_line_alone(tmp_path, capsys):
    """Guards: all later history lost to one bad line."""
    run = write_run(tmp_path / "a", "ours", 1.0, {10: 4.0, 20: 2.0})
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[2:5] = [b"\0" * 40 + b"\n", b'{"kind": "train", "st\n', b"\xff[1]\n"]
    lines[7] = b'{"kind": "train", "step": 8, "tokens": 8, "train_time": "soon", "loss": 3.0}\n'
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    curve = read_curve(run)
    assert curve.train[:, 0].tolist() == [1, 2, *range(6, 8), *range(9, 21)] and len(curve.val) == 2
    err = capsys.readouterr().err
    assert err.endswith("metrics.jsonl is damaged, and these lines of it are left out: 3, 4, 5\n")


def test_a_baseline_by_choice(tmp_path):
    """By its label, its name or its folder; by default the first."""
    a = write_run(tmp_path / "a", "ours", 2.0, {10: 4.0, 20: 2.0})
    b = write_run(tmp_path / "b", "softmax", 1.0, {10: 4.0, 30: 3.0, 50: 2.0})
    ratio = draw_curves([a, b], tmp_path / "out.png")[1]["runs"]["softmax"]["ratio"]
    for name in ("softmax", "b", str(b)):
        rows = draw_curves([a, b], tmp_path / "out.png", baseline=name)
        assert rows[1]["runs"]["ours"]["ratio"] == pytest.approx(1 / ratio)
        assert rows[1]["runs"]["softmax"]["ratio"] == 1.0
    assert "× softmax's time" in format_table(rows, "softmax")
    with pytest.raises(UserError, match=r"unknown baseline 'softmix' \(did you mean 'softmax'\?\)"):
        draw_curves([a, b], tmp_path / "other.png", baseline="softmix")
    assert not (tmp_path / "other.png").exists()


def test_a_picture_of_no_known_kind_is_one_line(tmp_path, written):
    run = write_run(tmp_path / "a", "ours", 1.0, {10: 4.0, 20: 2.0})
    with pytest.raises(UserError, match=r"cannot draw a \.xyz: end --out in one of .*\.png"):
        draw_curves([run], tmp_path / "x.xyz")
    draw_curves([run], tmp_path / "x.SVG")
    assert b"<svg" in (tmp_path / "x.SVG").read_bytes()


@pytest.mark.parametrize("count", [2, 7])  # legends in a panel, and beside the panels
def test_a_dollar_in_a_name_begins_no_formula(tmp_path, count, written):
    """Guards: it ended `lingpt curves` in a traceback, in the panel's legend and in the one beside it."""
    model = {"name": "$x_{$"}
    runs = [write_run(tmp_path / f"$x_{{${i}", "ours", 1.0, {10: 4.0}, model=model) for i in range(count)]
    draw_curves(runs, tmp_path / "out.png")


def test_a_run_with_a_validation_and_nothing_else_is_drawn(tmp_path, written):
    run = write_run(tmp_path / "a", "ours", 1.0, {2: 4.0})
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert draw_curves([run], tmp_path / "out.png") == []


def test_seeds_are_one_curve_with_a_band(tmp_path, written):
    """The mean at the steps that both have, between the lowest and the highest; another rate stays apart."""
    runs = []
    for name, rate, seed, val in [
        ("gla-seed0", 1e-3, 0, {10: 4.0, 20: 2.0}),
        ("gla-seed1", 1e-3, 1, {10: 5.0, 20: 3.0, 25: 1.0}),
        ("gla-fast", 3e-3, 0, {10: 4.0, 20: 2.0}),
    ]:
        folder = "/data/wiki" if name == "gla-fast" else "wiki"  # the same text elsewhere
        config = {"data": {"source": f"{folder}/x.jsonl", "seq_len": 32}}
        config |= {"train": {"seed": seed, "learning_rate": rate, "global_batch_size": 8}}
        machine = {"name": "NVIDIA H200", "world_size": 1, "precision": "bf16-mixed"}
        record = {"hardware": machine, "data": {"fingerprint": "1f"}}
        runs.append(write_run(tmp_path / name, "gla", 1.0 + seed, val, record, **config))
    mean, alone = mean_over_seeds([read_curve(run) for run in runs])
    assert (mean.name, mean.runs, alone.name, alone.runs) == ("gla", 2, "gla-fast", 1)
    assert mean.val.tolist() == [[10, 15.0, 4.5, 10], [20, 30.0, 2.5, 20]] and len(mean.train) == 20
    assert mean.lowest["val"].tolist() == [4.0, 2.0] and mean.highest["val"].tolist() == [5.0, 3.0]
    text = caption([mean, alone])
    assert "; gla: mean of 2 seeds, band from the lowest to the highest" in text  # not gla-fast
    assert "\nx.jsonl; N = 32 tokens; 256 tokens a step; 1 × NVIDIA H200 a run, bf16-mixed" in text
    draw_curves(runs, tmp_path / "out.png", formats=["svg", "pdf"])
    assert (tmp_path / "out.pdf").read_bytes().startswith(b"%PDF") and (tmp_path / "out.svg").exists()
