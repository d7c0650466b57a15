"""What is shipped is what is here: the package map, the wheel, the dependencies, and who may import whom."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lingpt

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS = (
    "common", "plots", "kernels", "models", "layers", "hf", "data", "train", "eval", "bench", "study", "cli",
)  # fmt: skip
BARE_NAMES = (*FOLDERS, "configs", "tests")
TOP = ("__init__.py", "py.typed")
SHIPPED = (".py", ".typed", ".yaml", ".cu", ".cuh", ".h", ".json")

# What a folder may import of the others; nothing reaches back.
MAY_IMPORT = {
    "common": set(),
    "plots": {"common", "models"},
    "kernels": {"common"},
    "models": {"common", "kernels"},
    "layers": {"common", "kernels", "models"},
    "hf": {"common", "kernels", "models", "layers"},
    "data": {"common"},
    "train": {"common", "plots", "kernels", "models", "data"},
    "eval": {"common", "plots", "kernels", "models", "data"},
    "bench": {"common", "plots", "kernels", "models", "data", "train", "hf"},
    "study": {"common", "plots", "models", "data", "train", "eval"},
    "cli": set(FOLDERS),
}
# What only the extras `train` and `eval` bring, and what these bring in turn.
HEAVY = ("litgpt", "lightning", "datasets", "lm_eval", "wandb", "transformers", "tokenizers", "matplotlib")


def sources(*suffixes: str) -> list[Path]:
    """Our files of these kinds, as git knows them or will; all there are where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*command, *TOP, *FOLDERS, "configs"], capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    if not paths:
        paths = [ROOT / name for name in TOP]
        paths += [path for name in (*FOLDERS, "configs") for path in (ROOT / name).rglob("*")]
    return sorted(path for path in paths if path.suffix in suffixes and path.is_file())


def module_name(path: Path) -> str:
    """`lingpt.X.Y` of X/Y.py, and of X/Y/__init__.py."""
    return ".".join(["lingpt", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


def clone(folder: Path) -> Path:
    """A copy of what is shipped, and of what builds it: building leaves files behind."""
    for path in [*sources(*SHIPPED), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return folder


def python(*arguments: str | Path, cwd: Path = ROOT, path: tuple[Path | str, ...] = ()) -> str:
    """What a new interpreter prints; its PYTHONPATH is `path` alone."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> zipfile.ZipFile:
    """The wheel, or the editable wheel, that setuptools makes of `source`."""
    pytest.importorskip("setuptools", minversion="77", reason="the dev extra brings setuptools")
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    out.mkdir()
    python("-P", "-c", code, out, cwd=source)
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


# -- the repository is the package --------------------------------------------------------------------------


def test_the_packages_are_the_folders_with_source():
    """Guards: a new subpackage that is in the editable install and missing from the wheel."""
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"lingpt": "."}
    listed = {package: ROOT.joinpath(*package.split(".")[1:]) for package in PACKAGES}
    assert len(listed) == len(PACKAGES)
    assert set(listed.values()) == {path.parent for path in sources(".py", ".cu")}
    no_init = {package for package, folder in listed.items() if not (folder / "__init__.py").is_file()}
    assert no_init == {"lingpt.kernels"}, "without __init__.py on purpose: see the next tests"


def test_a_bare_import_of_kernels_from_the_root_finds_hugging_faces_or_nothing(tmp_path):
    """Guards: transformers imports `kernels`, and means Hugging Face's, which wins over a folder without
    __init__.py even from here."""
    show = "import kernels; print(kernels.__file__)"
    assert python("-c", show) == "None\n" or find_spec("kernels"), "a namespace with nothing in it"
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    assert python("-c", show, path=(tmp_path,)) == f"{theirs}\n"


def test_bare_names_never_find_this_repository_under_pytest():
    for name in BARE_NAMES:
        spec = find_spec(name) if name not in sys.modules else None  # pytest's own `tests` holds no module
        assert spec is None or not inside(spec.origin, *(spec.submodule_search_locations or [])), name
        assert not inside(getattr(sys.modules.get(name), "__file__", None)), name


@pytest.mark.parametrize("how", ["safe path", "console script"])
def test_bare_names_never_find_this_repository_from_the_root(how, tmp_path):
    code = (
        "import lingpt.cli, importlib.util as u\n"
        f"specs = [u.find_spec(name) for name in {BARE_NAMES}]\n"
        "for s in filter(None, specs): print(s.origin, *(s.submodule_search_locations or []), sep='\\n')"
    )
    script = tmp_path / "script"  # as pip's: sys.path starts with the script's folder, not with this one
    script.write_text(code)
    found = python("-P", "-c", code) if how == "safe path" else python(script)
    assert not inside(*found.split("\n")), found


def inside(*paths: str | None) -> bool:
    """Whether any of the paths is one of this repository's top-level folders, or below it."""
    ours = [ROOT / name for name in BARE_NAMES]
    return any(path and Path(path).is_relative_to(folder) for path in paths for folder in ours)


SCRIPT = """
import lingpt, torch
from lingpt import linear_attention
q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
linear_attention(q, k, v).sum().backward()
assert q.grad is not None
print(lingpt.__file__)
"""
# `python -S` with this path has the dependencies and no installed lingpt: editable installs are .pth files.
DEPENDENCIES = tuple(path for path in sys.path if path.endswith("-packages"))


@pytest.mark.slow
def test_a_script_next_to_a_clone_named_lingpt_needs_no_install(tmp_path):
    folder = clone(tmp_path / "lingpt")
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = python("-S", tmp_path / "script.py", cwd=tmp_path.parent, path=DEPENDENCIES)
    assert printed == f"{folder / '__init__.py'}\n"


@pytest.mark.slow
def test_a_script_next_to_a_clone_of_another_name_finds_the_editable_install(tmp_path):
    folder, site = clone(tmp_path / "My-clone 2"), tmp_path / "site"
    build("editable", folder, tmp_path / "wheel").extractall(site)
    (tmp_path / "script.py").write_text(f"import site; site.addsitedir({str(site)!r})\n{SCRIPT}")
    printed = python("-S", tmp_path / "script.py", cwd=tmp_path.parent, path=(site, *DEPENDENCIES))
    assert printed == f"{folder / '__init__.py'}\n"


# -- the wheel ----------------------------------------------------------------------------------------------


def test_the_wheel_holds_every_source_recipe_and_kernel(tmp_path):
    """Guards: YAML and CUDA files forgotten in package-data, and files that are no part of the package."""
    names = set(build("wheel", clone(tmp_path / "source"), tmp_path / "wheel").namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    wanted = {f"lingpt/{path.relative_to(ROOT).as_posix()}" for path in sources(*SHIPPED)}
    assert names - metadata == wanted
    assert {"lingpt/__init__.py", "lingpt/py.typed", "lingpt/configs/demo.yaml"} <= wanted
    assert "lingpt/configs/studies/demo.yaml" in wanted
    assert "lingpt/eval/tasks/sources.yaml" in wanted
    cuda = "lingpt/kernels/linear_attention/cuda/"
    assert {".cu", ".cuh", ".py"} <= {Path(name).suffix for name in wanted if name.startswith(cuda)}
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


TYPED = """
import torch
from lingpt import gated_linear_attention, linear_attention, linear_attention_qkv
from lingpt import gated_linear_attention_with_state, linear_attention_with_state
x = torch.ones(1, 8, 2, 16)
linear_attention(x, x, x).sum()
gated_linear_attention(x, x, x, x).sum()
linear_attention_qkv(x, x, x).sum()
gated_linear_attention_with_state(x, x, x, x)[1].sum()
_, state = linear_attention_with_state(x, x, x)
state.Z
"""


@pytest.mark.slow
def test_a_program_of_a_user_is_type_checked_against_the_wheel(tmp_path):
    """Guards: types that are not shipped, and an output that may be a tuple for all that a checker knows."""
    pytest.importorskip("mypy", reason="the dev extra brings mypy")
    site, program, config = (tmp_path / name for name in ("site", "program.py", "mypy.ini"))
    build("wheel", clone(tmp_path / "source"), tmp_path / "wheel").extractall(site)
    program.write_text(TYPED)
    # Without types of PyTorch and transformers, which take long to read, a tensor may be anything; a tuple is
    # one still.
    config.write_text("[mypy]\n[mypy-torch.*,numpy.*,transformers.*]\nfollow_imports = skip\n")
    code = f"from mypy.api import run; print(run(['--config-file', {str(config)!r}, {str(program)!r}])[0])"
    found, *rest = python("-P", "-c", code, cwd=tmp_path, path=(site,)).splitlines()
    assert found.startswith(f'program.py:{len(TYPED.splitlines())}: error: "LinearAttentionState" has no'), (
        found
    )
    assert rest[0].startswith("Found 1 error")


def test_the_version_is_written_once():
    written = PROJECT["project"]["version"]
    assert version("lingpt") == written, "the installed lingpt is another: pip install -e ."
    assert lingpt.__version__ == written, "read from the installed package, when it is asked for"
    again = [path for path in sources(".py") if re.search(r"__version__\s*=", path.read_text())]
    assert not again


# -- the dependencies ---------------------------------------------------------------------------------------


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """(path, syntax tree) of the Python files of these folders, of all without any."""
    for path in sources(".py"):
        if not folders or path.relative_to(ROOT).parts[0] in folders:
            yield path, ast.parse(path.read_text())


def imports(tree: ast.AST, leave_out: Callable = lambda node: False) -> Iterator[tuple[str, list[str], int]]:
    """(module, names, line) of every import in a file, those inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: imports are absolute"
            yield node.module, [alias.name for alias in node.names], node.lineno
        elif not leave_out(node):
            yield from imports(node, leave_out)


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def put_off(node: ast.AST) -> bool:
    """Whether importing the file leaves this out."""
    return isinstance(node, ast.FunctionDef) or for_type_checkers(node)


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    """The distributions of the base, or of an extra with the extras of ours that it brings."""
    project = PROJECT["project"]
    needs: dict[str, Requirement] = {}
    for line in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        need = Requirement(line)
        if need.name == "lingpt":
            needs |= {name: found for inner in need.extras for name, found in requirements(inner).items()}
        else:
            needs[canonicalize_name(need.name)] = need
    return needs


def distributions(
    trees: Iterator[tuple[Path, ast.Module]], leave_out: Callable = for_type_checkers
) -> dict[str, set[str]]:
    """Whom an imported top-level module may come from, for all that is neither ours nor Python's."""
    tops = {module.partition(".")[0] for _, tree in trees for module, _, _ in imports(tree, leave_out)}
    only_with_a_gpu = {"fla": ["fla-core"], "mamba_ssm": ["mamba-ssm"], "mlstm_kernels": ["mlstm-kernels"]}
    known = {**only_with_a_gpu, "cuda": ["cuda-bindings"], **packages_distributions()}
    known["triton"] = ["torch"]  # PyTorch's builds for GPUs bring it
    ours = {*sys.stdlib_module_names, "lingpt"}
    return {top: {canonicalize_name(name) for name in known[top]} for top in tops - ours}


@pytest.mark.slow
def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    """Guards: a package that only another one's dependencies bring, and one that nothing needs any more."""
    imported = distributions(trees())
    declared = requirements() | requirements("eval") | requirements("hf")
    everywhere = declared | requirements("cuda13") | requirements("peers")
    assert not {top: names for top, names in imported.items() if not names & set(everywhere)}
    assert set(declared) <= set().union(*imported.values())
    needs_eval = set(requirements("eval")) - set(requirements("train"))
    beyond = distributions(trees(*set(FOLDERS) - {"eval"}))
    assert not {top for top, names in beyond.items() if names & needs_eval}, "needed outside of eval/"


def test_the_operator_imports_only_the_base():
    """Guards: an install without an extra that cannot import the operator."""
    needs = distributions(trees("__init__.py", "common", "kernels"), leave_out=put_off)
    assert not {top: names for top, names in needs.items() if not names & set(requirements())}


REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def without(names: tuple[str, ...], code: str) -> str:
    """What `code` prints in an interpreter that has none of the packages `names`."""
    return python("-P", "-c", REFUSE.format(names=names) + code)


@pytest.mark.slow
def test_the_operator_needs_no_extra():
    """Forward and backward on a CPU, and the doors of the command that need no model."""
    without(
        HEAVY,
        """
import torch
from lingpt import gated_linear_attention, linear_attention, linear_attention_qkv
from lingpt.cli.main import main
q, k, v = (torch.randn(2, 100, 2, 16, requires_grad=True) for _ in range(3))
linear_attention(q, k, v).sum().backward()
gated_linear_attention(q, k, v, -torch.ones(2, 100, 2, 16)).sum().backward()
assert all(x.grad.isfinite().all() and x.grad.abs().sum() for x in (q, k, v))
assert main(["kernels", "--help"]) == main(["bench", "--help"]) == 0
""",
    )


@pytest.mark.slow
def test_a_verb_without_its_extra_says_which_one_it_needs():
    """Guards: a traceback as the answer to `lingpt train` after an install without an extra."""
    verbs = ("train", "data", "curves", "bench")
    code = "from lingpt.cli.main import main; sys.stderr = sys.stdout\n"
    printed = without(HEAVY, code + f"for verb in {verbs}: print(verb, main([verb]))").splitlines()
    assert printed[1::2] == [f"{verb} 2" for verb in verbs], printed
    for line in printed[::2]:
        assert re.fullmatch(r"lingpt: \w+ is not installed: pip install .*\[train\]'?", line), line


def test_the_package_and_the_help_need_no_pytorch():
    printed = without(
        ("torch", "numpy", *HEAVY),
        "import lingpt; from lingpt.cli.main import main; main(['--help']); print(dir(lingpt))",
    )
    assert "usage: lingpt" in printed and "linear_attention" in printed


def test_every_public_name_of_the_package_is_there():
    for name in lingpt.__all__:
        assert getattr(lingpt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'linear_atention'"):
        lingpt.linear_atention  # noqa: B018


def test_constraints_pin_every_dependency_within_its_bounds():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): pin for name, pin in pins.items()}
    for name, need in (requirements() | requirements("bench") | requirements("dev")).items():
        if name != "setuptools":  # builds the project; any that is new enough does
            assert need.specifier.contains(pins[name]), f"{need}, pinned to {pins[name]}"
    for extra in (None, *PROJECT["project"]["optional-dependencies"]):
        for need in requirements(extra).values():
            assert any(bound.operator == ">=" for bound in need.specifier), f"{need} has no lower bound"
    assert not any("+" in pin for pin in pins.values()), "a local build (+cpu) is on no index"


def test_ci_runs_on_the_oldest_and_the_tested_versions():
    """Guards: a bound that is raised, or a version that is pinned, while CI still runs on the one before."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    oldest, newest = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert PROJECT["project"]["requires-python"] == f">={oldest['python']}"
    assert f"{requirements()['torch'].specifier}.0" == f">={oldest['torch']}"
    assert f"torch=={newest['torch']}" in (ROOT / "constraints.txt").read_text().splitlines()


# -- who imports whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder):
    """common ← kernels ← models ← train, eval; common ← data ← train, eval; all of them ← study; the command
    line on top."""
    for path, tree in trees(folder):
        for module, names, line in imports(tree):
            if module == "lingpt" or module.startswith("lingpt."):
                where = f"{path.relative_to(ROOT)}:{line}"
                assert module != "lingpt", f"{where} imports from the top: name the module"
                other = module.split(".")[1]
                assert other == folder or other in MAY_IMPORT[folder], f"{where} imports lingpt.{other}"
                private = [name for name in [*module.split("."), *names] if re.match(r"_(?!_)", name)]
                assert other == folder or not private, f"{where} imports {private} of lingpt.{other}"


def test_the_emulator_is_a_tool_of_its_own():
    """Guards: a way back into the package; the emulator is handed a compiler."""
    for path in (ROOT / "ptx_emulator").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            assert not [name for name in names if name.startswith("lingpt")], f"{path.name}:{node.lineno}"


def test_modules_import_one_another_in_no_circle():
    """Imports inside functions and for type checkers count, too: a circle put off is still a circle."""
    names = {module_name(path) for path in sources(".py")}
    graph: dict[str, set[str]] = {}
    for path, tree in trees():
        found = [(module, f"{module}.{name}") for module, whats, _ in imports(tree) for name in whats or [""]]
        graph[module_name(path)] = {inner if inner in names else module for module, inner in found} & names
    TopologicalSorter(graph).prepare()  # CycleError names the circle
