// Linear attention with a decay for each channel, by mma.sync, on every card from sm_80 on: gated linear attention.
//
//   o_i = scale Σ_{j≤i} (q_i ⊙ α_{j+1} ⋯ α_i)·k_j v_j,  α = exp of the log decays [B, N, H, Dk]
//
// A sequence is cut into segments. `states` computes what each adds to the state [Dk, Dv], `prefix` sums these up, and
// scans start from there; so for both directions. Where v is wide, `prepare` computes first what its slices share.
// docs/kernel.md, "A decay for each channel".
#include "channel_decay_left.cuh"
#include "channel_decay_prepared.cuh"
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

template <typename T, typename G, int BD, int M, int GROUPS, bool REVERSE, bool ROLES, int BLOCKS>
__global__ void __launch_bounds__(2 * M * GROUPS, BLOCKS) channel_right(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedRight<G, BD, M, GROUPS, ROLES>::BYTES == RIGHT_BYTES, "Build.shared of channel_decay.py");
  RightScan<T, G, BD, M, GROUPS, REVERSE, ROLES>(p, smem).run();
}

template <typename T, typename G, int BD, int PART, bool REVERSE>
__global__ void __launch_bounds__(2 * PART, 2) channel_prepare(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(SharedLeft<G, PART, PART>::BYTES == PREPARE_BYTES, "Build.shared of channel_decay.py");
  static_assert(PreparedChunk<BD>::BYTES == PREPARED_CHUNK_BYTES, "Build.prepared_chunk of channel_decay.py");
  PrepareChunk<T, G, BD, PART, REVERSE>(p, smem).run();
}

template <typename T, int BD, int M, bool REVERSE, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(2 * M, BLOCKS) channel_prepared(const __grid_constant__ ChannelParams p) {
  SCAN;
  using Shared = SharedPrepared<BD, M>;
  static_assert(Shared::EXCHANGE + STAGES * Shared::STAGE == LEFT_BYTES, "Build.shared of channel_decay.py");
  PreparedScan<T, BD, M, REVERSE, STAGES>(p, smem).run();
}

template <typename T, int BD, int M, bool REVERSE, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(2 * BD, BLOCKS) channel_prepared_states(const __grid_constant__ ChannelParams p) {
  SCAN;
  static_assert(STAGES * SharedPreparedStates<BD, M>::STAGE == STATES_BYTES, "Build.shared of channel_decay.py");
  PreparedStates<T, BD, M, REVERSE, STAGES>(p, smem).run();
}

// The state before each run of a part's segments, from that before the part, what each segment adds and its decay. One
// thread has four numbers of a row of it, and the loads of eight segments under way at once.
template <int DK, int DV, bool REVERSE>
__global__ void channel_prefix(const __grid_constant__ ChannelParams p) {
  const int i = 4 * (blockIdx.x * 128 + threadIdx.x), states = p.segments - 1, head = blockIdx.y;
  const int segments = min(p.part, p.segments - p.first);   // of the part
  const int last = (segments - 1) / p.run_len * p.run_len;  // before its last run
  if (i >= DK * DV) return;
  auto at = [&](int step) { return i64(head) * states + (REVERSE ? states - 1 - p.first - step : p.first + step); };
  auto S = [&](int step) { return reinterpret_cast<float4*>(p.states + at(step) * (DK * DV) + i); };
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (p.first)
    sum = *S(-1);
  else if (p.initial)
    sum = *reinterpret_cast<const float4*>(p.initial + i64(head) * (DK * DV) + i);
  constexpr int BATCH = 8;
  for (int step = 0; step < last; step += BATCH) {
    float4 added[BATCH];
    float decay[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (step + k < last) added[k] = *S(step + k), decay[k] = p.decays[at(step + k) * DK + i / DV];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (step + k < last) {
        sum.x = sum.x * decay[k] + added[k].x, sum.y = sum.y * decay[k] + added[k].y;
        sum.z = sum.z * decay[k] + added[k].z, sum.w = sum.w * decay[k] + added[k].w;
        if ((step + k + 1) % p.run_len == 0) *S(step + k) = sum;  // the scan stores the others
      }
  }
}
