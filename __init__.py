"""LinGPT: trains language models with linear attention. The repository is the package: `lingpt.X.Y` is X/Y.

    from lingpt import linear_attention
    o = linear_attention(q, k, v)        # [B, N, H, D] each

Names are imported on first use, so that `lingpt --help` needs no PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str | None  # None where LinGPT runs from a clone without an install

    from lingpt.common.errors import UserError
    from lingpt.hf.replace import replace_attention
    from lingpt.kernels.gated_linear_attention import (
        gated_linear_attention,
        gated_linear_attention_with_state,
    )
    from lingpt.kernels.linear_attention import (
        LinearAttentionState,
        linear_attention,
        linear_attention_qkv,
        linear_attention_qkv_with_state,
        linear_attention_with_state,
    )
    from lingpt.kernels.unified_linear_attention import (
        unified_linear_attention,
        unified_linear_attention_with_state,
    )

__all__ = [
    "LinearAttentionState",
    "UserError",
    "gated_linear_attention",
    "gated_linear_attention_with_state",
    "linear_attention",
    "linear_attention_qkv",
    "linear_attention_qkv_with_state",
    "linear_attention_with_state",
    "replace_attention",
    "unified_linear_attention",
    "unified_linear_attention_with_state",
]

# By a name's first word.
_MODULES = {"gated": "gated_linear_attention", "unified": "unified_linear_attention"}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("lingpt.common.install").installed_version("lingpt")
    if name == "UserError":
        module = "lingpt.common.errors"
    elif name == "replace_attention":
        module = "lingpt.hf.replace"
    elif name in __all__:
        module = f"lingpt.kernels.{_MODULES.get(name.partition('_')[0], 'linear_attention')}"
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
