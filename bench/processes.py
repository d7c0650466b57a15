"""Processes that are started ahead: importing PyTorch takes seconds, in which another row can be measured."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lingpt.common.parent import ends_with_this_process

GRACE = 10.0  # seconds that the others have to end once one has failed
_WAIT = """
import gc, json, os, sys
gc.disable()  # until `main`, as in a command
import lingpt.train
from lingpt.cli.main import main
if line := sys.stdin.readline():
    environment, sys.argv[1:] = json.loads(line)
    os.environ.update(environment)
    sys.exit(main())
"""


class Processes:
    """`n` processes that wait for a command of `lingpt`, and are then the ranks of one run, as by torchrun.

    What they print goes to `<logs>/<rank>.out` and `.err`. As a context it ends those that still wait.
    """

    def __init__(self, n: int, logs: Path) -> None:
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self._ranks = [self._start(rank) for rank in range(n)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-c", _WAIT]
        environment = os.environ | ends_with_this_process()
        with open(self.logs / f"{rank}.out", "w") as out, open(self.logs / f"{rank}.err", "w") as err:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
            process.communicate()

    def run(self, words: Sequence[str], seconds: float) -> str | None:
        """Runs `lingpt <words>`; None if all processes end well, else the last line on stderr of the first
        one that does not. TimeoutError after `seconds`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, process in enumerate(self._ranks):
            environment = _torchrun(rank, len(self._ranks), port) if len(self._ranks) > 1 else {}
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):  # it has ended: stderr says why
                process.stdin.write(json.dumps((environment, words)) + "\n")
                process.stdin.flush()
        try:
            failed = self._first_failure(time.monotonic() + seconds)
        finally:
            self.__exit__()
        if failed is None:
            return None
        lines = (self.logs / f"{failed}.err").read_text().strip().splitlines()
        return lines[-1] if lines else f"process {failed} ended with {self._ranks[failed].returncode}"

    def _first_failure(self, deadline: float) -> int | None:
        """Waits for the end of all; returns the rank that failed first, or None."""
        failed = None
        while any(process.poll() is None for process in self._ranks):
            if failed is None and (failed := self._failed()) is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                if failed is None:
                    raise TimeoutError
                return failed
            time.sleep(0.1)
        return self._failed() if failed is None else failed

    def _failed(self) -> int | None:
        return next((rank for rank, process in enumerate(self._ranks) if process.poll()), None)


def _torchrun(rank: int, n: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank."""
    return {
        "TORCHELASTIC_RUN_ID": "bench", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
