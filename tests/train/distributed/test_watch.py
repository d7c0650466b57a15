"""Where a process dies or hangs, all end and it is named; where processes cannot meet, one line says why."""

import errno
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from lingpt.common.errors import Interrupted, UserError
from lingpt.models import GPT
from lingpt.tests.forked import Outcome, free_port
from lingpt.train import TrainConfig
from lingpt.train.distributed import watch as watch_module
from lingpt.train.distributed.heartbeats import Heartbeats
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.distributed.strategy import choose_strategy
from lingpt.train.distributed.watch import Watch
from lingpt.train.planning.machine import choose_machine

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


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restores them after each test: a process that leaves does not."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("speaks", [True, False])
def test_where_the_store_is_gone_a_machine_says_so_once(monkeypatch, capsys, speaks):
    """Guards: rank zero's machine died, and the others, whose main threads wait in NCCL, ended in silence."""
    monkeypatch.setattr(watch_module, "GRACE", 0.2)
    store = mock.Mock()
    store.set.side_effect = RuntimeError("TCPStore sendBytes failed")
    watch = Ended()
    watch.start_straggler_detection(Heartbeats(store, 2, 4, seconds=0.5), lambda: 1, speaks)
    assert watch.ended.wait(20) and watch.code == 1
    watch.report_once("the main thread finds out, too")
    said = capsys.readouterr().err
    assert ("process 2 of 4" in said and "the connection to another process is lost" in said) == speaks
    assert "main thread" not in said


@pytest.mark.parametrize("moves", [False, True])
def test_a_store_that_does_not_answer_ends_a_run_that_waits(monkeypatch, capsys, moves):
    """Guards: rank zero was stopped, and the store with it: nobody could ask who is late, nor say it."""
    monkeypatch.setattr(watch_module, "GRACE", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    store, watch, counts = mock.Mock(), Ended(), itertools.count()
    store.set.side_effect = lambda *_: time.sleep(4)
    heartbeats = Heartbeats(store, 1, 2, seconds=0.5)
    watch.start_straggler_detection(heartbeats, lambda: next(counts) if moves else 1, speaks=False)
    assert watch.ended.wait(2) != moves
    named = "process 0 of 2 (on node-a, which does not answer) has kept the others waiting"
    assert (named in capsys.readouterr().err) != moves
    watch.stop()


def test_a_process_ends_where_nobody_reads_what_it_says(monkeypatch):
    """Guards: a terminal, or `| tee`, that is gone with the process, or a log on a full disk, and the process
    lived on."""
    gone, codes = mock.Mock(), []
    gone.write.side_effect = gone.flush.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(sys, "stdout", gone)
    monkeypatch.setattr(sys, "stderr", gone)
    monkeypatch.setattr(watch_module.os, "_exit", codes.append)
    monkeypatch.setattr(watch_module, "GRACE", 0.1)
    Watch()._end("a process has died")
    assert codes == [1]


NCCL_FAILED = """NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: no route to host"""
LOST = "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error"


class Failing(Parallel):
    """The second of two processes, or the main one that has started the other, without the other."""

    watch: Ended

    def __init__(self, has_children: bool, local_rank: int = 1) -> None:
        self.fabric, self.watch = SimpleNamespace(global_rank=1, world_size=2, local_rank=local_rank), Ended()
        self.watch.children = [SimpleNamespace(kill=lambda: None)] if has_children else []


@pytest.mark.parametrize("has_children", [True, False])
def test_nccl_that_fails_is_one_line(has_children, capsys, monkeypatch):
    """Guards: every process took NCCL's errors for the death of another, and left in silence."""
    monkeypatch.setattr(watch_module, "GRACE", 0.1)
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


def test_the_main_process_says_that_it_has_lost_another(monkeypatch):
    """Guards: a traceback of gloo's, where nobody has died and the network hangs."""
    monkeypatch.setattr(watch_module, "GRACE", 0.1)
    parallel = Failing(has_children=True)
    lost = pytest.raises(
        UserError, match="the connection to another process is lost, it has ended or does not"
    )
    with lost, parallel.propagate_errors():
        raise RuntimeError("[unbound_buffer.cc:129] Timed out waiting 126000ms for send operation")


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_the_main_process_ends_the_others_and_says_why(number):
    """Guards: processes that nobody had ended; a signal to one of them, told as its death."""
    parallel, ended = Failing(has_children=True), []
    parallel.watch.children = [SimpleNamespace(kill=lambda: ended.append(True))]
    parallel.watch._died, parallel.watch.interrupted = "process 1 has died", number
    with pytest.raises(Interrupted if number else UserError) as raised, parallel.propagate_errors():
        raise dist.DistBackendError(LOST)
    assert ended and (number or str(raised.value) == "process 1 has died")


@pytest.mark.parametrize("sharded", [False, True])
def test_an_error_is_said_once_a_machine(sharded, capsys, monkeypatch):
    """That of all processes by the command line of the first; its own by each."""
    parallel, of_all = Failing(has_children=False), UserError("no space")
    parallel.sharded, parallel.fabric.broadcast = sharded, lambda _: [of_all]
    monkeypatch.setattr("lingpt.train.distributed.collectives.all_gather_object", lambda *_: [of_all, None])
    with pytest.raises(UserError, match="no space"), parallel.propagate_errors():
        parallel.on_checkpoint_ranks(lambda: None)
    assert not capsys.readouterr().err
    with pytest.raises(UserError), parallel.propagate_errors():
        raise UserError("the hub: Connection reset by peer")
    assert capsys.readouterr().err == "lingpt: process 1: the hub: Connection reset by peer\n"


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "line"), [(NCCL_FAILED, "the communication failed"), (LOST, "did not meet")]
)
def test_processes_that_cannot_connect_say_why(error, line, local_rank, capsys):
    """What fails in one process alone is said by that one, whichever it is."""
    parallel, machine = Failing(has_children=False, local_rank=local_rank), SimpleNamespace(world_size=2)
    with pytest.raises(UserError, match=line), parallel._connection(machine):
        raise dist.DistBackendError(error)
    assert (line in capsys.readouterr().err) == (local_rank == 1 and error == NCCL_FAILED)


@pytest.mark.parametrize(
    ("code", "ends", "line"),
    [
        (
            -9,
            2,
            "process 2 of 3 (pid 7) was killed by signal 9 (SIGKILL): the run ends, and the same command",
        ),
        (2, 2, "process 2 of 3 (pid 7) ended with 2: the run ends\n"),
        (-15, 143, "interrupted; "),
        (130, 130, "interrupted; "),
    ],
)
def test_a_run_ends_as_its_first_process_that_fails(code, ends, line, monkeypatch, capsys):
    """Not as one that has done its part. Guards: a signal to one of them, told as its death."""
    monkeypatch.setattr(watch_module, "GRACE", 0.1)
    watch, ended = Ended(), []
    watch.children = [
        SimpleNamespace(poll=lambda n=n: n, returncode=n, pid=7, kill=lambda: ended.append(True))
        for n in (0, code)
    ]
    watch._watch_children()
    assert watch.code == ends and len(ended) == 2
    assert capsys.readouterr().err.startswith(f"lingpt: {line}")


def test_a_signal_while_a_process_gives_up_changes_nothing():
    """Guards: torchrun's SIGTERM, since another has died, made the line `interrupted`."""
    parallel = Failing(has_children=False)
    with pytest.raises(Interrupted), parallel.propagate_errors():
        try:
            raise dist.DistBackendError(LOST)
        finally:
            raise Interrupted(signal.SIGTERM)
    assert parallel.watch.code == 1


def test_who_leaves_is_not_interrupted(monkeypatch, capsys):
    """Guards: torchrun's SIGTERM, sent as another process has died, came while the line was printed, and the
    command line added a second one, `interrupted`.
    """

    def print_signaled(line: str) -> None:
        print(line, file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:  # the command line's
        raise Interrupted(number)

    monkeypatch.setattr(watch_module, "print_stderr", print_signaled)
    signal.signal(signal.SIGTERM, interrupt)
    watch, start = Ended(), time.monotonic()
    watch._has_parent = True
    watch.leave("a process has died")
    assert watch.code == 1 and capsys.readouterr().err == "a process has died\n"
    assert time.monotonic() - start < watch_module.GRACE, "the signal did not shorten the wait"


def test_a_signal_at_any_moment_lets_a_process_leave(monkeypatch):
    """Guards: a handler that waited for a lock which the code that it had interrupted held, for ever."""

    def leave(signaled_at: int) -> bool:
        """Whether the process still left at the line of this number, when the signal came."""
        lines = 0

        def trace(frame: FrameType, event: str, argument: object) -> Callable:
            nonlocal lines
            lines += event == "line"
            if event == "line" and lines == signaled_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return trace

        watch = Ended()
        watch._has_parent = True
        sys.settrace(trace)
        try:
            watch.leave("a process has died")
        finally:
            sys.settrace(None)
        assert watch.code == 1
        return lines >= signaled_at

    def stuck(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    monkeypatch.setattr(watch_module, "GRACE", 0.1)
    monkeypatch.setattr(watch_module, "print_stderr", lambda line: None)
    signal.signal(signal.SIGTERM, lambda *_: None)  # until the process leaves
    before = signal.signal(signal.SIGALRM, stuck)
    signal.setitimer(signal.ITIMER_REAL, 30)
    try:
        assert next(at for at in itertools.count(1) if not leave(at)) > 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_run_that_ends_is_not_watched(capsys):
    """Nor are collectives counted any more: their group is gone."""
    watches, store, collectives = [Ended(), Ended()], dist.HashStore(), mock.Mock(return_value=1)
    for rank, one in enumerate(watches):
        one.start_straggler_detection(Heartbeats(store, rank, 2, seconds=0.2), collectives, speaks=True)
    for one in watches:
        one.stop()
    collectives.reset_mock()
    time.sleep(0.5)
    assert not collectives.called and not capsys.readouterr().err
    assert [one.code for one in watches] == [None, None]


@pytest.fixture
def two_processes(start_script) -> Callable[..., list[Outcome]]:
    """`two_processes(code, **env)`: how each of two processes of torchrun ends.

    stopped: the one that is killed, once the other has ended.
    """

    def run(code: str, stopped: int | None = None, **env: str) -> list[Outcome]:
        env = TORCHRUN | env | {"MASTER_PORT": free_port()}
        processes = [start_script(code, **env, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
        if stopped is not None:
            processes[1 - stopped].end()
            processes[stopped].send(signal.SIGKILL)
        return [process.end() for process in processes]

    return run


IMPORTS = """
import os, signal, sys, threading, time
import torch
from dataclasses import replace
from lingpt.cli.main import user_message
from lingpt.common.errors import UserError
from lingpt.train import TrainConfig
from lingpt.train.distributed import watch
from lingpt.train.distributed.parallel import Parallel
from lingpt.train.planning.machine import choose_machine
watch.GRACE = 1.0
"""
PARALLEL = f"""{IMPORTS}
machine = choose_machine(TrainConfig(accelerator="cpu", devices=2))
machine = replace(machine, strategy=os.environ.get("STRATEGY", "ddp"))
parallel = Parallel(machine, timeout_minutes=0.05)
parallel.all_reduce_sum(1.0)
"""

HANGS = """
if parallel.rank == 1:
    time.sleep(300)
parallel.all_reduce_sum(1.0)
"""


@pytest.mark.slow
def test_a_run_ends_where_one_process_hangs(two_processes):
    """Guards: every run of several processes is watched, for its own `timeout_minutes`."""
    first, second = two_processes(PARALLEL + HANGS)
    said = first.output + second.output
    assert said.count("lingpt: ") == 1
    assert "process 1 of 2" in said and "kept the others waiting for 0.05 min" in said


HANGS_IN_BACKWARD = """
module, seconds = parallel.wrap(torch.nn.Linear(4, 4)), 4  # of all: longer than the time-out
for micro_batch in range(2):
    with parallel.accumulate(module, enabled=False):
        output = module(torch.ones(2, 4))
        output.register_hook(lambda gradient: time.sleep(seconds))
        parallel.backward(output.sum(), 1)
    print(f"process {parallel.rank} has done micro-batch {micro_batch}", file=sys.stderr, flush=True)
    seconds = 300 if parallel.rank == int(os.environ["LATE"]) else 0
"""


def assert_named(said: str, rank: int) -> None:
    """In one line, with its place, and after a micro-batch that took longer than the time-out on both."""
    (line,) = [line for line in said.splitlines() if line.startswith("lingpt: ")]
    assert line.startswith(
        f"lingpt: process {rank} of 2 (on {socket.gethostname()}, in lingpt.train.distributed.parallel."
    )
    assert said.count("has done micro-batch 0") == 2


@pytest.mark.slow
def test_who_hangs_within_a_backward_pass_is_named(two_processes):
    """The other waits in FSDP's reduce-scatter. Guards: nobody was named; gloo's traceback ended the run."""
    first, second = two_processes(PARALLEL + HANGS_IN_BACKWARD, STRATEGY="fsdp", LATE="1")
    assert [first.code, second.code] == [1, 1]
    assert_named(first.output + second.output, rank=1)


@pytest.mark.slow
def test_the_main_process_that_hangs_within_a_backward_pass_is_named(start_script):
    """By the one that it has started, which waits in DDP's all-reduce; it ends both all the same."""
    outcome = start_script(PARALLEL + HANGS_IN_BACKWARD, LATE="0").end()
    assert outcome.code == 2, outcome.output
    assert_named(outcome.output, rank=0)


IS_STOPPED = """
if parallel.rank == int(os.environ["LATE"]):
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
else:
    time.sleep(2)
parallel.all_reduce_sum(1.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_who_is_stopped_within_a_collective_is_named(two_processes, late):
    """Both have come to as many; and rank zero keeps the store, in which the others would see who is late."""
    other = two_processes(PARALLEL + IS_STOPPED, stopped=late, LATE=str(late))[1 - late]
    (line,) = other.errors
    assert line.startswith(f"lingpt: process {late} of 2 (on ") and other.code == 1


DIES = f"""
import os, signal
if os.environ.get("LOCAL_RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
{IMPORTS}
Parallel(choose_machine(TrainConfig(accelerator="cpu", devices=2)), timeout_minutes=1)
"""


@pytest.mark.slow
def test_a_process_that_dies_before_it_has_met_the_others_is_named(start_script):
    """Guards: Lightning's own observer, which kills the main process without a word."""
    outcome = start_script(DIES).end()
    assert outcome.code == 2, outcome.output
    assert "process 1 of 2" in outcome.output and "was killed by signal 9" in outcome.output


ORPHANED = f"""
import os, signal
if os.environ.get("LOCAL_RANK") == "1":
    os.kill(os.getppid(), signal.SIGKILL)
{IMPORTS}
Parallel(choose_machine(TrainConfig(accelerator="cpu", devices=2)), timeout_minutes=0.1)
"""


# One that torchrun has started, which dies when the process has begun to import, as that of `lingpt` does.
ORPHAN_OF_TORCHRUN = f"""
import os, signal, subprocess, sys
if "LOCAL_RANK" not in os.environ:
    sys.exit(subprocess.call([sys.executable, __file__], env=os.environ | {{"LOCAL_RANK": "0"}}))
import lingpt.cli.main
os.kill(os.getppid(), signal.SIGKILL)
{IMPORTS}
Parallel(choose_machine(TrainConfig(accelerator="cpu")), timeout_minutes=0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("orphaned", "env"), [(ORPHANED, {}), (ORPHAN_OF_TORCHRUN, TORCHRUN | {"RANK": "0"})]
)
def test_a_process_whose_main_process_dies_while_it_imports_ends(start_script, orphaned, env):
    """Guards: it took whoever had adopted it for its parent, and lived on."""
    outcome = start_script(orphaned, **env, MASTER_PORT=free_port()).end()
    assert outcome.code == -signal.SIGKILL
    said = r"lingpt: the main process \(pid \d+\) has died: the run ends"
    assert re.search(said, outcome.output), outcome.output


DIFFER = f"""{IMPORTS}
strategy = "fsdp" if os.environ["RANK"] == "1" else "ddp"
machine = replace(choose_machine(TrainConfig(accelerator="cpu")), strategy=strategy)
try:
    parallel = Parallel(machine, timeout_minutes=1)
    try:
        parallel.check_same_settings(machine, {{"train.seed": 0, "train.max_steps": 4 + parallel.rank}})
    except UserError as error:
        print(user_message(error))
    parallel.check_same_settings(machine, {{"train.seed": 0}})
except UserError as error:
    print(user_message(error))
"""


@pytest.mark.slow
def test_processes_that_would_train_in_different_ways_say_so(two_processes):
    """Guards: cards that differ made one process take DDP and the other FSDP, and both end in a backtrace;
    with other commands, one waited for the other, and the line said that it hung."""
    for outcome in two_processes(DIFFER):
        said = outcome.output
        differ = "differ in train.max_steps (ranks of 4: 0; 5: 1): start each with the same command"
        assert differ in said, said
        assert "(ranks of ddp, 32-true: 0; fsdp, 32-true: 1): say --train.strategy" in said, said


@pytest.fixture
def torchrun(monkeypatch):
    """The first of two processes of torchrun on this machine."""
    for name, value in (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)


def test_a_port_that_is_taken_is_one_line(torchrun, monkeypatch, make_recipe):
    recipe = make_recipe(strategy="fsdp")
    machine, _ = choose_strategy(choose_machine(recipe.train), GPT.on_meta(recipe.model.config()), recipe)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=r"the port of 127.0.0.1:\d+ is taken.*--master_port"):
            Parallel(machine)


def test_where_a_launch_fails_the_processes_that_it_started_end():
    """Guards: beside a port that was taken they came late, found nobody, and waited for the time-out."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        launcher = SimpleNamespace(procs=[child], num_processes=2)
        with pytest.raises(UserError), Watch().launched_by(launcher):
            raise UserError("the port is taken")
        assert "LINGPT_MAIN_PID" not in os.environ, "whose later processes would take it for their parent"
        assert child.wait(timeout=30) == -signal.SIGKILL


def test_other_numbers_than_the_launchers_are_refused(torchrun):
    machine = choose_machine(TrainConfig(accelerator="cpu"))
    assert (machine.devices, machine.num_nodes, machine.world_size) == (2, 1, 2)
    for asked, line in (
        ({"devices": 4}, "4 devices on 1: --train.devices auto takes"),
        ({"devices": 1}, "1 device on 1: --train.devices auto takes"),
        ({"num_nodes": 2}, "2 devices on 2: --train.num_nodes auto takes"),
    ):
        with pytest.raises(UserError) as refused:
            choose_machine(TrainConfig(accelerator="cpu", **asked))
        started = "torchrun has started 2 processes a machine on 1 machine, but the recipe asks for"
        assert f"{started} {line}" in str(refused.value)


def test_machines_that_nobody_has_started_are_refused():
    with pytest.raises(UserError, match=r"num_nodes 2, but nothing has started.*torchrun or srun"):
        choose_machine(TrainConfig(accelerator="cpu", num_nodes=2))
