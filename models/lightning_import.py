"""Imports Lightning without the packages that its metrics import: saves seconds at every start.

Lightning imports torchmetrics, which imports transformers (with scikit-learn, for BERTScore), scipy and
matplotlib if they are installed: nearly half of the CPU time of `import litgpt`, and nothing here uses these
metrics. While Lightning is imported they count as not installed. Import this module before Lightning or
LitGPT.
"""

from unittest.mock import patch

from lightning_utilities.core import imports as lightning_imports

_ONLY_FOR_METRICS = ("transformers", "scipy", "matplotlib")
_is_met, _is_available = lightning_imports.RequirementCache.__bool__, lightning_imports.package_available


def _is_met_but_for_metrics(requirement: lightning_imports.RequirementCache) -> bool:
    return not str(requirement.requirement).startswith(_ONLY_FOR_METRICS) and _is_met(requirement)


def _is_available_but_for_metrics(package: str) -> bool:
    return package not in _ONLY_FOR_METRICS and _is_available(package)


with (
    patch.object(lightning_imports.RequirementCache, "__bool__", _is_met_but_for_metrics),
    patch.object(lightning_imports, "package_available", _is_available_but_for_metrics),
):
    import lightning  # noqa: F401
