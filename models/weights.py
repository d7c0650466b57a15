"""Builds a model from tensors that match it exactly; an error names the first one that does not."""

import torch

from lingpt.common.errors import UserError
from lingpt.models.config import Config
from lingpt.models.gpt import GPT


def model_from_tensors(
    config: Config,
    tensors: dict[str, torch.Tensor],
    source: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> GPT:
    """A model with these tensors; UserError, naming `source`, if they do not match it exactly."""
    model = GPT.on_meta(config)
    check_same_tensors(model.state_dict(), tensors, f"{source} does not hold a {config.name!r}")
    model.load_state_dict(tensors, assign=True)
    model.reset_buffers(torch.device(device))
    return model.to(device=device, dtype=dtype)


def check_same_tensors(
    own: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    complaint: str,
    *,
    optional: str | None = None,
) -> None:
    """Raises UserError, with `complaint`, for the first tensor that is missing, surplus or of another shape.

    Names that contain `optional` may be missing, surplus or of another shape.
    """
    for name in [*own, *(name for name in given if name not in own)]:
        if optional is not None and optional in name:
            continue
        if name in own and name in given:
            if own[name].shape != given[name].shape:
                shapes = f"{list(given[name].shape)}, not {list(own[name].shape)}"
                raise UserError(f"{complaint}: {name} is {shapes}")
        else:
            raise UserError(f"{complaint}: {name} {'is missing' if name in own else 'has no place in it'}")
