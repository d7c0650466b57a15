// Tensor-core instructions of a warp (from sm_80 on): mma.sync, and loads and stores of its fragments.
#pragma once
#include "ptx/numbers.cuh"

// d[16×8] += a[16×16]·b[16×8]. With g = lane/4, t = lane%4, a lane holds
//   a: rows g, g+8, columns 2t.. and 2t+8..   b: columns (n) g, rows (k) 2t.. and 2t+8..   d: rows g, g+8, columns 2t..
template <typename T>
DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <>
DEVICE void mma<bf16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma<fp16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d[16×8] += a[16×8]·b[8×8] in TF32, fp32 without the lowest 13 bits, which the tensor cores do not read. A lane holds
//   a: rows g, g+8 of column t, then of t+4   b: column (n) g, rows (k) t and t+4   d: as above
DEVICE void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// What tensor cores, which cut x off, take as the nearest number in TF32; ∞ and NaN stay what they are. Two instructions,
// where cvt.rna.tf32.f32 takes three.
DEVICE u32 nearest_tf32(float x) {
  u32 y = __float_as_uint(x);
  asm("{\n"
      ".reg .pred finite;\n"
      "setp.lt.f32 finite, %1, 0f7F800000;\n"
      "@finite add.u32 %0, %0, 4096;\n"
      "}"
      : "+r"(y)
      : "f"(fabsf(x)));
  return y;
}

// Load four 8×8 tiles of 16-bit numbers from shared memory, or store them (sm_90); lanes 8i … 8i+7 provide the row
// addresses of tile i.
DEVICE void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
DEVICE void ldmatrix_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
DEVICE void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
DEVICE void stmatrix_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
