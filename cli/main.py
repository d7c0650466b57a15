"""`lingpt <verb> …`: finds the verb's file, parses, runs, and turns a user's mistake into one line.

Verbs are imported lazily, so that `lingpt --help` needs no PyTorch. A verb's file exposes `HELP` (one line),
`configure(parser)` and `run(args)`; dataclass groups arrive in `args` as instances.

Exit codes: 0 done, 2 a mistake of the user or of the machine (one line on stderr), 128 + n ended by signal n
(130 Ctrl-C, 143 SIGTERM).
`LINGPT_TRACEBACK=1` shows the traceback behind the line.
"""

import argparse
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import requires, version
from types import FrameType, ModuleType
from typing import Any, Literal, get_args, get_origin

import jsonargparse

from lingpt.common.errors import Interrupted, UserError, nearest
from lingpt.common.files import DISK_ERRORS, disk_fix
from lingpt.common.install import install_command

VERBS = {  # verb: (module, what it does)
    "train": ("lingpt.cli.train", "train a model, or go on with a run"),
    "data": ("lingpt.cli.data", "prepare a corpus: tokenizer, token cache, statistics"),
    "eval": ("lingpt.cli.evaluate", "score checkpoints with lm-eval"),
    "study": ("lingpt.cli.study", "train and score several attentions: tables, figures and a page"),
    "mqar": ("lingpt.cli.mqar", "train and score small models on associative recall"),
    "curves": ("lingpt.cli.curves", "draw the loss curves of runs, and the table of time-to-loss"),
    "generate": ("lingpt.cli.generate", "continue a text with a trained model"),
    "export": ("lingpt.cli.export", "write a checkpoint's model as one file"),
    "replay": ("lingpt.cli.replay", "show what a step of a run was trained on"),
    "kernels": ("lingpt.cli.kernels", "list, compile and test the CUDA kernels"),
    "bench": ("lingpt.cli.bench", "measure the kernels against the baselines"),
    "bench train": ("lingpt.cli.bench_train", "time a whole training step of each attention"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code; `argv` defaults to the process's own."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Before PyTorch comes in. Where something else runs too, threads that spin while they wait for each other
    # made a step of the demo ten times slower on two cores; threads that sleep, twice.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with _signals_interrupt():
            return _dispatch(argv)
    except KeyboardInterrupt as stop:
        _complain(str(stop) or "interrupted; nothing was left half-written")
        return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
    except BrokenPipeError:  # `lingpt … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        message = user_message(error)
        if message is None or os.environ.get("LINGPT_TRACEBACK"):
            raise
        _complain(message)
        return 2


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """While inside, the signals that would kill at once interrupt as Ctrl-C does: what is half-written goes.

    One that is ignored stays ignored (nohup), and only a main thread has handlers.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    kill = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    here = threading.current_thread() is threading.main_thread()
    numbers = [n for n in kill if here and signal.getsignal(n) == signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"lingpt {version('lingpt')}")
        return 0
    verb, *rest = argv
    if rest and f"{verb} {rest[0]}" in VERBS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    if verb not in VERBS:
        raise UserError(f"unknown verb {verb!r}{nearest(verb, VERBS)}; `lingpt --help` lists them")
    module = importlib.import_module(VERBS[verb][0])
    try:
        args = parse(verb, module, rest)
    except SystemExit as done:  # --help, --print_config
        return int(done.code or 0)
    module.run(args)
    return 0


def parse(verb: str, module: ModuleType, argv: list[str]) -> jsonargparse.Namespace:
    """The arguments of a verb, as its module's `run` takes them. UserError where they are none."""
    parser = jsonargparse.ArgumentParser(
        prog=f"lingpt {verb}", description=module.HELP, exit_on_error=False, allow_abbrev=False
    )
    module.configure(parser)
    try:
        args = parser.parse_args(_config_first(argv))
    except argparse.ArgumentError as error:
        raise UserError(_explain(parser, str(error))) from error
    _refuse_nulls(parser, args)
    return parser.instantiate_classes(args)


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<11} {line}" for verb, (_, line) in VERBS.items())
    return (
        "usage: lingpt <verb> [options]\n\n"
        "Trains Pythia language models with linear attention, and compares them with softmax and GLA.\n\n"
        f"verbs:\n{verbs}\n\n"
        "`lingpt <verb> --help` lists a verb's options; start with `lingpt train --config demo`."
    )


def _config_first(argv: list[str]) -> list[str]:
    """Moves `--config X` to the front: what the command line says wins wherever it stands."""
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            return [word, argv[i + 1], *argv[:i], *argv[i + 2 :]]
        if word.startswith("--config="):
            return [word, *argv[:i], *argv[i + 1 :]]
    return argv


def _explain(parser: jsonargparse.ArgumentParser, message: str) -> str:
    """The parser's complaint on one line, with the nearest key where a key is unknown."""
    line = " ".join(message.split())
    unknown = (
        re.search(r"Group '(?P<group>\S+)' does not accept nested key '(?P<key>\S+)'", line)
        or re.search(r"Key '(?P<key>\S+)' is not expected", line)
        or re.search(r"Unrecognized arguments: --(?P<key>[^\s=]+)", line)
    )
    if unknown is None:
        return _explain_value(parser, line)
    found = unknown.groupdict()
    key = f"{found['group']}.{found['key']}" if found.get("group") else found["key"]
    keys = set(parser.get_defaults(skip_validation=True).keys()) - {"config"}
    return f"unknown key {key!r}{nearest(key, keys)}; `{parser.prog} --help` lists the keys"


def _explain_value(parser: jsonargparse.ArgumentParser, line: str) -> str:
    """A complaint about a value, with what the key takes in place of the parser's types."""
    options = {action.dest: action for action in parser._actions}
    if missing := re.search(r'Key "(\S+)" is required', line):
        option = options[missing[1]]
        name = option.option_strings[0] if option.option_strings else f"<{option.dest}>"
        return f"{parser.prog} needs {name}: {option.help}"
    keys = [key for key in re.findall(r'[Pp]arser key "(\S+?)"', line) if key in options]
    if not keys:
        return line
    key, (_, *given) = keys[-1], line.rsplit(" value: ", 1)
    takes = _words_for(getattr(options[key], "_typehint", None))
    if takes is None:
        return f"--{key} takes a YAML file of its keys; or give them one by one, as --{key}.<key>"
    was = f" is {given[-1][:80]}; it" if given else ""
    return f"{key}{was} must be {takes}"


def _refuse_nulls(parser: jsonargparse.ArgumentParser, args: jsonargparse.Namespace) -> None:
    """The parser takes a null for a value of any type."""
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        words = _words_for(kind) if type(None) not in get_args(kind) else None
        if words and action.default is not None and args.get(action.dest, action.default) is None:
            raise UserError(f"{action.dest} is null; it must be {words}")


def _words_for(kind: Any) -> str | None:
    """What values a type takes, in words; None where it is no type of ours."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list[str]: "a list",
    }
    if get_origin(kind) is Literal:
        values = [str(value) for value in get_args(kind)]
        return f"one of {', '.join(values)}" if len(values) > 1 else values[0]
    if kind in words:
        return words[kind]
    parts = [_words_for(part) for part in get_args(kind) if part is not type(None)]
    return " or ".join(filter(None, parts)) or None


def user_message(error: BaseException) -> str | None:
    """The line to show for `error`, or None where it is a bug of ours and deserves its traceback."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        extra = _extra_with(package)
        return f"{package} is not installed: {install_command(extra)}" if extra else None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}: free some space and start again"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS and error.filename:
        return f"{error.filename}: {error.strerror}; {disk_fix(error, error.filename)} and start again"
    return None


def _extra_with(package: str) -> str | None:
    """The extra of pyproject.toml that brings `package`, where one does."""
    name = re.escape(package.replace("_", "-"))
    for need in requires("lingpt") or []:
        if found := re.match(rf"{name}(?![\w\[-]).*extra == .(\w+)", need):
            return found[1]
    return None


def _complain(message: str) -> None:
    """One line on stderr; of the processes of a multi-device run, one a machine speaks."""
    if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))) == 0:
        print(f"lingpt: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
