"""Evaluation: lm-eval's benchmarks on our checkpoints, and the paper's Table 2 next to them."""

from typing import Any

from lingpt.eval.harness import evaluate
from lingpt.eval.results import results_path
from lingpt.eval.runs import Checkpoint, find_checkpoints
from lingpt.eval.table2 import score_table, table2

__all__ = [
    "Checkpoint",
    "LinGPTLM",
    "evaluate",
    "find_checkpoints",
    "results_path",
    "score_table",
    "table2",
]


def __getattr__(name: str) -> Any:
    """`LinGPTLM` is imported when asked for: lm-eval takes seconds to import."""
    if name == "LinGPTLM":
        from lingpt.eval.lm import LinGPTLM

        return LinGPTLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
