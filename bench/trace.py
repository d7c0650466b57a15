"""What a step is made of and what its communication takes, from the trace of `--train.profile`.

On a GPU communication is NCCL's kernels, with the time in which they wait for the other ranks; on a CPU it
is gloo's work. What a collective sends is named by the range that launched it (kernels/context_parallel.py);
those without a name are DDP's or FSDP's, of gradients and parameters.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingpt.common.errors import UserError
from lingpt.kernels.context_parallel import SENDS
from lingpt.plots.figures import new_figure, save_figure, style_axes
from lingpt.plots.palette import colours

UNNAMED = "gradients"
PARTS = ("forward", "backward", "optimizer")  # ranges of train/step.py
_CATEGORIES = ("user_annotation", "gpu_user_annotation", "kernel", "cuda_runtime", "cuda_driver")
Spans = list[tuple[float, float]]  # (start, duration), µs


@dataclass
class StepTrace:
    """A step of a rank: its parts, its kernels but those that communicate (none on a CPU), and communication
    by what is sent."""

    seconds: float
    parts: dict[str, Spans]
    kernels: Spans
    communication: dict[str, Spans]

    def shares(self) -> dict[str, float]:
        """Of each kind of communication, the share of the step that it takes."""
        return {
            kind: sum(duration for _, duration in spans) / 1e6 / self.seconds
            for kind, spans in sorted(self.communication.items())
        }


def read_trace(path: Path) -> StepTrace:
    """The last step in the trace. UserError if it holds none."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    by = {name: [event for event in events if event.get("cat") == name] for name in _CATEGORIES}
    steps = [event for event in by["user_annotation"] if event["name"] == "step"]
    if not steps:
        raise UserError(f"{path} has no step: profile more steps")
    step = max(steps, key=lambda event: event["ts"])
    sends = [event for event in by["user_annotation"] if event["name"].startswith(SENDS)]
    found = StepTrace(step["dur"] / 1e6, {}, [], {})
    if by["kernel"]:
        calls = {call["args"].get("correlation"): call for call in by["cuda_runtime"] + by["cuda_driver"]}
        work = [(kernel, calls.get(kernel["args"].get("correlation"), kernel)) for kernel in by["kernel"]]
    else:
        work = [(event, event) for event in by["user_annotation"] if event["name"].startswith("gloo:")]
    for event, call in work:
        if not _covers(step, call):
            continue
        span = event["ts"], event["dur"]
        if not event["name"].startswith(("nccl", "gloo:")):
            found.kernels.append(span)
            continue
        # gloo works in threads of its own, while the one that has called waits.
        names = [x["name"] for x in sends if _covers(x, call) and (call is event or x["tid"] == call["tid"])]
        kind = names[0].removeprefix(SENDS) if names else UNNAMED
        found.communication.setdefault(kind, []).append(span)
    within, ranges = step, by["user_annotation"]
    if found.kernels:  # which run later than the step has launched them
        begins, ends = min(a for a, _ in found.kernels), max(a + duration for a, duration in found.kernels)
        within, ranges = {"ts": begins, "dur": ends - begins}, by["gpu_user_annotation"]
    for event in ranges:
        if event["name"] in PARTS and _covers(within, event):
            found.parts.setdefault(event["name"], []).append((event["ts"], event["dur"]))
    return found


def _covers(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether the event `inner` begins within `outer`."""
    return outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]


def draw_trace(trace: StepTrace, title: str, out: Path) -> None:
    """Draws the step as lanes over time: parts, kernels, each kind of communication with its share."""
    lanes = {"parts of the step": trace.parts, "kernels": {"kernels": trace.kernels}}
    for kind, share in trace.shares().items():
        lanes[f"{kind}, {share:.1%}"] = {kind: trace.communication[kind]}
    lanes = {name: bars for name, bars in lanes.items() if any(bars.values())}
    colour = colours([*trace.parts, "kernels", *trace.communication])
    start = min(a for bars in lanes.values() for spans in bars.values() for a, _ in spans)
    figure = new_figure(8, 1 + 0.4 * len(lanes), dpi=130)
    axes = figure.subplots()
    for y, bars in enumerate(lanes.values()):
        for name, spans in bars.items():
            moved = [((a - start) / 1e3, duration / 1e3) for a, duration in spans]
            # An edge: without one, what is shorter than a point would not be seen.
            axes.broken_barh(moved, (y - 0.4, 0.8), color=colour[name], linewidth=0.4)
            a, duration = max(moved, key=lambda span: span[1])
            if name in PARTS and duration > 0.05e3 * trace.seconds:
                axes.text(a + duration / 2, y, name, ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    style_axes(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    save_figure(figure, out)
