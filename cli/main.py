"""`lingpt <verb> …`: finds the verb's file, parses, runs, and turns a user's mistake into one line.

Verbs are imported lazily, so that `lingpt --help` needs no PyTorch. A verb's file exposes `Options`, a
dataclass whose docstring says what the verb does, and `run(options)`. A verb that takes YAML files has a
`parse(words)`, which returns what `run` takes.

Exit codes: 0 done, 2 an error of the user or the machine (one line on stderr), 128 + n ended by signal n
(130 Ctrl-C, 143 SIGTERM).
`LINGPT_TRACEBACK=1` shows the traceback behind the line.
"""

import contextlib
import errno
import gc
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import requires
from types import FrameType, ModuleType
from typing import Any

from lingpt.common import arguments
from lingpt.common.errors import INTERRUPTED, Interrupted, UserError, nearest
from lingpt.common.files import DISK_ERRORS, FULL_DISK, discard, disk_fix
from lingpt.common.install import install_command, installed_version
from lingpt.common.local_rank import local_rank
from lingpt.common.parent import STOP_SIGNALS, end_with_parent, signals_to

VERBS = {  # verb: (module, what it does)
    "train": ("lingpt.cli.train", "train a model, or resume a run"),
    "data": ("lingpt.cli.data", "prepare a corpus: tokenizer, token cache, statistics"),
    "eval": ("lingpt.cli.evaluate", "score checkpoints with lm-eval"),
    "study": ("lingpt.cli.study", "train and score several attentions: tables, figures and a page"),
    "mqar": ("lingpt.cli.mqar", "train and score small models on associative recall"),
    "curves": ("lingpt.cli.curves", "draw the loss curves of runs, and print the time to each loss"),
    "linearize": ("lingpt.cli.linearize", "give a trained model another attention"),
    "generate": ("lingpt.cli.generate", "continue a text with a trained model"),
    "export": ("lingpt.cli.export", "write a trained model as a folder, for transformers too"),
    "replay": ("lingpt.cli.replay", "show what a step of a run was trained on"),
    "kernels": ("lingpt.cli.kernels", "list, compile and test the CUDA kernels"),
    "bench": ("lingpt.cli.bench", "measure the kernels against the baselines"),
    "bench forms": (
        "lingpt.cli.bench_forms",
        "time forms of linear attention in plain PyTorch over the length",
    ),
    "bench train": ("lingpt.cli.bench_train", "time a whole training step of each attention"),
    "bench context": ("lingpt.cli.bench_context", "time steps of sequences over several devices"),
    "bench decode": ("lingpt.cli.bench_decode", "time a token of decoding, over the context"),
    "bench data": ("lingpt.cli.bench_data", "time how fast text becomes a token cache"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code; `argv` defaults to `sys.argv`, and the process then ends."""
    ends_here = argv is None
    if ends_here:
        # Imported modules never become garbage; scanning them costs a quarter of `lingpt train --help`.
        gc.disable()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while Python ends makes no traceback
    argv = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    # Set before PyTorch is imported. With other load on two cores, threads that spin while waiting for each
    # other made a step of the demo ten times slower; threads that sleep, two times.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    received: list[int] = []
    try:
        with _signals_interrupt(received):
            end_with_parent()
            code = _dispatch(argv)
            _flush()
        if ends_here:
            gc.freeze()
        return code
    except KeyboardInterrupt as stop:
        _complain(str(stop) or INTERRUPTED)
        return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
    except BrokenPipeError:  # `lingpt … | head` closed the pipe
        return 128 + signal.SIGPIPE
    except Exception as error:
        if received:  # a library has made another error of the interrupt
            _complain(INTERRUPTED)
            return 128 + received[0]
        message = user_message(error)
        if message is None or os.environ.get("LINGPT_TRACEBACK"):
            raise
        _complain(message)
        return 2
    finally:
        with contextlib.suppress(OSError):
            _flush()


def _open_streams() -> None:
    """Makes stdout and stderr take any text: a closed one drops it, another encoding than UTF-8 gets `?`. And
    stdin give text: none if it is closed, and `�` for what is not in its encoding."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
        stream = getattr(sys, name)
        if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(
            stream, "reconfigure"
        ):
            with contextlib.suppress(io.UnsupportedOperation):  # stdin, read before `main` was called
                stream.reconfigure(errors="replace")


def _flush() -> None:
    """Flushes stdout while an error can still become one line, which at Python's own flush at exit it cannot.
    After an error what is left is dropped."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        raise


@contextlib.contextmanager
def _signals_interrupt(received: list[int]) -> Iterator[None]:
    """Makes signals that would kill at once interrupt as Ctrl-C does, so that partial files are removed.

    A signal that is ignored stays ignored (nohup). Handlers are set in the main thread only. received: gets
    the signals that came.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise Interrupted(number)

    here = threading.current_thread() is threading.main_thread()
    kills = (signal.SIG_DFL, signal.default_int_handler)
    with signals_to(interrupt, [n for n in STOP_SIGNALS if here and signal.getsignal(n) in kills]):
        yield


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"lingpt {installed_version('lingpt') or '(not installed)'}")
        return 0
    verb, *rest = argv
    if verb == "bench" and rest and not rest[0].startswith("-"):
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb not in VERBS:
        raise UserError(f"unknown verb {verb!r}{nearest(verb, VERBS)}; `lingpt --help` lists them")
    module = importlib.import_module(VERBS[verb][0])
    try:
        options = parse(verb, module, rest)
    except SystemExit:  # --help
        return 0
    if not gc.isenabled():  # `main` disabled it: modules imported so far are not scanned any more
        gc.freeze()
        gc.enable()
    module.run(options)
    return 0


def parse(verb: str, module: ModuleType, words: Sequence[str]) -> Any:
    """A verb's arguments, for its module's `run`; UserError if they are invalid."""
    if hasattr(module, "parse"):
        return module.parse(words)
    return arguments.parse(verb, module.Options, words)


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<14} {line}" for verb, (_, line) in VERBS.items())
    return (
        "usage: lingpt <verb> [options]\n\n"
        "Trains Pythia language models with linear attention, and compares them with softmax and GLA.\n\n"
        f"verbs:\n{verbs}\n\n"
        "`lingpt <verb> --help` lists a verb's options; start with `lingpt train --config demo`."
    )


def user_message(error: BaseException) -> str | None:
    """The line to show for `error`; None if it is a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        extra = _extra_with(package)
        return f"{package} is not installed: {install_command(extra)}" if extra else None
    if not isinstance(error, OSError):
        return None
    name = error.filename
    if error.errno in FULL_DISK:
        return f"the disk is full{f' writing {name}' if name else ''}: free some space and start again"
    if error.errno == errno.ENAMETOOLONG:
        return f"{str(name)[:80]}…: a name in a path has at most 255 bytes: shorten it"
    if error.errno in DISK_ERRORS and name:
        return f"{name}: {error.strerror}; {disk_fix(error, name)} and start again"
    return None


def _extra_with(package: str) -> str | None:
    """The extra of pyproject.toml that brings `package`; None if there is none or LinGPT is not installed."""
    if installed_version("lingpt") is None:
        return None
    name = re.escape(package.replace("_", "-"))
    for need in requires("lingpt") or []:
        if found := re.match(rf"{name}(?![\w\[-]).*extra == .(\w+)", need):
            return found[1]
    return None


def _complain(message: str) -> None:
    """Prints one line on stderr; in a multi-device run only one process per machine does."""
    if local_rank() == 0:
        try:
            print(f"lingpt: {message}", file=sys.stderr, flush=True)
        except OSError:  # a terminal that is gone: what is left would fail at the end
            discard(sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main())
