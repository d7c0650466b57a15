"""Guards the suites beside Table 2: each number against its definition, each with chance or a baseline."""

import gzip
import itertools
import json
import lzma
import math
import weakref
from dataclasses import replace

import pytest
import tokenizers
import torch
from tokenizers import processors

import lingpt.models
from lingpt.common.errors import UserError, check_known
from lingpt.common.files import file_sha256
from lingpt.data import Tokenizer
from lingpt.data.embedded import embedded_corpus
from lingpt.eval import scoring
from lingpt.eval.comparison import mean_scores, ratio
from lingpt.eval.figures import caption, draw_positions
from lingpt.eval.harness import task_measurements
from lingpt.eval.language import _edges, bits_per_byte, loss_by_position, loss_within_documents
from lingpt.eval.lm import LinGPTLM
from lingpt.eval.recall.needle import find_needles, make_needle
from lingpt.eval.recall.phrases import ask_about, make_questions, recall_phrases
from lingpt.eval.runs import find_checkpoints
from lingpt.eval.scores import Positions, unpack_bits
from lingpt.eval.scoring import Scorer
from lingpt.eval.suite_tables import save_suites, score_table, suite_tables
from lingpt.eval.suites import SUITES, benchmark_tasks, check_scoring, text_measurements
from lingpt.eval.texts import Texts, parse_texts, read_texts, spans
from lingpt.models import GPT, Config

from .conftest import BLOCK_SIZE, WORDS, result, score, sentence, tiny_model, write_run

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Six documents, of which five are longer than four training lengths; names among the words."""
    import random

    rng, rows = random.Random(5), []
    for i in range(6):
        names = [f"{a} {b}" for a in ("Anna", "Berta", "Clara", "Dora") for b in ("Kuhn", "Lang")]
        rng.shuffle(names)
        words = [f"{sentence(rng, 9)} and {name} {sentence(rng, 9)}" for name in names]
        rows.append({"text": "\n".join(words if i else words[:1])})
    path = tmp_path_factory.mktemp("texts") / "held-out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"stories": str(path)}


@pytest.fixture(scope="module")
def lm(tokenizer):
    return LinGPTLM(tiny_model("ours"), tokenizer, batch_tokens=512)


def test_bits_per_byte_is_the_loss_over_the_bytes(lm, texts, tokenizer):
    """Against the model's logits, window by window; `xz` against Python's; the error against a jackknife."""
    found = bits_per_byte(lm, read_texts("stories", texts["stories"]), tokens=10**6)
    nats, size, parts = [], [], read_texts("stories", texts["stories"]).documents
    for text in parts:
        ids, total = [tokenizer.eos_id, *tokenizer.encode(text)], 0.0
        for start in range(0, len(ids) - 1, BLOCK_SIZE):
            end = min(start + BLOCK_SIZE, len(ids) - 1)  # the last window is as long as the others
            with torch.no_grad():
                logits = lm.model(torch.tensor([ids[max(0, end - BLOCK_SIZE) : end]]))[0, start - end :]
            target = torch.tensor(ids[start + 1 : end + 1])
            total += torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
        nats.append(total)
        size.append(len(text.encode()))
    metrics = found.metrics
    assert metrics["bits_per_byte"] == pytest.approx(sum(nats) / sum(size) / math.log(2), rel=1e-5)
    tokens = sum(len(tokenizer.encode(text)) for text in parts)
    assert metrics["loss"] == pytest.approx(sum(nats) / tokens, rel=1e-5)
    assert found.documents == 6 and list(found.per_document.bytes) == size
    packed = lzma.compress("\n".join(parts).encode(), preset=9)
    assert metrics["xz_bits_per_byte"] == 8 * len(packed) / sum(size)
    left_out = [(sum(nats) - n) / (sum(size) - s) for n, s in zip(nats, size, strict=True)]
    jackknife = math.sqrt(5 / 6 * sum((x - sum(left_out) / 6) ** 2 for x in left_out))
    assert ratio(nats, size)[1] == pytest.approx(jackknife, rel=0.2)
    assert metrics["bits_per_byte_stderr"] == pytest.approx(ratio(nats, size)[1] / math.log(2), rel=1e-3)


def test_the_loss_by_position_goes_past_the_training_length(texts, tokenizer):
    """Groups that double; each is the mean of the model's own losses at these positions."""
    config = Config.from_dict(tiny_model("ours").config.to_dict() | {"block_size": 128})
    model = GPT(config)
    model.load_state_dict(tiny_model("ours").state_dict())
    lm = LinGPTLM(model, tokenizer)
    data = read_texts("stories", texts["stories"])
    found = loss_by_position(lm, data, train_length=32, pieces=3)
    groups, kept = found.positions, found.per_document.losses
    assert [pytest.approx(group.loss, abs=1e-4) for group in groups] == [sum(x) / 3 for x in kept]
    assert [group.to for group in groups] == [2, 4, 8, 16, 32, 64, 128]
    pieces = [tokenizer.encode(text)[:128] for text in data.documents[1:4]]
    ids = torch.tensor([[tokenizer.eos_id, *piece] for piece in pieces])
    with torch.no_grad():
        logits = model(ids[:, :-1])
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    each = losses[:, 64:].mean(1)
    assert groups[-1].loss == pytest.approx(each.mean().item(), rel=1e-5)
    assert groups[-1].stderr == pytest.approx(each.std(correction=1).item() / 3**0.5, rel=1e-3)
    assert found.metrics["loss_at_training_length"] == pytest.approx(losses[:, 16:32].mean().item(), rel=1e-5)
    counts = torch.bincount(ids[:, 1:].flatten()).double()
    assert found.unigram == pytest.approx(torch.distributions.Categorical(counts).entropy().item())
    with pytest.raises(UserError, match="needs longer texts"):
        loss_by_position(lm, Texts("short", ("the sun",), {}), train_length=32)


@pytest.mark.parametrize("attention", ["softmax", "ours-gated"])
def test_the_loss_within_documents_is_that_of_each_alone(attention, tokenizer):
    """Documents of many lengths, in padded batches: as one by one, without end-of-text before them; longer
    ones are cut, one without a target is left out, equal ones count twice."""
    model = tiny_model(attention)
    lm = LinGPTLM([model, model], tokenizer, batch_tokens=100)
    texts = [" ".join(WORDS[(i + 1) * n % 12] for i in range(n)) for n in (3, 1, 200, 3, 17, 40, 30)]
    found = loss_within_documents(lm, Texts("some", ("s", "", *texts), {}), train_length=24)
    losses = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)[:25]])
        with torch.no_grad():
            logits = model(ids[:, :-1])
        losses.append(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none"))
    kept = [loss for loss in losses if len(loss)]
    ends = [1, 3, 6, 12, 24]
    assert found.documents == len(kept) and [group.to for group in found.positions] == ends
    for start, group in zip([0, *ends], found.positions, strict=False):
        parts = [x[start : group.to] for x in kept if len(x) > start]
        assert group.loss == pytest.approx(torch.cat(parts).mean().item(), rel=1e-5)
        error = ratio([x.sum().item() for x in parts], [len(x) for x in parts])[1]
        assert group.stderr == pytest.approx(error, rel=1e-4)
    assert found.metrics["loss"] == pytest.approx(torch.cat(kept).mean().item(), rel=1e-5)
    few = loss_within_documents(lm, Texts("some", tuple(texts), {}), train_length=24, tokens=len(kept[0]))
    assert few.documents == 1 and few.positions[0].stderr is None
    with pytest.raises(UserError, match="needs longer ones"):
        loss_within_documents(lm, Texts("short", ("s", ""), {}), train_length=24)


@pytest.mark.parametrize(
    ("lengths", "last"),
    [
        ([64] * 20 + [900], 64),  # one article alone reaches further
        ([64] * 20 + [300] * 8 + [900], 256),  # eight reach 256, more than that 64
        ([32] * 50 + [70] * 3 + [130] * 2, 64),  # fewer than eight reach past 32: as far as all five do
        ([40] * 9 + [64], 32),  # past the training length, one document: not at all
        ([40], 32),
    ],
)
def test_the_last_position_is_one_that_several_documents_reach(lengths, last):
    """Guards: a curve past the training length that rests on the longest article alone."""
    assert _edges(32, lengths)[-1] == last


@pytest.mark.parametrize("train_length", [1, 17, 1000, 4097])
def test_the_group_that_ends_at_the_training_length_is_half_of_it(train_length):
    """Guards: a loss at the training length of its last token alone, as 4,097 is no multiple of 16."""
    edges = _edges(train_length, [10**5] * 10)
    end = edges.index(train_length)
    assert edges[end - 1] == train_length // 2 and edges[:end] == sorted(set(edges[:end]))


def test_a_question_on_a_phrase():
    """The phrase stands once, in the first half; the cue before it, once; the others are of the same text."""
    lines = [f"the sun warms a stone cold water {i} runs under {name} and on" for i, name in enumerate(
        ("Anna Kuhn", "Berta Lang", "Clara Kuhn", "Dora Lang", "Emma Weber", "Frieda Wolf"))]  # fmt: skip
    text = "\n".join(["There was once Gerda Holz here", *lines])  # too few words before her
    for question in (ask_about(text, seed) for seed in range(9)):
        answer = question.choices[0]
        assert f"{question.cue} {answer} " in text and text.count(question.cue) == text.count(answer) == 1
        assert text.index(answer) < len(text) / 2 and len(question.cue.split()) == 8
        assert len(set(question.choices)) == 4 and all(text.count(choice) == 1 for choice in question.choices)
    assert ask_about(text, seed=8) == question
    assert len(set(ask_about("\n".join(lines[:4]), seed=0).choices)) == 4
    for few in ("\n".join(lines[:3]), "no names and no rare words here at all " * 9):
        assert ask_about(few, seed=0) is None


def test_recall_is_found_by_a_model_that_copies(lm, texts, monkeypatch):
    """A model that continues as the text did gets every question right, and none of them without the text."""
    data = read_texts("stories", texts["stories"])
    wide = LinGPTLM(lm.model, lm.text_tokenizer)
    wide.max_length = 320

    def copy(pairs):
        decode = wide.text_tokenizer.decode
        asked = [(decode(context), decode(answer)) for context, answer in pairs]
        known = [" ".join(c.split()[-8:]) + a in c for c, a in asked]
        return [(0.0 if found else -10.0, found) for found in known]

    monkeypatch.setattr(wide, "score", copy)
    questions = make_questions(wide, data)
    assert len(questions) >= 5
    found = recall_phrases(wide, data)
    assert (found.metrics["acc"], found.metrics["exact"]) == (1.0, 1.0)
    assert found.metrics["acc_alone"] < 1 and found.documents == len(questions)
    assert unpack_bits(found.correct["acc"], len(questions)).all()
    monkeypatch.setattr(wide, "score", lambda pairs: [(0.0, False)] * len(pairs))
    assert recall_phrases(wide, data).metrics["acc"] == 0  # ties know nothing


def test_what_a_run_gets(tmp_path, tokenizer, texts, capsys):
    """Both suites on a run's checkpoint, kept, not measured again, and in tables and a figure."""
    for attention in ("ours", "softmax"):
        write_run(tmp_path, f"demo-{attention}", attention, tokenizer)
    lines, found = [], find_checkpoints(tmp_path)

    def measure(checkpoint, *suites):
        scorer = Scorer(checkpoint, log=lines.append, device="cpu", devices=2)
        return scorer.score(text_measurements(scorer, suites, texts, max_length_factor=2))

    results = [measure(checkpoint, "language", "recall") for checkpoint in found]
    measures = ["bits_per_byte", "loss_by_position", "loss_within_documents"]
    assert list(results[0].scores) == [f"{name} (stories)" for name in measures]
    assert {one.devices for one in results[0].scores.values()} == {2}
    assert sum("not measured: no questions on phrases" in line for line in lines) == 2
    lines.clear()
    again = measure(found[0], "language")
    assert again == results[0] and all("computed before" in line for line in lines)
    tables = {table.title: table for table in suite_tables(results)}
    bits = tables["Bits per byte"]
    assert bits.head[4:] == ["bits per byte", "xz -9", "to softmax"]
    assert [row[::3][:2] for row in bits.rows] == [["ours", "6"], ["softmax", "6"]]
    assert "±" in bits.rows[0][-1] and bits.rows[1][-1] == "–"
    losses = tables["Loss by position"]
    assert losses.head[4] == "unigram" and losses.head[-2:] == [f"≤ {BLOCK_SIZE}", f"≤ {2 * BLOCK_SIZE}"]
    assert losses.rows[0][3] == "5" and " ± " in losses.rows[0][5]
    less = tables["Loss by position, minus softmax's"]
    assert [row[:4] for row in less.rows] == [losses.rows[0][:4]] and "±" in less.rows[0][-1]
    losses = [(r.checkpoint, r.scores["loss_by_position (stories)"]) for r in results]
    assert caption(losses) == "demo; dashed: the training length, 64 tokens; documents: 5 of stories; cpu."
    within = tables["Loss within documents"]
    assert within.head[4:6] == ["all", "≤ 1"] and within.head[-1] == f"≤ {BLOCK_SIZE}"
    assert [row[2:4] for row in within.rows] == [["stories", "6"]] * 2 and " ± " in within.rows[0][-1]
    paths = save_suites(results, tmp_path / "tables")
    figures = ["positions.png", "positions.pdf", "within-documents.png", "within-documents.pdf"]
    names = ["suites.md", "suites.tex", *figures]
    assert [path.name for path in paths] == names
    assert paths[-2].read_bytes().startswith(b"\x89PNG") and paths[-1].read_bytes().startswith(b"%PDF")
    same = {"form": "x", "attention": "x"}
    seeds = [
        replace(r, checkpoint=replace(r.checkpoint, run=f"x-seed{i}", path=f"x-seed{i}", seed=i, **same))
        for i, r in enumerate(results)
    ]
    (mean,) = mean_scores(seeds)
    assert "mean over seeds, band" in caption([(mean.checkpoint, mean.scores["loss_by_position (stories)"])])
    assert [row[1] for row in suite_tables([mean])[1].rows][:1] == ["x, step 10, 2 seeds"]


def test_one_load_serves_all_measures(tmp_path, tokenizer, texts, eval_data, monkeypatch):
    """Guards: a checkpoint that is hashed and read for each measure, and again for each card; a model that
    stays in memory when the next checkpoint's turn comes. The scores are those of a load each."""
    write_run(tmp_path, "demo-ours", "ours", tokenizer)
    (checkpoint,) = find_checkpoints(tmp_path)
    hashed, models = [], []
    load_model, check_undamaged = lingpt.models.load_model, scoring.check_undamaged

    def counted(*args, **options):
        model = load_model(*args, **options)
        models.append(weakref.ref(model.lm_head.weight))
        return model

    monkeypatch.setattr(lingpt.models, "load_model", counted)
    monkeypatch.setattr(scoring, "check_undamaged", lambda path: hashed.append(check_undamaged(path)))

    def scores(devices):
        scorer = Scorer(checkpoint, device="cpu", devices=devices, redo=True, log=lambda line: None)
        of_tasks = task_measurements(scorer, ["piqa", "arc_easy"], 0, eval_data, None)
        of_texts = text_measurements(scorer, ["language", "recall"], texts, max_length_factor=2)
        found = scorer.score([*of_tasks, *of_texts]).scores
        kept = ("metrics", "correct", "per_document", "max_length", "prompts", "dtype")
        return {key: [getattr(one, name) for name in kept] for key, one in found.items()}

    shared = scores(devices=2)
    assert len(hashed) == len(models) == 1 and len(shared) == 5 and models[0]() is None
    assert scores(devices=1) == shared and len(hashed) == len(models) == 2


def positions(run, texts, step=4, **more):
    """A result with the loss by position of these texts."""
    groups = tuple(Positions(to=to, loss=loss, stderr=0.1) for to, loss in ((32, 4.0), (64, 3.0)))
    values = {"positions": groups, "train_length": 32} | more
    scores = {f"loss_by_position ({t})": score("loss_by_position", texts=t, **values) for t in texts}
    return result(run, scores=scores, step=step, path=run)


def test_the_lines_of_the_loss_by_position(tmp_path, monkeypatch):
    """Guards: `softmax-seed0` where the losses' figure says `softmax`; a legend on the lines; a row in other
    dashes on the text that another row was not measured on."""
    from matplotlib.figure import Figure

    kept, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda fig, *a, **k: (kept.append(fig), save(fig, *a, **k)))

    results = [positions("a-seed0", ["x"]), positions("b-seed0", ["x", "y"]), positions("c-seed0", ["y"])]
    results += [positions("c-seed0", ["y"], step=8), positions("b-seed1", ["x", "y"])]
    draw_positions(results, tmp_path)
    (legend,) = kept[0].legends
    names = ["a", "b", "c-seed0", "c-seed0"]  # the last two are no line of one row
    assert [text.get_text() for text in legend.get_texts()] == names
    looks = [
        {(line.get_label(), line.get_linestyle(), line.get_marker()) for line in panel.lines[:-1]}
        for panel in kept[0].axes
    ]
    assert looks[0] == {("a", "-", "o"), ("b", "--", "s")} and ("b", "--", "s") in looks[1]
    assert [len(panel.collections) for panel in kept[0].axes] == [1, 1]  # the band of b's seeds
    assert legend.get_window_extent().x0 > kept[0].axes[-1].get_window_extent().x1


def test_names_are_drawn_as_they_are(tmp_path):
    """Guards: `$` in the name of a text or of a run began a formula, whose error ended the command."""
    assert len(draw_positions([positions("run $x_$", ["text $y_$"])], tmp_path)) == 2


def test_positions_are_in_their_order():
    """Of models trained at different lengths; each with the unigram of its own tokenizer."""
    short = (Positions(to=16, loss=4.5), Positions(to=32, loss=4.0))
    results = [positions("a", ["x"], unigram=5.0), positions("b", ["x"], positions=short)]
    (table,) = suite_tables(results, ["language"])
    assert table.head[4:] == ["unigram", "≤ 16", "≤ 32", "≤ 64"]
    assert [row[4:6] for row in table.rows] == [["5.000", "–"], ["–", "4.500"]]


@pytest.mark.parametrize(
    ("metrics", "cell"),
    [
        ({"perplexity": 70254.67, "perplexity_stderr": 3857.45}, "70,255 ± 3,857"),
        ({"perplexity": 12.345, "perplexity_stderr": 0.1234}, "12.3 ± 0.12"),
        ({"perplexity": 1.234e30, "perplexity_stderr": 5.67e28}, "1.23e+30 ± 5.7e+28"),
        ({"perplexity": math.inf, "perplexity_stderr": None}, "inf"),
    ],
)
def test_a_perplexity_as_it_is_read(metrics, cell):
    """Guards: 7.03e+04 ± 3.9e+03; a cell of as many digits as a huge one has."""
    found = score("lambada_openai", metrics={"acc": 0.1, "acc_stderr": 0.1} | metrics)
    results = [result("a", scores={"lambada_openai (0-shot)": found})]
    (table,) = suite_tables(results, ["commonsense"])
    assert table.rows[0][table.head.index("LAMBADA ppl")] == cell


def test_columns_for_contains_and_perplexity_and_an_average():
    """Guards: "–" for what SQuAD and WikiText measure. The average is of the columns in per cent that are
    shown, of runs that have them all; which are missing is said."""
    metrics = {"wikitext": {"word_perplexity": 30.5}, "boolq": {"acc": 0.6}, "copa": {"acc": 0.5}}
    metrics |= {"squad_contains": {"contains": 0.25, "contains_stderr": 0.05}, "fda": {"contains": 0.35}}
    scores = {f"{task} (0-shot)": score(task, metrics=values) for task, values in metrics.items()}
    some = {key: one for key, one in scores.items() if "copa" not in key}
    unknown = {"copa (0-shot)": score("copa", metrics={"acc": None})}
    results = [result("a", scores=scores), result("b", scores=some), result("c", scores=some | unknown)]
    commonsense, retrieval = suite_tables(results)
    assert commonsense.head[4:] == ["WikiText ppl", "COPA", "BoolQ", "Average"]
    cells = [["30.5", "50.00", "60.00", "55.00"], *[["30.5", "–", "60.00", "–"]] * 2]
    assert [row[4:] for row in commonsense.rows] == [*cells, ["none", "50", "50", ""]]
    assert retrieval.rows[0][4:] == ["25.00 ± 5.00", "35.00", "30.00"]
    assert "Not measured, and not in the average: LAMBADA, PIQA, HellaSwag, " in commonsense.notes[0]
    assert "not in the average: SQuAD completion, SWDE." in retrieval.notes[0]
    listed = {row[2]: row[3:7] for row in score_table(results).rows}
    assert listed["squad_contains (0-shot)"] == ["–", "–", "25.00 ± 5.00", "–"]
    assert listed["wikitext (0-shot)"] == ["–", "–", "–", "30.5"]
    for task, metric in (("bits_per_byte", "bits_per_byte"), ("recall_phrases", "acc")):
        of_a_text = {f"{task} (t)": score(task, metrics={metric: 0.2})}
        assert not score_table([result("a", scores=of_a_text)]).rows  # which its own table shows


def test_a_needle_is_found_by_a_model_that_reads(lm, monkeypatch):
    """The number stands once in the text, at depths from its beginning to its end, and is not in the
    question; the text and its answer fit the context."""
    wide = lm.reading(1024)
    pairs = [make_needle(wide, i / 10, seed=i) for i in range(11)]
    texts = [(lm.text_tokenizer.decode(text), lm.text_tokenizer.decode(answer)) for text, answer in pairs]
    places = [text.index(answer) / len(text) for text, answer in texts]
    assert places == pytest.approx(sorted(places), abs=0.02) and places[0] < 0.2 < 0.7 < places[-1]
    assert all(text.count(answer) == 1 and answer not in text[-60:] for text, answer in texts)
    assert all(900 < len(text) + len(answer) <= 1024 for text, answer in pairs)

    def reads(pairs):
        assert pairs == [make_needle(wide, i / 9, seed=i) for i in range(10)]
        return [(0.0, i % 2 == 0) for i, _ in enumerate(pairs)]

    monkeypatch.setattr(wide, "score", reads)
    found = find_needles(wide, needles=10)
    assert found.metrics == {"exact": 0.5, "exact_stderr": pytest.approx((0.25 / 9) ** 0.5)}
    some = [
        result("a", scores={f"needle ({n:,} tokens)": replace(found, max_length=n)}) for n in (1024, 2048)
    ]
    (table,) = suite_tables(some, ["needle"])
    assert table.head[4:] == ["1,024 tokens", "2,048 tokens"]
    assert [row[4:] for row in table.rows] == [["50.00 ± 16.67", "–"], ["–", "50.00 ± 16.67"]]


def test_needles_are_in_texts_up_to_the_longest(tmp_path, tokenizer):
    write_run(tmp_path, "demo-ours", "ours", tokenizer)
    scorer = Scorer(find_checkpoints(tmp_path)[0], device="cpu", log=lambda line: None)
    asked = text_measurements(scorer, ["needle"], {}, max_length_factor=2048 // BLOCK_SIZE)
    assert [(m.key, m.max_length) for m in asked] == [
        ("needle (1,024 tokens)", 1024),
        ("needle (2,048 tokens)", 2048),
    ]


def test_the_loss_by_position_alone_is_read_past_the_training_length(tmp_path, tokenizer, texts):
    write_run(tmp_path, "demo-ours", "ours", tokenizer)
    scorer = Scorer(find_checkpoints(tmp_path)[0], device="cpu", log=lambda line: None)
    asked = text_measurements(scorer, ["language", "recall"], texts, max_length_factor=4)
    further = [m.key for m in asked if m.max_length == 4 * BLOCK_SIZE]
    assert further == ["loss_by_position (stories)"]
    assert [m.max_length for m in asked if m.key not in further] == [BLOCK_SIZE] * 3


def test_needles_need_no_text():
    """Guards: a study of needles alone, refused for a text that it does not read."""
    check_scoring(["needle"], (), {"words": "gone"}, None)
    with pytest.raises(UserError, match="no documents at gone"):
        check_scoring(["needle", "recall"], (), {"words": "gone"}, None)


def test_a_suite_that_is_named_twice_is_measured_once(tmp_path, tokenizer):
    """Guards: the second `needle` was taken for a measure of a text, and recall of phrases stood for it."""
    write_run(tmp_path, "demo-ours", "ours", tokenizer)
    scorer = Scorer(find_checkpoints(tmp_path)[0])
    once, twice = (
        text_measurements(scorer, ["needle"] * times, {"code": "embedded"}, max_length_factor=16)
        for times in (1, 2)
    )
    assert [m.key for m in twice] == [m.key for m in once] == ["needle (1,024 tokens)"]


def test_a_training_length_too_short_for_needles_is_said(tmp_path, tokenizer):
    """Guards: a command that measured nothing, and said nothing."""
    write_run(tmp_path, "demo-ours", "ours", tokenizer)
    lines: list[str] = []
    scorer = Scorer(find_checkpoints(tmp_path)[0], device="cpu", log=lines.append)
    assert text_measurements(scorer, ["needle"], {}, max_length_factor=1) == []
    (line,) = lines
    assert "1,024 tokens or more" in line and "raise --max_length_factor" in line


def test_prompts_that_were_cut_are_noted():
    """As in Table 2, and once for a benchmark with two columns. Guards: LAMBADA's, of which nothing was
    said."""
    cut = {"documents": 5153, "cut_prompts": 12, "max_length": 64}
    found = score("lambada_openai", metrics={"acc": 0.1, "perplexity": 9.0}, **cut)
    results = [result("a", scores={"lambada_openai (0-shot)": found})]
    (table,) = suite_tables(results, ["commonsense"])
    notes = [note for note in table.notes if "cut on the left" in note]
    assert notes == ["LAMBADA ppl: 12 of 5,153 prompts at 64 tokens were cut on the left to fit."]


def test_mistakes(eval_data, tmp_path, capsys):
    with pytest.raises(UserError, match="did you mean 'commonsense'"):
        check_known("suite", ["comonsense"], SUITES)
    for word in ("novels", "=novels", "novels="):
        with pytest.raises(UserError, match="give name=path"):
            parse_texts([word])
    with pytest.raises(UserError, match="--texts names 'a' twice"):
        parse_texts(["a=x", "b=x", "a=y"])
    words = ["embedded", "a=b=c", "novels=novels"]
    assert parse_texts(words) == {"embedded": "embedded", "a": "b=c", "novels": "novels"}
    tasks = benchmark_tasks(["table2", "language", "commonsense"], ["mmlu:5"], None)
    assert tasks[:2] == ["mmlu:5", "wikitext"] and tasks[-1] == "social_iqa"
    with pytest.raises(UserError, match="has no file for any of squad_contains"):
        benchmark_tasks(["retrieval"], (), eval_data)
    (tmp_path / "lambada_openai_test.jsonl").write_text("{}")
    assert benchmark_tasks(["commonsense"], (), tmp_path) == ["lambada_openai"]
    assert "has no file for wikitext, piqa" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match="holds no text"):
        read_texts("x", str(tmp_path / "x.jsonl"))
    (tmp_path / "gz.jsonl").write_bytes(gzip.compress(b'{"text": "a"}'))
    with pytest.raises(UserError, match=r"gz.jsonl is compressed: add .gz to its name"):
        read_texts("x", str(tmp_path / "gz.jsonl"))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 100])
def test_pieces_are_the_text(tokenizer, length):
    """Each piece's text is the characters that its tokens have a byte of, whole: one that is cut stands in
    both pieces, none is lost. Against the bytes of the tokens, counted one by one."""
    text = "the sun warms stöne – cold 水 water"
    tokens, owners = tokenizer.encode(text), [i for i, char in enumerate(text) for _ in char.encode()]
    # A token of a byte-level BPE is written with a character for each of its bytes.
    ends = list(itertools.accumulate(len(tokenizer.raw.id_to_token(token)) for token in tokens))
    assert ends[-1] == len(owners)
    pieces = list(spans(text, tokenizer, length, 100))
    assert [token for ids, _ in pieces for token in ids] == tokens
    for i, (ids, part) in enumerate(pieces):
        assert len(ids) == length or ids is pieces[-1][0]
        first = ends[i * length - 1] if i else 0
        last = ends[i * length + len(ids) - 1]
        assert part == text[owners[first] : owners[last - 1] + 1]


def test_a_special_token_written_in_a_text_is_text(tokenizer):
    """As in training: an article about language models does not end in the middle."""
    text = "the sun<|endoftext|>warms"
    ((tokens, part),) = spans(text, tokenizer, 100, 1)
    assert tokens == tokenizer.for_documents.encode(text).ids and tokenizer.eos_id not in tokens
    assert part == text


def test_the_bytes_of_a_character_that_is_cut(lm):
    """Of a document that is not scored whole the last character counts whole: here 64 tokens, each a byte,
    are 21 characters and a byte, and count as 22 characters. Of one that is, every byte once."""
    for characters, counted in ((40, 66), (20, 60)):
        found = bits_per_byte(lm, Texts("x", ("水" * characters,), {}), tokens=1)
        assert found.per_document.bytes == (counted,)


def test_the_bytes_of_a_space_at_the_beginning(lm, tokenizer, monkeypatch):
    """Guards: Pythia's tokenizer says of a word that it begins after its space, which was not counted."""
    raw = tokenizers.Tokenizer.from_str(tokenizer.raw.to_str())
    raw.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    monkeypatch.setattr(lm, "text_tokenizer", Tokenizer(raw, "like Pythia's"))
    documents = (" the sun warms", "the sun warms", "  stone ")
    assert bits_per_byte(lm, Texts("x", documents, {})).per_document.bytes == tuple(map(len, documents))


def test_a_document_without_tokens_has_no_bits(lm):
    """Guards: an empty first document was an IndexError; a later one counted the tokens before it again."""
    texts = Texts("x", ("", "the sun", "", "warms stone"), {})
    assert (
        bits_per_byte(lm, texts).metrics == bits_per_byte(lm, Texts("x", texts.documents[1::2], {})).metrics
    )


def test_the_embedded_text_is_the_half_that_is_held_out():
    """Guards: scores on text that the model of a first run was trained on."""
    found, corpus = read_texts("code", "embedded"), embedded_corpus()
    assert found.documents == tuple(document.text for document in corpus.val.read())
    assert found.data == {"from": "embedded", "hash": corpus.content_hash}


def test_the_field_of_a_text_is_in_its_fingerprint(tmp_path):
    """Guards: texts under another name than `text` that could not be measured; of two fields of one file the
    scores of the first kept for both."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a title", "page": {"body": "the sun"}}))
    plain, body = read_texts("x", str(path)), read_texts("x", str(path), "page.body")
    assert (plain.documents, body.documents) == (("a title",), ("the sun",)) and plain.data != body.data
    assert plain.data == {"from": "files", "a.jsonl": file_sha256(path)}


def test_no_file_is_lost_in_the_fingerprint(tmp_path):
    """Guards: of a/val.jsonl and b/val.jsonl one hash was kept, so that the other could change unseen. A file
    whose name is its own goes by that alone, as in the scores that were recorded before."""
    for name in ("a/val.jsonl", "b/val.jsonl", "b/more.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    found = read_texts("x", str(tmp_path / "*" / "*.jsonl")).data
    assert found.keys() == {"from", "a/val.jsonl", "b/val.jsonl", "more.jsonl"}
    assert found["a/val.jsonl"] == file_sha256(tmp_path / "a" / "val.jsonl")
    assert read_texts("x", str(tmp_path / "b")).data.keys() == {"from", "val.jsonl", "more.jsonl"}
    assert read_texts("x", str(tmp_path / "a" / "val.jsonl")).data.keys() == {"from", "val.jsonl"}
    (tmp_path / "a" / "val.jsonl").write_text(json.dumps({"text": "other"}))
    read_texts.cache_clear()
    assert read_texts("x", str(tmp_path / "*" / "*.jsonl")).data != found
