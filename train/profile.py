"""`--train.profile true`: profiles a few steps, as a trace for Perfetto and as a table.

The parts of a step are named ranges (`span`). On a GPU a kernel belongs to the part in which it was launched,
by any thread (autograd has its own); NCCL's kernels belong to the communication. In that part the host also
waits for the device; with a single process there is only that waiting.
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lingpt.common.files import write_errors, write_text
from lingpt.common.format import counted
from lingpt.train.console import print_rank0

SKIPPED, STEPS = 2, 2  # steps after the start: skipped as they still compile, then traced
COMMUNICATION, WAITING = "communication", "waiting for the device"  # the end of a step, by world size
PARTS = ("data", "forward", "loss", "backward", COMMUNICATION, WAITING, "optimizer")
TRACE, SUMMARY = "trace.json.gz", "summary.txt"

span = record_function  # `with span("forward"):` names a part of a step


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
                with gzip.open(self._folder / TRACE, "rt") as file:
                    text = summary(json.load(file)["traceEvents"])
                write_text(self._folder / SUMMARY, text + "\n")
        except ValueError as error:  # UserError, or a truncated trace: no reason to end a run
            print_rank0(f"profile: {error}; training goes on without it")
            return
        print_rank0(f"{text}\ntrace {self._folder / TRACE} (open it at ui.perfetto.dev)")


def summary(events: list[dict[str, Any]]) -> str:
    """A table of a step's parts, and its top kernels, from the events of a Chrome trace (microseconds)."""
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in (*PARTS, "step")]
    steps = [span for span in spans if span["name"] == "step"]
    if not steps:
        return "profile: no step was recorded (the run has too few)"
    wall = sum(step["dur"] for step in steps)
    inside = (s for s in spans if s["name"] != "step" and _is_within(steps, s["ts"]))  # not in a validation
    parts = sorted(inside, key=lambda span: span["ts"])
    host = Counter({name: sum(s["dur"] for s in parts if s["name"] == name) for name in PARTS})
    host["forward"] -= host["loss"]  # the loss is part of it
    kernels = [k for k in _kernels(events) if _is_within(steps, k["ts" if k["launch"] is None else "launch"])]
    device, busy = _of_parts(kernels, parts), _union(kernels)
    n = len(steps)
    lines = [
        f"{counted(n, 'step')} of {wall / n / 1e3:.1f} ms; ms a step:",
        f"{'':<24}{'host':>10}{'share':>8}" + (f"{'device':>12}{'share':>8}" if kernels else ""),
    ]
    rest = wall - sum(host.values())
    shown = [part for part in PARTS if host[part] or device[part] or part not in (COMMUNICATION, WAITING)]
    for name, time in [*((part, host[part]) for part in shown), ("host, the rest", rest)]:
        row = f"{name:<24}{time / n / 1e3:>10.2f}{time / wall:>8.1%}"
        if kernels and name in PARTS:
            row += f"{device[name] / n / 1e3:>12.2f}{device[name] / wall:>8.1%}"
        lines.append(row)
    if kernels:
        idle = max(0.0, wall - busy)
        other = device["other"]
        lines.append(f"{'other kernels':<42}{other / n / 1e3:>12.2f}{other / wall:>8.1%}")
        lines.append(f"{'device idle':<42}{idle / n / 1e3:>12.2f}{idle / wall:>8.1%}")
        lines += ["", "kernels that take the most, ms a step:", *_top(kernels, n)]
    return "\n".join(lines)


def _is_within(steps: list[dict[str, Any]], at: float) -> bool:
    return any(step["ts"] <= at <= step["ts"] + step["dur"] for step in steps)


def _kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels, each with the time of its launch as `launch`; None if that was not recorded."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    kernels = (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    return [k | {"launch": launches.get(k.get("args", {}).get("correlation"))} for k in kernels]


def _of_parts(kernels: list[dict[str, Any]], parts: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of the kernels launched in each part (the innermost part counts)."""
    starts = [part["ts"] for part in parts]
    found: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        at, name = kernel["launch"], "other"
        if kernel["name"].startswith("nccl"):
            name = COMMUNICATION
        elif at is not None:
            # The innermost part is the last to start; parts are nested at most once.
            last = bisect_right(starts, at)
            inside = [part for part in parts[max(0, last - 2) : last] if at <= part["ts"] + part["dur"]]
            name = inside[-1]["name"] if inside else "other"
        found[name] += kernel["dur"]
    return found


def _union(kernels: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        stop = kernel["ts"] + kernel["dur"]
        total += max(0.0, stop - max(end, kernel["ts"]))
        end = max(end, stop)
    return total


def _top(kernels: list[dict[str, Any]], steps: int) -> list[str]:
    times: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel["name"]] += kernel["dur"]
    return [f"  {time / steps / 1e3:>10.2f}  {name[:90]}" for name, time in times.most_common(10)]
