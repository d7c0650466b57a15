"""Scores a checkpoint: what its file of scores lacks is measured, on a model that is loaded once."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import torch

from lingpt.common.devices import device_name, find_device, named_dtype
from lingpt.common.errors import UserError
from lingpt.common.format import counted
from lingpt.common.install import installed_version
from lingpt.common.run_folder import check_undamaged
from lingpt.eval.runs import Checkpoint
from lingpt.eval.scores import Result, Score, add_score, is_share, load_results, results_path
from lingpt.eval.texts import Unsuitable

if TYPE_CHECKING:
    from lingpt.eval.lm import LinGPTLM

PACKAGES = ("lingpt", "lm_eval", "torch", "datasets", "tokenizers")


class Measurement(NamedTuple):
    """A score to measure. A known score of another context length or other data is measured again.

    key: its name in the file of scores.
    max_length: the model's context in tokens.
    data: the files that it is measured on, with their hashes.
    measure: computes it with the model, an lm-eval `LM`.
    """

    key: str
    max_length: int
    data: dict[str, str]
    measure: "Callable[[LinGPTLM], Score]"


class Scorer:
    """Scores one checkpoint.

    Args:
        checkpoint: a `Checkpoint`.
        batch_tokens: most tokens of a batch, padding included.
        device: `auto`, or PyTorch's name of one.
        devices: how many devices, from `device` on, share the work, each with a copy of the model. The scores
            do not depend on it.
        dtype: the dtype to compute in, the checkpoint's own by default.
        redo: compute again what the run's eval/ already holds.
        log: called with a line on each score.
        left_out: called with the name of each score that cannot be computed, and why, while the others are;
            by default the first one raises.

    UserError for what the user can fix, also if the checkpoint's attention is not the one its run was
    configured with.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        batch_tokens: int = 16384,
        device: str = "auto",
        devices: int = 1,
        dtype: str | None = None,
        redo: bool = False,
        log: Callable[[str], None] = print,
        left_out: Callable[[str, str], None] | None = None,
    ) -> None:
        if dtype is not None:
            named_dtype(dtype)
        self.checkpoint, self.batch_tokens, self.redo = checkpoint, batch_tokens, redo
        self.dtype = dtype or checkpoint.dtype
        self.devices, self.report_left_out = find_devices(device, devices), left_out
        self.results, self._log = load_results(checkpoint), log

    def score(self, measurements: Iterable[Measurement]) -> Result:
        """Measures what is not known yet and returns all scores of the checkpoint (`load_results`).

        Each is written when it is done, so an interruption loses at most one.
        """
        left = [m for m in measurements if self.redo or not self._is_known(m)]
        if left:  # loaded out here: damaged weights are one error, not one for each score
            lm = load_lm(self.checkpoint, self.devices, self.dtype, self.batch_tokens)
        for measurement in left:
            with self.leaving_out(measurement.key):
                self._measure(measurement, lm)
        return self.results

    @contextlib.contextmanager
    def leaving_out(self, key: str) -> Iterator[None]:
        """Passes the UserError of one score to `left_out`, if given, instead of raising it. `log` gets a line
        without the reason, which `left_out` gets."""
        try:
            yield
        except UserError as error:
            if self.report_left_out is None:
                raise UserError(f"{key}: {error}") from error
            self.log(f"{key}: left out")
            self.report_left_out(key, str(error))

    def log(self, line: str) -> None:
        """Logs a line on this checkpoint."""
        self._log(f"{self.checkpoint.name}: {line}")

    def _is_known(self, measurement: Measurement) -> bool:
        key, known = measurement.key, self.results.scores.get(measurement.key)
        wanted = measurement.max_length, measurement.data, self.dtype
        if not known or (known.max_length, known.data, known.dtype) != wanted:
            return False
        self.log(f"{key}: {summary(known)} (computed before; --redo computes it again)")
        self._log_rows(key, known)
        return True

    def _measure(self, measurement: Measurement, lm: "LinGPTLM") -> None:
        key, max_length, data, measure = measurement
        lm, start = lm.reading(max_length), time.monotonic()
        try:
            score = measure(lm)
        except Unsuitable as error:
            self.log(f"{key}: not measured: {error}")
            return
        score = replace(
            score,
            max_length=max_length,
            data=data,
            dtype=self.dtype,
            device=device_name(lm.device),
            devices=len(lm.models),
            seconds=round(time.monotonic() - start, 1),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={package: installed_version(package) for package in PACKAGES},
        )
        self.results = add_score(self.checkpoint, key, score)
        self.log(f"{key}: {summary(score)} ({work(score)})")
        self._log_rows(key, score)
        if self.results.scores[key] is not score:
            self.log(f"{key}: not kept: {results_path(self.checkpoint)} has the whole benchmark")

    def _log_rows(self, key: str, score: Score) -> None:
        """Logs a line on each benchmark file whose number of rows is not that of the official split."""
        for file, (rows, official) in score.file_rows.items():
            self.log(f"{key}: {file} has {rows:,} rows; the official split has {official:,}")


def find_devices(name: str, count: int) -> tuple[torch.device, ...]:
    """`count` devices from the one called `name` on (the CPU repeated); UserError if they do not exist."""
    first = find_device(name)
    if first.type != "cuda":
        return (first,) * count
    start, there = first.index or 0, torch.cuda.device_count()
    if start + count > there:
        raise UserError(f"--devices {count} from cuda:{start} on, but this machine has {there} GPUs")
    return tuple(torch.device("cuda", start + i) for i in range(count))


def load_lm(
    checkpoint: Checkpoint, devices: Sequence[torch.device], dtype: str, batch_tokens: int
) -> "LinGPTLM":
    """The checkpoint as an lm-eval `LM`; UserError if its attention is not its run's.

    Its context is the model's block size, which may be longer than the training length; `reading` changes it.
    The file is hashed and read once, whatever the number of devices.
    """
    from lingpt.data import load_tokenizer
    from lingpt.eval.lm import LinGPTLM, same_weights
    from lingpt.models import load_model

    check_undamaged(checkpoint.folder)
    model = load_model(
        checkpoint.folder, attention=checkpoint.attention, device=devices[0], dtype=named_dtype(dtype)
    )
    tokenizer = load_tokenizer(checkpoint.folder)
    tokenizer.check_fits(model.config.padded_vocab_size)
    models = [model, *(same_weights(model, device) for device in devices[1:])]
    return LinGPTLM(models, tokenizer, batch_tokens=batch_tokens, name=checkpoint.name)


def summary(score: Score) -> str:
    """A score's metrics, as `acc 25.10 ± 0.88, perplexity 30.12`; accuracies in per cent."""
    shown = []
    for metric, value in score.metrics.items():
        if not metric.endswith("_stderr") and value is not None:
            shown.append(f"{metric} {score.percent(metric) if is_share(metric) else f'{value:.2f}'}")
    return ", ".join(shown)


def work(score: Score) -> str:
    """The work for a score, as `2376 documents, 20 s`, and how many requests exceeded the block size."""
    text = f"{counted(score.documents, 'document')}, {score.seconds:.0f} s"
    if cut := score.cut_prompts:
        text += f", {counted(cut, 'prompt')} cut to {score.max_length} tokens"
    return text
