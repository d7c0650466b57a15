"""The configuration of a study: several attentions with several seeds each, trained and scored alike.

A file `configs/studies/<name>.yaml` defines it; its keys are the fields of `Study`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError, nearest, unknown
from lingpt.common.files import read_json_object, read_yaml
from lingpt.common.run_folder import METRICS
from lingpt.study.portable import differs
from lingpt.train.recipe import RECIPES

_LISTS = ("learning_rates", "suites", "tasks", "baselines", "plotted_rows")
_MAPPINGS = ("options", "rate_options", "texts", "mqar")
_WHOLE = (
    "tokens",
    "seeds",
    "runs_per_device",
    "max_length_factor",
    "limit",
    "rate_tokens",
    "devices_per_run",
)
_DECIDED = ("train.max_steps", "train.max_tokens", "train.seed", "train.name")
STUDIES = RECIPES / "studies"  # those that ship with LinGPT
STAGES = ("data", "rates", "runs", "mqar", "scores", "page")
STUDY = "study.json"  # the study's configuration, in its folder
# Old name → new name, for keys in the study.json of earlier versions (docs/results has some).
_RENAMED = {
    "rates": "learning_rates",
    "cards_per_run": "devices_per_run",
    "runs_per_card": "runs_per_device",
    "against": "baselines",
    "drawn": "plotted_rows",
    "longest": "max_length_factor",
    "stopped_halfway": "interrupted_row",
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
        interrupted_row: a row whose first run is stopped halfway and resumed, which must not change its
            losses.
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
    interrupted_row: str | None = None
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
    values = {"name": path.stem.removeprefix("study-")} | _with_new_names(values) | dict(changes or {})
    known = [key.name for key in fields(Study)]
    for key in values:
        if key not in known:
            raise UserError(
                f"{path}: unknown key {key!r}{nearest(str(key), known)}; a study has {', '.join(known)}"
            )
    for key in ("recipe", "tokens", "attentions"):
        if values.get(key) is None:
            raise UserError(f"{path} is not a study: it does not say `{key}`")
    if values["name"] is None:
        raise UserError(f"{path}: `name` has no value: give it a word, or leave it out")
    values["attentions"] = _rows(values["attentions"], path)
    for key in (*_LISTS, *_MAPPINGS, "rate_tokens"):  # a key without a value counts as empty
        if values.get(key, ()) is None:
            del values[key]
    _check_types(values, path)
    study = Study(**values | {key: tuple(values[key]) for key in _LISTS if key in values})
    _check(study, path)
    return study


def _with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(key, key): value for key, value in values.items()}


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
        before, now = _with_new_names(read_json_object(path)), json.loads(json.dumps(asdict(asked)))
    except UserError as error:
        raise UserError(f"{error}: {mend}") from error
    rows, seeds = before.get("attentions"), before.get("seeds")
    if not isinstance(rows, dict) or type(seeds) is not int:
        raise UserError(f"{path} is damaged: {mend}")
    for key in ("recipe", "tokens", "options", "learning_rates", "rate_tokens", "rate_options", "mqar"):
        # MQAR may be added or removed, the data may move; other keys are in every study.json of this version.
        other, own = before.get(key, now[key]), now[key]
        changed = differs(_without_data_paths(other), _without_data_paths(own))
        if changed and not (key == "mqar" and None in (other, own)):
            raise UserError(
                f"{folder} holds a study with another `{key}` ({other}, now {own}): "
                "give the new one a --name, or move that folder away"
            )

    def started(row: str, seed: int) -> bool:
        return (folder / f"{row}-seed{seed}" / METRICS).exists()

    kept = {row: options for row, options in rows.items() if any(started(row, i) for i in range(seeds))}
    last = max((i for row in kept for i in range(seeds) if started(row, i)), default=0)
    return replace(asked, attentions=kept | asked.attentions, seeds=max(asked.seeds, last + 1))


def _without_data_paths(options: Any) -> Any:
    """Options without the paths of text and tokenizer: the runs' records have the hashes of both."""
    from lingpt.train.config import DATA_PATHS

    if not isinstance(options, dict):
        return options
    return {key: value for key, value in options.items() if key not in DATA_PATHS}


def _check_types(values: Mapping[str, Any], path: Path) -> None:
    """Raises UserError for a value of the wrong type: lists, mappings, integers, words, learning rates."""
    for keys, kind, what in (
        (_LISTS, list | tuple, "a list"),
        (_MAPPINGS, dict, "`key: value`"),
        (_WHOLE, int, "a whole number"),
        (("recipe",), str, "a file, or the name of a recipe"),
        (("name",), str, "a word"),
        (("eval_data",), str, "a folder"),
    ):
        for key in keys:
            value = values.get(key)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise UserError(f"{path}: `{key}` is {value!r}; it must be {what}")
    words = [(key, word) for key in _LISTS if key != "learning_rates" for word in values.get(key, ())]
    words += [("texts", source) for source in values.get("texts", {}).values()]
    for key, word in words:
        if not isinstance(word, str):
            raise UserError(f"{path}: `{key}` has {word!r}; it must be a word")
    for rate in values.get("learning_rates", ()):
        if not isinstance(rate, int | float) or isinstance(rate, bool) or rate <= 0:
            raise UserError(f"{path}: `learning_rates` has {rate!r}; each is a learning rate, as 1.0e-3")


def _rows(attentions: Any, path: Path) -> dict[str, dict[str, Any]]:
    """Row → options, from `[ours, gla]` or from `{ours: {}, mine: {model.attention: ours}}`."""
    if isinstance(attentions, list):
        attentions = {name: {} for name in attentions}
    if not isinstance(attentions, dict) or not attentions:
        raise UserError(f"{path}: `attentions` is a list of names, or a name → options for each row")
    rows = {str(name): options or {} for name, options in attentions.items()}
    for name, options in rows.items():
        if not isinstance(options, dict):
            raise UserError(f"{path}: the options of {name!r} are `key: value`, as `lingpt train` takes them")
    return rows


def _check(study: Study, path: Path) -> None:
    from lingpt.eval.suites import check_suites

    for key in ("tokens", "seeds", "runs_per_device", "max_length_factor", "limit", "devices_per_run"):
        value = getattr(study, key)
        if value is None and key in ("limit", "devices_per_run"):
            continue
        if value is None or value < 1:
            raise UserError(f"{path}: {key} is {value}; it must be at least 1")
    check_suites(study.suites)
    if "table2" in study.suites and not study.tasks:
        raise UserError(f"{path}: `tasks` is empty; the suite table2 needs some, or leave it out of `suites`")
    for options in (study.options, study.rate_options, *study.attentions.values()):
        if taken := [key for key in _DECIDED if key in options]:
            raise UserError(f"{path}: leave out {taken[0]}: the study gives it to each run")
    if study.learning_rates and study.rate_tokens < 1:
        raise UserError(f"{path}: `learning_rates` need `rate_tokens`, how long each is tried")
    if study.interrupted_row is not None and study.interrupted_row not in study.attentions:
        raise UserError(f"{path}: interrupted_row is {study.interrupted_row!r}, which is not one of its rows")
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
