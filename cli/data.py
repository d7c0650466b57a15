"""`lingpt data`: prepares a recipe's data and describes it."""

import time
from dataclasses import replace
from functools import partial

from lingpt.data import Dataset, prepare
from lingpt.train import Recipe
from lingpt.train.model import config_of
from lingpt.train.recipe import parse_recipe

HELP = "Prepare a corpus: tokenise it into the cache, and show what is in it."
parse = partial(parse_recipe, verb="data", about=HELP, shown="data.")
SAMPLE_TOKENS, SAMPLE_LINES, SAMPLE_WIDTH = 200, 6, 100


def run(recipe: Recipe) -> None:
    """Prepares `--data.*` of the recipe, checked against its model's vocabulary, and prints a report."""
    start = time.perf_counter()
    config = replace(recipe.data, stream=False)
    dataset = prepare(config, padded_vocab_size=config_of(recipe).padded_vocab_size)
    print(report(dataset, time.perf_counter() - start))


def report(dataset: Dataset, seconds: float) -> str:
    """A summary of the prepared data for the terminal."""
    about = dataset.describe()
    empty = sum(about.get("empty_documents", {}).values())
    rows = [
        ("source", about["source"]),
        ("tokenizer", f"{about['tokenizer']}, {about['vocab_size']:,} tokens"),
        *((name, _counts(about[name])) for name in ("train", "val")),
        *((("left out", f"{empty:,} empty documents"),) if empty else ()),
        *(("not read", part.corpus.left_out) for part in dataset.parts if part.corpus.left_out),
        ("split", about["split"]),
        ("blocks", f"of {about['seq_len']:,} tokens and the next one"),
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


def _counts(split: dict[str, int]) -> str:
    return "{documents:,} documents, {tokens:,} tokens, {bytes:,} bytes, {blocks:,} blocks".format(**split)
