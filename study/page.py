"""The page of a study, README.md: a person's text, then the tables and figures that `lingpt study` writes."""

from collections.abc import Sequence
from pathlib import Path

from lingpt.common.errors import UserError, by_reason
from lingpt.common.files import read_text, write_errors, write_text
from lingpt.common.run_folder import attention_label
from lingpt.eval.comparison import mean_scores
from lingpt.eval.scores import Result
from lingpt.eval.suite_tables import save_suites, suite_tables
from lingpt.eval.table2 import save_table2, table2_tables
from lingpt.study.config import Study
from lingpt.study.jobs import Failure
from lingpt.study.losses import loss_sections
from lingpt.study.runs import StudyRun, read_rate_search
from lingpt.study.scores import read_scores
from lingpt.study.setting import setting_section

PAGE = "README.md"
MARKER = "<!-- Below this line `lingpt study` writes. Write above it: that part is kept. -->"
MQAR = "mqar/mqar-table.md"
POSITIONS = {"positions.png": "Loss by position", "within-documents.png": "Loss within documents"}
_OF_SCORES = ("table2.*", "suites.*", *(f"{Path(name).stem}.*" for name in POSITIONS))  # tables and figures


def write_page(
    study: Study,
    folder: Path,
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    failures: Sequence[Failure],
    scored: bool,
) -> Path:
    """Writes tables, figures and README.md into the study's folder; returns the page's path. What is not in
    the tables, and why, is on the page and printed, except `failures`, which the command prints itself.

    scored: false if the runs are scored later: runs with weights then need no scores.

    An earlier page stays if no run has results: a --source that the runs were not trained on would empty it.
    """
    page, rows = folder / PAGE, list(study.attentions)
    reasons = {run.name: run.exclusion_reason() for run in runs}
    done = [run for run in runs if reasons[run.name] is None]
    done.sort(key=lambda run: (rows.index(run.row), run.seed))
    baseline = baseline_row(study, done)
    softmax = baseline_row(study, [run for run in done if _is_softmax(run)])
    results, unscored = read_scores(study, done, softmax, scored) if study.suites else ([], [])
    others = [one for one in failures if reasons.get(one.job, "") not in (None, one.reason)]
    failed = {one.job: one for one in others}
    missing = by_reason((name, why) for name, why in reasons.items() if why and name not in failed) + unscored
    missing += ["MQAR: not trained"] if study.mqar is not None and not (folder / MQAR).exists() else []
    for line in missing:
        print(f"not in the tables: {line}")
    if baseline is None and page.exists():
        print(f"{page} is left as it is: no run has results for a new one")
        return page
    missing += by_reason((name, f"failed: {one.why(folder)}") for name, one in failed.items())
    setting, notes = setting_section(study, done or runs)
    losses = list[str]()
    if baseline is not None:
        losses, odd = loss_sections(study, folder, read_rate_search(rate_runs), done, baseline)
        notes += odd
    scores = _score_sections(study, folder, mean_scores(results))
    lists = [_listed("Not in the tables", missing), _listed("Notes", notes)]
    mqar = [read_text(folder / MQAR).strip(), "![MQAR](mqar/mqar.png)"] if (folder / MQAR).exists() else []
    sections = [study.about, setting, *lists, *losses, *scores, *mqar]
    save_page(page, f"# Study {study.name}", "\n\n".join(filter(None, sections)))
    return page


def baseline_row(study: Study, runs: Sequence[StudyRun]) -> str | None:
    """The row of `runs` that the others are compared with: the first of the study's `baselines`, else the
    first of softmax attention, else the first; None without runs."""
    rows = [run.row for run in runs]
    softmax = [run.row for run in runs if _is_softmax(run)]
    return next((row for row in (*study.baselines, *softmax, *rows) if row in rows), None)


def _is_softmax(run: StudyRun) -> bool:
    """Whether it has softmax attention in all layers: scores are compared with such a row alone."""
    return attention_label(run.recipe.model.attention) == "softmax"


def check_page(folder: Path) -> None:
    """Raises UserError if `folder` is not a folder, or if its README.md is not a study's page, which would be
    overwritten."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give another one")
    page = folder / PAGE
    if page.exists() and MARKER not in read_text(page):
        raise UserError(f"{page} is not a study's page, and would be overwritten: give a folder of its own")


def save_page(page: Path, above: str, below: str) -> None:
    """Writes the page; what stands above the `MARKER` of one that exists is kept, in place of `above`."""
    if page.exists():
        above = read_text(page).partition(MARKER)[0]
    with write_errors(page):
        write_text(page, f"{above.strip()}\n\n{MARKER}\n\n{below.strip()}\n")


def _listed(heading: str, lines: Sequence[str]) -> str:
    """The section with these lines; empty without any."""
    return f"## {heading}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _score_sections(study: Study, folder: Path, results: Sequence[Result]) -> list[str]:
    """The sections with the tables of scores; also writes these and their figures into the folder, in place
    of those of an earlier page."""
    with write_errors(folder):
        for path in (path for pattern in _OF_SCORES for path in folder.glob(pattern)):
            path.unlink(missing_ok=True)
    tables = table2_tables(results) if results and "table2" in study.suites else []
    if tables:
        save_table2(results, folder)
    save_suites(results, folder, study.suites)
    figures = [f"![{title}]({name})" for name, title in POSITIONS.items() if (folder / name).exists()]
    return [table.section() for table in [*tables, *suite_tables(results, study.suites)]] + figures
