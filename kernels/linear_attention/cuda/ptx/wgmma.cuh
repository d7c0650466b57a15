// Tensor-core instructions of a warpgroup (sm_90a): four warps multiply 64 rows, with operands in shared memory.
#pragma once
#include "ptx/shared_memory.cuh"

// Makes ordinary writes to shared memory visible to warpgroup products; call it before a barrier.
DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING = 0>
DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// An accumulator is valid only after the wait: keeps the compiler from moving reads of it before this.
template <int N>
DEVICE void warpgroup_fence_operand(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// Gives a warpgroup's threads fewer registers (setmaxnreg), or more, as soon as others have released them.
template <int REGISTERS>
DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Describes 16 elements along K of a tile in shared memory to the tensor cores: swizzled() in shared_memory.cuh,
// "128-byte swizzle" in the PTX ISA; panels start at multiples of 1024 bytes, eight rows are 1024 bytes apart.
typedef unsigned long long Descriptor;
DEVICE Descriptor descriptor(u32 tile, u32 panel, u32 offset) {
  u32 low = ((tile & 0x3ffff) >> 4 | panel >> 4 << 16) + (offset >> 4);  // within a tile only the sum differs
  return Descriptor(1024 >> 4 | 1 << 30) << 32 | low;                    // eight rows further; 128-byte swizzle
}
// Descriptors of a tile of ROWS rows: of columns 16k … 16k+15, if K runs along its rows; of rows 16k … 16k+15, if K
// runs down its columns.
template <int ROWS>
DEVICE Descriptor k_along_rows(u32 tile, int k) {
  return descriptor(tile, 0, (k / 4) * ROWS * ROW_BYTES + (k % 4) * 32);
}
template <int ROWS>
DEVICE Descriptor k_down_columns(u32 tile, int k) {
  return descriptor(tile, ROWS * ROW_BYTES, k * 16 * ROW_BYTES);
}

// One instruction: d[64×8N] = a·b over 16 elements of K, or d += a·b if `add` is not 0; N is 1, 8 or 16. a is in shared
// memory, or in registers as in mma(); b is in shared memory. Warp w has rows 16w … 16w+15 of d, and of an a in
// registers.
constexpr int K_MAJOR = 0, MN_MAJOR = 1;  // K along a tile's rows, or down its columns
template <typename T, int N, int B, int A = K_MAJOR>
struct Wgmma;

// The instruction names every register of d, so each N has its own text. D_N: those names; TILES_N(0): the operands
// they stand for; O0 … O6: the names of the operands after d.
#define D_1 "%0,%1,%2,%3"
#define D_8                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D_16                                                             \
  D_8 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
      ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TILES_1(i) TILE(i)
#define TILES_4(i) TILE(i), TILE(i + 1), TILE(i + 2), TILE(i + 3)
#define TILES_8(i) TILES_4(i), TILES_4(i + 4)
#define TILES_16(i) TILES_8(i), TILES_8(i + 8)

#define WGMMA_TEXT(TYPE, COLUMNS, D, OPERAND_A, OPERAND_B, ADD, FLAGS)                                       \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD                                                                    \
  ", 0;\n"                                                                                                   \
  "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" D "}, " OPERAND_A ", " OPERAND_B \
  ", p, 1, 1, " FLAGS ";\n}\n"

#define WGMMA(T, TYPE, N, COLUMNS, O0, O1, O2, O3, O4, O5, O6)                                   \
  template <int B, int A>                                                                        \
  struct Wgmma<T, N, B, A> {                                                                     \
    static DEVICE void mma(float (&d)[N][4], Descriptor a, Descriptor b, int add) {              \
      asm volatile(WGMMA_TEXT(TYPE, COLUMNS, D_##N, O0, O1, O2, O3 ", " O4)                      \
                   : TILES_##N(0)                                                                \
                   : "l"(a), "l"(b), "r"(add), "n"(A), "n"(B));                                  \
    }                                                                                            \
    static DEVICE void mma(float (&d)[N][4], const u32 (&a)[4], Descriptor b, int add) {         \
      asm volatile(WGMMA_TEXT(TYPE, COLUMNS, D_##N, "{" O0 "," O1 "," O2 "," O3 "}", O4, O5, O6) \
                   : TILES_##N(0)                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B));      \
    }                                                                                            \
  };
#define WGMMA_OF(T, TYPE)                                                  \
  WGMMA(T, TYPE, 1, "8", "%4", "%5", "%6", "%7", "%8", "%9", "%10")        \
  WGMMA(T, TYPE, 8, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38") \
  WGMMA(T, TYPE, 16, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")

WGMMA_OF(bf16, "bf16")
WGMMA_OF(fp16, "f16")

#undef D_1
#undef D_8
#undef D_16
#undef TILE
#undef TILES_1
#undef TILES_4
#undef TILES_8
#undef TILES_16
#undef WGMMA_TEXT
#undef WGMMA
#undef WGMMA_OF

// Named after the layout of the operands' tiles: A [64, K], At [K, 64], B [K, 8N], Bt [8N, K]. Call them between
// warpgroup_arrive and warpgroup_commit. An a in registers is an A.
template <typename T, int N, typename OPERAND>
DEVICE void mma_ABt(float (&d)[N][4], const OPERAND& a, Descriptor b, int add) {
  Wgmma<T, N, K_MAJOR>::mma(d, a, b, add);
}
template <typename T, int N, typename OPERAND>
DEVICE void mma_AB(float (&d)[N][4], const OPERAND& a, Descriptor b, int add) {
  Wgmma<T, N, MN_MAJOR>::mma(d, a, b, add);
}
template <typename T, int N>
DEVICE void mma_AtBt(float (&d)[N][4], Descriptor a, Descriptor b, int add) {
  Wgmma<T, N, K_MAJOR, MN_MAJOR>::mma(d, a, b, add);
}
