"""The instructions ld, st and fence.proxy.async."""

from __future__ import annotations

import numpy as np

from .faults import MemcheckError, UnknownInstruction
from .machine import DTYPES, Machine, Mask, Operation, builds
from .ptx import Instruction, Reg


def units(address: np.ndarray, size: int) -> np.ndarray:
    """The units that the race detector watches, for `size` bytes at every address: [n, ⌈size/2⌉]."""
    return (address >> 1)[:, None] + np.arange(max(size // 2, 1))


# Loads and stores. A generic address is a global one: shared memory has none without a cvta.


def _form(code: Instruction) -> tuple[str, np.dtype, int]:
    """The state space, the type of the elements, and their number."""
    spaces = [p.split("::")[0] for p in code.parts if p.split("::")[0] in SPACES]
    count = next((int(p[1]) for p in code.parts if p in ("v2", "v4")), 1)
    return spaces[0] if spaces else "global", DTYPES[code.parts[-1]], count


SPACES = ("shared", "global", "param", "const", "local")


def _load_shared(m: Machine, address, size: int, count: int, lanes, by: int) -> np.ndarray:
    m.shared.check(address, size * count, lanes)
    m.race.read(units(address, size * count), m.warp_of[lanes], by)
    return m.shared.load(address, size, count)


def _load_global(m: Machine, address, size: int, count: int, lanes, by: int) -> np.ndarray:
    return m.memory.load(address, size, count, lanes)


def _load_param(m: Machine, address, size: int, count: int, lanes, by: int) -> np.ndarray:
    bad = (address < 0) | (address + size * count > len(m.parameters)) | (address % size != 0)
    if bad.any():
        i = int(np.argmax(bad))
        raise MemcheckError(f"thread {int(lanes[i])}: byte {int(address[i])} of the parameters")
    whole = m.parameters[: len(m.parameters) // size * size].view(f"u{size}")
    return whole[(address // size)[:, None] + np.arange(count)]


@builds("ld")
def _ld(m: Machine, code: Instruction) -> Operation:
    space, dtype, count = _form(code)
    read = {"shared": _load_shared, "global": _load_global, "param": _load_param}[space]
    to, operand = code.operands
    addresses = m.addresses(operand)
    targets = [_destination(m, x, dtype) for x in (to if isinstance(to, tuple) else (to,))]

    def load(mask: Mask) -> None:
        lanes = m.lanes(mask)
        raw = read(m, addresses(lanes), dtype.itemsize, count, lanes, code.index).view(dtype)
        for i, d in enumerate(targets):
            if mask is True:
                d[...] = raw[:, i]
            else:
                d[lanes] = raw[:, i]

    return load


def _destination(m: Machine, register: Reg, dtype: np.dtype) -> np.ndarray:
    """The view of `register` to load into; a value narrower than the register is extended."""
    if dtype.kind == "f":
        return m.register(register, dtype)
    return m.register(register, np.dtype(f"{dtype.kind}{max(register.bits // 8, dtype.itemsize)}"))


def _store_shared(m: Machine, address, values, lanes, by: int) -> None:
    size = values.dtype.itemsize * values.shape[1]
    m.shared.check(address, size, lanes)
    m.race.write(units(address, size), m.warp_of[lanes], by)
    m.shared.store(address, values)


def _store_global(m: Machine, address, values, lanes, by: int) -> None:
    m.memory.store(address, values, lanes)


@builds("st")
def _st(m: Machine, code: Instruction) -> Operation:
    space, dtype, _ = _form(code)
    write = {"shared": _store_shared, "global": _store_global}[space]
    operand, values = code.operands
    addresses, raw = m.addresses(operand), np.dtype(f"u{dtype.itemsize}")
    sources = [m.source(x, raw) for x in (values if isinstance(values, tuple) else (values,))]

    def store(mask: Mask) -> None:
        lanes = m.lanes(mask)
        write(m, addresses(lanes), np.stack([x[lanes] for x in sources], axis=1), lanes, code.index)

    return store


@builds("fence")
def _fence(m: Machine, code: Instruction) -> Operation:
    if not code.opcode.startswith("fence.proxy.async"):
        raise UnknownInstruction("of fences, fence.proxy.async is known")
    return lambda mask: m.race.fence(np.unique(m.warp_of[m.lanes(mask)]))
