// The scan from sm_80 on: four warps and mma.sync, all warps through the same phases.
//
// A warp has 16 rows of X and W and all columns, then D/4 columns of Y and all rows. It owns the same columns' rows of
// the state, which goes from accumulators to operands without leaving registers.
#pragma once
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "rope.cuh"
#include "segments.cuh"

template <int D, int CHUNK>
struct SharedSm80 {  // byte offsets; tiles first: swizzled, aligned to 1024
  static constexpr int TILE = CHUNK * D * 2;
  static constexpr int STAGE = 3 * TILE;
  static constexpr int SCORES = 2 * STAGE;                    // W
  static constexpr int STATS = SCORES + CHUNK * ROW_BYTES;    // two stages of three rows of CHUNK floats
  static constexpr int COEFFICIENTS = STATS + 6 * CHUNK * 4;  // σ τ ρ κ ζ (DQ: Σ q̂·y)
  // decayed to the chunk's end: σ in 16 bits, τ and ζ as two 16-bit numbers each
  static constexpr int END_COEFFICIENTS = COEFFICIENTS + 5 * CHUNK * 4;
  // Σ τ c and Σ ζ b; the latter also as three 16-bit numbers
  static constexpr int SUMS = END_COEFFICIENTS + 5 * CHUNK * 2;
  static constexpr int PARTIAL_DOTS = SUMS + 2 * D * 4 + 3 * D * 2;
  static constexpr int POWERS = PARTIAL_DOTS + 4 * CHUNK * 4;  // γ⁰ … γ^CHUNK; Σ γ^i of a chunk; unused; b
  static constexpr int HEADS = POWERS + (CHUNK + 4) * 4;
  static constexpr int BYTES = HEADS + 5 * 8;
  static_assert(BYTES == SHARED_BYTES, "KernelBuild.shared of launch.py");
};

// STATES: only what a segment adds to the state.
template <typename T, int D, int CHUNK, int MODE, bool DECAY, int ROPE, bool STATES>
struct ScanSm80 {
  using Traits = ModeTraits<T, MODE>;
  using States = SegmentStates<T, MODE, D>;
  using Shared = SharedSm80<D, CHUNK>;
  static_assert(SCAN_THREADS == THREADS, "KernelBuild.threads of launch.py");
  static constexpr int WARPS = THREADS / 32;
  static constexpr int PIECES = D / 8;             // 16-byte pieces of a row
  static constexpr int D_STEPS = D / 16;           // of a product along D
  static constexpr int CHUNK_STEPS = CHUNK / 16;   // and along a chunk
  static constexpr int Y_TILES = D / (8 * WARPS);  // 8-column tiles of y that a warp owns
  static constexpr int STATE_TILES = Y_TILES / 2;  // the same as 16-row tiles of the state
  static constexpr int SIXTEEN_ROWS = 16 * ROW_BYTES;

  const Params& p;
  char* smem;
  u32 base;
  int tid, warp, g, t;  // g, t: the lane's row and column pair in a tensor-core tile
  u32 lane;
  int begin;  // the segment's first position
  float log2_decay;
  float *sigma, *tau, *rho, *kappa, *zeta, *c_sum, *b_sum, *partial_dots, *powers;
  u16 *sigma_end, *tau_end, *zeta_end, *b_sum_parts;  // [CHUNK], [2][CHUNK], [2][CHUNK], [3][D]

  float state[STATE_TILES][D / 8][4];

  DEVICE ScanSm80(const Params& params, char* shared) : p(params), smem(shared) {
    tid = threadIdx.x;
    find_lane();
    base = shared_address(smem);
    int batch = bh() / p.H, h = bh() % p.H;
    if (tid < 5) {  // every tensor's row of this head at position 0: five pointers fewer in registers
      i64 last = Traits::REVERSE ? (p.N - 1) * p.strides[tid].token : 0;
      reinterpret_cast<u16**>(smem + Shared::HEADS)[tid] = head_of(p, tid, batch, h) + last;
    }
    __syncthreads();
    begin = segment() * p.segment_len;
    if (tid == 0)
      *reinterpret_cast<float*>(smem + Shared::POWERS + (CHUNK + 3) * 4) = p.coefficient ? p.coefficient[h] : p.b_value;
    log2_decay = DECAY ? p.log_decay[h] * LOG2_E : 0.f;
    sigma = reinterpret_cast<float*>(smem + Shared::COEFFICIENTS);
    tau = sigma + CHUNK, rho = tau + CHUNK, kappa = rho + CHUNK, zeta = kappa + CHUNK;
    sigma_end = reinterpret_cast<u16*>(smem + Shared::END_COEFFICIENTS);
    tau_end = sigma_end + CHUNK, zeta_end = tau_end + 2 * CHUNK;
    c_sum = reinterpret_cast<float*>(smem + Shared::SUMS), b_sum = c_sum + D;
    b_sum_parts = reinterpret_cast<u16*>(b_sum + D);
    partial_dots = reinterpret_cast<float*>(smem + Shared::PARTIAL_DOTS);
    powers = reinterpret_cast<float*>(smem + Shared::POWERS);
    if (DECAY)
      for (int i = tid; i <= CHUNK; i += THREADS) powers[i] = exp2f(log2_decay * i);
    if (DECAY && MODE == FWD && tid == 0) powers[CHUNK + 1] = count_tokens<DECAY>(log2_decay, CHUNK);
  }

  DEVICE void run() {
    if constexpr (STATES)
      run_states();
    else
      run_scan();
  }
  DEVICE void run_scan() {
    load<true>(0, begin);
    load_state();
    float n = MODE == FWD ? tokens_before<DECAY>(p, bh(), log2_decay, begin) : 0.f;
    int stage = 0;
    for (int position = begin; position < end(); position += CHUNK, stage ^= 1) {
      forget_addresses();
      int len = min(CHUNK, p.N - position);
      copy_async_wait<0>();
      __syncthreads();  // the tiles are there, and all threads are done with the other stage
      load<true>(stage ^ 1, position + CHUNK);
      rotate_tiles(stage, position, true);
      coefficients(stage, position);
      scores(stage, position, len, n);
      float y[CHUNK_STEPS][Y_TILES][4];
      forget_addresses();
      outputs(stage, position, y);
      forget_addresses();
      if constexpr (Traits::PROJECTS)
        project(stage, y, position);
      else
        scale(stage, y, position);
      forget_addresses();
      update<MODE == FWD>(stage, len);
      if (MODE == FWD) n = DECAY ? n * power(CHUNK) + powers[CHUNK + 1] : n + CHUNK;
    }
    __syncthreads();
    if (MODE != DQ && segment() == p.segments - 1 && p.final.S) store_state(States::final(p, bh(), log2_decay));
    if (MODE == DQ) store_db();
  }

  // What this segment adds to the state: FWD's S, Σ k̂, Σ v; DK's and DV's adjoints of them.
  DEVICE void run_states() {
    load<false>(0, begin);
    clear_state();
    int stage = 0;
    for (int position = begin; position < end(); position += CHUNK, stage ^= 1) {
      forget_addresses();
      copy_async_wait<0>();
      __syncthreads();
      load<false>(stage ^ 1, position + CHUNK);
      rotate_tiles(stage, position, false);
      coefficients(stage, position);
      if (MODE == FWD && warp < CHUNK_STEPS) {
        float lo[4] = {}, hi[4] = {};
#pragma unroll
        for (int k = 0; k < D_STEPS; k++) {
          u32 r[4];
          fragment_Bt(r, tile(stage, B), warp, k);
          add_squares(lo, hi, r[0], r[2], r[1], r[3]);
        }
        key_norms<false>(lo, hi, position);
      }
      __syncthreads();
      int len = min(CHUNK, p.N - position);
      coefficients_at_end(len);
      __syncthreads();
      forget_addresses();
      update<true>(stage, len);
    }
    __syncthreads();
    store_state(States::before_segment(p, bh(), segment() + 1));
  }

  // ----------------------------------------------------------------------------------------- where things are
  // Head, segment and its end are read again where they are needed: registers are short.
  DEVICE int bh() const {
    int r;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(r));
    return r;
  }
  DEVICE int segment() const {
    int r;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
    return r;
  }
  DEVICE int end() const { return min((segment() + 1) * p.segment_len, p.N); }
  DEVICE float coefficient() const {  // b
    return __uint_as_float(ld_shared_b32(base + Shared::POWERS + (CHUNK + 3) * 4));
  }
  // Row `position` of tensor a, b, c, unit or y (0 … 4).
  DEVICE u16* row(int tensor, int position) const { return Traits::row(p, base + Shared::HEADS, tensor, position); }
  DEVICE i64 stat(int position) const {  // of [BH, N]
    return i64((unsigned long long)u32(bh()) * u32(p.N)) + Traits::token(p, position);
  }
  DEVICE float power(int i) const { return DECAY ? powers[i] : 1.f; }
  DEVICE u32 tile(int stage, int which) const {
    // `states` reads no a: two stages of two tiles, where the first four are otherwise.
    return base + (STATES ? (2 * stage + which - 1) * Shared::TILE : stage * Shared::STAGE + which * Shared::TILE);
  }

  // Called between the phases of a chunk, which compute their addresses again.
  DEVICE void forget_addresses() {
    reload(tid, base);
    find_lane();
  }
  DEVICE void find_lane() { warp = u32(tid) / 32, lane = u32(tid) % 32, g = lane / 4, t = lane % 4; }

  // ------------------------------------------------------------------------------------------------- loading
  DEVICE void load_tile(u32 dst, int tensor, int position) const {
    constexpr int ROWS = THREADS / PIECES;
    int row = u32(tid) / PIECES, piece = u32(tid) % PIECES;
    const u16* src = this->row(tensor, position + row) + 8 * piece;
    i64 step = (Traits::REVERSE ? -ROWS : ROWS) * p.strides[tensor].token;
    dst += swizzled<CHUNK>(row, piece);  // ROWS is a multiple of 8: the same for every step
#pragma unroll
    for (int i = 0; i < CHUNK / ROWS; i++, src += step) {
      bool ok = position + row + i * ROWS < p.N;
      copy_async_16(dst + i * ROWS * ROW_BYTES, src, ok);
    }
  }
  template <bool WITH_A>
  DEVICE void load(int stage, int position) const {
    if (position < end()) {
      if (WITH_A) load_tile(tile(stage, A), A, position);
      load_tile(tile(stage, B), B, position);
      load_tile(tile(stage, C), C, position);
      load_stats(stage, position);
    }
    copy_async_commit();
  }
  // Of TokenStats: r, g, and e or (DV) unit.
  DEVICE void load_stats(int stage, int position) const {
    if (MODE == FWD || tid >= CHUNK) return;
    bool ok = position + tid < p.N;
    i64 i = stat(ok ? position + tid : 0);
    u32 dst = base + Shared::STATS + stage * 3 * CHUNK * 4 + tid * 4;
    copy_async_4(dst, (MODE == DQ ? p.rk : p.rq) + i, ok);
    copy_async_4(dst + CHUNK * 4, p.g + i, ok);
    copy_async_4(dst + 2 * CHUNK * 4, (MODE == DV ? p.rk : p.e) + i, ok);
  }

  DEVICE void rotate(u32 tile_address, int position) const {
    using R = Rope<T, MODE, ROPE>;
    for (int i = tid; i < CHUNK * ROPE / 8; i += THREADS) {
      auto item = R::template read<CHUNK>(smem + (tile_address - base), i);
      R::rotate(item, R::angles(p, position, i));
    }
  }
  DEVICE void rotate_tiles(int stage, int position, bool with_a) const {
    if (!ROPE) return;
    if (with_a && Traits::ROPE_A) rotate(tile(stage, A), position);
    if (Traits::ROPE_B) rotate(tile(stage, B), position);
    if (Traits::ROPE_C) rotate(tile(stage, C), position);
    __syncthreads();
  }

  // --------------------------------------------------------------------------------- per-token coefficients
  // σ, τ, ρ, κ of a chunk, from what the forward pass saved. Rows past the end count nothing.
  DEVICE void coefficients(int stage, int position) const {
    if (MODE == FWD || tid >= CHUNK) return;
    const float* stats = reinterpret_cast<const float*>(smem + Shared::STATS) + stage * 3 * CHUNK + tid;
    bool ok = position + tid < p.N;
    float r = ok ? stats[0] : 0.f, inverse = ok ? 1.f / stats[CHUNK] : 0.f, last = ok ? stats[2 * CHUNK] : 0.f;
    const TokenStats saved = {inverse, last, r, last};
    sigma[tid] = Traits::sigma(*this, saved);
    tau[tid] = Traits::tau(*this, saved);
    rho[tid] = Traits::rho(*this, saved);
    kappa[tid] = Traits::kappa(*this, saved);
    if (STATES) zeta[tid] = Traits::zeta(*this, saved);
  }
  // The same, decayed to the end of a chunk of `len` tokens. Call it after a barrier: it reads others' σ and τ.
  DEVICE void coefficients_at_end(int len) const {
    if (tid >= CHUNK) return;
    float decay = tid < len ? power(len - 1 - tid) : 0.f;
    float s = Traits::limit_sigma(sigma[tid] * decay);
    split<T, 1>(sigma_end + tid, CHUNK, s);
    split<T, 2>(tau_end + tid, CHUNK, (MODE == FWD ? 1.f : tau[tid]) * decay);
    if (STATES || MODE == FWD) split<T, 2>(zeta_end + tid, CHUNK, MODE == FWD ? s : zeta[tid] * decay);
  }

  // Products of 16 rows with themselves: row g's square is on the diagonals, lo of the first eight rows and hi of the
  // others.
  static DEVICE void add_squares(float (&lo)[4], float (&hi)[4], u32 x0, u32 x1, u32 x2, u32 x3) {
    mma<T>(lo, x0, x1, x2, x3, x0, x2);
    mma<T>(hi, x0, x1, x2, x3, x1, x3);
  }
  // 1/‖row‖ from there; valid in lanes t == g/2, rows g (x) and g + 8 (y).
  DEVICE float2 reciprocal_norms(const float (&lo)[4], const float (&hi)[4]) const {
    int normalize = p.normalize;
    return make_float2(reciprocal_norm(g & 1 ? lo[1] : lo[0], normalize),
                       reciprocal_norm(g & 1 ? hi[3] : hi[2], normalize));
  }
  // σ of the rows of k that this warp owns (forward), into shared memory.
  template <bool SAVE>
  DEVICE void key_norms(const float (&lo)[4], const float (&hi)[4], int position) const {
    float2 r = reciprocal_norms(lo, hi);
    if (t != g >> 1) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * warp + g + 8 * half;
      float value = half ? r.y : r.x;
      bool ok = position + row < p.N;
      sigma[row] = ok ? Traits::sigma(*this, {0.f, 0.f, value, 0.f}) : 0.f;
      if (SAVE && ok) p.rk[stat(position + row)] = value;
    }
  }

  // ------------------------------------------------------------------------------ fragments of the tiles
  // Within a row the 16-byte pieces are permuted by an exclusive or with row % 8. Stepping by 16 columns is then one more
  // exclusive or, and by 16 rows an addition: one register serves a whole tile.
  static DEVICE u32 step(u32 address, int s, int k) {
    return (address ^ ((k % 4) << 5)) + (k / 4) * CHUNK * ROW_BYTES + s * SIXTEEN_ROWS;
  }
  DEVICE void fragment_A(u32 (&r)[4], u32 address, int s, int k) const {
    // Rows 16s … 16s+15 of columns 16k … 16k+15, as the left operand.
    ldmatrix(r, step(address + swizzled<CHUNK>(lane % 16, lane / 16), s, k));
  }
  DEVICE void fragment_Bt(u32 (&r)[4], u32 address, int s, int k) const {
    // The same, as the transposed right operand: r[0], r[1] for the first eight rows, r[2], r[3] for the others.
    ldmatrix(r, step(address + swizzled<CHUNK>(lane % 8 + (lane / 16) * 8, (lane / 8) % 2), s, k));
  }
  DEVICE void fragment_B(u32 (&r)[4], u32 address, int s, int k) const {
    // Tokens 16s … 16s+15 of columns 16k … 16k+15: as the right operand r[0], r[1] for the first eight columns and
    // r[2], r[3] for the others; as the transposed left operand r[0], r[2], r[1], r[3].
    ldmatrix_trans(r, step(address + swizzled<CHUNK>(lane % 16, lane / 16), s, k));
  }
  DEVICE void fragment_own(u32 (&r)[4], u32 address, int s, int i) const {
    // The same of this warp's i-th pair of 8-column tiles.
    int piece = lane / 16 ? own_tile(2 * i + 1) : own_tile(2 * i);
    ldmatrix_trans(r, address + swizzled<CHUNK>(lane % 16, piece) + s * SIXTEEN_ROWS);
  }
  // 16 columns of d: a left operand times both halves of a right one.
  static DEVICE void mma_pair(float (&first)[4], float (&second)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    mma<T>(first, a[0], a[1], a[2], a[3], b[0], b[1]);
    mma<T>(second, a[0], a[1], a[2], a[3], b[2], b[3]);
  }
  // Of PARTS rows of 16-bit numbers two neighbours in row g (further rows: 0): column (row) g of an operand.
  template <int PARTS>
  DEVICE u32 part(const u16* from, int stride, int i) const {
    return g < PARTS ? *reinterpret_cast<const u32*>(from + g * stride + i) : 0;
  }
  // The n-th of the 8-column tiles whose part of the state this warp holds. With RoPE on them, tiles that rotate
  // together are neighbours.
  DEVICE int own_tile(int n) const {
    constexpr int HALF = Traits::PROJECTS ? ROPE / 16 : 0;
    int i = warp * Y_TILES + n;
    return i < 2 * HALF ? i / 2 + (i % 2) * HALF : i;
  }

  // --------------------------------------------------------------------------------------------------- state
  DEVICE void clear_state() {
#pragma unroll
    for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++) state[i][j][x] = 0.f;
    for (int i = tid; i < D; i += THREADS) {
      c_sum[i] = b_sum[i] = 0.f;
      if (MODE == DQ && i < CHUNK) db_sums()[i] = 0.f;
      split<T, 3>(b_sum_parts + i, D, 0.f);
    }
  }
  DEVICE int state_row(int i, int half) const { return 8 * own_tile(2 * i + half) + g; }

  DEVICE void load_state() {
    clear_state();
    if (!segment() && !p.initial.S) return;
    StateSource from = States::initial(p, bh(), segment(), log2_decay);
#pragma unroll
    for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++)
          state[i][j][x] = from.scale * from.S[States::element(state_row(i, x / 2), 8 * j + 2 * t + x % 2)];
    for (int i = tid; i < D; i += THREADS) {
      c_sum[i] = from.scale_c * from.c[i], b_sum[i] = from.scale_b * from.b[i];
      split<T, 3>(b_sum_parts + i, D, b_sum[i]);
    }
  }
  // To global memory. Call it after a barrier: it stores others' sums.
  DEVICE void store_state(const StateTarget& to) {
    if (MODE != DV)
#pragma unroll
      for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int x = 0; x < 4; x++)
            to.S[States::element(state_row(i, x / 2), 8 * j + 2 * t + x % 2)] = to.scale * state[i][j][x];
    for (int i = tid; i < D; i += THREADS) {
      to.c[i] = to.scale_c * c_sum[i];
      if (STATES || MODE == FWD) to.b[i] = to.scale_b * b_sum[i];
    }
  }

  // state += (σ C)ᵀ B, Σ τ c and (forward and `states`) Σ ζ b, everything decayed to the chunk's end.
  template <bool WITH_B_SUM>
  DEVICE void update(int stage, int len) {
    u32 tile_b = tile(stage, B), tile_c = tile(stage, C);
    if (DECAY) {
      float decay = power(len);
#pragma unroll
      for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int x = 0; x < 4; x++) state[i][j][x] *= decay;
    }
    // Sums over tokens on the tensor cores: a 16-bit factor and its rounding remainder, in two columns (rows).
    float csum[STATE_TILES][4] = {}, bsum[Y_TILES][4] = {};
#pragma unroll
    for (int s = 0; s < CHUNK_STEPS; s++) {
      int j = 16 * s + 2 * t;
      u32 near = *reinterpret_cast<u32*>(sigma_end + j), far = *reinterpret_cast<u32*>(sigma_end + j + 8);
      u32 tau0 = part<2>(tau_end, CHUNK, j), tau1 = part<2>(tau_end, CHUNK, j + 8);
      u32 zeta0 = WITH_B_SUM ? part<2>(zeta_end, CHUNK, j) : 0,
          zeta1 = WITH_B_SUM ? part<2>(zeta_end, CHUNK, j + 8) : 0;
      u32 left[STATE_TILES][4];
#pragma unroll
      for (int i = 0; i < STATE_TILES; i++) {
        u32 r[4];
        fragment_own(r, tile_c, s, i);
        mma<T>(csum[i], r[0], r[2], r[1], r[3], tau0, tau1);
        left[i][0] = multiply<T>(r[0], near), left[i][1] = multiply<T>(r[2], near);
        left[i][2] = multiply<T>(r[1], far), left[i][3] = multiply<T>(r[3], far);
      }
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        u32 r[4];
        fragment_B(r, tile_b, s, n);
#pragma unroll
        for (int i = 0; i < STATE_TILES; i++) mma_pair(state[i][2 * n], state[i][2 * n + 1], left[i], r);
        if (WITH_B_SUM && n / STATE_TILES == warp) {
          mma<T>(bsum[2 * (n % STATE_TILES)], zeta0, 0, zeta1, 0, r[0], r[1]);
          mma<T>(bsum[2 * (n % STATE_TILES) + 1], zeta0, 0, zeta1, 0, r[2], r[3]);
        }
      }
    }
    add_sums(csum, bsum, power(len));
  }
  // A chunk's sums onto the running ones. This warp's columns: no other reads or writes them before a barrier.
  DEVICE void add_sums(const float (&csum)[STATE_TILES][4], const float (&bsum)[Y_TILES][4], float decay) {
#pragma unroll
    for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float* at = c_sum + state_row(i, half);
        if (t == 0) *at = *at * decay + (csum[i][2 * half] + csum[i][2 * half + 1]);
      }
#pragma unroll
    for (int i = 0; i < (STATES || MODE == FWD ? Y_TILES : 0); i++) {
      float2 sum = make_float2(bsum[i][0] + __shfl_down_sync(FULL_WARP, bsum[i][0], 4),
                               bsum[i][1] + __shfl_down_sync(FULL_WARP, bsum[i][1], 4));
      int column = 8 * (warp * Y_TILES + i) + 2 * t;
      if (g == 0) {
        float2* at = reinterpret_cast<float2*>(b_sum + column);
        sum = make_float2(at->x * decay + sum.x, at->y * decay + sum.y);
        *at = sum;
        if (MODE == FWD) split<T, 3>(b_sum_parts + column, D, sum);
      }
    }
  }

  // --------------------------------------------------------------------------------------- a chunk's output
  // W into shared memory: this warp's 16 rows (all columns: skipping masked ones costs more in branches than it
  // saves). Forward also the norms (written before the barrier inside) and g.
  DEVICE void scores(int stage, int position, int len, float n_before) {
    u32 tile_a = tile(stage, A), tile_b = tile(stage, B);
    const bool has_rows = CHUNK_STEPS == 4 || warp < CHUNK_STEPS;
    float x[CHUNK / 8][4] = {}, q_lo[4] = {}, q_hi[4] = {}, k_lo[4] = {}, k_hi[4] = {}, zq[4] = {};
    if (has_rows) {
#pragma unroll
      for (int k = 0; k < D_STEPS; k++) {  // X = A Bᵀ
        u32 left[4], r[4];
        fragment_A(left, tile_a, warp, k);
#pragma unroll
        for (int n = 0; n < CHUNK_STEPS; n++) {
          fragment_Bt(r, tile_b, n, k);
          mma_pair(x[2 * n], x[2 * n + 1], left, r);
        }
        if (MODE == FWD) {
          fragment_Bt(r, tile_b, warp, k);
          add_squares(k_lo, k_hi, r[0], r[2], r[1], r[3]);
          add_squares(q_lo, q_hi, left[0], left[1], left[2], left[3]);
          mma<T>(zq, left[0], left[1], left[2], left[3], part<3>(b_sum_parts, D, 16 * k + 2 * t),
                 part<3>(b_sum_parts, D, 16 * k + 2 * t + 8));
        }
      }
      if (MODE == FWD) key_norms<true>(k_lo, k_hi, position);
    }
    __syncthreads();  // σ (and τ, ρ, κ) of the whole chunk are there
    coefficients_at_end(len);
    if (!has_rows) return;
    float2 r = reciprocal_norms(q_lo, q_hi);
    int source = (lane & ~3u) | (g >> 1);
    r.x = __shfl_sync(FULL_WARP, r.x, source), r.y = __shfl_sync(FULL_WARP, r.y, source);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * warp + g + 8 * half;
      float rq = half ? r.y : r.x;
      float rho_i = MODE == FWD ? Traits::rho(*this, {0.f, 0.f, 0.f, rq}) : rho[row];
      float kappa_i = MODE == FWD ? 1.f : kappa[row];
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < CHUNK / 8; n++) {
        int j = 8 * n + 2 * t;
        float2 s = *reinterpret_cast<float2*>(sigma + j);
        float2 ta = MODE == FWD ? make_float2(1.f, 1.f) : *reinterpret_cast<float2*>(tau + j);
        float w0 = rho_i * s.x * x[n][2 * half] + kappa_i * ta.x;
        float w1 = rho_i * s.y * x[n][2 * half + 1] + kappa_i * ta.y;
        if (DECAY) w0 *= powers[max(row - j, 0)], w1 *= powers[max(row - j - 1, 0)];
        w0 = j <= row ? w0 : 0.f, w1 = j + 1 <= row ? w1 : 0.f;
        u32 w = pack<T>(w0, w1);
        st_shared_b32((base + Shared::SCORES + swizzled<CHUNK>(row, 0) + 4 * t) ^ (n << 4), w);
        float2 rounded = unpack<T>(w);
        sum += rounded.x + rounded.y;  // the normaliser adds what the tensor cores multiply by
      }
      if (MODE == FWD) {
        float inner = half ? zq[2] + zq[3] : zq[0] + zq[1];
        for (int d = 1; d < 4; d *= 2) {  // two sums over four lanes, in turn
          sum += __shfl_xor_sync(FULL_WARP, sum, d);
          inner += __shfl_xor_sync(FULL_WARP, inner, d);
        }
        float normaliser = sum + power(row + 1) * (n_before + rho_i * inner);
        if (t == 0) {
          rho[row] = rho_i, kappa[row] = 1.f / normaliser;
          if (position + row < p.N) {
            p.g[stat(position + row)] = normaliser;
            p.rq[stat(position + row)] = rq;
          }
        }
      }
    }
  }

  // Y of all rows, this warp's columns, unfinished: what came before the chunk, then W C.
  DEVICE void outputs(int stage, int position, float (&y)[CHUNK_STEPS][Y_TILES][4]) {
    u32 tile_a = tile(stage, A), tile_c = tile(stage, C);
#pragma unroll
    for (int m = 0; m < CHUNK_STEPS; m++)
#pragma unroll
      for (int n = 0; n < Y_TILES; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) y[m][n][x] = 0.f;
#pragma unroll
    for (int k = 0; k < D_STEPS; k++) {
      u32 right[Y_TILES][2];
#pragma unroll
      for (int n = 0; n < Y_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float (&s)[4] = state[n / 2][2 * k + half];
          right[n][half] = n % 2 ? pack<T>(s[2], s[3]) : pack<T>(s[0], s[1]);
        }
#pragma unroll
      for (int m = 0; m < CHUNK_STEPS; m++) {
        u32 r[4];
        fragment_A(r, tile_a, m, k);
#pragma unroll
        for (int n = 0; n < Y_TILES; n++) mma<T>(y[m][n], r[0], r[1], r[2], r[3], right[n][0], right[n][1]);
      }
    }
    __syncthreads();  // W, and forward ρ and 1/g, are there; the tile of a is free
    if (Traits::PROJECTS) {
      load_tile(tile_a, UNIT, position);
      copy_async_commit();
    }
    float2 sum[Y_TILES];
#pragma unroll
    for (int n = 0; n < Y_TILES; n++) sum[n] = *reinterpret_cast<float2*>(c_sum + 8 * own_tile(n) + 2 * t);
#pragma unroll
    for (int m = 0; m < CHUNK_STEPS; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = 16 * m + g + 8 * half;
        float decay = power(row + 1), r = rho[row] * decay, k = (MODE == FWD ? 1.f : kappa[row]) * decay;
#pragma unroll
        for (int n = 0; n < Y_TILES; n++) {
          y[m][n][2 * half] = r * y[m][n][2 * half] + k * sum[n].x;
          y[m][n][2 * half + 1] = r * y[m][n][2 * half + 1] + k * sum[n].y;
        }
      }
#pragma unroll
    for (int s = 0; s < CHUNK_STEPS; s++) {
      u32 right[STATE_TILES][4];
#pragma unroll
      for (int i = 0; i < STATE_TILES; i++) fragment_own(right[i], tile_c, s, i);
#pragma unroll
      for (int m = s; m < CHUNK_STEPS; m++) {
        u32 r[4];
        ldmatrix(r, ((base + Shared::SCORES + swizzled<CHUNK>(lane % 16, lane / 16)) ^ (s << 5)) + m * SIXTEEN_ROWS);
#pragma unroll
        for (int n = 0; n < Y_TILES; n++)
          mma<T>(y[m][n], r[0], r[1], r[2], r[3], right[n / 2][2 * (n % 2)], right[n / 2][2 * (n % 2) + 1]);
      }
    }
  }

  // This warp's columns of the output from a tile in shared memory that it has written, a 16-byte piece a lane.
  DEVICE void store(u32 tile_address, int position) const {
    constexpr int STEP = 32 / Y_TILES;  // rows that a warp stores at once
    int piece = own_tile(lane % Y_TILES), row = lane / Y_TILES, left = p.N - position - row;
    u32 from = tile_address + swizzled<CHUNK>(row, piece);
    u16* to = this->row(Y, position + row) + 8 * piece;
    i64 step = (Traits::REVERSE ? -STEP : STEP) * p.strides[Y].token;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / STEP; i++, to += step) {
      uint4 v = ld_shared_v4((from ^ (((i * STEP) % 8) << 4)) + i * STEP * ROW_BYTES);
      if (i * STEP < left) st_global_v4(to, v);
    }
  }
  // This lane's two columns of the n-th of this warp's tiles (row % 8 == g).
  DEVICE u32 own_pair(u32 tile_address, int row, int n) const {
    return tile_address + swizzled<CHUNK>(row, own_tile(n)) + 4 * t;
  }

  // FWD: o = y/g; DV: dv = y. Through the tile of a, which is free.
  DEVICE void scale(int stage, const float (&y)[CHUNK_STEPS][Y_TILES][4], int position) {
#pragma unroll
    for (int m = 0; m < CHUNK_STEPS; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = 16 * m + g + 8 * half;
        float scale = MODE == FWD ? kappa[row] : Traits::scale_y(p);
#pragma unroll
        for (int n = 0; n < Y_TILES; n++)
          st_shared_b32(own_pair(tile(stage, A), row, n),
                        pack<T>(y[m][n][2 * half] * scale, y[m][n][2 * half + 1] * scale));
      }
    store(tile(stage, A), position);
  }

  // The transpose of RoPE on two columns of two tiles that rotate together.
  DEVICE void rotate_pair_back(float2& lo, float2& hi, int position, int column) const {
    i64 at = i64(Traits::token(p, min(position, p.N - 1))) * ROPE + column;
    float2 cos = *reinterpret_cast<const float2*>(p.cos + at), sin = *reinterpret_cast<const float2*>(p.sin + at);
    rotate_back(lo, hi, cos, sin);
  }

  // DQ: Σ q̂·y of row i of every chunk; ζ, whose place it takes, is for FWD and `states`.
  DEVICE float* db_sums() const { return zeta; }
  DEVICE void store_db() const {
    if (warp > 0) return;
    float sum = sum_lanes<32>(db_sums()[lane] + (CHUNK > 32 ? db_sums()[lane + 32] : 0.f));
    if (lane == 0) p.db[bh() * p.segments + segment()] = sum;
  }

  // DQ, DK: through the norm, dx = r (y − x̂ (x̂·y)), and through RoPE; b and r as the table says. The tile of a holds
  // the rows x by now, and then the result.
  DEVICE void project(int stage, float (&y)[CHUNK_STEPS][Y_TILES][4], int position) {
    const float* r = MODE == DQ ? p.rq : p.rk;
    u32 tile_unit = tile(stage, A);
    copy_async_wait<0>();
    __syncthreads();
    if (ROPE) {
      rotate(tile_unit, position);
      __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2 * CHUNK_STEPS; m++) {
      int row = 8 * m + g;
      float dot = 0.f;
#pragma unroll
      for (int n = 0; n < Y_TILES; n++) {
        float2 x = unpack<T>(ld_shared_b32(own_pair(tile_unit, row, n)));
        dot += x.x * y[m / 2][n][2 * (m % 2)] + x.y * y[m / 2][n][2 * (m % 2) + 1];
      }
      dot = sum_lanes<4>(dot);
      if (t == 0) partial_dots[row * WARPS + warp] = dot;
    }
    __syncthreads();
    forget_addresses();
#pragma unroll
    for (int m = 0; m < 2 * CHUNK_STEPS; m++) {
      int row = 8 * m + g, at = position + row;
      float4 d = *reinterpret_cast<float4*>(partial_dots + row * WARPS);
      float dot = (d.x + d.y) + (d.z + d.w);
      float norm = r[stat(min(at, p.N - 1))];
      auto [out, along] = Traits::projection(*this, norm, dot);
      if (MODE == DQ && at < p.N && warp == 0 && t == 0) db_sums()[row] += norm * dot * Traits::scale_y(p);
#pragma unroll
      for (int n = 0; n < Y_TILES; n += 2) {
        u32 first = own_pair(tile_unit, row, n), second = own_pair(tile_unit, row, n + 1);
        float2 x = unpack<T>(ld_shared_b32(first)), z = unpack<T>(ld_shared_b32(second));
        float2 lo = make_float2(out * (y[m / 2][n][2 * (m % 2)] - along * x.x),
                                out * (y[m / 2][n][2 * (m % 2) + 1] - along * x.y));
        float2 hi = make_float2(out * (y[m / 2][n + 1][2 * (m % 2)] - along * z.x),
                                out * (y[m / 2][n + 1][2 * (m % 2) + 1] - along * z.y));
        if (warp * Y_TILES + n < ROPE / 8) rotate_pair_back(lo, hi, at, 8 * own_tile(n) + 2 * t);
        st_shared_b32(first, pack<T>(lo.x, lo.y)), st_shared_b32(second, pack<T>(hi.x, hi.y));
      }
    }
    store(tile_unit, position);
  }
};
