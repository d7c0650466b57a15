"""The scores of a study's runs, which `lingpt eval` left in the runs' folders."""

from collections.abc import Sequence
from dataclasses import replace

from lingpt.common.errors import UserError, by_reason
from lingpt.common.run_folder import attention_label, checkpoint_folder, scores_file
from lingpt.eval.scores import Result, read_results
from lingpt.eval.suites import suite_tasks
from lingpt.models import attention_form
from lingpt.study.config import Study
from lingpt.study.runs import StudyRun

_TRAIN_AGAIN = "its checkpoint is not here or not whole: remove the folder of the run to train it again"


def read_scores(
    study: Study, done: Sequence[StudyRun], softmax: str | None, expected: bool
) -> tuple[list[Result], list[str]]:
    """The scores of each run's last step, as `lingpt eval` wrote them; and what is missing: runs without
    scores, or with some that cannot be read, and tasks that no run has a score of.

    softmax: the row that others are compared with. expected: whether runs should have scores by now; if not,
    runs that still have their weights get no line.
    """
    results, missing = list[Result](), dict[str, str]()
    for run in done:
        try:
            result = _read(run, softmax)
        except UserError as error:
            missing[run.name] = str(error)
            continue
        if result is not None:
            results.append(result)
        elif not run.has_weights():
            missing[run.name] = f"no scores of the last step, and {_TRAIN_AGAIN}"
        elif expected:
            missing[run.name] = "no scores of the last step"
    scored = {score.task for result in results for score in result.scores.values()}
    asked = [task for suite in study.suites for task in suite_tasks(suite, study.tasks)] if results else []
    unscored = [(task, "no run has a score") for task in asked if task not in scored]
    return results, by_reason([*missing.items(), *unscored])


def _read(run: StudyRun, softmax: str | None) -> Result | None:
    """The run's scores, with the path that its checkpoint has now, as it may have been scored elsewhere; None
    without any. UserError for a file that is damaged, or of another run."""
    file = scores_file(run.folder, run.recipe.total_steps)
    if not file.exists():
        return None
    try:
        found = read_results(file)
    except UserError as error:
        raise error if run.has_weights() else UserError(f"{file} is damaged, and {_TRAIN_AGAIN}") from error
    if not found.scores:
        return None
    about, model = found.checkpoint, run.recipe.model
    wanted = model.attention if isinstance(model.attention, str) else tuple(model.attention)
    if (about.run, about.attention) != (run.name, wanted):
        other = f"{about.run} ({attention_label(about.attention)})"
        raise UserError(f"{file} has scores of {other}: remove it to score {run.name} again")
    now = replace(
        about,
        form=attention_form(model.attention, vars(model)),
        path=str(checkpoint_folder(run.folder, about.step)),
        baseline=run.row == softmax,
    )
    return replace(found, checkpoint=now)
