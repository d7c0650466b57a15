"""A process that keeps the others waiting is named, and where processes cannot meet, one line says why."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from lingpt.common.errors import Interrupted, UserError
from lingpt.train import TrainConfig
from lingpt.train import watch as watch_module
from lingpt.train.machine import choose_machine, choose_strategy
from lingpt.train.parallel import Parallel
from lingpt.train.watch import Watch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


class Ended(Watch):
    """One that notes how it would have ended its process."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.ended = None, threading.Event()

    def _exit(self, code: int) -> None:
        self.code = code
        self.ended.set()


def test_the_process_that_keeps_the_others_waiting_is_named(capsys):
    """Two of three have come to a point where all meet; the third has not. While all work, nobody is late."""
    store = dist.HashStore()
    watches = [Ended() for _ in range(3)]
    for rank, watch in enumerate(watches):
        watch.enter_collective()
        watch.limit_waits(store, rank, 3, seconds=0.5)
    time.sleep(1.0)
    assert not any(watch.ended.is_set() for watch in watches), "all of them were at work"
    for watch in watches[:2]:
        watch.enter_collective()
    assert all(watch.ended.wait(20) for watch in watches)
    assert [watch.code for watch in watches] == [2, 1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"process 2 of 3 (on {socket.gethostname()}) has kept the others waiting" in line


def test_rank_one_names_rank_zero(monkeypatch, capsys):
    """Guards: where rank zero was frozen nobody said anything, and torchrun named another as the cause."""
    monkeypatch.setattr(watch_module, "GRACE", 0.2)
    store, watches = dist.HashStore(), [Ended() for _ in range(2)]
    store.set("lingpt/0", "1 here")  # as it was when it froze
    for rank, watch in enumerate(watches, start=1):
        watch.enter_collective()
        watch.enter_collective()
        watch.limit_waits(store, rank, 3, seconds=0.5)
    assert all(watch.ended.wait(20) for watch in watches)
    assert [watch.code for watch in watches] == [2, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert "process 0 of 3 (on here) has kept the others waiting" in line


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_where_the_store_is_gone_a_machine_says_so_once(monkeypatch, capsys, local_rank):
    """Guards: rank zero's machine died, and the others, whose main threads wait in NCCL, ended in silence."""
    monkeypatch.setattr(watch_module, "GRACE", 0.2)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    store = mock.Mock()
    store.set.side_effect = RuntimeError("TCPStore sendBytes failed")
    watch = Ended()
    watch.limit_waits(store, 2, 4, seconds=0.5)
    assert watch.ended.wait(20) and watch.code == 1
    said = capsys.readouterr().err
    assert ("process 2 of 4" in said and "the connection to another process is lost" in said) == (
        local_rank == "0"
    )


def test_a_process_that_has_not_begun_to_count_is_late(capsys):
    """Guards: its key is not in the store, and to wait for the key was the end of all, without a word."""
    store, watch = dist.HashStore(), Ended()
    watch.enter_collective()
    watch.limit_waits(store, 0, 2, seconds=0.5)
    assert watch.ended.wait(20) and watch.code == 2
    assert "process 1 of 2 (not heard of since the start) has kept the others waiting" in (
        capsys.readouterr().err
    )


NCCL_FAILED = """NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: no route to host"""
LOST = "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error"


class Failing(Parallel):
    """The second of two processes, or the main one that has started the other, without the other."""

    def __init__(self, has_children: bool, local_rank: int = 1) -> None:
        self.fabric, self.watch = SimpleNamespace(global_rank=1, world_size=2, local_rank=local_rank), Ended()
        self.watch.children = [SimpleNamespace(kill=lambda: None)] if has_children else []


@pytest.mark.parametrize("has_children", [True, False])
def test_nccl_that_fails_is_one_line(has_children, capsys, monkeypatch):
    """Guards: every process took NCCL's errors for the death of another, and left in silence."""
    monkeypatch.setattr(Watch.who_died, "__defaults__", (0.1,))
    parallel = Failing(has_children)
    with pytest.raises((UserError, dist.DistBackendError)) as raised, parallel.propagate_errors():
        raise dist.DistBackendError(NCCL_FAILED)
    said = str(raised.value) if has_children else capsys.readouterr().err
    assert re.search(r"process 1 of 2 \(on .*\): the communication failed: NCCL error in: NCCLUtils", said)
    assert "socketStartConnect: no route to host; NCCL_DEBUG=INFO says more" in said
    assert isinstance(raised.value, UserError) == has_children
    assert parallel.watch.code == (None if has_children else 1)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_who_has_lost_another_says_so_once_a_machine(local_rank, capsys):
    """The one that died is named by who has started it; guards: on the other machines, nothing was said."""
    parallel = Failing(has_children=False, local_rank=local_rank)
    with pytest.raises(dist.DistBackendError), parallel.propagate_errors():
        raise dist.DistBackendError(LOST)
    said = capsys.readouterr().err
    assert parallel.watch.code == 1
    assert ("the connection to another process is lost" in said) == (local_rank == 0)


def test_a_signal_while_a_process_gives_up_changes_nothing():
    """Guards: torchrun's SIGTERM, since another has died, made the line `interrupted`."""
    parallel = Failing(has_children=False)
    with pytest.raises(Interrupted), parallel.propagate_errors():
        try:
            raise dist.DistBackendError(LOST)
        finally:
            raise Interrupted(signal.SIGTERM)
    assert parallel.watch.code == 1


def test_who_leaves_is_not_interrupted():
    """Guards: torchrun sends SIGTERM where another process has died, and the line was `interrupted`."""
    watch = Ended()
    watch._has_parent = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", mock.Mock(side_effect=Interrupted(signal.SIGTERM)))
        watch.leave()
    assert watch.code == 1


def test_a_run_that_ends_is_not_watched(capsys):
    watch, other = Ended(), Ended()
    store = dist.HashStore()
    for rank, one in enumerate((watch, other)):
        one.limit_waits(store, rank, 2, seconds=0.2)
    watch.enter_collective()
    for one in (watch, other):
        one.stop()
    time.sleep(0.5)
    assert watch.code is None and other.code is None and not capsys.readouterr().err


HANGS = """
import sys, time
from lingpt.train import TrainConfig
from lingpt.train.machine import choose_machine
from lingpt.train.parallel import Parallel
parallel = Parallel(choose_machine(TrainConfig(accelerator="cpu")), timeout_minutes=0.05)
parallel.sum(1.0)
if parallel.rank == 1:
    time.sleep(300)
parallel.sum(1.0)
"""


def two_processes(script: str, stream: str) -> list[tuple[str, int]]:
    """What each of two processes of torchrun says on `stream`, and its exit code."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | TORCHRUN | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port},
            text=True,
            **{stream: subprocess.PIPE},
        )
        for rank in ("0", "1")
    ]
    said = ["".join(filter(None, one.communicate(timeout=120))) for one in started]
    return [(text, one.returncode) for text, one in zip(said, started, strict=True)]


def test_a_run_ends_where_one_process_hangs():
    """Guards: every run of several processes is watched, for its own `timeout_minutes`."""
    (said, first), (_, second) = two_processes(HANGS, "stderr")
    assert [first, second] == [2, 1]
    assert "process 1 of 2" in said and "kept the others waiting for 0.05 min" in said


DIES = """
import os, signal
if os.environ.get("LOCAL_RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
from lingpt.train import TrainConfig
from lingpt.train.machine import choose_machine
from lingpt.train.parallel import Parallel
Parallel(choose_machine(TrainConfig(accelerator="cpu", devices=2)), timeout_minutes=1)
"""


def test_a_process_that_dies_before_it_has_met_the_others_is_named(tmp_path):
    """Guards: Lightning's own observer, which kills the main process without a word."""
    script = tmp_path / "dies.py"  # Lightning starts the others from a file
    script.write_text(DIES)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "process 1 of 2" in ran.stderr and "was killed by signal 9" in ran.stderr


DIFFER = """
import os
from dataclasses import replace
from lingpt.cli.main import user_message
from lingpt.common.errors import UserError
from lingpt.train import TrainConfig
from lingpt.train.machine import choose_machine
from lingpt.train.parallel import Parallel
strategy = "fsdp" if os.environ["RANK"] == "1" else "ddp"
machine = replace(choose_machine(TrainConfig(accelerator="cpu")), strategy=strategy)
try:
    parallel = Parallel(machine, timeout_minutes=1)
    try:
        parallel.agree(machine, {"train.seed": 0, "train.max_steps": 4 + parallel.rank})
    except UserError as error:
        print(user_message(error))
    parallel.agree(machine, {"train.seed": 0})
except UserError as error:
    print(user_message(error))
"""


def test_processes_that_would_train_in_different_ways_say_so():
    """Guards: cards that differ made one process take DDP and the other FSDP, and both end in a backtrace;
    with other commands, one waited for the other, and the line said that it hung."""
    for said, _ in two_processes(DIFFER, "stdout"):
        assert "differ in train.max_steps (ranks of 4: 0; 5: 1): start each with the same command" in said
        assert "(ranks of ddp, 32-true: 0; fsdp, 32-true: 1): say --train.strategy" in said


@pytest.fixture
def torchrun(monkeypatch):
    """The first of two processes of torchrun on this machine."""
    for name, value in (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)


def test_a_port_that_is_taken_is_one_line(torchrun, monkeypatch, make_recipe):
    recipe = make_recipe(strategy="fsdp")
    machine, _ = choose_strategy(choose_machine(recipe.train), recipe.model.config(), recipe)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=r"the port of 127.0.0.1:\d+ is taken.*--master_port"):
            Parallel(machine)


def test_other_numbers_than_the_launchers_are_refused(torchrun):
    machine = choose_machine(TrainConfig(accelerator="cpu"))
    assert (machine.devices, machine.num_nodes, machine.world_size) == (2, 1, 2)
    with pytest.raises(UserError, match=r"torchrun has started 2 processes a machine .*4 devices"):
        choose_machine(TrainConfig(accelerator="cpu", devices=4))


def test_machines_that_nobody_has_started_are_refused():
    with pytest.raises(UserError, match=r"num_nodes 2, but nothing has started.*torchrun or srun"):
        choose_machine(TrainConfig(accelerator="cpu", num_nodes=2))
