"""`--train.profile true`: profiles a few steps, as a trace for Perfetto and as PyTorch's table.

The parts of a step are named ranges (`record_function`). At its end, the communication, the host also waits
for the device; with a single process there is only that waiting.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lingpt.common.errors import UserError
from lingpt.common.files import write_errors, write_text
from lingpt.train.console import print_rank0

SKIPPED, STEPS = 2, 2  # steps after the start: skipped as they still compile, then traced
COMMUNICATION, WAITING = "communication", "waiting for the device"  # the end of a step, by world size
ROWS = 12  # that are printed
TRACE, SUMMARY = "trace.json.gz", "summary.txt"


class Profiler:
    """Records the steps after the first `SKIPPED` of this start, and writes the results to `folder`."""

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._folder, self._profile, self._steps = folder, None, 0
        if enabled:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *on_gpu],
                schedule=schedule(wait=SKIPPED - 1, warmup=1, active=STEPS, repeat=1),
                on_trace_ready=self._write,
            )
            self._profile.start()

    def step(self) -> None:
        """Called at the end of each step."""
        self._steps += 1
        if self._profile:
            self._profile.step()

    def close(self) -> None:
        if self._profile:
            self._profile.stop()
            if self._steps <= SKIPPED:
                print_rank0(
                    f"profile: nothing was recorded: the first {SKIPPED} steps of a start are left out, and "
                    f"this one had {self._steps} (--train.max_steps)"
                )

    def _write(self, recorded: profile) -> None:
        if self._steps <= SKIPPED:  # although PyTorch's profiler has started
            return
        try:
            with write_errors(self._folder):
                self._folder.mkdir(exist_ok=True)
                recorded.export_chrome_trace(str(self._folder / TRACE))
                by = "self_device_time_total" if torch.cuda.is_available() else "cpu_time_total"
                rows = recorded.key_averages()
                write_text(self._folder / SUMMARY, rows.table(by, row_limit=-1, max_name_column_width=80))
        except UserError as error:  # no reason to end a run
            print_rank0(f"profile: {error}; training goes on without it")
            return
        top = rows.table(by, row_limit=ROWS, max_name_column_width=40)
        files = f"table {self._folder / SUMMARY}\ntrace {self._folder / TRACE} (open it at ui.perfetto.dev)"
        print_rank0(f"{top}\n{files}")
