"""Scores, and their file `runs/<name>/eval/step-XXXXXXXX.json`: an entry per task, merged and written
atomically."""

import base64
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from lingpt.common.errors import UserError
from lingpt.common.files import read_bytes, set_aside, write_errors, write_json
from lingpt.common.format import with_error
from lingpt.common.locks import file_lock
from lingpt.common.run_folder import EVAL, scores_file
from lingpt.eval.runs import Checkpoint

DASH = "–"  # in tables, for what was not evaluated

Number = Annotated[float, Field(ge=-math.inf)]  # not NaN
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The loss at the positions up to `to`; over several seeds also the bounds of their losses."""

    to: Count
    loss: Number
    stderr: Number | None = None
    lowest: Number | None = None
    highest: Number | None = None


@dataclass(frozen=True, kw_only=True)
class PerDocument:
    """What paired differences are computed from: of each document its nats and bytes (`bits_per_byte`), or of
    each group of positions the loss of each document (`loss_by_position`)."""

    nats: tuple[FiniteFloat, ...] = ()
    bytes: tuple[Count, ...] = ()
    losses: tuple[tuple[FiniteFloat, ...], ...] = ()

    def values(self) -> np.ndarray:
        """Bits, or the loss of each group: `[groups, documents]`."""
        return np.array(self.losses) if self.losses else np.array([self.nats]) / math.log(2)

    def sizes(self) -> Sequence[int]:
        """What a document's value is divided by: its bytes, or 1."""
        return self.bytes or [1] * len(self.losses[0])


@dataclass(frozen=True, kw_only=True)
class Score:
    """One task or measure of one checkpoint; or the mean over the seeds `runs`, which is never in a file.

    documents: how many were scored; `complete` if these are the whole benchmark.
    metrics: as `{"acc": 0.25, "acc_stderr": 0.01}`; None for one that was not computed.
    correct: per metric, which questions were answered correctly (`pack_bits`).
    prompts: SHA-256 of all requests: scores with the same hash are of the same questions.
    texts: the name of the text, of a measure on held-out text.
    positions, train_length, unigram: of `loss_by_position`; the first two also of `loss_within_documents`.
    file_rows: benchmark file → its rows and those of the official split, if these differ.
    cut_prompts: how many were cut on the left to `max_length` tokens.
    The rest records how the score was computed.
    """

    task: str
    documents: Annotated[Count, Field(gt=0)]
    complete: bool
    metrics: dict[str, Number | None] = field(default_factory=dict)
    num_fewshot: Count = 0
    limit: Count | None = None
    texts: str | None = None
    correct: dict[str, str] = field(default_factory=dict)
    per_document: PerDocument | None = None
    positions: tuple[Positions, ...] = ()
    unigram: Number | None = None
    train_length: Count | None = None
    prompts: str | None = None
    subtasks: dict[str, dict[str, Number | None]] = field(default_factory=dict)
    example: dict[str, Any] = field(default_factory=dict)
    file_rows: dict[str, tuple[Count, Count]] = field(default_factory=dict)
    cut_prompts: Count | None = None
    version: str | float | None = None
    max_length: Count | None = None
    dtype: str | None = None
    data: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    devices: Count | None = None
    seconds: Number | None = None
    date: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    runs: "tuple[Score, ...]" = ()

    def __post_init__(self) -> None:
        """ValueError if the answers, or the values per document, are not one for each document."""
        for packed in self.correct.values():
            unpack_bits(packed, self.documents)
        if values := self.per_document:
            rows = values.losses or (values.nats, values.bytes)
            groups = len(self.positions) if values.losses else 2
            if len(rows) != groups or any(len(row) != self.documents for row in rows):
                raise ValueError("per_document has no number for each document")

    @property
    def by_seed(self) -> "tuple[Score, ...]":
        """The score of each seed; of a single run the score itself."""
        return self.runs or (self,)

    def percent(self, metric: str) -> str:
        """An accuracy and its standard error in per cent, as `25.10 ± 0.88`; `–` if it was not computed."""
        return percent(self.metrics.get(metric), self.metrics.get(f"{metric}_stderr"))

    def number(self, metric: str, spec: str = ".2f") -> str:
        """A metric and its standard error; `–` if it was not computed."""
        value, error = self.metrics.get(metric), self.metrics.get(f"{metric}_stderr")
        return DASH if value is None else with_error(value, error or None, spec)


@dataclass(frozen=True, kw_only=True)
class About:
    """The checkpoint that was scored. `baseline`: a study compares others with it (never in a file)."""

    run: str
    model: str
    attention: str | tuple[str, ...]
    step: Count
    form: str = ""
    path: str = ""
    weights: str = ""
    parameters: Count | None = None
    tokens: Count | None = None
    seq_len: Count | None = None
    seed: int | None = None
    baseline: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """All scores of one checkpoint, by key; or the means over the seeds `runs`, which are never in a file."""

    checkpoint: About
    scores: dict[str, Score]
    runs: "tuple[Result, ...]" = ()

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each run that this is the mean of."""
        return [run.checkpoint.seed for run in self.runs or (self,)]

    def of_task(self, task: str) -> list[Score]:
        """The scores of one measure, such as that of each text."""
        return [score for score in self.scores.values() if score.task == task]


_RESULT = TypeAdapter(Result)


def task_key(task: str, num_fewshot: int, limit: int | None = None) -> str:
    """The score's key, `arc_easy (0-shot)` or `arc_easy (0-shot, first 100)`: a limited one never replaces a
    full one."""
    return f"{task} ({num_fewshot}-shot{f', first {limit}' if limit else ''})"


def measure_key(measure: str, text: str) -> str:
    """The score's key, `bits_per_byte (novels)`."""
    return f"{measure} ({text})"


def is_share(metric: str) -> bool:
    """Whether a metric is a share of the questions, shown in per cent."""
    return metric.startswith("acc") or metric in ("exact", "contains")


def percent(value: float | None, error: float | None) -> str:
    """A share and its standard error in per cent; `–` for None.

    With none or all answers right the formula's error is a meaningless 0, which is left out.
    """
    if value is None:
        return DASH
    return with_error(100 * value, 100 * error if error else None, ".2f")


def signed_difference(difference: tuple[float, float | None] | None, decimals: int) -> str:
    """A difference and its standard error, if it has one, as `+0.044 ± 0.003`; `–` if there is none."""
    return DASH if difference is None else with_error(*difference, f"+.{decimals}f")


def share(name: str, values: Sequence[bool]) -> dict[str, float | None]:
    """The metric `name`, the share of the values that are true, and its standard error."""
    mean = sum(values) / len(values)
    return {name: mean, f"{name}_stderr": (mean * (1 - mean) / (len(values) - 1)) ** 0.5}


def pack_bits(bits: Sequence[bool]) -> str:
    """Bits as base64, eight per byte: 14,042 questions in 2.3 kB."""
    return base64.b64encode(np.packbits(np.asarray(bits, dtype=bool)).tobytes()).decode()


def unpack_bits(packed: str, count: int) -> np.ndarray:
    """The inverse of `pack_bits`: bool `[count]`. ValueError if `packed` does not hold so many."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(packed), dtype=np.uint8))[:count].astype(bool)
    if len(bits) < count:
        raise ValueError(f"{len(bits)} answers to {count} questions")
    return bits


def results_path(checkpoint: Checkpoint) -> Path:
    return scores_file(checkpoint.run, checkpoint.step)


def load_results(checkpoint: Checkpoint) -> Result:
    """All scores of this checkpoint.

    Scores of other weights at the same step (before the run was restarted from scratch) are left out. A
    damaged file is renamed to `damaged-…` and named on stderr.
    """
    about = About(
        run=checkpoint.run.name,
        path=str(checkpoint.folder),
        model=checkpoint.model,
        attention=checkpoint.attention,
        form=checkpoint.form,
        step=checkpoint.step,
        weights=checkpoint.weights,
        parameters=checkpoint.parameters,
        tokens=checkpoint.tokens,
        seq_len=checkpoint.seq_len,
        seed=checkpoint.seed,
    )
    return Result(checkpoint=about, scores=_known_scores(checkpoint))


def read_results(path: Path) -> Result:
    """Reads a file of `add_score`. UserError, naming the file, if it is damaged."""
    try:
        return _RESULT.validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise UserError(
            f"{path} is damaged, or of another version: `lingpt eval` scores again ({reason})"
        ) from error


def _known_scores(checkpoint: Checkpoint) -> dict[str, Score]:
    path = results_path(checkpoint)
    if not path.exists():
        return {}
    try:
        known = read_results(path)
    except UserError:
        with write_errors(path):
            aside = set_aside(path, "damaged")
        print(
            f"{path} is damaged; it is kept as {aside.name}, and its scores are computed again",
            file=sys.stderr,
        )
        return {}
    return known.scores if known.checkpoint.weights == checkpoint.weights else {}


def add_score(checkpoint: Checkpoint, key: str, score: Score) -> Result:
    """Merges one score into the file, one process at a time, and returns all scores.

    A score of part of a benchmark (a file with fewer rows) does not replace one of the whole.
    """
    path = results_path(checkpoint)
    lock = checkpoint.run / f".{EVAL}.lock"  # the run's own is held by its training
    with write_errors(path), file_lock(lock):
        results = load_results(checkpoint)
        known = results.scores.get(key)
        if not known or not known.complete or score.complete:
            results = replace(results, scores=results.scores | {key: score})
            write_json(path, _without_empty(asdict(results)), indent=2)
    return results


def _without_empty(value: Any) -> Any:
    """JSON without what is not known: None, and what is empty or false by default."""
    if not isinstance(value, dict):
        return value
    return {
        key: _without_empty(item)
        for key, item in value.items()
        if item not in (None, (), {}) and (key, item) != ("baseline", False)
    }
