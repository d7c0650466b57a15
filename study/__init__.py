"""A study: several attentions with several seeds each, trained and scored alike, with a page of results.

    from lingpt.study import find_study, read_study, run_study
    study = read_study(find_study("demo"), {"seeds": 1})
    folder = run_study(study)            # runs/study-demo, with README.md

`run_study` is imported on first use, so that `lingpt study --help` needs no PyTorch.
"""

from typing import TYPE_CHECKING, Any

from lingpt.study.config import STAGES, Study, find_study, read_study, studies, with_baseline, with_rows

if TYPE_CHECKING:
    from lingpt.study.stages import run_study

__all__ = [
    "STAGES",
    "Study",
    "find_study",
    "read_study",
    "run_study",
    "studies",
    "with_baseline",
    "with_rows",
]


def __getattr__(name: str) -> Any:
    if name == "run_study":
        from lingpt.study.stages import run_study

        return run_study
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
