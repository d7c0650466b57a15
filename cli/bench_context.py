"""`lingpt bench context`: times steps whose sequences are divided over all devices of a host."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from lingpt.cli.bench import BUDGET, OUT
from lingpt.common.options import Option


@dataclass(kw_only=True)
class Options:
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
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Option("kind of device")] = "auto"
    steps: Annotated[int, Option("steps of a row; the first is not timed", least=2, most=1000)] = 3
    options: Annotated[str, Option("more options of `lingpt train`, for every row", blank=True)] = (
        "--train.activation_checkpointing true")
    budget: Annotated[float, BUDGET] = 600.0
    out: Annotated[str, OUT] = "runs/bench/context"
    # fmt: on


def run(options: Options) -> None:
    from lingpt.bench.context import bench_context, table

    out = Path(options.out)
    names = ("model", "attentions", "seq_lens", "base_len", "check_len", "devices", "accelerator", "steps")
    values = {name: vars(options)[name] for name in (*names, "budget")}
    rows = bench_context(**values, options=options.options.split(), out=out)
    (out / "context.md").write_text(table(rows))
    print(f"\n{table(rows)}\n{out / 'context.json'}")
