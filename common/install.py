"""Which packages are installed, and how this installation gets what one of the project's extras brings."""

import functools
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def install_command(extra: str) -> str:
    """A line for the shell: with the folder of a clone or an editable install, else the package's name."""
    folder = Path(__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install 'lingpt[{extra}]'"


@functools.cache
def installed_version(package: str) -> str | None:
    """None where it is not installed; LinGPT itself runs from a clone that is only on the path, too."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
