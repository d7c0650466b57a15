"""How this installation gets what one of the project's extras brings."""

import shlex
from pathlib import Path


def install_command(extra: str) -> str:
    """A line for the shell: with the folder of a clone or an editable install, else the package's name."""
    folder = Path(__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install 'lingpt[{extra}]'"
