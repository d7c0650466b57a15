"""Guards what a run's record says of its source, where git says nothing: a container, a copied folder."""

import tomllib
from pathlib import Path

import pytest

from lingpt.train.runs import environment

ROOT = Path(__file__).parents[3]
package_hash = environment.package_hash.__wrapped__  # reads the files each time


@pytest.fixture
def source(tmp_path, monkeypatch):
    files = {
        "train/__init__.py": "",
        "train/loop.py": "a = 1",
        "kernels/scan.cu": "",
        "tests/__init__.py": "",
        "runs/log.py": "x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["tests/__init__.py", "runs/log.py"])
def test_the_source_s_hash_is_not_of_what_is_not_code(source, name):
    first = package_hash()
    (source / name).write_text("changed")
    assert package_hash() == first


@pytest.mark.parametrize("name", ["train/loop.py", "kernels/scan.cu"])
def test_the_source_s_hash_is_of_the_code(source, name):
    """kernels/ among it, though it has no __init__.py."""
    first = package_hash()
    (source / name).write_text("changed")
    assert package_hash() != first


def test_the_source_s_hash_is_of_every_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert {name.split(".")[1] for name in packages if "." in name} <= set(environment._CODE)
