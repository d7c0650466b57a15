"""Measures the bytes moved to and from DRAM with the GPU's counters, by NVIDIA's profiler `ncu`."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable

import torch

from lingpt.bench.kernels.call import BenchCall
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS
from lingpt.bench.kernels.runner import choose_implementations
from lingpt.bench.kernels.shapes import REFERENCE
from lingpt.common.errors import UserError, first_line

DEVICE = torch.device("cuda")
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
# What is counted apart begins with this kernel, torch.cuda._sleep's, and a line of output that names it.
MARKER, RANGE = "spin_kernel", "range: "


def count_bytes(names: Iterable[str], dtype: str) -> dict[str, dict[str, float]]:
    """Implementation → "forward" or "backward" → bytes at REFERENCE, for those of `names` (default: as
    `run_bench`) that run here.

    All in one process: to start and to tune takes longer than to count. UserError if a name is unknown, or
    `ncu` is missing or counts nothing.
    """
    names = [implementation.name for implementation in choose_implementations(names)]
    if shutil.which("ncu") is None:
        raise UserError(
            "counting bytes needs NVIDIA's profiler `ncu` on the PATH; without --ncu they are estimated"
        )
    script = f"from lingpt.bench.kernels.traffic import run_all; run_all({names!r}, {dtype!r})"
    # Caches are not flushed between kernels: data that one leaves in L2 for the next is not DRAM traffic.
    options = ["--csv", "--print-units", "base", "--cache-control", "none", "--profile-from-start", "off"]
    command = ["ncu", *options, "--metrics", ",".join(METRICS), sys.executable, "-c", script]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
    counted = parse_counts(ran.stdout)
    if not counted:
        raise UserError(f"ncu counted nothing: {' '.join(ran.stdout.strip().splitlines()[-1:])}")
    return counted


def parse_counts(output: str) -> dict[str, dict[str, float]]:
    """The metrics in the output of `ncu --csv`, whose table starts at its header, summed over the kernels of
    each range."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    sums: list[float] = []
    last = ""
    for row in csv.DictReader(lines[start:]):
        if MARKER in row["Kernel Name"]:
            sums += [0.0] if row["ID"] != last else []
            last = row["ID"]
        elif row["Metric Name"] in METRICS and sums:
            sums[-1] += float(row["Metric Value"].replace(",", ""))
    ranges = [line.removeprefix(RANGE).split() for line in lines[:start] if line.startswith(RANGE)]
    counted: dict[str, dict[str, float]] = {}
    for (name, direction), total in zip(ranges, sums, strict=False):
        if total:
            counted.setdefault(name, {})[direction] = total
    return counted


def run_all(names: Iterable[str], dtype: str) -> None:
    """Runs in the profiled process: each implementation once, to compile and tune, then each direction with
    counters on."""
    for name in names:
        try:
            _run_both_counted(name, getattr(torch, dtype))
        except Exception as error:  # the others are counted all the same
            print(f"not counted: {name}: {first_line(error)}", file=sys.stderr)
        torch.cuda.empty_cache()


def _run_both_counted(name: str, dtype: torch.dtype) -> None:
    if reason := IMPLEMENTATIONS[name].unsupported_reason(REFERENCE, dtype, DEVICE):
        raise UserError(reason)
    call = BenchCall(IMPLEMENTATIONS[name], REFERENCE, dtype, DEVICE)
    call.both()
    _run_counted(name, "forward", call.forward)
    if not call.backward_unsupported_reason:
        _run_counted(name, "backward", call.backward)


def _run_counted(name: str, direction: str, work: Callable[[], object]) -> None:
    torch.empty(256 << 20, dtype=torch.int8, device=DEVICE).zero_()  # flushes the inputs from L2
    torch.cuda.synchronize()
    print(f"{RANGE}{name} {direction}", flush=True)
    torch.cuda.cudart().cudaProfilerStart()
    try:
        torch.cuda._sleep(1)
        work()
        torch.cuda.synchronize()
    finally:  # otherwise what the next implementation compiles and tunes would count as this one's
        torch.cuda.cudart().cudaProfilerStop()
