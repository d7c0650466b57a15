"""Recall on real text: the model must recall a phrase of a long text at its end.

The text is followed by the words that preceded one of its phrases; the model chooses between that phrase and
three others of the same text. A phrase is two or three capitalised words in a row (usually a name), or a long
word, and occurs once. The same question without the text is the baseline: what the words alone tell.
"""

import random
import re
from dataclasses import dataclass
from typing import NamedTuple

from lingpt.eval.lm import LinGPTLM, Pair
from lingpt.eval.scores import Score, pack_bits, share
from lingpt.eval.texts import Texts, Unsuitable, prompts_hash, spans

QUESTIONS, OF_A_DOCUMENT = 256, 8
CHOICES, CUE_WORDS = 4, 8
ROOM = 64  # tokens for the question after the text
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+(?: [A-Z][a-z]+){1,2}\b")
WORD = re.compile(r"(?<=[a-z,;] )[a-z]{8,}\b")


@dataclass(frozen=True)
class Question:
    """`choices[0]` is the answer; `text` contains it once, after the words of `cue`."""

    text: str
    cue: str
    choices: tuple[str, ...]


def recall_phrases(lm: LinGPTLM, texts: Texts) -> Score:
    """Accuracy with the text and without it, and how often greedy decoding gives the phrase itself.

    Answers are compared by log-likelihood per byte; the right one must have the highest. The text fills the
    model's context.
    """
    asked = make_questions(lm, texts)
    if len(asked) < 2:
        raise Unsuitable(
            f"no questions on phrases can be made of {texts.name}: it needs longer texts of words"
        )
    with_text = _ask(lm, asked, [f"{q.text}\n\n{q.cue}" for q in asked])
    alone = _ask(lm, asked, [q.cue for q in asked])
    right = [answer.right for answer in with_text]
    metrics = share("acc", right) | share("acc_alone", [answer.right for answer in alone])
    metrics |= share("exact", [answer.greedy for answer in with_text])
    return Score(
        task="recall_phrases",
        texts=texts.name,
        documents=len(asked),
        complete=True,
        metrics=metrics,
        correct={"acc": pack_bits(right)},
        prompts=prompts_hash((lm.tok_encode(q.text + q.cue), []) for q in asked),
        example={"cue": asked[0].cue, "choices": list(asked[0].choices)},
    )


class _Answer(NamedTuple):
    right: bool
    greedy: bool


def _ask(lm: LinGPTLM, asked: list[Question], contexts: list[str]) -> list[_Answer]:
    texts = [(c, f" {choice}") for c, q in zip(contexts, asked, strict=True) for choice in q.choices]
    pairs: list[Pair] = lm.encode_pairs(texts)
    scores = lm.score(pairs)
    answers = []
    for i, question in enumerate(asked):
        part = scores[CHOICES * i : CHOICES * (i + 1)]
        per_byte = [score / len(c.encode()) for (score, _), c in zip(part, question.choices, strict=True)]
        answers.append(_Answer(per_byte[0] > max(per_byte[1:]), part[0][1]))
    return answers


def make_questions(lm: LinGPTLM, texts: Texts) -> list[Question]:
    """One question per piece of text, spread over the documents; equal for models of one context length."""
    length = lm.max_length - min(ROOM, lm.max_length // 4)
    each = min(OF_A_DOCUMENT, QUESTIONS // len(texts.documents) + 2)  # a piece may have no question
    found: list[list[Question]] = []
    for number, document in enumerate(texts.documents):
        pieces = [
            text for ids, text in spans(document, lm.text_tokenizer, length, each) if 2 * len(ids) >= length
        ]
        found.append([q for i, text in enumerate(pieces) if (q := ask_about(text, seed=1000 * number + i))])
    turns = [q for turn in range(each) for of in found for q in of[turn : turn + 1]]
    return turns[:QUESTIONS]


def ask_about(text: str, seed: int) -> Question | None:
    """A question on a phrase of the first half of `text`; None if there is none."""
    rng = random.Random(seed)
    for pattern in (NAME, WORD):
        matches = {m.group(): m for m in pattern.finditer(text) if text.count(m.group()) == 1}
        early = [m for m in matches.values() if m.start() < len(text) // 2 and _cue(text, m)]
        rng.shuffle(early)
        for match in early:
            phrase = match.group()
            others = [p for p in sorted(matches) if p.count(" ") == phrase.count(" ") and p != phrase]
            if len(others) >= CHOICES - 1:
                return Question(text, _cue(text, match), (phrase, *rng.sample(others, CHOICES - 1)))
    return None


def _cue(text: str, match: re.Match[str]) -> str:
    """The eight words before a phrase on its line; empty if there are fewer or the text repeats them."""
    line = text[: match.start()].rpartition("\n")[2]
    words = line.split()
    cue = line.rstrip()[-len(" ".join(words[-CUE_WORDS:])) :]
    return cue if len(words) >= CUE_WORDS and text.count(cue) == 1 else ""
