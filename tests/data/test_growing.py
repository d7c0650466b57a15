"""`--data.stream`: the same samples whether or not the text has been tokenised yet."""

import os
import shutil
import signal
import time
import zlib
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe, get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.files import new_folder
from lingpt.common.parent import STOP_SIGNALS
from lingpt.data import BatchSampler, DataConfig, Dataset, growing, prepare, stream
from lingpt.data.cache import TokenCache


@pytest.fixture
def config(write_jsonl, texts, tokenizer_path, tmp_path: Path, monkeypatch) -> DataConfig:
    monkeypatch.setattr(growing, "WINDOW", 32 * 50)
    paths = {
        "val_source": str(write_jsonl(texts(9, seed=1), "v.jsonl")),
        "cache_dir": str(tmp_path / "cache"),
    }
    return DataConfig(str(write_jsonl(texts(300))), tokenizer_path, 32, stream=True, **paths)


@pytest.fixture
def whole(config, monkeypatch) -> Dataset:
    """The text tokenised, in small record batches; what is streamed then starts no process."""
    monkeypatch.setattr(stream, "ROWS", 512)
    monkeypatch.setattr(growing, "ROWS", 512)
    monkeypatch.setattr(growing.GrowingDataset, "_start", lambda self: None)
    return prepare(replace(config, stream=False), progress=False)


@pytest.mark.slow
def test_samples_are_those_of_the_finished_cache(config, monkeypatch):
    """Before, while and after the text is tokenised, and over the end of the first epoch; each block once an
    epoch, those of the first window before others. The second start tokenises nothing."""
    first = prepare(config, progress=False)
    assert first.describe()["train"] == {}
    batches = BatchSampler(first.train, 5, 8)
    early = batches.get(0, range(8))
    n = len(first.train)
    late = [batches.get(step, range(8)) for step in range(3 * n // 8)]
    monkeypatch.setattr(growing, "get_context", lambda _: pytest.fail("tokenised again"))
    second = prepare(config, progress=False)
    assert second.fingerprint == first.fingerprint and second.describe()["train"]["blocks"] == n
    again = BatchSampler(second.train, 5, 8)
    for step in reversed(range(3 * n // 8)):
        assert torch.equal(again.get(step, range(8)), late[step])
    assert torch.equal(late[0], early)
    order = np.concatenate([again.indices(step) for step in range(3 * n // 8)])
    assert sorted(order[:n]) == sorted(order[n : 2 * n]) == list(range(n))
    assert sorted(order[:50]) == list(range(50)) and order[:50].tolist() != list(range(50))
    assert first.val.stream(0, 10**6).tolist() == second.val.stream(0, 10**6).tolist()
    plain = prepare(replace(config, stream=False), progress=False)
    assert plain.train.stream(0, 10**6).tolist() == second.train.stream(0, 10**6).tolist()
    assert plain.fingerprint != second.fingerprint


def test_the_order_is_the_same_for_ever(tmp_path: Path):
    """Golden, over windows and epochs: a changed order would make a resumed run see other data in silence."""
    dataset = growing.GrowingDataset(tmp_path, 4096, None, None, [])
    dataset.stream_length, dataset._whole = 10**8, True
    blocks = dataset.sample(np.array([0, 1, 8191, 8192, 24_413, 24_414]), seed=7)
    assert blocks.tolist() == [7400, 49, 4925, 9785, 16490, 3164]


def test_a_mixture_of_which_one_source_is_cached_describes_itself(config, write_jsonl, texts, monkeypatch):
    """Guards: a KeyError at the start of such a run; a record with the validation text's empty documents as
    those of the text to train on."""
    write_jsonl(["", *texts(9, seed=1)], "v.jsonl")
    prepare(replace(config, stream=False), progress=False)
    monkeypatch.setattr(growing.GrowingDataset, "_start", lambda self: None)
    other = write_jsonl(texts(30, seed=2), "other.jsonl")
    dataset = prepare(replace(config, source=f"{config.source}*0.5,{other}*0.5"), progress=False)
    about = dataset.describe()
    assert about["train"] == {} and [bool(one["train"]) for one in about["sources"]] == [True, False]
    assert [one["empty_documents"] for one in about["sources"]] == [{"train": 0, "val": 1}] * 2


class Dead:
    """A process that has not begun, or has ended."""

    def __init__(self, alive: bool) -> None:
        self.alive = alive

    def is_alive(self) -> bool:
        return self.alive


def test_what_is_written_is_read_and_what_a_killed_process_left_is_not_taken_for_whole(whole):
    """Record batches that are there in full, each checked against its checksum and once; a length is not
    known, nor whether the last token has a next one."""
    tokens, folder = whole.train.stream(0, 10**9), whole.parts[0].cache.folder
    content = (folder / "train.arrow").read_bytes()
    left = folder.rename(folder.with_name(f".{folder.name}.0000.partial"))
    dataset = growing.GrowingDataset(folder, 32, lambda: TokenCache(folder).blocks("train", 32), None, [])
    process = dataset._process = Dead(True)
    dataset._errors, errors = Pipe(duplex=False)
    errors.close()  # as the end of a killed process is
    for share in (1, 2):
        (left / "train.arrow").write_bytes(content[: len(content) * share // 3])
        stop = len(tokens) * share // 4
        assert dataset.stream(0, stop).tolist() == tokens[:stop].tolist() and not dataset._whole
    process.alive = False
    dataset._wait_for(dataset.stream_length // 32 - 1)
    with pytest.raises(UserError, match="has ended"):
        dataset._wait_for(dataset.stream_length // 32)
    with pytest.raises(UserError, match=r"the process that tokenises has ended \(killed.*: start again"):
        len(dataset)
    harmed = bytearray(content)
    harmed[content.index(tokens[512 * 3 : 512 * 3 + 64].astype(np.uint16).tobytes()) + 1] ^= 255
    (left / "train.arrow").write_bytes(harmed)
    other = growing.GrowingDataset(folder, 32, None, None, [])
    other._map_more()
    assert other.stream_length == 512 * 3
    shutil.rmtree(left)


def test_two_threads_that_wait_map_a_record_batch_once(whole, monkeypatch):
    """Guards: tokens twice, and all later ones at other places: the step counts its targets while the next
    ones are read ahead, and both wait for the same window."""
    tokens, folder = whole.train.stream(0, 10**9), whole.parts[0].cache.folder
    folder.rename(folder.with_name(f".{folder.name}.0000.partial"))
    dataset = growing.GrowingDataset(folder, 32, None, None, [])
    dataset._process = Dead(True)

    def slow(data) -> int:
        found = zlib.crc32(data)
        time.sleep(0.01)  # as it lets other threads run
        return found

    monkeypatch.setattr(growing, "zlib", SimpleNamespace(crc32=slow))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: dataset.stream(0, 512 * 8), range(2)))
    assert all(x.tolist() == tokens[: 512 * 8].tolist() for x in found)


def test_another_thread_may_read_while_the_finished_entry_is_taken(whole, monkeypatch):
    """Guards: an AttributeError that ends a run at the moment when its text is tokenised. Here the other one
    reads what is there whenever a part of the dataset has been replaced."""
    tokens, folder = whole.train.stream(0, 10**9), whole.parts[0].cache.folder
    partial = folder.rename(folder.with_name(f".{folder.name}.0000.partial"))
    dataset = growing.GrowingDataset(folder, 32, lambda: TokenCache(folder).blocks("train", 32), None, [])
    dataset._process = SimpleNamespace(is_alive=lambda: not partial.rename(folder))  # it has just ended
    assert dataset.stream(0, 64).tolist() == tokens[:64].tolist()
    reads = []

    def set_and_read(self, name, value) -> None:
        object.__setattr__(self, name, value)
        reads.append(self.stream(self.stream_length - 128, self.stream_length - 96))

    monkeypatch.setattr(growing.GrowingDataset, "__setattr__", set_and_read)
    assert len(dataset) == len(whole.train) and len(reads) == 5
    assert reads[-1].tolist() == tokens[-128:-96].tolist()


def test_two_threads_that_wait_are_told_the_same(config, monkeypatch):
    """Guards: "killed, perhaps for its memory" for the one that asked second, of a text with a fault."""
    monkeypatch.setattr(growing.GrowingDataset, "_start", lambda self: None)
    dataset = prepare(config, progress=False).train
    dataset._process = Dead(False)
    dataset._errors, errors = Pipe(duplex=False)
    errors.send("line 301 has no text")
    errors.close()
    for wait in (lambda: len(dataset), lambda: dataset.sample(np.arange(8), 0)):
        with pytest.raises(UserError, match=r"has ended \(line 301 has no text\): start again"):
            wait()


def test_no_sample_is_waited_for_once_it_is_closed(config, monkeypatch):
    """Guards: the end of a run that reads ahead, or a Ctrl-C, which took until the next window was there."""
    monkeypatch.setattr(growing.GrowingDataset, "_start", lambda self: None)
    dataset = prepare(config, progress=False)
    process = dataset.train._process = Dead(True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(dataset.train.sample, np.arange(8), 0)
        dataset.close()
        try:
            assert isinstance(waiting.exception(timeout=20), CancelledError)
        finally:
            process.alive = False


def test_other_tokens_are_waited_for_when_it_is_closed(whole):
    """Guards: a CancelledError at the end of a run, whose report counts the text's bigrams."""
    tokens, folder = whole.train.stream(0, 64), whole.parts[0].cache.folder
    folder.rename(folder.with_name(f".{folder.name}.0000.partial"))
    dataset = growing.GrowingDataset(folder, 32, None, None, [])
    dataset._process = Dead(True)
    dataset.close()
    assert dataset.stream(0, 64).tolist() == tokens.tolist()


@pytest.mark.slow
def test_what_asks_the_run_to_stop_leaves_its_process_alone(tmp_path: Path):
    """Also while that one starts. Guards: its traceback at Ctrl-C, and a run that ends with "killed, perhaps
    for its memory" in place of a checkpoint."""
    dataset = growing.GrowingDataset(tmp_path / "entry", 32, None, time.sleep, [0.5])
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            os.kill(dataset._process.pid, number)
    dataset._process.join()
    assert dataset._process.exitcode == 0


def test_a_fault_that_nobody_waits_for_is_no_error(capfd):
    """Guards: a traceback of the other process, BrokenPipeError, after the run."""
    read, errors = Pipe(duplex=False)
    read.close()
    process = get_context("fork").Process(target=growing._in_child, args=(errors, int, ["x"]))
    process.start()
    process.join()
    assert process.exitcode == 0 and capfd.readouterr().err == ""


def test_its_process_removes_what_is_half_written_at_the_run_s_end(tmp_path: Path):
    """SIGTERM, from the run's exit or for its death, ends it as an exception does."""
    read, send = Pipe(duplex=False)

    def work() -> None:
        with new_folder(tmp_path / "entry"):
            send.send("begun")
            time.sleep(60)

    process = get_context("fork").Process(target=growing._in_child, args=(send, work, []))
    process.start()
    assert read.recv() == "begun"
    process.terminate()
    process.join()
    assert process.exitcode == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fault_of_the_text_ends_the_run_with_its_line(config, tmp_path: Path):
    """It is met by the other process, perhaps long after training began."""
    with open(config.source, "a") as file:
        file.write('{"body": "x"}\n')
    with pytest.raises(
        UserError, match=r"has ended \(.*corpus.jsonl, line 301 has no \"text\".*\): start again"
    ):
        len(prepare(config, progress=False).train)
    assert not list((tmp_path / "cache" / "tokens").glob("*/train.arrow.partial"))


def test_what_cannot_be_streamed_is_a_line(config):
    """Documents held out by their hash are known at the end alone; so is how documents are packed. Guards: a
    validation text of too few tokens that was called the train split."""
    with pytest.raises(UserError, match=r"has no validation split.*give --data.val_source, or leave out"):
        prepare(replace(config, val_source=None), progress=False)
    with pytest.raises(UserError, match=r"data.packing documents needs all of the text"):
        prepare(replace(config, packing="documents"), progress=False)
    few = r"^the val split of .*corpus\.jsonl has \d+ tokens, too few .*: give more text, or lower"
    with pytest.raises(UserError, match=few):
        prepare(replace(config, seq_len=10**5), progress=False)
