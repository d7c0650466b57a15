"""PTX text → kernels as lists of instructions with their operands resolved to registers."""

from __future__ import annotations

import bisect
import dataclasses
import re
from typing import Any

import numpy as np

from .faults import UnknownInstruction

WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16}
WIDTHS |= {f"{kind}32": 32 for kind in "busf"} | {"f16x2": 32, "bf16x2": 32}
WIDTHS |= {f"{kind}64": 64 for kind in "busf"}


@dataclasses.dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: its width (1 for a predicate) and its row among those of that width."""

    bits: int
    row: int


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A special register, a parameter or a variable."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Immediate:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    base: Any
    offset: int
    coordinates: tuple = ()  # of a tensor map


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a result and a predicate."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Inverted:
    """`!p`."""

    register: Any


@dataclasses.dataclass(slots=True)
class Instruction:
    index: int
    opcode: str
    operands: tuple
    guard: Any  # a predicate, an Inverted one, or None
    text: str
    line: int  # in the PTX
    source: str  # "scan.cu:512", or nothing where the compiler does not say

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        where = f" ({self.source})" if self.source else ""
        return f"PTX line {self.line}{where}: {text if len(text) < 120 else text[:117] + '…'}"


@dataclasses.dataclass(slots=True)
class Variable:
    """In shared, global or constant memory. `data`: what it starts with; size 0: dynamic shared memory."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""


@dataclasses.dataclass
class Kernel:
    name: str
    parameters: dict[str, tuple[int, int]]  # name → offset, size
    code: list[Instruction]
    labels: dict[str, int]
    registers: dict[int, int]  # width → how many
    variables: list[Variable]  # the module's and its own
    max_threads: int

    @property
    def parameter_bytes(self) -> int:
        return max((offset + size for offset, size in self.parameters.values()), default=0)


class Text:
    """The PTX of a module; kernels are parsed when they are asked for."""

    def __init__(self, text: str) -> None:
        # Comments go, line breaks stay: positions still tell the line.
        self.text = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        files = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', self.text, re.MULTILINE)
        self.files = {number: path.rsplit("/", 1)[-1] for number, path in files}
        entry = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
        self.entries = {m[1]: m for m in entry.finditer(self.text)}
        bodies = [(m.start(), _closing(self.text, m.end())) for m in self.entries.values()]
        top, end = "", 0
        for start, stop in bodies:
            top, end = top + self.text[end:start], stop
        statements = re.split(r"[;\n]", top + self.text[end:])
        self.variables = [parse_variable(s) for s in statements if _declares(s)]

    def kernel(self, name: str) -> Kernel:
        match = self.entries[name]
        return _Body(self, match, _closing(self.text, match.end())).kernel

    def line(self, position: int) -> int:
        return bisect.bisect_left(self.newlines, position) + 1


def _closing(text: str, start: int) -> int:
    """The end of what an open brace before `start` begins."""
    depth = 1
    for m in re.compile("[{}]").finditer(text, start):
        depth += 1 if m[0] == "{" else -1
        if depth == 0:
            return m.start()
    raise ValueError("PTX ends within braces")


def _declares(statement: str) -> bool:
    return bool(re.match(r"\s*(\.(extern|visible|weak)\s+)*\.(shared|global|const)\b", statement))


def parse_variable(statement: str) -> Variable:
    declaration, _, value = statement.partition("=")
    m = re.search(r"\.(\w+)\s+([\w$]+)\s*((?:\[\d*\]\s*)*)$", declaration.strip())
    kind, name, dimensions = m[1], m[2], re.findall(r"\[(\d*)\]", m[3])
    space = re.search(r"\.(shared|global|const)\b", declaration)[1]
    align = re.search(r"\.align\s+(\d+)", declaration)
    width = WIDTHS[kind] // 8
    size = int(np.prod([int(d or 0) for d in dimensions], initial=1)) * width
    numbers = re.findall(r"0[fd][0-9A-Fa-f]+|-?\w+", value)
    data = b"".join(int(immediate_bits(n, width)).to_bytes(width, "little") for n in numbers)
    return Variable(name, space, int(align[1]) if align else width, size, data.ljust(size, b"\0"))


def immediate_bits(text: str, width: int) -> int:
    """A number of PTX as the raw bits of `width` bytes."""
    if text[:2] in ("0f", "0F"):
        bits, own = int(text[2:], 16), np.uint32
    elif text[:2] in ("0d", "0D"):
        bits, own = int(text[2:], 16), np.uint64
    else:
        return int(text.rstrip("U"), 0) & ((1 << 8 * width) - 1)
    if np.dtype(own).itemsize == width:
        return bits
    value = np.array(bits, own).view(f"f{np.dtype(own).itemsize}").astype(f"f{width}")
    return int(value.view(f"u{width}"))


class _Body:
    """Parses one kernel. Scopes (`{ … }` of inline assembly) have registers and labels of their own."""

    statement = re.compile(
        r"(?P<loc>\.loc\s+(?P<file>\d+)\s+(?P<number>\d+)[^\n]*)"
        r"|(?P<brace>[{}])"
        r"|(?P<label>[\w$%]+)\s*:(?!:)"
        r"|(?P<text>[^;]*?(?:\{[^}]*\}[^;]*?)*);"
    )

    def __init__(self, text: Text, match: re.Match, end: int) -> None:
        self.text, self.scopes, self.labels, self.pending = text, [{}], [{}], []
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.code: list[Instruction] = []
        self.targets: dict[str, int] = {}
        self.source, self.scope_number, self.scope_path = "", 0, [0]
        self.variables = list(text.variables)
        parameters = _parameters(match[2])
        self._statements(match.end(), end)
        limit = re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", match[3])
        threads = int(np.prod([int(x) for x in limit[1].split(",")])) if limit else 1024
        registers = {bits: max(count, 1) for bits, count in self.counts.items()}
        self.kernel = Kernel(
            match[1], parameters, self.code, self.targets, registers, self.variables, threads
        )

    def _statements(self, position: int, end: int) -> None:
        blank = re.compile(r"\s*")
        while (position := blank.match(self.text.text, position).end()) < end:
            m = self.statement.match(self.text.text, position, end)
            if m is None:
                raise UnknownInstruction(f"PTX line {self.text.line(position)} is no statement")
            position = m.end()
            if m["loc"]:
                self.source = f"{self.text.files.get(m['file'], '?')}:{m['number']}"
            elif m["brace"] == "{":
                self.scope_number += 1
                self.scopes.append({})
                self.scope_path.append(self.scope_number)
            elif m["brace"] == "}":
                self.scopes.pop()
                self.scope_path.pop()
            elif m["label"]:
                self.targets[f"{m['label']}@{self.scope_path[-1]}"] = len(self.code)
            elif m["text"]:
                self._statement(m["text"], m.start())
        self._resolve_labels()

    def _statement(self, text: str, position: int) -> None:
        if text.startswith(".reg"):
            kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text, re.DOTALL).groups()
            for name in names.split(","):
                self._declare(kind, name.strip())
        elif text.startswith(".shared"):
            self.variables.append(parse_variable(text))
        elif text.startswith(".pragma"):
            pass
        elif text.startswith("."):
            raise UnknownInstruction(f"PTX line {self.text.line(position)}: {text.strip()}")
        else:
            m = re.match(r"(?:@(!?)([\w%$]+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
            guard = self._operand(m[2]) if m[2] else None
            guard = Inverted(guard) if m[1] else guard
            label = m[3].startswith("bra")
            operands = (m[4].strip(),) if label else tuple(map(self._operand, split_operands(m[4])))
            line = self.text.line(position)
            code = Instruction(len(self.code), m[3], operands, guard, text, line, self.source)
            if label:
                self.pending.append((code, tuple(self.scope_path)))
            self.code.append(code)

    def _declare(self, kind: str, name: str) -> None:
        bits = max(WIDTHS[kind], 16) if kind != "pred" else 1
        family = re.fullmatch(r"(.*)<(\d+)>", name)
        names = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
        first = self.counts[bits]
        self.scopes[-1].update((n, Reg(bits, first + i)) for i, n in enumerate(names))
        self.counts[bits] += len(names)

    def _resolve_labels(self) -> None:
        for code, path in self.pending:
            names = [f"{code.operands[0]}@{scope}" for scope in reversed(path)]
            code.operands = (next(self.targets[name] for name in names if name in self.targets),)

    def _operand(self, text: str) -> Any:
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text.startswith("{"):
            return tuple(map(self._operand, split_operands(text[1:-1])))
        if text.startswith("["):
            return self._address(text[1:-1])
        if "|" in text:
            return Pair(*(self._operand(x.strip()) for x in text.split("|")))
        if text.startswith("!"):
            return Inverted(self._operand(text[1:].strip()))
        if re.fullmatch(r"-?\d\w*", text):
            return Immediate(text)
        return None if text == "_" else Name(text)

    def _address(self, text: str) -> Address:
        base, *rest = split_operands(text)
        m = re.fullmatch(r"([^+\s]+?)\s*(?:\+\s*(-?\w+))?", base)
        coordinates = self._operand(rest[0]) if rest else ()
        return Address(self._operand(m[1]), int(m[2] or "0", 0), coordinates)


def split_operands(text: str) -> list[str]:
    """At the commas that are in no braces."""
    found, depth, start = [], 0, 0
    for m in re.finditer(r"[{}\[\],]", text):
        if m[0] == "," and depth == 0:
            found.append(text[start : m.start()].strip())
            start = m.end()
        elif m[0] != ",":
            depth += 1 if m[0] in "{[" else -1
    last = text[start:].strip()
    return [*found, last] if last else found


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    """Name → offset and size in the buffer that a launch fills."""
    found, end = {}, 0
    for m in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([^\[,\s]+)(?:\[(\d+)\])?", text):
        width = WIDTHS[m[2]] // 8
        size, align = width * int(m[4] or 1), int(m[1] or width)
        offset = -(-end // align) * align
        found[m[3]], end = (offset, size), offset + size
    return found
