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

// gamma: Γ. count, forward: how many tokens before the chunk are left in a row; in reverse Σ_{i≥j} exp(G_i − G_j) e_i, all of
// it. count_out: the final state's count; in reverse the gradient of the initial one. n_initial: the count before, in reverse
// the gradient of the final one. A warp has a chunk, a lane CHUNK/32 positions; grid (1, B·H).
template <int CHUNK, bool REVERSE>
__global__ void __launch_bounds__(GATES_THREADS) gates(const __grid_constant__ Params p) {
  constexpr int WARPS = GATES_THREADS / 32, ITEMS = CHUNK / 32;
  __shared__ float2 chunk_sums[2][WARPS];
  const i64 bh = blockIdx.y, first_of_head = bh * p.N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float running = p.n_initial ? (REVERSE ? -p.n_initial[bh] : p.n_initial[bh]) : 0.f;
  for (int begin = 0, parity = 0; begin < p.N; begin += WARPS * CHUNK, parity ^= 1) {
    const int position = begin + warp * CHUNK + lane * ITEMS;
    float gamma[ITEMS], sum[ITEMS];  // of this lane's positions so far
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int at = position + i, token = REVERSE ? p.N - 1 - at : at;
      const bool ok = at < p.N, decays = ok && (!REVERSE || at > 0);
      const float gate = decays ? log2_gate(p, bh, REVERSE ? token + 1 : token) : 0.f;
      const float own = !ok ? 0.f : REVERSE ? p.e[first_of_head + token] : 1.f;
      gamma[i] = i ? gamma[i - 1] + gate : gate;
      sum[i] = i ? sum[i - 1] * exp2f(gate) + own : own;
    }
    float lanes_gamma = gamma[ITEMS - 1], lanes_sum = sum[ITEMS - 1];  // of all lanes up to this one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      float g = from_lane(lanes_gamma, lane - d), s = from_lane(lanes_sum, lane - d);
      if (lane >= d) lanes_sum += s * exp2f(lanes_gamma), lanes_gamma += g;
    }
    if (lane == 31) chunk_sums[parity][warp] = make_float2(lanes_gamma, lanes_sum);
    float gamma_before = from_lane(lanes_gamma, lane - 1), sum_before = from_lane(lanes_sum, lane - 1);
    if (lane == 0) gamma_before = sum_before = 0.f;
    __syncthreads();
    float before = 0.f;  // the chunk
    for (int i = 0; i < WARPS; i++) {
      if (i == warp) before = running;
      float2 chunk = chunk_sums[parity][i];
      running = running * exp2f(chunk.x) + chunk.y;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      if (position + i >= p.N) break;
      const float in_chunk = sum[i] + sum_before * exp2f(gamma[i]), whole = gamma_before + gamma[i];
      p.gamma[first_of_head + position + i] = whole;
      p.count[first_of_head + position + i] = before * exp2f(whole) + (REVERSE ? in_chunk : 0.f);
    }
  }
  if (threadIdx.x == 0 && p.count_out) p.count_out[bh] = REVERSE ? -running * exp2f(log2_gate(p, bh, 0)) : running;
}
