"""The configuration of a study: several attentions with several seeds each, trained and scored alike.

A file `configs/studies/<name>.yaml` defines it; its keys are the fields of `Study`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

from lingpt.common.errors import UserError, check_known, unknown
from lingpt.common.files import read_json_object, read_yaml
from lingpt.common.options import Option, build, options_of, read_values
from lingpt.common.run_folder import METRICS
from lingpt.eval.paper import TASKS
from lingpt.study.portable import differs
from lingpt.train.recipe import RECIPES, find_recipe, recipe_names

STUDIES = RECIPES / "studies"  # those that ship with LinGPT
STAGES = ("data", "rates", "runs", "mqar", "scores", "page")
STUDY = "study.json"  # the study's configuration, in its folder
_DECIDED = ("train.max_steps", "train.max_tokens", "train.seed", "train.name")


@dataclass(frozen=True)
class Study:
    """The keys of a study's file."""

    # fmt: off
    name: Annotated[str, Option(
        "name of the study's folder, `study-<name>`; by default that of the file, without `study-`",
        blank=True)]
    recipe: Annotated[str, Option("recipe of every run: a file, or the name of one that ships")]
    tokens: Annotated[int, Option("training tokens per run", least=1, most=10**15)]
    attentions: Annotated[dict[str, dict[str, Any]], Option(
        "row name → its options, as `lingpt train` takes them, or a list of rows; the row's attention is "
        "`model.attention`, by default the row's name")]
    seeds: Annotated[int, Option(
        "number of runs per attention, with the seeds 0, 1, …", least=1, most=1000)] = 1
    options: Annotated[dict[str, Any], Option("options of every run")] = field(default_factory=dict)
    learning_rates: Annotated[tuple[float, ...], Option(
        "peak learning rates to try; each attention gets the best one in short runs. Empty: the recipe's",
        above=0)] = ()
    rate_tokens: Annotated[int, Option("training tokens of each short run")] = 0
    rate_options: Annotated[dict[str, Any], Option("options of the short runs")] = field(default_factory=dict)
    devices_per_run: Annotated[int | None, Option(
        "GPUs per run; null for all, with one run after another", least=1, most=10_000)] = 1
    runs_per_device: Annotated[int, Option(
        "number of runs that share a GPU, for small runs that leave most of it idle. Their times are "
        "meaningless, and the page leaves them out", least=1, most=100)] = 1
    row_by_row: Annotated[bool, Option(
        "train all seeds of a row before the next row; by default the first seeds of all rows")] = False
    baselines: Annotated[tuple[str, ...], Option(
        "rows whose losses the page compares the others' with; times are relative to the first of them. By "
        "default softmax, if it is a row, else the first")] = ()
    plotted_rows: Annotated[tuple[str, ...], Option(
        "rows in the figure of the losses; by default all")] = ()
    suites: Annotated[tuple[str, ...], Option("suites of `lingpt eval`")] = ("table2",)
    tasks: Annotated[tuple[str, ...], Option("tasks of Table 2")] = TASKS
    eval_data: Annotated[str | None, Option(
        "folder of benchmark JSONL; null for the Hugging Face hub")] = None
    texts: Annotated[dict[str, str], Option(
        "name → JSONL, Parquet or .txt files that were not trained on, for the suites `language` and "
        "`recall`"
        )] = field(default_factory=dict)
    text_key: Annotated[str, Option(
        "the field or column of `texts` that holds the text; that of the runs is their `data.text_key`"
        )] = "text"
    max_length_factor: Annotated[int, Option(
        "the loss by position goes up to this multiple of the training length", least=1, most=10**6)] = 8
    limit: Annotated[int | None, Option(
        "score only so many documents of each benchmark, from the first on", least=1, most=10**9)] = None
    mqar: Annotated[dict[str, Any] | None, Option(
        "options of `lingpt mqar`, to also train and score the synthetic recall task")] = None
    about: Annotated[str, Option("a sentence for the page", blank=True)] = ""
    # fmt: on

    def attention(self, row: str) -> str | list[str]:
        return self.attentions[row].get("model.attention", row)

    def run_names(self) -> list[tuple[str, str, int]]:
        """(row, name of the run, seed) of every run, in the order in which they are trained."""
        names = [(row, f"{row}-seed{seed}", seed) for row in self.attentions for seed in range(self.seeds)]
        return names if self.row_by_row else sorted(names, key=lambda name: name[2])


def studies() -> list[str]:
    """The names of the shipped studies."""
    return recipe_names(STUDIES)


def find_study(name: str) -> Path:
    """The file of a study, given as a path or as a shipped name. UserError if there is none."""
    return find_recipe(name, STUDIES, "study")


def read_study(path: Path, changes: Mapping[str, Any] | None = None) -> Study:
    """The study of a file, with `changes` to its keys. UserError if it is invalid."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a study: it has no keys")
    values |= dict(changes or {})
    rows = values.get("attentions")
    if isinstance(rows, list) and all(isinstance(row, str) for row in rows):
        rows = dict.fromkeys(rows)
    if isinstance(rows, dict):
        values["attentions"] = {str(name): options or {} for name, options in rows.items()}
    declared = options_of(Study)  # a key without a value counts as left out
    given = {
        str(key): value
        for key, value in values.items()
        if value is not None or key not in declared or NoneType in declared[key].parts
    }
    for key in ("recipe", "tokens", "attentions"):
        if given.get(key) in (None, "", {}):
            raise UserError(f"{path} is not a study: it does not say `{key}`")
    try:
        study = build(Study, {"name": path.stem.removeprefix("study-")} | read_values(Study, given))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    _check(study, path)
    return study


def with_rows(study: Study, rows: Sequence[str]) -> Study:
    """The study with these rows: rows of its own, or attentions. UserError for anything else."""
    from lingpt.models import ALIASES, ATTENTIONS

    attentions = [*ATTENTIONS, *ALIASES]
    known = list(dict.fromkeys([*study.attentions, *attentions]))
    for row in rows:
        if row not in known and row.partition("+")[0] not in attentions:
            raise unknown("attention", row, known)
    return replace(study, attentions={row: study.attentions.get(row, {}) for row in rows})


def with_baseline(study: Study, row: str) -> Study:
    """The study with this row as the first of its `baselines`. UserError if it is not one of its rows."""
    check_known("baseline", [row], study.attentions)
    return replace(study, baselines=(row, *(other for other in study.baselines if other != row)))


def with_started_runs(asked: Study, folder: Path) -> Study:
    """The study `asked` for, plus the rows and seeds that its folder already has runs of.

    UserError if the folder holds another study. Runs whose row has changed are detected later, one by one.
    """
    path = folder / STUDY
    if not path.exists():
        return _drop_missing_rows(asked)
    mend = "remove it, and the same command writes it anew"
    try:
        before, now = read_json_object(path), json.loads(json.dumps(asdict(asked)))
    except UserError as error:
        raise UserError(f"{error}: {mend}") from error
    rows, seeds = before.get("attentions"), before.get("seeds")
    if not isinstance(rows, dict) or type(seeds) is not int:
        raise UserError(f"{path} is damaged: {mend}")
    for key in ("recipe", "tokens", "options", "learning_rates", "rate_tokens", "rate_options", "mqar"):
        other, own = before.get(key), now[key]
        changed = differs(_without_data_paths(other), _without_data_paths(own))  # the data may move
        if changed and not (key == "mqar" and None in (other, own)):  # it may be added or removed
            raise UserError(
                f"{folder} holds a study with another `{key}` ({other}, now {own}): "
                "give the new one a --name, or move that folder away"
            )
    started = {
        row: [i for i in range(seeds) if (folder / f"{row}-seed{i}" / METRICS).exists()] for row in rows
    }
    kept = {row: options for row, options in rows.items() if started[row]}
    last = max((max(started[row]) for row in kept), default=0)
    seeds = max(asked.seeds, last + 1)
    return _drop_missing_rows(replace(asked, attentions=kept | asked.attentions, seeds=seeds))


def _drop_missing_rows(study: Study) -> Study:
    """The study without baselines and plotted rows that are not among its rows, which may be a part of its
    file's."""
    baselines = tuple(row for row in study.baselines if row in study.attentions)
    plotted_rows = tuple(row for row in study.plotted_rows if row in study.attentions)
    return replace(study, baselines=baselines, plotted_rows=plotted_rows)


def _without_data_paths(options: Any) -> Any:
    """Options without the paths of text and tokenizer: the runs' records have the hashes of both."""
    from lingpt.train.config import DATA_PATHS

    if not isinstance(options, dict):
        return options
    return {key: value for key, value in options.items() if key not in DATA_PATHS}


def _check(study: Study, path: Path) -> None:
    """Raises UserError for values that do not go together."""
    from lingpt.eval.suites import SUITES

    check_known("suite", study.suites, SUITES)
    if "table2" in study.suites and not study.tasks:
        raise UserError(f"{path}: `tasks` is empty; the suite table2 needs some, or leave it out of `suites`")
    for options in (study.options, study.rate_options, *study.attentions.values()):
        if taken := [key for key in _DECIDED if key in options]:
            raise UserError(f"{path}: leave out {taken[0]}: the study gives it to each run")
    if study.learning_rates and study.rate_tokens < 1:
        raise UserError(f"{path}: `learning_rates` need `rate_tokens`, how long each is tried")
    rates = [f"{rate:g}" for rate in study.learning_rates]  # as the short runs are named
    if twice := [rate for rate in rates if rates.count(rate) > 1]:
        raise UserError(f"{path}: `learning_rates` has {twice[0]} twice")
    if study.runs_per_device > 1 and study.devices_per_run != 1:
        raise UserError(f"{path}: runs_per_device {study.runs_per_device} is for runs on one card each")
    for key in ("baselines", "plotted_rows"):
        if missing := [row for row in getattr(study, key) if row not in study.attentions]:
            raise UserError(f"{path}: {key} names {missing[0]!r}, which is not one of its rows")
    for name in map(str, study.texts):
        if not name or "=" in name or name.startswith("-"):
            raise UserError(f"{path}: {name!r} cannot name a text: it is given to `lingpt eval` as name=path")
    for name, what in ((study.name, "the study's"), *((row, "a run's") for row in study.attentions)):
        if Path(name).name != name or not name or name.startswith("."):
            raise UserError(f"{path}: {name!r} cannot name {what} folder")
