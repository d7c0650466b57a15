"""Lightning's import leaves out what its metrics would bring."""

import subprocess
import sys


def test_training_does_not_import_what_lightnings_metrics_would_bring():
    """Guards: a start of ten seconds instead of five, of each process, for what nothing uses; and that the
    packages count as installed afterwards."""
    code = (
        "import sys; import lingpt.train.distributed.parallel, lingpt.cli.train, lingpt.models.hf\n"
        "print(*{'transformers', 'sklearn', 'scipy', 'matplotlib'} & set(sys.modules))\n"
        "from lightning_utilities.core.imports import RequirementCache, package_available\n"
        "print(bool(RequirementCache('transformers>=4.4.0')), package_available('scipy'))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.stdout == "\nTrue True\n", run.stdout + run.stderr
