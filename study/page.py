"""The page of a study: what was run, the results, and their limits; from the runs' folders alone."""

import contextlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from lingpt.common.errors import UserError, by_reason
from lingpt.common.files import read_text, write_errors, write_text
from lingpt.eval.comparison import mean_scores
from lingpt.eval.scores import Result
from lingpt.eval.suite_tables import save_suites, suite_tables
from lingpt.eval.suites import suite_tasks, tasks_without_file
from lingpt.eval.table2 import save_table2, table2_tables
from lingpt.eval.tasks.sources import benchmark_folder
from lingpt.study.config import Study
from lingpt.study.jobs import Failure
from lingpt.study.page_losses import baseline_row, loss_sections, softmax_runs
from lingpt.study.page_records import how_it_was_made, read_records, read_scores
from lingpt.study.page_setting import texts_that_differ, what_it_cannot_tell, what_was_run
from lingpt.study.portable import portable
from lingpt.study.runs import StudyRun, read_rate_search

PAGE, READING, TITLE = "README.md", "reading.md", "# Study "
MQAR, POSITIONS = "mqar/mqar-table.md", "positions.png"
KINDS = ("md", "json", "tex", "png", "svg", "pdf")  # of the tables and figures of scores


def write_page(
    study: Study,
    folder: Path,
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    failures: Sequence[Failure] = (),
    scored: bool = True,
) -> Path:
    """Writes tables, figures and README.md into the study's folder; returns the page's path. What is not in
    the tables, and why, and notes on what is, are on the page and printed, except `failures`, which the
    command prints itself.

    scored: false if the runs are scored later: runs with weights then need no scores.

    An earlier page stays if no run has results: a --source that the runs were not trained on would empty it.

    If the folder has a `reading.md`, a person's interpretation of the numbers, the page begins with it.
    """
    done, excluded = _with_results(study, runs, {failure.job for failure in failures})
    failed = _failed(failures, done, excluded, folder)
    # Scores are compared with softmax alone.
    softmax = softmax_runs(done)
    results, notes_on_scores = list[Result](), list[str]()
    if study.suites:
        results, notes_on_scores = read_scores(done, baseline_row(study, softmax), scored)
        notes_on_scores += _tasks_not_scored(study, results)
    records, unread = read_records(runs)
    rates = read_rate_search(rate_runs)
    losses, odd = loss_sections(study, folder, rates, done, records) if done else ([], [])
    texts = texts_that_differ(done, records)
    mqar = ["MQAR: not trained"] if study.mqar is not None and not (folder / MQAR).exists() else []
    left_out = list(dict.fromkeys([*by_reason(excluded.items()), *failed, *notes_on_scores, *mqar]))
    notes = [*unread, *texts, *odd]
    for line in left_out:
        if line not in failed:
            print(f"not in the tables: {line}")
    for line in notes:
        print(f"note: {line}")
    if not done and (folder / PAGE).exists():
        print(f"{folder / PAGE} is left as it is: no run has results for a new one")
        return folder / PAGE
    parts = [
        f"{TITLE}{study.name}",
        study.about,
        what_was_run(study, rates, runs, done, records),
        read_text(folder / READING).strip() if (folder / READING).exists() else "",
        _listed("Not in the tables", left_out),
        _listed("Notes", notes),
        *losses,
        *_score_sections(study, folder, mean_scores(results)),
        _mqar(folder),
        what_it_cannot_tell(study, rates, done, results),
        how_it_was_made({run.name: records[run.name] for run in done if run.name in records}),
    ]
    with write_errors(folder / PAGE):
        write_text(folder / PAGE, "\n\n".join(filter(None, parts)) + "\n")
    return folder / PAGE


def _listed(heading: str, lines: Sequence[str]) -> str:
    """The section with these lines; empty without any."""
    return f"## {heading}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _with_results(
    study: Study, runs: Sequence[StudyRun], failed: Set[str]
) -> tuple[list[StudyRun], dict[str, str]]:
    """The runs for the tables, in the study's order, and why the others are left out: run → reason; not those
    that `failed` before they had begun."""
    rows, reasons = list(study.attentions), [(run, run.exclusion_reason()) for run in runs]
    done = [run for run, reason in reasons if reason is None]
    others = [(run, reason) for run, reason in reasons if reason is not None]
    others.sort(key=lambda other: other[0].started)  # those that are not trained first
    excluded = {run.name: reason for run, reason in others if run.started or run.name not in failed}
    return sorted(done, key=lambda run: (rows.index(run.row), run.seed)), excluded


def _failed(
    failures: Sequence[Failure], done: Sequence[StudyRun], excluded: Mapping[str, str], folder: Path
) -> list[str]:
    """Lines on the failures that `excluded` does not give, unless the run is `done` by now."""
    names = {run.name for run in done}
    left = [one for one in failures if excluded.get(one.job) != one.reason and one.job not in names]
    return by_reason((one.job, f"failed: {one.why(folder)}") for one in left)


def _tasks_not_scored(study: Study, results: Sequence[Result]) -> list[str]:
    """Notes on the tasks of the study's suites that no run has a score of, though runs have others: on those
    that the folder of benchmarks has no file for, and on the rest."""
    scored = {score.task for result in results for score in result.scores.values()}
    asked = [task for suite in study.suites for task in suite_tasks(suite, study.tasks)]
    missing = [task for task in asked if task not in scored] if results else []
    if not missing:
        return []
    folder, without = benchmark_folder(study.eval_data), list[str]()
    with contextlib.suppress(UserError):  # the folder may be on another machine
        without = [task for task in tasks_without_file(study.suites, folder) if task in missing]
    others = [task for task in missing if task not in without]
    notes = [f"{', '.join(without)}: no file in {portable(str(folder))}"] if without else []
    return notes + ([f"{', '.join(others)}: no run has a score"] if others else [])


def _score_sections(study: Study, folder: Path, results: Sequence[Result]) -> list[str]:
    """The sections with the tables of scores; also writes these and their figures into the folder."""
    if not results:
        _remove_scores(folder, kept=[])
        return []
    tables = table2_tables(results) if "table2" in study.suites else []
    written = save_table2(results, folder) if tables else []
    written += save_suites(results, folder)
    _remove_scores(folder, written)
    sections = [table.section() for table in [*tables, *suite_tables(results)]]
    if folder / POSITIONS in written:
        sections.append(f"![Loss by position]({POSITIONS})")
    return sections


def _remove_scores(folder: Path, kept: Sequence[Path]) -> None:
    """Removes the tables and figures of scores that an earlier page has left in the folder."""
    names = [f"{name}.{kind}" for name in ("table2", "suites", "positions") for kind in KINDS]
    with write_errors(folder):
        for path in {folder / name for name in names} - set(kept):
            path.unlink(missing_ok=True)


def _mqar(folder: Path) -> str:
    if not (folder / MQAR).exists():
        return ""
    return read_text(folder / MQAR).strip() + "\n\n![MQAR](mqar/mqar.png)"
