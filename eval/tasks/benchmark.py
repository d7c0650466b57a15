"""lm-eval's stock tasks, except for where the rows come from."""

import contextlib
import io
import logging
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lingpt.common.errors import UserError, nearest, one_line
from lingpt.data.hub import hub_errors, hub_reason
from lingpt.eval.tasks.sources import (
    WITHOUT,
    Source,
    check_folder,
    find_source,
    read_rows,
    read_split,
    sources,
    split_file,
)

STOCK, OWN = Path(lm_eval.tasks.__file__).parent, Path(__file__).parent


class Benchmark(ConfigurableTask):
    """A stock task whose rows come from `metadata["eval_data"]`, a folder of JSONL, if that is given."""

    def __init__(self, config: dict[str, Any], **kwargs: Any) -> None:
        self._examples: dict[tuple[str, int], Any] = {}
        self._built: tuple[int | None] | None = None  # the limit of the requests that are there
        super().__init__(config={key: value for key, value in config.items() if key != "class"}, **kwargs)

    # ------------------------------------------------------------------ where the rows come from

    @property
    def folder(self) -> Path | None:
        folder = self.config.metadata.get("eval_data")
        return Path(folder) if folder else None

    @property
    def splits(self) -> list[str]:
        """The split evaluated and, with shots, the one that examples come from (lm-eval's rules)."""
        splits = [self.config.test_split or self.config.validation_split]
        if self.config.num_fewshot:
            splits.append(
                self.fewshot_cfg.split or self.config.training_split or self.config.validation_split
            )
        return splits

    @property
    def source(self) -> Source:
        """The local files of this task's data set; UserError if none are known."""
        source = find_source(self.config.dataset_path, self.config.dataset_name)
        unknown = [split for split in self.splits if source is None or split not in source.splits]
        if source is None or unknown:
            raise UserError(
                f"{self.config.task}: no local file is known for its {unknown[0]} split: {WITHOUT}"
            )
        return source

    @property
    def files(self) -> list[Path]:
        """The local files that this task reads; none if its rows come from the hub."""
        if self.folder is None:
            return []
        return [split_file(self.folder, self.source, split) for split in self.splits]

    @property
    def odd_rows(self) -> dict[str, tuple[int, int]]:
        """File in use → its number of rows and that of the official split, if these differ."""
        found = {}
        for file, split in zip(self.files, self.splits if self.files else (), strict=True):
            rows, official = len(read_rows(file, self.source.fields)), self.source.splits[split].rows
            if rows != official:
                found[file.name] = rows, official
        return found

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.folder is not None:
            self.dataset = self._read_local(self.folder)
            return
        try:
            super().download(dataset_kwargs, **kwargs)
        except Exception as error:  # each library raises its own errors when offline
            raise UserError(
                f"cannot be loaded from the Hugging Face hub ({hub_reason(error)}); without network, set "
                "EVAL_DATA (or --data) to a folder with the benchmarks' JSONL files"
            ) from error

    def _read_local(self, folder: Path) -> Any:
        """The splits in use as a `DatasetDict` in memory."""
        from datasets import Dataset, DatasetDict

        name = self.config.dataset_name
        rows = {split: read_split(folder, self.source, split, name) for split in self.splits}
        examples, wanted = rows[self.splits[-1]], self.config.num_fewshot or 0
        if len(examples) < wanted:
            rows_of = f"{self.files[-1]} has {len(examples)} rows for {self.config.task}"
            raise UserError(f"{rows_of}: too few for {wanted} examples")
        return DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})

    def fewshot_docs(self) -> Any:
        """The pool of examples; None at zero shots, so that no file is needed."""
        if self.folder is not None and not self.config.num_fewshot:
            return None
        return super().fewshot_docs()

    # ------------------------------------------------------------------ the same prompts, faster

    def build_all_requests(self, *, limit: int | None = None, **kwargs: Any) -> None:
        """Like the stock task's, but built once for all checkpoints, and without a progress bar."""
        if self._built == (limit,):
            for instance in self._instances:
                instance.resps, instance.filtered_resps = [], {}
            return
        self.set_fewshot_seed(DEFAULT_OTHER_SEED)
        with contextlib.redirect_stderr(io.StringIO()):
            super().build_all_requests(limit=limit, **kwargs)
        self._built = (limit,)

    def doc_to_text(self, doc: dict, doc_to_text: Any = None) -> Any:
        return self._once("text", doc, doc_to_text, super().doc_to_text)

    def doc_to_choice(self, doc: dict, doc_to_choice: Any = None) -> Any:
        return self._once("choice", doc, doc_to_choice, super().doc_to_choice)

    def doc_to_target(self, doc: dict, doc_to_target: Any = None) -> Any:
        return self._once("target", doc, doc_to_target, super().doc_to_target)

    def _once(self, kind: str, doc: dict, template: Any, render: Callable[[dict, Any], Any]) -> Any:
        """Renders an example once: lm-eval would compile its template again for each question it precedes.

        Only examples have their own template (`fewshot_config`); they live as long as the task, so their id
        is a valid key.
        """
        if template is None:
            return render(doc, None)
        key = (kind, id(doc))
        if key not in self._examples:
            self._examples[key] = doc, render(doc, template)
        return self._examples[key][1]


def load_tasks(name: str, num_fewshot: int = 0, data: Path | None = None) -> dict[str, Any]:
    """The stock task or group `name` with `num_fewshot` examples, as `TaskManager.load` returns it.

    With `data`, rows come from the JSONL files there, without network access. UserError for a name that
    lm-eval does not have, or has as a tag, for a missing file, or an unreachable hub.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if data is not None:
        check_folder(data)
    files = sorted(f for f in data.glob("*.jsonl") if f.is_file()) if data else []  # no broken links
    stamp = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    loaded = _load(name, num_fewshot, data and str(data), stamp)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return loaded


def check_task(name: str, num_fewshot: int = 0, data: Path | None = None) -> None:
    """Raises UserError for an unknown task or, with `data`, unreadable files of it; downloads nothing."""
    if data is not None:
        load_tasks(name, num_fewshot, data)
    elif name not in TaskManager(include_defaults=False, include_path=covered()).all_tasks:
        _all_tasks(name)


def covered() -> list[Path]:
    """The folders of tasks that `sources.yaml` names (indexing all tasks takes ten seconds)."""
    folders = dict.fromkeys(source.tasks for source in sources().values())
    return [OWN / name if (OWN / name).is_dir() else STOCK / name for name in folders]


def local_tasks(data: Path) -> list[str]:
    """The stock tasks whose zero-shot questions are in the folder `data`; for MMLU only the group."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_defaults=False, include_path=covered())
    found = set()
    for entry in manager.task_index.values():
        config = entry.cfg or {}
        source = find_source(config.get("dataset_path", ""), config.get("dataset_name"))
        split = config.get("test_split") or config.get("validation_split")
        if source and split in source.splits and (data / source.splits[split].file).is_file():
            found.add("mmlu" if source.select else entry.name)
    return sorted(found)


@lru_cache(maxsize=16)
def _load(name: str, num_fewshot: int, data: str | None, stamp: tuple) -> dict[str, Any]:
    """`load_tasks`, once for all checkpoints; `stamp` changes when a file of `data` does."""
    manager = TaskManager(include_defaults=False, include_path=covered(), metadata={"eval_data": data})
    if name in manager.all_tasks:
        overrides = {"class": Benchmark, "num_fewshot": num_fewshot}
        for entry in manager.task_index.values():
            # lm-eval uses the config in memory only without a path; its index leaves `!function` unresolved.
            if entry.name in manager.all_subtasks:
                entry.cfg, entry.yaml_path = {**load_yaml(entry.yaml_path), **overrides}, None
    elif data is not None:
        known = local_tasks(Path(data))
        raise UserError(
            f"no local files for a task {name!r}{nearest(name, known)}; {data} has those of "
            f"{', '.join(known) or 'none'} (and of MMLU's subjects); {WITHOUT}"
        )
    else:
        manager = _all_tasks(name)
    with contextlib.redirect_stderr(io.StringIO()) if data else contextlib.nullcontext():  # progress bars
        loaded = manager.load(name) if data else _from_hub(manager, name)
    scored = {group for group, found in loaded["groups"].items() if found.aggregate_metric_list}
    if name not in scored | loaded["tasks"].keys():
        raise UserError(f"{name!r} has no score of its own: give its tasks, {' '.join(loaded['tasks'])}")
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", num_fewshot)
    return loaded


def _all_tasks(name: str) -> TaskManager:
    """The task manager of all of lm-eval's tasks; UserError if `name` is none of them."""
    manager = _stock_tasks()
    if name not in manager.all_tasks:
        raise UserError(f"lm-eval has no task {name!r}{nearest(name, manager.all_tasks)}")
    return manager


@cache
def _stock_tasks() -> TaskManager:
    """The index of all 13,000 tasks, which takes ten seconds to build."""
    return TaskManager()


def _from_hub(manager: TaskManager, name: str) -> dict[str, Any]:
    """`manager.load`; UserError if the hub is unreachable, or lm-eval cannot load the task."""
    try:
        with hub_errors(f"the data set of the task {name!r}", "leave the task out"):
            return manager.load(name)
    except UserError:
        raise
    except Exception as error:  # a task's own code may raise anything
        raise UserError(
            f"lm-eval cannot load its task {name!r} ({one_line(error)}): leave the task out"
        ) from error
