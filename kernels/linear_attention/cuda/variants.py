"""The variants of the kernels: the scan of mma.sync, and Hopper's of wgmma.

A `Variant` is one build of linear_attention.cu: its template arguments, and what follows from them: threads,
shared memory, names, constants. A new architecture is a subclass in VARIANTS, and its .cuh.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from typing import ClassVar

import torch

from lingpt.kernels.linear_attention.cuda.compile import KernelSpec
from lingpt.kernels.linear_attention.cuda.launch import LAYOUT, POINTERS, Kernel
from lingpt.kernels.linear_attention.cuda.toolchain import supported_architectures
from lingpt.kernels.numerics import LOG_ZERO, NORM_EPS

SOURCE = "linear_attention.cu"
TAGS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)
DECAYS = ("NO_DECAY", "PER_HEAD", "PER_TOKEN")  # a constant γ of each head, or a decay of each token's own
WEIGHTS = ("NORMALISED", "AFFINE", "PRODUCTS")  # (1 + b x)/g, a + b x, b x: params.cuh
THREADS = 128  # of a block of the sm_80 scan, of `prefix` and `row_products`; of an sm_90a warpgroup
DECAY_THREADS = 256  # of a block of `sum_decays`, `sum_counts` and `decay_gradient`
DECAY_SPAN = 256  # tokens of a block of the first and the last
# Tokens between boundaries, at which the gradient of decays is computed without a sum (token_decay.cuh).
BOUNDARY_INTERVAL = 512

# Shared memory, bytes (CUDA C++ Programming Guide, table of compute capabilities).
SMALL_SHARED = ("sm_86", "sm_89", "sm_120", "sm_121")  # 99 KB a block; the others have 163 or 227
SM90_SHARED = 228 * 1024  # of a multiprocessor; a block costs it 1 KB more than it asks for
RESERVED_SHARED = 1024

Name = tuple[str, str | None]  # a kernel and its mode; some have none


def chunk_tokens(arch: str, head_dim: int) -> int:
    """Tokens that a block takes at a time: 64 if shared memory holds two stages of three such tiles."""
    return 32 if arch in SMALL_SHARED and head_dim == 128 else 64


def kernel_head_dim(head_dim: int) -> int:
    """The head_dim of the kernels that serve heads of `head_dim`, 128 at most."""
    return next(width for width in HEAD_DIMS if width >= head_dim)


def state_size(head_dim: int) -> int:
    """Size of a state in the scratch, in fp32 numbers: S and two vectors."""
    return head_dim * head_dim + 2 * head_dim


def boundary_size(head_dim: int) -> int:
    """Size of a boundary, in fp32 numbers: a state in 16 bits, two vectors, and 16 more."""
    return head_dim * head_dim // 2 + 2 * head_dim + 16


@dataclasses.dataclass(frozen=True)
class Variant(abc.ABC):
    """One build: the template arguments that all variants have."""

    tag: str
    head_dim: int
    chunk: int  # tokens
    blocks: int  # a multiprocessor, at least: bounds the registers
    decay: str  # one of DECAYS
    rope: int  # dimensions of q and k that are rotated
    weights: str  # one of WEIGHTS

    scan_defines: ClassVar[dict[str, int]]  # which pick its scan in linear_attention.cu
    # The launches for dk and dv: kernel and modes. Two modes in one launch run concurrently.
    dk_dv: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]]
    da_parts: ClassVar[int]  # numbers per segment that add up to the gradient of a

    @staticmethod
    @abc.abstractmethod
    def serves(arch: str, rope: int) -> bool: ...

    @staticmethod
    @abc.abstractmethod
    def blocks_of(arch: str, head_dim: int) -> int: ...

    @property
    @abc.abstractmethod
    def threads(self) -> int:
        """Threads of a scan's block."""

    @property
    @abc.abstractmethod
    def shared(self) -> int:
        """Dynamic shared memory of a scan's block in bytes."""

    @property
    @abc.abstractmethod
    def scans(self) -> dict[Name, str]:
        """The kernels that only this variant has, with their template instances."""

    @property
    @abc.abstractmethod
    def gradient_parts(self) -> tuple[int, int]:
        """Addends that scans leave of each token's part of the gradient of G, and warps that write them."""

    @property
    def counts(self) -> bool:
        """Whether tokens are counted, as the normaliser needs them."""
        return self.weights == "NORMALISED"

    @property
    def per_token(self) -> bool:
        return self.decay == "PER_TOKEN"

    @property
    def options(self) -> str:
        return f"{self.decay}, {self.rope}, {self.weights}"

    def instance(self, kernel: str, mode: str) -> str:
        """The C++ name of a scan, or of `states`."""
        return f"{kernel}<{self.tag}, {self.head_dim}, {self.chunk}, {mode}, {self.options}, {self.blocks}>"

    @property
    def names(self) -> dict[Name, str]:
        """(kernel, mode) → name of its C++ template instance."""
        D, C, decay = self.head_dim, self.chunk, self.decay
        names = dict(self.scans)
        for mode, reverse in (("FWD", "false"), ("DK", "true")):
            names["prefix", mode] = f"prefix<{D}, {C}, {reverse}, {decay}, {self.weights}>"
            if self.per_token:
                names["sum_decays", mode] = f"sum_decays<{C}, {reverse}, {str(self.counts).lower()}>"
            if self.per_token and self.counts:
                names["sum_counts", mode] = f"sum_counts<{C}, {reverse}>"
        if self.per_token:
            parts, warps = self.gradient_parts
            for key, totals in (("TOTALS", "true"), (None, "false")):
                names["decay_gradient", key] = f"decay_gradient<{D}, {C}, {totals}, {parts}, {warps}>"
        return names

    @property
    def defines(self) -> dict[str, object]:
        """Constants that the source shares with Python: defined here, or checked by a static_assert there."""
        return {
            **self.scan_defines,
            "POINTERS_BYTES": POINTERS.size,
            "LAYOUT_BYTES": LAYOUT.size,
            "SHARED_BYTES": self.shared,
            "SCAN_THREADS": self.threads,
            "LAUNCH_THREADS": THREADS,
            "LAUNCH_STATE_SIZE": state_size(self.head_dim),
            "LAUNCH_BOUNDARY_SIZE": boundary_size(self.head_dim),
            "LAUNCH_DECAY_THREADS": DECAY_THREADS,
            "LAUNCH_DECAY_SPAN": DECAY_SPAN,
            "LAUNCH_BOUNDARY_INTERVAL": BOUNDARY_INTERVAL,
            "NORM_EPS": f"{NORM_EPS}f",
            "LOG_ZERO": f"{LOG_ZERO[torch.float32]}f",
        }

    def spec(self, *architectures: str) -> KernelSpec:
        return KernelSpec(SOURCE, tuple(self.names.values()), self.defines, architectures)

    @functools.cache  # noqa: B019  (a build is kept anyway, with its kernels)
    def load(self, arch: str) -> dict[Name, Kernel]:
        return self.spec(arch).load(arch, self.names)


class Sm80(Variant):
    """scan_sm80.cuh: four warps and mma.sync, on every card from sm_80 on."""

    scan_defines: ClassVar[dict[str, int]] = {}
    dk_dv = (("scan", ("DK",)), ("scan", ("DV",)))
    da_parts = 1
    threads = THREADS
    gradient_parts = (1, 4)

    @staticmethod
    def serves(arch: str, rope: int) -> bool:
        return True

    @staticmethod
    def blocks_of(arch: str, head_dim: int) -> int:
        return 1 if arch in SMALL_SHARED else 2 if head_dim == 128 else 3

    @property
    def shared(self) -> int:
        """SharedSm80::BYTES."""
        C, D = self.chunk, self.head_dim
        tiles, scores, per_token = 2 * 6 * C * D, C * 128, C * (24 + 20 + 10 + 20)
        decays = 42 * C + 8 if self.per_token else 0
        return tiles + scores + per_token + 14 * D + 56 + decays

    @property
    def scans(self) -> dict[Name, str]:
        names: dict[Name, str] = {
            ("scan", mode): self.instance("scan", mode) for mode in ("FWD", "DQ", "DK", "DV")
        }
        names |= {("states", mode): self.instance("states", mode) for mode in ("FWD", "DK")}
        if self.counts:
            names["row_products", None] = f"row_products<{self.tag}, {self.head_dim}>"
        return names


class Sm90(Variant):
    """scan_sm90.cuh: wgmma, and warpgroups with roles; they rotate within 64 columns at most.

    dq's scan computes e. dk and dv share a launch, as both read k, q and do.
    """

    scan_defines: ClassVar[dict[str, int]] = {"SCAN_SM90": 1}
    dk_dv = (("scan_pair", ("DK", "DV")),)
    da_parts = 8

    @staticmethod
    def serves(arch: str, rope: int) -> bool:
        return arch == "sm_90a" and rope <= 64

    @staticmethod
    def blocks_of(arch: str, head_dim: int) -> int:
        return 1 if head_dim == 128 else 2

    @property
    def threads(self) -> int:
        """A warpgroup for every 64 columns, and two more."""
        return (self.head_dim // 64 + 2) * THREADS

    @property
    def shared(self) -> int:
        """All that a block can have."""
        return SM90_SHARED // self.blocks - RESERVED_SHARED

    @property
    def scans(self) -> dict[Name, str]:
        tag, D = self.tag, self.head_dim
        names: dict[Name, str] = {("scan", mode): self.instance("scan", mode) for mode in ("FWD", "DQ")}
        names |= {("states", mode): self.instance("states", mode) for mode in ("FWD", "DK")}
        names["scan_pair", "DK"] = f"scan_pair<{tag}, {D}, {self.options}, {self.blocks}>"
        if D == 128:
            names["scan_unsegmented", "FWD"] = f"scan_unsegmented<{tag}, {D}, {self.options}>"
        return names

    @property
    def gradient_parts(self) -> tuple[int, int]:
        parts = 1 if self.weights == "PRODUCTS" else 2  # of a token's, by two roles
        return parts, 4 * (self.head_dim // 64 + parts - 1)


VARIANTS: tuple[type[Variant], ...] = (Sm90, Sm80)  # the first that serves a card is taken


@functools.cache
def variant_for(
    arch: str, dtype: torch.dtype, head_dim: int, decay: str, rope: int, weights: str = "NORMALISED"
) -> Variant:
    """The build for a card. `decay`: one of DECAYS. `rope`: a multiple of 16 up to head_dim, or 0. `weights`:
    one of WEIGHTS."""
    variant = next(variant for variant in VARIANTS if variant.serves(arch, rope))
    chunk, blocks = chunk_tokens(arch, head_dim), variant.blocks_of(arch, head_dim)
    return variant(TAGS[dtype], head_dim, chunk, blocks, decay, rope, weights)


def specs() -> list[KernelSpec]:
    """The builds that `lingpt kernels` compiles ahead: bf16, for models (RoPE on a quarter of the dimensions)
    and for separate q, k, v."""
    builds: dict[Variant, list[str]] = {}
    for arch, head_dim in itertools.product(supported_architectures(), HEAD_DIMS):
        model = head_dim // 4
        for decay, rope, weights in (
            ("NO_DECAY", 0, "NORMALISED"),
            *((decay, model, "NORMALISED") for decay in DECAYS),
            ("PER_TOKEN", model, "AFFINE"),
            ("PER_TOKEN", 0, "PRODUCTS"),
        ):
            build = variant_for(arch, torch.bfloat16, head_dim, decay, rope, weights)
            builds.setdefault(build, []).append(arch)
    return [build.spec(*architectures) for build, architectures in builds.items()]
