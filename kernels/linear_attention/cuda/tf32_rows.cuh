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
  float *x, *y;  // [B, N, H, D]
  // [B, H, N], like everything per token: 1/‖x‖ or null, b/‖x‖ or null; y's product with x
  float *norm, *factor, *dot;
  float *g, *inverse_g;  // the normaliser
  i64 x_batch, x_token, x_head, y_batch, y_token, y_head;
  float factor_value;  // times `factor`
  u32 rows, N, H;
  DEVICE Tf32Matrix matrix_x() const { return {x, x_batch, x_token, x_head}; }
  DEVICE Tf32Matrix matrix_y() const { return {y, y_batch, y_token, y_head}; }
};
static_assert(sizeof(Tf32RowParams) == TF32_ROW_PARAMS_BYTES, "ROW_PARAMS of tf32.py");

// Calls use(b, n, h, i, valid) for the row of these lanes: i is its index in [B, H, N]. Lanes past the last row, which
// take part in their warp's sums, have it too, and write nothing.
template <typename USE>
DEVICE void with_row(const Tf32RowParams& p, USE use) {
  const u32 index = blockIdx.x * (blockDim.x / ROW_LANES) + threadIdx.x / ROW_LANES, row = min(index, p.rows - 1);
  const int h = row % p.H, n = row / p.H % p.N, b = row / p.H / p.N;
  use(b, n, h, (i64(b) * p.H + h) * p.N + n, index < p.rows);
}
DEVICE bool is_first_lane() { return threadIdx.x % ROW_LANES == 0; }

// A lane's part of a row.
template <int D>
struct Tf32Row {
  static constexpr int STEPS = (D + 4 * ROW_LANES - 1) / (4 * ROW_LANES);
  float4 x[STEPS];
  static DEVICE int column(int i) { return (i * ROW_LANES + threadIdx.x % ROW_LANES) * 4; }
  DEVICE Tf32Row(const Tf32Matrix& from, int b, int n, int h) {
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      x[i] = column(i) < D ? from.four(b, n, h, column(i)) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  DEVICE float dot(const Tf32Row& y) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      sum += (x[i].x * y.x[i].x + x[i].y * y.x[i].y) + (x[i].z * y.x[i].z + x[i].w * y.x[i].w);
    return sum_lanes<ROW_LANES>(sum);
  }
};

// −(x·y)/g, the last column of h', and 1/g.
template <int D>
__global__ void tf32_dots(const __grid_constant__ Tf32RowParams p) {
  with_row(p, [&](int b, int n, int h, i64 i, bool valid) {
    const float sum = Tf32Row<D>(p.matrix_x(), b, n, h).dot(Tf32Row<D>(p.matrix_y(), b, n, h));
    if (valid && is_first_lane()) p.dot[i] = -sum / p.g[i], p.inverse_g[i] = 1.f / p.g[i];
  });
}

// Of two tensors, in place of y, the gradient of x, given y, that of f x̂ with x̂ = r x: f r (y − x̂ (x̂·y)), without r
// f y. Also x̂·y.
template <int D>
DEVICE void write_input_gradient(const Tf32RowParams& p) {
  with_row(p, [&](int b, int n, int h, i64 i, bool valid) {
    const float r = p.norm ? p.norm[i] : 1.f, f = p.factor_value * (p.factor ? p.factor[i] : 1.f);
    const Tf32Row<D> x(p.matrix_x(), b, n, h), y(p.matrix_y(), b, n, h);
    const float along = x.dot(y) * r, back = p.norm ? along * r : 0.f;
    if (valid && is_first_lane()) p.dot[i] = along;
#pragma unroll
    for (int k = 0; k < x.STEPS; k++) {
      if (!valid || x.column(k) >= D) break;
      const float4 u = x.x[k], d = y.x[k];
      p.matrix_y().four(b, n, h, x.column(k)) =
          make_float4(f * (d.x - u.x * back), f * (d.y - u.y * back), f * (d.z - u.z * back), f * (d.w - u.w * back));
    }
  });
}
template <int D>
__global__ void tf32_input_gradient(const __grid_constant__ Tf32RowParams p, const __grid_constant__ Tf32RowParams q) {
  if (blockIdx.y == 0)
    write_input_gradient<D>(p);
  else
    write_input_gradient<D>(q);
}
