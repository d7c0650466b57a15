// What is elementwise around the scans of tf32_scan.cuh: rows of [B, N, H, D], each read by eight lanes.
#pragma once
#include "ptx/numbers.cuh"

constexpr int ROW_LANES = 8;

struct Tf32Matrix {
  float* x;  // [B, N, H, D]
  i64 batch, token, head;
  DEVICE float4& four(int b, int n, int h, int column) const {
    return *reinterpret_cast<float4*>(x + b * batch + n * token + h * head + column);
  }
};

struct Tf32RowParams {
  Tf32Matrix x, y, out;
  // [B, H, N], like everything per token: 1/‖x‖ or null, b/‖x‖ or null; y's product with x or null
  const float *norm, *factor;
  float* dot;
  const float* g;    // the normaliser, or null
  float* inverse_g;  // [B, H, N]
  u32 rows, N, H, unused;
};
static_assert(sizeof(Tf32RowParams) == TF32_ROW_PARAMS_BYTES, "ROW_PARAMS of tf32.py");

// Calls use(b, n, h, i, first) for the row of these lanes: i is its index in [B, H, N]; `first` is one lane. Lanes past
// the last row write it again, as all lanes of a warp take part in its sums.
template <typename USE>
DEVICE void with_row(const Tf32RowParams& p, USE use) {
  const u32 row = min(blockIdx.x * (blockDim.x / ROW_LANES) + threadIdx.x / ROW_LANES, p.rows - 1);
  const int h = row % p.H, n = row / p.H % p.N, b = row / p.H / p.N;
  use(b, n, h, (i64(b) * p.H + h) * p.N + n, threadIdx.x % ROW_LANES == 0);
}
template <int D>
DEVICE float row_dot(const Tf32Matrix& x, const Tf32Matrix& y, int b, int n, int h) {
  float sum = 0.f;
#pragma unroll
  for (int k = threadIdx.x % ROW_LANES * 4; k < D; k += 4 * ROW_LANES) {
    const float4 u = x.four(b, n, h, k), v = y.four(b, n, h, k);
    sum += (u.x * v.x + u.y * v.y) + (u.z * v.z + u.w * v.w);
  }
  return sum_lanes<ROW_LANES>(sum);
}

// 1/‖x‖.
template <int D>
__global__ void tf32_norms(const __grid_constant__ Tf32RowParams p) {
  with_row(p, [&](int b, int n, int h, i64 i, bool first) {
    const float sum = row_dot<D>(p.x, p.x, b, n, h);
    if (first) p.dot[i] = 1.f / sqrtf(sum + NORM_EPS);
  });
}

// −(x·y)/g, the last column of h', and 1/g.
template <int D>
__global__ void tf32_dots(const __grid_constant__ Tf32RowParams p) {
  with_row(p, [&](int b, int n, int h, i64 i, bool first) {
    const float sum = row_dot<D>(p.x, p.y, b, n, h);
    if (first) p.dot[i] = -sum / p.g[i], p.inverse_g[i] = 1.f / p.g[i];
  });
}

// The gradient of x, given y, that of f x̂ with x̂ = r x: f r (y − x̂ (x̂·y)), without r f y. Also x̂·y.
template <int D>
__global__ void tf32_input_gradient(const __grid_constant__ Tf32RowParams p) {
  with_row(p, [&](int b, int n, int h, i64 i, bool first) {
    const float r = p.norm ? p.norm[i] : 1.f, f = p.factor ? p.factor[i] : 1.f;
    const float along = row_dot<D>(p.x, p.y, b, n, h) * r;
    if (first && p.dot) p.dot[i] = along;
    const float back = p.norm ? along * r : 0.f;
#pragma unroll
    for (int k = threadIdx.x % ROW_LANES * 4; k < D; k += 4 * ROW_LANES) {
      const float4 x = p.x.four(b, n, h, k), d = p.y.four(b, n, h, k);
      p.out.four(b, n, h, k) =
          make_float4(f * (d.x - x.x * back), f * (d.y - x.y * back), f * (d.z - x.z * back), f * (d.w - x.w * back));
    }
  });
}
