"""`lingpt bench decode`: measures time per token and size of the state; writes JSON, a table and a plot."""

from dataclasses import dataclass
from typing import Annotated

from lingpt.cli.bench import BUDGET, OUT, RowOptions, measure_or_redraw
from lingpt.common.options import Option


@dataclass(kw_only=True)
class Options(RowOptions):
    """Time a token of decoding, and weigh the state, of each attention over the context."""

    # fmt: off
    model: Annotated[str, Option("the model, with random weights")] = "pythia-1.4b"
    attentions: Annotated[tuple[str, ...], Option(
        "attentions, with options after a + (default: softmax, hybrid, ours-gated+output_gate+short_conv, "
        "ours, gla)")] = ()
    contexts: Annotated[tuple[int, ...], Option(
        "context lengths in tokens (default: 2048, 8192, 32768, 131072)", least=4, most=10**9)] = ()
    batch_sizes: Annotated[tuple[int, ...], Option(
        "batch sizes in sequences (default: 1 and 16)", least=1, most=10**6)] = ()
    dtype: Annotated[str | None, Option(
        "bfloat16, float16 or float32 (default: bfloat16 on a GPU that has it, else float32)")] = None
    device: Annotated[str, Option("auto, cpu, cuda, cuda:1")] = "auto"
    graph: Annotated[bool, Option(
        "on a GPU, time replays of a CUDA graph of a step, as `lingpt generate` does; false: eager "
        "steps")] = True
    transformers: Annotated[bool, Option(
        "time transformers' `generate` with the model of `lingpt export --hf` instead")] = False
    budget: Annotated[float, BUDGET] = 150.0
    out: Annotated[str, OUT] = "runs/bench/decoding"
    # fmt: on


def run(options: Options) -> None:
    from lingpt.bench.decoding import bench_decoding
    from lingpt.bench.decoding_results import DecodeResults

    measure_or_redraw(options, DecodeResults, bench_decoding)
