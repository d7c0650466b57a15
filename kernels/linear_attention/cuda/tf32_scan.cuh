// The scan in fp32 with a decay that all channels share, y_i = Σ_{j≤i} γ_{j+1} ⋯ γ_i (a_i·b_j) c_j, on tensor cores in
// TF32. Each product is three: x = hi + lo, and x·y = hi·hi + hi·lo + lo·hi but for 2⁻²² of it.
//
// In blocks of 16 tokens, with Γ the products of decays:
//   yᵀ = Sᵀ (a Γ)ᵀ + cᵀ Aᵀ,   A_ij = Γ_ij a_i·b_j for j ≤ i,   Sᵀ ← γ Sᵀ + (c Γ)ᵀ b
// A warp owns 16 of the block's channels of c and y; Sᵀ is its accumulator and the left operand of the first product.
// Tensor cores cut sums off instead of rounding them, so S is summed up outside of them.
//
// a, b and c may have a factor per token and one more channel, the last, which tensor cores do not see: the last of a
// and b adds to A, and to S the row R = Σ b_last c; with LAST, that of c adds the column Z = Σ c_last b, the corner
// count = Σ b_last c_last, and y_last = Σ A c_last, the normaliser. These are the additional warp's work; it also
// prepares the next tokens' numbers. `STATES`: computes only what the segment adds to the state.
#pragma once
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

// Strides are in elements; from the last token to the first, that of tokens is negative.
struct PerToken {  // `value` times x [B, N, H]; `value` if that is null
  const float* x;
  i64 batch, token, head;
  float value;
  DEVICE float at(int bh, int H, int row) const {
    return x ? value * x[bh / H * batch + row * token + bh % H * head] : value;
  }
};

struct Tf32Operand {
  const float* x;  // [B, N, H, D]
  i64 batch, token, head;
  PerToken factor, last;
};

struct Tf32Params {
  Tf32Operand a, b, c;
  PerToken log_decay;
  float* y;  // [B, N, H, D]
  i64 y_batch, y_token, y_head;
  float* y_last;  // like y, or null
  i64 y_last_batch, y_last_token, y_last_head;
  // The state before each segment, [segments, B, H, D + 1, D + 1]; STATES writes what a segment adds behind it, and
  // its decay [segments, B, H]. `final`: the state behind the last segment, or null.
  float *states, *decays, *final;
  int N, H, segment_len;
  int transposed;    // whether the states are
  int decays_first;  // whether the first token decays the state before it
  int divide;        // y by y_last
};
static_assert(sizeof(Tf32Params) == TF32_PARAMS_BYTES, "PARAMS of tf32.py");

// N numbers of a fragment, each the sum of two in TF32. Of left operands `hi` is the nearest; right ones are more and
// are cut off: one of the two rounded is enough for a lo·lo, which is left out, without a bias.
template <int N>
struct Split {
  u32 hi[N], lo[N];
  DEVICE explicit Split(const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      hi[i] = (__float_as_uint(x[i]) + (N == 4 ? 0x1000 : 0)) & 0xffffe000u;
      lo[i] = __float_as_uint(x[i] - __uint_as_float(hi[i]));
    }
  }
};
// `rest` may be d.
DEVICE void mma(float (&d)[4], float (&rest)[4], const Split<4>& a, const Split<2>& b) {
  mma_tf32(rest, a.lo, b.hi);
  mma_tf32(rest, a.hi, b.lo);
  mma_tf32(d, a.hi, b.hi);
}

template <int D, int WARPS, int CHUNK, bool LAST, bool STATES>
struct Tf32Scan {
  static constexpr int THREADS = 32 * (WARPS + 1), M = 16 * WARPS, SUBS = CHUNK / 16;
  // Rows 8 or 24 banks apart: neither the pairs (2t, 2t+1) of rows g conflict, nor columns g of rows t.
  static constexpr int ROW = D % 16 ? D : D + 8, C_ROW = M + 8, SCORE_ROW = 20;

  struct __align__(16) Tokens {
    double log[CHUNK];  // Σ log decays from the first of 16 tokens to this one, in float64 for their differences
    float a[CHUNK], b[CHUNK], c[CHUNK], a_last[CHUNK], b_last[CHUNK], c_last[CHUNK];
    float a_from_start[CHUNK], a_last_from_start[CHUNK];           // times the decays up to this token
    float b_to_end[CHUNK], b_last_to_end[CHUNK], z_to_end[CHUNK];  // times the decays after it; z: b c_last
    float scale[CHUNK];                                            // of y
    float change[SUBS], count[SUBS];  // of 16 tokens: their decay − 1, Σ b_last c_last; see recurrence.cu
  };
  struct __align__(16) Shared {  // two stages; y takes c's place
    float a[STATES ? 1 : 2][STATES ? 1 : CHUNK][ROW], b[2][CHUNK][ROW], c[2][CHUNK][C_ROW];
    float scores[STATES ? 1 : SUBS][16][SCORE_ROW], Z[D];
    Tokens tokens[2];
    const float* of_head[4];  // a, b, c and y: in registers they would be recomputed for each chunk
  };

  const Tf32Params& p;
  Shared& shared;
  const int bh = blockIdx.y, first = blockIdx.x * M;  // channel of c and y
  const int begin = blockIdx.z * p.segment_len, end = min(begin + p.segment_len, p.N);
  int tid = threadIdx.x, warp, lane, g, t;
  float state[D / 8][4], R[2];  // Sᵀ, 8 columns each; R of the channels of its rows
  float count;                  // of the additional warp
  double segment_log = 0;

  DEVICE Tf32Scan(const Tf32Params& params, Shared& memory) : p(params), shared(memory) { recompute_lane(); }
  // Called between the phases of a chunk, which then recompute their addresses: kept, they would spill.
  DEVICE void recompute_lane() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  }

  // Calls use(row, column) for this thread's groups of four columns of a tile.
  template <int COLUMNS, typename F>
  DEVICE void each_four(F use) const {
    constexpr int FOURS = COLUMNS / 4, STEP = THREADS / FOURS;
    const int column = tid % FOURS * 4, r = tid / FOURS;
    if (r >= STEP) return;
#pragma unroll
    for (int from = 0; from < CHUNK; from += STEP)
      if (from + STEP <= CHUNK || from + r < CHUNK) use(from + r, column);
  }
  template <int COLUMNS, int STRIDE>
  DEVICE void load(float (&tile)[CHUNK][STRIDE], const float* x, i64 token, int channel, int row) const {
    x += row * token + channel;
    each_four<COLUMNS>([&](int r, int column) {
      const bool ok = row + r < end && channel + column < D;
      copy_async_16(shared_address(&tile[r][column]), ok ? x + r * int(token) + column : x, ok);
    });
  }
  DEVICE void load(int row, int stage) const {
    if constexpr (!STATES) load<D>(shared.a[stage], shared.of_head[0], p.a.token, 0, row);
    load<D>(shared.b[stage], shared.of_head[1], p.b.token, 0, row);
    load<M>(shared.c[stage], shared.of_head[2], p.c.token, first, row);
    copy_async_commit();
  }

  // The numbers of the tokens, one a lane.
  DEVICE void prepare(int row, Tokens& to) {
    const int at = row + lane;
    const bool ok = lane < CHUNK && at < end;
    auto of = [&](const PerToken& x) { return ok ? x.at(bh, p.H, at) : 0.f; };
    const float decay = at || p.decays_first ? of(p.log_decay) : 0.f;
    double log = decay < LOG_ZERO ? LOG_ZERO : decay;  // NaN stays NaN
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
      const double before = __shfl_up_sync(FULL_WARP, log, d, 16);
      if (lane % 16 >= d) log += before;
    }
    const double whole = __shfl_sync(FULL_WARP, log, 15, 16);
    if (STATES) segment_log += whole + (SUBS == 2 ? __shfl_xor_sync(FULL_WARP, whole, 16) : 0.);
    const float from_start = expf(float(log)), to_end = expf(float(whole - log));
    const float b = of(p.b.factor), b_last = of(p.b.last), c_last = LAST ? of(p.c.last) : 0.f;
    const float sum = sum_lanes<16>(b_last * c_last * to_end);
    if (lane >= CHUNK) return;
    to.log[lane] = log;
    if constexpr (!STATES) {
      const float a = of(p.a.factor), a_last = of(p.a.last);
      to.a[lane] = a, to.b[lane] = b, to.a_last[lane] = a_last, to.b_last[lane] = b_last, to.c_last[lane] = c_last;
      to.a_from_start[lane] = a * from_start, to.a_last_from_start[lane] = a_last * from_start;
      to.scale[lane] = 1.f;
    }
    to.c[lane] = of(p.c.factor), to.b_to_end[lane] = b * to_end, to.b_last_to_end[lane] = b_last * to_end;
    to.z_to_end[lane] = b * c_last * to_end;
    if (lane % 16 == 0) to.change[lane / 16] = expm1f(float(whole)), to.count[lane / 16] = sum;
  }

  // A of each 16 tokens, eight columns a task.
  DEVICE void scores(int stage) {
    const auto& tokens = shared.tokens[stage];
#pragma unroll 1
    for (int task = warp; task < 2 * SUBS; task += WARPS) {
      const int sub = task / 2, row = 16 * sub, column = task % 2 * 8;
      float sum[4] = {}, rest[4] = {};
#pragma unroll 4
      for (int k = 2 * t; k < D; k += 8) {
        const float2 a0 = pair(shared.a[stage][row + g] + k), a1 = pair(shared.a[stage][row + g + 8] + k),
                     b = pair(shared.b[stage][row + column + g] + k);
        mma(sum, rest, Split<4>({a0.x, a1.x, a0.y, a1.y}), Split<2>({b.x, b.y}));
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int i = g + n / 2 * 8, j = column + 2 * t + n % 2, token = row + i, other = row + j;
        const float product = (sum[n] + rest[n]) * tokens.a[token] * tokens.b[other],
                    last = tokens.a_last[token] * tokens.b_last[other],
                    decay = expf(float(tokens.log[token] - tokens.log[other]));
        shared.scores[sub][i][j] = j <= i ? (product + last) * decay : 0.f;
      }
    }
  }
  static DEVICE float2 pair(const float* x) { return *reinterpret_cast<const float2*>(x); }
  static DEVICE float4 four(const float* x) { return *reinterpret_cast<const float4*>(x); }

  // 16 tokens of this warp's channels.
  DEVICE void advance(int stage, int sub) {
    const auto& tokens = shared.tokens[stage];
    const int row = 16 * sub, own = 16 * warp + g;
    float c[2][4];  // of tokens t and t+4, then t+8 and t+12: a fragment of cᵀ
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = row + i / 2 * 4 + t;
      c[i / 4][i % 4] = shared.c[stage][token][own + i % 2 * 8] * tokens.c[token];
    }
    if constexpr (!STATES) write_y(stage, sub, c);
    float more[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = row + i / 2 * 4 + t;
      more[i % 2] += c[i / 4][i % 4] * tokens.b_last_to_end[token];
      c[i / 4][i % 4] *= tokens.b_to_end[token];
    }
    const float change = tokens.change[sub];
#pragma unroll
    for (int i = 0; i < 2; i++) R[i] += R[i] * change + sum_lanes<4>(more[i]);
    const Split<4> left[2] = {Split<4>(c[0]), Split<4>(c[1])};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      float sum[4] = {};
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const int token = row + 8 * s + t, column = 8 * n + g;
        mma(sum, sum, left[s], Split<2>({shared.b[stage][token][column], shared.b[stage][token + 4][column]}));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) state[n][i] += state[n][i] * change + sum[i];
    }
  }

  // yᵀ of 16 tokens; sum[0] has the first eight.
  DEVICE void write_y(int stage, int sub, const float (&c)[2][4]) {
    const auto& tokens = shared.tokens[stage];
    const int row = 16 * sub, own = 16 * warp + g;
    float sum[2][4] = {}, rest[2][4] = {};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      const float (&s)[4] = state[n];  // as a left operand with its columns in the order 0, 2, 4, 6, 1, 3, 5, 7
      const Split<4> left({s[0], s[2], s[1], s[3]});
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 a = pair(&shared.a[stage][row + 8 * i + g][8 * n + 2 * t]);
        mma(sum[i], D > 128 ? sum[i] : rest[i], left, Split<2>({a.x, a.y}));  // else there are not enough registers
      }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int token = row + n / 4 * 8 + 2 * t + n % 2;
      float& x = sum[n / 4][n % 4];
      x = (x + rest[n / 4][n % 4]) * tokens.a_from_start[token] + R[n % 4 / 2] * tokens.a_last_from_start[token];
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const Split<4> left(c[s]);
#pragma unroll
      for (int i = s; i < 2; i++) {
        const float* weights = shared.scores[sub][8 * i + g] + 8 * s + t;
        mma(sum[i], sum[i], left, Split<2>({weights[0], weights[4]}));
      }
    }
    __syncwarp();  // all lanes have read c
#pragma unroll
    for (int n = 0; n < 8; n++)
      shared.c[stage][row + n / 4 * 8 + 2 * t + n % 2][own + n % 4 / 2 * 8] = sum[n / 4][n % 4];
  }

  // y_last, Z and count of 16 tokens: the additional warp.
  DEVICE void advance_last(int stage, int sub, int begin_row) {
    auto& tokens = shared.tokens[stage];
    const int row = 16 * sub;
    if constexpr (!STATES) {
      const int token = row + lane / 2, half = lane % 2 * 4;
      float sum = 0.f, weighted = 0.f;
#pragma unroll 4
      for (int k = half; k < D; k += 8) {
        const float4 a = four(shared.a[stage][token] + k), z = four(shared.Z + k);
        sum += (a.x * z.x + a.y * z.y) + (a.z * z.z + a.w * z.w);
      }
#pragma unroll
      for (int j = half; j < 16; j += 8) {
        const float4 w = four(shared.scores[sub][lane / 2] + j), c = four(tokens.c_last + row + j);
        weighted += (w.x * c.x + w.y * c.y) + (w.z * c.z + w.w * c.w);
      }
      const float y =
          sum_lanes<2>(sum * tokens.a_from_start[token] + weighted) + tokens.a_last_from_start[token] * count;
      if (p.divide) tokens.scale[token] = 1.f / y;
      const int at = begin_row + token;
      if (p.y_last && blockIdx.x == 0 && half == 0 && at < end)
        p.y_last[bh / p.H * p.y_last_batch + at * p.y_last_token + bh % p.H * p.y_last_head] = y;
      __syncwarp();
    }
    const float change = tokens.change[sub];
#pragma unroll
    for (int k = 2 * lane; k < D; k += 64) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const float2 b = pair(shared.b[stage][row + j] + k);
        const float z = tokens.z_to_end[row + j];
        sum.x += b.x * z, sum.y += b.y * z;
      }
      shared.Z[k] += shared.Z[k] * change + sum.x, shared.Z[k + 1] += shared.Z[k + 1] * change + sum.y;
    }
    count += count * change + tokens.count[sub];
    __syncwarp();
  }

  DEVICE void store_y(int row, int stage) const {
    float* y = const_cast<float*>(shared.of_head[3]) + row * p.y_token + first;
    const int token = p.y_token;
    each_four<M>([&](int r, int column) {
      if (row + r >= end || first + column >= D) return;
      float4 x = four(&shared.c[stage][r][column]);
      const float scale = shared.tokens[stage].scale[r];
      x.x *= scale, x.y *= scale, x.z *= scale, x.w *= scale;
      *reinterpret_cast<float4*>(y + r * token + column) = x;
    });
  }

  // This thread's part of a state: visit(its number, where it is).
  template <typename F>
  DEVICE void each_of_state(float* S, F visit) {
    const int to_row = p.transposed ? 1 : D + 1, to_column = p.transposed ? D + 1 : 1;
    if (warp == WARPS) {
      for (int k = lane; k < D; k += 32) visit(shared.Z[k], S[k * to_row + D * to_column]);
      if (lane == 0) visit(count, S[D * (to_row + to_column)]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int channel = first + 16 * warp + g + 8 * i;
      if (channel >= D) continue;
      float* column = S + channel * to_column;
      if (t == 0) visit(R[i], column[D * to_row]);
      float* at = column + 2 * t * to_row;
#pragma unroll
      for (int n = 0; n < D / 8; n++, at += 8 * to_row)
        visit(state[n][2 * i], at[0]), visit(state[n][2 * i + 1], at[to_row]);
    }
  }
  DEVICE void store_state(float* S) {
    if (blockIdx.x == 0 || warp < WARPS) each_of_state(S, [](float& s, float& to) { to = s; });
  }

  DEVICE void run() {
    const i64 size = (D + 1) * (D + 1);
    float* S = p.states + (i64(blockIdx.z) * gridDim.y + bh) * size;
    if (tid == 0) {
      const int batch = bh / p.H, head = bh % p.H;
      auto of_head = [&](const Tf32Operand& x) { return x.x + batch * x.batch + head * x.head; };
      shared.of_head[0] = of_head(p.a), shared.of_head[1] = of_head(p.b), shared.of_head[2] = of_head(p.c);
      shared.of_head[3] = p.y + batch * p.y_batch + head * p.y_head;
    }
    __syncthreads();
    if (warp == WARPS) prepare(begin, shared.tokens[0]);
    load(begin, 0);
#pragma unroll
    for (int n = 0; n < D / 8 * 4; n++) state[n / 4][n % 4] = 0.f;
    R[0] = R[1] = count = 0.f;
    if (STATES && warp == WARPS)
      for (int k = lane; k < D; k += 32) shared.Z[k] = 0.f;
    if (!STATES) {
      each_of_state(S, [](float& s, float& from) { s = from; });
      count = __shfl_sync(FULL_WARP, count, 0);
#pragma unroll
      for (int i = 0; i < 2; i++) R[i] = __shfl_sync(FULL_WARP, R[i], lane / 4 * 4);
    }
    int stage = 0;
#pragma unroll 1
    for (int row = begin; row < end; row += CHUNK, stage ^= 1) {
      copy_async_wait<0>();
      __syncthreads();
      recompute_lane();
      if constexpr (!STATES) {
        if (row > begin) store_y(row - CHUNK, stage ^ 1);
        if (warp < WARPS) scores(stage);
        __syncthreads();
      }
      if (row + CHUNK < end) load(row + CHUNK, stage ^ 1);
      recompute_lane();
      if (warp < WARPS) {
#pragma unroll 1
        for (int sub = 0; sub < SUBS; sub++) advance(stage, sub);
      } else {
        if constexpr (LAST)
          for (int sub = 0; sub < SUBS; sub++) advance_last(stage, sub, row);
        if (row + CHUNK < end) prepare(row + CHUNK, shared.tokens[stage ^ 1]);
      }
    }
    if constexpr (STATES) {
      store_state(S + gridDim.y * size);
      if (tid == 32 * WARPS) p.decays[blockIdx.z * gridDim.y + bh] = expf(float(segment_log));
    } else {
      __syncthreads();
      store_y(begin + (end - 1 - begin) / CHUNK * CHUNK, stage ^ 1);
      if (p.final && blockIdx.z == gridDim.z - 1) store_state(p.final + bh * size);
    }
  }
};
