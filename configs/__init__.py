"""The recipes that ship with LinGPT, one YAML file each, found by name (`lingpt train --config demo`)."""

from pathlib import Path

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the shipped recipes, without `.yaml`."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_path(name: str) -> Path | None:
    """The path of the shipped recipe called `name`, or None."""
    path = FOLDER / f"{name}.yaml"
    return path if name in recipe_names() else None
