"""`lingpt bench context`: times steps whose sequences are divided over all devices of a host."""

from dataclasses import dataclass
from typing import Annotated, Literal

from lingpt.cli.bench import BUDGET, OUT, RowOptions, measure_or_redraw
from lingpt.common.options import Option


@dataclass(kw_only=True)
class Options(RowOptions):
    """Time steps with context parallelism over all devices, beside one device and beside DDP."""

    # fmt: off
    model: Annotated[str, Option("model")] = "pythia-1.4b"
    attentions: Annotated[tuple[str, ...], Option("attentions")] = ("ours", "hybrid")
    seq_lens: Annotated[tuple[int, ...], Option(
        "lengths of the sequences that are divided", least=8)] = (262_144, 1_048_576)
    base_len: Annotated[int, Option("length on one device, and on each with DDP", least=8)] = 8192
    check_len: Annotated[int, Option(
        "length at which the first loss over all devices is compared with one's", least=8)] = 65_536
    devices: Annotated[int, Option("number of devices", least=2, most=1024)] = 8
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Option("kind of device")] = "cuda"
    steps: Annotated[int, Option(
        "steps of a row, of which the first is not timed and the third is traced", least=1, most=1000)] = 3
    options: Annotated[str, Option("more options of `lingpt train`, for every row", blank=True)] = (
        "--train.activation_checkpointing true")
    budget: Annotated[float, BUDGET] = 600.0
    out: Annotated[str, OUT] = "runs/bench/context"
    # fmt: on


def run(options: Options) -> None:
    from lingpt.bench.context import bench_context
    from lingpt.bench.context_results import Results

    measure_or_redraw(options, Results, bench_context)
