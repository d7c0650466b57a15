// Linear attention with a decay for each channel, by mma.sync, on every card from sm_80 on: gated linear attention.
//
//   o_i = scale Σ_{j≤i} (q_i ⊙ α_{j+1} ⋯ α_i)·k_j v_j,  α = exp of the log decays [B, N, H, Dk]
//
// A sequence is cut into segments. `states` computes what each adds to the state [Dk, Dv], `prefix` sums these up, and a
// scan of each segment starts from there; so for both directions. docs/kernel.md, "A decay for each channel".
#include "channel_decay_left.cuh"
#include "channel_decay_right.cuh"
#include "channel_decay_states.cuh"

#define SCAN extern __shared__ __align__(128) char smem[]

template <typename T, typename G, int BD, int M, bool REVERSE, int BLOCKS>
__global__ void __launch_bounds__(2 * M, BLOCKS) channel_left(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedLeft<G, BD, M>::BYTES == LEFT_BYTES, "Build.shared of channel_decay.py");
  LeftScan<T, G, BD, M, REVERSE>(p, smem).run();
}

template <typename T, typename G, int BD, int M, bool REVERSE, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(2 * BD, BLOCKS) channel_states(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(STAGES * SharedStates<G, BD, M>::STAGE == STATES_BYTES, "Build.shared of channel_decay.py");
  SegmentStates<T, G, BD, M, REVERSE, STAGES>(p, smem).run();
}

template <typename T, typename G, int BD, int M, int GROUPS, bool REVERSE, int BLOCKS>
__global__ void __launch_bounds__(2 * M * GROUPS, BLOCKS) channel_right(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedRight<G, BD, M, GROUPS>::BYTES == RIGHT_BYTES, "Build.shared of channel_decay.py");
  RightScan<T, G, BD, M, GROUPS, REVERSE>(p, smem).run();
}

// The state before each segment, from the initial one, what each segment adds and its decay. One thread has one number of
// it, and the loads of eight segments under way at once.
template <int DK, int DV, bool REVERSE>
__global__ void channel_prefix(const __grid_constant__ ChannelParams p) {
  const int i = blockIdx.x * 128 + threadIdx.x, last = p.segments - 1;
  if (i >= DK * DV) return;
  float* S = p.before + i64(blockIdx.y) * p.segments * (DK * DV) + i;
  const float* decays = p.decays + i64(blockIdx.y) * p.segments * DK + i / DV;
  float sum = p.initial ? p.initial[i64(blockIdx.y) * (DK * DV) + i] : 0.f;
  auto at = [&](int step) { return i64(REVERSE ? last - step : step); };
  S[at(0) * (DK * DV)] = sum;
  constexpr int BATCH = 8;
  for (int step = 0; step < last; step += BATCH) {
    float added[BATCH], decay[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (step + k < last) {
        added[k] = S[at(step + k + 1) * (DK * DV)], decay[k] = decays[at(step + k) * DK];
      }
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (step + k < last) {
        sum = sum * decay[k] + added[k];
        S[at(step + k + 1) * (DK * DV)] = sum;
      }
  }
}
