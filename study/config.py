"""The configuration of a study: several attentions with several seeds each, trained and scored alike.

A file `configs/studies/<name>.yaml` defines it; its keys are the fields of `Study`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from lingpt.common.errors import UserError, nearest, unknown
from lingpt.common.files import read_json_object, read_yaml
from lingpt.common.run_folder import METRICS
from lingpt.study.portable import differs
from lingpt.train.recipe import RECIPES

STUDIES = RECIPES / "studies"  # those that ship with LinGPT
STAGES = ("data", "rates", "runs", "mqar", "scores", "page")
STUDY = "study.json"  # the study's configuration, in its folder
_DECIDED = ("train.max_steps", "train.max_tokens", "train.seed", "train.name")
_RANGES = {  # (minimum, maximum)
    "tokens": (1, 10**15),
    "seeds": (1, 1000),
    "devices_per_run": (1, 10_000),
    "runs_per_device": (1, 100),
    "max_length_factor": (1, 10**6),
    "limit": (1, 10**9),
}
# What a value of this type is called in an error.
_KINDS = {
    int: "a whole number",
    str: "text",
    bool: "true or false",
    tuple[str, ...]: "a list of words",
    tuple[float, ...]: "a list of numbers above 0",
    dict[str, Any]: "`key: value`",
    dict[str, dict[str, Any]]: "`row: {key: value}`, with the options of `lingpt train`, or a list of rows",
    dict[str, str]: "`name: path`",
}


@dataclass(frozen=True)
class Study:
    """The keys of a study's file.

    Args:
        name: name of the study's folder, `study-<name>`; by default that of the file, without `study-`.
        recipe: recipe of every run: a file, or the name of one that ships.
        tokens: training tokens per run.
        seeds: number of runs per attention, with the seeds 0, 1, …
        attentions: row name → its options, as `lingpt train` takes them; the row's attention is
            `model.attention`, by default the row's name.
        options: options of every run.
        learning_rates: peak learning rates to try; each attention gets the best one in short runs. Empty: the
            recipe's.
        rate_tokens: training tokens of each short run.
        rate_options: options of the short runs.
        devices_per_run: GPUs per run; None for all, with one run after another.
        runs_per_device: number of runs that share a GPU, for small runs that leave most of it idle. Their
            times are meaningless, and the page leaves them out.
        row_by_row: train all seeds of a row before the next row; by default the first seeds of all rows.
        baselines: rows whose losses the page compares the others' with; times are relative to the first of
            them. By default softmax, if it is a row, else the first.
        plotted_rows: rows in the figure of the losses; by default all.
        suites: suites of `lingpt eval`.
        tasks: tasks of Table 2.
        eval_data: folder of benchmark JSONL; None for the Hugging Face hub.
        texts: name → JSONL that was not trained on, for the suites `language` and `recall`.
        max_length_factor: the loss by position goes up to this multiple of the training length.
        limit: evaluate only so many documents of each task, from the first on.
        mqar: options of `lingpt mqar`, to also train and score the synthetic recall task.
        about: a sentence for the page.
    """

    name: str
    recipe: str
    tokens: int
    attentions: dict[str, dict[str, Any]]
    seeds: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    rate_tokens: int = 0
    rate_options: dict[str, Any] = field(default_factory=dict)
    devices_per_run: int | None = 1
    runs_per_device: int = 1
    row_by_row: bool = False
    baselines: tuple[str, ...] = ()
    plotted_rows: tuple[str, ...] = ()
    suites: tuple[str, ...] = ("table2",)
    tasks: tuple[str, ...] = ("arc_easy", "arc_challenge", "piqa", "mmlu", "mmlu:5")
    eval_data: str | None = None
    texts: dict[str, str] = field(default_factory=dict)
    max_length_factor: int = 8
    limit: int | None = None
    mqar: dict[str, Any] | None = None
    about: str = ""

    def attention(self, row: str) -> str | list[str]:
        return self.attentions[row].get("model.attention", row)

    def run_names(self) -> list[tuple[str, str, int]]:
        """(row, name of the run, seed) of every run, in the order in which they are trained."""
        names = [(row, f"{row}-seed{seed}", seed) for row in self.attentions for seed in range(self.seeds)]
        return names if self.row_by_row else sorted(names, key=lambda name: name[2])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def studies() -> list[str]:
    """The names of the shipped studies."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def find_study(name: str) -> Path:
    """The file of a study, given as a path or as a shipped name. UserError if there is none."""
    known, path = studies(), Path(name)
    if not path.is_file() and name in known:
        path = STUDIES / f"{name}.yaml"
    if not path.is_file() or "attentions" not in (read_yaml(path) or {}):
        raise UserError(f"no study {name!r}{nearest(name, known)}; a file, or one of {', '.join(known)}")
    return path


def read_study(path: Path, changes: Mapping[str, Any] | None = None) -> Study:
    """The study of a file, with `changes` to its keys. UserError if it is invalid."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a study: it has no keys")
    kinds = get_type_hints(Study)
    for key in values:
        if key not in kinds:
            known = ", ".join(kinds)
            raise UserError(f"{path}: unknown key {key!r}{nearest(str(key), kinds)}; a study has {known}")
    values |= dict(changes or {})
    if isinstance(rows := values.get("attentions"), list):
        values["attentions"] = {str(name): {} for name in rows}
    elif isinstance(rows, dict):
        values["attentions"] = {
            str(name): {} if options is None else options for name, options in rows.items()
        }
    for key, kind in kinds.items():
        if values.get(key) is None and not isinstance(kind, UnionType):
            values.pop(key, None)  # a key without a value counts as left out
        elif not _is(value := values.get(key), kind):
            raise UserError(f"{path}: `{key}` is {value!r:.60}; it must be {_KINDS[_without_none(kind)]}")
    values.setdefault("name", path.stem.removeprefix("study-"))
    for key in ("recipe", "tokens", "attentions"):
        if values.get(key) in (None, "", {}):
            raise UserError(f"{path} is not a study: it does not say `{key}`")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    study = Study(**given)
    _check(study, path)
    return study


def _without_none(kind: Any) -> Any:
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from YAML is one of this type of a field; a list is a tuple."""
    if isinstance(kind, UnionType):
        return value is None or _is(value, _without_none(kind))
    if kind is Any:
        return True
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(item, get_args(kind)[1]) for item in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def with_rows(study: Study, rows: Sequence[str]) -> Study:
    """The study with these rows: rows of its own, or attentions. UserError for anything else."""
    from lingpt.models import ALIASES, ATTENTIONS

    attentions = [*ATTENTIONS, *ALIASES]
    known = list(dict.fromkeys([*study.attentions, *attentions]))
    for row in rows:
        if row not in known and row.partition("+")[0] not in attentions:
            raise UserError(f"unknown attention {row!r}{nearest(row, known)}: {', '.join(known)}")
    return replace(study, attentions={row: study.attentions.get(row, {}) for row in rows})


def with_baseline(study: Study, row: str) -> Study:
    """The study with this row as the first of its `baselines`. UserError if it is not one of its rows."""
    if row not in study.attentions:
        raise unknown("baseline", row, study.attentions)
    return replace(study, baselines=(row, *(other for other in study.baselines if other != row)))


def with_started_runs(asked: Study, folder: Path) -> Study:
    """The study `asked` for, plus the rows and seeds that its folder already has runs of.

    UserError if the folder holds another study. Runs whose row has changed are detected later, one by one.
    """
    path = folder / STUDY
    if not path.exists():
        return asked
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
    return replace(asked, attentions=kept | asked.attentions, seeds=max(asked.seeds, last + 1))


def _without_data_paths(options: Any) -> Any:
    """Options without the paths of text and tokenizer: the runs' records have the hashes of both."""
    from lingpt.train.config import DATA_PATHS

    if not isinstance(options, dict):
        return options
    return {key: value for key, value in options.items() if key not in DATA_PATHS}


def _check(study: Study, path: Path) -> None:
    """Raises UserError for values that do not go together."""
    from lingpt.eval.suites import check_suites

    for key, (least, most) in _RANGES.items():
        value = getattr(study, key)
        if value is not None and not least <= value <= most:
            raise UserError(f"{path}: `{key}` is {value}; it must be at least {least:,} and at most {most:,}")
    check_suites(study.suites)
    if "table2" in study.suites and not study.tasks:
        raise UserError(f"{path}: `tasks` is empty; the suite table2 needs some, or leave it out of `suites`")
    for options in (study.options, study.rate_options, *study.attentions.values()):
        if taken := [key for key in _DECIDED if key in options]:
            raise UserError(f"{path}: leave out {taken[0]}: the study gives it to each run")
    if study.learning_rates and study.rate_tokens < 1:
        raise UserError(f"{path}: `learning_rates` need `rate_tokens`, how long each is tried")
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
