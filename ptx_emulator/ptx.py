"""Parses PTX text into kernels: lists of instructions with their operands resolved to registers."""

from __future__ import annotations

import bisect
import dataclasses
import re
from typing import Any

import numpy as np

from .faults import UnknownInstruction

WIDTHS = {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}
WIDTHS |= {"pred": 1, "bf16": 16, "f16x2": 32, "bf16x2": 32}


@dataclasses.dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: its width in bits (1 for a predicate) and its row among those of that width."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a result and a predicate."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Inverted:
    """`!p`: an inverted predicate."""

    register: Any


@dataclasses.dataclass(slots=True)
class Instruction:
    index: int
    opcode: str
    operands: tuple
    guard: Any  # a predicate, an Inverted one, or None
    text: str
    line: int  # line number in the PTX
    source: str  # "linear_attention.cu:93", or empty if the compiler does not say
    parts: list[str] = dataclasses.field(init=False)  # the opcode, split at its dots

    def __post_init__(self) -> None:
        self.parts = self.opcode.split(".")

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        where = f" ({self.source})" if self.source else ""
        return f"PTX line {self.line}{where}: {text if len(text) < 120 else text[:117] + '…'}"


@dataclasses.dataclass(slots=True)
class Variable:
    """A variable in shared memory; size 0: dynamic shared memory, sized by the launch."""

    name: str
    align: int
    size: int


@dataclasses.dataclass
class Kernel:
    name: str
    parameters: dict[str, tuple[int, int]]  # name → offset, size
    code: list[Instruction]
    labels: dict[str, int]
    registers: dict[int, int]  # width → number of registers
    shared: list[Variable]  # those of the module and of the kernel
    max_threads: int

    @property
    def parameter_bytes(self) -> int:
        return max((offset + size for offset, size in self.parameters.values()), default=0)


class Ptx:
    """The PTX of a module; kernels are parsed on demand."""

    def __init__(self, text: str) -> None:
        # Comments are replaced by blanks of equal length, so that positions are unchanged.
        self.text = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        files = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', self.text, re.MULTILINE)
        self.files = {number: path.rsplit("/", 1)[-1] for number, path in files}
        entry = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
        self.entries = {m[1]: m for m in entry.finditer(self.text)}
        outside, end = "", 0  # the text outside of kernels
        for m in self.entries.values():
            outside, end = outside + self.text[end : m.start()], _closing_brace(self.text, m.end())
        statements = re.split(r"[;\n]", outside + self.text[end:])
        self.shared = [v for v in map(_shared_variable, statements) if v]

    def kernel(self, name: str) -> Kernel:
        match = self.entries[name]
        return _KernelParser(self, match, _closing_brace(self.text, match.end())).kernel

    def line(self, position: int) -> int:
        return bisect.bisect_left(self.newlines, position) + 1


def _closing_brace(text: str, start: int) -> int:
    """The position where the brace that is open at `start` is closed."""
    depth = 1
    for m in re.compile("[{}]").finditer(text, start):
        depth += 1 if m[0] == "{" else -1
        if depth == 0:
            return m.start()
    raise ValueError("PTX ends within braces")


def _shared_variable(statement: str) -> Variable | None:
    m = re.match(
        r"\s*(?:\.(?:extern|visible|weak)\s+)*\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[\d*\])?\s*$",
        statement,
    )
    if m is None:
        return None
    width = WIDTHS[m[2]] // 8
    return Variable(m[3], int(m[1] or width), width * int((m[4] or "[1]")[1:-1] or 0))


def immediate_bits(text: str, width: int) -> int:
    """A PTX number as the raw bits of `width` bytes; `0f…` and `0d…` are those of an fp32 or fp64 number."""
    size = {"0f": 4, "0d": 8}.get(text[:2].lower())
    if size is None:
        return int(text.rstrip("U"), 0) & ((1 << 8 * width) - 1)
    if width != size:
        raise UnknownInstruction("a floating-point number as something wider or narrower")
    return int(text[2:], 16)


class _KernelParser:
    """Parses one kernel. Scopes (`{ … }` of inline assembly) have their own registers and labels."""

    statement = re.compile(
        r"\s*(?:(?P<loc>\.loc\s+(?P<file>\d+)\s+(?P<number>\d+)[^\n]*)"
        r"|(?P<brace>[{}])"
        r"|(?P<label>[\w$%]+)\s*:(?!:)"
        r"|(?P<text>[^;]*?(?:\{[^}]*\}[^;]*?)*);)"
    )

    def __init__(self, ptx: Ptx, match: re.Match[str], end: int) -> None:
        self.ptx = ptx
        self.scopes: list[dict[str, Reg]] = [{}]
        self.scope_number, self.scope_path = 0, [0]
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}  # registers of each width
        self.code: list[Instruction] = []
        self.targets: dict[str, int] = {}
        self.branches: list[tuple[Instruction, tuple[int, ...]]] = []  # branches to resolve, with their scope
        self.source = ""
        self.shared = list(ptx.shared)
        parameters = _parameters(match[2])
        self._statements(match.end(), end)
        limit = re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", match[3])
        threads = int(np.prod([int(x) for x in limit[1].split(",")])) if limit else 1024
        registers = {bits: max(count, 1) for bits, count in self.counts.items()}
        self.kernel = Kernel(match[1], parameters, self.code, self.targets, registers, self.shared, threads)

    def _statements(self, position: int, end: int) -> None:
        end = len(self.ptx.text[:end].rstrip())
        while position < end:
            m = self.statement.match(self.ptx.text, position, end)
            if m is None:
                raise UnknownInstruction(f"PTX line {self.ptx.line(position)} is not a statement")
            position = m.end()
            if m["loc"]:
                self.source = f"{self.ptx.files.get(m['file'], '?')}:{m['number']}"
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
                self._statement(m["text"], self.ptx.line(m.start("text")))
        self._resolve_labels()

    def _statement(self, text: str, line: int) -> None:
        if registers := re.match(r"\.reg\s*\.(\w+)\s+(.*)", text, re.DOTALL):
            for name in registers[2].split(","):
                self._declare(registers[1], name.strip())
        elif variable := _shared_variable(text):
            self.shared.append(variable)
        elif not text.startswith("."):
            self._instruction(text, line)
        elif not text.startswith(".pragma"):
            raise UnknownInstruction(f"PTX line {line}: {text.strip()}")

    def _instruction(self, text: str, line: int) -> None:
        m = re.match(r"(?:@(!?)([\w%$]+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
        if m is None:
            raise UnknownInstruction(f"PTX line {line}: {text.strip()}")
        guard = self._operand(m[2]) if m[2] else None
        guard = Inverted(guard) if m[1] else guard
        branches = m[3].startswith("bra")
        operands = (m[4].strip(),) if branches else tuple(map(self._operand, split_operands(m[4])))
        code = Instruction(len(self.code), m[3], operands, guard, text, line, self.source)
        if branches:
            self.branches.append((code, tuple(self.scope_path)))
        self.code.append(code)

    def _declare(self, kind: str, name: str) -> None:
        bits = max(WIDTHS[kind], 16) if kind != "pred" else 1
        family = re.fullmatch(r"(.*)<(\d+)>", name)
        names = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
        first = self.counts[bits]
        self.scopes[-1].update((n, Reg(bits, first + i)) for i, n in enumerate(names))
        self.counts[bits] += len(names)

    def _resolve_labels(self) -> None:
        for code, path in self.branches:
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
        base, _, offset = text.partition("+")
        return Address(self._operand(base.strip()), int(offset.strip() or "0", 0))


def split_operands(text: str) -> list[str]:
    """Splits the text at commas outside of braces and brackets."""
    if "{" not in text and "[" not in text:
        return [x.strip() for x in text.split(",")] if text else []
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
    """Name → offset and size of a parameter in the buffer that a launch fills."""
    found, end = {}, 0
    for m in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([^\[,\s]+)(?:\[(\d+)\])?", text):
        width = WIDTHS[m[2]] // 8
        size, align = width * int(m[4] or 1), int(m[1] or width)
        offset = -(-end // align) * align
        found[m[3]], end = (offset, size), offset + size
    return found
