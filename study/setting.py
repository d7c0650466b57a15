"""The setting on a study's page: what was run, on what, with what; from the runs' records."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object
from lingpt.common.format import scaled_count
from lingpt.common.options import as_word
from lingpt.common.run_folder import ENVIRONMENT
from lingpt.plots.curves import hardware_label
from lingpt.study.config import Study
from lingpt.study.portable import portable
from lingpt.study.runs import StudyRun


def setting_section(study: Study, runs: Sequence[StudyRun]) -> tuple[str, list[str]]:
    """The section with model, data, hardware and software of the runs, all that occur if they differ; and
    notes on records that cannot be read, and on runs of different data."""
    recipe, records, notes = runs[0].recipe, list[dict[str, Any]](), list[str]()
    for run in runs:
        try:
            records += _read_starts(run)
        except UserError as error:
            notes.append(f"what {run.name} was made with: {error}")
    if len(texts := _values(records, lambda start: start["data"]["fingerprint"])) > 1:
        notes.append(f"the runs were trained on different data: {', '.join(texts)}")
    lengths = _values(records, lambda start: int(start["data"]["train"]["tokens"]))
    steps = f"{recipe.total_steps:,} steps of {recipe.tokens_per_step:,}"

    def hardware(about: dict[str, Any]) -> str:
        return ", ".join(filter(None, (hardware_label(about), about.get("precision"))))

    passes = f"; {study.tokens / int(lengths[0]):.2g} passes over the text" if len(lengths) == 1 else ""
    cells = {
        "Model": [recipe.model.name],
        "Rows": [_row(study, row) for row in study.attentions],
        "Tokens a run": [f"{scaled_count(study.tokens)}: {steps}{passes}"],
        "Sequence length": [f"{recipe.data.seq_len:,}"],
        "Text": list(dict.fromkeys(str(portable(str(run.recipe.data.source))) for run in runs)),
        "Hardware": _values(records, lambda start: hardware(start["hardware"])),
        "Software": _values(
            records, lambda start: ", ".join(f"{name} {v}" for name, v in start["versions"].items() if v)
        ),
        "Source": _values(records, lambda start: (start.get("git") or {}).get("revision") or start["source"]),
    }
    lines = [f"- {name}: {'; '.join(values)}" for name, values in cells.items() if values]
    return "## Setting\n\n" + "\n".join(lines), notes


def _read_starts(run: StudyRun) -> list[dict[str, Any]]:
    """The records of the run's starts, the last one first; UserError if they cannot be read."""
    path = run.folder / ENVIRONMENT
    if not path.exists():
        return []
    record = read_json_object(path)
    earlier = record.get("earlier")
    return [record, *(earlier if isinstance(earlier, list) else [])]


def _values(records: Iterable[dict[str, Any]], value: Callable[[dict[str, Any]], Any]) -> list[str]:
    """The distinct values of the records that say it."""
    found = dict[str, None]()
    for record in records:
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            found[str(value(record) or "")] = None
    return [text for text in found if text]


def _row(study: Study, row: str) -> str:
    """The row with its options, as `lingpt train` takes them."""
    options = " ".join(f"--{key}={as_word(value)}" for key, value in study.attentions[row].items())
    return f"{row} (`{options}`)" if options else row
