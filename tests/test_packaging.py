"""What is shipped is what is here: the package map, the wheel, the dependencies, and who may import whom."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = ("kernels", "models", "data", "train", "eval", "configs", "cli")
SHIPPED = (".py", ".yaml", ".cu", ".cuh", ".h", ".json")

# What a folder may import of the others; nothing reaches back.
MAY_IMPORT = {
    "kernels": set(),
    "configs": set(),
    "models": {"kernels"},
    "data": set(),
    "train": {"kernels", "models", "data"},
    "eval": {"kernels", "models", "data"},
    "cli": set(FOLDERS),
}


def folder_of(package: str) -> Path:
    """Where `pyproject.toml` maps a package: the longest mapped prefix decides."""
    prefix, rest = package, []
    while prefix not in SETUPTOOLS["package-dir"]:
        prefix, _, name = prefix.rpartition(".")
        rest.insert(0, name)
    return ROOT.joinpath(SETUPTOOLS["package-dir"][prefix], *rest)


def sources(*suffixes: str) -> list[Path]:
    """Our files of these kinds, as git knows them; all there are where there is no git."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", *FOLDERS], capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    paths = paths or [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in paths if path.suffix in suffixes and path.is_file())


# -- the package map ----------------------------------------------------------------------------------------


def test_every_listed_package_has_its_folder_and_every_folder_its_package():
    """Guards: a new subpackage that is in the editable install and missing from the wheel."""
    mapped = {folder_of(package): package for package in SETUPTOOLS["packages"]}
    assert all((folder / "__init__.py").is_file() for folder in mapped), "a listed package has no folder"
    assert {path.parent for path in sources(".py")} == set(mapped)


def test_kernels_is_no_package_at_the_root():
    """Guards: Hugging Face's `kernels`, which transformers imports, wins a bare import even from the root."""
    assert not (ROOT / "kernels" / "__init__.py").exists() and not (ROOT / "lingpt").exists()


def test_bare_names_never_find_this_repository_under_pytest():
    for name in FOLDERS:
        spec = find_spec(name)
        assert spec is None or not inside(spec.origin, *(spec.submodule_search_locations or [])), name


@pytest.mark.parametrize("how", ["safe path", "console script"])
def test_bare_names_never_find_this_repository_from_the_root(how, tmp_path):
    code = (
        "import lingpt.configs, importlib.util as u\n"
        f"specs = [u.find_spec(name) for name in {FOLDERS}]\n"
        "for s in filter(None, specs): print(s.origin, *(s.submodule_search_locations or []), sep='\\n')"
    )
    script = tmp_path / "script"  # as pip's: sys.path starts with the script's folder, not with this one
    script.write_text(code)
    command = [sys.executable, "-P", "-c", code] if how == "safe path" else [sys.executable, str(script)]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    told = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    assert not inside(*told.stdout.split("\n")), told.stdout


def inside(*paths: str | None) -> bool:
    """Whether any of the paths is one of this repository's top-level folders, or below it."""
    ours = [ROOT / folder for folder in FOLDERS]
    return any(path and Path(path).is_relative_to(folder) for path in paths for folder in ours)


# -- the wheel ----------------------------------------------------------------------------------------------


def test_the_wheel_holds_every_source_recipe_and_kernel(tmp_path):
    """Guards: YAML and CUDA files forgotten in package-data. Built from a copy: it leaves a folder."""
    pytest.importorskip("setuptools", minversion="77", reason="the dev extra brings setuptools")
    source = tmp_path / "source"
    files = sources(*SHIPPED)
    for path in [*files, *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        (source / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, source / path.relative_to(ROOT))
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-P", "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    mapped = {folder_of(package): package.replace(".", "/") for package in SETUPTOOLS["packages"]}
    wanted = {f"{mapped[path.parent]}/{path.name}" for path in files}
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == wanted
    assert {"lingpt/configs/demo.yaml", "lingpt/eval/tasks/sources.yaml"} <= wanted
    assert any(name.startswith("lingpt/kernels/linear/cuda/") and name.endswith(".cu") for name in wanted)
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_the_version_is_written_once():
    written = PROJECT["project"]["version"]
    assert version("lingpt") == written, "the installed lingpt is another: pip install -e ."
    again = [path for path in sources(".py") if re.search(r"__version__\s*=", path.read_text())]
    assert not again


# -- the dependencies ---------------------------------------------------------------------------------------


def imports(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """(module, names, line) of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield node.module, [alias.name for alias in node.names], node.lineno


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    project = PROJECT["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    """Guards: a package that only another one's dependencies bring, and one that nothing needs any more."""
    tops = {module.partition(".")[0] for path in sources(".py") for module, _, _ in imports(path)}
    tops -= {*sys.stdlib_module_names, "lingpt"}
    known = packages_distributions() | {"fla": ["fla-core"], "cuda": ["cuda-core", "cuda-bindings"]}
    imported = {top: {canonicalize_name(name) for name in known[top]} for top in tops}
    declared = {name for extra in (None, "cuda13", "gla") for name in requirements(extra)}
    assert not {top: names for top, names in imported.items() if not names & declared}
    assert set(requirements()) <= set().union(*imported.values())


def test_constraints_pin_every_dependency_within_its_bounds():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    for name, need in (requirements() | requirements("gla") | requirements("dev")).items():
        if name != "setuptools":  # builds the project; any that is new enough does
            assert need.specifier and need.specifier.contains(pins[name]), f"{need}, pinned to {pins[name]}"
    for extra in ("cuda12", "cuda13"):
        assert all(need.specifier for need in requirements(extra).values())
    assert not any("+" in pin for pin in pins.values()), "a local build (+cpu) is on no index"


# -- who imports whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder):
    """kernels ← models ← train, eval; data ← train, eval; the command line on top."""
    for path in sources(".py"):
        if path.relative_to(ROOT).parts[0] != folder:
            continue
        for module, names, line in imports(path):
            if module == "lingpt" or module.startswith("lingpt."):
                other = module.split(".")[1]
                where = f"{path.relative_to(ROOT)}:{line}"
                assert other == folder or other in MAY_IMPORT[folder], f"{where} imports lingpt.{other}"
                private = [name for name in [*module.split("."), *names] if re.match(r"_(?!_)", name)]
                assert other == folder or not private, f"{where} imports {private} of lingpt.{other}"
