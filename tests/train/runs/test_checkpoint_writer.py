"""Checkpoints in the background: the bytes of ones written on the spot, and no failure lost or fatal."""

import contextlib
import errno
import math
import os
import shutil
import signal
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from lingpt.common.errors import UserError
from lingpt.common.run_folder import damage, read_manifest, read_metrics, valid_checkpoints, write_manifest
from lingpt.train import loop, train
from lingpt.train.runs import checkpoint, checkpoint_writer
from lingpt.train.runs.checkpoint_writer import CheckpointWriter, HostBuffers, pinned_bytes


def names(folder) -> list[str]:
    return [path.name for path in valid_checkpoints(folder)]


def test_the_bytes_are_those_of_a_checkpoint_written_on_the_spot(make_recipe, monkeypatch):
    """Training goes on while the writer sleeps: what it then writes is still of the checkpoint's own step."""
    write, step = checkpoint.save, loop.Run.step

    def slow(*args):
        time.sleep(0.5)
        return write(*args)

    trained_meanwhile = []

    def watched(self, stop):
        trained_meanwhile.append(any(t.name == "checkpoint" for t in threading.enumerate()))
        return step(self, stop)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", slow)
        patch.setattr(loop.Run, "step", watched)
        background = train(make_recipe(name="background"))
    assert any(trained_meanwhile), "training waited"

    def on_the_spot(self, state, write):
        write(state)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "submit", on_the_spot)
        spot = train(make_recipe(name="spot"))
    for number in (3, 6):
        for file in ("train_state.pt", "tokenizer.json", "config.json"):
            a, b = (folder / f"checkpoints/step-{number:08d}" / file for folder in (background, spot))
            assert a.read_bytes() == b.read_bytes(), (number, file)
        # safetensors has its metadata in any order.
        x, y = (load_file(f / f"checkpoints/step-{number:08d}/model.safetensors") for f in (background, spot))
        assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def test_one_at_a_time_and_the_last_is_waited_for(make_recipe, monkeypatch):
    write, running, most = checkpoint.save, [], []

    def slow(*args):
        running.append(1)
        most.append(len(running))
        time.sleep(0.2)
        result = write(*args)
        running.pop()
        return result

    monkeypatch.setattr(checkpoint, "save", slow)
    folder = train(make_recipe(save_interval=1, keep_checkpoints=9))
    assert most == [1] * 6 and not running
    assert names(folder) == [f"step-{n:08d}" for n in range(1, 7)]


def failing(monkeypatch, number: int, times: int) -> list[int]:
    """Makes the first `times` checkpoints fail with this error; returns the list of attempts."""
    attempts, save = [], torch.save

    def full(state, file):
        attempts.append(1)
        if len(attempts) <= times:
            save({"half": 1}, file)
            raise OSError(number, os.strerror(number))
        save(state, file)

    monkeypatch.setattr(checkpoint.torch, "save", full)
    return attempts


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE]
)
def test_a_disk_that_fails_for_a_while_ends_nothing(make_recipe, monkeypatch, capsys, number):
    """Said, the good checkpoint kept, tried again with the next one: the losses are those of any run."""
    whole = train(make_recipe(name="whole"))
    failing(monkeypatch, number, times=2)
    folder = train(make_recipe(save_interval=1, keep_checkpoints=9))
    out = capsys.readouterr().out
    assert "step 1 could not be written" in out and os.strerror(number) in out
    assert "failure 2 of 10 in a row" in out
    assert names(folder) == [f"step-{n:08d}" for n in (3, 4, 5, 6)]
    losses = [[line["loss"] for line in read_metrics(f)] for f in (whole, folder)]
    assert losses[0] == losses[1]


def long_steps(monkeypatch) -> None:
    """Each step takes as long as the writer needs, however slow this machine is."""
    step = loop.Run.step

    def slow(self, stop):
        if self.writer._thread:
            self.writer._thread.join(60)
        return step(self, stop)

    monkeypatch.setattr(loop.Run, "step", slow)


def test_it_is_tried_again_while_training_goes_on(make_recipe, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.01)
    failing(monkeypatch, errno.ENOSPC, times=3)
    long_steps(monkeypatch)
    folder = train(make_recipe(max_steps=9, save_interval=4, keep_checkpoints=9))
    assert names(folder)[0] == "step-00000004"


def test_after_ten_failures_the_run_ends_with_the_way_on(make_recipe, monkeypatch):
    """Not at the next save, which may be hours away, but within a step."""
    folder = train(make_recipe(max_steps=3))
    monkeypatch.setattr(checkpoint_writer, "RETRY_SECONDS", 0.001)
    attempts = failing(monkeypatch, errno.EROFS, times=99)
    long_steps(monkeypatch)
    line = r"step 4 could not .*Read-only file system.*step-00000003 is intact: make .* writable; .*resumes"
    with pytest.raises(UserError, match=line):
        train(make_recipe(max_steps=100_000, save_interval=4))
    assert len(attempts) == checkpoint_writer.MAX_FAILURES
    assert read_metrics(folder)[-1]["step"] <= 6
    assert names(folder) == ["step-00000003"]


def test_failures_with_a_success_between_are_not_in_a_row():
    """Guards: a run that ends at its tenth failure in weeks."""
    writer, failures = CheckpointWriter(), []
    for error in (UserError("full"), UserError("full"), None):
        writer.submit({}, Mock(side_effect=error))
        writer.wait()
        failures.append(writer.failures)
    assert failures == [1, 2, 0]


def test_the_last_checkpoint_is_tried_three_times(make_recipe, monkeypatch):
    attempts = failing(monkeypatch, errno.EIO, times=2)
    assert names(train(make_recipe(max_steps=2))) == ["step-00000002"]
    assert len(attempts) == 3


def test_a_folder_that_is_gone_is_not_made_again(make_recipe, monkeypatch, capsys):
    """An unmounted disk: a run that wrote on would fill the one below."""
    folder, step = make_recipe().run_folder, loop.Run.step

    def unmount(self, stop):
        if self.progress.step == 4:
            self.writer.wait()  # step 3's checkpoint is whole
            folder.rename(folder.with_name("unmounted"))
        return step(self, stop)

    monkeypatch.setattr(loop.Run, "step", unmount)
    with pytest.raises(UserError, match=r"step 6 could not be written \(No such file.*check the disk"):
        train(make_recipe())
    assert not folder.exists()
    assert names(folder.with_name("unmounted")) == ["step-00000003"]


def test_a_bug_in_the_writer_surfaces(make_recipe, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(make_recipe(max_steps=9))
    assert read_metrics(make_recipe().run_folder)[-1]["step"] <= 6, "by the next save, not at the end"


def test_a_crash_leaves_the_checkpoint_in_hand_whole(make_recipe, monkeypatch):
    write, step = checkpoint.save, loop.Run.step

    def slow(*args):
        time.sleep(0.5)
        return write(*args)

    def crash(self, stop):
        if self.progress.step == 3:
            raise RuntimeError("a bug")
        return step(self, stop)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(loop.Run, "step", crash)
    with pytest.raises(RuntimeError, match="a bug"):
        train(make_recipe())
    assert names(make_recipe().run_folder) == ["step-00000003"]


@pytest.mark.parametrize(("by", "waits"), [(None, True), (RuntimeError, True), (KeyboardInterrupt, False)])
def test_only_who_leaves_at_once_leaves_before_it_is_written(by, waits):
    left, written = threading.Event(), []

    def write(_):
        left.wait(0.5)
        written.append(1)

    with contextlib.suppress(RuntimeError, KeyboardInterrupt), CheckpointWriter() as writer:
        writer.submit({}, write)
        if by:
            raise by
    assert bool(written) == waits
    left.set()


def test_who_leaves_waits_for_no_other_try():
    """Guards: a crash that was reported a minute late, as the disk was full."""
    start, write = time.monotonic(), Mock(side_effect=UserError("full"))
    with pytest.raises(RuntimeError), CheckpointWriter() as writer:
        writer.submit({}, write)
        raise RuntimeError
    assert write.call_count == 1 and time.monotonic() - start < checkpoint_writer.RETRY_SECONDS / 2


def test_a_bug_in_a_last_try_surfaces(monkeypatch):
    """Guards: one that was tried again."""
    monkeypatch.setattr(checkpoint_writer, "LAST_PAUSE", 0)
    writer = CheckpointWriter()
    writer.submit({}, Mock(side_effect=[UserError("full"), ZeroDivisionError]))
    with pytest.raises(ZeroDivisionError):
        writer.finish()


def test_copies_are_apart_and_their_memory_is_used_again():
    host, tensor = HostBuffers(), torch.arange(6.0).reshape(2, 3).t()
    tree = {"a": [tensor, (1, "x")], 0: {"b": torch.tensor(3)}, "c": (1, tensor)}
    first = host.copy_to_host(tree)
    tensor.zero_()
    assert first["a"][0].tolist() == first["c"][1].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert first["a"][1] is tree["a"][1]
    second = host.copy_to_host(tree)
    assert second["a"][0].data_ptr() == first["a"][0].data_ptr() and second["a"][0].sum() == 0
    assert host.copy_to_host({"a": torch.ones(5, dtype=torch.int64)})["a"].tolist() == [1] * 5


def test_by_time_too(make_recipe, monkeypatch):
    """At each step that begins after the minutes are over, on all ranks alike. A checkpoint has the loss of a
    validation at its step, and a loss that is the lowest is no reason to save."""
    folder = train(make_recipe(save_interval=100, save_minutes=1e-9, keep_checkpoints=9))
    assert names(folder) == [f"step-{n:08d}" for n in range(1, 7)]
    validated = [read_manifest(path)["val_loss"] is not None for path in valid_checkpoints(folder)]
    assert validated == [False, False, True] * 2
    now, step = [0.0], loop.Run.step
    monkeypatch.setattr(loop.Run, "step", lambda run, stop: (now.append(now[-1] + 40), step(run, stop))[1])
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[-1])
    options = {"save_interval": 100, "save_minutes": 1.0, "keep_checkpoints": 9, "eval_interval": 1}
    assert names(train(make_recipe(name="by-minutes", **options))) == [f"step-{n:08d}" for n in (2, 4, 6)]


def test_the_best_is_kept(make_recipe, monkeypatch):
    """Saved where the validation is below all before, whatever the interval, and never rotated."""
    losses = {2: 5.0, 4: 3.0, 6: 3.0, 8: 3.5, 10: 3.2, 12: 2.0, 14: 2.0, 16: 2.6}
    monkeypatch.setattr(loop, "validate", lambda run, *_: (losses[run.progress.step], []))
    saved, save = [], loop.Run.save
    monkeypatch.setattr(loop.Run, "save", lambda run: saved.append(run.progress.step) or save(run))
    options = {"eval_interval": 2, "save_interval": 5, "keep_checkpoints": 1, "keep_best": True}
    folder = train(make_recipe(max_steps=8, **options))
    assert names(folder) == ["step-00000004", "step-00000008"]
    assert read_manifest(valid_checkpoints(folder)[0])["val_loss"] == 3.0
    train(make_recipe(max_steps=16, **options | {"save_interval": 11}))
    assert names(folder) == ["step-00000012", "step-00000016"]
    assert saved == [2, 4, 5, 8, 11, 12, 16]


def test_without_a_validation_none_is_the_best(make_recipe):
    """Guards: the oldest checkpoint kept as the best, where none knows a loss."""
    folder = train(make_recipe(max_steps=4, save_interval=1, keep_checkpoints=9, eval_interval=100))
    shutil.rmtree(folder / "checkpoints/step-00000004")  # the last step is always validated
    checkpoint.prune_checkpoints(folder, checkpoint.RetentionPolicy(2, best=True))
    assert names(folder) == ["step-00000002", "step-00000003"]


LOSSES = {3: 2.0, 6: 3.0, 9: 2.5, 12: 2.6}  # of validations; the first one is cut short
KEEP_BEST = {"keep_checkpoints": 1, "keep_best": True, "max_steps": 12}


@pytest.fixture
def cut_short(make_recipe, monkeypatch, ctrl_c):
    """A function that trains until a signal in the validation of step 3, and returns that step's checkpoint;
    from then on validations give `LOSSES`."""
    validate = loop.validate

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return validate(*args)

    def start(**options):
        monkeypatch.setattr(loop, "validate", interrupted)
        with pytest.raises(KeyboardInterrupt, match="saved at step 3"):
            train(make_recipe(**KEEP_BEST | options))
        monkeypatch.setattr(loop, "validate", lambda run, *_: (LOSSES[run.progress.step], []))
        (path,) = valid_checkpoints(make_recipe().run_folder)
        assert read_manifest(path)["val_loss"] is None
        return path

    return start


@pytest.mark.parametrize("keep_best_then", [True, False])
def test_the_best_is_kept_where_a_signal_cut_its_validation_short(make_recipe, cut_short, keep_best_then):
    """Guards: the lowest loss, of the validation that is made up for, unknown to its checkpoint, which was
    rotated away. Also where the best is to be kept from then on only."""
    best = cut_short(keep_best=keep_best_then)
    before = read_manifest(best)
    folder = train(make_recipe(**KEEP_BEST))
    assert names(folder) == ["step-00000003", "step-00000012"]
    assert read_manifest(best) == before | {"val_loss": 2.0, "checksum": read_manifest(best)["checksum"]}
    assert damage(best) is None


def test_a_last_validation_that_is_cut_short_is_made_up_for(make_recipe, cut_short):
    """Guards: a run that is done, and was never validated."""
    last = {"max_steps": 3, "eval_interval": 100}
    cut_short(**last)
    folder = train(make_recipe(**KEEP_BEST | last))
    assert [line["step"] for line in read_metrics(folder) if line["kind"] == "val"] == [3]


def test_a_checkpoint_that_could_not_be_told_its_loss_is_told_next_time(make_recipe, cut_short, monkeypatch):
    """A full disk is one line, and changes nothing; what a killed process left is no file of its own."""
    best = cut_short()
    before = read_manifest(best)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr("lingpt.common.run_folder.write_json", Mock(side_effect=full))
        with pytest.raises(
            UserError, match=r"cannot write to .*step-00000003 \(No space.*same command again"
        ):
            train(make_recipe(**KEEP_BEST))
    assert read_manifest(best) == before
    (best / ".manifest.json.killed.partial").write_text("half")
    folder = train(make_recipe(**KEEP_BEST))
    assert names(folder) == ["step-00000003", "step-00000012"]
    assert damage(best) is None and not list(best.glob(".*"))
    assert [line["step"] for line in read_metrics(folder) if line["kind"] == "val"] == list(LOSSES)


def test_a_checkpoint_of_another_run_is_not_told_its_loss(make_recipe):
    """Nor changed in any way: the run that goes on from it makes up for its validation, in its own log. NaN
    is no best loss."""
    other = train(make_recipe(name="other", max_steps=4, eval_interval=100, save_interval=2))
    start = other / "checkpoints/step-00000002"
    before = (start / "manifest.json").read_bytes()
    options = {"eval_interval": 2, "save_interval": 2, "keep_checkpoints": 9, "keep_best": True}
    folder = train(make_recipe(max_steps=4, resume=str(start), **options))
    assert [line["step"] for line in read_metrics(folder) if line["kind"] == "val"] == [2, 4]
    assert (start / "manifest.json").read_bytes() == before
    assert names(folder) == ["step-00000004"] and checkpoint.best_loss(folder) < float("inf")
    (only,) = valid_checkpoints(folder)
    write_manifest(only, read_manifest(only) | {"val_loss": math.nan})
    assert checkpoint.best_loss(folder) == math.inf


def test_memory_is_reserved_as_a_checkpoint_needs_it(make_recipe, monkeypatch):
    """What is left to the first save is small: the random states."""
    made, empty_like, save = [], torch.empty_like, loop.Run.save

    def counted(like, **options):
        if "pin_memory" in options:
            made.append(like)
        return empty_like(like, **options)

    def reserved(self):
        monkeypatch.setattr(checkpoint_writer.torch, "empty_like", counted)
        self.writer.reserve(self.gpt.state_dict(), self.optimizer)
        self.writer.wait()
        assert sum(tensor.numel() for tensor in made) > 3 * self.gpt.num_parameters()
        made.clear()
        save(self)

    monkeypatch.setattr(loop.Run, "save", reserved)
    train(make_recipe(max_steps=1))
    assert made and all(tensor.dtype == torch.uint8 for tensor in made)


def test_pinned_memory_comes_in_powers_of_two():
    sizes = {1: 4, 2: 8, 3: 16, 1024: 4096, 1025: 8192}
    assert [pinned_bytes([torch.zeros(n)]) for n in sizes] == list(sizes.values())
    assert pinned_bytes([torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16)]) == 32
