// A decay of each token's own, g_t ≤ 0, −∞ for a reset: what a scan needs of it, by position, from one pass over the gates.
//
// With G_i = Σ_{t≤i} g_t, powers of γ become differences of G: γ^(i−j) → exp(G_i − G_j). Only differences within a chunk are
// taken, of Γ, which starts again in every chunk: G grows without bound. In reverse the decay between two neighbouring
// positions is that of the token scanned first, later in time; none leads into position 0, and the adjoint of the initial
// state has one more, that of token 0.
#pragma once
#include "params.cuh"

constexpr int GATES_THREADS = 512;  // of a block of `gates`
static_assert(GATES_THREADS == LAUNCH_GATES_THREADS, "GATES_THREADS of launch.py");

// In powers of two. Whatever is below LOG_ZERO (numerics.py) counts as 0; −∞ − (−∞) would be no number.
DEVICE float log2_gate(const Params& p, i64 bh, int token) {
  return fmaxf(p.log_decay[(bh / p.H * p.N + token) * p.H + bh % p.H], LOG_ZERO) * LOG2_E;
}

// What is left after a segment (not the last one) of what came before it.
template <int CHUNK>
DEVICE float decay_of_segment(const Params& p, i64 bh, int segment) {
  const float* last = p.gamma + bh * p.N + i64(segment) * p.segment_len + CHUNK - 1;
  float sum = 0.f;
  for (int i = 0; i < p.segment_len; i += CHUNK) sum += last[i];
  return exp2f(sum);
}

DEVICE float from_lane(float x, int lane) { return __shfl_sync(FULL_WARP, x, lane & 31); }

// gamma: Γ. to_end: what the rest of the chunk adds to it, summed from the end, so that a reset before takes nothing from its
// accuracy. count, forward: how many tokens before the chunk are left in a row; in reverse Σ_{i≥j} exp(G_i − G_j) e_i, all of
// it. count_out: the final state's count; in reverse the gradient of the initial one. n_initial: the count before, in reverse
// the gradient of the final one. A warp has GATES_CHUNKS chunks at once, a lane CHUNK/32 positions of each; grid (1, B·H).
constexpr int GATES_CHUNKS = 8;
template <int CHUNK, bool REVERSE>
__global__ void __launch_bounds__(GATES_THREADS) gates(const __grid_constant__ Params p) {
  constexpr int WARPS = GATES_THREADS / 32, ITEMS = CHUNK / 32, TOKENS = GATES_CHUNKS * CHUNK;  // of a warp
  __shared__ float2 warp_sums[2][WARPS];
  const i64 bh = blockIdx.y, first_of_head = bh * p.N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float running = p.n_initial ? (REVERSE ? -p.n_initial[bh] : p.n_initial[bh]) : 0.f;
  for (int begin = 0, parity = 0; begin < p.N; begin += WARPS * TOKENS, parity ^= 1) {
    const int position = begin + warp * TOKENS + lane * ITEMS;
    float gamma[GATES_CHUNKS][ITEMS], sum[GATES_CHUNKS][ITEMS];  // of a chunk's positions so far
    float to_end[GATES_CHUNKS][ITEMS];
    float2 before_chunk[GATES_CHUNKS], own = make_float2(0.f, 0.f);  // Γ and sum of this warp's chunks so far
#pragma unroll
    for (int k = 0; k < GATES_CHUNKS; k++) {
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        const int at = position + k * CHUNK + i, token = REVERSE ? p.N - 1 - at : at;
        const bool ok = at < p.N, decays = ok && (!REVERSE || at > 0);
        gamma[k][i] = decays ? log2_gate(p, bh, REVERSE ? token + 1 : token) : 0.f;
        sum[k][i] = !ok ? 0.f : REVERSE ? p.e[first_of_head + token] : 1.f;
      }
    }
#pragma unroll
    for (int k = 0; k < GATES_CHUNKS; k++) {
      to_end[k][ITEMS - 1] = 0.f;
#pragma unroll
      for (int i = ITEMS - 1; i > 0; i--) to_end[k][i - 1] = to_end[k][i] + gamma[k][i];
      float lanes_after = to_end[k][0] + gamma[k][0];  // of all lanes from this one on
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        float g = from_lane(lanes_after, lane + d);
        if (lane + d < 32) lanes_after += g;
      }
      float after = from_lane(lanes_after, lane + 1);
      if (lane == 31) after = 0.f;
#pragma unroll
      for (int i = 1; i < ITEMS; i++) {
        sum[k][i] += sum[k][i - 1] * exp2f(gamma[k][i]);
        gamma[k][i] += gamma[k][i - 1];
      }
      float lanes_gamma = gamma[k][ITEMS - 1], lanes_sum = sum[k][ITEMS - 1];  // of all lanes up to this one
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        float g = from_lane(lanes_gamma, lane - d), s = from_lane(lanes_sum, lane - d);
        if (lane >= d) lanes_sum += s * exp2f(lanes_gamma), lanes_gamma += g;
      }
      float gamma_before = from_lane(lanes_gamma, lane - 1), sum_before = from_lane(lanes_sum, lane - 1);
      if (lane == 0) gamma_before = sum_before = 0.f;
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        sum[k][i] += sum_before * exp2f(gamma[k][i]);
        gamma[k][i] += gamma_before;
        to_end[k][i] += after;
      }
      before_chunk[k] = own;
      const float chunk_gamma = from_lane(lanes_gamma, 31);
      own.y = own.y * exp2f(chunk_gamma) + from_lane(lanes_sum, 31);
      own.x += chunk_gamma;
    }
    if (lane == 0) warp_sums[parity][warp] = own;
    __syncthreads();
    float before = 0.f;  // this warp's chunks
    for (int i = 0; i < WARPS; i++) {
      if (i == warp) before = running;
      float2 other = warp_sums[parity][i];
      running = running * exp2f(other.x) + other.y;
    }
#pragma unroll
    for (int k = 0; k < GATES_CHUNKS; k++) {
      const float start = before * exp2f(before_chunk[k].x) + before_chunk[k].y;
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        const int at = position + k * CHUNK + i;
        if (at >= p.N) continue;
        p.gamma[first_of_head + at] = gamma[k][i];
        p.to_end[first_of_head + at] = to_end[k][i];
        p.count[first_of_head + at] = start * exp2f(gamma[k][i]) + (REVERSE ? sum[k][i] : 0.f);
      }
    }
  }
  if (threadIdx.x == 0 && p.count_out) p.count_out[bh] = REVERSE ? -running * exp2f(log2_gate(p, bh, 0)) : running;
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
// left of the columns, two parts [2, BH, N] each, by position; gamma: the gradient [B, N, H]; count_out: Σ dG_i. Grid (1, B·H).
template <int THREADS>
__global__ void __launch_bounds__(THREADS) gate_gradient(const __grid_constant__ Params p) {
  constexpr int WARPS = THREADS / 32, ITEMS = 16;
  __shared__ LongSum warp_sums[2][WARPS];
  const i64 bh = blockIdx.y, first_of_head = bh * p.N, second_part = i64(gridDim.y) * p.N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  LongSum running = {0.f, 0.f};
  for (int begin = 0, parity = 0; begin < p.N; begin += THREADS * ITEMS, parity ^= 1) {
    const int position = begin + threadIdx.x * ITEMS;  // in reverse
    float dG[ITEMS];
    LongSum own = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int at = position + i;
      const i64 row = first_of_head + p.N - 1 - at, column = first_of_head + at;
      dG[i] = 0.f;
      if (at < p.N) dG[i] = (p.dG[row] - p.count[column]) + (p.dG[second_part + row] - p.count[second_part + column]);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) own.add({dG[i], 0.f});
    LongSum lanes = own;  // of all lanes up to this one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      LongSum x = from_lane(lanes, lane - d);
      if (lane >= d) lanes.add(x);
    }
    if (lane == 31) warp_sums[parity][warp] = lanes;
    LongSum before = from_lane(lanes, lane - 1);
    if (lane == 0) before = {0.f, 0.f};
    __syncthreads();
    for (int i = 0; i < WARPS; i++) {
      if (i == warp) before.add(running);
      running.add(warp_sums[parity][i]);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int token = p.N - 1 - position - i;
      if (token < 0) break;
      before.add({dG[i], 0.f});
      const i64 at = (bh / p.H * p.N + token) * p.H + bh % p.H;
      p.gamma[at] = p.log_decay[at] > LOG_ZERO ? before.high + before.low : 0.f;
    }
  }
  if (threadIdx.x == 0) p.count_out[bh] = running.high + running.low;
}
