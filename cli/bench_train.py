"""`lingpt bench train`: times a training step of each attention; writes JSON, a table and a plot."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lingpt.cli.bench import BUDGET, OUT, RowOptions, measure_or_redraw
from lingpt.common.options import Option


@dataclass(kw_only=True)
class Options(RowOptions):
    """Time a whole training step of each attention, beside an identity in its place."""

    # fmt: off
    models: Annotated[tuple[str, ...], Option(
        "models (default: pythia-70m to -1.4b at N = 8192, and -160m and -1.4b at all lengths)")] = ()
    seq_lens: Annotated[tuple[int, ...], Option(
        "sequence lengths, for all models (default: 2048 to 131072)", least=1, most=10**9)] = ()
    attentions: Annotated[tuple[str, ...], Option(
        "attentions to time, and forms such as `hybrid+value_residual` (default: the usual ones; an unknown "
        "name lists all)")] = ()
    tokens_per_step: Annotated[int, Option(
        "tokens per optimiser step, at every length", least=1, most=10**9)] = 131072
    micro_batch_tokens: Annotated[int | None, Option(
        "most tokens of a micro-batch (default: what the memory estimate allows)",
        least=1, most=10**9)] = None
    rounds: Annotated[int, Option("how often each attention is timed at a shape", least=1, most=10**6)] = 2
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Option("kind of device")] = "cuda"
    budget: Annotated[float, BUDGET] = 1500.0
    out: Annotated[str, OUT] = "runs/bench/training"
    # fmt: on


def run(options: Options) -> None:
    from lingpt.bench.step_results import Results
    from lingpt.bench.steps import bench_steps

    measure_or_redraw(options, Results, bench_steps)
