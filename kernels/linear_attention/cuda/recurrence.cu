// Linear attention with any decay in fp32, token by token, on every card from sm_80 on: what tensor cores do not compute.
//
//   S_i = diag(exp l_i) S_{i−1} diag(exp r_i) + k_i v_iᵀ,    y_i = S_iᵀ q_i
//
// A block has a segment of a head's tokens and a slice of the columns of S. LANES neighbouring threads share a column; each
// keeps KEYS of its numbers in registers, in every LANES-th group of four. SHARED: all channels have one decay. Without OUTPUTS
// the segment's own state is computed, from zero, and no y. docs/kernel.md, "Any decay in fp32".
#include "ptx/numbers.cuh"

constexpr int TOKENS = 8;  // that are in shared memory at a time

struct RecurrenceOperand {
  const float* x;  // [B, N, H, channels]
  // Strides in elements. Of a decay that the channels share, the last is 0.
  i64 batch, token, head, channel;
};

struct RecurrenceParams {
  RecurrenceOperand q, k, v, left, right;
  float *states, *y;  // [segments, B, H, Dk, Dv]: before each segment, then after it; [B, N, H, Dv]
  int N, H, Dk, Dv, segment_len, y_token;  // the last is y's stride
};
static_assert(sizeof(RecurrenceParams) == RECURRENCE_PARAMS_BYTES, "PARAMS of recurrence.py");

// Copies TOKENS rows of COLUMNS channels, and zeros for those that are not there; of log decays x, exp(x) − 1.
template <bool DECAY, int COLUMNS>
DEVICE void load(float (&tile)[TOKENS][COLUMNS], const RecurrenceOperand& from, int begin, int end, int H, int first,
                 int channels) {
  const float* x = from.x + blockIdx.y / H * from.batch + blockIdx.y % H * from.head;
  for (int i = threadIdx.x; i < TOKENS * COLUMNS; i += THREADS) {
    const int token = begin + i / COLUMNS, channel = first + i % COLUMNS;
    const float found = token < end && channel < channels ? x[token * from.token + channel * from.channel] : 0.f;
    tile[i / COLUMNS][i % COLUMNS] = DECAY ? expm1f(found) : found;
  }
}

// At least four blocks a multiprocessor: left alone, the compiler makes room for more and spills.
template <int LANES, int KEYS, bool SHARED, bool OUTPUTS>
__global__ void __launch_bounds__(THREADS, 4) recurrence(const __grid_constant__ RecurrenceParams p) {
  constexpr int ROWS = LANES * KEYS, COLUMNS = THREADS / LANES;
  __shared__ __align__(16) float q[TOKENS][ROWS], k[TOKENS][ROWS], left[TOKENS][SHARED ? 1 : ROWS];
  __shared__ float v[TOKENS][COLUMNS], right[TOKENS][SHARED ? 1 : COLUMNS];
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES, first = blockIdx.x * COLUMNS, column = first + own;
  float* state = p.states + (i64(blockIdx.z) * gridDim.y + blockIdx.y) * p.Dk * p.Dv + column;
  float* y = p.y + (i64(blockIdx.y / p.H) * p.N * p.H + blockIdx.y % p.H) * p.Dv + column;
  const int start = blockIdx.z * p.segment_len, end = min(start + p.segment_len, p.N);
  const bool has_columns = first + threadIdx.x / 32 * 32 / LANES < p.Dv;  // else the warp only copies

  float S[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = (i / 4 * LANES + lane) * 4 + i % 4;
    S[i] = OUTPUTS && key < p.Dk && column < p.Dv ? state[key * p.Dv] : 0.f;
  }
  for (int begin = start; begin < end; begin += TOKENS) {
    __syncthreads();  // the tokens before are read
    if (OUTPUTS) load<false>(q, p.q, begin, end, p.H, 0, p.Dk);
    load<false>(k, p.k, begin, end, p.H, 0, p.Dk);
    load<true>(left, p.left, begin, end, p.H, 0, p.Dk);
    load<false>(v, p.v, begin, end, p.H, first, p.Dv);
    load<true>(right, p.right, begin, end, p.H, first, p.Dv);
    __syncthreads();
    if (!has_columns) continue;
    for (int t = 0; t < min(TOKENS, end - begin); t++) {
      const float value = v[t][own], r = right[t][SHARED ? 0 : own];
      float sums[4] = {};  // an addition need not wait for the one before
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        const int key = (i / 4 * LANES + lane) * 4 + i % 4;
        // exp(l + r) − 1: a decay near 1 would be rounded, in the same direction at each token if it is constant.
        const float change = left[t][SHARED ? 0 : key] * (1.f + r) + r;
        S[i] = S[i] + S[i] * change + k[t][key] * value;
        if (OUTPUTS) sums[i % 4] += q[t][key] * S[i];
      }
      if (!OUTPUTS) continue;
      const float sum = sum_lanes<LANES>((sums[0] + sums[1]) + (sums[2] + sums[3]));
      if (lane == 0 && column < p.Dv) y[i64(begin + t) * p.y_token] = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = (i / 4 * LANES + lane) * 4 + i % 4;
    if (key < p.Dk && column < p.Dv) state[key * p.Dv] = S[i];
  }
}
