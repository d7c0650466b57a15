"""Guards the rows that are means over seeds: means and errors against their formulas; what is left out."""

import copy

import numpy as np
import pytest

from lingpt.eval.paired import bits_difference, bootstrap, over_seeds, position_differences
from lingpt.eval.results import pack_bits
from lingpt.eval.seeds import mean_and_error, mean_scores
from lingpt.eval.suite_tables import pair_with_softmax, suite_tables
from lingpt.eval.table2 import softmax_of, table2_tables
from lingpt.eval.tables import Table


def run(attention: str, seed: int, bits: list[int]) -> dict:
    """A run `<attention>-seed<seed>` that answered these questions rightly."""
    accuracy = float(np.mean(bits))
    entry = {
        "task": "piqa", "num_fewshot": 0, "documents": len(bits), "complete": True, "prompts": "p",
        "metrics": {"acc": accuracy, "acc_stderr": float(np.std(bits, ddof=1) / len(bits) ** 0.5)},
        "correct": {"acc": pack_bits([bool(bit) for bit in bits])},
    }  # fmt: skip
    about = {
        "run": f"{attention}-seed{seed}",
        "path": f"runs/{attention}-seed{seed}",
        "step": 4,
        "seed": seed,
    }
    about |= {"attention": attention, "form": attention, "model": "demo", "parameters": 10, "tokens": 20}
    return {"checkpoint": about, "scores": {"piqa (0-shot)": entry}}


def answers(seeds: int, questions: int, seed: int) -> np.ndarray:
    """Questions of different difficulty, answered by models of different ability."""
    rng = np.random.default_rng(seed)
    return rng.random((seeds, questions)) < rng.random(questions) + rng.normal(0, 0.05, (seeds, 1))


def cells(table: Table) -> dict[str, list[str]]:
    return {row[0]: row for row in table.rows}


def test_a_row_is_the_mean_of_its_seeds():
    """One row a form, with the number of seeds; a form of one seed, or of another step, stays a run."""
    ours, softmax = answers(3, 40, 0), answers(2, 40, 1)
    results = [run("ours", i, bits) for i, bits in enumerate(ours)]
    results += [run("softmax", i, bits) for i, bits in enumerate(softmax)] + [run("gla", 0, ours[0])]
    other = copy.deepcopy(results[0])  # of another study
    other["checkpoint"]["path"] = "elsewhere/ours-seed0"
    assert len(mean_scores([*results, other])) == 4
    means = mean_scores(results)
    assert [r["checkpoint"]["run"] for r in means] == ["ours", "softmax", "gla-seed0"]
    assert (means[0]["checkpoint"]["seed"], means[2]["checkpoint"]["seed"]) == ([0, 1, 2], 0)
    assert "path" not in means[0]["checkpoint"] and mean_scores(means) == means
    main, paired = table2_tables(means)
    rows = [row for row in main.rows if row[0] == ""]
    assert [row[1] for row in rows] == [
        "softmax, step 4, 2 seeds",
        "gla-seed0, step 4",
        "ours, step 4, 3 seeds",
    ]
    assert rows[2][6].startswith(f"{100 * ours.mean():.2f} ± ") and any("√(s²/n" in n for n in main.notes)
    less = ours.mean() - softmax.mean()
    assert cells(paired)["ours"][4].startswith(f"{100 * less:+.2f} ± ".replace("-", "−"))
    # A single run has an interval with softmax's run of its seed.
    low, high = (f"{100 * x:+.2f}".replace("-", "−") for x in bootstrap(ours[0], softmax[0])[1:3])
    assert cells(paired)["gla"][4].endswith(f"[{low}, {high}]")
    compared = "Compared with softmax, step 4, 2 seeds: ours, gla-seed0 (its seed 0 alone)."
    assert compared in paired.notes


def test_the_baseline_is_softmax_without_options():
    """Guards: gla and hybrid of seed 0 less softmax-both of seed 0, since a mean's seeds [0, 1] are not 0;
    and no word on what softmax-both is compared with. Without plain softmax, softmax with options is it."""
    bits = answers(2, 40, 1)
    both = [run(name, 0, answers(1, 40, i)[0]) for i, name in enumerate(("softmax-both", "gla", "hybrid"))]
    both[0]["checkpoint"] |= {"attention": "softmax", "form": "softmax + softmax_conv + softmax_gate"}
    results = mean_scores([*both, *(run("softmax", i, row) for i, row in enumerate(bits))])
    assert [softmax_of(result, results)["checkpoint"]["form"] for result in results] == ["softmax"] * 4
    paired = table2_tables(results)[-1]
    assert [row[0] for row in paired.rows] == [both[0]["checkpoint"]["form"], "gla", "hybrid"]
    names = ", ".join(f"{name}-seed0 (its seed 0 alone)" for name in ("softmax-both", "gla", "hybrid"))
    assert f"Compared with softmax, step 4, 2 seeds: {names}." in paired.notes
    assert softmax_of(both[1], both) is both[0]


def test_of_several_softmax_runs_the_likest():
    """One of the seeds that a mean is of counts as that of a run with all of them; then tokens and length."""
    plain = [run("softmax", i, [1, 0]) for i in (0, 1)]
    gla = run("gla", 1, [1, 1])
    assert softmax_of(gla, [*plain, gla]) is plain[1]
    (mean,) = mean_scores(plain)
    other = run("softmax", 2, [1, 0])
    assert softmax_of(gla, [other, mean, gla]) is mean
    longer = run("softmax", 1, [1, 0])
    longer["checkpoint"]["tokens"] = 40
    assert softmax_of(gla, [longer, mean, gla]) is mean


def test_the_notes_name_what_is_compared():
    """Guards: a note on a softmax with options that has no loss by position, below a table without it."""
    groups = [{"from": 0, "to": 32, "loss": 4.0, "stderr": 0.1}]
    entry = {"task": "loss_by_position", "texts": "x", "documents": 2, "prompts": "p", "metrics": {}}
    entry |= {"positions": groups, "per_document": {"losses": [[4.0, 4.2]]}, "unigram": 5.0}
    entry |= {"train_length": 32, "num_fewshot": 0}
    results = [run(name, 0, [1, 0]) for name in ("softmax-both", "softmax", "gla")]
    results[0]["checkpoint"] |= {"attention": "softmax", "form": "softmax + softmax_conv"}
    for scored, named in ((results[1:], "gla-seed0"), (results, "softmax-both-seed0, gla-seed0")):
        for result in results:
            result["scores"] = {"loss_by_position (x)": entry} if result in scored else {}
        less = suite_tables(results)[-1]
        assert less.title == "Loss by position, minus softmax's"
        assert less.notes[1:] == [f"Compared with softmax-seed0, step 4: {named}."]


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


def test_the_notes_are_of_what_is_shown():
    """Guards: what a difference is under a table without one; errors over questions where it is documents."""
    recall = {"task": "recall_phrases", "texts": "x", "metrics": {"acc": 0.5, "acc_stderr": 0.1}}
    bits = {
        "task": "bits_per_byte",
        "num_fewshot": 0,
        "texts": "x",
        "documents": 3,
        "metrics": {"xz_bits_per_byte": 2.0},
    }
    bits["metrics"] |= {"bits_per_byte": 1.0, "bits_per_byte_stderr": 0.1}
    results = [run("softmax", i, [1, 0]) for i in range(2)] + [run("ours", i, [1, 1]) for i in range(2)]
    for result in results:
        answered = result["scores"]["piqa (0-shot)"]
        result["scores"] = {"recall_phrases (x)": answered | recall, "bits_per_byte (x)": bits}
    for rows, shown in ((2, False), (4, True)):
        found, phrases = suite_tables(mean_scores(results[:rows]))
        assert (
            ("to softmax" in phrases.head) == any("Difference: " in note for note in phrases.notes) == shown
        )
        assert len({len(row) for row in (phrases.head, *phrases.rows)}) == 1
        assert any("errors over documents" in note for note in found.notes)
        assert any("errors over questions" in note for note in phrases.notes)


def test_the_paired_difference_of_losses():
    """By hand, for bits per byte and for positions; of seeds with their variance; a single run against the
    softmax run of its seed; of other documents, and of files that do not have them one by one, none."""
    rng = np.random.default_rng(3)
    hard, sizes = rng.normal(4, 1, 30), [100] * 30  # documents that are hard for all

    def score(loss: float) -> dict:
        nats = 100 * (hard + loss + rng.normal(0, 0.1, 30))
        kept = {"nats": nats.tolist(), "bytes": sizes}
        return {"documents": 30, "prompts": "p", "metrics": {}, "per_document": kept}

    softmax, ours = ([score(loss + 0.01 * i) for i in range(3)] for loss in (0.0, 0.2))
    mean, error = bits_difference(ours[0], softmax[0])
    nats = [np.array(entry["per_document"]["nats"]) / 100 for entry in (ours[0], softmax[0])]
    less = (nats[0] - nats[1]) / np.log(2)
    assert mean == pytest.approx(less.mean()) and error == pytest.approx(less.std(ddof=1) / 30**0.5)
    assert error < 0.2 * nats[0].std(ddof=1) / 30**0.5  # what both find hard is not in it
    runs = [run(name, i, [1, 0]) for name in ("ours", "softmax") for i in range(3)]
    for result, entry in zip(runs, [*ours, *softmax], strict=True):
        result["scores"] = {"bits_per_byte (x)": {"task": "bits_per_byte", "texts": "x"} | entry}
    means = mean_scores(runs)
    pair = pair_with_softmax(means[0], means, "bits_per_byte (x)")
    assert bits_difference(*pair)[0] == pytest.approx(
        np.mean([bits_difference(a, b)[0] for a, b in zip(ours, softmax, strict=True)])
    )
    rows = [
        np.array([entry["per_document"]["nats"] for entry in x]) / 100 / np.log(2) for x in (ours, softmax)
    ]
    paired = (rows[0].mean(0) - rows[1].mean(0)).std(ddof=1) / 30**0.5
    of_seeds = sum(x.mean(1).var(ddof=1) / 3 for x in rows)
    assert bits_difference(*pair)[1] == pytest.approx((paired**2 + of_seeds) ** 0.5)
    alone = mean_scores([runs[1], *runs[3:]])
    pair = pair_with_softmax(alone[0], alone, "bits_per_byte (x)")
    assert bits_difference(*pair) == bits_difference(ours[1], softmax[1])
    assert bits_difference(ours[0], softmax[0] | {"prompts": "q"}) is None
    older = {key: value for key, value in ours[0].items() if key != "per_document"}
    assert bits_difference(older, softmax[0]) is None
    runs[1]["scores"]["bits_per_byte (x)"].pop("per_document")
    assert "per_document" not in mean_scores(runs)[0]["scores"]["bits_per_byte (x)"]


def test_the_paired_difference_by_position():
    groups = [{"to": 32}, {"to": 64}]
    entries = [
        {"documents": 3, "prompts": "p", "positions": groups, "per_document": {"losses": losses}}
        for losses in ([[4.0, 5.0, 6.0], [3.0, 3.0, 3.0]], [[3.0, 4.5, 4.5], [3.0, 2.0, 4.0]])
    ]
    first, second = position_differences(*entries)
    assert first == (1.0, pytest.approx(0.5 / 3**0.5)) and second == (0.0, pytest.approx(1 / 3**0.5))
    assert position_differences(entries[0], entries[1] | {"positions": [{"to": 32}, {"to": 96}]}) is None


def test_what_not_every_seed_was_asked_has_a_row_of_its_own():
    """Guards: a mean over fewer seeds than the row says, or over other questions; and the scores of one seed
    left out where another was stopped while it was scored."""
    results = [run("ours", i, [1, 0, 1, 1]) for i in range(3)]
    piqa = results[0]["scores"]["piqa (0-shot)"]
    for result in results[1:]:
        result["scores"]["arc_easy (0-shot)"] = piqa | {"task": "arc_easy"}
    results[2]["scores"]["mmlu (0-shot)"] = piqa | {"task": "mmlu"}
    found = [
        (r["checkpoint"]["run"], r["checkpoint"]["seed"], list(r["scores"])) for r in mean_scores(results)
    ]
    assert found == [
        ("ours", [0, 1, 2], ["piqa (0-shot)"]),
        ("ours", [1, 2], ["arc_easy (0-shot)"]),
        ("ours-seed2", 2, ["mmlu (0-shot)"]),
    ]
    (main, *_) = table2_tables(mean_scores(results))
    shown = [[cell != "–" for cell in row[4:]] for row in main.rows if row[1].startswith("ours")]
    assert shown == [
        [False, False, True, False, False, False],
        [False, False, False, False, True, True],
        [True, False, False, False, False, False],
    ]
    other = [run("ours", i, [1, 0, 1, 1]) for i in range(2)]
    other[1]["scores"]["piqa (0-shot)"]["prompts"] = "q"
    assert mean_scores(other) == other and mean_scores(mean_scores(results)) == mean_scores(results)
    for result in other:
        result["scores"] = {}
    (row,) = mean_scores(other)
    assert row["checkpoint"]["seed"] == [0, 1] and row["scores"] == {}


def test_a_score_that_one_seed_of_the_baseline_has_is_compared():
    """Guards: no difference to softmax where not all of its seeds have the score."""
    results = [run(name, i, [1, 0, 1, 1]) for name in ("softmax", "ours") for i in range(2)]
    for result in (results[0], results[2]):
        entry = result["scores"]["piqa (0-shot)"] | {"task": "recall_phrases", "texts": "x"}
        result["scores"]["recall_phrases (x)"] = entry
    (table,) = suite_tables(mean_scores(results))
    assert table.head[-1] == "to softmax" and table.rows[1][1] == "ours-seed0, step 4"
    assert table.rows[1][-1].startswith("+0.00") and table.rows[0][-1] == "–"
    assert "Compared with softmax-seed0, step 4: ours-seed0." in table.notes


def test_positions_have_their_bounds():
    results = [run("ours", i, [1, 0]) for i in range(2)]
    for i, result in enumerate(results):
        group = {"from": 0, "to": 32, "loss": 4.0 + i, "stderr": 0.3}
        entry = {"task": "loss_by_position", "documents": 5, "metrics": {}, "positions": [group]}
        result["scores"] = {"loss_by_position (words)": entry}
    (group,) = mean_scores(results)[0]["scores"]["loss_by_position (words)"]["positions"]
    assert (group["loss"], group["lowest"], group["highest"]) == (4.5, 4.0, 5.0)
    assert group["stderr"] == pytest.approx((0.5 / 2 + 0.09) ** 0.5)
