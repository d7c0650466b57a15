"""The command that brings an extra names what is there: a folder, or the installed package."""

import shlex
from pathlib import Path

import pytest

from lingpt.common import install


@pytest.mark.parametrize("name", ["lingpt", "My clone"])
def test_a_source_tree_is_named_by_its_folder_and_a_wheel_by_its_name(name, tmp_path, monkeypatch):
    """Guards: a name that pip would look up in an index, where the project was installed from its folder."""
    folder = tmp_path / name
    monkeypatch.setattr(install, "__file__", str(folder / "common" / "install.py"))
    assert install.install_command("hf") == "pip install 'lingpt[hf]'"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    assert shlex.split(install.install_command("hf")) == ["pip", "install", "-e", f"{folder}[hf]"]


def test_the_version_of_a_package_that_is_not_installed_is_none():
    """Guards: scores and runs of a clone that is only on the path, which failed."""
    assert install.installed_version("pytest") == pytest.__version__
    assert install.installed_version("no-such-package-as-this") is None


def test_nobody_else_writes_the_command_or_reads_versions():
    root = Path(install.__file__).parents[1]
    folders = ("kernels", "models", "data", "train", "eval", "study", "cli")
    paths = [path for name in folders for path in (root / name).rglob("*.py")]
    assert paths and not [path for path in paths if "lingpt[" in path.read_text()]
    own = ("PackageNotFoundError", "metadata import version")
    assert not [path for path in paths if any(word in path.read_text() for word in own)]
