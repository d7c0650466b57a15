"""Needle in a haystack: a number that stands once in a long text is asked for at its end.

The text is generated, as RULER's `niah_single_1` (arXiv 2404.06654): sentences without content around one
that says the number. The needles' depths are spread evenly over the text.
"""

import random

from lingpt.eval.lm import LinGPTLM, Pair
from lingpt.eval.scores import Score, measure_key, pack_bits, share
from lingpt.eval.texts import prompts_hash

LENGTHS = tuple(1024 << i for i in range(6))  # up to 32,768 tokens
NEEDLES = 50  # of each length
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {word} is: {number}."
QUESTION = (
    "What is the special magic number for {word} mentioned in the provided text? "
    "The special magic number for {word} mentioned in the provided text is"
)
WORDS = ("river", "garden", "window", "castle", "winter", "letter", "forest", "bridge", "market", "island")


def needle_lengths(longest: int) -> dict[str, int]:
    """The key of each score → the tokens of its texts, which are at most `longest`."""
    return {measure_key("needle", f"{tokens:,} tokens"): tokens for tokens in LENGTHS if tokens <= longest}


def find_needles(lm: LinGPTLM, needles: int = NEEDLES) -> Score:
    """How often greedy decoding gives the number, in texts that fill the model's context."""
    pairs = [make_needle(lm, i / max(1, needles - 1), seed=i) for i in range(needles)]
    found = [greedy for _, greedy in lm.score(pairs)]
    return Score(
        task="needle",
        documents=needles,
        complete=True,
        metrics=share("exact", found),
        correct={"exact": pack_bits(found)},
        prompts=prompts_hash(pairs),
    )


def make_needle(lm: LinGPTLM, depth: float, seed: int) -> Pair:
    """A text of at most `lm.max_length` tokens, its answer included, and the answer. depth: 0 to 1."""
    rng = random.Random(seed)
    about = {"word": rng.choice(WORDS), "number": str(rng.randrange(10**6, 10**7))}
    needle, question = NEEDLE.format(**about), QUESTION.format(**about)
    cost = [len(lm.tok_encode(f"{part}\n")) for part in (NOISE, needle, f"{question} {about['number']}")]
    lines = max(1, (lm.max_length - sum(cost[1:])) // cost[0])
    before = round(depth * lines)
    text = "\n".join([*[NOISE] * before, needle, *[NOISE] * (lines - before), question])
    ((context, answer),) = lm.encode_pairs([(text, f" {about['number']}")])
    return context, answer
