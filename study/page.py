"""The page of a study: what was run, what came out, and what it cannot tell; from the runs' folders alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingpt.common.files import write_errors, write_text
from lingpt.eval.seeds import left_out, mean_scores
from lingpt.eval.suite_tables import save_suites, suite_tables
from lingpt.eval.table2 import count, save_table2, table2_tables
from lingpt.models import ATTENTIONS
from lingpt.study.config import Study
from lingpt.study.jobs import Failure
from lingpt.study.page_losses import loss_sections, softmax_baseline
from lingpt.study.page_records import how_it_was_made, read_records, read_scores
from lingpt.study.paths import read_utf8
from lingpt.study.runs import StudyRun, chosen_rates

PAGE, READING, TITLE = "README.md", "reading.md", "# Study "


def write_page(
    study: Study,
    folder: Path,
    rate_runs: Sequence[StudyRun],
    runs: Sequence[StudyRun],
    failures: Sequence[Failure] = (),
    scored: bool = True,
) -> Path:
    """Writes tables, figures and README.md into the study's folder; returns the page's path. What is not in
    the tables, and why, is on the page and is printed, but for `failures`, which the command names itself.

    scored: false where the runs' scores come later: none is then missed, if a run's weights are there.

    Where the folder has a `reading.md`, a person's reading of the numbers, the page begins with it.
    """
    done, excluded = _with_results(study, runs)
    failed = _failed(failures, done, excluded)
    baseline = softmax_baseline(study, done)
    results, unscored = read_scores(done, baseline, scored) if study.suites else ([], [])
    records, unread = read_records(runs)
    losses, odd = loss_sections(study, folder, rate_runs, done, records, baseline) if done else ([], [])
    notes = list(dict.fromkeys([*excluded, *failed, *unscored, *left_out(results), *unread, *odd]))
    for line in notes:
        if line not in failed:
            print(f"not in the tables: {line}")
    tried = sorted({run.options["train.learning_rate"] for run in rate_runs if run.has_result()})
    untuned = _not_at_the_chosen_rate(rate_runs, done) if tried else []
    parts = [
        f"{TITLE}{study.name}",
        study.about,
        _what(study, runs, records, _rates_that_differ(done, tried, untuned)),
        read_utf8(folder / READING).strip() if (folder / READING).exists() else "",
        "## Not in the tables\n\n" + "\n".join(f"- {line}" for line in notes) if notes else "",
        *losses,
        *_score_sections(study, folder, mean_scores(results)),
        _mqar(folder),
        _limits(study, runs, untuned if tried else None),
        how_it_was_made({run.name: records[run.name] for run in done if run.name in records}),
    ]
    with write_errors(folder / PAGE):
        write_text(folder / PAGE, "\n\n".join(filter(None, parts)) + "\n")
    return folder / PAGE


def _with_results(study: Study, runs: Sequence[StudyRun]) -> tuple[list[StudyRun], list[str]]:
    """The runs that can stand in the tables, in the study's order, and notes on why the others cannot."""
    rows, reasons = list(study.attentions), [(run, run.exclusion_reason()) for run in runs]
    done = [run for run, reason in reasons if reason is None]
    missing = [run.name for run in runs if not run.started]
    notes = [f"not trained: {', '.join(missing)}"] if missing else []
    notes += [reason for run, reason in reasons if reason is not None and run.started]
    return sorted(done, key=lambda run: (rows.index(run.row), run.seed)), notes


def _failed(failures: Sequence[Failure], done: Sequence[StudyRun], excluded: Sequence[str]) -> list[str]:
    """A line for each failure that `excluded` does not name already, and that no other process made good."""
    names = {run.name for run in done}
    return [
        f"{failure.job} failed: {failure.reason}"
        for failure in failures
        if f"{failure.job} {failure.reason}" not in excluded and failure.job not in names
    ]


def _not_at_the_chosen_rate(rate_runs: Sequence[StudyRun], done: Sequence[StudyRun]) -> list[str]:
    """The rows that were not trained at the best rate of their short runs, or have not all of these."""
    chosen = chosen_rates(rate_runs)
    rows = [run.row for run in done if run.recipe.train.learning_rate != chosen.get(run.row)]
    return list(dict.fromkeys(rows))


def _rates_that_differ(done: Sequence[StudyRun], tried: Sequence[float], untuned: Sequence[str]) -> str:
    """`, and its learning rate, the best of 0.001, 0.003`; nothing where none was tried, or all are alike."""
    if not tried or len({run.recipe.train.learning_rate for run in done}) < 2:
        return ""
    but = f" for all but {', '.join(untuned)}" if untuned else ""
    return f", and its learning rate, the best of {', '.join(f'{rate:g}' for rate in tried)}{but}"


def _what(study: Study, runs: Sequence[StudyRun], records: dict[str, dict[str, Any]], and_rates: str) -> str:
    recipe = runs[0].recipe
    seeds = f"{study.seeds} seeds" if study.seeds > 1 else "one seed"
    number = len(study.attentions)
    rows = f"{number} row{'s' if number > 1 else ''}"
    differs = f"the attention{and_rates}"
    if others := {key for options in study.attentions.values() for key in options} - _of_the_attention():
        differs += f", and where a row says so {', '.join(sorted(others))}"
    elif not and_rates:
        differs += " alone"
    size = f"{recipe.tokens_per_step:,} tokens a step, {recipe.total_steps:,} steps"
    same = f"{'for each seed ' * (study.seeds > 1)}the same data in the same order"
    return (
        f"{recipe.model.name}, {rows}, {seeds}, {count(study.tokens)} tokens each, "
        f"N = {recipe.data.seq_len:,}, {size}; {same}, the same schedule. "
        f"{_passes(study, records)}What differs is {differs}."
    )


def _passes(study: Study, records: dict[str, dict[str, Any]]) -> str:
    """How often a run reads its text, where a record says how long that is."""
    texts = [(record.get("data") or {}).get("train") or {} for record in records.values()]
    lengths = [text["tokens"] for text in texts if text.get("tokens")]
    if not lengths:
        return ""
    passes = f"{study.tokens / min(lengths):.2g} passes over the text of {count(min(lengths))} tokens"
    return f"That is {passes}. "


def _of_the_attention() -> set[str]:
    """The keys of a row that make its attention."""
    options = {name for attention in ATTENTIONS.values() for name in attention.options()}
    return {"model.attention", *(f"model.{name}" for name in options)}


def _score_sections(study: Study, folder: Path, results: Sequence[dict[str, Any]]) -> list[str]:
    """The tables of the scores, which are also written into the folder with their figures."""
    if not results:
        return []
    tables = table2_tables(results) if "table2" in study.suites else []
    if tables:
        save_table2(results, folder)
    save_suites(results, folder)
    sections = [table.section() for table in [*tables, *suite_tables(results)]]
    if (folder / "positions.png").exists():
        sections.append("![Loss by position](positions.png)")
    return sections


def _mqar(folder: Path) -> str:
    text = folder / "mqar" / "mqar.md"
    if not text.exists():
        return ""
    table = text.read_text(encoding="utf-8").strip()
    return f"## Associative recall (MQAR)\n\n![MQAR](mqar/mqar.png)\n\n{table}"


def _limits(study: Study, runs: Sequence[StudyRun], untuned: Sequence[str] | None) -> str:
    """What follows from the study's size alone. untuned: the rows whose learning rate is not the one that was
    found for them; None where none was looked for."""
    source = runs[0].recipe.data.source
    lines = [
        f"{count(study.tokens)} tokens a run; the paper's recipe has 3 B. What leads here may not lead there."
    ]
    if study.seeds == 1:
        lines.append("One seed: differences smaller than what another seed would change mean nothing.")
    else:
        lines.append(f"{study.seeds} seeds: enough to see the order of the noise, not to measure it well.")
    if source != "wiki40b":
        lines.append(f"The text is not Wiki-40B but {Path(source).name}.")
    if untuned:
        lines.append(f"Not trained at the learning rate that short runs choose: {', '.join(untuned)}.")
    elif untuned is None:
        own = any("train.learning_rate" in options for options in study.attentions.values())
        all_rows = "all rows that give none of their own" if own else "all"
        lines.append(f"The learning rate is the recipe's for {all_rows}; none was tuned.")
    if study.limit:
        lines.append(f"Of each benchmark only the first {study.limit} documents were asked.")
    return "## What these runs cannot tell\n\n" + "\n".join(f"- {line}" for line in lines)
