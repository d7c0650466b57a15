"""The targets of a training step next to the measurements of `lingpt bench train`, from its results alone."""

from collections.abc import Callable

from lingpt.bench.kernels.targets import Missing, Target
from lingpt.bench.step_results import FLASH, IDENTITY, OUTPUT_GATE, SHORT_CONV, Results, Row

LARGE, SMALL = "pythia-1.4b", "pythia-160m"
ESTIMATE = (0.9, 1.1)  # bounds of estimated memory / used memory


def _target(what: str, required: float, aim: float | None, number: Callable) -> Target:
    """A target: `number` of the results (None if they lack it) must be at least `required`."""

    def reached(results: Results) -> list[float]:
        if (value := number(results)) is None:
            raise Missing("no result")
        return [value]

    return Target(what, required, aim, reached, at_least=True, format="{:.3f}")


def _row(results: Results, *cell: str | int) -> Row | None:
    """The cell's row; Missing if a round failed, even if the row has times of earlier rounds."""
    row = results.row(*cell)
    if row is not None and row.status != "ok":
        raise Missing(row.line().replace("|", "/"))
    return row


def _faster(model: str, seq_len: int, than: str, attention: str = "ours") -> Callable:
    def reached(results: Results) -> float | None:
        row, other = (_row(results, model, seq_len, name) for name in (attention, than))
        return results.times_faster(row, than) if row and other else None

    return reached


def _mfu(model: str, seq_len: int) -> Callable:
    def reached(results: Results) -> float | None:
        row = _row(results, model, seq_len, "ours")
        return row.mfu if row else None

    return reached


def _long_against_short(results: Results) -> float | None:
    long, short = (_row(results, LARGE, n, "ours") for n in (65536, 2048))
    if not (long and short and long.tokens_per_second and short.tokens_per_second):
        return None
    return long.tokens_per_second / short.tokens_per_second


TARGETS = (
    _target(f"{LARGE}, N = 8192: ours, share", 0.95, 0.97, _faster(LARGE, 8192, IDENTITY)),
    _target("ours-gated, share", 0.95, 0.97, _faster(LARGE, 8192, IDENTITY, "ours-gated")),
    _target("ours-gated, tokens/s of those of ours", 0.97, 0.99, _faster(LARGE, 8192, "ours", "ours-gated")),
    _target("short_conv, of the tokens/s without", 0.96, None, _faster(LARGE, 8192, OUTPUT_GATE, SHORT_CONV)),
    _target("ours, MFU", 0.57, 0.60, _mfu(LARGE, 8192)),
    _target("ours, × FlashAttention-2", 1.55, 1.65, _faster(LARGE, 8192, FLASH)),
    _target("ours, × cuDNN", 1.33, 1.4, _faster(LARGE, 8192, "softmax-cudnn")),
    _target("ours, × GLA", 1.3, 1.37, _faster(LARGE, 8192, "gla")),
    _target(f"{LARGE}, N = 32768: ours, × FlashAttention-2", 3.2, 3.5, _faster(LARGE, 32768, FLASH)),
    _target(f"{LARGE}, N = 65536: ours, tokens/s of those at 2048", 0.95, 1.0, _long_against_short),
    _target(f"{SMALL}, N = 8192: ours, share", 0.85, 0.92, _faster(SMALL, 8192, IDENTITY)),
    _target("ours, MFU", 0.43, 0.48, _mfu(SMALL, 8192)),
)


def targets_table(results: Results) -> str:
    """A Markdown table of the targets, and the accuracy of the memory estimate over all timed rows."""
    ratios = [
        row.estimated_memory / row.peak_memory
        for row in results.rows
        if row.status == "ok" and row.estimated_memory and row.peak_memory
    ]
    low, high = ESTIMATE
    estimate = "not measured | –"
    if ratios:
        met = low <= min(ratios) and max(ratios) <= high
        estimate = f"{min(ratios):.2f} to {max(ratios):.2f} | {'met' if met else '**not met**'}"
    lines = [
        "| what | bar | aim | reached | |\n|---|---|---|---|---|",
        *(target.line(results) for target in TARGETS),
        f"| memory, estimate over use, all rows | {low:g} to {high:g} | | {estimate} |",
    ]
    return "\n".join(lines) + "\n"
