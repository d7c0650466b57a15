// Warp-level building blocks from sm_80 on: 16-bit pairs, tensor-core products, swizzled tiles, async copies.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

// Tags: elements are moved as raw 16-bit words and computed on in fp32. NARROW: overflows at 65504.
struct bf16 {
  static constexpr bool NARROW = false;
};
struct fp16 {
  static constexpr bool NARROW = true;
};

constexpr u32 FULL = 0xffffffffu;

// ---------------------------------------------------------------------------------- pairs of 16-bit numbers
// A register holds two neighbours, the first in its low half; rounding is to nearest even.
template <typename T>
__device__ __forceinline__ u32 pack(float lo, float hi);
template <>
__device__ __forceinline__ u32 pack<bf16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <>
__device__ __forceinline__ u32 pack<fp16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <typename T>
__device__ __forceinline__ float2 unpack(u32 x);
template <>
__device__ __forceinline__ float2 unpack<bf16>(u32 x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<fp16>(u32 x) {
  float2 r;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(r.x), "=f"(r.y)
      : "r"(x));
  return r;
}

// Products of two pairs, rounded once.
template <typename T>
__device__ __forceinline__ u32 multiply(u32 x, u32 y);
template <>
__device__ __forceinline__ u32 multiply<bf16>(u32 x, u32 y) {
  u32 r;  // sm_80 has no product of pairs, but has x·y + −0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(0x80008000u));
  return r;
}
template <>
__device__ __forceinline__ u32 multiply<fp16>(u32 x, u32 y) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

// x as a sum of 16-bit numbers, part i at place(i): tensor cores then multiply by all of x.
template <typename T, int PARTS, typename PLACE>
__device__ __forceinline__ void split(PLACE place, float x) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    u32 part = pack<T>(x, 0.f);
    *place(i) = u16(part);
    x -= unpack<T>(part).x;
  }
}
template <typename T, int PARTS>
__device__ __forceinline__ void split(u16* to, int stride, float x) {
  split<T, PARTS>([&](int i) { return to + i * stride; }, x);
}

// The same of two neighbours.
template <typename T, int PARTS>
__device__ __forceinline__ void split(u16* to, int stride, float2 x) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    u32 part = pack<T>(x.x, x.y);
    *reinterpret_cast<u32*>(to + i * stride) = part;
    float2 back = unpack<T>(part);
    x.x -= back.x, x.y -= back.y;
  }
}

template <typename T>
__device__ __forceinline__ float dot(u32 x, u32 y) {
  float2 u = unpack<T>(x), w = unpack<T>(y);
  return u.x * w.x + u.y * w.y;
}

// RoPE on two columns and their partners.
template <typename T>
__device__ __forceinline__ void rotate_pair(u32& x, u32& y, float2 cos, float2 sin) {
  float2 u = unpack<T>(x), w = unpack<T>(y);
  x = pack<T>(u.x * cos.x - w.x * sin.x, u.y * cos.y - w.y * sin.y);
  y = pack<T>(w.x * cos.x + u.x * sin.x, w.y * cos.y + u.y * sin.y);
}

// The transpose of RoPE, in fp32.
__device__ __forceinline__ void rotate_back(float2& x, float2& y, float2 cos, float2 sin) {
  float2 u = x, w = y;
  x = make_float2(u.x * cos.x + w.x * sin.x, u.y * cos.y + w.y * sin.y);
  y = make_float2(w.x * cos.x - u.x * sin.x, w.y * cos.y - u.y * sin.y);
}

// --------------------------------------------------------------------------------------------- tensor cores
// d[16×8] += a[16×16]·b[16×8]. With g = lane/4, t = lane%4 a lane holds
//   a: rows g, g+8, columns 2t.. and 2t+8..   b: columns (n) g, rows (k) 2t.. and 2t+8..   d: rows g, g+8, columns 2t..
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Products of 16 rows x, a left operand, with themselves: rows g's squares are on the diagonals, lo of the first eight and
// hi of the others.
template <typename T>
__device__ __forceinline__ void add_squares(float (&lo)[4], float (&hi)[4], const u32 (&x)[4]) {
  mma<T>(lo, x[0], x[1], x[2], x[3], x[0], x[2]);
  mma<T>(hi, x[0], x[1], x[2], x[3], x[1], x[3]);
}

// Four 8×8 tiles of 16-bit numbers from shared memory; lanes 8i … 8i+7 give the row addresses of tile i.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// -------------------------------------------------------------------------------------------- shared memory
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ u32 read4(u32 address) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ uint4 read16(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ u16* read_pointer(u32 address) {
  u16* r;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(r) : "r"(address) : "memory");
  return r;
}
// To global memory. As one instruction: the compiler was seen to split an assignment of uint4 into four.
__device__ __forceinline__ void store16(void* to, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}
__device__ __forceinline__ void write4(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Byte offset of 16-byte piece `piece` of row `row` in a tile of ROWS rows: panels of eight pieces, one after the other.
// The exclusive or spreads the eight rows that an ldmatrix reads at once over all banks; it is also the 128-byte
// swizzle that Hopper's warpgroup products read.
template <int ROWS>
__device__ __forceinline__ u32 place(u32 row, u32 piece) {
  return (piece / 8) * ROWS * 128 + row * 128 + (((piece % 8) ^ (row & 7)) << 4);
}

// ---------------------------------------------------------------------------------------------- async copies
// Copies 16 (4) bytes from global to shared memory; with ok = false writes zeros and reads nothing.
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(ok ? 16 : 0));
}
__device__ __forceinline__ void copy4(u32 dst, const void* src, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(ok ? 4 : 0));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}
