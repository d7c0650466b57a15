// Hopper's warpgroup products (sm_90a): four warps multiply 64 rows at once, operands straight from shared memory.
#pragma once
#include "mma.cuh"

// A tile in shared memory for the tensor cores: panels of 64 columns, rows of 128 bytes, 16-byte pieces permuted within
// a row (swizzle in mma.cuh, "128-byte swizzle" in the PTX ISA); panels start at multiples of 1024 bytes.
//   Rows are the operand's outer dimension (K contiguous): eight-row groups are 1024 bytes apart.
//   Columns are (K is the rows): the same, and `panel` bytes from 64 columns to the next.
typedef unsigned long long Descriptor;
__device__ __forceinline__ Descriptor descriptor(u32 address, u32 panel, u32 offset) {
  u32 low = ((address & 0x3ffff) >> 4 | panel >> 4 << 16) + (offset >> 4);  // of a tile only the sum differs
  return Descriptor(1024 >> 4 | 1 << 30) << 32 | low;
}

// Sixteen columns from 16k of a tile of ROWS rows, K-contiguous; 16 rows from 16s, K the rows.
template <int ROWS>
__device__ __forceinline__ Descriptor k_columns(u32 address, int k) {
  return descriptor(address, 0, (k / 4) * ROWS * 128 + (k % 4) * 32);
}
template <int ROWS>
__device__ __forceinline__ Descriptor k_rows(u32 address, int s) {
  return descriptor(address, ROWS * 128, s * 2048);
}

// Ordinary writes to shared memory become visible to warpgroup products (before a barrier).
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING = 0>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Four 8×8 tiles to shared memory; lanes 8i … 8i+7 give the row addresses of tile i.
__device__ __forceinline__ void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ __forceinline__ void stmatrix_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// d[64×8M] = a·b, or d += a·b where `add` is not 0; M is 1, 8 or 16. b in shared memory: COLUMNS = 0 if K is contiguous,
// 1 if K is the tile's rows. a in shared memory, likewise (A_COLUMNS), or in registers, laid out as in mma(). Warp w has
// rows 16w … 16w+15 of d and of an a in registers.
template <typename T, int COLUMNS, int M, int A_COLUMNS = 0>
struct Warpgroup;

// The instruction names every number of d, so each M has a text of its own. D_M: those names; TILES_M(0): the operands
// they stand for; O0 … O6: the names of the operands after d.
#define D_1 "%0,%1,%2,%3"
#define D_8 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"                                                    \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D_16 D_8 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"                                    \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TILES_1(i) TILE(i)
#define TILES_4(i) TILE(i), TILE(i + 1), TILE(i + 2), TILE(i + 3)
#define TILES_8(i) TILES_4(i), TILES_4(i + 4)
#define TILES_16(i) TILES_8(i), TILES_8(i + 8)

#define WGMMA(TYPE, N, D, A, B, ADD, FLAGS)                                                                            \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                                                                     \
  "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D "}, " A ", " B ", p, 1, 1, " FLAGS ";\n}\n"

#define WARPGROUP(T, TYPE, M, N, O0, O1, O2, O3, O4, O5, O6)                                                           \
  template <int COLUMNS, int A_COLUMNS>                                                                                \
  struct Warpgroup<T, COLUMNS, M, A_COLUMNS> {                                                                         \
    static __device__ __forceinline__ void mma(float (&d)[M][4], Descriptor a, Descriptor b, int add) {                \
      asm volatile(WGMMA(TYPE, N, D_##M, O0, O1, O2, O3 ", " O4)                                                       \
                   : TILES_##M(0)                                                                                      \
                   : "l"(a), "l"(b), "r"(add), "n"(A_COLUMNS), "n"(COLUMNS));                                          \
    }                                                                                                                  \
    static __device__ __forceinline__ void mma(float (&d)[M][4], const u32 (&a)[4], Descriptor b, int add) {           \
      asm volatile(WGMMA(TYPE, N, D_##M, "{" O0 "," O1 "," O2 "," O3 "}", O4, O5, O6)                                  \
                   : TILES_##M(0)                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(COLUMNS));                      \
    }                                                                                                                  \
  };
#define WARPGROUPS(T, TYPE)                                                                                            \
  WARPGROUP(T, TYPE, 1, "8", "%4", "%5", "%6", "%7", "%8", "%9", "%10")                                                \
  WARPGROUP(T, TYPE, 8, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")                                         \
  WARPGROUP(T, TYPE, 16, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")

WARPGROUPS(bf16, "bf16")
WARPGROUPS(fp16, "f16")

#undef D_1
#undef D_8
#undef D_16
#undef TILE
#undef TILES_1
#undef TILES_4
#undef TILES_8
#undef TILES_16
#undef WGMMA
#undef WARPGROUP
#undef WARPGROUPS
