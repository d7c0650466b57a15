"""The examples of docs/many-devices.md, run as they are written; and who else has started a process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import yaml

from lingpt.common.errors import UserError
from lingpt.common.run_folder import read_metrics
from lingpt.train import Recipe, TrainConfig, train
from lingpt.train.distributed.launch import Launched, launched
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.planning.machine import choose_machine

EXAMPLES = Path(__file__).parents[3] / "docs/many-devices.md"
OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "GROUP_RANK", "WORLD_SIZE")

# Starts the tasks of a job step on this machine, whatever nodes they are on, and ends all where one fails.
SRUN = """
import os, subprocess, sys
option, *command = sys.argv[1:]
assert option == "--kill-on-bad-exit=1"
nodes, here = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * here), "SLURM_STEP_NUM_NODES": str(nodes)}
tasks = []
for rank in range(nodes * here):
    own = {"PROCID": rank, "LOCALID": rank % here, "NODEID": rank // here}
    env = os.environ | step | {f"SLURM_{name}": str(value) for name, value in own.items()}
    tasks.append(subprocess.Popen(command, env=env))
codes = []
for task in tasks:
    codes.append(task.wait())
    if codes[-1]:
        for other in tasks:
            other.kill()
sys.exit(max(codes, key=bool))
"""


@pytest.fixture
def recipe(make_recipe, tmp_path) -> Recipe:
    """Of the run `one`, and as the file recipe.yaml for the examples."""
    recipe = make_recipe(name="one", max_steps=2, micro_batch_size=2, eval_interval=2)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    return recipe


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`start(script, **env)`: bash on a machine that has these commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun.py").write_text(SRUN)
    for name, what in {
        "torchrun": "-m torch.distributed.run",
        "lingpt": "-m lingpt.cli.main",
        "srun": commands / "srun.py",
    }.items():
        (commands / name).write_text(f'#!/bin/bash\nexec {sys.executable} -P {what} "$@"\n')
        (commands / name).chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(OF_LAUNCHERS)}
    clean |= {"PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with ExitStack() as stack:

        def popen(script: str, **env: str) -> subprocess.Popen:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=tmp_path, env=clean | env, start_new_session=True, **pipes
            )
            stack.callback(process.communicate)
            stack.callback(end_group, process.pid)
            return process

        yield popen


def end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def example(first_words: str, **changes: str) -> str:
    """The documented script that begins so, for the small recipe, with `changes` of its words."""
    return documented(first_words, **{"pythia-6.9b": "recipe.yaml", "/shared/runs": "runs", **changes})


def documented(first_words: str, **changes: str) -> str:
    (script,) = [
        block
        for block in re.findall(r"```bash\n(.*?)```", EXAMPLES.read_text(), re.DOTALL)
        if block.startswith(first_words)
    ]
    for old, new in changes.items():
        assert old in script, f"{old} is not in the example"
        script = script.replace(old, new)
    return script


def free_port(first: int = 15000) -> int:
    """One of the 10,000 after the `first`."""
    for port in range(first + os.getpid() % 9000, first + 10000):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


def check(processes: list[subprocess.Popen], recipe: Recipe, run: Path) -> None:
    """All end well, the first one alone speaks, and the losses are those of one process."""
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    assert "\n".join(said).count("validation loss") == 1
    runs = train(recipe), run
    alone, together = ([(line["kind"], line["loss"]) for line in read_metrics(of)] for of in runs)
    assert [kind for kind, _ in together] == [kind for kind, _ in alone]
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-5)


@pytest.mark.slow
def test_torchrun_as_documented(start, recipe, tmp_path):
    """A process on each of two machines, whose torchruns meet. On one machine: the tests below."""
    words = {
        "--nproc_per_node 8": "--nproc_per_node 1",
        "node-a": "127.0.0.1",
        "29500": str(free_port(25000)),
        "train ": "train --train.name many ",
    }
    ranks = [{"--node_rank 0": f"--node_rank {rank}"} for rank in range(2)]
    check(
        [start(example("torchrun --nnodes", **words, **rank)) for rank in ranks],
        recipe,
        tmp_path / "runs/many",
    )


@pytest.mark.slow
def test_the_demo_under_torchrun_as_documented(start, tmp_path):
    """Guards: nothing said how, and its recipe, of one device, was refused."""
    short = "train --train.max_steps 1 --train.sample_tokens 0 --train.eval_tokens 2048 --train.wandb false "
    port = f"torchrun --master_port {free_port(25000)}"
    run = start(documented("torchrun --nproc_per_node", **{"train ": short, "torchrun": port}))
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0 and "on 2 × CPU" in said, said
    assert len(read_metrics(tmp_path / "runs/demo-ours")) == 2


def sbatch(script: str) -> dict[str, str]:
    """What SLURM sets for the script of a job, by its `#SBATCH` lines. Its nodes are this machine."""
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", script))
    nodes, here = int(asked["nodes"]), int(asked["ntasks-per-node"])
    job = {
        "JOB_ID": free_port() - 15000 + 770000,  # Lightning's port is 15000 and the last four digits
        "JOB_NAME": asked["job-name"],
        "NNODES": nodes,
        "NTASKS": nodes * here,
        "NTASKS_PER_NODE": here,
        "NODELIST": f"127.0.0.[1-{nodes}]",
        "JOB_NODELIST": f"127.0.0.[1-{nodes}]",
        **dict.fromkeys(("PROCID", "LOCALID", "NODEID"), 0),
    }
    return {f"SLURM_{name}": str(value) for name, value in job.items()}


@pytest.mark.slow
def test_slurm_as_documented(start, recipe, tmp_path):
    """On two nodes, a process each; the first of the list of nodes is where all meet."""
    words = {"ntasks-per-node=8": "ntasks-per-node=1", "train ": "train --train.name many "}
    script = example("#!/bin/bash", **words)
    check([start(script, **sbatch(script))], recipe, tmp_path / "runs/many")


@pytest.fixture
def slurm(monkeypatch) -> Callable[..., None]:
    """`slurm(STEP_NUM_TASKS=2)`: this process is SLURM's, in a job of two tasks on one machine."""

    def make(**values: str | int) -> None:
        job = {"JOB_ID": 1, "JOB_NAME": "lingpt", "NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1}
        task = {"PROCID": 0, "LOCALID": 0, "NODEID": 0}
        for name, value in (job | task | values).items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))

    return make


@pytest.mark.slow
def test_a_batch_script_without_srun_trains_by_itself(slurm, make_recipe):
    """Guards: its job has two tasks, none of which was started, and the run waited for the second."""
    slurm()
    assert launched() is None
    assert len(read_metrics(train(make_recipe(max_steps=1, eval_interval=1)))) == 2


def test_a_shell_of_srun_trains_by_itself_and_srun_in_a_shell_does_not(slurm):
    """Guards: in a job called `bash` or `interactive` srun's tasks took themselves for lone processes."""
    slurm(JOB_NAME="bash", STEP_NUM_TASKS=1, STEP_NUM_NODES=1)
    assert launched() is None
    slurm(JOB_NAME="interactive", STEP_NUM_TASKS=2, STEP_NUM_NODES=1)
    assert launched() == Launched("SLURM", here=2, everywhere=2)
    assert Launched("SLURM", here=2, everywhere=6).machines == 3


def test_machines_on_which_slurm_has_started_nothing_are_not_left_idle(slurm):
    slurm(NNODES=2, NTASKS_PER_NODE=1)
    with pytest.raises(UserError, match=r"2 machines, but nothing has started.*with srun .*num_nodes 1"):
        choose_machine(TrainConfig(accelerator="cpu"))
    assert choose_machine(TrainConfig(accelerator="cpu", num_nodes=1)).world_size == 1


@pytest.mark.parametrize("here", ["", "8"])
def test_slurm_needs_to_know_how_many_a_machine(slurm, monkeypatch, here):
    """Guards: with `--ntasks` alone Lightning ended in a traceback."""
    slurm(STEP_NUM_TASKS=2, STEP_NUM_NODES=1, NTASKS_PER_NODE=here)
    if not here:
        monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(UserError, match=r"2 processes on 1 machine.*--ntasks-per-node, and no --ntasks"):
        choose_machine(TrainConfig(accelerator="cpu"))


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        (None, "4 devices are asked for, but this machine has 2 GPU.*--train.devices"),
        ("torchrun", r"torchrun has started 4 processes .* each sees 2 GPU.*--nproc_per_node"),
    ],
)
def test_more_processes_than_gpus(monkeypatch, launcher, line):
    """Guards: to torchrun's user, too, `--train.devices` was the advice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if launcher:
        started = Launched(launcher, here=4, everywhere=4)
        monkeypatch.setattr("lingpt.train.planning.machine.launched", lambda: started)
    with pytest.raises(UserError, match=line):
        choose_machine(TrainConfig(devices="auto" if launcher else 4))


def test_processes_agree_on_recipe_and_data(make_recipe, monkeypatch):
    """But for where each keeps its copy of the tokens."""
    agreed: dict[str, object] = {}
    monkeypatch.setattr(
        Parallel, "check_same_settings", lambda self, machine, settings: agreed.update(settings)
    )
    train(make_recipe(max_steps=1, seed=7))
    assert agreed["train.seed"] == 7 and agreed["the data"]
    assert "data.seq_len" in agreed and "data.cache_dir" not in agreed


@pytest.mark.slow
def test_torchrun_ends_where_a_process_dies(start, recipe, tmp_path):
    """With a line of ours beside torchrun's, which names the dead one; guards: `interrupted`, or nothing."""
    words = {
        "--nnodes 2": "--nnodes 1",
        "--nproc_per_node 8": "--nproc_per_node 2",
        "node-a": "127.0.0.1",
        "29500": str(free_port(25000)),
        "train ": "train --train.max_steps 100000 ",
    }
    torchrun = start("exec " + example("torchrun --nnodes", **words))
    metrics, until = tmp_path / "runs/one/metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and torchrun.poll() is None:
        assert time.monotonic() < until, "no step was logged"
        time.sleep(0.1)
    first, second = children(torchrun.pid)
    os.kill(second, signal.SIGKILL)
    said, _ = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 1 and f"exitcode  : -9 (pid: {second})" in said, said
    lines = [line for line in said.splitlines() if line.startswith("lingpt: ")]
    assert len(lines) == 1 and "process 0 of 2" in lines[0], said
    assert "the same command resumes it from its newest checkpoint" in lines[0]
    assert not Path(f"/proc/{first}").exists()


def children(pid: int) -> list[int]:
    """In the order in which they were started."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
