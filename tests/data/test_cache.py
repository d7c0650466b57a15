"""The token cache: what is in it, when it is found again, and that no half of one ever passes for whole."""

import errno
import io
import json
import os
import pickle
import shutil
import signal
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tqdm import tqdm

from lingpt.common.errors import UserError
from lingpt.data import DataConfig, Tokenizer, cache, prepare
from lingpt.data.cache import split_by_content
from lingpt.data.file_hashes import file_hashes
from lingpt.data.files import whole_corpus
from lingpt.data.tokens import Encoded


@pytest.fixture
def config(write_jsonl, texts, tokenizer_path, tmp_path: Path) -> DataConfig:
    """400 documents, and a validation file of 5."""
    source, val = write_jsonl(texts(400), "train.jsonl"), write_jsonl(texts(5, seed=1), "val.jsonl")
    return DataConfig(
        str(source), tokenizer_path, seq_len=32, val_source=str(val), cache_dir=str(tmp_path / "cache")
    )


def entries(config: DataConfig) -> list[str]:
    """What the cache's folder shows: entries, and anything left over, but no locks."""
    folder = Path(config.cache_dir) / "tokens"
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock")) if folder.exists() else []


PREPARE = """
import sys
from lingpt.common.errors import UserError
from lingpt.data import DataConfig, cache, prepare
source, tokenizer, val, folder = sys.argv[1:]
config = DataConfig(source, tokenizer, 32, val_source=val, cache_dir=folder)
"""


def arguments(config: DataConfig) -> list[str]:
    return [config.source, config.tokenizer, config.val_source, config.cache_dir]


@pytest.mark.parametrize("rows", [61, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_stream_is_every_document_and_its_end(config, texts, tokenizer, monkeypatch, rows, workers):
    """Documents in order, each tokenised as a whole, whatever the threads and wherever record batches end."""
    monkeypatch.setattr("lingpt.data.stream.ROWS", rows)
    monkeypatch.setattr("lingpt.data.tokens.BATCH_CHARACTERS", 1000)
    config.num_workers = workers
    dataset = prepare(config, progress=False)
    expected = [i for text in texts(400) for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert dataset.train.stream(0, 10**9).tolist() == expected
    assert dataset.train.stream(50, 60).tolist() == expected[50:60]
    assert dataset.parts[0].cache.manifest["train"] == {
        "documents": 400,
        "tokens": len(expected),
        "bytes": sum(len(t.encode()) for t in texts(400)),
    }


def test_blocks_make_every_token_a_target_once(config):
    """A block's last token is the next one's first; only a remainder shorter than a block is unused."""
    train = prepare(config, progress=False).train
    stream = train.stream(0, 10**9)
    assert len(train) == (len(stream) - 1) // 32
    assert train[0].shape == (33,) and train[0].dtype.is_signed and train[0].element_size() == 8
    targets = np.concatenate([train[i][1:].numpy() for i in range(len(train))])
    assert np.array_equal(targets, stream[1 : 1 + 32 * len(train)])
    assert all(train[i][-1] == train[i + 1][0] for i in range(len(train) - 1))
    assert train.gather([3, 0, 3]).tolist() == [train[i].tolist() for i in (3, 0, 3)]
    with pytest.raises(IndexError):
        train[len(train)]


def test_blocks_pickle_as_a_path(config):
    """Worker processes map the file again instead of receiving its content."""
    train = prepare(config, progress=False).train
    pickled = pickle.dumps(train)
    assert len(pickled) < 1000 and pickle.loads(pickled)[5].tolist() == train[5].tolist()


def test_it_is_a_memory_mapped_datasets_table(config):
    """`datasets` opens it, in two bytes a token; reading blocks copies nothing beforehand."""
    import datasets

    train = prepare(config, progress=False).train
    table = datasets.Dataset.from_file(str(train.path))
    assert table.features == {"token": datasets.Value("uint16")} and len(table) == train.stream_length
    assert not train._chunks[0].flags.owndata and not train._chunks[0].flags.writeable


def test_the_same_data_is_tokenised_once(config, monkeypatch):
    """A second run, another sequence length and a copied file find the same entry; no document is read."""
    first = prepare(config, progress=False)
    monkeypatch.setattr("lingpt.data.cache.encode_documents", lambda *_: pytest.fail("tokenised again"))
    assert prepare(config, progress=False).fingerprint == first.fingerprint
    config.seq_len = 64
    longer = prepare(config, progress=False)
    assert longer.parts[0].cache.folder == first.parts[0].cache.folder
    assert longer.fingerprint != first.fingerprint
    copy = Path(config.source).with_name("copy.jsonl")
    copy.write_bytes(Path(config.source).read_bytes())
    config.source, config.seq_len = str(copy), 32
    again = prepare(config, progress=False)
    assert again.fingerprint == first.fingerprint and again.describe()["source"] == str(copy)


@pytest.mark.parametrize(
    "change", ["a document", "the tokenizer", "the validation", "the split", "a share", "the format"]
)
def test_what_decides_the_tokens_makes_another_entry(
    config, write_jsonl, texts, tokenizer, monkeypatch, change
):
    """Nothing stale is ever read."""
    if change == "a share":
        config.val_source = None
    before = prepare(config, progress=False).fingerprint
    if change == "a document":
        write_jsonl([*texts(399), "other"], "train.jsonl")
    elif change == "the validation":
        write_jsonl(texts(5, seed=2), "val.jsonl")
    elif change == "the tokenizer":
        raw = tokenizers.Tokenizer.from_str(tokenizer.raw.to_str())
        raw.add_tokens(["river"])
        config.tokenizer = str(Tokenizer(raw, "").save(Path(config.cache_dir) / "other"))
    elif change == "the split":
        config.val_source = None
    elif change == "the format":
        monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    else:
        config.val_fraction *= 2
    assert prepare(config, progress=False).fingerprint != before
    assert len(entries(config)) == 2


def test_the_fingerprint_is_the_same_for_ever(config, write_jsonl, monkeypatch):
    """Golden: with another one, what was trained before could not be resumed."""
    monkeypatch.setattr(Tokenizer, "hash", "b")  # of any version of `tokenizers`
    source, val = (str(write_jsonl([f"{n} rain and snow"] * 9, f"{n}.jsonl")) for n in ("a", "b"))
    config = replace(config, source=source, val_source=val, seq_len=8)
    other = write_jsonl(["hail and fog"] * 9, "c.jsonl")
    changes = {}, {"packing": "documents"}, {"stream": True}, {"source": f"{source}*2,{other}*1"}
    found = [prepare(replace(config, **change), progress=False).fingerprint[:9] for change in changes]
    assert found == ["19decc2f7", "80b1932bd", "35e5d16b6", "4afa04b77"]


def test_entries_are_found_again_for_ever():
    """Golden: with other names or checksums all users would tokenise again, if `FORMAT` need not change."""
    corpus, tokenizer = SimpleNamespace(content_hash="a"), SimpleNamespace(hash="b")
    names = [
        cache.entry_folder(corpus, tokenizer, Path(), fraction, dedup).name
        for fraction, dedup in ((None, False), (0.005, False), (None, True))
    ]
    assert names == [
        "e516f4597a1d3b2af125c021030ef917",
        "29f0f8bc4b8b84823790a10093f7f321",
        "92d9352e81e15fe5084b5690d638a4ce",
    ]
    assert cache._checksum({"train": {"tokens": 1}, "format": 1}, {"val": [2], "train": [3]}) == 2636206512


def test_what_killed_processes_left_of_an_entry_is_removed(config):
    """And nothing of another one, which may be at work."""
    folder = prepare(config, progress=False).parts[0].cache.folder
    shutil.rmtree(folder)
    for name in (folder.name, "other"):
        (folder.parent / f".{name}.0000.partial").mkdir()
    prepare(config, progress=False)
    assert entries(config) == [".other.0000.partial", folder.name]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while tokenising", "before the rename"])
def test_a_killed_preparation_leaves_nothing_that_passes_for_whole(config, start_script, moment):
    """SIGKILL at the worst moments; the next run starts over, and clears what is left."""
    stop = {
        "while tokenising": (
            "real = cache.encode_documents\n"
            "def slow(*args):\n"
            "    for n, document in enumerate(real(*args)):\n"
            "        if n == 100: print('now', flush=True); import time; time.sleep(60)\n"
            "        yield document\n"
            "cache.encode_documents = slow\n"
        ),
        "before the rename": (
            "from lingpt.common import files\n"
            "def stop(path):\n"
            "    if 'tokens' in path.parts: print('now', flush=True); import time; time.sleep(60)\n"
            "files.sync = stop\n"
        ),
    }[moment]
    process = start_script(PREPARE + stop + "prepare(config)", *arguments(config))
    process.wait_for(lambda: "now\n" in process.output())
    process.send(signal.SIGKILL)
    assert process.end().code == -signal.SIGKILL, process.output()
    (left_over,) = entries(config)
    assert left_over.startswith(".")
    dataset = prepare(config, progress=False)
    assert entries(config) == [dataset.parts[0].cache.folder.name]
    assert dataset.parts[0].cache.manifest["train"]["documents"] == 400


@pytest.mark.slow
def test_two_processes_at_once_do_the_work_once(config, start_script):
    """The ranks of a run, or two runs: one tokenises, the others wait and read."""
    code = PREPARE + (
        "made, real = [], cache._make\n"
        "cache._make = lambda *args: (made.append(1), real(*args))\n"
        "print(prepare(config, progress=False).fingerprint, len(made))"
    )
    processes = [start_script(code, *arguments(config)) for _ in range(2)]
    outcomes = [process.end() for process in processes]
    assert [outcome.code for outcome in outcomes] == [0, 0], "\n".join(one.output for one in outcomes)
    results = [outcome.output.splitlines()[-1].split() for outcome in outcomes]
    assert len({fingerprint for fingerprint, _ in results}) == 1
    assert sorted(made for _, made in results) == ["0", "1"]
    assert len(entries(config)) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_locks_is_said_and_the_first_entry_stays(config, monkeypatch, capsys, number):
    """Guards: a wait without end, or advice to free some space. Here another process is first to finish, and
    a third is still at work: its folder is left alone."""

    def flock(*_):
        for lock in Path(config.cache_dir).glob("tokens/*.lock"):
            lock.with_suffix(".third.partial").mkdir(exist_ok=True)
        raise OSError(number, os.strerror(number))

    def make_twice(folder, *args):
        make(folder, *args)
        first.append((folder / "manifest.json").stat())
        make(folder, *args)

    first, make = [], cache._make
    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(cache, "_make", make_twice)
    folder = prepare(config).parts[0].cache.folder
    said = capsys.readouterr().err
    assert f"knows no locks ({os.strerror(number)})" in said and "lingpt data" in said
    assert entries(config) == [f".{folder.name}.third.partial", folder.name]
    last = (folder / "manifest.json").stat()  # but for the time of reading it
    assert (last.st_ino, last.st_mtime_ns) == (first[0].st_ino, first[0].st_mtime_ns)


@pytest.mark.slow
def test_whoever_waits_says_for_what_and_goes_on_when_the_holder_dies(config, start_script):
    """Guards: a wait for a process that is gone, and one of which nobody knows what holds it."""
    code = PREPARE + (
        "import time\n"
        "def hold(*args): print('held', flush=True); time.sleep(60)\n"
        "cache._make = hold\nprepare(config)"
    )
    holder = start_script(code, *arguments(config))
    holder.wait_for(lambda: "held\n" in holder.output())
    waiting = start_script(PREPARE + "prepare(config)", *arguments(config))
    (lock,) = (Path(config.cache_dir) / "tokens").glob("*.lock")
    line = f"waiting for another process that prepares the same data and holds {lock}\n"
    waiting.wait_for(lambda: waiting.output().startswith(line))
    holder.send(signal.SIGKILL)
    assert waiting.runs() and holder.end().code == -signal.SIGKILL, waiting.output()
    outcome = waiting.end()
    assert outcome.code == 0 and outcome.output.startswith(line), outcome.output
    assert entries(config) == [lock.name[1:-5]]


def test_a_full_disk_is_one_line(config, start_script):
    """Files may not grow beyond 64 KB: one clear line, and nothing stays behind."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        + PREPARE
        + "try: prepare(config)\nexcept UserError as error: print(error)"
    )
    out = start_script(code, *arguments(config)).end().output
    assert out.startswith(f"cannot write to {config.cache_dir}") and "--data.cache_dir" in out
    assert out.count("\n") == 1 and entries(config) == []


def test_a_cache_that_cannot_be_written_is_one_line(config, tmp_path: Path):
    """Here the folder's name belongs to a file."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*cache.*--data\.cache_dir"):
        prepare(config, progress=False)


def test_a_bad_line_leaves_nothing(config):
    """The line is named after most of the work is done."""
    with open(config.source, "a") as file:
        file.write("oops\n")
    with pytest.raises(UserError, match=r"train\.jsonl, line 401 is not JSON"):
        prepare(config, progress=False)
    assert entries(config) == []


@pytest.mark.parametrize("name", ["train.jsonl", "val.jsonl"])
def test_a_source_that_changes_after_it_is_hashed_leaves_nothing(config, monkeypatch, name):
    """Guards: an entry of other documents than those whose hash names it."""
    path = Path(config.source).with_name(name)

    def changed_after(*arguments):
        hashes = file_hashes(*arguments)
        path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
        return hashes

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("lingpt.data.files.file_hashes", changed_after)
        with pytest.raises(UserError, match=rf"{name} changed after it was hashed"):
            prepare(config, progress=False)
        with pytest.raises(UserError, match=rf"{name} changed after it was hashed"):
            list(whole_corpus(str(path), (), None, "text").train.read())  # of --data.val_sources
    assert entries(config) == []
    assert prepare(config, progress=False).parts[0].cache.manifest[path.stem]["documents"] in (402, 7)


def test_an_interruption_leaves_nothing(config, monkeypatch):
    """Ctrl-C while tokenising."""

    def interrupted(documents, *_):
        yield Encoded(np.zeros(3, np.uint16), 3, 0, 0)
        raise KeyboardInterrupt

    monkeypatch.setattr("lingpt.data.cache.encode_documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, progress=False)
    assert entries(config) == []


def test_a_flipped_bit_is_noticed_when_its_tokens_are_read(config, monkeypatch):
    """In the tokens, or in Arrow's headers between them: the folder to delete, once; or all is as it was."""
    monkeypatch.setattr("lingpt.data.stream.ROWS", 1000)
    dataset = prepare(config, progress=False)
    folder, whole = dataset.parts[0].cache.folder, dataset.train.stream(0, 10**9)
    content, noticed = (folder / "train.arrow").read_bytes(), 0
    for where in range(700, 8700, 500):
        harmed = bytearray(content)
        harmed[where] ^= 16
        (folder / "train.arrow").write_bytes(harmed)
        try:
            damaged = prepare(config, progress=False).train
            assert np.array_equal(damaged.stream(0, 10**9), whole), "padding"
        except UserError as error:
            assert str(error).endswith(f"delete {folder} and run again") and "\n" not in str(error)
            noticed += 1
    assert noticed > 8


def test_a_record_batch_is_checked_once_and_only_when_it_is_read(config, monkeypatch):
    """What is damaged elsewhere stops nobody who does not read it; a checked batch costs nothing again."""
    monkeypatch.setattr("lingpt.data.stream.ROWS", 1000)
    dataset = prepare(config, progress=False)
    content = bytearray(dataset.train.path.read_bytes())
    last = content.rindex(
        dataset.train.stream(dataset.train.stream_length - 20, 10**9).astype("<u2").tobytes()
    )
    content[last] ^= 1
    dataset.train.path.write_bytes(content)
    train, checked = prepare(config, progress=False).train, []
    real = zlib.crc32
    monkeypatch.setattr("lingpt.data.stream.zlib.crc32", lambda data: (checked.append(1), real(data))[1])
    for _ in range(3):
        train.stream(100, 200)
    assert checked == [1]
    again = pickle.loads(pickle.dumps(train))
    fault = rf"train.arrow is damaged \(its tokens \d+000 to {train.stream_length - 1} are not"
    for blocks in (train, again):
        with pytest.raises(UserError, match=fault):
            blocks.stream(0, 10**9)


def test_a_damaged_manifest_is_named(config):
    """Also one that is whole but for a digit, and one without a checksum, as version 0.1 wrote it."""
    folder = prepare(config, progress=False).parts[0].cache.folder
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    other = manifest | {"val": manifest["val"] | {"bytes": manifest["val"]["bytes"] + 1}}
    sums = manifest | {"checksums": {"train": [1], "val": [1]}}
    unchecked = {key: value for key, value in manifest.items() if key != "checksum"}
    harmed = [b"", b"{", b"[]", b"{}", b'{"train": 3}', b"\xff\xfe"]
    for content in (*harmed, *(json.dumps(one).encode() for one in (other, sums, unchecked))):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"delete {folder} and run again"):
            prepare(config, progress=False)
    path.unlink()
    with pytest.raises(UserError, match=f"delete {folder} and run again"):
        prepare(config, progress=False)


@pytest.mark.parametrize("where", [".", "..", "train.arrow"])
def test_a_cache_that_others_can_write_is_refused(config, where):
    """Guards: tokens that anyone on the machine could have put there; and files that others may read or write
    against the user's umask."""
    before = os.umask(0o027)
    try:
        folder = prepare(config, progress=False).parts[0].cache.folder
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes.pop(folder.name) == 0o750 and set(modes.values()) == {0o640}
    path = (folder / where).resolve()
    path.chmod(0o777)
    with pytest.raises(UserError, match=f"others can write to {path}, .* --data.cache_dir"):
        prepare(config, progress=False)
    path.chmod(0o755)
    if os.geteuid() == 0:  # who alone can give a file away
        os.chown(path, 12345, -1)
        with pytest.raises(UserError, match=f"others can write to {path}, "):
            prepare(config, progress=False)


def test_empty_documents_are_skipped_and_counted_once(write_jsonl, texts, tokenizer_path, tmp_path, capsys):
    """One line in a million must not stop a day of tokenising; what is cached is the same without them."""
    source = write_jsonl(["", *texts(40), " \n", *texts(40, seed=1)])
    config = DataConfig(str(source), tokenizer_path, 32, cache_dir=str(tmp_path / "cache"))
    dataset = prepare(config)
    assert capsys.readouterr().err.strip() == f"{source}: 2 empty document(s) skipped"
    assert dataset.describe()["empty_documents"] == {"train": 2, "val": 0}
    config.source = str(write_jsonl([*texts(40), *texts(40, seed=1)], "without.jsonl"))
    without = prepare(config)
    assert capsys.readouterr().err == ""
    assert without.train.stream(0, 10**9).tolist() == dataset.train.stream(0, 10**9).tolist()


def test_the_bars_end_at_their_totals(config, write_jsonl, texts, monkeypatch):
    """Documents without a text count."""
    write_jsonl(["", *texts(400), " "], "train.jsonl")
    bars = []

    def shown(**options):
        bars.append(tqdm(**options | {"disable": False, "file": io.StringIO()}))
        return bars[-1]

    monkeypatch.setattr(cache, "tqdm", shown)
    prepare(config)
    assert [bar.n for bar in bars] == [bar.total for bar in bars]
    sizes = [Path(source).stat().st_size for source in (config.val_source, config.source)]
    assert [bar.total for bar in bars] == sizes


def test_without_progress_nothing_is_said(config, write_jsonl, texts, monkeypatch, capsys):
    """Neither of empty documents, nor of files that are not read, nor of a disk without locks."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    write_jsonl([], "c/not-read.csv")
    config.source = str(write_jsonl(["", *texts(40)], "c/train.jsonl").parent)
    prepare(config, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["cut off", "empty", "other tokens"])
def test_a_damaged_entry_is_named(config, damage):
    """A cache that someone copied badly: which folder to delete."""
    folder = prepare(config, progress=False).parts[0].cache.folder
    content = (folder / "train.arrow").read_bytes()
    harmed = {"cut off": content[:1000], "empty": b"", "other tokens": (folder / "val.arrow").read_bytes()}
    (folder / "train.arrow").write_bytes(harmed[damage])
    with pytest.raises(UserError, match=f"delete {folder} and run again"):
        prepare(config, progress=False)


class Sink:
    """Stands in for a StreamWriter: remembers the digests it was given."""

    def __init__(self) -> None:
        self.digests: list[int] = []

    @property
    def documents(self) -> int:
        return len(self.digests)

    def add(self, document: Encoded) -> None:
        self.digests.append(document.digest)


def split(digests: list[int], fraction: float | None) -> tuple[list[int], list[int]]:
    train, val = Sink(), Sink()
    split_by_content((Encoded(np.zeros(1), 1, d, 0) for d in digests), fraction, train, val)
    return train.digests, val.digests


def test_the_split_depends_on_content_alone():
    """Order and neighbours play no part; every document lands on exactly one side; equal ones on the same."""
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 2**64, 5000, dtype=np.uint64).tolist()
    train, val = split(digests + digests[:100], 0.01)
    assert sorted(train + val) == sorted(digests + digests[:100]) and not set(train) & set(val)
    assert set(val) == {d for d in digests if d < 0.01 * 2**64} and 30 <= len(val) <= 75
    assert set(split(digests[::-1], 0.01)[1]) == set(val)


@pytest.mark.parametrize("digests", [[5, 3, 9], [9, 5, 3], [3, 5, 9], [5, 3, 9, 3]])
def test_at_least_one_document_is_held_out(digests):
    """A small corpus has a validation split too: the text of the lowest hash, however often it comes."""
    train, val = split([d << 60 for d in digests], 1e-9)
    assert val == [3 << 60] * digests.count(3) and sorted(train) == [5 << 60, 9 << 60]


def test_with_its_own_validation_all_is_for_training():
    assert split([5, 3, 9], None) == ([5, 3, 9], [])


def test_too_few_documents_to_split(write_jsonl, tokenizer_path, tmp_path: Path):
    """One document cannot be both; the message says what to give."""
    config = DataConfig(str(write_jsonl(["only one"])), tokenizer_path, 4, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"holds only 1 document, too few.*--data.val_source"):
        prepare(config, progress=False)


def test_a_fraction_that_leaves_nothing_to_train_on_is_named(write_jsonl, tokenizer_path, tmp_path: Path):
    """Guards: "too few documents" of a corpus that was all held out."""
    source, cache = str(write_jsonl(["one", "two", "three"])), str(tmp_path / "cache")
    config = DataConfig(source, tokenizer_path, 4, val_fraction=0.999999, cache_dir=cache)
    with pytest.raises(UserError, match=r"all 3 documents of .* held out.*lower --data.val_fraction"):
        prepare(config, progress=False)


def test_equal_documents_cannot_be_divided(write_jsonl, tokenizer_path, tmp_path: Path):
    """Guards: the advice to lower --data.val_fraction alone, which cannot help."""
    source, cache = str(write_jsonl(["one"] * 3)), str(tmp_path / "cache")
    with pytest.raises(UserError, match=r"all 3 documents .* if they are equal, .* --data\.val_source"):
        prepare(DataConfig(source, tokenizer_path, 4, cache_dir=cache), progress=False)


@pytest.mark.parametrize(("train", "dedup"), [(["", " "], False), (["one", "two"], True)])
def test_nothing_to_train_on_beside_a_validation_text(write_jsonl, tokenizer_path, tmp_path, train, dedup):
    """Guards: the advice to lower --data.val_fraction, which is not used then."""
    source, val = (str(write_jsonl(t, n)) for t, n in ((train, "t.jsonl"), (["one", "two"], "v.jsonl")))
    paths = {"val_source": val, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"t\.jsonl has no document to train on, .*: give more text"):
        prepare(DataConfig(source, tokenizer_path, 4, dedup=dedup, **paths), progress=False)


def test_a_validation_text_without_documents_is_named(write_jsonl, texts, tokenizer_path, tmp_path: Path):
    """Guards: an entry that is written for nothing, and advice to raise --data.val_fraction."""
    source, val = str(write_jsonl(texts(9))), str(write_jsonl([" "], "v.jsonl"))
    config = DataConfig(source, tokenizer_path, 4, val_source=val, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"the validation files of .* hold no documents: give others as"):
        prepare(config, progress=False)
    assert entries(config) == []


def test_no_documents(write_jsonl, tokenizer_path, tmp_path: Path):
    """A file of blank lines is a path with no documents."""
    config = DataConfig(str(write_jsonl([])), tokenizer_path, 4, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="holds no documents"):
        prepare(config, progress=False)
