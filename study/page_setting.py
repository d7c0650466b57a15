"""The setting on a study's page: what was run, how the rows differ, and what the runs cannot tell."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lingpt.common.format import scaled_count
from lingpt.eval.scores import Result
from lingpt.models import ATTENTIONS
from lingpt.study.config import Study
from lingpt.study.page_losses import PAPER_TOKENS
from lingpt.study.runs import RateSearch, StudyRun, untuned_rate

Records = dict[str, dict[str, Any]]  # from `page_records.read_records`
_RATE = "train.learning_rate"


def what_was_run(
    study: Study,
    rates: RateSearch,
    runs: Sequence[StudyRun],
    done: Sequence[StudyRun],
    records: Records,
) -> str:
    """The text on model, rows, seeds, tokens, and what differs between rows. done: the runs in the tables."""
    recipe = runs[0].recipe
    seeds = f"{study.seeds} seeds" if study.seeds > 1 else "one seed"
    number = len(study.attentions)
    rows = f"{number} row{'s' if number > 1 else ''}"
    size = f"{recipe.tokens_per_step:,} tokens a step, {recipe.total_steps:,} steps"
    one_text = not texts_that_differ(done, records)
    data = f"{'for each seed ' * (study.seeds > 1)}the same data in the same order, " if one_text else ""
    return (
        f"{recipe.model.name}, {rows}, {seeds}, {scaled_count(study.tokens)} tokens each, "
        f"N = {recipe.data.seq_len:,}, {size}; {data}the same schedule. "
        f"{_passes(study, records)}What differs is {_what_differs(study, rates, done, one_text)}."
    )


def texts_that_differ(done: Sequence[StudyRun], records: Records) -> list[str]:
    """A note if the records name more than one text; else none."""
    found = dict[str, list[str]]()
    for run in done:
        if fingerprint := (records.get(run.name, {}).get("data") or {}).get("fingerprint"):
            found.setdefault(str(fingerprint), []).append(run.name)
    if len(found) < 2:
        return []
    named = "; ".join(f"{text}: {', '.join(names)}" for text, names in found.items())
    return [f"the runs were trained on different data ({named}): their losses compare these, too"]


def _passes(study: Study, records: Records) -> str:
    """How often a run reads its text; empty if the records do not give one length of it."""
    texts = [(record.get("data") or {}).get("train") or {} for record in records.values()]
    lengths = {text["tokens"] for text in texts if text.get("tokens")}
    if len(lengths) != 1:
        return ""
    (length,) = lengths
    return f"That is {study.tokens / length:.2g} passes over the text of {scaled_count(length)} tokens. "


def _what_differs(study: Study, rates: RateSearch, done: Sequence[StudyRun], one_text: bool) -> str:
    named = {key for options in study.attentions.values() for key in options}
    others = sorted(named - _of_the_attention())
    forms = {
        str((study.attention(row), sorted((k, str(v)) for k, v in options.items() if k not in others)))
        for row, options in study.attentions.items()
    }
    if others and len(study.attentions) > 1 and len(forms) == 1:
        return ", ".join(others)
    and_rates = _rates_that_differ(study, rates, done)
    differs = f"the attention{'' if one_text else ', the text'}{and_rates}"
    if others:
        return f"{differs}, and where a row says so {', '.join(others)}"
    return differs if and_rates or not one_text else f"{differs} alone"


def _of_the_attention() -> set[str]:
    """The option keys that define a row's attention."""
    options = {name for attention in ATTENTIONS.values() for name in attention.options()}
    return {"model.attention", *(f"model.{name}" for name in options)}


def _rates_that_differ(study: Study, rates: RateSearch, done: Sequence[StudyRun]) -> str:
    """`, and its learning rate, the best of 0.001, 0.003`; empty if all runs have the same one, or the rates
    are those given for the rows."""
    if len({run.recipe.train.learning_rate for run in done}) < 2:
        return ""
    if tried := sorted({rate for losses in rates.losses.values() for rate in losses}):
        rows = _without_the_best_rate(rates, done)
        but = f" for all but {', '.join(rows)}" if rows else ""
        return f", and its learning rate, the best of {', '.join(f'{rate:g}' for rate in tried)}{but}"
    return ", and its learning rate" if _has_chosen_rates(study, done) else ""


def _without_the_best_rate(rates: RateSearch, done: Sequence[StudyRun]) -> list[str]:
    """The rows not trained at the best rate of their short runs, or whose short runs are unfinished."""
    used, chosen = {run.row: run.recipe.train.learning_rate for run in done}, rates.chosen
    return [row for row, rate in used.items() if row in rates.unfinished or rate != chosen.get(row, rate)]


def _has_chosen_rates(study: Study, done: Sequence[StudyRun]) -> bool:
    """Whether rows have a rate that neither recipe nor study gives: earlier short runs chose it."""
    return any(run.recipe.train.learning_rate != untuned_rate(study, run.row) for run in done)


def what_it_cannot_tell(
    study: Study,
    rates: RateSearch,
    done: Sequence[StudyRun],
    results: Sequence[Result],
) -> str:
    """The limits that follow from the study's size alone. results: the scores in the tables."""
    lines = []
    if study.tokens < 0.99 * PAPER_TOKENS:
        lines.append(
            f"{scaled_count(study.tokens)} tokens a run; the paper's recipe has 3 B. What leads here may not "
            "lead there."
        )
    lines += [*_seeds(done), *_text(done), *_tuning(study, rates, done)]
    scores = [x for result in results for x in result.scores.values() if x.texts is None]
    if limits := sorted({score.limit for score in scores if score.limit}):
        of = " or ".join(map(str, limits))
        which = "each benchmark" if all(score.limit for score in scores) else "some benchmarks"
        lines.append(f"Of {which} only the first {of} documents were asked.")
    return "## What these runs cannot tell\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _seeds(done: Sequence[StudyRun]) -> list[str]:
    seeds = Counter(run.row for run in done).values()
    if not seeds:
        return []
    if max(seeds) == 1:
        return ["One seed: differences smaller than what another seed would change mean nothing."]
    most = f"{max(seeds)} seeds" if min(seeds) == max(seeds) else f"{max(seeds)} seeds at most"
    return [f"{most}: enough to see the order of the noise, not to measure it well."]


def _text(done: Sequence[StudyRun]) -> list[str]:
    sources = dict.fromkeys(str(run.recipe.data.source) for run in done)
    names = " and ".join(Path(source).name for source in sources if source != "wiki40b")
    return [f"The text is {names}; the paper's is Wiki-40B."] if names else []


def _tuning(study: Study, rates: RateSearch, done: Sequence[StudyRun]) -> list[str]:
    if rates.losses:
        rows = _without_the_best_rate(rates, done)
        return [f"Not trained at the best rate of their short runs: {', '.join(rows)}."] if rows else []
    if _has_chosen_rates(study, done):
        return ["The learning rates (column Rate) were chosen by short runs that are not here."]
    whose = "study's" if _RATE in study.options else "recipe's"
    own = any(_RATE in options for options in study.attentions.values())
    which = "all rows that give none of their own" if own else "all"
    return [f"The learning rate is the {whose} for {which}; none was tuned."]
