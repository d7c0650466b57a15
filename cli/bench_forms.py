"""`lingpt bench forms`: quadratic, recurrent, all states, by chunks: which is fastest at which length?"""

from dataclasses import dataclass
from typing import Annotated, Any

from lingpt.cli.bench import BUDGET, OUT, RowOptions, measure_or_redraw
from lingpt.common.options import Option


@dataclass(kw_only=True)
class Options(RowOptions):
    """Time the forms of linear attention in plain PyTorch over the length of a sequence, and the chunked one
    with several chunks, beside the CUDA kernel and FlashAttention."""

    # fmt: off
    device: Annotated[str, Option("cuda, cuda:1 … or cpu (tiny shapes)")] = "cuda"
    max_round_seconds: Annotated[float, Option(
        "time limit in seconds for one form at one length", above=0)] = 6.0
    budget: Annotated[float, BUDGET] = 300.0
    out: Annotated[str, OUT] = "runs/bench/forms"
    # fmt: on


def run(options: Options) -> None:
    import torch

    from lingpt.bench.kernels.implementations import FORMS
    from lingpt.bench.kernels.results import FormResults, Results
    from lingpt.bench.kernels.runner import run_bench
    from lingpt.bench.kernels.shapes import FORM_SHAPES, TINY_FORM_SHAPES

    def bench(device: str, max_round_seconds: float, **given: Any) -> Results:
        cpu = device == "cpu"
        return run_bench(
            implementations=FORMS,
            device=device,
            limit=max_round_seconds,
            dtype=torch.float32 if cpu else torch.bfloat16,
            sweeps={"forms": TINY_FORM_SHAPES if cpu else FORM_SHAPES},
            **given,
        )

    measure_or_redraw(options, FormResults, bench)
