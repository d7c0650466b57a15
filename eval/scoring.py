"""Scores a checkpoint: what its file of scores lacks is measured, on a model that is loaded once."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from lingpt.common.devices import device_name, find_device, named_dtype
from lingpt.common.errors import UserError
from lingpt.common.install import installed_version
from lingpt.common.run_folder import check_undamaged
from lingpt.eval.results import add_score, load_results, percent, results_path
from lingpt.eval.runs import Checkpoint
from lingpt.eval.texts import Unsuitable

PACKAGES = ("lingpt", "lm_eval", "torch", "datasets", "tokenizers")


class Measurement(NamedTuple):
    """A score to measure.

    key: its name in the file of scores.
    settings: what it depends on besides the weights: a known score with others is measured again.
        `max_length` is the model's context.
    measure: computes it, given the model as an lm-eval `LM`.
    """

    key: str
    settings: dict[str, Any]
    measure: Callable[[Any], dict[str, Any]]


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
        self.checkpoint, self.batch_tokens, self.dtype, self.redo = checkpoint, batch_tokens, dtype, redo
        self.devices, self.report_left_out = find_devices(device, devices), left_out
        self.name = f"{checkpoint.run.name} step {checkpoint.step}"
        self.results, self._log = load_results(checkpoint), log

    def settings(self, max_length: int, data: dict[str, str], **others: Any) -> dict[str, Any]:
        """`Measurement.settings` of a score on this data."""
        dtype = self.dtype or self.checkpoint.dtype
        return {"dtype": dtype, "max_length": max_length, "data": data} | others

    def score(self, measurements: Iterable[Measurement]) -> dict[str, Any]:
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
        self._log(f"{self.name}: {line}")

    def _is_known(self, measurement: Measurement) -> bool:
        key, known = measurement.key, self.results["scores"].get(measurement.key)
        if not known or not measurement.settings.items() <= known.items():
            return False
        self.log(f"{key}: {summary(known)} (computed before; --redo computes it again)")
        self._log_rows(key, known)
        return True

    def _measure(self, measurement: Measurement, lm: Any) -> None:
        key, settings, measure = measurement
        lm, start = lm.reading(settings["max_length"]), time.monotonic()
        try:
            entry = measure(lm)
        except Unsuitable as error:
            self.log(f"{key}: not measured: {error}")
            return
        entry = entry | how_measured(lm, time.monotonic() - start) | settings | entry
        self.results = add_score(self.checkpoint, key, entry)
        self.log(f"{key}: {summary(entry)} ({work(entry)})")
        self._log_rows(key, entry)
        if self.results["scores"][key] is not entry:
            self.log(f"{key}: not kept: {results_path(self.checkpoint)} has the whole benchmark")

    def _log_rows(self, key: str, entry: dict[str, Any]) -> None:
        """Logs a line on each benchmark file whose number of rows is not that of the official split."""
        for file, (rows, official) in entry.get("file_rows", {}).items():
            self.log(f"{key}: {file} has {rows:,} rows; the official split has {official:,}")


def find_devices(name: str, count: int) -> tuple[torch.device, ...]:
    """`count` devices from the one called `name` on (the CPU repeated); UserError if they do not exist."""
    first = find_device(name)
    if count < 1:
        raise UserError(f"devices is {count}; it must be at least 1")
    if first.type != "cuda":
        return (first,) * count
    start, there = first.index or 0, torch.cuda.device_count()
    if start + count > there:
        raise UserError(f"--devices {count} from cuda:{start} on, but this machine has {there} GPUs")
    return tuple(torch.device("cuda", start + i) for i in range(count))


def load_lm(
    checkpoint: Checkpoint,
    devices: Sequence[torch.device],
    dtype: str | None,
    batch_tokens: int,
) -> Any:
    """The checkpoint as an lm-eval `LM`; UserError if its attention is not its run's.

    Its context is the model's block size, which may be longer than the training length; `reading` changes it.
    The file is hashed and read once, whatever the number of devices.
    """
    from lingpt.data import load_tokenizer
    from lingpt.eval.lm import LinGPTLM, same_weights
    from lingpt.models import load_model

    check_undamaged(checkpoint.folder)
    wanted = named_dtype(dtype) if dtype else None
    model = load_model(checkpoint.folder, attention=checkpoint.attention, device=devices[0], dtype=wanted)
    tokenizer = load_tokenizer(checkpoint.folder)
    tokenizer.check_fits(model.config.padded_vocab_size)
    length = model.config.block_size
    model.autotune_inference(max(1, batch_tokens // length), length)
    models = [model, *(same_weights(model, device) for device in devices[1:])]
    name = f"{checkpoint.run.name} step {checkpoint.step}"
    return LinGPTLM(models, tokenizer, batch_tokens=batch_tokens, name=name)


def how_measured(lm: Any, seconds: float) -> dict[str, Any]:
    """The record of how a score was computed, part of every score. `devices`: how many shared the work."""
    return {
        "max_length": lm.max_length,
        "device": device_name(lm.device),
        "devices": len(lm.models),
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {package: installed_version(package) for package in PACKAGES},
    }


def summary(entry: dict[str, Any]) -> str:
    """An entry's metrics, as `acc 25.10 ± 0.88, acc_norm …`; accuracies in per cent."""
    shown = []
    for metric, value in entry["metrics"].items():
        if not metric.endswith("_stderr") and value is not None:
            text = percent(entry["metrics"], metric) if metric.startswith("acc") else f"{value:.2f}"
            shown.append(f"{metric} {text}")
    return ", ".join(shown)


def work(entry: dict[str, Any]) -> str:
    """The work for an entry, as `2376 documents, 20 s`, and how many requests exceeded the block size."""
    text = f"{entry['documents']} documents, {entry['seconds']:.0f} s"
    if cut := entry.get("cut_prompts"):
        text += f", {cut} prompt{'s' if cut > 1 else ''} cut to {entry['max_length']} tokens"
    return text
