"""What an import does not bring: packages that are slow to import, or not in a small install."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_training_does_not_import_what_lightnings_metrics_would_bring():
    """Guards: a start of ten seconds instead of five, of each process, for what nothing uses; and that the
    packages count as installed afterwards."""
    code = (
        "import sys; import lingpt.train.distributed.parallel, lingpt.cli.train\n"
        "print(*{'transformers', 'sklearn', 'scipy', 'matplotlib'} & set(sys.modules))\n"
        "from lightning_utilities.core.imports import RequirementCache, package_available\n"
        "print(bool(RequirementCache('transformers>=4.4.0')), package_available('scipy'))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout == "\nTrue True\n", run.stdout + run.stderr


@pytest.mark.slow
def test_the_network_needs_pytorch_alone():
    """Guards: an exported model that asks for the training stack where only transformers is installed; and a
    second at each start, for what sharded models need."""
    code = (
        "import sys; import lingpt.models\n"
        "print(*{'litgpt', 'lightning', 'transformers', 'datasets', 'jsonargparse'} & set(sys.modules))\n"
        "print('torch.distributed.tensor' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout == "\nFalse\n", run.stdout + run.stderr
