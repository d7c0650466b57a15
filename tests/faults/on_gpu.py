"""What only a GPU shows: the bits of a deterministic run, and training while a checkpoint is written.

    python -m lingpt.tests.faults.on_gpu docs/results/reliability/gpu.json

Each run is a process of its own, with an empty cache of Inductor's. Of two deterministic runs the second
takes for the fastest kernel what it has measured to be the slowest: nothing that is chosen by timing may
matter. All start and compile at once; then they train in turn, each alone on the GPU.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lingpt.common.files import write_json

STEPS, COMPARED = 24, 8  # steps of a run, and those whose gradients are compared; the others are timed
IDLE, SAVES = 25, 2  # steps between two checkpoints, and how many are timed
SLOWEST = {"TORCHINDUCTOR_DISTORT_BENCHMARKING_RESULT": "inverse"}
READY, RESULT = "READY", "RESULT "


@dataclass
class Job:
    """A run of the demo's recipe, with these options, in a process of its own."""

    name: str
    options: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)

    def start(self, folder: Path) -> subprocess.Popen:
        options = {
            "train.name": self.name, "train.wandb": False, "train.resume": "never", "train.log_interval": 1,
            "train.sample_tokens": 0, "train.eval_interval": 10**6, "train.save_interval": 10**6,
            **self.options,
        }  # fmt: skip
        argv = [word for key, value in options.items() for word in (f"--{key}", str(value).lower())]
        cache = str(folder / f"inductor-{self.name}")
        inductor = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        env = {**os.environ, **inductor, **self.env}
        with open(folder / f"{self.name}.log", "w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", __name__ if __name__ != "__main__" else __spec__.name, "--run", *argv],
                cwd=folder, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip


def in_turn(jobs: Sequence[Job], folder: Path) -> Iterator[dict[str, Any]]:
    """What each of `jobs` has recorded. RuntimeError, with the end of its log, for one that has failed."""
    processes = [job.start(folder) for job in jobs]
    try:
        for process in processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line.strip() != READY:
                pass
        for job, process in zip(jobs, processes, strict=True):
            lines = process.communicate("\n")[0].splitlines()
            found = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
            if process.returncode or not found:
                log = (folder / f"{job.name}.log").read_text()
                raise RuntimeError(f"{job.name} ended with {process.returncode}: {log[-1500:]}")
            yield json.loads(found[0])
    finally:
        for process in processes:
            process.kill()


def deterministic_jobs(attention: str, model: str, batch: int) -> list[Job]:
    """Not deterministic, deterministic, and the latter with other timings."""
    options = {
        "model.name": model, "model.attention": attention, "train.max_steps": STEPS,
        "train.global_batch_size": batch, "train.micro_batch_size": batch,
    }  # fmt: skip
    again = {**options, "train.deterministic": True}
    return [
        Job(f"{attention}-fast", options),
        Job(f"{attention}-one", again),
        Job(f"{attention}-two", again, SLOWEST),
    ]


def saving_job(model: str, batch: int) -> Job:
    options = {
        "model.name": model, "train.max_steps": 320, "train.global_batch_size": batch,
        "train.micro_batch_size": batch, "train.keep_checkpoints": 1,
    }  # fmt: skip
    return Job("saves", options)


def first_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    """At which step, and in what, two runs first differ; None where they have the same bits."""
    for step, (a, b) in enumerate(zip(one["losses"], two["losses"], strict=True), 1):
        what = [] if a == b else [f"loss {a!r} and {b!r}"]
        if step <= len(one["gradients"]):
            pairs = zip(one["names"], one["gradients"][step - 1], two["gradients"][step - 1], strict=True)
            if differ := [name for name, x, y in pairs if x != y]:
                what.append(f"{len(differ)} of {len(one['names'])} gradients, from {differ[-1]} on")
        if what:
            return f"step {step}: {'; '.join(what)}"
    differ = [name for name, x, y in zip(one["names"], one["weights"], two["weights"], strict=True) if x != y]
    return f"the weights at the end: {', '.join(differ)}" if differ else None


def deterministic_row(fast: Mapping, one: Mapping, two: Mapping) -> dict[str, Any]:
    ms = [1e3 * statistics.median(run["seconds"][COMPARED:]) for run in (fast, one)]
    return {
        "difference": first_difference(one, two),
        "difference_if_not_deterministic": first_difference(fast, one),
        "steps": STEPS,
        "ms": ms[1],
        "ms_if_not_deterministic": ms[0],
        "cost": ms[1] / ms[0] - 1,
    }


def saving_row(run: Mapping[str, Any]) -> dict[str, Any]:
    idle, busy = ([s for s, saves in run["steps"][5:] if saves == both] for both in (0, 2))
    return {
        "ms": 1e3 * statistics.median(idle),
        "idle_steps": len(idle),
        "saving_steps": len(busy),
        "median_slower": statistics.median(busy) / statistics.median(idle) - 1,
        "mean_slower": statistics.mean(busy) / statistics.mean(idle) - 1,
        **{key: run[key] for key in ("stalls", "copies", "bytes", "pinned", "reserving")},
    }


# -- in the process of a run --------------------------------------------------------------------------------


def bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each fp32 tensor: the sum of its bits, which no order of summing changes."""
    return torch.stack([x.detach().view(torch.int32).sum() for x in tensors]).tolist()


def saving() -> bool:
    return any(thread.name == "checkpoint" for thread in threading.enumerate())


def run(argv: list[str]) -> int:
    """`lingpt train *argv` on the demo's recipe, watched; waits for a line on stdin before its first step."""
    from lingpt.cli.main import main
    from lingpt.train import loop
    from lingpt.train.runs import checkpoint_writer

    train, step, save, host = loop.Run.train, loop.Run.step, loop.Run.save, checkpoint_writer.HostBuffers
    saves = "saves" in argv
    found: dict[str, Any] = {"losses": [], "seconds": [], "gradients": [], "steps": [], "stalls": []}

    def timed(function, into: list[float]):
        def call(*args):
            began = time.perf_counter()
            result = function(*args)
            into.append(time.perf_counter() - began)
            return result

        return call

    def watched_step(self, stop):
        before = saving()
        line = timed(step, found["seconds"])(self, stop)
        found["steps"].append((found["seconds"][-1], before + saving()))
        found["losses"].append(line["loss"])
        if self.progress.step <= COMPARED and not saves:
            found["gradients"].append(bits([p.grad for p in self.gpt.parameters()]))
        return line

    def watched_train(self, stop):
        print(READY, flush=True)
        if not sys.stdin.readline():  # nobody waits any more
            sys.exit(1)
        done = train(self, stop)
        found["names"] = [name for name, _ in self.gpt.named_parameters()]
        found["weights"] = bits(list(self.gpt.parameters()))
        like = checkpoint_writer.state_like(self.gpt.state_dict(), self.optimizer)
        found["bytes"] = sum(tensor.nbytes for tensor in like)
        found["pinned"] = checkpoint_writer.pinned_bytes(like)
        return done

    def checkpoint_due(self):
        """Where no checkpoint is being written, and enough steps were timed without one."""
        quiet = [saves == 0 for _, saves in found["steps"][-IDLE:]]
        return saves and len(found["stalls"]) < SAVES and len(quiet) == IDLE and all(quiet)

    def watched_save(self):
        if self.progress.step < self.recipe.total_steps:  # the last one takes time that shows nothing
            timed(save, found["stalls"])(self)

    found["copies"], found["reserving"] = [], []
    if not saves:
        checkpoint_writer.CheckpointWriter.reserve = lambda *_: None
    host.copy_to_host, host.reserve = (
        timed(host.copy_to_host, found["copies"]),
        timed(host.reserve, found["reserving"]),
    )
    loop.Run.train, loop.Run.step, loop.Run.save = watched_train, watched_step, watched_save
    loop.Run.checkpoint_due = checkpoint_due
    code = main(["train", "--config", "demo", *argv])
    print(RESULT + json.dumps(found), flush=True)
    return code


# -- the record ---------------------------------------------------------------------------------------------


def table(record: Mapping[str, Any]) -> str:
    """Markdown: what was measured, and what came of it."""
    lines = ["| | model | promise | measured |", "|---|---|---|---|"]
    for attention, row in record["deterministic"].items():
        all_of = f"{row['steps']} losses, the gradients of the first {COMPARED} steps, the weights at the end"
        same = row["difference"] or f"equal: {all_of}"
        what = f"`--train.deterministic true`, {attention} | {record['model']} | two processes, the same bits"
        lines.append(f"| {what} | {same}; a step takes {row['ms']:.1f} ms, {row['cost']:+.0%} |")
    if row := record.get("saves"):
        stalls = ", ".join(f"{1e3 * s:.0f} ms" for s in row["stalls"])
        lines.append(
            f"| a checkpoint in the background | {record['saving_model']} | steps at most 5 % longer "
            f"meanwhile | {row['median_slower']:+.1%} in the median, {row['mean_slower']:+.1%} in the mean, "
            f"of {row['saving_steps']} steps of {row['ms']:.0f} ms; training stops for {stalls}, to copy "
            f"{row['bytes'] / 1e9:.1f} GB to {row['pinned'] / 1e9:.1f} GB of pinned memory |"
        )
    return "\n".join(lines)


def measure(model: str, saving_model: str, batch: int, folder: Path) -> dict[str, Any]:
    attentions = ("ours", "softmax")
    jobs = [job for attention in attentions for job in deterministic_jobs(attention, model, batch)]
    *runs, saved = in_turn([*jobs, saving_job(saving_model, batch)], folder)
    rows = {name: deterministic_row(*runs[3 * i : 3 * i + 3]) for i, name in enumerate(attentions)}
    return {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": model,
        "saving_model": saving_model,
        "batch": batch,
        "deterministic": rows,
        "saves": saving_row(saved),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(run(sys.argv[2:]))
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--table", action="store_true", help="only show the record")
    parser.add_argument("--model", default="pythia-160m")
    parser.add_argument("--saving-model", default="pythia-410m")
    parser.add_argument("--batch", type=int, default=64, help="sequences of 256 tokens")
    args = parser.parse_args()
    if not args.table:
        with tempfile.TemporaryDirectory() as folder:
            write_json(args.record, measure(args.model, args.saving_model, args.batch, Path(folder)))
    print(table(json.loads(args.record.read_text())))
