"""The device that a user names."""

import torch

from lingpt.common.errors import UserError


def find_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU; UserError for one that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r}: {str(error).splitlines()[0]}; use --device auto") from error
