"""Which packages are installed, and the command that installs one of the project's extras."""

import functools
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def install_command(extra: str) -> str:
    """The pip command for `extra`, with the folder of a clone or an editable install if this is one."""
    folder = Path(__file__).resolve().parents[1]
    if (folder / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"pip install 'lingpt[{extra}]'"


@functools.cache
def installed_version(package: str) -> str | None:
    """The package's version; None if it is not installed, as LinGPT may not be when it runs from a clone."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
