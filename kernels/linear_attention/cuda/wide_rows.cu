// What is elementwise around the calls of wide_backend.py: rows [B, N, H, D] in 16 bits, a warp each, eight channels a
// lane.
// Calls on tensor cores have halves of q and k, each of them twice, one for each half of v: [B, N, 2 H, D/2].
#include "ptx/numbers.cuh"

struct WideRowParams {
  u16 *x, *half0, *half1;  // x [B, N, H, D]; halves of q or k, twice
  u16 *y0, *y1, *out;      // addends of `out`; o: [B, N, H, D]; dq, dk: of the halves, as these
  float* r;                // 1/‖x‖ [B, H, N], or null
  float *g0, *g1, *g;      // normalisers of the calls, [B, 2 H, N], and half of their sum [B, H, N]; null: none
  const float *cos, *sin;  // [N, rope]
  i64 x_batch, x_token, x_head, out_batch, out_token, out_head;
  u32 rows, N, H, D, rope;
  u32 unused;
};
static_assert(sizeof(WideRowParams) == WIDE_ROW_PARAMS_BYTES, "PARAMS of wide_rows.py");

struct WideRow {
  const WideRowParams& p;
  const u32 index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const u32 h = index % p.H, n = index / p.H % p.N, b = index / p.H / p.N;
  const u32 lane = threadIdx.x % 32, column = 8 * lane, width = p.D / 2;
  const bool exists = column < p.D;

  DEVICE explicit WideRow(const WideRowParams& params) : p(params) {}
  DEVICE i64 stat() const { return (i64(b) * p.H + h) * p.N + n; }  // of [B, H, N]
  DEVICE u16* x() const { return p.x + b * p.x_batch + n * p.x_token + h * p.x_head; }
  DEVICE u16* out() const { return p.out + b * p.out_batch + n * p.out_token + h * p.out_head; }
  // Where a channel is among the halves, for half `twice` of v.
  DEVICE i64 in_half(u32 channel, u32 twice) const {
    return (2 * i64(index) + twice) * width + (channel < width ? channel : channel - width);
  }
  DEVICE u16* half(u32 channel, u32 twice) const {
    return (channel < width ? p.half0 : p.half1) + in_half(channel, twice);
  }
};

template <typename T>
DEVICE float number(const u16* x) {
  return unpack<T>(u32(*x)).x;
}
template <typename T>
struct Eight {
  float x[8];
  DEVICE void read(const u16* from) {
    const uint4 read = *reinterpret_cast<const uint4*>(from);
    const u32 pairs[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpack<T>(pairs[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
  DEVICE uint4 rounded() const {
    return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
  DEVICE void write(u16* to) const { *reinterpret_cast<uint4*>(to) = rounded(); }
};

// In place of a lane's channels, these rotated (`back`: by the opposite angles); other(c): that of another lane.
template <bool BACK, typename T, typename OTHER>
DEVICE void rotate(Eight<T>& x, const WideRow& row, OTHER other) {
  const u32 rope = row.p.rope;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 c = row.column + i;
    if (c >= rope) break;
    const bool first = c < rope / 2;
    const u32 partner = first ? c + rope / 2 : c - rope / 2;
    const float* cos = row.p.cos + i64(row.n) * rope;
    const float* sin = row.p.sin + i64(row.n) * rope;
    const float turn = BACK ? sin[partner] : -sin[c];
    x.x[i] = x.x[i] * cos[c] + (first ? turn : -turn) * other(partner);
  }
}

// The halves of rows of q or k, rotated and divided by their norms; the inverse norms.
template <typename T>
__global__ void wide_unit_rows(const __grid_constant__ WideRowParams p) {
  const WideRow row(p);
  if (row.index >= p.rows) return;
  Eight<T> x = {};
  const u16* from = row.x();
  if (row.exists) x.read(from + row.column);
  float r = 1.f;
  if (p.r) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) square += x.x[i] * x.x[i];
    r = 1.f / sqrtf(sum_lanes<32>(square) + NORM_EPS);
    if (row.lane == 0) p.r[row.stat()] = r;
  }
  if (!row.exists) return;
  rotate<false>(x, row, [&](u32 c) { return number<T>(from + c); });
#pragma unroll
  for (int i = 0; i < 8; i++) x.x[i] *= r;
  x.write(row.half(row.column, 0)), x.write(row.half(row.column, 1));
}

// o, from the sums of both calls.
template <typename T>
__global__ void wide_outputs(const __grid_constant__ WideRowParams p) {
  const WideRow row(p);
  if (row.index >= p.rows) return;
  float scale = 1.f;
  if (p.g) {
    const i64 first = (2 * (i64(row.b) * p.H + row.h)) * p.N + row.n;
    const float sum = p.g0[first] + p.g1[first];
    scale = 1.f / sum;
    if (row.lane == 0) p.g[row.stat()] = 0.5f * sum;
  }
  if (!row.exists) return;
  Eight<T> x, y;
  const i64 at = i64(row.index) * p.D + row.column;
  x.read(p.y0 + at), y.read(p.y1 + at);
#pragma unroll
  for (int i = 0; i < 8; i++) x.x[i] = (x.x[i] + y.x[i]) * scale;
  x.write(row.out() + row.column);
}

// The gradient of q or k, from that of the halves: rotated back, r (y − x̂ (x̂·y)).
template <typename T>
__global__ void wide_input_gradient(const __grid_constant__ WideRowParams p) {
  const WideRow row(p);
  if (row.index >= p.rows) return;
  Eight<T> x = {}, y = {}, more;
  auto gradient = [&](u32 c, u32 twice) { return (c < row.width ? p.y0 : p.y1) + row.in_half(c, twice); };
  if (row.exists) {
    y.read(gradient(row.column, 0)), more.read(gradient(row.column, 1));
#pragma unroll
    for (int i = 0; i < 8; i++) y.x[i] += more.x[i];
  }
  float r = 1.f, along = 0.f;
  if (p.r) {
    if (row.exists) x.read(row.half(row.column, 0));
#pragma unroll
    for (int i = 0; i < 8; i++) along += x.x[i] * y.x[i];
    along = sum_lanes<32>(along), r = p.r[row.stat()];
  }
  if (!row.exists) return;
#pragma unroll
  for (int i = 0; i < 8; i++) y.x[i] -= along * x.x[i];
  rotate<true>(y, row, [&](u32 c) {
    const float sum = number<T>(gradient(c, 0)) + number<T>(gradient(c, 1));
    return p.r ? sum - along * number<T>(row.half(c, 0)) : sum;
  });
#pragma unroll
  for (int i = 0; i < 8; i++) y.x[i] *= r;
  y.write(row.out() + row.column);
}
