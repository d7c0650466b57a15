"""LinGPT: trains language models with linear attention. The repository is the package: `lingpt.X.Y` is X/Y.

    from lingpt import linear_attention
    o = linear_attention(q, k, v)        # [B, N, H, D] each

Names are imported on first use, so that `lingpt --help` needs no PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lingpt.common.errors import UserError
    from lingpt.kernels.gated_linear_attention import gated_linear_attention
    from lingpt.kernels.linear_attention import (
        LinearAttentionState,
        linear_attention,
        linear_attention_qkv,
    )

__all__ = [
    "LinearAttentionState",
    "UserError",
    "gated_linear_attention",
    "linear_attention",
    "linear_attention_qkv",
]

_MODULES = {
    "LinearAttentionState": "lingpt.kernels.linear_attention",
    "UserError": "lingpt.common.errors",
    "gated_linear_attention": "lingpt.kernels.gated_linear_attention",
    "linear_attention": "lingpt.kernels.linear_attention",
    "linear_attention_qkv": "lingpt.kernels.linear_attention",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
