"""Checkpoints in shards, by a process alone: whole or not there, and read back into any layout."""

import errno
import os
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lingpt.common.errors import UserError
from lingpt.common.run_folder import damage, valid_checkpoints
from lingpt.data import prepare
from lingpt.models import GPT, load_model
from lingpt.train.distributed.sharding import join_shards, shard_state
from lingpt.train.runs import checkpoint
from lingpt.train.step import make_optimizer


@pytest.fixture
def mesh():
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


@pytest.fixture
def trained(mesh, make_recipe):
    """A model whose parameters are DTensors, its optimizer after a step, and how to save both."""
    recipe = make_recipe()
    run, gpt = recipe.run_folder, GPT.create(recipe.model.config(), 0)
    run.mkdir(parents=True)
    for module in gpt.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh, [Shard(0)])
            module.register_parameter(name, torch.nn.Parameter(part))
    optimizer = make_optimizer(gpt, recipe.train)
    for parameter in gpt.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tokenizer = prepare(recipe.data, progress=False).tokenizer

    def save(step: int) -> None:
        state = {"optimizer": optimizer.state_dict(), "random": []}
        weights, newest = gpt.state_dict(), checkpoint.RetentionPolicy(2)
        manifest = {"step": step, "skipped_in_a_row": 0}
        checkpoint.save(run, gpt, weights, tokenizer, state, manifest, newest, mesh.get_group())

    return run, gpt, optimizer, save


@pytest.mark.filterwarnings("error:torch.distributed is disabled")
def test_what_was_sharded_comes_back_whole_or_sharded(trained, make_recipe):
    run, gpt, optimizer, save = trained
    save(1)
    (folder,) = valid_checkpoints(run)
    assert damage(folder) is None
    loaded = load_model(folder)
    for (name, old), new in zip(gpt.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(new, old.full_tensor(), rtol=0, atol=0, msg=name)
    state = checkpoint.load_state(folder)["optimizer"]
    own, whole = optimizer.state_dict()["state"], make_optimizer(loaded, make_recipe().train)
    into_whole = join_shards(whole, state, folder)["state"]
    into_parts = join_shards(optimizer, state, folder)["state"]
    again = shard_state(optimizer, {"state": into_whole})["state"]  # what one process saved, sharded
    for index, values in own.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert not isinstance(into_whole[index][key], DTensor)
            expected = values[key].full_tensor()
            for got in (into_whole, into_parts, again):
                value = got[index][key]
                value = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(value, expected, rtol=0, atol=0)
        assert into_whole[index]["step"] == values["step"]


def test_a_shard_that_cannot_be_written_is_one_line_and_leaves_nothing(trained, monkeypatch):
    run, _, _, save = trained
    save(1)

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_shards", full)
    with pytest.raises(
        UserError, match=r"^the checkpoint of step 2 could not be written \(No space"
    ) as raised:
        save(2)
    assert str(raised.value).count("could not be written") == 1 and "step-00000001 is intact" in str(
        raised.value
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_process_that_dies_is_no_failure_of_the_disk(trained, monkeypatch):
    """Guards: "free some space on the disk", where another process had been killed while all were saving."""
    run, _, _, save = trained
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    monkeypatch.setattr(checkpoint, "write_shards", Mock(side_effect=lost))
    with pytest.raises(RuntimeError) as raised:
        save(1)
    assert raised.value is lost and not list((run / "checkpoints").iterdir())


def test_a_disk_that_is_not_shared_is_named(trained, monkeypatch):
    """Guards: a checkpoint that was declared whole, with the shards of one machine alone."""
    run, _, _, save = trained
    together = checkpoint.on_all_ranks

    def with_another(*args):
        outcomes = together(*args)
        elsewhere = {"shard-00002-model-00002-of-00002.safetensors": "hash"}
        return [*outcomes, elsewhere] if isinstance(outcomes[0], dict) else outcomes

    monkeypatch.setattr(checkpoint, "on_all_ranks", with_another)
    with pytest.raises(UserError, match=r"shard-00002.* must lie on a disk that all machines see"):
        save(1)
    assert not list((run / "checkpoints").iterdir())


def test_a_loss_that_comes_later_is_told_to_a_checkpoint_in_shards(trained, monkeypatch):
    """The same manifest, of all processes' files. Guards: shards that are read for it, of many gigabytes."""
    run, _, _, save = trained
    save(1)
    (folder,) = valid_checkpoints(run)
    monkeypatch.setattr("lingpt.common.run_folder.file_sha256", Mock(side_effect=AssertionError("read")))
    checkpoint.add_val_loss(run, 1, 2.0)
    monkeypatch.undo()
    assert damage(folder) is None and checkpoint.best_loss(run) == 2.0 and load_model(folder)


def test_a_damaged_shard_is_named(trained):
    """Guards also: tensors of another file in the folder, which DCP reads in place of the shards' own."""
    run, _, _, save = trained
    save(1)
    (folder,) = valid_checkpoints(run)
    (shard,) = folder.glob("shard-*")
    whole = shard.read_bytes()
    shard.write_bytes(whole.replace(b"ln_f", b"ln_g", 1))
    with pytest.raises(UserError, match=f"a shard of {folder} is damaged: .*ln_"):
        load_model(folder)
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"the shard .*{shard.name} is damaged"):
        load_model(folder)
    assert f"is not whole ({shard.name} has " in damage(folder)
    shard.rename(folder / "model.safetensors")
    with pytest.raises(UserError, match=f"the shard .*{shard.name} is missing"):
        load_model(folder)
    shard.write_bytes(whole)
    with pytest.raises(UserError, match=r"model\.safetensors is none of the shards that shards\.json names"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    for content in ('{"files": []}', '{"files": {}, "metadata": {}}'):
        (folder / "shards.json").write_text(content)
        with pytest.raises(UserError, match=r"shards\.json is damaged: it names no shards"):
            load_model(folder)
