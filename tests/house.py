"""Counts what a newcomer has to hold in the head: lines, the files that a step and a call pass, words.

python -m lingpt.tests.house            # a Markdown table
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
TOOLS = ("ptx_emulator", "bench")


def tracked(*patterns: str) -> list[Path]:
    """The files of the checkout that git knows, by glob."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *patterns]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def python_lines(*leave_out: str) -> int:
    """Lines of Python, blank ones and comments too, outside of folders named `tests` and of `leave_out`."""
    paths = [path.relative_to(ROOT) for path in tracked("*.py")]
    kept = [path for path in paths if "tests" not in path.parts and path.parts[0] not in leave_out]
    return sum(len((ROOT / path).read_text().splitlines()) for path in kept)


def files_passed(work: Callable[[], object]) -> set[str]:
    """The files of LinGPT whose functions run during `work()`, in any thread that starts in it."""
    seen = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    inside = {Path(name).relative_to(ROOT) for name in seen if name.startswith(str(ROOT))}
    own = {path.as_posix() for path in inside if not {"site-packages", ".venv"} & set(path.parts)}
    return own - {"tests/house.py"}


def files_of_a_call() -> set[str]:
    """Of one eager call of the operator on a CPU, forward and backward."""
    import torch

    from lingpt import linear_attention

    q, k, v = (torch.randn(1, 70, 2, 16, requires_grad=True) for _ in range(3))
    linear_attention(q, k, v).sum().backward()  # what is done once
    return files_passed(lambda: linear_attention(q, k, v).sum().backward())


def files_of_a_step() -> set[str]:
    """Of one training step of the demo recipe on a CPU, forward, backward and the optimizer."""
    import tempfile

    from lingpt.train import loop, train
    from lingpt.train.recipe import parse_recipe

    own_step, found = loop.Run.step, []

    def step(run: loop.Run, stop: object) -> object:
        lines: list[object] = []
        found.append(files_passed(lambda: lines.append(own_step(run, stop))))
        return lines[0]

    loop.Run.step = step
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = {"out_dir": folder, "max_steps": 3, "sample_tokens": 0, "wandb": "false"}
            words = [f"--train.{key}={value}" for key, value in options.items()]
            train(parse_recipe(["--config=demo", *words]))
    finally:
        loop.Run.step = own_step
    return found[-1]


def megabytes(folder: str) -> float:
    return sum(path.stat().st_size for path in tracked(folder)) / 1e6


def table() -> str:
    readme = (ROOT / "README.md").read_text().split()
    rows = {
        "Python in the package (tests, emulator, bench apart)": python_lines(*TOOLS),
        "all Python but tests": python_lines(),
        "files that a training step passes": len(files_of_a_step()),
        "files that an operator call passes": len(files_of_a_call()),
        "words of the README": len(readme),
        "MB of docs/results": f"{megabytes('docs/results'):.1f}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {count} |" for what, count in rows.items())])


if __name__ == "__main__":
    print(table())
