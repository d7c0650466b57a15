// The scan with decays on the channels of c and y: dq, and in reverse dk with the gradient of the gates.
//
// In blocks of 16 tokens, with α the decays of the slice's channels, as columns:
//   y_i = α_0 ⋯ α_i ⊙ S a_i + Σ_{j≤i} (a_i·b_j) α_{j+1} ⋯ α_i ⊙ c_j,   S ← diag(α_0 ⋯ α_15) S + c̃ᵀ b,
//   c̃_j = α_{j+1} ⋯ α_15 ⊙ c_j.
// Of the sum over j ≤ i, what the first eight tokens add to the last eight is a product with their part of the state. The
// rest, within eight tokens, is computed in fp32: a thread has two channels, and multiplies each c_j by α_i in turn.
//
// A warp owns 16 channels of the slice, and one of GROUPS parts of the channels of a and b, which are summed up. With
// ROLES the groups share the other work, too: while the first finishes a chunk's y, others weigh c of the next chunk,
// compute its a·b, copy the one after that, and sum up the gates' gradient. For this a, b, c and the gates have a stage more.
#pragma once
#include "channel_decay_params.cuh"

template <typename G, int BD, int M, int GROUPS, bool ROLES>
struct SharedRight {  // byte offsets
  static constexpr int AB = Tile<BD>::SIZE, SLICE = Tile<M>::SIZE, GATE = Tile<M, Bytes<G>::N>::SIZE;
  static constexpr int AB_STAGES = ROLES ? 2 : 1, STAGES = ROLES ? 3 : 2, SCORE_STAGES = ROLES ? 2 : 1;
  static constexpr int A = 0;
  static constexpr int B = A + AB_STAGES * AB;
  static constexpr int C = B + AB_STAGES * AB;
  static constexpr int GATES = C + STAGES * SLICE;
  static constexpr int C_TO_END = GATES + STAGES * GATE;  // c̃
  static constexpr int C_TO_HALF =
      C_TO_END + SLICE;                        // of the first eight tokens, to the eighth; the others are not set
  static constexpr int Y = C_TO_HALF + SLICE;  // GROUPS parts, in fp32
  static constexpr int Y_ROW = M + 4;
  static constexpr int SCORES = Y + GROUPS * CHANNEL_CHUNK * Y_ROW * 4;  // a·b, in fp32
  static constexpr int SCORE_ROW = 20;
  static constexpr int SCORE_STAGE = CHANNEL_CHUNK * SCORE_ROW * 4;
  static constexpr int HALF = SCORES + SCORE_STAGES * SCORE_STAGE;  // the decay of each first eight tokens
  static constexpr int WHOLE = HALF + CHANNEL_SUBS * M * 4;         // and of each 16
  static constexpr int TOTALS = WHOLE + CHANNEL_SUBS * M * 4;  // DK: sums of the gates' gradient over eight tokens each
  static constexpr int BYTES = TOTALS + 2 * CHANNEL_SUBS * M * 4 + GROUPS * M * 4;
};

template <typename T, typename G, int BD, int M, int GROUPS, bool REVERSE, bool ROLES>
struct RightScan {
  using Shared = SharedRight<G, BD, M, GROUPS, ROLES>;
  using Gates = Tile<M, Bytes<G>::N>;
  static constexpr int WARPS = M / 16 * GROUPS, THREADS = 32 * WARPS, PART = BD / GROUPS;
  static constexpr int Y_ROW = Shared::Y_ROW, SCORE_ROW = Shared::SCORE_ROW;

  const ChannelParams& p;
  ChannelBlock<T, G, REVERSE> block;
  char* smem;
  float state[PART / 8][4] = {};  // S, 8 columns each

  DEVICE RightScan(const ChannelParams& params, char* shared)
      : p(params), block(params, shared, blockIdx.z), smem(shared) {}
  DEVICE int warp() const { return block.tid / 32 % (M / 16); }
  DEVICE int group() const { return block.tid / 32 / (M / 16); }
  DEVICE int slice() const { return blockIdx.x * M; }
  DEVICE float* floats(int offset) const { return reinterpret_cast<float*>(smem + offset); }
  DEVICE u32 c_tile(int row) const {
    return block.base + Shared::C + u32(row / CHANNEL_CHUNK) % Shared::STAGES * Shared::SLICE;
  }
  DEVICE u32 gate_tile(int row) const {
    return block.base + Shared::GATES + u32(row / CHANNEL_CHUNK) % Shared::STAGES * Shared::GATE;
  }
  DEVICE u32 ab_stage(int row) const { return u32(row / CHANNEL_CHUNK) % Shared::AB_STAGES * Shared::AB; }
  DEVICE u32 a_tile(int row) const { return block.base + Shared::A + ab_stage(row); }
  DEVICE u32 b_tile(int row) const { return block.base + Shared::B + ab_stage(row); }
  DEVICE float* scores_of(int row) const {
    return floats(Shared::SCORES + u32(row / CHANNEL_CHUNK) % Shared::SCORE_STAGES * Shared::SCORE_STAGE);
  }

  // Of four groups the last two copy: the first ones have more to do meanwhile.
  static constexpr int COPIERS = ROLES && GROUPS > 3 ? THREADS / 2 : THREADS;

  DEVICE void load(int row) const {
    if (block.tid < THREADS - COPIERS) return;
    auto copier = block;
    copier.tid -= THREADS - COPIERS;
    copier.template load_gates<M, COPIERS>(gate_tile(row), slice(), row);
    copier.template load<M, COPIERS>(c_tile(row), p.c + slice(), p.strides_c, row);
    copier.template load<BD, COPIERS>(a_tile(row), p.a, p.strides_a, row);
    copier.template load<BD, COPIERS>(b_tile(row), p.b, p.strides_b, row);
    if (REVERSE) {  // what sum_dgate will read
      constexpr int LINES = (2 * M + 127) / 128;
      const u16* k = block.start(p.k, p.strides_k) + block.token(row) * p.strides_k.token + slice();
      const i64 first = element(row, 0), step = 2 * row_step();
      copier.template prefetch<LINES, COPIERS>(k, 2 * block.step(p.strides_k.token), block.length - row);
      copier.template prefetch<LINES, COPIERS>(p.dq + first, step, block.length - row);
      copier.template prefetch<LINES, COPIERS>(p.dq_rest + first, step, block.length - row);
    }
  }

  // A thread has two channels of half a block of 16 tokens; the lane 16 further has the other half. There is one for each
  // of the first M/16 warps, or with ROLES of each group's.
  struct Unit {
    int sub, column, row;
    bool upper, exists;
    DEVICE explicit Unit(int unit) {
      if (ROLES) unit %= 2 * M;
      exists = ROLES || unit < 2 * M;
      sub = unit / M, column = unit % M / 32 * 32 + unit % 16 * 2, upper = unit & 16, row = 16 * sub + 8 * upper;
    }
  };

  DEVICE void weigh(int chunk) const {
    const Unit u(block.tid);
    if (!u.exists) return;
    const u32 gates = gate_tile(chunk) + Gates::at(u.row, u.column), at = Tile<M>::at(u.row, u.column);
    float2 alpha[8], half = make_float2(1.f, 1.f), to_end = half;
#pragma unroll
    for (int r = 0; r < 8; r++) alpha[r] = decay(unpack_gates<G>(gates + r * Gates::ROW)), half = half * alpha[r];
    const float2 other = swap_halves(half), after = u.upper ? to_end : other;
    if (!u.upper) {
      *reinterpret_cast<float2*>(floats(Shared::HALF) + u.sub * M + u.column) = half;
      *reinterpret_cast<float2*>(floats(Shared::WHOLE) + u.sub * M + u.column) = half * other;
    }
#pragma unroll
    for (int r = 7; r >= 0; r--) {
      const int offset = at + r * Tile<M>::ROW;
      const float2 c = unpack<T>(ld_shared_b32(c_tile(chunk) + offset)), h = c * to_end, e = h * after;
      st_shared_b32(block.base + Shared::C_TO_END + offset, pack<T>(e.x, e.y));
      if (!u.upper) st_shared_b32(block.base + Shared::C_TO_HALF + offset, pack<T>(h.x, h.y));
      to_end = to_end * alpha[r];
    }
  }

  // a·b of 16 tokens, 8 columns a task.
  DEVICE void scores(int row, int first, int warps) const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int task = first; task < 2 * CHANNEL_SUBS; task += warps) {
      const int sub = task / 2, columns = task % 2;
      const u32 a_from = fragment_lanes<BD>(a_tile(row), block.tid) + fragment_step<BD>(sub, 0);
      const u32 b_from = b_tile(row) + Tile<BD>::at(16 * sub + 8 * columns + lane % 8, lane / 8 * 8);
      float even[4] = {}, odd[4] = {};
#pragma unroll 2
      for (int k = 0; k < BD / 32; k++) {
        u32 a[4], a2[4], b[4];
        ldmatrix(a, a_from + 64 * k), ldmatrix(a2, a_from + 64 * k + 32), ldmatrix(b, b_from + 64 * k);
        mma<T>(even, a[0], a[1], a[2], a[3], b[0], b[1]);
        mma<T>(odd, a2[0], a2[1], a2[2], a2[3], b[2], b[3]);
      }
      float* to = scores_of(row) + (16 * sub + g) * SCORE_ROW + 8 * columns + 2 * t;
      *reinterpret_cast<float2*>(to) = make_float2(even[0] + odd[0], even[1] + odd[1]);
      *reinterpret_cast<float2*>(to + 8 * SCORE_ROW) = make_float2(even[2] + odd[2], even[3] + odd[3]);
    }
  }

  // One block of 16 tokens: what is before each half, and the state.
  DEVICE void advance(int row, int sub) {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4, own = 16 * warp();
    const int part = group() * PART;
    float y[2][4] = {};
    add_state_product<T>(y, state, fragment_lanes_crosswise<BD>(a_tile(row), block.tid) + Tile<BD>::at(16 * sub, part));
    const float* half = floats(Shared::HALF) + sub * M + own + g;
    y[1][0] *= half[0], y[1][1] *= half[0], y[1][2] *= half[8], y[1][3] *= half[8];
    if (group() == 0) {
      u32 c[4];
      // Lanes 8 … 15 and 24 … 31 give rows of the second half, which are not used: they repeat the first.
      ldmatrix_trans(c, block.base + Shared::C_TO_HALF + Tile<M>::at(16 * sub + lane % 8, own + lane / 16 * 8));
      const float2 w = ld_shared_float2(scores_of(row) + (16 * sub + 8 + g) * SCORE_ROW + 2 * t);
      mma<T>(y[1], c[0], c[2], 0, 0, pack<T>(w.x, w.y), 0);
    }
    float* to = floats(Shared::Y) + (group() * CHANNEL_CHUNK + 16 * sub + 2 * t) * Y_ROW + own + g;
#pragma unroll
    for (int i = 0; i < 2; i++, to += 8 * Y_ROW)
      to[0] = y[i][0], to[Y_ROW] = y[i][1], to[8] = y[i][2], to[Y_ROW + 8] = y[i][3];
    u32 c[4];
    ldmatrix_trans(c,
                   fragment_lanes_crosswise<M>(block.base + Shared::C_TO_END, block.tid) + Tile<M>::at(16 * sub, own));
    const float* whole = floats(Shared::WHOLE) + sub * M + own + g;
    const float first = whole[0], second = whole[8];
    const u32 b_from = fragment_lanes<BD>(b_tile(row), block.tid) + Tile<BD>::at(16 * sub, part);
#pragma unroll
    for (int k = 0; k < PART / 16; k++) {
      u32 b[4];
      ldmatrix_trans(b, b_from + 32 * k);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float (&s)[4] = state[2 * k + i];
        s[0] *= first, s[1] *= first, s[2] *= second, s[3] *= second;
        mma<T>(s, c[0], c[1], c[2], c[3], b[2 * i], b[2 * i + 1]);
      }
    }
  }

  // Element [token, head, column] of a contiguous tensor [B, N, H, Dk], and how many it is to the next row.
  DEVICE i64 row_step() const { return block.step(i64(p.H) * p.channels); }
  DEVICE i64 element(int row, int column) const {
    return ((i64(block.batch) * p.N + block.token(row)) * p.H + block.head) * p.channels + slice() + column;
  }

  // y of a thread's two channels and eight tokens; in reverse it also takes the place, in fp32, of what it had from before.
  DEVICE void finish(int chunk) const {
    const Unit u(block.tid);
    if (!u.exists) return;
    const u32 gates = gate_tile(chunk) + Gates::at(u.row, u.column),
              c_at = c_tile(chunk) + Tile<M>::at(u.row, u.column);
    float* before = floats(Shared::Y) + u.row * Y_ROW + u.column;
    const float* scores = scores_of(chunk) + u.row * SCORE_ROW + 8 * u.upper;
    float2 from_start = make_float2(1.f, 1.f), c[8];
    const i64 start = element(chunk + u.row, u.column), step = row_step();
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const float2 alpha = decay(unpack_gates<G>(gates + r * Gates::ROW));
      c[r] = unpack<T>(ld_shared_b32(c_at + r * Tile<M>::ROW));
      float2 y = ld_shared_float2(before + r * Y_ROW);
#pragma unroll
      for (int i = 1; i < GROUPS; i++) y = y + ld_shared_float2(before + (i * CHANNEL_CHUNK + r) * Y_ROW);
      from_start = from_start * alpha, y = y * from_start;
      float w[8];
#pragma unroll
      for (int j = 0; j <= r; j += 4)
        *reinterpret_cast<float4*>(w + j) = *reinterpret_cast<const float4*>(scores + r * SCORE_ROW + j);
#pragma unroll
      for (int j = 0; j < r; j++) c[j] = c[j] * alpha, y = y + c[j] * w[j];
      y = (y + c[r] * w[r]) * p.scale;
      if (REVERSE) *reinterpret_cast<float2*>(before + r * Y_ROW) = y;
      const u32 rounded = pack<T>(y.x, y.y);
      st_global_b32_if(p.y + start + r * step, rounded, chunk + u.row + r < block.length);
      if (!REVERSE) {
        const float2 z = unpack<T>(rounded);
        st_global_b32_if(p.y_rest + start + r * step, pack<T>(y.x - z.x, y.y - z.y), chunk + u.row + r < block.length);
      }
    }
  }

  // The gates' gradient, summed up within a thread's eight tokens, takes y's place. `finished`: waits for y, if another
  // thread computes it.
  template <typename F>
  DEVICE void sum_dgate(int chunk, F finished) const {
    const Unit u(block.tid);
    if (!u.exists) return;
    u32 k[8], dq[8], dq_rest[8];  // first of all: each load would be waited for at the next asm volatile
    const i64 first = element(chunk + u.row, u.column), step = row_step(), k_step = block.step(p.strides_k.token);
    const u16* k_first =
        block.start(p.k, p.strides_k) + block.token(chunk + u.row) * p.strides_k.token + slice() + u.column;
    const int most = block.length - 1 - chunk - u.row;  // of rows past the end q and y are 0
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const int on = min(r, most);
      k[r] = *reinterpret_cast<const u32*>(k_first + on * k_step);
      dq[r] = *reinterpret_cast<const u32*>(p.dq + first + on * step);
      dq_rest[r] = *reinterpret_cast<const u32*>(p.dq_rest + first + on * step);
    }
    float2 of_q[8], sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const float2 q = unpack<T>(ld_shared_b32(c_tile(chunk) + Tile<M>::at(u.row, u.column) + r * Tile<M>::ROW));
      of_q[r] = q * (unpack<T>(dq[r]) + unpack<T>(dq_rest[r]));
    }
    finished();
    float* y = floats(Shared::Y) + u.row * Y_ROW + u.column;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const float2 dk = ld_shared_float2(y + r * Y_ROW);
      sum = sum + of_q[r] + unpack<T>(k[r]) * dk * -1.f;
      *reinterpret_cast<float2*>(y + r * Y_ROW) = sum;
    }
    *reinterpret_cast<float2*>(floats(Shared::TOTALS) + (2 * u.sub + u.upper) * M + u.column) = sum;
  }

  // The gates' gradient Σ_{i≥t} (q_i ⊙ dq_i − k_i ⊙ dk_i) of a chunk; `later`: of all tokens after it.
  DEVICE void store_dgate(int chunk, float2& later) const {
    const Unit u(block.tid);
    if (!u.exists) return;
    const float* dG = floats(Shared::Y) + u.row * Y_ROW + u.column;
    float2 before = later;
    const i64 start = element(chunk + u.row, u.column), step = row_step();
#pragma unroll
    for (int i = 0; i < 2 * CHANNEL_SUBS; i++) {
      const float2 total = ld_shared_float2(floats(Shared::TOTALS) + i * M + u.column);
      later = later + total;
      if (i < 2 * u.sub + u.upper) before = before + total;
    }
#pragma unroll
    for (int r = 0; r < 8; r++) {
      if (chunk + u.row + r >= block.length) break;
      store_gate(start + r * step, before + ld_shared_float2(dG + r * Y_ROW));
    }
  }
  DEVICE void store_gate(i64 at, float2 x) const;

  // The gradient of the gates through the state at the segment's end: Σ S ⊙ dS along a row, S the forward scan's.
  DEVICE float2 through_state() const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
    const float* S = block.is_first()
                         ? p.S + block.bh() * (i64(p.channels) * BD)
                         : p.ends + (block.bh() * (p.segments - 1) + block.segment) * (i64(p.channels) * BD);
    const float* from = S + (slice() + 16 * warp() + g) * BD + group() * PART + 2 * t;
    float sums[2] = {};
#pragma unroll
    for (int n = 0; n < PART / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = *reinterpret_cast<const float2*>(from + 8 * i * BD + 8 * n);
        sums[i] += state[n][2 * i] * x.x + state[n][2 * i + 1] * x.y;
      }
    float* parts = floats(Shared::TOTALS) + 2 * CHANNEL_SUBS * M;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = sum_lanes<4>(sums[i]);
      if (t == 0) parts[group() * M + 16 * warp() + g + 8 * i] = sum;
    }
    __syncthreads();
    const Unit u(block.tid);
    float2 result = make_float2(0.f, 0.f);
    if (!u.exists) return result;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) result = result + ld_shared_float2(parts + i * M + u.column);
    return result * p.scale * decay(unpack_gates<G>(gate_tile(0) + Gates::at(0, u.column)));
  }

  // This lane's part of a state [Dk, Dv].
  DEVICE void load_state() {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
    const float* S = block.state_before(i64(p.channels) * BD);
    if (!S) return;
    const float* from = S + (slice() + 16 * warp() + g) * BD + group() * PART + 2 * t;
#pragma unroll
    for (int n = 0; n < PART / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = *reinterpret_cast<const float2*>(from + 8 * i * BD + 8 * n);
        state[n][2 * i] = x.x, state[n][2 * i + 1] = x.y;
      }
  }

  DEVICE void run() {
    if constexpr (ROLES)
      run_by_roles();
    else
      run_together();
  }

  // The groups that weigh c, compute a·b, and sum up the gates' gradient; named barriers.
  static constexpr int WEIGHING = GROUPS > 2 ? 2 : 1, SCORING = 1, SUMMING = GROUPS > 3 ? 3 : 0;
  static constexpr int FINISHED = 1, SUMMED = 2;

  DEVICE void run_by_roles() {
#pragma unroll 1
    for (int row = 0; row < 2 * CHANNEL_CHUNK; row += CHANNEL_CHUNK) {
      if (row < block.length) load(row);
      copy_async_commit();
    }
    load_state();
    copy_async_wait<1>();
    __syncthreads();
    float2 later = make_float2(0.f, 0.f);
    if (REVERSE) later = through_state();
    weigh_and_score(0);
#pragma unroll 1
    for (int row = 0; row < block.length; row += CHANNEL_CHUNK) {
      const int next = row + CHANNEL_CHUNK;
      __syncthreads();
      block.recompute_addresses();
#pragma unroll 1
      for (int sub = 0; sub < CHANNEL_SUBS; sub++) advance(row, sub);
      copy_async_wait<0>();
      __syncthreads();
      block.recompute_addresses();
      if (next + CHANNEL_CHUNK < block.length) load(next + CHANNEL_CHUNK);
      copy_async_commit();
      block.recompute_addresses();
      if (group() == 0) finish(row);
      block.recompute_addresses();
      if (REVERSE) add_dgate(row, later);
      if (next < block.length) weigh_and_score(next);
      block.recompute_addresses();
    }
  }
  DEVICE void weigh_and_score(int row) {
    block.recompute_addresses();
    if (group() == WEIGHING) weigh(row);
    block.recompute_addresses();
    if (group() == SCORING) scores(row, warp(), M / 16);
  }
  // The first group's y goes to the one that sums up, if it is another: their threads wait for each other.
  DEVICE void add_dgate(int row, float2& later) {
    auto finished = [] {
      if (SUMMING != 0) named_barrier_sync(FINISHED, 4 * M);
    };
    if (SUMMING != 0 && group() == 0) finished();
    if (group() != SUMMING) return;
    sum_dgate(row, finished);
    named_barrier_sync(SUMMED, 2 * M);
    store_dgate(row, later);
  }

  DEVICE void run_together() {
    load(0);
    copy_async_commit();
    load_state();
    float2 later = make_float2(0.f, 0.f);
    int row = 0;
#pragma unroll 1
    for (; row < block.length; row += CHANNEL_CHUNK) {
      copy_async_wait<0>();
      __syncthreads();
      if (REVERSE) {
        if (row)
          store_dgate(row - CHANNEL_CHUNK, later);
        else
          later = through_state();
      }
      block.recompute_addresses();
      weigh(row);
      block.recompute_addresses();
      scores(row, block.tid / 32, WARPS);
      __syncthreads();
      block.recompute_addresses();
#pragma unroll 1
      for (int sub = 0; sub < CHANNEL_SUBS; sub++) advance(row, sub);
      __syncthreads();
      block.recompute_addresses();
      if (row + CHANNEL_CHUNK < block.length) load(row + CHANNEL_CHUNK);
      copy_async_commit();
      block.recompute_addresses();
      finish(row);
      block.recompute_addresses();
      if (REVERSE) sum_dgate(row, [] {});
    }
    if (REVERSE) {
      __syncthreads();
      store_dgate(row - CHANNEL_CHUNK, later);
    }
  }
};

template <typename T, typename G, int BD, int M, int GROUPS, bool REVERSE, bool ROLES>
DEVICE void RightScan<T, G, BD, M, GROUPS, REVERSE, ROLES>::store_gate(i64 at, float2 x) const {
  if constexpr (Bytes<G>::N == 4)
    *reinterpret_cast<float2*>(reinterpret_cast<float*>(p.dgate) + at) = x;
  else
    *reinterpret_cast<u32*>(reinterpret_cast<u16*>(p.dgate) + at) = pack<G>(x.x, x.y);
}
