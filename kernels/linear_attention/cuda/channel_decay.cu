// Linear attention with a decay for each channel, by mma.sync, on every card from sm_80 on: gated linear attention.
//
//   o_i = scale Σ_{j≤i} (q_i ⊙ α_{j+1} ⋯ α_i)·k_j v_j,  α = exp of the log decays [B, N, H, Dk]
//
// A sequence is cut into segments. `states` computes what each adds to the state [Dk, Dv], `prefix` sums these up, and a
// scan of each segment starts from there; so for both directions. docs/kernel.md, "A decay for each channel".
#include "channel_decay_left.cuh"
#include "channel_decay_right.cuh"

#define SCAN extern __shared__ __align__(128) char smem[]

template <typename T, typename G, int BD, int M, bool REVERSE, int BLOCKS>
__global__ void __launch_bounds__(2 * M, BLOCKS) channel_left(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedLeft<G, BD, M, false>::BYTES == LEFT_BYTES, "Build.shared of channel_decay.py");
  LeftScan<T, G, BD, M, REVERSE, false>(p, smem).run();
}

template <typename T, typename G, int BD, int M, bool REVERSE, int BLOCKS>
__global__ void __launch_bounds__(2 * M, BLOCKS) channel_states(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedLeft<G, BD, M, true>::BYTES == STATES_BYTES, "Build.shared of channel_decay.py");
  LeftScan<T, G, BD, M, REVERSE, true>(p, smem).run();
}

template <typename T, typename G, int BD, int M, int GROUPS, bool REVERSE, int BLOCKS>
__global__ void __launch_bounds__(2 * M * GROUPS, BLOCKS) channel_right(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedRight<G, BD, M, GROUPS>::BYTES == RIGHT_BYTES, "Build.shared of channel_decay.py");
  RightScan<T, G, BD, M, GROUPS, REVERSE>(p, smem).run();
}

// The state before each segment, from what each segment adds and its decay. One thread has one number of it.
template <int DK, int DV, bool REVERSE>
__global__ void channel_prefix(const __grid_constant__ ChannelParams p) {
  const int i = blockIdx.x * 128 + threadIdx.x, last = p.segments - 1;
  if (i >= DK * DV) return;
  float* S = p.before + i64(blockIdx.y) * p.segments * (DK * DV) + i;
  const float* decays = p.decays + i64(blockIdx.y) * p.segments * DK + i / DV;
  float sum = S[i64(REVERSE ? last : 0) * (DK * DV)];
  for (int step = 0; step < last; step++) {
    const int from = REVERSE ? last - step : step, to = REVERSE ? from - 1 : from + 1;
    sum = sum * decays[from * DK] + S[i64(to) * (DK * DV)];
    S[i64(to) * (DK * DV)] = sum;
  }
}
