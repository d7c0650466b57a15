"""Instructions on a thread's registers, and exchanges between the lanes of a warp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from .control import require_full
from .faults import UnknownInstruction
from .machine import BOOL, DTYPES, F32, U32, U64, Machine, Mask, Operation, builds
from .ptx import Instruction, Inverted, Pair, Reg

HALVES = {"f16", "bf16", "f16x2", "bf16x2"}


# 16-bit numbers


def widen(raw: np.ndarray, kind: str) -> np.ndarray:
    """16-bit words as fp32."""
    if kind.startswith("bf16"):
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16).astype(np.float32)


def narrow(x: np.ndarray, kind: str) -> np.ndarray:
    """fp32 or float64, rounded once to nearest even → 16-bit words."""
    if kind.startswith("f16"):
        return x.astype(np.float16).view(np.uint16)
    size = x.dtype.itemsize
    word = np.dtype(f"u{size}").type
    dropped = {4: 16, 8: 45}[size]  # bits of the significand that bf16 lacks
    bits = np.ascontiguousarray(x).view(word)
    half = word((1 << (dropped - 1)) - 1) + (bits >> word(dropped) & word(1))
    rounded = (bits + half) >> word(dropped) << word(dropped)
    single = rounded.view(x.dtype).astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, single >> 16).astype(np.uint16)


# Shared forms of instructions


def _type(code: Instruction) -> str:
    """The last part of the opcode that names a type."""
    return next(p for p in reversed(code.parts) if p in DTYPES)


def _check_plain(code: Instruction) -> None:
    """Checks that the instruction rounds to nearest, without saturation or carry."""
    if {"rm", "rp", "rz", "sat", "cc"} & set(code.parts):
        raise UnknownInstruction("this rounding, saturation or carry")


def elementwise(m: Machine, code: Instruction, function: Callable, dtype: np.dtype) -> Operation:
    """The operation d = function(a, …) for a numpy ufunc."""
    d, *sources = m.register(code.operands[0], dtype), *(m.source(x, dtype) for x in code.operands[1:])
    return lambda mask: function(*sources, out=d, where=mask)


def computed(d: np.ndarray, function: Callable[[], np.ndarray]) -> Operation:
    """The operation d = function() for any function."""
    return lambda mask: np.copyto(d, function(), where=mask, casting="unsafe")


def _halves(m: Machine, code: Instruction, function: Callable) -> Operation:
    """The operation on 16-bit floats or pairs of them: computed in float64, rounded once."""
    kind = _type(code)
    d = m.register(code.operands[0], DTYPES[kind])
    sources = [m.source(x, d.dtype) for x in code.operands[1:]]

    def compute() -> np.ndarray:
        wide = [widen(np.ascontiguousarray(x).view(np.uint16), kind).astype(np.float64) for x in sources]
        return narrow(function(*wide), kind).view(d.dtype)

    return computed(d, compute)


# Arithmetic

ARITHMETIC = {"add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}
LOGICAL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}


@builds(*ARITHMETIC)
def _add(m: Machine, code: Instruction) -> Operation:
    _check_plain(code)
    kind, function = _type(code), ARITHMETIC[code.parts[0]]
    return _halves(m, code, function) if kind in HALVES else elementwise(m, code, function, DTYPES[kind])


@builds("min", "max")
def _min(m: Machine, code: Instruction) -> Operation:
    kind, low = _type(code), code.parts[0] == "min"
    if "NaN" in code.parts or kind in HALVES:
        raise UnknownInstruction("of 16-bit floats, or that keeps a NaN")
    return elementwise(m, code, np.fmin if low else np.fmax, DTYPES[kind])


@builds(*BITWISE)
def _bitwise(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    return elementwise(m, code, (LOGICAL if dtype == BOOL else BITWISE)[code.parts[0]], dtype)


def _product(kind: str, part: str) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], np.dtype]:
    """(the lower half, upper half or all of an integer product, its type)."""
    dtype = DTYPES[kind]
    if part == "lo":
        return np.multiply, dtype
    twice = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    if part == "wide":
        return lambda a, b: np.multiply(a, b, dtype=twice), twice
    return lambda a, b: (np.multiply(a, b, dtype=twice) >> 8 * dtype.itemsize).astype(dtype), dtype


@builds("mul")
def _mul(m: Machine, code: Instruction) -> Operation:
    _check_plain(code)
    kind = _type(code)
    if kind in HALVES:
        return _halves(m, code, np.multiply)
    if kind == "f32":
        return elementwise(m, code, np.multiply, F32)
    product, result = _product(kind, code.parts[1])
    a, b = (m.source(x, DTYPES[kind]) for x in code.operands[1:])
    return computed(m.register(code.operands[0], result), lambda: product(a, b))


@builds("mad")
def _mad(m: Machine, code: Instruction) -> Operation:
    _check_plain(code)
    kind = _type(code)
    product, result = _product(kind, code.parts[1])
    a, b = (m.source(x, DTYPES[kind]) for x in code.operands[1:3])
    c = m.source(code.operands[3], result)
    return computed(m.register(code.operands[0], result), lambda: product(a, b) + c)


@builds("fma")
def _fma(m: Machine, code: Instruction) -> Operation:
    """fma, in float64: there the product of two fp32 numbers is exact."""
    kind, down = _type(code), code.parts[1] == "rm"
    if code.parts[1] not in ("rn", "rm") or "sat" in code.parts or (down and kind in HALVES):
        raise UnknownInstruction("this rounding or saturation")
    if kind in HALVES:
        return _halves(m, code, lambda a, b, c: a * b + c)
    a, b, c = (m.source(x, F32) for x in code.operands[1:])

    def compute() -> np.ndarray:
        exact = a.astype(np.float64) * b + c
        near = exact.astype(np.float32)
        return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near) if down else near

    return computed(m.register(code.operands[0], F32), compute)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - np.fmod(a, b)) // np.where(b == 0, b.dtype.type(1), b)


@builds("div", "rem")
def _div(m: Machine, code: Instruction) -> Operation:
    _check_plain(code)
    dtype = DTYPES[_type(code)]
    if dtype == F32:
        return elementwise(m, code, np.divide, dtype)
    if code.parts[0] == "rem":
        return elementwise(m, code, np.fmod, dtype)
    a, b = (m.source(x, dtype) for x in code.operands[1:])
    return computed(m.register(code.operands[0], dtype), lambda: _quotient(a, b))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": np.reciprocal,
}  # fmt: skip


@builds(*FUNCTIONS)
def _function(m: Machine, code: Instruction) -> Operation:
    """A function of one fp32 number, rounded to nearest: more accurate than the hardware's `.approx`."""
    _check_plain(code)
    function, a = FUNCTIONS[code.parts[0]], m.source(code.operands[1], DTYPES[_type(code)])
    if a.dtype != F32:
        raise UnknownInstruction("of fp32 only")
    return computed(m.register(code.operands[0], F32), lambda: function(a.astype(np.float64)))


@builds("copysign")
def _copysign(m: Machine, code: Instruction) -> Operation:
    d, (sign, a) = m.register(code.operands[0], F32), (m.source(x, F32) for x in code.operands[1:])
    return computed(d, lambda: np.copysign(a, sign))


# Bits


@builds("shl", "shr")
def _shift(m: Machine, code: Instruction) -> Operation:
    """Shifts; a shift by the width or more gives zeros, or copies of the sign."""
    dtype = DTYPES[_type(code)]
    left, most = code.parts[0] == "shl", 8 * dtype.itemsize - 1
    shift, d = np.left_shift if left else np.right_shift, m.register(code.operands[0], dtype)
    a, by = m.source(code.operands[1], dtype), m.source(code.operands[2], U32)
    if not isinstance(code.operands[2], Reg) and by[0] <= most:
        amount = by.astype(dtype)
        return lambda mask: shift(a, amount, out=d, where=mask)

    def compute() -> np.ndarray:
        beyond = a >> dtype.type(most) if dtype.kind == "i" and not left else dtype.type(0)
        return np.where(by > most, beyond, shift(a, np.minimum(by, most).astype(dtype)))

    return computed(d, compute)


@builds("bfi")
def _insert(m: Machine, code: Instruction) -> Operation:
    """Inserts the `length` low bits of a into b at `position`; both numbers are immediates."""
    dtype = DTYPES[_type(code)]
    a, b = (m.source(x, dtype) for x in code.operands[1:3])
    position, length = (int(x.text) for x in code.operands[3:])
    field = dtype.type(((1 << length) - 1) << position)
    return computed(
        m.register(code.operands[0], dtype), lambda: b & ~field | a << dtype.type(position) & field
    )


@builds("prmt")
def _permute(m: Machine, code: Instruction) -> Operation:
    """Selects four of the eight bytes of a and b, each by four bits of an immediate."""
    if len(code.parts) > 2 or int(code.operands[3].text) & 0x8888:
        raise UnknownInstruction("in a mode, or of signs")
    a, b = (m.source(x, U32) for x in code.operands[1:3])
    selected = [int(code.operands[3].text) >> 4 * i & 7 for i in range(4)]

    def byte(i: int) -> np.ndarray:
        return (a if i < 4 else b) >> np.uint32(8 * (i % 4)) & np.uint32(0xFF)

    def compute() -> np.ndarray:
        placed = (byte(x) << np.uint32(8 * i) for i, x in enumerate(selected))
        return functools.reduce(np.bitwise_or, placed)

    return computed(m.register(code.operands[0], U32), compute)


# Comparisons, choices, moves and conversions

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@builds("setp")
def _setp(m: Machine, code: Instruction) -> Operation:
    """Comparisons; of floats with a NaN, `lt` and the like are false, `ltu` and the like true."""
    _, name, *between, kind = code.parts
    if kind in HALVES or set(between) - {"ftz"}:
        raise UnknownInstruction("of 16-bit floats, or together with another predicate")
    p, (a, b) = m.register(code.operands[0], BOOL), (m.source(x, DTYPES[kind]) for x in code.operands[1:])
    if kind != "f32" or name in ("eq", "lt", "le", "gt", "ge"):
        compare = COMPARISONS[name]
        return lambda mask: compare(a, b, out=p, where=mask)
    compare, unordered = COMPARISONS[name[:2]], name.endswith("u")

    def compute() -> np.ndarray:
        nan = np.isnan(a) | np.isnan(b)
        return compare(a, b) | nan if unordered else compare(a, b) & ~nan

    return computed(p, compute)


@builds("selp")
def _selp(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    d, (a, b) = m.register(code.operands[0], dtype), (m.source(x, dtype) for x in code.operands[1:3])
    p = m.register(code.operands[3], BOOL)
    return computed(d, lambda: np.where(p, a, b))


@builds("mov")
def _mov(m: Machine, code: Instruction) -> Operation:
    """mov, also between a register and a vector of its parts, which are views of it."""
    dtype, (to, source) = DTYPES[_type(code)], code.operands
    if not isinstance(to, tuple) and not isinstance(source, tuple):
        d, a = m.register(to, dtype), m.source(source, dtype)
        return lambda mask: np.copyto(d, a, where=mask)
    apart = isinstance(to, tuple)
    parts, whole = (to, source) if apart else (source, to)
    small = np.dtype(f"u{dtype.itemsize // len(parts)}")
    row = m.register(whole, dtype).view(small)
    places = [row[i :: len(parts)] for i in range(len(parts))]
    moves = [
        (m.register(x, small), place) if apart else (place, m.source(x, small))
        for x, place in zip(parts, places, strict=True)
        if x is not None
    ]

    def move(mask: Mask) -> None:
        for d, a in moves:
            np.copyto(d, a, where=mask)

    return move


@builds("cvta")
def _cvta(m: Machine, code: Instruction) -> Operation:
    """cvta: generic addresses are host addresses, as global ones are."""
    if code.opcode != "cvta.to.global.u64":
        raise UnknownInstruction("generic addresses of other memory than global")
    d, a = m.register(code.operands[0], U64), m.source(code.operands[1], U64)
    return lambda mask: np.copyto(d, a, where=mask)


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@builds("cvt")
def _cvt(m: Machine, code: Instruction) -> Operation:
    to, source = (p for p in code.parts if p in DTYPES)
    modifiers = [p for p in code.parts[1:] if p not in (to, source, "ftz")]
    if to in ("f16x2", "bf16x2") and modifiers == ["rn"]:
        high, low = (m.source(x, F32) for x in code.operands[1:])
        d = m.register(code.operands[0], U32)
        return computed(d, lambda: narrow(low, to) | narrow(high, to).astype(np.uint32) << 16)
    d, a = _extended(m, code.operands[0], to), m.source(code.operands[1], DTYPES[source])
    convert = _conversion(source, to, modifiers)
    return computed(d, lambda: convert(a))


def _extended(m: Machine, register: Reg, kind: str) -> np.ndarray:
    """The view of `register` to write to; a narrower integer is sign- or zero-extended, by its type."""
    dtype = DTYPES[kind]
    if dtype.kind != "f" and kind not in HALVES:
        dtype = np.dtype(f"{dtype.kind}{max(register.bits // 8, dtype.itemsize)}")
    return m.register(register, dtype)


def _conversion(source: str, to: str, modifiers: list[str]) -> Callable[[np.ndarray], np.ndarray]:
    dtype, integers = DTYPES[to], (source[0] in "us", to[0] in "us")
    modifier, *more = modifiers or [""]
    if more:
        raise UnknownInstruction("with two modifiers")
    if all(integers) and modifier == "":
        return lambda x: x.astype(dtype)
    if integers[0] and to == "f32" and modifier == "rn":
        return lambda x: x.astype(np.float64)
    if (source, to, modifier) in (("f32", "f64", ""), ("f64", "f32", "rn")):
        return lambda x: x
    if source in HALVES and to == "f32" and modifier == "":
        return lambda x: widen(np.ascontiguousarray(x), source)
    if source == "f32" and to in HALVES and modifier == "rn":
        return lambda x: narrow(x, to)
    if source == to == "f32" and modifier == "sat":
        return lambda x: np.clip(np.nan_to_num(x, nan=0.0), 0, 1)
    if source == to == "f32" and modifier in ROUND:
        return ROUND[modifier]
    if source == "f32" and integers[1] and modifier in ROUND:
        return lambda x: _to_integer(ROUND[modifier](x.astype(np.float64)), dtype)
    raise UnknownInstruction("this conversion")


def _to_integer(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The nearest integer that `dtype` holds; 0 for a NaN."""
    bounds = np.iinfo(dtype)
    inside = np.clip(np.nan_to_num(x, nan=0.0), float(bounds.min), float(bounds.max))
    top = inside >= float(bounds.max)
    return np.where(top, bounds.max, np.where(top, 0, inside).astype(dtype))


# Between lanes


@builds("shfl")
def _shfl(m: Machine, code: Instruction) -> Operation:
    """shfl to `d|p`: p, if given, is whether the source lane of d is in the segment."""
    mode, first = code.parts[2], code.operands[0]
    sources = {"up": np.subtract, "down": np.add, "bfly": np.bitwise_xor}
    if mode not in (*sources, "idx"):
        raise UnknownInstruction("this shuffle")
    to, predicate = (first.first, first.second) if isinstance(first, Pair) else (first, None)
    d, p = m.register(to, U32), None if predicate is None else m.register(predicate, BOOL)
    a, b, c, members = (m.source(x, U32) for x in code.operands[1:])
    lane, base = m.lane_of, 32 * m.warp_of

    def shuffle(mask: Mask) -> None:
        require_full(members, mask)
        m.whole_warps(mask)
        by, segment, clamp = (x.astype(np.int64) & 31 for x in (b, c >> np.uint32(8), c))
        low = lane & segment
        source = low | (by & ~segment) if mode == "idx" else sources[mode](lane, by)
        end = low | clamp & ~segment
        inside = source >= end if mode == "up" else source <= end
        np.copyto(d, a[base + np.where(inside, source, lane)], where=mask)
        if p is not None:
            np.copyto(p, inside, where=mask)

    return shuffle


@builds("vote")
def _vote(m: Machine, code: Instruction) -> Operation:
    """Whether a predicate holds in all lanes of a warp, or in any."""
    reductions = {"vote.sync.all.pred": np.all, "vote.sync.any.pred": np.any}
    if code.opcode not in reductions:
        raise UnknownInstruction("this vote")
    reduce, asked = reductions[code.opcode], code.operands[1]
    inverted = isinstance(asked, Inverted)
    d, members = m.register(code.operands[0], BOOL), m.source(code.operands[2], U32)
    a = m.register(asked.register if inverted else asked, BOOL)

    def vote(mask: Mask) -> None:
        require_full(members, mask)
        m.whole_warps(mask)
        each = (~a if inverted else a).reshape(-1, 32)
        np.copyto(d, np.repeat(reduce(each, axis=1), 32), where=mask)

    return vote


@builds("setmaxnreg")
def _nothing(m: Machine, code: Instruction) -> Operation:
    """setmaxnreg has no effect here."""
    return lambda mask: None
