"""PTX by hand: the parser, and instructions that the emulator does not know. No compiler is needed."""

import numpy as np
import pytest

from lingpt.ptx_emulator import UnknownInstruction
from lingpt.ptx_emulator.machine import Machine
from lingpt.ptx_emulator.memory import GlobalMemory
from lingpt.ptx_emulator.ptx import Immediate, Name, Ptx, Reg, split_operands

# Two kernels. In the first, scopes of inline assembly reuse the names of a register and of a label.
TEXT = """
.version 8.0
.target sm_90a
.extern .shared .align 1024 .b8 tiles[];
.shared .align 8 .b64 barrier;
.visible .entry first(
    .param .u32 first_param_0, // a comment; with a semicolon { and a brace
    .param .u64 first_param_1,
    .param .align 8 .b8 first_param_2[20]
)
.maxntid 64, 2, 1
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    .loc 1 7 3
    ld.param.u64 %rd1, [first_param_1];
    mov.u32 %r1, %tid.x;
    { .reg .b32 %r1; mov.u32 %r1, 5; bra done; mov.u32 %r1, 6; done: }
    mul.lo.u32 %r2, %r1, 3;
done:
    setp.lt.u32 %p1, %r1, 2;
    @!%p1 bra skip;
    mul.lo.u32 %r2, %r2, 100;
skip:
    mad.wide.u32 %rd1, %r1, 4, %rd1;
    st.global.u32 [%rd1+0], %r2;
    ret;
}
.entry second() { .reg .b64 %rd<1>; BODY; ret; }
.file 1 "/somewhere/source.cu"
"""


def parsed(body: str = "ret", name: str = "first"):
    return Ptx(TEXT.replace("BODY", body)).kernel(name)


def test_parameters_variables_and_limits_are_read() -> None:
    """Guards: parameters' offsets as a launch packs them; the module's shared variables; threads a block."""
    kernel = parsed()
    assert list(kernel.parameters.values()) == [(0, 4), (8, 8), (16, 20)] and kernel.parameter_bytes == 36
    assert [(v.name, v.align, v.size) for v in kernel.shared] == [("tiles", 1024, 0), ("barrier", 8, 8)]
    assert kernel.max_threads == 128 and parsed(name="second").max_threads == 1024


def test_an_instruction_knows_its_lines() -> None:
    """Guards: an error names the line of the PTX and the line of the source."""
    load, move, *_ = parsed().code
    assert str(load) == "PTX line 17 (source.cu:7): ld.param.u64 %rd1, [first_param_1]"
    assert (move.operands[1], move.line) == (Name("%tid.x"), 18)


def test_operands() -> None:
    """Guards: braces and brackets keep their commas; registers of a scope hide those around it."""
    assert split_operands("{a, b}, [c+4], d|p, _") == ["{a, b}", "[c+4]", "d|p", "_"]
    moves = [code for code in parsed().code if code.opcode == "mov.u32"]
    outer, inner = (code.operands[0] for code in moves[:2])
    assert outer == Reg(32, 1) and inner == Reg(32, 3) and moves[1].operands[1] == Immediate("5")


def test_scopes_and_branches_run() -> None:
    """Guards: a jump within a scope ends at its own label; threads that diverge have their own results."""
    out, kernel = np.zeros(64, np.uint32), parsed()
    machine = Machine(kernel, threads=64, shared=0)
    machine.parameters[8:16] = np.frombuffer(np.uint64(out.ctypes.data).tobytes(), np.uint8)
    machine.memory = GlobalMemory([(out.ctypes.data, out.nbytes)])
    machine.run((0, 0, 0), (1, 1, 1))
    assert out.tolist() == [0, 300, *(3 * i for i in range(2, 64))]


@pytest.mark.parametrize(
    "body, reason",
    [
        ("frobnicate.u32 %rd0, 1", "frobnicate"),
        ("add.sat.s32 %rd0, 1, 2", "saturation"),
        ("mov.u64 %rd0, %clock64", "%clock64"),
        ("fence.acq_rel.gpu", "fence.proxy.async"),
        ("ld.local.u64 %rd0, [0]", "ld.local"),
        (".branchtargets a, b", "branchtargets"),
    ],
)
def test_what_is_not_known_is_named(body: str, reason: str) -> None:
    """Guards: no instruction is skipped or guessed; the error shows it, and its line."""
    with pytest.raises(UnknownInstruction, match=rf"(?s)PTX line 30.*{reason}"):
        Machine(parsed(body, "second"), threads=32, shared=0)
