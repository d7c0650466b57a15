"""The shapes that are measured, by sweep, in the order in which they run."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Batch, tokens, heads and head dimension of one attention call; that of v and o if it is another."""

    B: int
    N: int
    H: int
    D: int
    Dv: int = 0  # 0: D

    def __str__(self) -> str:
        return f"B={self.B} N={self.N} H={self.H} D={self.D}" + f" Dv={self.Dv}" * bool(self.Dv)

    def tensor(self, name: str) -> tuple[int, int, int, int]:
        """The shape of the input "q", "k", "v" …, or of the output "o"."""
        return *self[:3], (self.Dv or self.D) if name in "vo" else self.D

    def unit_bytes(self, item_size: int = 2) -> int:
        """U: the bytes of one [B, N, H, D] tensor."""
        return self.B * self.N * self.H * self.D * item_size


REFERENCE = Shape(4, 8192, 16, 128)  # the shape of the figures of traffic
TABLE_1 = Shape(4, 10_000, 16, 128)  # of the paper
BATCH_1 = Shape(1, 8192, 16, 128)
LONG = Shape(1, 32768, 16, 128), Shape(1, 131072, 16, 128)
GLA_1_4B = Shape(1, 8192, 4, 256, 512)  # GLA's own layer in pythia-1.4b
FLA_SHAPES = (  # those of FLA's own benchmarks, benchmarks/ops/registry.py
    Shape(1, 8192, 96, 128),
    Shape(2, 16384, 16, 128),
    Shape(4, 2048, 16, 128),
    Shape(4, 4096, 64, 128),
    Shape(8, 2048, 32, 256),
    Shape(8, 1024, 8, 64),
)
CUMSUM = Shape(1, 4096, 16, 128)  # the plain PyTorch form needs B·N·H·D² numbers

SWEEPS: dict[str, tuple[Shape, ...]] = {
    "training": (REFERENCE, BATCH_1, *LONG, Shape(4, 8192, 12, 64), CUMSUM),
    "sweep-n": tuple(Shape(4, N, 16, 128) for N in (1024, 4096, 8192, 32768, 131072, 300_000)),
    "sweep-d": tuple(Shape(4, 4096, 16, D) for D in (32, 64, 128, 256)),
    "table-1": (TABLE_1,),
    "batch-32": tuple(Shape(32, N, 16, 64) for N in (1024, 2048, 4096, 8192, 16384)),  # GLA's figure 2
    "gla-layer": (*(Shape(4, 8192, 4, D, 2 * D) for D in (64, 128, 256)), GLA_1_4B),
    "fla-shapes": FLA_SHAPES,
}
QUICK: dict[str, tuple[Shape, ...]] = {
    "training": (REFERENCE, BATCH_1),
    "sweep-n": tuple(Shape(4, N, 16, 128) for N in (1024, 8192, 131072)),
    "sweep-d": tuple(Shape(4, 4096, 16, D) for D in (64, 128)),
    "table-1": (TABLE_1,),
    "batch-32": tuple(Shape(32, N, 16, 64) for N in (1024, 4096, 16384)),
    "gla-layer": (GLA_1_4B,),
    "fla-shapes": FLA_SHAPES[:2],
}
TINY: dict[str, tuple[Shape, ...]] = {  # for a CPU
    "training": (Shape(2, 128, 2, 32), Shape(2, 512, 2, 32), Shape(2, 512, 2, 64)),
}
# As many tokens of heads of GPT-2's size, in sequences of different lengths.
FORM_SHAPES = tuple(Shape(65536 // N, N, 12, 64) for N in (512, 2048, 8192, 16384, 32768, 65536))
TINY_FORM_SHAPES = Shape(2, 64, 2, 16), Shape(1, 128, 2, 16)
