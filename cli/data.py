"""`lingpt data`: prepares a recipe's data and describes it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, cast

from lingpt.common.options import Option
from lingpt.data import Dataset, Tokenizer, prepare
from lingpt.data.dataset import Part
from lingpt.data.packing import PackedDocuments
from lingpt.data.statistics import measure
from lingpt.plots.lengths_figure import draw_lengths
from lingpt.train import Recipe
from lingpt.train.model import config_of
from lingpt.train.recipe import parse_recipe

PICTURE = "lengths.png"
COUNTED = ("documents", "tokens", "bytes", "blocks")
SAMPLE_TOKENS, SAMPLE_LINES, SAMPLE_WIDTH = 200, 6, 100


@dataclass
class Options(Recipe):
    """Prepare a corpus: tokenise it into the cache, and show what is in it."""

    # fmt: off
    stats: Annotated[bool, Option(
        f"also read the text for its duplicates, and draw the lengths of its documents in {PICTURE}")] = False
    out: Annotated[str, Option(f"folder of {PICTURE}")] = "runs"
    # fmt: on


def parse(words: Sequence[str]) -> Options:
    about, shown = Options.__doc__ or "", ("data.", "stats", "out")
    return cast(Options, parse_recipe(words, "data", about, shown, Options))


def run(options: Options) -> None:
    """Prepares `--data.*` of the recipe, checked against its model's vocabulary, and prints a report."""
    start = time.perf_counter()
    config = replace(options.data, stream=False)
    dataset = prepare(config, padded_vocab_size=config_of(options).padded_vocab_size)
    print(report(dataset, time.perf_counter() - start))
    for number, part in enumerate(dataset.parts if options.stats else (), start=1):
        name = PICTURE if len(dataset.parts) == 1 else f"lengths-{number}.png"
        print("\n" + statistics(part, dataset.tokenizer, Path(options.out) / name))


def statistics(part: Part, tokenizer: Tokenizer, out: Path) -> str:
    """The statistics of a source's training text for the terminal; draws its lengths into `out`."""
    found, name = measure(part, tokenizer.end_id), part.corpus.name
    rows = found.rows()
    draw_lengths(*found.histogram(), name, "; ".join(f"{key}: {value}" for key, value in rows), out)
    lines = [f"{key:<12} {value}" for key, value in (("training on", name), *rows)]
    if found.rejects:
        lines += ["", "some rejects (empty documents are left out, copies by --data.dedup):"]
        lines += [f"  document {reject}" for reject in found.rejects]
    return "\n".join([*lines, "", "tokens a document:", *found.bars(), "", f"picture {out}"])


def _counts(split: Mapping[str, int]) -> str:
    """`1 document, 298 tokens, 1,284 bytes, 1 block`."""
    return ", ".join(f"{split[what]:,} {what[:-1] if split[what] == 1 else what}" for what in COUNTED)


def report(dataset: Dataset, seconds: float) -> str:
    """A summary of the prepared data for the terminal."""
    about = dataset.describe()
    empty, dropped = sum(about.get("empty_documents", {}).values()), about.get("dropped_duplicates")
    packed = [part.train for part in dataset.parts if isinstance(part.train, PackedDocuments)]
    full = f", {', '.join(f'{blocks.filled:.1%}' for blocks in packed)} full" if packed else ""
    rows = [
        ("source", about["source"]),
        ("tokenizer", f"{about['tokenizer']}, {about['vocab_size']:,} tokens"),
        *((name, _counts(about[name])) for name in ("train", "val")),
        *([("left out", f"{empty:,} empty documents")] if empty else []),
        *([("dropped", f"{dropped:,} copies")] if dropped is not None else []),
        *(("not read", part.corpus.left_out) for part in dataset.parts if part.corpus.left_out),
        ("split", about["split"]),
        ("blocks", f"of {about['seq_len']:,} tokens and the next one{full}"),
        ("bytes/token", f"{dataset.bytes_per_token:.2f} (validation)"),
        ("fingerprint", about["fingerprint"]),
        ("cache", about["cache"]),
        ("took", f"{seconds:.1f} s"),
    ]
    sample = dataset.tokenizer.decode(dataset.train[0][:SAMPLE_TOKENS])
    lines = [line[:SAMPLE_WIDTH] for line in sample.splitlines() if line.strip()][:SAMPLE_LINES]
    return "\n".join(
        [*(f"{name:<12} {value}" for name, value in rows), "", "it begins:", *(f"  {x}" for x in lines)]
    )
