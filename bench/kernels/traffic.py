"""Measures the bytes moved to and from DRAM with the GPU's counters, by NVIDIA's profiler `ncu`."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

import torch

from lingpt.bench.kernels.call import BenchCall
from lingpt.bench.kernels.implementations import IMPLEMENTATIONS
from lingpt.bench.kernels.results import DIRECTIONS
from lingpt.bench.kernels.shapes import REFERENCE
from lingpt.common.errors import UserError

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def count_bytes(names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Implementation → "forward" or "backward" → bytes at REFERENCE, for those of `names` that run here.

    UserError if `ncu` is missing or counts nothing.
    """
    from tqdm import tqdm

    if shutil.which("ncu") is None:
        raise UserError(
            "counting bytes needs NVIDIA's profiler `ncu` on the PATH; without --ncu they are estimated"
        )
    counted: dict[str, dict[str, float]] = {}
    for name in tqdm(list(names), desc="count", unit="implementation", disable=None):
        runs = IMPLEMENTATIONS[name]
        if not (runs.unsupported_reason(REFERENCE) or runs.backward_unsupported_reason(REFERENCE)):
            counted[name] = {direction: _profile(name, direction) for direction in DIRECTIONS}
    return counted


def _profile(name: str, direction: str) -> float:
    call = f"run_once({name!r}, {direction!r})"
    script = f"from lingpt.bench.kernels.traffic import run_once; {call}"
    # Caches are not flushed between kernels: data that one leaves in L2 for the next is not DRAM traffic.
    options = ["--csv", "--print-units", "base", "--cache-control", "none", "--profile-from-start", "off"]
    command = ["ncu", *options, "--metrics", ",".join(METRICS), sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
    total = parse_counts(ran.stdout)
    if ran.returncode or not total:
        last = (ran.stdout + ran.stderr).strip().splitlines()[-1:]
        raise UserError(f"ncu counted nothing for {name} {direction}: {' '.join(last)}")
    return total


def parse_counts(output: str) -> float:
    """The sum over kernels of the metrics in the output of `ncu --csv`, whose table starts at its header."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(lines[start:])
    return sum(
        float(row["Metric Value"].replace(",", "")) for row in rows if row.get("Metric Name") in METRICS
    )


def run_once(name: str, direction: str) -> None:
    """Runs in the profiled process: all once, to compile and tune, then one direction with counters on."""
    call = BenchCall(IMPLEMENTATIONS[name], REFERENCE, torch.bfloat16, torch.device("cuda"))
    call.both()
    call.forward()
    torch.empty(256 << 20, dtype=torch.int8, device="cuda").zero_()  # flushes the inputs from L2
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call.forward() if direction == "forward" else call.backward()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
