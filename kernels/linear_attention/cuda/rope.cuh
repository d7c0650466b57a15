// RoPE in place, on the leading ROPE columns of loaded tiles, rounded as in a 16-bit model; and its transpose, on
// gradients in fp32. Column i rotates with column i + ROPE/2.
#pragma once
#include "modes.cuh"

// Two columns and their partners.
template <typename T>
DEVICE void rotate_pair(u32& x, u32& y, float2 cos, float2 sin) {
  float2 u = unpack<T>(x), w = unpack<T>(y);
  x = pack<T>(u.x * cos.x - w.x * sin.x, u.y * cos.y - w.y * sin.y);
  y = pack<T>(w.x * cos.x + u.x * sin.x, w.y * cos.y + u.y * sin.y);
}
DEVICE void rotate_back(float2& x, float2& y, float2 cos, float2 sin) {
  float2 u = x, w = y;
  x = make_float2(u.x * cos.x + w.x * sin.x, u.y * cos.y + w.y * sin.y);
  y = make_float2(w.x * cos.x - u.x * sin.x, w.y * cos.y - u.y * sin.y);
}

// A tile of TOKENS rows has TOKENS·ROPE/8 items of work: four columns of a row and the four that rotate with them.
struct Angles {
  float4 cos, sin;
};
template <typename T, int MODE, int ROPE>
struct Rope {
  static constexpr int HALF = ROPE ? ROPE / 16 : 1;  // 16-byte pieces of a row that rotate with as many others

  // An item's row. Half a warp reads at once: its rows are such that the swizzle puts their pieces in different banks.
  static DEVICE int row(u32 i) {
    constexpr int APART = HALF > 2 ? 2 : HALF > 1 ? 1 : 0;  // log2 of the distance of its rows
    u32 j = i / (2 * HALF);
    return (j & ~7) | ((j << APART | (j & 7) >> (3 - APART)) & 7);
  }
  static DEVICE Angles angles(const Params& p, int position, u32 i) {
    int last_at_most = min(position + row(i), p.N - 1);  // a row past the end is zero
    i64 at = i64(ModeTraits<T, MODE>::token(p, last_at_most)) * ROPE + i % (2 * HALF) * 4;
    return {*reinterpret_cast<const float4*>(p.cos + at), *reinterpret_cast<const float4*>(p.sin + at)};
  }
  struct Item {
    uint2 *lo, *hi, x, y;
  };
  template <int TOKENS>
  static DEVICE Item read(char* tile, u32 i) {
    u32 piece = i / 2 % HALF;
    tile += i % 2 * 8;
    uint2* lo = reinterpret_cast<uint2*>(tile + swizzled<TOKENS>(row(i), piece));
    uint2* hi = reinterpret_cast<uint2*>(tile + swizzled<TOKENS>(row(i), piece + HALF));
    return {lo, hi, *lo, *hi};
  }
  static DEVICE void rotate(Item& item, const Angles& angles) {
    const float4 &cos = angles.cos, &sin = angles.sin;
    rotate_pair<T>(item.x.x, item.y.x, make_float2(cos.x, cos.y), make_float2(sin.x, sin.y));
    rotate_pair<T>(item.x.y, item.y.y, make_float2(cos.z, cos.w), make_float2(sin.z, sin.w));
    *item.lo = item.x, *item.hi = item.y;
  }
};
