"""Mixtures: exact shares, an order that is a pure function of (seed, step), repetition that is said."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.data import BatchSampler, DataConfig, PackedDataset, availability, content_hashes, prepare
from lingpt.data.dataset import val_sources
from lingpt.data.mixture import Mixture, parse_mixture


class Rows:
    """`n` blocks whose content is `start` and their index."""

    seq_len, sample = 1, PackedDataset.sample

    def __init__(self, start: int, n: int) -> None:
        self.start, self.n = start, n

    def __len__(self) -> int:
        return self.n

    def gather(self, indices) -> torch.Tensor:
        return torch.tensor([[self.start, int(i)] for i in indices], dtype=torch.int64).reshape(-1, 2)


@pytest.mark.parametrize(("weights", "batch"), [([0.7, 0.3], 2), ([2, 1], 8), ([0.5, 0.3, 0.15, 0.05], 2)])
def test_shares_over_1000_steps_and_every_block_of_a_source_before_one_again(weights, batch):
    """Within 0.1 % of the weights; each source in epochs of its own, as if it were alone."""
    shares = list(parse_mixture(",".join(f"s{i}*{w}" for i, w in enumerate(weights))).values())
    parts = [Rows(i, n) for i, n in enumerate([61, 130, 7, 300][: len(weights)])]
    batches = BatchSampler(Mixture(parts, shares), seed=3, global_batch_size=batch)
    samples = torch.cat([batches.get(step, range(batch)) for step in range(1000)])
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        own = samples[samples[:, 0] == i, 1]
        assert len(own) / len(samples) == pytest.approx(weight / sum(weights), abs=1e-3)
        alone = BatchSampler(part, 3, len(own)).get(0, range(len(own)))
        assert own.tolist() == alone[:, 1].tolist()
        assert len(set(own[: part.n].tolist())) == min(part.n, len(own))


def test_any_position_of_any_step_is_known_without_those_before():
    """Guards: an order that a resumed run, or a second device, would have to count up to."""
    mixture = Mixture([Rows(0, 10), Rows(1, 7), Rows(2, 5)], [500_000, 300_000, 200_000])
    batches = BatchSampler(mixture, seed=1, global_batch_size=6)
    for step in (0, 17, 10**9):
        whole = batches.get(step, range(6))
        halves = [BatchSampler(mixture, 1, 6).get(step, range(rank, 6, 2)) for rank in (1, 0)]
        assert torch.equal(torch.stack(halves[::-1], dim=1).flatten(0, 1), whole)
        assert torch.equal(mixture.gather(batches.indices(step)), whole)
    assert batches.indices(5) != BatchSampler(mixture, seed=2, global_batch_size=6).indices(5)


def test_the_order_is_the_same_for_ever():
    """Golden: a changed order would make a resumed run see other data in silence."""
    batches = BatchSampler(Mixture([Rows(0, 9), Rows(1, 4)], [700_000, 300_000]), 1337, 5)
    found = [batches.get(step, range(5)).tolist() for step in range(2)]
    assert found == [[[1, 2], [0, 2], [0, 6], [1, 3], [0, 7]], [[0, 8], [1, 1], [0, 5], [0, 0], [0, 4]]]


def test_the_blocks_before_one_repeats():
    """What is validated on: in order, each source by its share, none twice."""
    mixture = Mixture([Rows(0, 20), Rows(1, 5)], [750_000, 250_000])
    blocks = mixture.gather(range(len(mixture)))
    assert len(np.unique(blocks, axis=0)) == len(blocks) and (blocks[:, 0] == 1).sum() == 5
    assert blocks[blocks[:, 0] == 0, 1].tolist() == list(range(int((blocks[:, 0] == 0).sum())))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a*0.7,b", r"^'b' has no weight in the mixture a\*0.7,b: give each, as a\*0.7,b\*0.3$"),
        ("a*0.7,b*0", "^the weight of b in the mixture is 0: it must be a number above 0$"),
        ("a*0.7,b*-1", "^the weight of b in the mixture is -1: it must be a number above 0$"),
        ("a*0.7,b*1e999", "the weight of b in the mixture is 1e999"),
        ("a*0.7,b*3x", "the weight of b in the mixture is 3x"),
        ("a*0.7,a*0.3", "^a stands twice in the mixture"),
        ("a*1,b*1e-9", "the share of b is below a millionth: leave it out, or raise its weight"),
    ],
)
def test_a_weight_that_is_none_is_a_line(source, message):
    with pytest.raises(UserError, match=message):
        prepare(DataConfig(source), progress=False)


def test_what_is_no_mixture_is_a_path():
    """A glob has `*`, a file's name may have a comma."""
    for source in ("data/*.jsonl", "a,b.jsonl", "wiki/*0.7"):
        assert list(parse_mixture(source)) == [source]
    assert parse_mixture("data/*.jsonl*3, hf:a/b:en*1") == {"data/*.jsonl": 750_000, "hf:a/b:en": 250_000}


@pytest.fixture
def config(write_jsonl, texts, tokenizer_path, tmp_path) -> DataConfig:
    sources = [write_jsonl(texts(count, seed), f"{seed}.jsonl") for seed, count in ((1, 120), (2, 60))]
    source = f"{sources[0]}*0.7,{sources[1]}*0.3"
    return DataConfig(source, tokenizer_path, 32, val_fraction=0.2, cache_dir=str(tmp_path / "cache"))


def test_a_mixture_describes_itself(config):
    """Each source with its entry of the cache, which a run on it alone shares; sums; what repeats is said."""
    dataset = prepare(config, progress=False)
    about, alone = (
        dataset.describe(),
        prepare(replace(config, source=config.source[: config.source.index("*")])),
    )
    assert about["source"] == config.source and len(about["sources"]) == 2
    assert about["train"]["documents"] + about["val"]["documents"] == 180
    assert about["sources"][0]["cache"] == alone.describe()["cache"]
    assert about["content_hash"] == content_hashes(config)["content_hash"]
    other = replace(config, source=config.source.replace("0.3", "0.4"))
    for change in (other, replace(config, seq_len=16)):
        assert prepare(change, progress=False).fingerprint != dataset.fingerprint
    few = len(dataset.parts[1].train)
    assert dataset.repetitions(few) is None
    blocks = list(dataset.train)  # to its end, and no further
    assert torch.equal(torch.stack(blocks), dataset.train.gather(range(len(dataset.train))))
    assert f"{config.source.split(',')[1][:-4]} 3 times" in dataset.repetitions(10 * few)
    assert availability(config).count("found") == 2
    assert availability(replace(config, source=config.source + ",no.jsonl*1")).startswith("NOT FOUND")


def test_what_is_left_out_of_a_mixture_is_counted(config, write_jsonl, texts):
    """Guards: `lingpt data` that named the empty documents and the copies of the first source alone."""
    sources = [write_jsonl([*texts(30, n), *[""] * n, *texts(n, n)], f"e{n}.jsonl") for n in (1, 2)]
    mixture = replace(config, source=f"{sources[0]}*0.5,{sources[1]}*0.5", dedup=True)
    about = prepare(mixture, progress=False).describe()
    assert about["empty_documents"] == {"train": 3, "val": 0} and about["dropped_duplicates"] == 3


def test_packed_documents_of_a_mixture(config):
    """Each sequence is that of its source, with its borders; how many of these there are depends on
    the number of sequences alone."""
    dataset = prepare(replace(config, packing="documents"), progress=False)
    batches, mixture = BatchSampler(dataset.train, 0, 6), dataset.train
    mixture.parts[1].most += 1  # as of shorter documents than the first's
    for positions in (range(6), range(1, 6, 2), [2]):
        batch = batches.get(3, positions)
        sources, numbers = mixture.split(np.array(batches.indices(3))[list(positions)])
        borders = []
        for row, (i, number) in enumerate(zip(sources, numbers, strict=True)):
            alone = mixture.parts[i].gather([number])
            assert torch.equal(alone.idx[0], batch.idx[row]) and torch.equal(
                alone.targets[0], batch.targets[row]
            )
            borders += [row * 32 + int(border) for border in alone.cu_seqlens if border < 32]
        found = batch.cu_seqlens.tolist()
        assert batch.cu_seqlens.dtype == torch.int32
        assert found[: len(borders)] == borders and set(found[len(borders) :]) == {32 * len(batch.idx)}
        assert len(found) == 1 + len(batch.idx) * max(part.most for part in mixture.parts)
    assert batches.num_targets(3) == (batches.get(3, range(6)).targets >= 0).sum()


def test_texts_to_validate_on_have_names(config, write_jsonl, texts):
    """Each is a whole source, in an entry of its own; a mixture is validated on its val_source."""
    val = str(write_jsonl(texts(20, seed=3), "v.jsonl"))
    config = replace(config, val_source=val, val_sources=f"third={val}, embedded")
    dataset = prepare(config, progress=False)
    assert list(dataset.val_sources) == ["third", "embedded"]
    assert torch.equal(dataset.val_sources["third"][0], dataset.val[0]) and isinstance(
        dataset.val, PackedDataset
    )
    records = dataset.describe()["val_sources"]
    alone = prepare(replace(config, source=config.source[: config.source.index("*")]), progress=False)
    assert dataset.describe()["val"] == alone.describe()["val"]  # once, not for each source
    assert records["third"]["tokens"] == dataset.val.stream_length and len(records["embedded"]["entry"]) == 32
    with pytest.raises(UserError, match="names 'a' twice: give each text its own name"):
        prepare(replace(config, val_sources=f"a={val},a=embedded"), progress=False)
    for text in ("a=", f"a={val},"):  # the folder that the command runs in
        with pytest.raises(UserError, match=r"--data\.val_sources has no source in "):
            prepare(replace(config, val_sources=text), progress=False)
    few = str(write_jsonl(["few"], "few.jsonl"))
    with pytest.raises(UserError, match=rf"^{few} has \d tokens, too few .*: give more text, or lower"):
        prepare(replace(config, val_sources=f"a={few}"), progress=False)
    hive = replace(
        config, val_sources="en = text/lang=en/v.jsonl, text/wiki"
    )  # guards: en=text/lang as a name
    assert val_sources(hive) == {"en": "text/lang=en/v.jsonl", "text/wiki": "text/wiki"}
    assert availability(replace(config, val_sources="a=no.jsonl")).startswith(
        "NOT FOUND: there are no documents"
    )
