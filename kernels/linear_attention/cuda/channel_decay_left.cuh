// The scan with decays on the channels of a and b: the forward pass, and in reverse dv.
//
// In blocks of 16 tokens, with α the decays:
//   yᵀ = Sᵀ ãᵀ + cᵀ Aᵀ,  Sᵀ ← Sᵀ diag(α_0 ⋯ α_15) + cᵀ b̃,   ã_i = a_i α_0 ⋯ α_i,  b̃_j = b_j α_{j+1} ⋯ α_15.
// A_ij = Σ a_i b_j α_{j+1} ⋯ α_i is computed on tensor cores, where the paths of i and j to the root of a binary tree
// part: for m = 8, 4, 2, 1, between the upper and the lower half of each 2m tokens. Row r of level m's tile is
// a_r α_h ⋯ α_r in an upper half, which begins at h, and b_r α_{r+1} ⋯ α_{h−1} in a lower one. So all factors are
// products of decays: never above 1, without cumulative sums, and exact where a decay is 0.
//
// A warp owns 16 of the slice's channels of c and y. Sᵀ is its accumulator and, rounded, the left operand of the first
// product. The decay of the 16 tokens is on its columns.
#pragma once
#include "channel_decay_params.cuh"

template <typename G, int BD, int M>
struct SharedLeft {  // byte offsets
  static constexpr int TILE = Tile<BD>::SIZE;
  static constexpr int GATES = 0;
  static constexpr int B = GATES + Tile<BD, Bytes<G>::N>::SIZE;
  static constexpr int C = B + TILE;                      // two stages; y takes c's place
  static constexpr int B_TO_END = C + 2 * Tile<M>::SIZE;  // b̃
  static constexpr int WHOLE = B_TO_END + TILE;           // the decay of each 16 tokens, see whole_at
  static constexpr int A = WHOLE + CHANNEL_SUBS * BD * 4;
  static constexpr int A_FROM_START = A + TILE;       // ã
  static constexpr int LEVELS = A_FROM_START + TILE;  // m = 8, 4, 2, 1
  static constexpr int SCORES = LEVELS + 4 * TILE;    // A
  static constexpr int BYTES = SCORES + CHANNEL_SUBS * 16 * 48;
};

// A warp's 16 channels of c and y: Sᵀ in its accumulators; y, which takes c's place. PAIRED: two warps have 32 channels, and
// each of them one half of Sᵀ's columns, of its own 16 channels and then of the other's.
template <typename T, typename G, int BD, int M, bool REVERSE, bool PAIRED = false>
struct LeftState {
  static constexpr int WARPS = M / 16, THREADS = 32 * WARPS;

  const ChannelParams& p;
  ChannelBlock<T, G, REVERSE> block;
  float state[BD / 8][4] = {};  // Sᵀ, 8 columns each

  DEVICE LeftState(const ChannelParams& params, const char* shared, int first_segment)
      : p(params), block(params, shared, first_segment) {}
  DEVICE int warp() const { return block.tid / 32; }
  DEVICE int slice() const { return blockIdx.x * M; }

  // y, by stmatrix where there is one; elsewhere lanes of neighbouring channels exchange a token, so that each has two
  // channels of one.
  DEVICE void put_y(const float (&y)[2][4], int sub, u32 c_tile, u32 own) const {
#if __CUDA_ARCH__ >= 900
    u32 rounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) rounded[i] = pack<T>(y[i / 2][i % 2 * 2] * p.scale, y[i / 2][i % 2 * 2 + 1] * p.scale);
    stmatrix_trans(own, rounded[0], rounded[1], rounded[2], rounded[3]);
#else
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4, odd = g % 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float lo = y[i / 2][i % 2 * 2] * p.scale, hi = y[i / 2][i % 2 * 2 + 1] * p.scale;
      float got = __shfl_xor_sync(FULL_WARP, odd ? lo : hi, 4);
      st_shared_b32(c_tile + Tile<M>::at(16 * sub + i / 2 * 8 + 2 * t + odd, 16 * warp() + i % 2 * 8 + g - odd),
                    odd ? pack<T>(got, hi) : pack<T>(lo, got));
    }
#endif
  }

  DEVICE void store_y(int row, u32 c_tile) const {
    constexpr int PIECES = M / 8, ROWS = THREADS / PIECES;
    const int r0 = u32(block.tid) / PIECES, column = u32(block.tid) % PIECES * 8, V = p.channels;
    const u32 tile = c_tile + Tile<M>::at(r0, column);
    const i64 token = (i64(block.batch) * p.N + block.token(row + r0)) * p.H + block.head;
    const i64 at = token * V + slice() + column, step = block.step(i64(p.H) * V);
#pragma unroll
    for (int r = 0; r < CHANNEL_CHUNK; r += ROWS)  // ROWS is 16: at() is a sum
      if (row + r0 + r < block.length) st_global_v4(p.y + at + r * step, ld_shared_v4(tile + Tile<M>::at(r, 0)));
  }

  // This lane's part of a state [Dk, Dv], 2 by 2 of its numbers at a time.
  template <typename N, typename F>
  DEVICE void each_of_state(N* S, F visit) {
    constexpr int COLUMNS = PAIRED ? BD / 2 : BD;
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4, V = p.channels;
    N* from = S + (2 * t + (PAIRED ? warp() % 2 * COLUMNS : 0)) * V + slice() + g;
#pragma unroll
    for (int n = 0; n < BD / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        visit(state[n][i], from[(8 * n % COLUMNS + i % 2) * V + (warp() ^ 8 * n / COLUMNS) * 16 + i / 2 * 8]);
  }
  DEVICE void store_state(float* S) {
    each_of_state(S, [](float s, float& to) { to = s; });
  }

  // Scans a run of segments; the states behind them are stored for the scans of the right form, but those that `prefix`
  // has stored.
  template <typename F>
  DEVICE void each_segment(F scan) {
    const i64 numbers = i64(BD) * p.channels;
    if (const float* S = block.state_before(numbers)) each_of_state(S, [](float& s, float from) { s = from; });
#pragma unroll 1
    for (int i = 1;; i++) {
      scan();
      if (block.is_last() || (i == p.run_len && !block.ends_part())) break;
      store_state(p.states + block.state_after() * numbers);
      if (block.ends_part()) return;
      __syncthreads();
      block.enter_next();
    }
    if (p.final && block.is_last()) store_state(p.final + block.bh() * numbers);
  }
};

template <typename T, typename G, int BD, int M, bool REVERSE>
struct LeftScan : LeftState<T, G, BD, M, REVERSE> {
  using Shared = SharedLeft<G, BD, M>;
  using State = LeftState<T, G, BD, M, REVERSE>;
  using Gates = Tile<BD, Bytes<G>::N>;
  using State::p, State::block, State::state, State::WARPS, State::THREADS, State::warp, State::slice;
  static constexpr int SCORE_ROW = 48;  // bytes

  char* smem;

  DEVICE LeftScan(const ChannelParams& params, char* shared) : LeftScan(params, shared, blockIdx.z * params.run_len) {}
  DEVICE LeftScan(const ChannelParams& params, char* shared, int first_segment)
      : State(params, shared, first_segment), smem(shared) {}
  DEVICE u32 c_tile(int row) const { return block.base + Shared::C + row / CHANNEL_CHUNK % 2 * Tile<M>::SIZE; }
  // In the order of the accumulators' columns: of each 16, the four that a lane has lie together. `column` is even.
  static DEVICE constexpr int whole_at(int column) { return column / 16 * 16 + column % 8 * 2 + column / 8 % 2 * 2; }
  DEVICE float* whole(int sub) const { return reinterpret_cast<float*>(smem + Shared::WHOLE) + sub * BD; }

  DEVICE void load(int row) const {
    block.template load_gates<BD, THREADS>(block.base + Shared::GATES, 0, row);
    block.template load<BD, THREADS>(block.base + Shared::B, p.b, p.strides_b, row);
    block.template load<BD, THREADS>(block.base + Shared::A, p.a, p.strides_a, row);
    block.template load<M, THREADS>(c_tile(row), p.c + slice(), p.strides_c, row);
  }

  // What is computed of the decays. A thread has two channels of half a block of 16 tokens; the lane 16 further has the
  // other half. Level 1's tile has only the rows of upper halves: those of lower ones would be b's own.
  DEVICE void weigh() const {
    constexpr int UNITS = CHANNEL_SUBS * BD;
#pragma unroll
    for (int n = 0; n < (UNITS + THREADS - 1) / THREADS; n++) {
      const u32 unit = u32(block.tid) + n * THREADS;
      if (UNITS % THREADS && unit >= UNITS) break;
      weigh(unit / BD, unit % BD / 32 * 32 + unit % 16 * 2, unit & 16);
    }
  }
  DEVICE void weigh(int sub, int column, bool upper) const {
    const int row = 16 * sub + 8 * upper;
    const u32 at = block.base + Tile<BD>::at(row, column), gates = block.base + Shared::GATES + Gates::at(row, column);
    const float2 one = make_float2(1.f, 1.f);
    float2 alpha[8], half = one;
    u32 b[8];
#pragma unroll
    for (int r = 0; r < 8; r++) alpha[r] = unpack_gates<G>(gates + r * Gates::ROW);
#pragma unroll
    for (int r = 7; r >= 0; r--) b[r] = ld_shared_b32(at + Shared::B + r * Tile<BD>::ROW);
#pragma unroll
    for (int r = 0; r < 8; r++) alpha[r] = decay(alpha[r]), half = half * alpha[r];
    const float2 other = swap_halves(half);
    if (!upper) *reinterpret_cast<float2*>(whole(sub) + whole_at(column)) = half * other;
    weigh_b(at, b, alpha, upper ? one : other);
    weigh_a(at, b, alpha, upper ? other : one, upper);
  }

  static DEVICE constexpr int level(int m) {
    return Shared::LEVELS + (m == 8 ? 0 : m == 4 ? 1 : m == 2 ? 2 : 3) * Shared::TILE;
  }
  static DEVICE void store(u32 at, int r, u32 x) { st_shared_b32(at + r * Tile<BD>::ROW, x); }
  static DEVICE u32 rounded(float2 x) { return pack<T>(x.x, x.y); }

  // Eight tokens of b, then multiplied by the decays up to the eighth; `after`: those of the tokens after these in 16.
  static DEVICE void weigh_b(u32 at, u32 (&b)[8], const float2 (&alpha)[8], float2 after) {
    float2 to_end = make_float2(1.f, 1.f), to_half = to_end;  // to_half: to the fourth token
#pragma unroll
    for (int r = 7; r >= 0; r--) {
      const float2 x = unpack<T>(b[r]), end = x * to_end;
      store(at + Shared::B_TO_END, r, rounded(end * after));
      if (r < 4) store(at + level(4), r, r == 3 ? b[r] : rounded(x * to_half)), to_half = to_half * alpha[r];
      if (r % 4 == 1) store(at + level(2), r, b[r]);
      if (r % 4 == 0) store(at + level(2), r, rounded(x * alpha[r + 1]));
      b[r] = rounded(end);
      to_end = to_end * alpha[r];
    }
  }
  // Eight tokens of a, and all rows of level 8; `before`: the decays of the tokens before these in 16.
  static DEVICE void weigh_a(u32 at, const u32 (&b)[8], const float2 (&alpha)[8], float2 before, bool upper) {
    u32 a[8];
#pragma unroll
    for (int r = 0; r < 8; r++) a[r] = ld_shared_b32(at + Shared::A + r * Tile<BD>::ROW);
    float2 from_start = make_float2(1.f, 1.f), from_half = from_start;  // from_half: from the fifth token
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const float2 x = unpack<T>(a[r]);
      from_start = from_start * alpha[r];
      const float2 start = x * from_start;
      store(at + Shared::A_FROM_START, r, rounded(start * before));
      store(at + level(8), r, upper ? rounded(start) : b[r]);
      if (r >= 4) from_half = from_half * alpha[r], store(at + level(4), r, rounded(x * from_half));
      const u32 own = rounded(x * alpha[r]);
      if (r % 4 == 2) store(at + level(2), r, own);
      if (r % 4 == 3) store(at + level(2), r, rounded(x * (alpha[r - 1] * alpha[r])));
      if (r % 2 == 1) store(at + level(1), r, own);
    }
  }

  // A task is a block of 16 tokens and a part of A. Part 0: the diagonal and level 1, both a product with b; parts 1, 2,
  // 3: levels 8, 4, 2.
  static constexpr int TASKS = 4 * CHANNEL_SUBS;
  DEVICE void scores() const {
#pragma unroll 1
    for (int task = warp(); task < TASKS; task += WARPS) {
      float first[4] = {}, second[4] = {};
      add_scores(task, first, second);
      store_scores(task, first, second);
    }
  }
  DEVICE void add_scores(int task, float (&first)[4], float (&second)[4]) const {
    const int part = task % 4;
    const u32 origin = block.base + fragment_step<BD>(task / 4, 0);
    if (part == 0)
      add_nearest(origin, first, second);
    else
      add_level(origin + Shared::LEVELS + (part - 1) * Shared::TILE, first, second);
  }
  DEVICE void store_scores(int task, const float (&first)[4], const float (&second)[4]) const {
    u16* to = reinterpret_cast<u16*>(smem + Shared::SCORES + task / 4 * 16 * SCORE_ROW);
    if (task % 4 == 0)
      store_nearest(to, first, second);
    else
      store_level(to, 16 >> task % 4, first, second);
  }
  DEVICE void clear_scores() const {  // A is 0 above the diagonal
    for (int i = block.tid; i < CHANNEL_SUBS * 16 * SCORE_ROW / 4; i += THREADS)
      st_shared_b32(block.base + Shared::SCORES + 4 * i, 0);
  }
  static DEVICE void store_score(u16* to, int i, int j, float x) { to[i * (SCORE_ROW / 2) + j] = u16(pack<T>(x, 0.f)); }

  // The diagonal and level 1. Only products of rows of one half, 0 … 7 or 8 … 15, are wanted: a product for each, whose
  // left operand's rows are eight of a and the same eight of level 1's tile (of the upper of each two).
  DEVICE void add_nearest(u32 origin, float (&first)[4], float (&second)[4]) const {
    const int lane = block.tid % 32;
    const u32 a = origin + Shared::A + Tile<BD>::at(lane % 8, lane / 16 * 8);
    const u32 ones = origin + level(1) + Tile<BD>::at(lane % 8 | 1, lane / 16 * 8);
    const u32 upper = lane & 8 ? ones : a, lower = (lane & 8 ? a : ones) + Tile<BD>::at(8, 0);
    const u32 right = fragment_lanes_crosswise<BD>(origin + Shared::B, block.tid);
#pragma unroll 4
    for (int k = 0; k < BD / 16; k++) {
      u32 x[4], y[4], b[4];
      ldmatrix(x, upper + 32 * k), ldmatrix(y, lower + 32 * k), ldmatrix(b, right + 32 * k);
      mma<T>(first, x[0], x[1], x[2], x[3], b[0], b[1]);
      mma<T>(second, y[0], y[1], y[2], y[3], b[2], b[3]);
    }
  }
  DEVICE void store_nearest(u16* to, const float (&first)[4], const float (&second)[4]) const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
    if (g / 2 == t) {
      store_score(to, g, g, g % 2 ? first[1] : first[0]), store_score(to, 8 + g, 8 + g, g % 2 ? second[3] : second[2]);
      if (g % 2) store_score(to, g, g - 1, first[2]), store_score(to, 8 + g, 7 + g, second[0]);
    }
  }

  // A level's tile times its own transpose: the columns 0 … 7 and 8 … 15, of which level 8 wants the first.
  DEVICE void add_level(u32 tile, float (&first)[4], float (&second)[4]) const {
    const u32 lanes = fragment_lanes<BD>(tile, block.tid);
#pragma unroll 4
    for (int k = 0; k < BD / 16; k++) {
      u32 x[4];
      ldmatrix(x, lanes + 32 * k);
      mma<T>(first, x[0], x[1], x[2], x[3], x[0], x[2]);
      mma<T>(second, x[0], x[1], x[2], x[3], x[1], x[3]);
    }
  }
  DEVICE void store_level(u16* to, int m, const float (&first)[4], const float (&second)[4]) const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int j = 2 * t + i, apart = g ^ j;
      if (m == 8)
        store_score(to, 8 + g, j, first[2 + i]);
      else if (apart >= m && apart < 2 * m && (g & m))
        store_score(to, g, j, first[i]), store_score(to, 8 + g, 8 + j, second[2 + i]);
    }
  }

  // One block of 16 tokens; y takes the place of c.
  DEVICE void advance(int sub, u32 c_tile) {
    const int lane = block.tid % 32;
    const u32 a_tile = fragment_lanes_crosswise<BD>(block.base + Shared::A_FROM_START, block.tid);
    float y[2][4] = {};
    u32 c[4], w[4];
    add_state_product<T>(y, state, a_tile + fragment_step<BD>(sub, 0));
    const u32 own = fragment_lanes_crosswise<M>(c_tile, block.tid) + fragment_step<M>(sub, warp());
    ldmatrix_trans(c, own);
    ldmatrix(w, block.base + Shared::SCORES + (16 * sub + lane % 16) * SCORE_ROW + lane / 16 * 16);
    mma<T>(y[0], c[0], c[1], c[2], c[3], w[0], w[2]);
    mma<T>(y[1], c[0], c[1], c[2], c[3], w[1], w[3]);
    State::put_y(y, sub, c_tile, own);
    update_state(c, sub);
  }

  DEVICE void update_state(const u32 (&c)[4], int sub) {
    const u32 b_tile = fragment_lanes<BD>(block.base + Shared::B_TO_END, block.tid) + fragment_step<BD>(sub, 0);
    const float* decays = whole(sub) + block.tid % 4 * 4;
#pragma unroll
    for (int k = 0; k < BD / 16; k++) {
      u32 b[4];
      ldmatrix_trans(b, b_tile + 32 * k);
      const float4 both = *reinterpret_cast<const float4*>(decays + 16 * k);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 w = i ? make_float2(both.z, both.w) : make_float2(both.x, both.y);
        float (&s)[4] = state[2 * k + i];
        s[0] *= w.x, s[1] *= w.y, s[2] *= w.x, s[3] *= w.y;
        mma<T>(s, c[0], c[1], c[2], c[3], b[2 * i], b[2 * i + 1]);
      }
    }
  }

  DEVICE void run() {
    clear_scores();
    State::each_segment([this] { scan_segment(); });
  }
  DEVICE void scan_segment() {
    load(0);
    copy_async_commit();
#pragma unroll 1
    for (int row = 0; row < block.length; row += CHANNEL_CHUNK) {
      copy_async_wait<0>();
      __syncthreads();
      if (row) State::store_y(row - CHANNEL_CHUNK, c_tile(row - CHANNEL_CHUNK));
      block.recompute_addresses();
      weigh();
      __syncthreads();
      block.recompute_addresses();
      scores();
      __syncthreads();
      if (row + CHANNEL_CHUNK < block.length) load(row + CHANNEL_CHUNK);
      copy_async_commit();
      block.recompute_addresses();
#pragma unroll 1
      for (int sub = 0; sub < CHANNEL_SUBS; sub++) advance(sub, c_tile(row));
    }
    __syncthreads();
    const int last = (block.length - 1) / CHANNEL_CHUNK * CHANNEL_CHUNK;
    State::store_y(last, c_tile(last));
  }
};
