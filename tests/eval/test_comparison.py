"""Guards means over seeds, paired differences and marks: errors against their formulas; what is left out."""

from dataclasses import replace

import numpy as np
import pytest

from lingpt.eval.comparison import (
    MARK_NOTES,
    Difference,
    bootstrap,
    comparison_notes,
    document_differences,
    mean_and_error,
    mean_scores,
    over_seeds,
    pair_with_softmax,
    paired_difference,
    softmax_of,
)
from lingpt.eval.scores import PerDocument, Positions, Result, Score, pack_bits
from lingpt.eval.suite_tables import suite_tables
from lingpt.eval.table2 import table2_tables
from lingpt.eval.tables import Table

from .conftest import result, score

PIQA = "piqa (0-shot)"


def answered(bits: list[int] | np.ndarray, task: str = "piqa", **values) -> Score:
    """The score of these answers."""
    metrics = {"acc": float(np.mean(bits)), "acc_stderr": float(np.std(bits, ddof=1) / len(bits) ** 0.5)}
    packed = {"acc": pack_bits([bool(bit) for bit in bits])}
    return score(task, documents=len(bits), metrics=metrics, correct=packed, **values)


def run(attention: str, seed: int, bits: list[int] | np.ndarray, **about) -> Result:
    """A run `<attention>-seed<seed>` that answered these questions rightly."""
    name = attention.partition("-")[0]
    return result(f"{attention}-seed{seed}", name, {PIQA: answered(bits)}, seed=seed, **about)


def with_scores(found: Result, **scores: Score) -> Result:
    return replace(found, scores=scores)


def answers(seeds: int, questions: int, seed: int) -> np.ndarray:
    """Questions of different difficulty, answered by models of different ability."""
    rng = np.random.default_rng(seed)
    return rng.random((seeds, questions)) < rng.random(questions) + rng.normal(0, 0.05, (seeds, 1))


def cells(table: Table) -> dict[str, list[str]]:
    return {row[0]: row for row in table.rows}


# ---------------------------------------------------------------------- means over seeds


def test_a_row_is_the_mean_of_its_seeds():
    """One row a form, with the number of seeds; a form of one seed, or of another step, number of tokens or
    length, stays a run."""
    ours, softmax = answers(3, 40, 0), answers(2, 40, 1)
    results = [run("ours", i, bits) for i, bits in enumerate(ours)]
    results += [run("softmax", i, bits) for i, bits in enumerate(softmax)] + [run("gla", 0, ours[0])]
    elsewhere = {"path": "elsewhere/ours-seed0"}  # of another study
    for other in (elsewhere, {"step": 5}, {"tokens": 5}, {"seq_len": 5}):
        assert len(mean_scores([*results, run("ours", 0, ours[0], **other)])) == 4
    means = mean_scores(results)
    assert [r.checkpoint.run for r in means] == ["ours", "softmax", "gla-seed0"]
    assert (means[0].seeds, means[2].seeds) == ([0, 1, 2], [0]) and mean_scores(means) == means
    main, paired = table2_tables(means)
    rows = [row for row in main.rows if row[0] == ""]
    named = ["softmax, step 4, 2 seeds", "gla-seed0, step 4", "ours, step 4, 3 seeds"]
    assert [row[1] for row in rows] == named
    assert rows[2][6].startswith(f"{100 * ours.mean():.2f} ± ") and any("√(s²/n" in n for n in main.notes)
    less = ours.mean() - softmax.mean()
    assert cells(paired)["ours"][4].startswith(f"{100 * less:+.2f} ± ".replace("-", "−"))
    # A single run has an interval with softmax's run of its seed.
    assert cells(paired)["gla"][4] == bootstrap(ours[0], softmax[0]).points()
    compared = "Compared with softmax, step 4, 2 seeds: ours, gla-seed0 (its seed 0 alone)."
    assert compared in paired.notes


def test_a_metric_that_one_seed_lacks_has_no_mean():
    both = [{"acc": 0.5, "acc_stderr": 0.1, "perplexity": perplexity} for perplexity in (None, 3.0)]
    (mean,) = mean_scores(
        [with_scores(run("ours", i, [1, 0]), x=score("x", metrics=metrics)) for i, metrics in enumerate(both)]
    )
    assert mean.scores["x"].metrics == {"acc": 0.5, "acc_stderr": 0.1}


def test_single_runs_are_as_before():
    results = [run("ours", 0, [1, 0, 1, 1]), run("softmax", 0, [1, 0, 0, 1])]
    assert mean_scores(results) == results
    main, paired = table2_tables(results)
    assert "[" in cells(paired)["ours"][4] and not any("√" in note for note in main.notes + paired.notes)


def test_the_error_is_over_seeds_and_questions():
    """By hand; at least that of either alone; and of the size that new seeds and new questions show."""
    assert mean_and_error([0.4, 0.6], [0.03, 0.05]) == (0.5, pytest.approx((0.02 / 2 + 0.04**2) ** 0.5))
    assert mean_and_error([0.4, 0.6], [0.03, None]) == (0.5, None)
    samples = [answers(3, 200, seed) for seed in range(400)]
    errors = [mean_and_error(x.mean(1), x.std(1, ddof=1) / 200**0.5)[1] for x in samples]
    spread = np.std([x.mean() for x in samples])
    assert spread < np.mean(errors) < 2 * spread


def test_what_not_every_seed_was_asked_has_a_row_of_its_own():
    """Guards: a mean over fewer seeds than the row says, or over other questions; and the scores of one seed
    left out where another was stopped while it was scored."""
    results = [run("ours", i, [1, 0, 1, 1]) for i in range(3)]
    arc, mmlu = (answered([1, 0, 1, 1], task) for task in ("arc_easy", "mmlu"))
    results[1:] = [replace(r, scores=r.scores | {"arc_easy (0-shot)": arc}) for r in results[1:]]
    results[2] = replace(results[2], scores=results[2].scores | {"mmlu (0-shot)": mmlu})
    assert [(r.checkpoint.run, r.seeds, list(r.scores)) for r in mean_scores(results)] == [
        ("ours", [0, 1, 2], [PIQA]),
        ("ours", [1, 2], ["arc_easy (0-shot)"]),
        ("ours-seed2", [2], ["mmlu (0-shot)"]),
    ]
    (main, *_) = table2_tables(mean_scores(results))
    shown = [[cell != "–" for cell in row[4:]] for row in main.rows if row[1].startswith("ours")]
    assert shown == [
        [False, False, True, False, False, False],
        [False, False, False, False, True, True],
        [True, False, False, False, False, False],
    ]
    other = [run("ours", 0, [1, 0, 1, 1]), with_scores(results[1], **{PIQA: replace(arc, prompts="q")})]
    assert mean_scores(other) == other
    (row,) = mean_scores([replace(r, scores={}) for r in other])
    assert row.seeds == [0, 1] and row.scores == {}


def test_positions_have_their_bounds():
    results = []
    for i in range(2):
        group = Positions(to=32, loss=4.0 + i, stderr=0.3)
        found = score("loss_by_position", texts="words", positions=(group,))
        results.append(with_scores(run("ours", i, [1, 0]), **{"loss_by_position (words)": found}))
    (group,) = mean_scores(results)[0].scores["loss_by_position (words)"].positions
    assert (group.loss, group.lowest, group.highest) == (4.5, 4.0, 5.0)
    assert group.stderr == pytest.approx((0.5 / 2 + 0.09) ** 0.5)


# ---------------------------------------------------------------------- paired differences


def test_paired_differences_are_of_the_same_questions():
    """By hand: of 8 questions one run alone gets 3, softmax alone 1; with other prompts there is no pair."""
    a, b = answered([1, 1, 1, 1, 0, 0, 1, 0]), answered([1, 0, 0, 0, 1, 0, 1, 0])
    found = paired_difference(a, b)
    assert (found.mean, found.questions) == (2 / 8, 8) and found.interval[0] < 0 < found.interval[1]
    assert paired_difference(a, replace(b, prompts="q")) is None
    assert paired_difference(a, replace(b, correct={})) is None
    assert paired_difference(*(replace(x, correct={"contains": x.correct["acc"]}) for x in (a, b))) == found


def test_the_interval_is_the_bootstraps():
    """Against a bootstrap over questions, drawn one by one."""
    rng = np.random.default_rng(1)
    a, b = rng.random(300) < 0.6, rng.random(300) < 0.5
    found = bootstrap(a, b)
    means = [(a[i].mean() - b[i].mean()) for i in rng.integers(0, 300, (4000, 300))]
    np.testing.assert_allclose(found.interval, np.percentile(means, [2.5, 97.5]), atol=0.012)
    assert found.mean == pytest.approx(a.mean() - b.mean())


def test_a_difference_without_an_interval():
    """Guards: `[+0.00, +0.00]`, as if a difference of no question that one run alone gets right, or of a
    single one, were exact."""
    assert Difference(0.0, 8, interval=(0.0, 0.0)).points() == "+0.00"
    assert Difference(-1.0, 1, interval=(-1.0, -1.0)).points() == "−100.00"
    assert Difference(0.25, 8, interval=(0.0, 0.5)).points() == "+25.00 [+0.00, +50.00]"
    assert Difference(0.0, 8, stderr=0.0).points() == "+0.00"


def test_the_error_of_a_difference():
    """Against the spread of the differences over new seeds and questions: right, or a little too large."""
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        hard = rng.random(200)
        first, second = (rng.random((3, 200)) < hard + rng.normal(0, 0.05, (3, 1)) for _ in range(2))
        found = over_seeds(first, second)
        means, errors = [*means, found.mean], [*errors, found.stderr**2]
    assert np.std(means) == pytest.approx(np.mean(errors) ** 0.5, rel=0.25)
    assert over_seeds(first, second[:1]).stderr is None


def test_the_variance_over_few_questions():
    """By hand, with n − 1 for questions as for seeds; of a single question there is no error."""
    first, second = np.array([[1, 1, 0], [1, 0, 1]], dtype=bool), np.array([[0, 1, 0], [0, 1, 0]], dtype=bool)
    # Differences 1, −½, ½; their squared deviations sum to 7/6, and all seeds have the same accuracy.
    assert over_seeds(first, second).stderr == pytest.approx((7 / 6 / 2 / 3) ** 0.5)
    assert over_seeds(first[:, :1], second[:, :1]).stderr is None


def test_the_paired_difference_of_losses():
    """By hand; of seeds with their variance; a single run against the softmax run of its seed; of other
    documents, and where they are not known one by one, none."""
    rng = np.random.default_rng(3)
    hard, sizes = rng.normal(4, 1, 30), (100,) * 30  # documents that are hard for all

    def bits(loss: float) -> Score:
        nats = 100 * (hard + loss + rng.normal(0, 0.1, 30))
        kept = PerDocument(nats=tuple(nats.tolist()), bytes=sizes)
        return score("bits_per_byte", texts="x", documents=30, per_document=kept)

    softmax, ours = ([bits(loss + 0.01 * i) for i in range(3)] for loss in (0.0, 0.2))
    each = [np.array([one.per_document.nats for one in x]) / 100 / np.log(2) for x in (ours, softmax)]
    ((mean, error),) = document_differences(ours[0], softmax[0])
    less = each[0][0] - each[1][0]
    assert mean == pytest.approx(less.mean()) and error == pytest.approx(less.std(ddof=1) / 30**0.5)
    assert error < 0.2 * each[0][0].std(ddof=1) / 30**0.5  # what both find hard is not in it

    key = "bits_per_byte (x)"
    runs = [run(name, i, [1, 0]) for name in ("ours", "softmax") for i in range(3)]
    runs = [with_scores(r, **{key: one}) for r, one in zip(runs, [*ours, *softmax], strict=True)]
    means = mean_scores(runs)
    ((mean, error),) = document_differences(*pair_with_softmax(means[0], means, key))
    assert mean == pytest.approx((each[0] - each[1]).mean())
    paired = (each[0].mean(0) - each[1].mean(0)).std(ddof=1) / 30**0.5
    of_seeds = sum(x.mean(1).var(ddof=1) / 3 for x in each)
    assert error == pytest.approx((paired**2 + of_seeds) ** 0.5)
    alone = mean_scores([runs[1], *runs[3:]])
    assert pair_with_softmax(alone[0], alone, key) == (ours[1], softmax[1])
    assert document_differences(means[0].scores[key], softmax[0])[0][1] is None
    assert document_differences(ours[0], replace(softmax[0], prompts="q")) is None
    assert document_differences(replace(ours[0], per_document=None), softmax[0]) is None


def test_the_paired_difference_by_position():
    groups = (Positions(to=32, loss=4.0), Positions(to=64, loss=3.0))
    a, b = (
        score("loss_by_position", documents=3, positions=groups, per_document=PerDocument(losses=losses))
        for losses in (((4.0, 5.0, 6.0), (3.0, 3.0, 3.0)), ((3.0, 4.5, 4.5), (3.0, 2.0, 4.0)))
    )
    first, second = document_differences(a, b)
    assert first == (1.0, pytest.approx(0.5 / 3**0.5)) and second == (0.0, pytest.approx(1 / 3**0.5))
    further = replace(groups[1], to=96)
    assert document_differences(a, replace(b, positions=(groups[0], further))) is None


def test_a_score_has_an_answer_and_a_value_for_each_document():
    """Guards: pairs of different documents, in a difference between two runs."""
    with pytest.raises(ValueError, match="8 answers to 9 questions"):
        score(documents=9, correct={"acc": pack_bits([True] * 8)})
    group = Positions(to=32, loss=4.0)
    for groups, kept in (
        ((), PerDocument(nats=(1.0, 2.0), bytes=(3,))),
        ((group,), PerDocument(losses=((4.0,),))),
        ((group, group), PerDocument(losses=((4.0, 5.0),))),
    ):
        with pytest.raises(ValueError, match="no number for each document"):
            score(documents=2, positions=groups, per_document=kept)


# ---------------------------------------------------------------------- with softmax


def test_the_baseline_is_softmax_without_options():
    """Guards: gla and hybrid of seed 0 less softmax-both of seed 0, since a mean's seeds [0, 1] are not 0;
    and no word on what softmax-both is compared with. Without plain softmax, softmax with options is it."""
    options = {"form": "softmax + softmax_conv + softmax_gate"}
    both = [run("softmax-both", 0, answers(1, 40, 0)[0], **options)]
    both += [run(name, 0, answers(1, 40, i)[0]) for i, name in enumerate(("gla", "hybrid"), start=1)]
    plain = [run("softmax", i, row) for i, row in enumerate(answers(2, 40, 1))]
    *others, softmax = results = mean_scores([*both, *plain])
    assert [softmax_of(one, results) for one in results] == [softmax] * 3 + [None] and len(others) == 3
    paired = table2_tables(results)[-1]
    assert [row[0] for row in paired.rows] == [options["form"], "gla", "hybrid"]
    names = ", ".join(f"{name}-seed0 (its seed 0 alone)" for name in ("softmax-both", "gla", "hybrid"))
    assert f"Compared with softmax, step 4, 2 seeds: {names}." in paired.notes
    assert softmax_of(both[1], both) is both[0]


def test_of_several_softmax_runs_the_likest():
    """The one that a study names; one of the seeds that a mean is of counts as that of a run with all of
    them; then tokens and length, and what differs is noted."""
    plain = [run("softmax", i, [1, 0]) for i in (0, 1)]
    gla = run("gla", 1, [1, 1])
    assert softmax_of(gla, [*plain, gla]) is plain[1]
    assert softmax_of(gla, [run("ours", 1, [1, 0]), gla]) is None
    (mean,) = mean_scores(plain)
    other = run("softmax", 2, [1, 0])
    assert softmax_of(gla, [other, mean, gla]) is mean
    longer = run("softmax", 1, [1, 0], tokens=40)
    assert softmax_of(gla, [longer, mean, gla]) is mean
    named = run("softmax", 3, [1, 0], tokens=40, seq_len=64, baseline=True)
    assert softmax_of(gla, [mean, named, gla]) is named
    (note,) = comparison_notes([gla], [named, gla])
    assert note.endswith("gla-seed1 (of another seed and number of tokens and length).")
    lone = run("gla", 5, [1, 1])  # its seed is none of the mean's
    assert comparison_notes([lone], [mean, lone])[0].endswith("2 seeds: gla-seed5 (of another seed).")


def test_the_notes_name_what_is_compared():
    """Guards: a note on a softmax with options that has no loss by position, below a table without it; a run
    of two texts was named twice."""
    group = (Positions(to=32, loss=4.0, stderr=0.1),)
    losses = PerDocument(losses=((4.0, 4.2),))
    found = score(
        "loss_by_position", texts="x", documents=2, positions=group, per_document=losses, train_length=32
    )
    results = [run(name, 0, [1, 0]) for name in ("softmax-both", "softmax", "gla")]
    results[0] = replace(results[0], checkpoint=replace(results[0].checkpoint, form="softmax + softmax_conv"))
    for scored, named in ((results[1:], "gla-seed0"), (results, "softmax-both-seed0, gla-seed0")):
        both = {f"loss_by_position ({text})": replace(found, texts=text) for text in "xy"}
        some = [replace(r, scores=both if r in scored else {}) for r in results]
        less = suite_tables(some)[-1]
        assert less.title == "Loss by position, minus softmax's"
        assert less.notes[1:] == [f"Compared with softmax-seed0, step 4: {named}."]


def test_the_notes_are_of_what_is_shown():
    """Guards: what a difference is under a table without one; errors over questions where it is documents."""
    metrics = {"bits_per_byte": 1.0, "bits_per_byte_stderr": 0.1, "xz_bits_per_byte": 2.0}
    bits = score("bits_per_byte", texts="x", documents=3, metrics=metrics)
    results = [
        with_scores(
            run(name, i, [1, 0]),
            **{
                "recall_phrases (x)": answered([1, name == "ours"], "recall_phrases", texts="x"),
                "bits_per_byte (x)": bits,
            },
        )
        for name in ("softmax", "ours")
        for i in range(2)
    ]
    for rows, shown in ((2, False), (4, True)):
        found, phrases = suite_tables(mean_scores(results[:rows]))
        assert (
            ("to softmax" in phrases.head) == any("Difference: " in note for note in phrases.notes) == shown
        )
        assert len({len(row) for row in (phrases.head, *phrases.rows)}) == 1
        assert any("errors over documents" in note for note in found.notes)
        assert any("errors over questions" in note for note in phrases.notes)


def test_a_score_that_one_seed_of_the_baseline_has_is_compared():
    """Guards: no difference to softmax where not all of its seeds have the score."""
    results = [run(name, i, [1, 0, 1, 1]) for name in ("softmax", "ours") for i in range(2)]
    phrases = answered([1, 0, 1, 1], "recall_phrases", texts="x")
    for i in (0, 2):
        results[i] = replace(results[i], scores=results[i].scores | {"recall_phrases (x)": phrases})
    (table,) = suite_tables(mean_scores(results), ["recall"])
    assert table.head[-1] == "to softmax" and table.rows[1][1] == "ours-seed0, step 4"
    assert table.rows[1][-1].startswith("+0.00") and table.rows[0][-1] == "–"
    assert "Compared with softmax-seed0, step 4: ours-seed0." in table.notes


# ---------------------------------------------------------------------- comparable prompts


def three(found: Score, **change) -> list[Result]:
    """Three runs with this score; that of the last, of ours, has the `change`."""
    key = f"{found.task} ({found.texts})" if found.texts else f"{found.task} (0-shot)"
    scores = {"softmax": found, "gla": found, "ours": replace(found, **change)}
    return [result(name, name, {key: one}) for name, one in scores.items()]


BITS = [1, 0] * 4


@pytest.mark.parametrize(
    ("change", "is_marked"),
    [
        ({"prompts": "q"}, True),
        ({"cut_prompts": 3, "max_length": 512}, True),
        ({"max_length": 512, "cut_prompts": 0}, False),  # all fit: the same prompts
        ({"documents": 4, "complete": False, "prompts": "half"}, False),  # which has its *
    ],
)
def test_a_benchmark_with_other_prompts(change, is_marked):
    """In Table 2, its normalised form, and the difference to softmax where that is of the same prompts."""
    piqa = answered(BITS)
    piqa = replace(piqa, metrics=piqa.metrics | {"acc_norm": 0.25})
    tables = {table.title.split()[0]: table for table in table2_tables(three(piqa, **change))}
    for name in ("Table", "Length-normalised"):
        column = tables[name].head.index("PIQA")
        marked = [row[1] for row in tables[name].rows if row[column].endswith("†")]
        assert marked == (["ours, step 4"] if is_marked else [])
        assert (MARK_NOTES["†"] in tables[name].notes) == is_marked
        assert (MARK_NOTES["*"] in tables[name].notes) == ("complete" in change)
    less = {row[0]: row[tables["Paired"].head.index("PIQA")] for row in tables["Paired"].rows}
    cut = "cut_prompts" in change and change["cut_prompts"] > 0
    assert less["ours"].endswith("†") == cut if "ours" in less else "prompts" in change
    assert any("† of the two runs one had its prompts cut" in note for note in tables["Paired"].notes) == cut
    assert "†" not in less["gla"] and (r"$\dagger$" in tables["Table"].latex()) == is_marked


def test_a_difference_on_a_part_is_marked():
    paired = table2_tables(three(replace(answered(BITS), complete=False)))[-1]
    shown = [row[paired.head.index("PIQA")] for row in paired.rows]
    assert len(shown) == 2 and all(cell.endswith("*") for cell in shown) and MARK_NOTES["*"] in paired.notes


def test_rows_that_are_cut_alike_are_not_marked():
    """And where the one is cut that most are not, or the other way round, it is the one that is marked."""
    cut = replace(answered(BITS), cut_prompts=3, max_length=512)
    assert "†" not in table2_tables(three(cut))[0].text()
    rows = table2_tables(three(cut, cut_prompts=0))[0].rows
    assert [row[1] for row in rows if "†" in row[6]] == ["ours, step 4"]


@pytest.mark.parametrize(
    ("task", "values", "change", "column"),
    [
        ("bits_per_byte", {}, {"max_length": 512}, "Documents"),
        (
            "loss_by_position",
            {"train_length": 64, "positions": (Positions(to=32, loss=4.0),)},
            {"train_length": 32, "prompts": "q"},
            "Documents",
        ),
        ("recall_phrases", {}, {"prompts": "q"}, "Questions"),
        ("hellaswag", {"texts": None}, {"cut_prompts": 1, "max_length": 512}, "HellaSwag"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_suite_with_other_prompts(task, values, change, column):
    """Guards: bits per byte of windows of 512 tokens beside those of 2,048, say, without a word."""
    metrics = {"bits_per_byte": 1.0, "xz_bits_per_byte": 2.0, "acc": 0.5, "acc_norm": 0.5}
    found = score(task, **{"metrics": metrics, "max_length": 2048, "texts": "novels"} | values)
    for changes, marked in (({}, []), (change, ["ours"])):
        table = suite_tables(three(found, **changes))[0]
        shown = {row[0]: row[table.head.index(column)] for row in table.rows}
        assert [name for name, cell in shown.items() if cell.endswith("†")] == marked
        assert (MARK_NOTES["†"] in table.notes) == bool(marked)
