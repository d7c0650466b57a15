"""The compiler, with no GPU: headers from pip, every architecture, the cache, the report of ptxas."""

import hashlib
import itertools
import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lingpt.common.errors import UserError
from lingpt.common.install import install_command
from lingpt.kernels.linear_attention.cuda import channel_decay, launch, recurrence, tf32, toolchain, variants
from lingpt.kernels.linear_attention.cuda import compile as nvrtc
from lingpt.kernels.linear_attention.cuda.source_hash import source_hash

# Shared memory that a block may have, KB (CUDA C++ Programming Guide).
CARDS = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_120": 99,
    "sm_121": 99,
}
ARCHITECTURES = [*toolchain.ARCHITECTURES, "sm_100a"]

TENSOR_CORES = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "tile.cuh"

template <int ROWS, bool ADD>
__global__ void multiply(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
    __shared__ float tile[ROWS * SCALE];
    const unsigned* x = reinterpret_cast<const unsigned*>(a) + threadIdx.x * 4;
    const unsigned* y = reinterpret_cast<const unsigned*>(b) + threadIdx.x * 2;
    float d[4] = {};
    mma(d, x, y);
    for (int i = 0; i < 4; i++) tile[(threadIdx.x * 4 + i) % ROWS] = d[i];
    __syncthreads();
    c[threadIdx.x] = tile[threadIdx.x % ROWS] + (ADD ? __bfloat162float(a[0]) : 0.f);
}
"""
TILE = r"""
#pragma once
__device__ inline void mma(float* d, const unsigned* x, const unsigned* y) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}
"""
SPILLS = r"""
extern "C" __global__ void __launch_bounds__(1024) spills(const float* a, float* c) {
    float x[96];
    for (int i = 0; i < 96; i++) x[i] = a[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int r = 0; r < 8; r++)
        #pragma unroll
        for (int i = 0; i < 96; i++) x[i] = x[i] * x[(i * 7 + 5) % 96] + x[(i + 31) % 96];
    for (int i = 0; i < 96; i++) c[i * 1024 + threadIdx.x] = x[i];
}
"""
NAME = "multiply<64, true>"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tile.cuh").write_text(TILE)
    path = tmp_path / "multiply.cu"
    path.write_text(TENSOR_CORES)
    return path


def build(source: Path, arch: str = "sm_80", names: tuple[str, ...] = (NAME,), scale: int = 1):
    return nvrtc.compile_kernels(source, arch, {"SCALE": scale}, names)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tensor_cores_and_headers_compile_for_every_architecture(source: Path, arch: str) -> None:
    """Guards: pip's headers are found, templates get their names, the report has figures that can be true."""
    module = build(source, arch)
    assert module.code[:4] == b"\x7fELF" and module.symbols[NAME].encode() in module.code
    used = module.resources[NAME]
    assert 8 <= used.registers <= 64 and used.spills == 0 and used.shared == 64 * 4


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_are_seen(source: Path, arch: str) -> None:
    """Guards: the check can fail: 96 live values do not fit the 64 registers that 1024 threads leave."""
    source.write_text(SPILLS)
    used = build(source, arch, ("spills",)).resources["spills"]
    assert used.registers <= 64 and used.spill_stores > 0 and used.spill_loads > 0 and used.stack > 0


def test_spills_of_a_function_count_for_its_kernel() -> None:
    """Guards: `ptxas` reports functions that were not inlined apart, under the kernel that calls them."""
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : Function properties for k\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Function properties for helper\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 2048 bytes smem\n"
    )
    assert nvrtc.parse_ptxas_report(log) == {"k": nvrtc.Resources(40, 8, 4, 12, 2048)}


@pytest.mark.nvrtc
def test_an_empty_log_is_not_written_over_a_constant_of_python(source: Path) -> None:
    """Guards: Python shares bytes of length one; the zero of an empty log made every later b" " a b"\\0", and
    `torch.load` in that process misread what it unpickled."""
    nvrtc.compile_ptx(source, "sm_80", {"SCALE": 1}, (NAME,))
    assert bytes([32])[0] == 32


@pytest.mark.nvrtc
def test_the_cache_serves_the_same_and_notices_every_change(source: Path) -> None:
    """Guards: a second start compiles nothing; a changed source, include, define or architecture does not."""
    first, again = build(source), build(source)
    assert first.seconds > 0 and again.seconds == 0
    assert (again.code, again.symbols, again.resources) == (first.code, first.symbols, first.resources)
    source.with_name("tile.cuh").write_text(TILE + "// changed\n")
    assert build(source).seconds > 0
    folder = source.with_name("folder")
    folder.mkdir()
    source.with_name("tile.cuh").write_text('#include "folder/tile.cuh"\n')
    for text in (TILE, TILE + "// changed\n"):
        (folder / "tile.cuh").write_text(text)
        assert build(source).seconds > 0
    source.write_text(TENSOR_CORES.replace("ADD ?", "!ADD ?"))
    assert build(source).seconds > 0
    assert build(source, scale=2).seconds > 0
    assert build(source, "sm_86").seconds > 0
    assert len(list(nvrtc.cache_folder().glob("*.cubin"))) == 7


@pytest.mark.nvrtc
@pytest.mark.parametrize("damage", [lambda b: b[:-100], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_cache_file_is_compiled_again(source: Path, damage) -> None:
    """Guards: a file cut short by a full disk, or a flipped bit, never reaches the GPU."""
    first = build(source)
    first.path.write_bytes(damage(first.path.read_bytes()))
    again = build(source)
    assert again.seconds > 0 and again.code == first.code
    assert build(source).seconds == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize("header", [b"", b"[1]", b'{"symbols": {}}', b'{"symbols": {}, "log": "", "x": 1}'])
def test_a_header_that_is_none_is_compiled_again(source: Path, header: bytes) -> None:
    """Guards: a file whose checksum is right and whose header is not, from another version: a traceback."""
    first = build(source)
    body = header + b"\n" + first.code
    first.path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    again = build(source)
    assert again.seconds > 0 and again.code == first.code


@pytest.mark.nvrtc
@pytest.mark.parametrize("where", [".", "..", "file"])
def test_a_kernel_that_others_could_have_written_is_not_loaded(source: Path, where: str) -> None:
    """Guards: a cubin with a right checksum that somebody else put into a cache open to all: it would run
    with the user's rights. Files keep the umask."""
    before = os.umask(0o077)
    try:
        first = build(source)
    finally:
        os.umask(before)
    assert first.path.stat().st_mode & 0o777 == 0o600 and build(source).seconds == 0
    open_to_all = first.path if where == "file" else (first.path.parent / where).resolve()
    open_to_all.chmod(0o777)
    if where == "file":
        assert build(source).seconds > 0 and build(source).seconds == 0  # replaced by an own one
        return
    with pytest.warns(UserWarning, match="compiled again at every start: .*others can write"):
        assert build(source).seconds > 0


@pytest.mark.nvrtc
@pytest.mark.slow
def test_many_at_once_leave_one_whole_file(source: Path) -> None:
    """Guards: processes that start together do not corrupt the cache and leave no half-written file."""
    script = (
        "import sys; from lingpt.kernels.linear_attention.cuda.compile import compile_kernels as c;"
        f"print(len(c(sys.argv[1], 'sm_80', {{'SCALE': 1}}, ['{NAME}']).code))"
    )
    command = [sys.executable, "-c", script, str(source)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    threads = [threading.Thread(target=build, args=(source,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = {int(process.communicate(timeout=60)[0]) for process in started}
    module = build(source)
    assert sizes == {len(module.code)} and module.seconds == 0
    assert list(nvrtc.cache_folder().iterdir()) == [module.path]


@pytest.mark.nvrtc
def test_an_unwritable_cache_warns_and_works(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a read-only home costs a second at every start, not the run."""
    source.with_name("file").write_text("")
    monkeypatch.setenv("LINGPT_CACHE", str(source.with_name("file")))
    with pytest.warns(UserWarning, match="compiled again at every start"):
        assert build(source).code[:4] == b"\x7fELF"


@pytest.mark.nvrtc
def test_broken_source_shows_the_compilers_words(source: Path) -> None:
    """Guards: whoever edits a kernel sees file, line and message."""
    source.write_text("__global__ void k() { undeclared = 1; }")
    with pytest.raises(RuntimeError, match=r'(?s)multiply.cu.*sm_80.*"undeclared" is undefined'):
        build(source, names=("k",))


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "arch, words", [("sm_999", "does not know sm_999"), ("hopper", "does not know hopper")]
)
def test_an_unknown_architecture_is_one_line(source: Path, arch: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(source, arch)


def test_a_missing_compiler_names_the_extra(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: without cuda-bindings the answer is what to install, for torch's own CUDA version."""
    toolchain.compiler_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(toolchain.torch.version, "cuda", "12.8")
    with pytest.raises(UserError, match=rf"not installed: {re.escape(install_command('cuda12'))} "):
        build(source)


@pytest.mark.nvrtc
def test_a_driver_too_old_for_the_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a CUDA 12 driver is told apart before it is given a cubin of CUDA 13."""
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 12040))
    assert toolchain.driver_for((12, 9)) is driver
    with pytest.raises(UserError, match=r"runs CUDA up to 12.4, .* CUDA 13: .*\[cuda12\]"):
        toolchain.driver_for((13, 0))


@pytest.mark.nvrtc
@pytest.mark.parametrize("missing", ["headers", "driver", "architecture"])
def test_what_is_missing_is_known_before_the_first_kernel(missing: str, monkeypatch) -> None:
    """Guards: "auto" takes the chunkwise form where CUDA's headers or a new enough driver are missing, or the
    compiler is older than the card; it raised."""
    from cuda import pathfinder
    from cuda.bindings import driver

    from lingpt.kernels.linear_attention.cuda import backend

    capability = (99, 9) if missing == "architecture" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    version = 4000 if missing == "driver" else 99000
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, version))
    if missing == "headers":
        monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    reason = backend.device_unsupported_reason.__wrapped__(torch.bfloat16, 64, torch.device("cuda"))
    words = {"headers": "need CUDA's headers", "driver": "up to 4.0", "architecture": "not know sm_999"}
    assert words[missing] in reason and "\n" not in reason


def test_the_fields_that_python_packs_are_those_of_struct_params() -> None:
    """Guards: a field that one side has added, renamed or moved: a kernel would read its neighbour."""
    source = (nvrtc.SOURCE_FOLDER / "params.cuh").read_text()
    body = re.search(r"struct Params \{(.*?)\n\};", re.sub(r"//[^\n]*", "", source), re.DOTALL)[1]
    operands = re.search(r"enum Operand \{ (.*?) \}", source)[1].split(", ")
    parts = {
        "tensors[6]": operands,
        "strides[6]": [f"{x}_{dim}" for x in operands for dim in ("batch", "head", "token")],
        **{state: [f"{state}_{x}" for x in "Skv"] for state in ("initial", "final")},
    }
    fields = []
    for declaration in filter(str.strip, body.split(";")):
        names = re.fullmatch(r"\s*(?:const )?\w+(.*)", declaration, re.DOTALL)[1].split(",")
        for name in (x.strip(" *\n") for x in names):
            fields += parts.get(name, [name])
    assert fields == [*launch.POINTERS.names, *launch.LAYOUT.names]
    with pytest.raises(KeyError, match="has no stats"):
        launch.POINTERS.pack({"stats": 1})


def test_the_fields_of_channels_are_those_of_their_struct() -> None:
    """Guards: the same of struct ChannelParams."""
    source = (nvrtc.SOURCE_FOLDER / "channel_decay_params.cuh").read_text()
    body = re.search(r"struct ChannelParams \{(.*?)\n\};", re.sub(r"//[^\n]*", "", source), re.DOTALL)[1]
    fields = []
    for declaration in filter(str.strip, body.split(";")):
        names = re.fullmatch(r"\s*(?:const )?\w+(.*)", declaration, re.DOTALL)[1].split(",")
        for name in (x.strip(" *\n") for x in names):
            strides = [f"{name[8:]}_{dim}" for dim in ("batch", "token", "head")]
            fields += strides if name.startswith("strides_") else [name]
    assert fields == [*channel_decay.POINTERS.names, *channel_decay.LAYOUT.names]


def test_the_hash_is_of_substance(tmp_path: Path) -> None:
    """Guards: comments and blank space leave a GPU record valid; any other change makes it stale."""
    kernel, launcher = tmp_path / "k.cu", tmp_path / "__init__.py"

    def written(cuda: str, python: str = "x = 1\n") -> str:
        kernel.write_text(cuda)
        launcher.write_text(python)
        return source_hash(tmp_path)

    base = written('int a = 1; const char* s = "// kept"; // note')
    commented = '/* new\n note */ int a=1;\n\nconst char* s = "// kept";'
    assert written(commented, '"""Doc."""\n\n# why\nx = 1\n') == base
    assert written('int a = 2; const char* s = "// kept";') != base
    assert written('int a = 1; const char* s = "// other";') != base
    assert written('int a = 1; const char* s = "// kept";', "x = 2\n") != base
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx" / "k.cuh").write_text("int b;")
    assert written('int a = 1; const char* s = "// kept";') != base


@pytest.mark.parametrize("arch, kilobytes", [*CARDS.items()])
def test_a_block_fits_every_card(arch: str, kilobytes: int) -> None:
    """Guards: a block that asks for more shared memory than the card gives one."""
    for dtype, D, decay in itertools.product(variants.TAGS, variants.HEAD_DIMS, variants.DECAYS):
        for rope in (0, D // 4, D):
            build = variants.variant_for(arch, dtype, D, decay, rope)
            assert build.shared <= kilobytes * 1024, build


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "define",
    ["POINTERS_BYTES", "LAYOUT_BYTES", "SHARED_BYTES", "SCAN_THREADS", "LAUNCH_THREADS", "LAUNCH_STATE_SIZE"],
)
def test_what_python_packs_is_what_cuda_reads(define: str, tmp_path: Path, monkeypatch) -> None:
    """Guards: a size that one side has changed and the other has not: the compiler refuses it."""
    monkeypatch.setenv("LINGPT_CACHE", str(tmp_path))
    for arch, smaller in (("sm_80", 8), ("sm_90a", 65536)):
        build = variants.variant_for(arch, torch.bfloat16, 64, "NO_DECAY", 0)
        wrong = build.defines | {define: build.defines[define] - smaller}
        with pytest.raises(RuntimeError, match=r"static assertion failed .*(launch|variants)\.py"):
            nvrtc.compile_kernels(variants.SOURCE, arch, wrong, [build.names["scan", "FWD"]])


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, builds",
    [
        (arch, rf"scan<bf16, {head_dim}, .*{decay}")
        for arch in ("sm_80", "sm_90a")
        for head_dim in variants.HEAD_DIMS
        for decay in variants.DECAYS
    ]
    + [
        (arch, r"scan<bf16, 128, .*(PER_HEAD|PER_TOKEN, \d+, NORMALISED)")
        for arch in toolchain.ARCHITECTURES
        if arch not in ("sm_80", "sm_90a")
    ],
)
def test_our_kernels_compile_without_spills(arch: str, builds: str) -> None:
    """Guards: every kernel a user can meet compiles for its architectures, its values in registers; no remark
    of the compiler says that it had to serialise a warpgroup product. Of cards that share sm_80's scan only
    the two largest builds."""
    specs = [s for s in variants.specs() if arch in s.architectures and re.match(builds, s.names[0])]
    assert specs
    for spec in specs:
        module = spec.compile(arch)
        assert set(module.resources) == set(spec.names)  # the report holds every kernel
        assert not [f"{name}: {use}" for name, use in module.resources.items() if use.spills]
        assert not module.remarks


CHANNEL_BUILDS = [
    ("sm_80", "bf16", "float", 128, 256),
    ("sm_80", "bf16", "float", 256, 512),
    ("sm_90a", "fp16", "bf16", 128, 128),
    ("sm_90a", "bf16", "float", 96, 192),
    ("sm_90a", "bf16", "float", 256, 512),
    ("sm_120", "bf16", "float", 64, 128),
]


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("build", CHANNEL_BUILDS, ids=str)
def test_kernels_of_channels_compile_without_spills(build: tuple) -> None:
    """Guards: the same of a decay for each channel, and that a block fits the card."""
    found = channel_decay.Build(*build)
    module = found.spec.compile(found.arch)
    assert set(module.resources) == set(found.names.values())
    assert not [f"{name}: {use}" for name, use in module.resources.items() if use.spills]
    assert found.unsupported_reason is None and max(found.shared) <= CARDS[found.arch] * 1024


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_the_recurrence_compiles_without_spills(arch: str) -> None:
    for spec in recurrence.specs():
        if arch in spec.architectures:
            for name, used in spec.compile(arch).resources.items():
                assert not used.spills and used.shared <= launch.DEFAULT_SHARED_LIMIT, name


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("D", [8, 32, 64, 96])  # wider ones spill a few bytes on some architectures
@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_fp32_on_tensor_cores_compiles_without_spills(arch: str, products: int, D: int) -> None:
    """Guards: the same of a shared decay in fp32, and that a block fits the card."""
    build = tf32.Build(arch, D, products)
    module = build.spec.compile(arch)
    assert set(module.resources) == set(build.names.values())
    assert not [f"{name}: {use}" for name, use in module.resources.items() if use.spills]
    assert max(build.shared) <= CARDS[arch] * 1024


@pytest.mark.nvrtc
@pytest.mark.gpu
def test_a_compiled_kernel_runs(source: Path) -> None:
    """Guards: load, arguments and dynamic shared memory above 48 KB, on torch's stream."""
    import torch

    source.write_text(r"""
        extern "C" __global__ void fill(float* out, float value, int n) {
            extern __shared__ float tile[];
            tile[16000 + threadIdx.x] = value + n;
            __syncthreads();
            if (threadIdx.x < n) out[threadIdx.x] = tile[16000 + threadIdx.x];
        }""")
    module = nvrtc.compile_kernels(source, toolchain.native_arch(), {}, ["fill"])
    out = torch.zeros(32, device="cuda")
    (fill,) = module.load(["fill"]).values()
    arguments = struct.pack("P", out.data_ptr()), struct.pack("f", 0.5), struct.pack("i", 20)
    fill((1, 1, 1), 32, 65536, torch.cuda.current_stream().cuda_stream, *arguments)
    assert out.tolist() == [20.5] * 20 + [0.0] * 12
