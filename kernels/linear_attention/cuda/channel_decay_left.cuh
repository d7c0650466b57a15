// The scan with decays on the channels of a and b: the forward pass, dv in reverse, and the states before segments.
//
// In blocks of 16 tokens, with α the decays:
//   yᵀ = Sᵀ ãᵀ + cᵀ Aᵀ,  Sᵀ ← Sᵀ diag(α_0 ⋯ α_15) + cᵀ b̃,   ã_i = a_i α_0 ⋯ α_i,  b̃_j = b_j α_{j+1} ⋯ α_15.
// A_ij = Σ a_i b_j α_{j+1} ⋯ α_i is computed on tensor cores, where the paths of i and j to the root of a binary tree
// part: for m = 8, 4, 2, 1, between the upper and the lower half of each 2m tokens. Row r of level m's tile is
// a_r α_h ⋯ α_r in an upper half, which begins at h, and b_r α_{r+1} ⋯ α_{h−1} in a lower one. So all factors are
// products of decays: never above 1, without cumulative sums, and exact where a decay is 0.
//
// A warp owns 16 of the slice's channels of c and y. Sᵀ is its accumulator and, rounded, the left operand of the first
// product. `STATES`: computes only what the segment adds to the state.
#pragma once
#include "channel_decay_params.cuh"

template <typename G, int BD, int M, bool STATES>
struct SharedLeft {  // byte offsets
  static constexpr int TILE = Tile<BD>::SIZE;
  static constexpr int GATES = 0;
  static constexpr int B = GATES + Tile<BD, Bytes<G>::N>::SIZE;
  static constexpr int C = B + TILE;                             // two stages; y takes c's place
  static constexpr int B_TO_END = C + 2 * Tile<M>::SIZE;         // b̃
  static constexpr int WHOLE = B_TO_END + TILE;                  // the decay of each block of 16 tokens
  static constexpr int A = WHOLE + (CHANNEL_SUBS + 1) * BD * 4;  // and of all before
  static constexpr int A_FROM_START = A + TILE;                  // ã
  static constexpr int LEVELS = A_FROM_START + TILE;             // m = 8, 4, 2, 1
  static constexpr int SCORES = LEVELS + 4 * TILE;               // A
  static constexpr int BYTES = STATES ? A : SCORES + CHANNEL_SUBS * 16 * 48;
};

template <typename T, typename G, int BD, int M, bool REVERSE, bool STATES>
struct LeftScan {
  using Shared = SharedLeft<G, BD, M, STATES>;
  using Gates = Tile<BD, Bytes<G>::N>;
  static constexpr int WARPS = M / 16, THREADS = 32 * WARPS;
  static constexpr int SCORE_ROW = 48;  // bytes

  const ChannelParams& p;
  ChannelBlock<T, G, REVERSE> block;
  char* smem;
  float state[BD / 8][4];  // Sᵀ, 8 columns each

  DEVICE LeftScan(const ChannelParams& params, char* shared)
      : p(params), block(params, shared, STATES && REVERSE ? 1 : 0), smem(shared) {}
  DEVICE int warp() const { return block.tid / 32; }
  DEVICE int slice() const { return blockIdx.z * M; }
  DEVICE float* whole(int sub) const { return reinterpret_cast<float*>(smem + Shared::WHOLE) + sub * BD; }

  DEVICE void load(int row) const {
    block.template load_gates<BD, THREADS>(block.base + Shared::GATES, 0, row);
    block.template load<BD, THREADS>(block.base + Shared::B, p.b, p.strides_b, row);
    if (!STATES) block.template load<BD, THREADS>(block.base + Shared::A, p.a, p.strides_a, row);
    u32 stage = row / CHANNEL_CHUNK % 2;
    block.template load<M, THREADS>(block.base + Shared::C + stage * Tile<M>::SIZE, p.c + slice(), p.strides_c, row);
  }

  // A thread has two channels of half a block of 16 tokens; the lane 16 further has the other half.
  DEVICE void weigh() const {
#pragma unroll
    for (int unit = block.tid; unit < CHANNEL_SUBS * BD; unit += THREADS) {
      const int sub = unit / BD, column = unit % BD / 32 * 32 + unit % 16 * 2;
      const bool upper = unit & 16;
      const int row = 16 * sub + 8 * upper;
      const u32 at = block.base + Tile<BD>::at(row, column),
                gates = block.base + Shared::GATES + Gates::at(row, column);
      float2 alpha[8], half = make_float2(1.f, 1.f);
#pragma unroll
      for (int r = 0; r < 8; r++) alpha[r] = decay(unpack_gates<G>(gates + r * Gates::ROW)), half = half * alpha[r];
      const float2 other = swap_halves(half), one = make_float2(1.f, 1.f);
      if (!upper) *reinterpret_cast<float2*>(whole(sub) + column) = half * other;
      auto store = [&](int offset, int r, float2 x) {
        st_shared_b32(at + offset + r * Tile<BD>::ROW, pack<T>(x.x, x.y));
      };
      auto level = [&](int m) { return Shared::LEVELS + (m == 8 ? 0 : m == 4 ? 1 : m == 2 ? 2 : 3) * Shared::TILE; };
      float2 to_end = one, to_half[2] = {one, one};
      const float2 after = upper ? one : other;
#pragma unroll
      for (int r = 7; r >= 0; r--) {
        const float2 b = unpack<T>(ld_shared_b32(at + Shared::B + r * Tile<BD>::ROW));
        store(Shared::B_TO_END, r, b * (to_end * after));
        if (!STATES) {
          if (!upper) store(level(8), r, b * to_end);
          if (r < 4) store(level(4), r, b * to_half[0]), to_half[0] = to_half[0] * alpha[r];
          if (r % 4 == 1) store(level(2), r, b);
          if (r % 4 == 0) store(level(2), r, b * alpha[r + 1]);
          if (r % 2 == 0) store(level(1), r, b);
        }
        to_end = to_end * alpha[r];
      }
      if (STATES) continue;
      float2 from_start = one, from_half = one;
      const float2 before = upper ? other : one;
#pragma unroll
      for (int r = 0; r < 8; r++) {
        const float2 a = unpack<T>(ld_shared_b32(at + Shared::A + r * Tile<BD>::ROW));
        from_start = from_start * alpha[r];
        store(Shared::A_FROM_START, r, a * (from_start * before));
        if (upper) store(level(8), r, a * from_start);
        if (r >= 4) from_half = from_half * alpha[r], store(level(4), r, a * from_half);
        if (r % 4 == 2) store(level(2), r, a * alpha[r]);
        if (r % 4 == 3) store(level(2), r, a * (alpha[r - 1] * alpha[r]));
        if (r % 2 == 1) store(level(1), r, a * alpha[r]);
      }
    }
  }

  // Part 0: the diagonal and level 8; parts 1, 2, 3: levels 4, 2, 1, within eight tokens.
  DEVICE void scores() const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int task = warp(); task < 4 * CHANNEL_SUBS; task += WARPS) {
      const int sub = task / 4, part = task % 4, m = 8 >> part;
      u16* to = reinterpret_cast<u16*>(smem + Shared::SCORES + sub * 16 * SCORE_ROW);
      auto store = [&](int i, int j, float x) { to[i * (SCORE_ROW / 2) + j] = u16(pack<T>(x, 0.f)); };
      const u32 tile =
          fragment_lanes<BD>(block.base + Shared::LEVELS + part * Shared::TILE, block.tid) + fragment_step<BD>(sub, 0);
      float first[4] = {}, second[4] = {};
      if (part == 0) {
        const u32 a_tile = tile + Shared::A - Shared::LEVELS, b_tile = tile + Shared::B - Shared::LEVELS;
        float eight[4] = {};
#pragma unroll 2
        for (int k = 0; k < BD / 16; k++) {
          u32 x[4], a[4], b[4];
          ldmatrix(x, tile + 32 * k), ldmatrix(a, a_tile + 32 * k), ldmatrix(b, b_tile + 32 * k);
          mma<T>(eight, x[0], x[1], x[2], x[3], x[0], x[2]);
          mma<T>(first, a[0], a[1], a[2], a[3], b[0], b[2]);
          mma<T>(second, a[0], a[1], a[2], a[3], b[1], b[3]);
        }
        store(8 + g, 2 * t, eight[2]), store(8 + g, 2 * t + 1, eight[3]);
        if (g / 2 == t) store(g, g, g % 2 ? first[1] : first[0]), store(8 + g, 8 + g, g % 2 ? second[3] : second[2]);
      } else {
#pragma unroll 2
        for (int k = 0; k < BD / 16; k++) {
          u32 x[4];
          ldmatrix(x, tile + 32 * k);
          mma<T>(first, x[0], x[1], x[2], x[3], x[0], x[2]);
          mma<T>(second, x[0], x[1], x[2], x[3], x[1], x[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int j = 2 * t + i, apart = g ^ j;
          if (apart >= m && apart < 2 * m && (g & m)) store(g, j, first[i]), store(8 + g, 8 + j, second[2 + i]);
        }
      }
    }
  }

  // One block of 16 tokens; y takes the place of c.
  DEVICE void advance(int sub, u32 c_tile) {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
    u32 c[4];
    const u32 own = c_tile + Tile<M>::at(16 * sub + lane % 16, 16 * warp() + lane / 16 * 8);
    ldmatrix_trans(c, own);
    if (!STATES) {
      float y[2][4] = {};
      const u32 a_tile = fragment_lanes<BD>(block.base + Shared::A_FROM_START, block.tid) + fragment_step<BD>(sub, 0);
      add_state_product<T>(y, state, a_tile);
      u32 w[4];
      ldmatrix(w, block.base + Shared::SCORES + (16 * sub + lane % 16) * SCORE_ROW + lane / 16 * 16);
      mma<T>(y[0], c[0], c[2], c[1], c[3], w[0], w[2]);
      mma<T>(y[1], c[0], c[2], c[1], c[3], w[1], w[3]);
      // Lanes of neighbouring channels exchange a token, so that each has two channels of one.
      const int odd = g % 2;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float lo = y[i / 2][i % 2 * 2] * p.scale, hi = y[i / 2][i % 2 * 2 + 1] * p.scale;
        float got = __shfl_xor_sync(FULL_WARP, odd ? lo : hi, 4);
        st_shared_b32(c_tile + Tile<M>::at(16 * sub + i / 2 * 8 + 2 * t + odd, 16 * warp() + i % 2 * 8 + g - odd),
                      odd ? pack<T>(got, hi) : pack<T>(lo, got));
      }
    }
    const u32 b_tile = fragment_lanes<BD>(block.base + Shared::B_TO_END, block.tid) + fragment_step<BD>(sub, 0);
#pragma unroll
    for (int k = 0; k < BD / 16; k++) {
      u32 b[4];
      ldmatrix_trans(b, b_tile + 32 * k);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float (&s)[4] = state[2 * k + i];
        const float2 w = ld_shared_float2(whole(sub) + 16 * k + 8 * i + 2 * t);
        s[0] *= w.x, s[1] *= w.y, s[2] *= w.x, s[3] *= w.y;
        mma<T>(s, c[0], c[2], c[1], c[3], b[2 * i], b[2 * i + 1]);
      }
    }
  }

  DEVICE void store_y(int row) const {
    const u32 tile = block.base + Shared::C + row / CHANNEL_CHUNK % 2 * Tile<M>::SIZE;
    const int V = p.channels;
#pragma unroll
    for (int i = block.tid; i < CHANNEL_CHUNK * M / 8; i += THREADS) {
      const int r = i / (M / 8), column = i % (M / 8) * 8;
      if (row + r >= block.length) continue;
      const i64 at = (i64(block.batch) * p.N + block.token(row + r)) * p.H + block.head;
      st_global_v4(p.y + at * V + slice() + column, ld_shared_v4(tile + Tile<M>::at(r, column)));
    }
  }

  // This lane's part of a state [Dk, Dv], 2 by 2 of its numbers at a time.
  template <typename F>
  DEVICE void each_of_state(float* S, F visit) {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4, V = p.channels;
    float* from = S + 2 * t * V + slice() + 16 * warp() + g;
#pragma unroll
    for (int n = 0; n < BD / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) visit(state[n][i], from[(8 * n + i % 2) * V + i / 2 * 8]);
  }
  DEVICE float* state_of(float* states, int segment) const {
    return states + (block.bh() * p.segments + segment) * (i64(BD) * p.channels);
  }

  DEVICE void run() {
    if constexpr (STATES) {
#pragma unroll
      for (int n = 0; n < BD / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) state[n][i] = 0.f;
    } else {
      each_of_state(state_of(p.before, block.segment), [](float& s, float& S) { s = S; });
    }
    if (!STATES)  // A is 0 above the diagonal
      for (int i = block.tid; i < CHANNEL_SUBS * 16 * SCORE_ROW / 4; i += THREADS)
        st_shared_b32(block.base + Shared::SCORES + 4 * i, 0);
    if (STATES)
      for (int i = block.tid; i < BD; i += THREADS) whole(CHANNEL_SUBS)[i] = 1.f;
    load(0);
    copy_async_commit();
#pragma unroll 1
    for (int row = 0; row < block.length; row += CHANNEL_CHUNK) {
      copy_async_wait<0>();
      __syncthreads();
      if (!STATES && row) store_y(row - CHANNEL_CHUNK);
      block.recompute_addresses();
      weigh();
      __syncthreads();
      block.recompute_addresses();
      if (!STATES) {
        scores();
        __syncthreads();
      } else {
        for (int i = block.tid; i < BD; i += THREADS) whole(CHANNEL_SUBS)[i] *= whole(0)[i] * whole(1)[i];
      }
      if (row + CHANNEL_CHUNK < block.length) load(row + CHANNEL_CHUNK);
      copy_async_commit();
      block.recompute_addresses();
      const u32 c_tile = block.base + Shared::C + row / CHANNEL_CHUNK % 2 * Tile<M>::SIZE;
#pragma unroll 1
      for (int sub = 0; sub < CHANNEL_SUBS; sub++) advance(sub, c_tile);
    }
    if (STATES) {
      each_of_state(state_of(p.before, block.segment + (REVERSE ? -1 : 1)), [](float& s, float& S) { S = s; });
      __syncthreads();
      float* to = p.decays + (block.bh() * p.segments + block.segment) * BD;
      if (blockIdx.z == 0)
        for (int i = block.tid; i < BD; i += THREADS) to[i] = whole(CHANNEL_SUBS)[i];
    } else {
      __syncthreads();
      store_y((block.length - 1) / CHANNEL_CHUNK * CHANNEL_CHUNK);
      if (p.final && block.is_last())
        each_of_state(p.final + block.bh() * (i64(BD) * p.channels), [](float& s, float& S) { S = s; });
    }
  }
};
