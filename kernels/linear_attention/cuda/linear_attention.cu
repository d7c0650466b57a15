// The kernels of linear attention, normalised or not, forward and backward. One chunkwise scan serves all four outputs;
// modes.cuh has its sum, equation (1), and the table of its operands in each mode.
//
// A block owns one head of one sequence, or a segment of it, and scans it in chunks of tokens. The running state
// Σ σ_j c_j b_jᵀ stays in the fp32 accumulators of the tensor cores, its rows (the columns of c and y) distributed over
// the warps. Within a chunk
//
//     X = A Bᵀ
//     W = (1)'s weights, masked → 16 bits → shared memory
//     Y = ρ A·state + κ Σ τ c + W C
//     state = γ^chunk state + (σ C)ᵀ B
//
// Per-token decays (PER_TOKEN) replace powers of γ: token_decay.cuh.
//
// Two scans implement the same algorithm:
//     scan_sm80.cuh    from sm_80 on: four warps and mma.sync, all in the same phases
//     scan_sm90.cuh    sm_90a (a build with SCAN_SM90): wgmma, and warpgroups with roles, so that loading, per-token
//                      computations and matrix products overlap
// Both use params.cuh (the arguments of a launch), modes.cuh, segments.cuh (states in and out), rope.cuh and ptx/
// (wrappers of instructions).
//
// Operands of the tensor cores are raw rows of q, k, v, do; norms and normalisers are applied in fp32. Sums over
// tokens and the normaliser are fp32. There are no atomic additions: results are deterministic.
#include "token_decay.cuh"
#ifdef SCAN_SM90
#include "scan_sm90.cuh"
template <typename T, int D, int CHUNK, int MODE, Decay DECAY, int ROPE, Weights WEIGHTS, bool STATE_ONLY>
using Scan = ScanSm90<ConfigSm90<T, D, MODE, DECAY, ROPE, WEIGHTS, STATE_ONLY, false>>;
#else
#include "scan_sm80.cuh"
template <typename T, int D, int CHUNK, int MODE, Decay DECAY, int ROPE, Weights WEIGHTS, bool STATE_ONLY>
using Scan = ScanSm80<ConfigSm80<T, D, CHUNK, MODE, DECAY, ROPE, WEIGHTS, STATE_ONLY>>;
#endif

// Grid (segments, B·H). BLOCKS: minimum number per multiprocessor.
template <typename T, int D, int CHUNK, int MODE, Decay DECAY, int ROPE, Weights WEIGHTS, int BLOCKS>
__global__ void __launch_bounds__(SCAN_THREADS, BLOCKS) scan(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  Scan<T, D, CHUNK, MODE, DECAY, ROPE, WEIGHTS, false>(p, smem).run();
}

// Grid (segments − 1, B·H); every sub-segment is a segment here. MODE: FWD, or DK for the adjoint.
template <typename T, int D, int CHUNK, int MODE, Decay DECAY, int ROPE, Weights WEIGHTS, int BLOCKS>
__global__ void __launch_bounds__(SCAN_THREADS, BLOCKS) states(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  Scan<T, D, CHUNK, MODE, DECAY, ROPE, WEIGHTS, true>(p, smem).run();
}

#ifdef SCAN_SM90
// The forward scan of whole sequences, 64 columns of o per block, with a warpgroup more than `scan`. Grid (D/64, B·H).
template <typename T, int D, Decay DECAY, int ROPE, Weights WEIGHTS>
__global__ void __launch_bounds__(4 * WARPGROUP, 1) scan_unsegmented(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  ScanSm90<ConfigSm90<T, D, FWD, DECAY, ROPE, WEIGHTS, false, true>>(p, smem).run();
}

// dk and dv in one launch, so that shared operands may be read from device memory once. Grid (segments, B·H, 2).
template <typename T, int D, Decay DECAY, int ROPE, Weights WEIGHTS, int BLOCKS>
__global__ void __launch_bounds__(SCAN_THREADS, BLOCKS)
    scan_pair(const __grid_constant__ Params dk, const __grid_constant__ Params dv) {
  extern __shared__ __align__(1024) char smem[];
  constexpr int CHUNK = 64;
  if (blockIdx.z == 0)
    Scan<T, D, CHUNK, DK, DECAY, ROPE, WEIGHTS, false>(dk, smem).run();
  else
    Scan<T, D, CHUNK, DV, DECAY, ROPE, WEIGHTS, false>(dv, smem).run();
}
#endif

// In the scratch, turns each segment's own state into the state before the next segment, in place.
// Grid (⌈STATE_SIZE/THREADS⌉, B·H).
template <int D, int CHUNK, bool REVERSE, Decay DECAY, Weights WEIGHTS>
__global__ void __launch_bounds__(THREADS) prefix(const __grid_constant__ Params p) {
  constexpr int SIZE = STATE_SIZE<D>;
  int i = blockIdx.x * THREADS + threadIdx.x;
  i64 bh = blockIdx.y;
  if (i >= SIZE) return;
  if (WEIGHTS != NORMALISED && i >= D * D && (WEIGHTS == PRODUCTS || i < D * D + D)) return;
  const float log_decay = DECAY == PER_HEAD ? p.log_decay[bh % p.H] : 0.f;
  auto decay_of = [&](int segment) {
    if constexpr (DECAY == PER_TOKEN) return decay_of_segment<CHUNK>(p, bh, segment);
    return expf(log_decay * tokens_of_segment(p, segment));
  };
  float sum = 0.f;
  if (p.initial.S) {
    float scale = REVERSE ? p.range : i < D * D + D ? p.inverse_range : 1.f;
    if (WEIGHTS != NORMALISED) scale = i < D * D ? p.inverse_range : 1.f;
    sum = scale * (i < D * D       ? p.initial.S[bh * D * D + i]
                   : i < D * D + D ? p.initial.k[bh * D + i - D * D]
                                   : p.initial.v[bh * D + i - D * D - D]);
  }
  constexpr int AT_ONCE =
      DECAY == PER_TOKEN ? 1 : 8;  // reads in flight; with PER_TOKEN a segment's decay takes many reads
  const int n = p.segments - 1;
  float* at = p.scratch + bh * n * SIZE + i;
  for (int first = 0; first < n; first += AT_ONCE, at += AT_ONCE * SIZE) {
    float own[AT_ONCE], decays[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      own[k] = first + k < n ? at[k * SIZE] : 0.f;
      decays[k] = first + k < n ? decay_of(first + k) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
      if (first + k < n) at[k * SIZE] = sum = sum * decays[k] + own[k];
  }
}

// e = (do·o)/g of every token; operand Y is o, A is do. D/8 lanes per row; grid (⌈N·H · D/8 / THREADS⌉, B).
template <typename T, int D>
__global__ void __launch_bounds__(THREADS) row_products(const __grid_constant__ Params p) {
  constexpr int LANES = D / 8;
  i64 row = (i64(blockIdx.x) * THREADS + threadIdx.x) / LANES, n = row / p.H;  // (token, head)
  int piece = threadIdx.x % LANES, h = row % p.H, batch = blockIdx.y;
  float sum = 0.f;
  if (n < p.N && 8 * piece < p.columns) {
    auto read = [&](int tensor) {
      const u16* from = head_of(p, tensor, batch, h) + n * p.strides[tensor].token + piece * 8;
      return *reinterpret_cast<const uint4*>(from);
    };
    uint4 x = read(Y), d = read(A);
    sum = dot<T>(x, d);
  }
  sum = sum_lanes<LANES>(sum);
  if (piece == 0 && n < p.N) {
    i64 at = (i64(batch) * p.H + h) * p.N + n;
    p.e[at] = sum / p.g[at];
  }
}
