// A decay of each token's own, g_t ≤ 0, −∞ for a reset: what a scan needs of it, by position, from one pass over the gates.
//
// With G_i = Σ_{t≤i} g_t, powers of γ become differences of G: γ^(i−j) → exp(G_i − G_j). Only differences within a chunk are
// taken, of Γ, which starts again in every chunk: G grows without bound. In reverse the decay between two neighbouring
// positions is that of the token scanned first, later in time; none leads into position 0, and the adjoint of the initial
// state has one more, that of token 0.
#pragma once
#include "params.cuh"

constexpr int GATES_THREADS = 256;  // of a block of the kernels here
static_assert(GATES_THREADS == LAUNCH_GATES_THREADS, "GATES_THREADS of launch.py");

// In powers of two. Whatever is below LOG_ZERO (numerics.py) counts as 0; −∞ − (−∞) would be no number.
DEVICE float log2_gate(const Params& p, i64 bh, int token) {
  return fmaxf(p.log_decay[(bh / p.H * p.N + token) * p.H + bh % p.H], LOG_ZERO) * LOG2_E;
}

// [2, BH, chunks]: of a chunk Γ at its end, and its sum of counts, in whose place `gate_counts` puts that of all before it.
template <int CHUNK>
struct Chunks {
  float *gamma, *count;  // of a head
  int n;
  DEVICE Chunks(const Params& p, i64 bh) : n((p.N + CHUNK - 1) / CHUNK) {
    gamma = p.chunks + bh * n, count = gamma + i64(gridDim.y) * n;
  }
};

// What is left after a segment (not the last one) of what came before it.
template <int CHUNK>
DEVICE float decay_of_segment(const Params& p, i64 bh, int segment) {
  const float* gamma = Chunks<CHUNK>(p, bh).gamma + segment * (p.segment_len / CHUNK);
  float sum = 0.f;
  for (int i = 0; i < p.segment_len / CHUNK; i++) sum += gamma[i];
  return exp2f(sum);
}

DEVICE float from_lane(float x, int lane) { return __shfl_sync(FULL_WARP, x, lane & 31); }

// A stretch of positions: what its gates add to Γ, and the count that it leaves.
struct Stretch {
  float gamma, count;
  DEVICE void append(Stretch x) { count = count * exp2f(x.gamma) + x.count, gamma += x.gamma; }
};
DEVICE Stretch from_lane(Stretch x, int lane) { return {from_lane(x.gamma, lane), from_lane(x.count, lane)}; }
// Of all lanes up to this one.
DEVICE Stretch append_lanes(Stretch x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    Stretch before = from_lane(x, lane - d);
    if (lane >= d) before.append(x), x = before;
  }
  return x;
}

// gamma: Γ. to_end: what the rest of the chunk adds to it, summed from the end, so that a reset before takes nothing from its
// accuracy. count, in reverse: Σ exp(G_i − G_j) e_i over i ≥ j of the chunk. chunks: see there. COUNTS: with a normaliser, which
// alone needs counts. A chunk a warp; grid (⌈chunks / warps⌉, B·H).
template <int CHUNK, bool REVERSE, bool COUNTS>
__global__ void __launch_bounds__(GATES_THREADS) gates(const __grid_constant__ Params p) {
  constexpr int WARPS = GATES_THREADS / 32, ITEMS = CHUNK / 32;  // of a lane
  const i64 bh = blockIdx.y, first_of_head = bh * p.N;
  const int lane = threadIdx.x % 32, chunk = blockIdx.x * WARPS + threadIdx.x / 32;
  const int position = chunk * CHUNK + lane * ITEMS;
  const Chunks<CHUNK> chunks(p, bh);
  if (chunk >= chunks.n) return;
  Stretch up_to[ITEMS];  // this lane's positions
  float to_end[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int at = position + i, token = REVERSE ? p.N - 1 - at : at;
    const bool ok = at < p.N, decays = ok && (!REVERSE || at > 0);
    up_to[i].gamma = decays ? log2_gate(p, bh, REVERSE ? token + 1 : token) : 0.f;
    up_to[i].count = !ok || !COUNTS ? 0.f : REVERSE ? p.e[first_of_head + token] : 1.f;
  }
  to_end[ITEMS - 1] = 0.f;
#pragma unroll
  for (int i = ITEMS - 1; i > 0; i--) to_end[i - 1] = to_end[i] + up_to[i].gamma;
  float lanes_on = to_end[0] + up_to[0].gamma;  // of all lanes from this one on
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    float x = from_lane(lanes_on, lane + d);
    if (lane + d < 32) lanes_on += x;
  }
  float after = from_lane(lanes_on, lane + 1);
  if (lane == 31) after = 0.f;
#pragma unroll
  for (int i = 1; i < ITEMS; i++) {
    Stretch x = up_to[i - 1];
    x.append(up_to[i]), up_to[i] = x;
  }
  const Stretch lanes = append_lanes(up_to[ITEMS - 1], lane);
  Stretch before = from_lane(lanes, lane - 1);
  if (lane == 0) before = {0.f, 0.f};
  if (lane == 31) chunks.gamma[chunk] = lanes.gamma;
  if (COUNTS && lane == 31) chunks.count[chunk] = lanes.count;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    if (position + i >= p.N) break;
    Stretch x = before;
    x.append(up_to[i]);
    p.gamma[first_of_head + position + i] = x.gamma;
    p.to_end[first_of_head + position + i] = to_end[i] + after;
    if (REVERSE && COUNTS) p.count[first_of_head + position + i] = x.count;
  }
}

// After `gates`: chunks' counts → those of all before. n_initial: the count before the first; in reverse the gradient of the
// final one. count_out: the final state's; in reverse the gradient of the initial one. Grid (1, B·H).
template <int CHUNK, bool REVERSE>
__global__ void __launch_bounds__(GATES_THREADS) gate_counts(const __grid_constant__ Params p) {
  constexpr int WARPS = GATES_THREADS / 32;
  __shared__ Stretch warps[2][WARPS];
  const i64 bh = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Chunks<CHUNK> chunks(p, bh);
  Stretch all = {0.f, p.n_initial ? (REVERSE ? -p.n_initial[bh] : p.n_initial[bh]) : 0.f};  // so far
  for (int first = 0, parity = 0; first < chunks.n; first += GATES_THREADS, parity ^= 1) {
    const int chunk = first + threadIdx.x;
    const bool ok = chunk < chunks.n;
    const Stretch own = {ok ? chunks.gamma[chunk] : 0.f, ok ? chunks.count[chunk] : 0.f};
    const Stretch lanes = append_lanes(own, lane);
    if (lane == 31) warps[parity][warp] = lanes;
    Stretch before = from_lane(lanes, lane - 1), earlier = {0.f, 0.f};
    if (lane == 0) before = {0.f, 0.f};
    __syncthreads();
    for (int i = 0; i < WARPS; i++) {
      if (i == warp) earlier = all;
      all.append(warps[parity][i]);
    }
    earlier.append(before);
    if (ok) chunks.count[chunk] = earlier.count;
  }
  if (threadIdx.x == 0 && p.count_out) p.count_out[bh] = REVERSE ? -all.count * exp2f(log2_gate(p, bh, 0)) : all.count;
}

// A sum of fp32 numbers and its rounding errors: dG_i add up over a whole sequence, and nearly cancel.
struct LongSum {
  float high, low;
  DEVICE void add(LongSum x) {
    const float sum = high + x.high, from_x = sum - high;
    low += ((high - (sum - from_x)) + (x.high - from_x)) + x.low;
    high = sum;
  }
};
DEVICE LongSum from_lane(LongSum x, int lane) { return {from_lane(x.high, lane), from_lane(x.low, lane)}; }

// The gradient of a gate, which is in G_i for i ≥ t: Σ_{i≥t} dG_i, 0 at a reset. dG: what DQ left of the rows, count: what DK
// left of the columns, PARTS [PARTS, BH, N] each, by position. First, TOTALS: chunks: the sum of a block's tokens, [BH, blocks]
// twice, high and low. Then gamma: the gradient [B, N, H]; count_out: Σ dG_i. Grid (⌈N / GATES_SPAN⌉, B·H).
constexpr int GATES_ITEMS = 4, GATES_SPAN = GATES_ITEMS * GATES_THREADS;
static_assert(GATES_SPAN == LAUNCH_GATES_SPAN, "GATES_SPAN of launch.py");
template <bool TOTALS, int PARTS>
__global__ void __launch_bounds__(GATES_THREADS) gate_gradient(const __grid_constant__ Params p) {
  constexpr int WARPS = GATES_THREADS / 32;
  __shared__ LongSum warps[WARPS];
  const i64 bh = blockIdx.y, first_of_head = bh * p.N, second_part = i64(gridDim.y) * p.N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int position = blockIdx.x * GATES_SPAN + threadIdx.x * GATES_ITEMS;  // in reverse
  float *high = p.chunks + bh * gridDim.x, *low = high + i64(gridDim.y) * gridDim.x;
  float dG[GATES_ITEMS];
  LongSum lanes = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < GATES_ITEMS; i++) {
    const int at = position + i;
    const i64 row = first_of_head + p.N - 1 - at, column = first_of_head + at;
    dG[i] = 0.f;
    if (at < p.N) {
      dG[i] = p.dG[row] - p.count[column];
      if (PARTS == 2) dG[i] += p.dG[second_part + row] - p.count[second_part + column];
    }
    lanes.add({dG[i], 0.f});
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    LongSum x = from_lane(lanes, lane - d);
    if (lane >= d) lanes.add(x);
  }
  if (lane == 31) warps[warp] = lanes;
  LongSum before = from_lane(lanes, lane - 1), all = {0.f, 0.f};
  if (lane == 0) before = {0.f, 0.f};
  __syncthreads();
  if (!TOTALS) {  // of the blocks before
    for (int i = lane; i < blockIdx.x; i += 32) all.add({high[i], low[i]});
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      LongSum x = from_lane(all, lane ^ d);
      all.add(x);
    }
  }
  for (int i = 0; i < WARPS; i++) {
    if (i == warp) before.add(all);
    all.add(warps[i]);
  }
  if (TOTALS && threadIdx.x == 0) high[blockIdx.x] = all.high, low[blockIdx.x] = all.low;
#pragma unroll
  for (int i = 0; i < GATES_ITEMS; i++) {
    const int token = p.N - 1 - position - i;
    if (TOTALS || token < 0) break;
    before.add({dG[i], 0.f});
    const i64 at = (bh / p.H * p.N + token) * p.H + bh % p.H;
    p.gamma[at] = p.log_decay[at] > LOG_ZERO ? before.high + before.low : 0.f;
  }
  if (!TOTALS && threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) p.count_out[bh] = all.high + all.low;
}
