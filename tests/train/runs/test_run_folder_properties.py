"""A run's folder with any damage: curves and eval read it, or name it in one line, and the others go on."""

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lingpt.common.run_folder import read_config, read_metrics, read_model
from lingpt.plots.curve_figure import draw_curves
from lingpt.plots.curves import read_curve
from lingpt.tests.properties import examples, result_or_line

VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
POINTS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["train", "val"]) | VALUES, "step": st.integers(1, 99) | VALUES},
    optional={"train_time": st.floats(0, 1e6) | VALUES, "loss": st.floats(0, 20) | VALUES},
)
LINES = POINTS.map(lambda point: json.dumps(point).encode()) | st.binary(max_size=40)
CONFIGS = (
    st.fixed_dictionaries({"model": st.dictionaries(st.sampled_from(["name", "attention"]), VALUES) | VALUES})
    | VALUES
).map(lambda config: yaml.safe_dump(config).encode()) | st.binary(max_size=40)
WELL = b'{"kind": "train", "step": 1, "train_time": 1.0, "loss": 2.0}', b"model: {name: m, attention: ours}"


@pytest.mark.fault("a run folder with any metrics and config", "it is read, or named in one line")
@examples(15)
@given(st.lists(LINES, max_size=8), CONFIGS)
def test_any_run_is_read_or_named(figures, lines, config):
    figures["faults"] += 1
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
        (run / "config.yaml").write_bytes(config)
        metrics = read_metrics(run)
        assert all(type(line["step"]) is int for line in metrics)
        for read in (read_config, read_model, read_curve):
            result_or_line(read, run)


@pytest.mark.fault("such a run next to a whole one", "the whole one is drawn")
@examples(3)
@given(st.lists(LINES, max_size=8), CONFIGS)
def test_any_run_next_to_a_whole_one_does_not_stop_it(figures, lines, config):
    figures["faults"] += 1
    with tempfile.TemporaryDirectory() as folder:
        sick, well = Path(folder) / "sick", Path(folder) / "well"
        for run, (content, about) in ((sick, (b"\n".join(lines), config)), (well, WELL)):
            run.mkdir()
            (run / "metrics.jsonl").write_bytes(content)
            (run / "config.yaml").write_bytes(about)
        draw_curves([sick, well], Path(folder) / "out.png")
        assert (Path(folder) / "out.png").read_bytes().startswith(b"\x89PNG")
