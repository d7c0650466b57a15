"""Reads the records and the scores in the folders of a study's runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lingpt.common.errors import UserError
from lingpt.common.files import read_json_object
from lingpt.common.json_values import is_positive_int, what_is_wrong
from lingpt.common.run_folder import ENVIRONMENT, attention_label, checkpoint_folder, scores_file
from lingpt.eval.scores import About, Result, read_results
from lingpt.models import attention_form
from lingpt.study.runs import StudyRun

# What the page uses of a run's environment.json.
_RECORD = {
    "hardware": {"name": str, "precision": str, "world_size": is_positive_int},
    "versions": {},
    "git": {"revision": str},
    "source": str,
    "data": {"train": {"tokens": is_positive_int}},
    "earlier": list,
}


def read_records(runs: Sequence[StudyRun]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run → its record, for runs that have one; and a note on each whose record cannot be read."""
    records, notes = {}, []
    for run in runs:
        path = run.folder / ENVIRONMENT
        if not path.exists():
            continue
        try:
            record = read_json_object(path)
            if wrong := what_is_wrong(record, _RECORD, partial=True):
                raise UserError(f"{path} is damaged: {wrong}")
            records[run.name] = record
        except UserError as error:
            notes.append(f"what {run.name} was made with: {error}")
    return records, notes


def how_it_was_made(records: dict[str, dict[str, Any]]) -> str:
    """The section on machine, versions and source, from the records of the runs, with restarts."""
    if not records:
        return ""
    starts = [start for record in records.values() for start in (*earlier_starts(record), record)]
    lines = list(dict.fromkeys(map(_made_with, starts)))
    if len(lines) > 1:
        lines = ["The runs were not all made alike:", *lines]
    again = [f"{name} ({len(found['earlier'])}×)" for name, found in records.items() if found.get("earlier")]
    if again:
        lines.append(f"Stopped and resumed: {', '.join(again)}; the losses go on as if they had not been.")
    return "## How it was made\n\n" + "\n\n".join(
        [*lines, "`lingpt study` wrote this page; `study.json` has the study."]
    )


def earlier_starts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The readable records of the starts before the last one."""
    starts = record.get("earlier") or []
    return [
        start for start in starts if start is not None and not what_is_wrong(start, _RECORD, partial=True)
    ]


def _made_with(record: dict[str, Any]) -> str:
    """Card, versions and source of one run."""
    hardware, versions, git = (record.get(key) or {} for key in ("hardware", "versions", "git"))
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    source = f"LinGPT at {git['revision'][:12]}" if git.get("revision") else "LinGPT outside of git"
    source += f", source {record['source']}" if record.get("source") else ""
    return f"{hardware.get('name', 'unknown hardware')}, {hardware.get('precision')}; {packages}; {source}."


def read_scores(
    runs: Sequence[StudyRun], baseline: str | None, expected: bool
) -> tuple[list[Result], list[str]]:
    """The scores of each run's last step, as `evaluate` wrote them; and notes on unreadable scores and on
    runs without any.

    baseline: the softmax row that others are compared with. expected: whether runs should have scores by now;
    if not, runs that still have their weights get no note.
    """
    results, unscored, notes = list[Result](), list[StudyRun](), list[str]()
    for run in runs:
        file = scores_file(run.folder, run.recipe.total_steps)
        try:
            found = read_results(file) if file.exists() else None
        except UserError as error:
            notes.append(str(error))
            continue
        if not found or not found.scores:
            unscored.append(run)
        elif other := _of_another_run(found.checkpoint, run):
            notes.append(f"{file} is left out: it has scores of {other}; remove it to score {run.name} again")
        else:
            results.append(_as_trained(found, run, baseline))
    return results, notes + _not_scored(unscored, expected)


def _of_another_run(scored: About, run: StudyRun) -> str | None:
    """The run, with its attention, that was scored, if it is another than `run`."""
    wanted = run.recipe.model.attention
    if (scored.run, scored.attention) == (run.name, wanted if isinstance(wanted, str) else tuple(wanted)):
        return None
    return f"{scored.run} ({attention_label(scored.attention)})"


def _as_trained(result: Result, run: StudyRun, baseline: str | None) -> Result:
    """The result, completed by what the study knows of its checkpoint: it may have been scored at another
    path."""
    model, step = run.recipe.model, result.checkpoint.step
    about = replace(
        result.checkpoint,
        form=attention_form(model.attention, vars(model)),
        path=str(checkpoint_folder(run.folder, step)),
        baseline=run.row == baseline,
    )
    return replace(result, checkpoint=about)


def _not_scored(runs: Sequence[StudyRun], expected: bool) -> list[str]:
    """Notes on runs without scores: one on those that can be scored (if `expected`), one on the others."""
    there = [run.name for run in runs if run.has_weights()]
    others = [run.name for run in runs if run.name not in there]
    lines = [f"no scores of the last step: {', '.join(there)}"] if there and expected else []
    if others:
        lines.append(
            "no scores of the last step, whose checkpoint is not here or not whole: "
            f"{', '.join(others)}; to score one, remove its folder and train it again"
        )
    return lines
