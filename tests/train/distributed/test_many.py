"""Several processes give what one gives, however they share the model and whoever started them.

On CPUs one pair of processes does all of it, one run after another: starting them is what takes long. On
GPUs each run has processes of its own, as users' runs have.
"""

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from lingpt.common.errors import UserError
from lingpt.common.run_folder import newest_checkpoint, read_metrics
from lingpt.models import load_model, save_model
from lingpt.tests.forked import fork_script, free_port
from lingpt.train import Recipe, train

# Each run in an environment of its own, as a launcher would make it for this process.
RUNS = """
import json, os, sys
from lingpt.cli.main import main
from lingpt.train.distributed import strategy
launcher, fits = set(), strategy.fits
for env, argv in json.loads(sys.argv[1]):
    for name in launcher:
        del os.environ[name]
    os.environ.update(env)
    launcher = set(env)
    strategy.fits = (lambda *_: False) if "NO_ROOM" in env else fits
    if code := main(["train", "--config", "recipe.yaml", *argv]):
        sys.exit(code)
"""


def torchrun(rank: int, machines: int) -> dict[str, str]:
    """What torchrun sets for one of two processes, on one machine or on two."""
    local = rank if machines == 1 else 0
    return {
        "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": "2",
        "GROUP_RANK": str(rank - local), "LOCAL_WORLD_SIZE": str(2 // machines), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip


def slurm(rank: int, machines: int) -> dict[str, str]:
    """What `srun` sets for one of two tasks, on one node or on two."""
    local = rank if machines == 1 else 0
    return {
        "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(rank - local), "SLURM_NNODES": str(machines),
        "SLURM_NTASKS_PER_NODE": str(2 // machines), "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "lingpt",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": str(machines),
        "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip


def pair(folder: Path, *runs: tuple[Callable[[int], dict[str, str]], list[str]]) -> None:
    """Two processes that do `runs`, one after another; the first of them alone speaks."""
    ports = [free_port() for _ in runs]
    of_others = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "SLURM_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(of_others)}
    started = []
    for rank in (0, 1):
        todo = [
            ({**launcher(rank), "MASTER_PORT": port}, argv)
            for (launcher, argv), port in zip(runs, ports, strict=True)
        ]
        env = {**clean, "OMP_NUM_THREADS": "1"}
        started.append(fork_script(RUNS, json.dumps(todo), folder=folder, env=env))
    try:
        outcomes = [process.end(600) for process in started]
        # The last lines first: a summary of failures shows no more of a message than how it begins.
        said = "\n".join(line for outcome in outcomes for line in outcome.output.splitlines()[:-41:-1])
        assert [outcome.code for outcome in outcomes] == [0, 0], said
        assert [outcome.output.count("validation loss") for outcome in outcomes] == [len(runs), 0], said
    finally:
        for process in started:
            process.send_group(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "rel"), [("cpu", 1e-5), pytest.param("cuda", 1e-3, marks=pytest.mark.multigpu)]
)
def test_two_processes_give_the_losses_of_one(make_recipe, tmp_path, accelerator, rel, capsys):
    """DDP, FSDP and pieces of sequences, from scratch and from each other's checkpoints, 1 → 2 and 2 → 1;
    torchrun and SLURM.

    On validation blocks that do not divide by two, and with gradients that are clipped. FSDP once with room
    for what it need not gather in every micro-batch, and once without.
    """

    def recipe(name: str, steps: int, **options) -> Recipe:
        device = {"accelerator": accelerator, "precision": "32-true", "devices": 1}
        options = {"save_interval": 2, "eval_interval": 2, "eval_tokens": 160, **device, **options}
        return make_recipe(name=name, max_steps=steps, **options)

    one = train(recipe("one", 2))
    for name in ("one-ddp", "one-fsdp", "one-pieces"):
        shutil.copytree(one, one.with_name(name))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe("two", 2).to_dict()))
    two = ["--train.micro_batch_size", "2", "--train.devices", "auto"]
    fsdp = [*two, "--train.strategy", "fsdp", "--train.activation_checkpointing", "true"]
    pieces = [*two, "--train.context_parallel", "2"]
    machines = 2 if accelerator == "cpu" else 1  # the two GPUs are in one
    by_torchrun, by_slurm = (functools.partial(by, machines=machines) for by in (torchrun, slurm))
    on_one = functools.partial(torchrun, machines=1)
    runs = [
        (on_one, [*two, "--train.name", "one-ddp", "--train.max_steps", "4"]),
        (lambda rank: by_torchrun(rank) | {"NO_ROOM": "1"}, [*fsdp, "--train.name", "fsdp"]),
        (by_slurm, [*two, "--train.name", "fsdp", "--train.strategy", "ddp", "--train.max_steps", "4"]),
        (by_slurm, [*fsdp, "--train.name", "one-fsdp", "--train.max_steps", "4"]),
        (on_one, [*pieces, "--train.name", "one-pieces", "--train.max_steps", "4"]),
        (on_one, [*pieces, *fsdp, "--train.name", "pieces"]),
    ]
    for together in [runs] if accelerator == "cpu" else [[run] for run in runs]:
        pair(tmp_path, *together)
    sharded = newest_checkpoint(one.with_name("one-fsdp"))
    assert sharded is not None and len(list(sharded.glob("shard-*.safetensors"))) == 2
    capsys.readouterr()
    for steps in (4, 6):  # as the others: the learning rate depends on how many there are in all
        train(recipe("one", steps))
    train(recipe("one-fsdp", 6))  # the shards of two processes, by one
    train(recipe("pieces", 4))
    assert "one-fsdp/checkpoints/step-00000004, step 4 of 6" in capsys.readouterr().out
    expected = {(line["kind"], line["step"]): line for line in read_metrics(one)}
    ends = {"one-ddp": 4, "fsdp": 4, "one-fsdp": 6, "one-pieces": 4, "pieces": 4}
    for name, last in ends.items():
        lines = read_metrics(one.with_name(name))
        assert [line["step"] for line in lines if line["kind"] == "val"] == list(range(2, last + 1, 2)), name
        for line in lines:
            alone = expected[line["kind"], line["step"]]
            assert line["loss"] == pytest.approx(alone["loss"], rel=rel), (name, line)
            assert line["tokens"] == alone["tokens"]
            if line["kind"] == "train":  # clipped, in every step
                assert line["grad_norm"] == pytest.approx(alone["grad_norm"], rel=10 * rel), (name, line)
                assert line["grad_norm"] > 1
    shards_are_a_model(sharded, tmp_path / "exported")
    a_missing_shard_is_named(sharded, recipe("one-fsdp", 6))


def shards_are_a_model(sharded: Path, exported: Path) -> None:
    """Any number of devices reads them, and one file of them is the same model."""
    model = load_model(sharded, attention="ours")
    exported.mkdir()
    save_model(model, exported)
    assert (exported / "model.safetensors").is_file()
    again = load_model(exported).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def a_missing_shard_is_named(sharded: Path, recipe: Recipe) -> None:
    """By the run, which has no other checkpoint to go on from, and by who loads the model."""
    shutil.rmtree(sharded.with_name("step-00000006"))
    (shard, _) = sorted(sharded.glob("shard-*.safetensors"))
    shard.unlink()
    with pytest.raises(UserError, match=f"the shard .*{shard.name} is missing"):
        load_model(sharded)
    with pytest.raises(UserError, match=f"step-00000004 is not whole \\({shard.name} is missing\\)"):
        train(recipe)


@pytest.mark.slow
def test_recomputed_blocks_give_the_same_bits(make_recipe):
    """Activation checkpointing saves memory, and changes nothing else."""
    losses = [
        [line["loss"] for line in read_metrics(train(make_recipe(name=name, max_steps=3, **options)))]
        for name, options in (("kept", {}), ("recomputed", {"activation_checkpointing": True}))
    ]
    assert losses[0] == losses[1]
