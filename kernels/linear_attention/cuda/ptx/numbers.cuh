// Number types, pairs of 16-bit numbers in a register, and fp32 values split into sums of 16-bit ones.
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

#define DEVICE __device__ __forceinline__

constexpr u32 FULL_WARP = 0xffffffffu;  // the mask of a shuffle that all 32 lanes take part in
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Sum over groups of LANES neighbouring lanes, in all of them.
template <int LANES>
DEVICE float sum_lanes(float x) {
#pragma unroll
  for (int d = 1; d < LANES; d *= 2) x += __shfl_xor_sync(FULL_WARP, x, d);
  return x;
}

// Re-reads threadIdx.x and makes the address opaque, so that the compiler recomputes derived addresses instead of keeping
// them live across the loop (spills).
DEVICE void reload(int& tid, u32& address) {
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  asm volatile("" : "+r"(address));
}

// 1/x to one unit in the last place, without a branch for subnormal numbers.
DEVICE float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 2^x, without a branch; 0 if it would be subnormal.
DEVICE float power_of_two(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// x = mantissa(x) · exponent(x): a number of magnitude 1 to 2, and a power of two (0 if x is 0 or subnormal).
DEVICE float mantissa(float x) { return __uint_as_float((__float_as_uint(x) & 0x807fffffu) | 0x3f800000u); }
DEVICE float exponent(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }

// ---------------------------------------------------------------------------------- pairs of 16-bit numbers
// A register holds two neighbours, the first in its low half; rounding is to nearest even.
template <typename T>
DEVICE u32 pack(float lo, float hi);
template <>
DEVICE u32 pack<bf16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <>
DEVICE u32 pack<fp16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <typename T>
DEVICE float2 unpack(u32 x);
template <>
DEVICE float2 unpack<bf16>(u32 x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
DEVICE float2 unpack<fp16>(u32 x) {
  float2 r;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}

// Products of two pairs, rounded once.
template <typename T>
DEVICE u32 multiply(u32 x, u32 y);
template <>
DEVICE u32 multiply<bf16>(u32 x, u32 y) {
  u32 r;  // sm_80 has no product of pairs, but has x·y + −0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(0x80008000u));
  return r;
}
template <>
DEVICE u32 multiply<fp16>(u32 x, u32 y) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

// x·y + z of pairs, rounded once.
template <typename T>
DEVICE u32 multiply_add(u32 x, u32 y, u32 z);
template <>
DEVICE u32 multiply_add<bf16>(u32 x, u32 y, u32 z) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  return r;
}
template <>
DEVICE u32 multiply_add<fp16>(u32 x, u32 y, u32 z) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  return r;
}

template <typename T>
DEVICE float dot(u32 x, u32 y) {
  float2 u = unpack<T>(x), w = unpack<T>(y);
  return u.x * w.x + u.y * w.y;
}
template <typename T>
DEVICE float dot(const uint4& x, const uint4& y) {
  return dot<T>(x.x, y.x) + dot<T>(x.y, y.y) + dot<T>(x.z, y.z) + dot<T>(x.w, y.w);
}

// Writes x as a sum of PARTS 16-bit numbers, number i to address(i), so that tensor cores multiply by all of x.
template <typename T, int PARTS, typename ADDRESS>
DEVICE void split(ADDRESS address, float x) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    u32 part = pack<T>(x, 0.f);
    *address(i) = u16(part);
    x -= unpack<T>(part).x;
  }
}
template <typename T, int PARTS>
DEVICE void split(u16* to, int stride, float x) {
  split<T, PARTS>([&](int i) { return to + i * stride; }, x);
}

// The same for two neighbours.
template <typename T, int PARTS>
DEVICE void split(u16* to, int stride, float2 x) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    u32 part = pack<T>(x.x, x.y);
    *reinterpret_cast<u32*>(to + i * stride) = part;
    float2 rounded = unpack<T>(part);
    x.x -= rounded.x, x.y -= rounded.y;
  }
}
