"""Instructions that a thread executes on its registers, and exchanges between the lanes of a warp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .faults import UnknownInstruction
from .machine import DTYPES, Machine, Mask, Operation, builds
from .memory import SHARED_WINDOW
from .ptx import Instruction, Inverted, Name, Pair, Reg

HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
BOOL, U32, U64 = np.dtype(bool), np.dtype("u4"), np.dtype("u8")


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
    dropped = {4: 16, 8: 45}[size]  # bits of the significand that bf16 has not
    bits = np.ascontiguousarray(x).view(word)
    half = word((1 << (dropped - 1)) - 1) + (bits >> word(dropped) & word(1))
    rounded = (bits + half) >> word(dropped) << word(dropped)
    single = rounded.view(x.dtype).astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, single >> 16).astype(np.uint16)


# Forms of operations


def _type(code: Instruction) -> str:
    """The last part of the opcode that names a type."""
    return next(p for p in reversed(code.parts) if p in DTYPES)


def elementwise(m: Machine, code: Instruction, function: Callable, dtype: np.dtype) -> Operation:
    """d = function(a, …) for a numpy ufunc."""
    d = m.register(code.operands[0], dtype)
    sources = [m.source(x, dtype) for x in code.operands[1:]]
    if len(sources) == 1:
        return lambda mask: function(sources[0], out=d, where=mask)
    a, b = sources
    return lambda mask: function(a, b, out=d, where=mask)


def computed(d: np.ndarray, function: Callable[[], np.ndarray]) -> Operation:
    """d = function() for any function."""
    return lambda mask: np.copyto(d, function(), where=mask, casting="unsafe")


def _halves(m: Machine, code: Instruction, function: Callable) -> Operation:
    """On 16-bit floats or pairs of them: in float64, rounded once."""
    kind = _type(code)
    dtype, count = DTYPES[kind], 2 if kind.endswith("x2") else 1
    d = m.register(code.operands[0], dtype if count == 2 else np.dtype("u2"))
    sources = [m.source(x, d.dtype) for x in code.operands[1:]]

    def compute() -> np.ndarray:
        wide = [widen(np.ascontiguousarray(x).view(np.uint16), kind).astype(np.float64) for x in sources]
        return narrow(function(*wide), kind).view(d.dtype)

    return computed(d, compute)


# Arithmetic

ARITHMETIC = {"add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}
LOGICAL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}


@builds("add", "sub", "neg", "abs")
def _add(m: Machine, code: Instruction) -> Operation:
    kind, function = _type(code), ARITHMETIC[code.parts[0]]
    if "cc" in code.parts or "sat" in code.parts:
        raise UnknownInstruction("carry and saturation")
    if kind in HALVES:
        return _halves(m, code, function)
    return elementwise(m, code, function, DTYPES[kind])


@builds("min", "max")
def _min(m: Machine, code: Instruction) -> Operation:
    kind, low = _type(code), code.parts[0] == "min"
    if "NaN" in code.parts or kind[0] in "us":
        function = np.minimum if low else np.maximum
    else:
        function = np.fmin if low else np.fmax
    if kind in HALVES:
        return _halves(m, code, function)
    return elementwise(m, code, function, DTYPES[kind])


@builds("and", "or", "xor", "not")
def _bitwise(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    return elementwise(m, code, (LOGICAL if dtype == BOOL else BITWISE)[code.parts[0]], dtype)


def _product(kind: str, part: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """lo, hi or wide, of integers."""
    dtype = DTYPES[kind]
    if part == "lo":
        return lambda a, b: a * b
    if dtype.itemsize == 8:
        bits = np.frompyfunc(lambda a, b: (int(a) * int(b)) >> 64, 2, 1)
        return lambda a, b: bits(a, b).astype(dtype)
    twice = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    if part == "wide":
        return lambda a, b: a.astype(twice) * b.astype(twice)
    return lambda a, b: (a.astype(twice) * b.astype(twice) >> (8 * dtype.itemsize)).astype(dtype)


def _widths(code: Instruction) -> tuple[str, np.dtype]:
    """lo, hi or wide; and the type of the result."""
    part = next(p for p in code.parts if p in ("lo", "hi", "wide"))
    dtype = DTYPES[_type(code)]
    return part, np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if part == "wide" else dtype


@builds("mul")
def _mul(m: Machine, code: Instruction) -> Operation:
    kind = _type(code)
    if kind in HALVES:
        return _halves(m, code, np.multiply)
    if kind[0] == "f":
        return elementwise(m, code, np.multiply, DTYPES[kind])
    part, result = _widths(code)
    if part == "lo":
        return elementwise(m, code, np.multiply, DTYPES[kind])
    product, d = _product(kind, part), m.register(code.operands[0], result)
    a, b = (m.source(x, DTYPES[kind]) for x in code.operands[1:])
    return computed(d, lambda: product(a, b))


@builds("mad", "fma")
def _mad(m: Machine, code: Instruction) -> Operation:
    kind = _type(code)
    if kind in HALVES:
        return _halves(m, code, lambda a, b, c: a * b + c)
    if kind[0] == "f":
        return _fma(m, code, kind)
    part, result = _widths(code)
    product, d = _product(kind, part), m.register(code.operands[0], result)
    a, b = (m.source(x, DTYPES[kind]) for x in code.operands[1:3])
    c = m.source(code.operands[3], result)
    return computed(d, lambda: product(a, b) + c)


def _fma(m: Machine, code: Instruction, kind: str) -> Operation:
    """The product of two fp32 numbers is exact in float64."""
    d = m.register(code.operands[0], DTYPES[kind])
    a, b, c = (m.source(x, DTYPES[kind]) for x in code.operands[1:])

    def compute() -> np.ndarray:
        exact = a.astype(np.float64) * b + c
        return _rounded(exact, d.dtype, code.parts)

    return computed(d, compute)


def _rounded(x: np.ndarray, dtype: np.dtype, parts: list[str]) -> np.ndarray:
    """float64 → a narrower float, in the direction that the opcode says."""
    near = x.astype(dtype)
    if "rm" in parts:
        return np.where(near > x, np.nextafter(near, dtype.type(-np.inf)), near)
    if "rp" in parts:
        return np.where(near < x, np.nextafter(near, dtype.type(np.inf)), near)
    if "rz" in parts:
        return np.where(np.abs(near.astype(x.dtype)) > np.abs(x), np.nextafter(near, dtype.type(0)), near)
    return near


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - np.fmod(a, b)) // np.where(b == 0, b.dtype.type(1), b)


@builds("div", "rem")
def _div(m: Machine, code: Instruction) -> Operation:
    kind = _type(code)
    if kind[0] == "f":
        return elementwise(m, code, np.divide, DTYPES[kind])
    if code.parts[0] == "rem":
        return elementwise(m, code, np.fmod, DTYPES[kind])
    a, b = (m.source(x, DTYPES[kind]) for x in code.operands[1:])
    return computed(m.register(code.operands[0], DTYPES[kind]), lambda: _quotient(a, b))


FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
}


@builds(*FUNCTIONS)
def _function(m: Machine, code: Instruction) -> Operation:
    """Of one fp32 number, rounded to nearest: more exact than the hardware's `.approx`."""
    kind, function = _type(code), FUNCTIONS[code.parts[0]]
    if kind in HALVES:
        return _halves(m, code, function)
    d, a = (m.register(code.operands[0], DTYPES[kind]), m.source(code.operands[1], DTYPES[kind]))
    return computed(d, lambda: function(a.astype(np.float64)))


@builds("copysign")
def _copysign(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    d, (sign, a) = m.register(code.operands[0], dtype), (m.source(x, dtype) for x in code.operands[1:])
    return computed(d, lambda: np.copysign(a, sign))


# Bits


@builds("shl", "shr")
def _shift(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    bits = 8 * dtype.itemsize
    left, d = code.parts[0] == "shl", m.register(code.operands[0], dtype)
    a, by = m.source(code.operands[1], dtype), m.source(code.operands[2], U32)
    shift = np.left_shift if left else np.right_shift
    if not isinstance(code.operands[2], Reg) and by[0] < bits:
        amount = by.astype(dtype)
        return lambda mask: shift(a, amount, out=d, where=mask)
    most = np.uint32(bits - 1)

    def compute() -> np.ndarray:
        shifted = shift(a, np.minimum(by, most).astype(dtype))
        beyond = a >> dtype.type(bits - 1) if dtype.kind == "i" and not left else dtype.type(0)
        return np.where(by > most, beyond, shifted)

    return computed(d, compute)


@builds("shf")
def _funnel(m: Machine, code: Instruction) -> Operation:
    d = m.register(code.operands[0], U32)
    low, high, by = (m.source(x, U32) for x in code.operands[1:])
    left, clamp = "l" in code.parts, "clamp" in code.parts

    def compute() -> np.ndarray:
        amount = (np.minimum(by, 32) if clamp else by & 31).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        if left:
            return (both << amount >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
        return (both >> amount) & np.uint64(0xFFFFFFFF)

    return computed(d, compute)


@builds("bfe")
def _extract(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    bits = 8 * dtype.itemsize
    d, a = m.register(code.operands[0], dtype), m.source(code.operands[1], dtype)
    position, length = (m.source(x, U32) for x in code.operands[2:])

    def extract(a: int, position: int, length: int) -> int:
        position, length = position & 0xFF, length & 0xFF
        field = (int(a) >> position) & ((1 << length) - 1)  # `a` is extended by its sign
        if dtype.kind == "i" and length:
            top = min(position + length - 1, bits - 1)
            if int(a) >> top & 1:
                field |= -1 << length
        return field

    extracts = np.frompyfunc(extract, 3, 1)
    return computed(d, lambda: extracts(a, position, length).astype(dtype))


@builds("bfi")
def _insert(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    d, (a, b) = m.register(code.operands[0], dtype), (m.source(x, dtype) for x in code.operands[1:3])
    position, length = (m.source(x, U32) for x in code.operands[3:])

    def insert(a: int, b: int, position: int, length: int) -> int:
        field = (((1 << (length & 0xFF)) - 1) << (position & 0xFF)) & ((1 << 8 * dtype.itemsize) - 1)
        return int(b) & ~field | (int(a) << (position & 0xFF)) & field

    inserts = np.frompyfunc(insert, 4, 1)
    return computed(d, lambda: inserts(a, b, position, length).astype(dtype))


@builds("popc", "clz", "brev")
def _count(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    bits = 8 * dtype.itemsize
    function = {
        "popc": lambda x: int(x).bit_count(),
        "clz": lambda x: bits - int(x).bit_length(),
        "brev": lambda x: int(f"{int(x):0{bits}b}"[::-1], 2),
    }[code.parts[0]]
    d = m.register(code.operands[0], dtype if code.parts[0] == "brev" else U32)
    a, counts = m.source(code.operands[1], dtype), np.frompyfunc(function, 1, 1)
    return computed(d, lambda: counts(a).astype(d.dtype))


@builds("lop3")
def _lop3(m: Machine, code: Instruction) -> Operation:
    d = m.register(code.operands[0], U32)
    a, b, c, table = (m.source(x, U32) for x in code.operands[1:])

    def compute() -> np.ndarray:
        result = np.zeros(m.T, np.uint32)
        for i in range(8):
            if int(table[0]) >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return computed(d, compute)


@builds("prmt")
def _permute(m: Machine, code: Instruction) -> Operation:
    if len(code.parts) > 2:
        raise UnknownInstruction("prmt has its general form only")
    d = m.register(code.operands[0], U32)
    a, b, selector = (m.source(x, U32) for x in code.operands[1:])

    def compute() -> np.ndarray:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(m.T, np.uint64)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i)).astype(np.uint64)
            byte = both >> (np.uint64(8) * (choice & np.uint64(7))) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            result |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
        return result

    return computed(d, compute)


# Comparisons, choices, moves and conversions

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _comparison(name: str, floats: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Ordered ones are false, unordered ones (`ltu`) true, for a NaN."""
    if name in ("num", "nan"):
        wanted = name == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
    if floats and name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    if floats and name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        ordered = COMPARISONS[name[:2]]
        return lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)
    return COMPARISONS[name]


@builds("setp")
def _setp(m: Machine, code: Instruction) -> Operation:
    kind = _type(code)
    if kind in HALVES:
        raise UnknownInstruction("comparisons of 16-bit floats")
    name = "n" + code.parts[1] if code.parts[1] in ("um", "an") else code.parts[1]
    compare = _comparison(name, kind[0] == "f")
    combine = next((LOGICAL[p] for p in code.parts[2:] if p in LOGICAL), None)
    dtype, first = DTYPES[kind], code.operands[0]
    targets = [first.first, first.second] if isinstance(first, Pair) else [first]
    p, *q = (m.register(x, BOOL) for x in targets if x is not None)
    a, b = (m.source(x, dtype) for x in code.operands[1:3])
    if combine is None and not q and name in COMPARISONS and compare is COMPARISONS[name]:
        return lambda mask: compare(a, b, out=p, where=mask)
    other = _predicate(m, code.operands[3]) if combine else None

    def setp(mask: Mask) -> None:
        result = compare(a, b)
        opposite = ~result
        np.copyto(p, combine(result, other()) if combine else result, where=mask)
        if q:
            np.copyto(q[0], combine(opposite, other()) if combine else opposite, where=mask)

    return setp


def _predicate(m: Machine, operand) -> Callable[[], np.ndarray]:
    if isinstance(operand, Inverted):
        register = m.register(operand.register, BOOL)
        return lambda: ~register
    source = m.source(operand, BOOL)
    return lambda: source.copy()


@builds("selp")
def _selp(m: Machine, code: Instruction) -> Operation:
    dtype = DTYPES[_type(code)]
    d, (a, b) = m.register(code.operands[0], dtype), (m.source(x, dtype) for x in code.operands[1:3])
    p = m.register(code.operands[3], BOOL)
    return computed(d, lambda: np.where(p, a, b))


@builds("mov")
def _mov(m: Machine, code: Instruction) -> Operation:
    """Also between a register and a vector of its parts: parts of registers are views."""
    kind = _type(code)
    to, source = code.operands
    if kind == "pred":
        value = _predicate(m, source)
        return computed(m.register(to, BOOL), value)
    if not isinstance(to, tuple) and not isinstance(source, tuple):
        d, a = m.register(to, DTYPES[kind]), m.source(source, DTYPES[kind])
        return lambda mask: np.copyto(d, a, where=mask)
    parts = to if isinstance(to, tuple) else source
    dtype = np.dtype(f"u{DTYPES[kind].itemsize // len(parts)}")
    row = m.registers[(source if parts is to else to).bits][(source if parts is to else to).row]
    whole = [row.view(dtype)[i :: len(parts)] for i in range(len(parts))]
    pairs = [(w, m.source(x, dtype)) for w, x in zip(whole, parts, strict=True) if x is not None]
    if parts is to:
        pairs = [(d, a) for a, d in pairs]

    def move(mask: Mask) -> None:
        for d, a in pairs:
            np.copyto(d, a, where=mask)

    return move


@builds("cvta")
def _cvta(m: Machine, code: Instruction) -> Operation:
    """Generic addresses are the host's, but for shared memory, which has a window above them."""
    d, a = m.register(code.operands[0], U64), m.source(code.operands[1], U64)
    if "local" in code.parts:
        raise UnknownInstruction("local memory (a stack)")
    window = np.uint64(SHARED_WINDOW if "shared" in code.parts else 0)
    function = np.subtract if "to" in code.parts else np.add
    return lambda mask: function(a, window, out=d, where=mask)


ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@builds("cvt")
def _cvt(m: Machine, code: Instruction) -> Operation:
    to, source = [p for p in code.parts if p in DTYPES]
    parts = code.parts
    if to in ("f16x2", "bf16x2"):
        d, (high, low) = (
            m.register(code.operands[0], U32),
            (m.source(x, np.dtype("f4")) for x in code.operands[1:]),
        )
        if "rn" not in parts or "relu" in parts or "satfinite" in parts:
            raise UnknownInstruction("pairs are rounded to nearest")
        return computed(d, lambda: narrow(low, to) | narrow(high, to).astype(np.uint32) << 16)
    half_in, half_out = source in HALVES, to in HALVES
    d = m.register(code.operands[0], np.dtype("u2") if half_out else _extended(code.operands[0], to))
    a = m.source(code.operands[1], np.dtype("u2") if half_in else DTYPES[source])
    convert = _conversion("f32" if half_in else source, "f32" if half_out else to, parts)

    def compute() -> np.ndarray:
        x = convert(widen(np.ascontiguousarray(a), source) if half_in else a)
        return narrow(x, to) if half_out else x

    return computed(d, compute)


def _extended(register: Reg, kind: str) -> np.dtype:
    """A register may be wider than what it gets: that is extended by its kind of integer."""
    dtype = DTYPES[kind]
    return dtype if dtype.kind == "f" else np.dtype(f"{dtype.kind}{max(register.bits // 8, dtype.itemsize)}")


def _conversion(source: str, to: str, parts: list[str]) -> Callable[[np.ndarray], np.ndarray]:
    dtype = DTYPES[to]
    rounding = next((ROUND[p] for p in parts if p in ROUND), None)
    if to[0] in "usb" and source[0] == "f":
        bounds = np.iinfo(dtype)

        def to_integer(x: np.ndarray) -> np.ndarray:
            x = (rounding or np.trunc)(x.astype(np.float64))
            inside = np.clip(np.nan_to_num(x, nan=0.0), float(bounds.min), float(bounds.max))
            top = inside >= float(bounds.max)
            return np.where(top, bounds.max, np.where(top, 0, inside).astype(dtype))

        return to_integer
    if to[0] in "usb":
        if "sat" in parts:
            bounds = np.iinfo(dtype)
            return lambda x: np.clip(x.astype(object), bounds.min, bounds.max).astype(dtype)
        return lambda x: x.astype(dtype)

    def to_float(x: np.ndarray) -> np.ndarray:
        wide = x.astype(np.float64) if source != "f64" else x
        y = rounding(wide).astype(dtype) if rounding else _rounded(wide, dtype, parts)
        return np.clip(np.nan_to_num(y, nan=0.0), 0, 1).astype(dtype) if "sat" in parts else y

    return to_float


# Between lanes


@builds("shfl")
def _shfl(m: Machine, code: Instruction) -> Operation:
    mode = next(p for p in code.parts if p in ("up", "down", "bfly", "idx"))
    first = code.operands[0]
    pair = isinstance(first, Pair)
    d = m.register(first.first if pair else first, U32)
    p = m.register(first.second, BOOL) if pair else None
    a, b, c, members = (m.source(x, U32) for x in code.operands[1:])
    lane, base = m.lane_of, 32 * m.warp_of

    def shuffle(mask: Mask) -> None:
        m.require_lanes(mask, members)
        by, segment, clamp = (x.astype(np.int64) & 31 for x in (b, c >> np.uint32(8), c))
        low = lane & segment
        high = low | (clamp & ~segment)
        if mode == "idx":
            source = low | (by & ~segment)
        else:
            source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by}[mode]
        inside = source >= high if mode == "up" else source <= high
        source = base + np.where(inside, source, lane)
        np.copyto(d, a[source], where=mask)
        if p is not None:
            np.copyto(p, inside, where=mask)

    return shuffle


@builds("vote")
def _vote(m: Machine, code: Instruction) -> Operation:
    mode = next(x for x in code.parts if x in ("ballot", "any", "all", "uni"))
    p = _predicate(m, code.operands[1])
    members = m.source(code.operands[2], U32)
    bits = 1 << np.arange(32)
    d = m.register(code.operands[0], U32 if mode == "ballot" else BOOL)

    def vote(mask: Mask) -> None:
        m.require_lanes(mask, members)
        named = (members.astype(np.int64) >> m.lane_of & 1).astype(bool)
        ayes = np.repeat(((p() & named).reshape(-1, 32) * bits).sum(1), 32)
        everyone = members.astype(np.int64)
        results = {"ballot": ayes, "any": ayes != 0, "all": ayes == everyone}
        results["uni"] = results["all"] | (ayes == 0)
        np.copyto(d, results[mode], where=mask, casting="unsafe")

    return vote


@builds("redux")
def _redux(m: Machine, code: Instruction) -> Operation:
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, **BITWISE}
    function, dtype = next(functions[p] for p in code.parts if p in functions), DTYPES[_type(code)]
    d, a = m.register(code.operands[0], dtype), m.source(code.operands[1], dtype)
    members = m.source(code.operands[2], U32)

    def reduce(mask: Mask) -> None:
        m.require_lanes(mask, members)
        if (members != 0xFFFFFFFF).any():
            raise UnknownInstruction("redux of a part of a warp")
        np.copyto(d, np.repeat(function.reduce(a.reshape(-1, 32), axis=1, dtype=dtype), 32), where=mask)

    return reduce


@builds("elect")
def _elect(m: Machine, code: Instruction) -> Operation:
    first, members = code.operands[0], m.source(code.operands[1], U32)
    d = m.register(first.first, U32) if isinstance(first.first, Reg) else None
    p = m.register(first.second, BOOL)

    def elect(mask: Mask) -> None:
        m.require_lanes(mask, members)
        bits = members.astype(np.int64)
        leader = np.frompyfunc(lambda x: (x & -x).bit_length() - 1, 1, 1)(bits).astype(np.int64)
        np.copyto(p, m.lane_of == leader, where=mask)
        if d is not None:
            np.copyto(d, leader, where=mask, casting="unsafe")

    return elect


@builds("activemask")
def _activemask(m: Machine, code: Instruction) -> Operation:
    d = m.register(code.operands[0], U32)

    def active(mask: Mask) -> None:
        here = np.ones(m.T, bool) if mask is True else mask
        bits = (here.reshape(-1, 32) * (1 << np.arange(32))).sum(1)
        np.copyto(d, np.repeat(bits, 32), where=mask, casting="unsafe")

    return active


# Hints: nothing to do


@builds("membar", "nanosleep", "griddepcontrol", "setmaxnreg", "prefetch", "applypriority", "discard")
def _nothing(m: Machine, code: Instruction) -> Operation:
    return lambda mask: None


@builds("mapa")
def _mapa(m: Machine, code: Instruction) -> Operation:
    """An address in the only block of the cluster."""
    dtype = DTYPES[_type(code)]
    source = m.source(code.operands[1], dtype)
    if isinstance(code.operands[1], Name):
        raise UnknownInstruction("mapa of a variable")
    d = m.register(code.operands[0], dtype)
    return lambda mask: np.copyto(d, source, where=mask)
