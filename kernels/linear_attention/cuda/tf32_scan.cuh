// The scan in fp32 with a decay that all channels share, y_i = Σ_{j≤i} γ_{j+1} ⋯ γ_i (a_i·b_j) c_j, on tensor cores in
// TF32. Each product is PRODUCTS = 3 of these: x = hi + lo, and x·y = hi·hi + hi·lo + lo·hi but for 2⁻²² of it; or 1, of
// rounded numbers.
//
// In blocks of 16 tokens, with Γ the products of decays:
//   yᵀ = Sᵀ (a Γ)ᵀ + cᵀ Aᵀ,   A_ij = Γ_ij a_i·b_j for j ≤ i,   Sᵀ ← γ Sᵀ + (c Γ)ᵀ b
// A warp owns 16 of the block's channels of c and y; Sᵀ is its accumulator and the left operand of the first product.
// Tensor cores cut sums off instead of rounding them, so S is summed up outside of them.
//
// a, b and c may have a factor per token and one more channel, the last, which tensor cores do not see: the last of a
// and b adds to A, and to S the row R = Σ b_last c; with LAST, that of c adds the column Z = Σ c_last b, the corner
// count = Σ b_last c_last, and y_last = Σ A c_last, the normaliser. These are the additional warp's work; it also
// prepares the next tokens' numbers. With NORMS, rows of a and b are divided by their norms: it computes these beside
// the scores, when the rows have arrived, and multiplies the numbers by 1/‖x‖. `STATES`: computes only what a
// sub-segment adds to the state, from its last chunk to its first, so that the decay to its end is known.
#pragma once
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

// What a scan reads and writes: rows [B, N, H, D], then numbers per token [B, N, H]. A number is `value` times x, or
// `value` if x is null.
enum Tf32Tensor {
  A_ROWS,
  B_ROWS,
  C_ROWS,
  Y_ROWS,
  Y_LAST,
  A_NORM,  // 1/‖a‖ and 1/‖b‖, which NORMS writes
  B_NORM,
  A_FACTOR,
  A_LAST,
  B_FACTOR,
  B_LAST,
  C_FACTOR,
  C_LAST,
  LOG_DECAY,
  TENSORS
};
constexpr int NUMBERS = TENSORS - A_FACTOR;  // that are read

struct Tf32Strides {  // in elements; from the last token to the first, that of tokens is negative
  i64 batch, token, head;
};

struct Tf32Params {
  float* x[TENSORS];
  // The state after each sub-segment of all segments but the last, [(segments − 1) · sub_segments, B, H, D + 1, D + 1];
  // STATES writes what it adds there, and its decay [(segments − 1) · sub_segments, B, H]. Before the first and behind
  // the last segment, or null:
  float *states, *decays, *initial, *final;
  Tf32Strides strides[TENSORS];
  float value[NUMBERS];
  int N, H, segment_len;
  int transposed;    // whether the states are
  int decays_first;  // whether the first token decays the state before it
  int divide;        // y by y_last
  int rows_in_tf32;  // whether all of a and b are
  int sub_segments;  // of a segment; STATES has a block for each
};
static_assert(sizeof(Tf32Params) == TF32_PARAMS_BYTES, "PARAMS of tf32.py");

// N numbers of a fragment, each the sum of two in TF32; `hi` is the nearest, or x cut off. Left operands are rounded:
// one of the two is enough for a lo·lo, which is left out, without a bias. Right ones are more, so only those of the
// scores, and the scores themselves, are: `lo` is then half as large and of either sign. Of one product `hi` is all
// there is, and the most numerous operands are not rounded: the state, and rows multiplied with it or added to it. Tensor
// cores cut them off, by 0.72·2⁻¹¹ on average (of mantissas evenly distributed in their logarithm): CORRECTION makes up for it.
constexpr bool SPLIT = PRODUCTS == 3;
constexpr float CORRECTION = SPLIT ? 1.f : 1.f + 0.72f / 2048;
template <int N, bool NEAREST = N == 4>
struct Split {
  u32 hi[N], lo[N];
  DEVICE explicit Split(const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if constexpr (SPLIT) {
        hi[i] = (__float_as_uint(x[i]) + (NEAREST ? 0x1000 : 0)) & 0xffffe000u;
        lo[i] = __float_as_uint(x[i] - __uint_as_float(hi[i]));
      } else {
        hi[i] = NEAREST ? nearest_tf32(x[i]) : __float_as_uint(x[i]);
      }
    }
  }
};
// d gets the large product, `left` and `right` those of a's and b's rest: sums apart wait less for one another.
template <bool LEFT, bool RIGHT>
DEVICE void mma(float (&d)[4], float (&left)[4], float (&right)[4], const Split<4, LEFT>& a, const Split<2, RIGHT>& b) {
  if constexpr (SPLIT) {
    mma_tf32(left, a.lo, b.hi);
    mma_tf32(right, a.hi, b.lo);
  }
  mma_tf32(d, a.hi, b.hi);
}

template <int D, int WARPS, int CHUNK, bool LAST, bool STATES, bool NORMS>
struct Tf32Scan {
  static constexpr int M = 16 * WARPS, SUBS = CHUNK / 16;
  static constexpr int COPIERS = 32 * WARPS;  // threads that copy tiles: the additional warp has enough to do
  // With more than eight warps, the additional one among them, a thread has at most 168 registers. Then c is loaded
  // twice, and y has a tile of its own.
  static constexpr bool FEW_REGISTERS = WARPS >= 8;
  // Rows 8 or 24 banks apart: neither the pairs (2t, 2t+1) of rows g conflict, nor columns g of rows t.
  static constexpr int ROW = D % 16 ? D : D + 8, C_ROW = M + 8, SCORE_ROW = 20;

  struct __align__(16) Tokens {
    double log[CHUNK];  // Σ log decays from the first of 16 tokens to this one, in float64 for their differences
    float a[CHUNK], b[CHUNK], c[CHUNK], a_last[CHUNK], b_last[CHUNK], c_last[CHUNK];
    float a_from_start[CHUNK], a_last_from_start[CHUNK];           // times the decays up to this token
    float b_to_end[CHUNK], b_last_to_end[CHUNK], z_to_end[CHUNK];  // times the decays after it; z: b c_last
    float scale[CHUNK];                                            // of y
    float change[SUBS], count[SUBS];  // of 16 tokens: their decay (− 1, see recurrence.cu, if SPLIT), Σ b_last c_last
  };
  struct __align__(16) Shared {  // two stages; y takes c's place where it has no tile of its own
    float a[STATES ? 1 : 2][STATES ? 1 : CHUNK][ROW], b[2][CHUNK][ROW], c[2][CHUNK][C_ROW];
    float scores[STATES ? 1 : SUBS][16][SCORE_ROW], Z[D];
    Tokens tokens[2];
    float y[STATES || !FEW_REGISTERS ? 1 : CHUNK][C_ROW];
    float* of_head[TENSORS];  // in registers they would be recomputed for each chunk
  };

  const Tf32Params& p;
  Shared& shared;
  const int bh = blockIdx.y, first = blockIdx.x * M;  // channel of c and y
  const int length = STATES ? p.segment_len / p.sub_segments : p.segment_len;
  const int begin = blockIdx.z * length, end = min(begin + length, p.N);
  u32 tid = threadIdx.x;
  int warp, lane, g, t;
  float state[D / 8][4], R[2];  // Sᵀ, 8 columns each; R of the channels of its rows
  float count;                  // of the additional warp
  // What is added to the state is times `row_correction`, the state `kept`, for itself and the rows multiplied with it.
  const float row_correction = p.rows_in_tf32 ? 1.f : CORRECTION, kept = CORRECTION * row_correction;
  double later_log = 0;  // Σ log decays of the later chunks, for STATES

  DEVICE Tf32Scan(const Tf32Params& params, Shared& memory) : p(params), shared(memory) { recompute_lane(); }
  // Called between the phases of a chunk, which then recompute their addresses: kept, they would spill.
  DEVICE void recompute_lane() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    asm volatile("" : "+r"(warp), "+r"(g), "+r"(t));  // within a phase they are kept
  }

  // Calls use(row, column) for this thread's groups of four columns of a tile: all in one column, STEP rows apart.
  template <int COLUMNS>
  static constexpr int STEP = COPIERS / (COLUMNS / 4);
  template <int COLUMNS, typename F>
  DEVICE void each_four(F use) const {
    constexpr int FOURS = COLUMNS / 4, STEPS = (CHUNK + STEP<COLUMNS> - 1) / STEP<COLUMNS>;
    const int column = tid % FOURS * 4, r = tid / FOURS;
    if (r >= STEP<COLUMNS>) return;
#pragma unroll
    for (int n = 0; n < STEPS; n++) {
      const int row = r + n * STEP<COLUMNS>;
      if ((n + 1) * STEP<COLUMNS> <= CHUNK || row < CHUNK) use(row, column);
    }
  }
  // To the row that each_four uses next. Hidden from the compiler, which would keep all addresses in registers.
  template <typename T>
  static DEVICE void step_rows(T*& at, i64 step) {
    at += step;
    asm volatile("" : "+l"(at));
  }
  // This thread's first group of a tile in which row `row` is the first.
  template <int COLUMNS>
  DEVICE float* first_four(Tf32Tensor which, int channel, int row) const {
    constexpr int FOURS = COLUMNS / 4;
    return shared.of_head[which] + (row + int(tid / FOURS)) * p.strides[which].token + channel + tid % FOURS * 4;
  }
  template <int COLUMNS, int STRIDE>
  DEVICE void load(float (&tile)[CHUNK][STRIDE], Tf32Tensor which, int channel, int row) const {
    const u32 to = shared_address(tile);
    const float* from = first_four<COLUMNS>(which, channel, row);
    const i64 step = STEP<COLUMNS> * p.strides[which].token;
    each_four<COLUMNS>([&](int r, int column) {
      const bool ok = row + r < end && (D % COLUMNS == 0 || channel + column < D);
      copy_async_16(to + (r * STRIDE + column) * 4, from, ok);
      step_rows(from, step);
    });
  }
  DEVICE void load(int row, int stage) const {
    if constexpr (!STATES) load<D>(shared.a[stage], A_ROWS, 0, row);
    load<D>(shared.b[stage], B_ROWS, 0, row);
    load<M>(shared.c[stage], C_ROWS, first, row);
    copy_async_commit();
  }
  // The numbers of the tokens, one a lane: read, all at once, a chunk before they are needed,
  DEVICE void fetch(int row, float (&x)[NUMBERS]) const {
    const int at = row + lane;
    const bool ok = lane < CHUNK && begin <= at && at < end;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
      const int which = A_FACTOR + i;
      if ((STATES && which <= A_LAST) || (!LAST && which == C_LAST)) continue;
      const float* from = shared.of_head[which];
      const bool exists = ok && (which != LOG_DECAY || at || p.decays_first);
      x[i] = exists ? p.value[i] : 0.f;
      if (exists && from) x[i] *= from[at * p.strides[which].token];
    }
  }
  // and what follows from them.
  DEVICE void prepare(const float (&x)[NUMBERS], Tokens& to) {
    auto of = [&](Tf32Tensor which) { return x[which - A_FACTOR]; };
    const float decay = of(LOG_DECAY);
    double log = decay < LOG_ZERO ? LOG_ZERO : decay;  // NaN stays NaN
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
      const double before = __shfl_up_sync(FULL_WARP, log, d, 16);
      if (lane % 16 >= d) log += before;
    }
    const double whole = __shfl_sync(FULL_WARP, log, 15, 16);
    double end_log = whole;  // up to where the tokens' weights decay: the end of 16 tokens, or of the sub-segment
    if constexpr (STATES) {
      const double other = SUBS == 2 ? __shfl_xor_sync(FULL_WARP, whole, 16) : 0.;
      end_log += later_log + (lane < 16 ? other : 0.);
      later_log += whole + other;  // 0 of chunks that there are not
    }
    const float from_start = expf(float(log)), to_end = expf(float(end_log - log));
    const float b = of(B_FACTOR), b_last = of(B_LAST), c_last = LAST ? of(C_LAST) : 0.f;
    const float sum = sum_lanes<16>(b_last * c_last * to_end);
    if (lane >= CHUNK) return;
    to.log[lane] = log;
    if constexpr (!STATES) {
      const float a = of(A_FACTOR), a_last = of(A_LAST);
      to.a[lane] = a, to.b[lane] = b, to.a_last[lane] = a_last, to.b_last[lane] = b_last, to.c_last[lane] = c_last;
      to.a_from_start[lane] = a * from_start, to.a_last_from_start[lane] = a_last * from_start;
    }
    to.c[lane] = of(C_FACTOR), to.b_last_to_end[lane] = b_last * to_end;
    to.b_to_end[lane] = b * to_end * kept * row_correction;
    to.z_to_end[lane] = b * c_last * to_end;
    if (lane % 16 == 0) to.count[lane / 16] = sum;
    if (!STATES && lane % 16 == 0) to.change[lane / 16] = SPLIT ? expm1f(float(whole)) : expf(float(whole));
  }

  // 1/‖x‖ of the row of a token, one a lane.
  DEVICE float inverse_norm(const float (&tile)[CHUNK][ROW]) const {
    constexpr int PARTS = 32 / CHUNK;  // lanes that share a row
    const float* row = tile[lane % CHUNK];
    const int half = lane & 4;  // of each eight columns first: so eight rows are in all banks
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int k = 8 * (lane / CHUNK); k < D; k += 8 * PARTS) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 x = four(row + k + (i ^ half));
        sum.x += x.x * x.x, sum.y += x.y * x.y, sum.z += x.z * x.z, sum.w += x.w * x.w;
      }
    }
    float whole = (sum.x + sum.y) + (sum.z + sum.w);
    if constexpr (PARTS == 2) whole += __shfl_xor_sync(FULL_WARP, whole, CHUNK);
    return 1.f / sqrtf(whole + NORM_EPS);
  }
  // The factors of a chunk's rows of a and b, where these are divided by their norms.
  DEVICE void normalize(int row, int stage) {
    auto& tokens = shared.tokens[stage];
    const float b = inverse_norm(shared.b[stage]);
    float a = 0.f;
    if constexpr (!STATES) a = inverse_norm(shared.a[stage]);
    if (lane >= CHUNK) return;
    tokens.b_to_end[lane] *= b, tokens.z_to_end[lane] *= b;
    if constexpr (!STATES) {
      tokens.a[lane] *= a, tokens.b[lane] *= b, tokens.a_from_start[lane] *= a;
      const int at = row + lane;
      if (blockIdx.x > 0 || at >= end) return;
      shared.of_head[A_NORM][at * p.strides[A_NORM].token] = a;
      shared.of_head[B_NORM][at * p.strides[B_NORM].token] = b;
    }
  }

  // A of each 16 tokens, eight columns a task. Where there are twice as many warps, two share a task, each with half of the
  // channels: the first adds what the second has stored.
  static constexpr int SHARES = WARPS == 4 * SUBS ? 2 : 1, TASK_WARPS = WARPS / SHARES, SCORED = 1;
  DEVICE void scores(int stage) {
    const auto& tokens = shared.tokens[stage];
    const bool second = SHARES == 2 && warp >= TASK_WARPS;
#pragma unroll 1
    for (int task = warp % TASK_WARPS; task < 2 * SUBS; task += TASK_WARPS) {
      const int sub = task / 2, row = 16 * sub, column = task % 2 * 8;
      const int half = D / 16, from = second ? half : 0, to = SHARES == 1 || second ? D / 8 : half;
      float sum[4] = {}, left[4] = {}, right[4] = {};
#pragma unroll(D <= 64 ? D / 8 : 4)
      for (int n = from; n < to; n++) {
        const int k = 8 * n + 2 * t;
        const float2 a0 = pair(shared.a[stage][row + g] + k), a1 = pair(shared.a[stage][row + g + 8] + k),
                     b = pair(shared.b[stage][row + column + g] + k);
        mma(sum, left, right, Split<4>({a0.x, a1.x, a0.y, a1.y}), Split<2, true>({b.x, b.y}));
      }
      const int j = column + 2 * t, other = row + j;
      float2 products[2];  // of rows g and g + 8
#pragma unroll
      for (int n = 0; n < 2; n++) {
        products[n].x = sum[2 * n] + (left[2 * n] + right[2 * n]);
        products[n].y = sum[2 * n + 1] + (left[2 * n + 1] + right[2 * n + 1]);
        if (second) score(sub, g + 8 * n, j) = products[n];
      }
      if (NORMS && (SHARES == 2 || task == warp))
        __syncthreads();  // `normalize` is done
      else if (SHARES == 2)
        named_barrier_sync(SCORED, COPIERS);
      if (second) return;
      const float2 b = pair(tokens.b + other), b_last = pair(tokens.b_last + other);
      const double2 log = *reinterpret_cast<const double2*>(tokens.log + other);
      float2 result[2];  // rows g and g + 8; stored together, as what is read might have been written
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int i = g + 8 * n, token = row + i;
        const float a = tokens.a[token], a_last = tokens.a_last[token];
        const float decay0 = expf(float(tokens.log[token] - log.x)), decay1 = expf(float(tokens.log[token] - log.y));
        if constexpr (SHARES == 2) {
          const float2 others = score(sub, i, j);
          products[n].x += others.x, products[n].y += others.y;
        }
        const float u = (products[n].x * a * b.x + a_last * b_last.x) * decay0,
                    w = (products[n].y * a * b.y + a_last * b_last.y) * decay1;
        result[n] = make_float2(j <= i ? u : 0.f, j < i ? w : 0.f);
      }
#pragma unroll
      for (int n = 0; n < 2; n++) score(sub, g + 8 * n, j) = result[n];
    }
    if (NORMS && SHARES == 1 && warp >= 2 * SUBS) __syncthreads();  // no task was this warp's
  }
  DEVICE float2& score(int sub, int i, int j) { return *reinterpret_cast<float2*>(&shared.scores[sub][i][j]); }
  static DEVICE float2 pair(const float* x) { return *reinterpret_cast<const float2*>(x); }
  static DEVICE float4 four(const float* x) { return *reinterpret_cast<const float4*>(x); }

  // To a part of the state what 16 tokens add; of a sub-segment alone it does not decay: they are weighted to its end.
  static DEVICE void add(float& to, float change, float sum) {
    if constexpr (STATES || SPLIT)
      to += STATES ? sum : to * change + sum;
    else
      to = to * change + sum;
  }

  // A fragment of cᵀ, of eight tokens: t and t+4.
  DEVICE void load_c(int stage, int first_token, float (&c)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = first_token + i / 2 * 4 + t;
      c[i] = shared.c[stage][token][16 * warp + g + i % 2 * 8] * shared.tokens[stage].c[token];
    }
  }
  // 16 tokens of this warp's channels.
  DEVICE void advance(int stage, int sub) {
    const auto& tokens = shared.tokens[stage];
    const int row = 16 * sub;
    float c[2][4];
    if constexpr (!STATES) write_y(stage, sub, c);
    if constexpr (STATES || FEW_REGISTERS) load_c(stage, row, c[0]), load_c(stage, row + 8, c[1]);
    float more[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = row + i / 2 * 4 + t;
      more[i % 2] += c[i / 4][i % 4] * tokens.b_last_to_end[token];
      c[i / 4][i % 4] *= tokens.b_to_end[token];
    }
    const float change = tokens.change[sub];
#pragma unroll
    for (int i = 0; i < 2; i++) add(R[i], change, STATES ? more[i] : sum_lanes<4>(more[i]));
    const Split<4> left[2] = {Split<4>(c[0]), Split<4>(c[1])};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      float sum[4] = {};
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const int token = row + 8 * s + t, column = 8 * n + g;
        mma(sum, sum, sum, left[s], Split<2>({shared.b[stage][token][column], shared.b[stage][token + 4][column]}));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) add(state[n][i], change, sum[i]);
    }
  }

  DEVICE auto& y_tile(int stage) const {
    if constexpr (FEW_REGISTERS)
      return shared.y;
    else
      return shared.c[stage];
  }
  // yᵀ of 16 tokens; sum[0] has the first eight. Loads c when the state's product needs no registers any more.
  DEVICE void write_y(int stage, int sub, float (&c)[2][4]) {
    const auto& tokens = shared.tokens[stage];
    const int row = 16 * sub, own = 16 * warp + g;
    float sum[2][4] = {}, rest[2][2][4] = {};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      const float (&s)[4] = state[n];  // as a left operand with its columns in the order 0, 2, 4, 6, 1, 3, 5, 7
      const Split<4, SPLIT> left({s[0], s[2], s[1], s[3]});
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 a = pair(&shared.a[stage][row + 8 * i + g][8 * n + 2 * t]);
        const Split<2> right({a.x, a.y});
        if constexpr (D > 128)  // there are not enough registers
          mma(sum[i], sum[i], sum[i], left, right);
        else
          mma(sum[i], rest[i][0], rest[i][1], left, right);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = row + 8 * i + 2 * t;
      const float2 a = pair(tokens.a_from_start + token), a_last = pair(tokens.a_last_from_start + token);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float x = sum[i][n] + (rest[i][0][n] + rest[i][1][n]);
        sum[i][n] = n % 2 ? x * a.y + R[n / 2] * a_last.y : x * a.x + R[n / 2] * a_last.x;
      }
    }
#pragma unroll
    for (int s = 0; s < 2; s++) {
      load_c(stage, row + 8 * s, c[s]);
      const Split<4> left(c[s]);
#pragma unroll
      for (int i = s; i < 2; i++) {
        const float* weights = shared.scores[sub][8 * i + g] + 8 * s + t;
        mma(sum[i], sum[i], sum[i], left, Split<2, true>({weights[0], weights[4]}));
      }
    }
    if constexpr (!FEW_REGISTERS) __syncwarp();  // all lanes have read c
    auto& y = y_tile(stage);
#pragma unroll
    for (int n = 0; n < 8; n++) y[row + n / 4 * 8 + 2 * t + n % 2][own + n % 4 / 2 * 8] = sum[n / 4][n % 4];
  }

  // y_last, Z and count of 16 tokens: the additional warp.
  DEVICE void advance_last(int stage, int sub, int begin_row) {
    auto& tokens = shared.tokens[stage];
    const int row = 16 * sub;
    if constexpr (!STATES) {
      const int token = row + lane / 2, half = lane % 2 * 4;
      float sum = 0.f, weighted = 0.f;
#pragma unroll 4
      for (int k = 0; k < D; k += 8) {
        const float4 a = four(shared.a[stage][token] + k + half), z = four(shared.Z + k + half);
        sum += (a.x * z.x + a.y * z.y) + (a.z * z.z + a.w * z.w);
      }
#pragma unroll
      for (int j = 0; j < 16; j += 8) {
        const float4 w = four(shared.scores[sub][lane / 2] + j + half), c = four(tokens.c_last + row + j + half);
        weighted += (w.x * c.x + w.y * c.y) + (w.z * c.z + w.w * c.w);
      }
      const float y =
          sum_lanes<2>(sum * tokens.a_from_start[token] + weighted) + tokens.a_last_from_start[token] * count;
      tokens.scale[token] = p.divide ? 1.f / y : 1.f;
      const int at = begin_row + token;
      float* to = shared.of_head[Y_LAST];
      if (to && blockIdx.x == 0 && half == 0 && at < end) to[at * p.strides[Y_LAST].token] = y;
      __syncwarp();
    }
    const float change = tokens.change[sub];
#pragma unroll
    for (int from = 0; from < D; from += 64) {
      const int k = from + 2 * lane;
      if (from + 64 > D && k >= D) break;
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const float2 b = pair(shared.b[stage][row + j] + k);
        const float z = tokens.z_to_end[row + j];
        sum.x += b.x * z, sum.y += b.y * z;
      }
      add(shared.Z[k], change, sum.x), add(shared.Z[k + 1], change, sum.y);
    }
    add(count, change, tokens.count[sub]);
    __syncwarp();
  }

  DEVICE void store_y(int row, int stage) const {
    float* to = first_four<M>(Y_ROWS, first, row);
    const i64 step = STEP<M> * p.strides[Y_ROWS].token;
    each_four<M>([&](int r, int column) {
      const float4 x = four(&y_tile(stage)[r][column]);
      const float scale = LAST ? shared.tokens[stage].scale[r] : 1.f;
      auto bits = [&](float y) { return __float_as_uint(y * scale); };
      if (row + r < end && (D % M == 0 || first + column < D))
        st_global_v4(to, make_uint4(bits(x.x), bits(x.y), bits(x.z), bits(x.w)));
      step_rows(to, step);
    });
  }

  // This thread's part of a state: visit(its number, where it is).
  template <bool ADDITIONAL, typename F>
  DEVICE void each_of_state(float* S, F visit) {
    if (p.transposed)
      each_of_state<ADDITIONAL, 1, D + 1>(S, visit);
    else
      each_of_state<ADDITIONAL, D + 1, 1>(S, visit);
  }
  template <bool ADDITIONAL, int to_row, int to_column, typename F>
  DEVICE void each_of_state(float* S, F visit) {
    if constexpr (ADDITIONAL) {
      for (int k = lane; k < D; k += 32) visit(shared.Z[k], S[k * to_row + D * to_column]);
      if (lane == 0) visit(count, S[D * (to_row + to_column)]);
    } else {
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
  }
  DEVICE void scale_state(float factor) {
#pragma unroll
    for (int n = 0; n < D / 8 * 4; n++) state[n / 4][n % 4] *= factor;
  }
  template <bool ADDITIONAL>
  DEVICE void load_state(float* S) {
#pragma unroll
    for (int n = 0; n < D / 8 * 4; n++) state[n / 4][n % 4] = 0.f;
    R[0] = R[1] = count = 0.f;
    if constexpr (ADDITIONAL)
      for (int k = lane; k < D; k += 32) shared.Z[k] = 0.f;
    if (!S) return;
    each_of_state<ADDITIONAL>(S, [](float& s, float& from) { s = from; });
    scale_state(kept);
    count = __shfl_sync(FULL_WARP, count, 0);
#pragma unroll
    for (int i = 0; i < 2; i++) R[i] = __shfl_sync(FULL_WARP, R[i], lane / 4 * 4);
  }
  template <bool ADDITIONAL>
  DEVICE void store_state(float* S) {
    scale_state(1 / kept);
    if (!ADDITIONAL || blockIdx.x == 0) each_of_state<ADDITIONAL>(S, [](float& s, float& to) { to = s; });
  }

  // The loop of the additional warp, or of the others.
  template <bool ADDITIONAL>
  DEVICE void run() {
    const i64 size = (D + 1) * (D + 1);
    const int chunks = (end - begin + CHUNK - 1) / CHUNK, step = STATES ? -CHUNK : CHUNK;
    int stage = 0, row = STATES ? begin + (chunks - 1) * CHUNK : begin;
    float numbers[NUMBERS];  // of the tokens two chunks on
    if constexpr (ADDITIONAL) {
      fetch(row, numbers);
      prepare(numbers, shared.tokens[0]);
      fetch(row + step, numbers);
    }
    if constexpr (!ADDITIONAL) load(row, 0);
    float* before = blockIdx.z == 0 ? p.initial : p.states + (i64(blockIdx.z) * p.sub_segments - 1) * gridDim.y * size;
    load_state<ADDITIONAL>(STATES || !before ? nullptr : before + bh * size);
#pragma unroll 1
    for (int left = chunks; left > 0; left--, row += step, stage ^= 1) {
      copy_async_wait<0>();
      __syncthreads();
      recompute_lane();
      if (!STATES && !ADDITIONAL && row != begin) store_y(row - CHUNK, stage ^ 1);
      if constexpr (ADDITIONAL && NORMS) {
        normalize(row, stage);
        __syncthreads();
      }
      if constexpr (ADDITIONAL) prepare(numbers, shared.tokens[stage ^ 1]);
      if constexpr (!ADDITIONAL && !STATES) scores(stage);
      if constexpr (!STATES) __syncthreads();
      if (!ADDITIONAL && left > 1) load(row + step, stage ^ 1);
      if constexpr (!ADDITIONAL && STATES && NORMS) __syncthreads();
      recompute_lane();
      if constexpr (ADDITIONAL) fetch(row + 2 * step, numbers);
#pragma unroll 1
      for (int sub = 0; sub < SUBS; sub++) {
        if (FEW_REGISTERS) recompute_lane();
        if constexpr (!ADDITIONAL) advance(stage, sub);
        if constexpr (ADDITIONAL && LAST) advance_last(stage, sub, row);
      }
    }
    if (!STATES && FEW_REGISTERS) recompute_lane();
    if constexpr (STATES) {
#pragma unroll
      for (int i = 0; i < 2; i++) R[i] = sum_lanes<4>(R[i]);
      store_state<ADDITIONAL>(p.states + (i64(blockIdx.z) * gridDim.y + bh) * size);
      if (ADDITIONAL && lane == 0) p.decays[blockIdx.z * gridDim.y + bh] = expf(float(later_log));
    } else {
      __syncthreads();
      if constexpr (!ADDITIONAL) store_y(row - CHUNK, stage ^ 1);
      if (p.final && blockIdx.z == gridDim.z - 1) store_state<ADDITIONAL>(p.final + bh * size);
    }
  }
  DEVICE void run() {
    if (tid == 0) {
      const int batch = bh / p.H, head = bh % p.H;
#pragma unroll
      for (int i = 0; i < TENSORS; i++)
        shared.of_head[i] = p.x[i] ? p.x[i] + batch * p.strides[i].batch + head * p.strides[i].head : nullptr;
    }
    __syncthreads();
    if (warp == WARPS)
      run<true>();
    else
      run<false>();
  }
};
