"""The notebooks of the documentation run, cell by cell, on a CPU."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook):
    """Guards: an example that no longer works, and outputs that were committed with it."""
    names: dict[str, object] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), f"{notebook.name}:{cell['id']}", "exec"), names)


def test_the_notebooks_are_found():
    assert len(NOTEBOOKS) == 2
