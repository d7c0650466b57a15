// Shared by all phases of the sm_80 scan: a block's head and segment, the addresses in its shared memory, loading, the
// coefficients of its tokens, and fragments of its tiles.
#pragma once
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "rope.cuh"
#include "scan_sm80_layout.cuh"
#include "segments.cuh"
#include "token_decay.cuh"

template <typename CONFIG>
struct BlockSm80 {
  using T = typename CONFIG::T;
  using Traits = typename CONFIG::Traits;
  static constexpr int D = CONFIG::D, CHUNK = CONFIG::CHUNK, MODE = CONFIG::MODE, ROPE = CONFIG::ROPE;
  static constexpr bool STATE_ONLY = CONFIG::STATE_ONLY, POWERS = CONFIG::POWERS,
                        PER_TOKEN_DECAY = CONFIG::PER_TOKEN_DECAY;
  static constexpr bool HAS_G = CONFIG::HAS_G, SUMS_X = CONFIG::SUMS_X;
  using States = SegmentStates<T, MODE, D, CONFIG::WEIGHTS>;
  using Shared = SharedSm80<D, CHUNK, CONFIG::DECAY>;
  static_assert(SCAN_THREADS == THREADS, "Variant.threads of variants.py");
  static constexpr int WARPS = THREADS / 32;
  static constexpr int PIECES = D / 8;             // 16-byte pieces of a row
  static constexpr int D_STEPS = D / 16;           // steps of a product along D
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
  u16 *sigma_end, *tau_end, *zeta_end, *b_sum_parts;  // [CHUNK], [SUM_PARTS][CHUNK] twice, [3][D]

  DEVICE BlockSm80(const Params& params, char* shared) : p(params), smem(shared) {
    tid = threadIdx.x;
    find_lane();
    base = shared_address(smem);
    int batch = bh() / p.H, h = bh() % p.H;
    if (tid < 5) {  // every tensor's row of this head at position 0: saves five pointers in registers
      i64 last = Traits::REVERSE ? (p.N - 1) * p.strides[tid].token : 0;
      reinterpret_cast<u16**>(smem + Shared::HEADS)[tid] = head_of(p, tid, batch, h) + last;
    }
    __syncthreads();
    begin = segment() * p.segment_len;
    if (tid == 0)
      *reinterpret_cast<float*>(smem + Shared::POWERS + (CHUNK + 3) * 4) = p.coefficient ? p.coefficient[h] : p.b_value;
    if (CONFIG::HAS_A && tid == 0)
      *reinterpret_cast<float*>(smem + Shared::POWERS + (CHUNK + 2) * 4) = p.constant ? p.constant[h] : p.a_value;
    log2_decay = POWERS ? p.log_decay[h] * LOG2_E : 0.f;
    sigma = reinterpret_cast<float*>(smem + Shared::COEFFICIENTS);
    tau = sigma + CHUNK, rho = tau + CHUNK, kappa = rho + CHUNK, zeta = kappa + CHUNK;
    sigma_end = reinterpret_cast<u16*>(smem + Shared::END_COEFFICIENTS);
    tau_end = sigma_end + CHUNK, zeta_end = tau_end + CONFIG::SUM_PARTS * CHUNK;
    c_sum = reinterpret_cast<float*>(smem + Shared::SUMS), b_sum = c_sum + D;
    b_sum_parts = reinterpret_cast<u16*>(b_sum + D);
    partial_dots = reinterpret_cast<float*>(smem + Shared::PARTIAL_DOTS);
    powers = reinterpret_cast<float*>(smem + Shared::POWERS);
    if (POWERS)
      for (int i = tid; i <= CHUNK; i += THREADS) powers[i] = exp2f(log2_decay * i);
    if (POWERS && HAS_G && MODE == FWD && tid == 0) powers[CHUNK + 1] = count_tokens<POWERS>(log2_decay, CHUNK);
  }

  // ------------------------------------------------------------------------------------------------ addresses
  // Head, segment and its end are re-read when needed, to save registers.
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
  DEVICE float constant() const {  // a
    return __uint_as_float(ld_shared_b32(base + Shared::POWERS + (CHUNK + 2) * 4));
  }
  // Row `position` of tensor a, b, c, qk or y (0 … 4).
  DEVICE u16* row(int tensor, int position) const { return Traits::row(p, base + Shared::HEADS, tensor, position); }
  DEVICE i64 stat(int position) const {  // index in [BH, N]
    return i64((unsigned long long)u32(bh()) * u32(p.N)) + Traits::token(p, position);
  }
  DEVICE float power(int i) const { return POWERS ? powers[i] : 1.f; }
  // Decays: from before the chunk to row `i`; over a whole chunk of `len` tokens; from token `i` to the chunk's end.
  DEVICE float from_start(int stage, int i) const {
    return PER_TOKEN_DECAY ? power_of_two(token_decays(stage, CUMSUM)[i]) : power(i + Traits::POWERS_FROM_STATE);
  }
  DEVICE float chunk_decay(int stage, int len) const {
    return PER_TOKEN_DECAY ? from_start(stage, CHUNK - 1) : power(len);
  }
  DEVICE float to_end(int stage, int len, int i) const {
    if (i >= len) return 0.f;
    return PER_TOKEN_DECAY ? power_of_two(token_decays(stage, TO_END)[i])
                           : power(len - 1 - i + Traits::POWERS_TO_STATE);
  }
  // PER_TOKEN, per stage: its tokens' results of token_decay.cuh (rows past the end have the last one's), and 1/‖x‖ for
  // DQ and DK.
  enum { CUMSUM, TO_END, NORM, COUNT };
  DEVICE float* token_decays(int stage, int which) const {
    return reinterpret_cast<float*>(smem + Shared::TOKEN_DECAYS) + (4 * stage + which) * CHUNK;
  }
  // The count before the chunk; in reverse the sum of e.
  DEVICE float& count_before(int stage) const { return reinterpret_cast<float*>(smem + Shared::COUNTS)[stage]; }
  DEVICE float* dG() const { return reinterpret_cast<float*>(smem + Shared::DG); }
  DEVICE u16* sigma_rest() const { return reinterpret_cast<u16*>(smem + Shared::SIGMA_REST); }
  DEVICE u32 tile(int stage, int which) const {
    // `states` does not read a: its two stages of two tiles are in place of the first four tiles.
    return base + (STATE_ONLY ? (2 * stage + which - 1) * Shared::TILE : stage * Shared::STAGE + which * Shared::TILE);
  }

  // Called between the phases of a chunk, which then recompute their addresses.
  DEVICE void recompute_addresses() {
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
    const int rows = 8 * piece < p.columns ? p.N - position - row : 0;
#pragma unroll
    for (int i = 0; i < CHUNK / ROWS; i++, src += step) {
      copy_async_16(dst + i * ROWS * ROW_BYTES, src, i * ROWS < rows);
    }
  }
  template <bool WITH_A>
  DEVICE void load(int stage, int position) const {
    if (position < end()) {
      if (WITH_A) load_tile(tile(stage, A), A, position);
      load_tile(tile(stage, B), B, position);
      load_tile(tile(stage, C), C, position);
      load_stats(stage, position);
      if (PER_TOKEN_DECAY) load_token_decays(stage, position);
    }
    copy_async_commit();
  }
  // Loads, of TokenStats, r_sigma, g, and e or (DV) r_rho; neither g nor e without the normaliser.
  DEVICE void load_stats(int stage, int position) const {
    if (MODE == FWD || tid >= CHUNK) return;
    bool ok = position + tid < p.N;
    i64 i = stat(ok ? position + tid : 0);
    u32 dst = base + Shared::STATS + stage * 3 * CHUNK * 4 + tid * 4;
    copy_async_4(dst, (MODE == DQ ? p.rk : p.rq) + i, ok);
    if (HAS_G) copy_async_4(dst + CHUNK * 4, p.g + i, ok);
    if (HAS_G || MODE == DV) copy_async_4(dst + 2 * CHUNK * 4, (MODE == DV ? p.rk : p.e) + i, ok);
  }
  DEVICE void load_token_decays(int stage, int position) const {
    constexpr bool COUNTS = HAS_G && (CONFIG::NORMALISES || CONFIG::COMPUTES_DG);
    if (tid >= CHUNK) return;
    const int at = min(position + tid, p.N - 1);
    const i64 i = i64(bh()) * p.N + at;
    auto copy = [&](int which, const float* from) {
      copy_async_4(shared_address(token_decays(stage, which) + tid), from, true);
    };
    copy(CUMSUM, p.decay_cumsum + i), copy(TO_END, p.to_end + i);
    if (CONFIG::COMPUTES_DG) copy(NORM, (MODE == DQ ? p.rq : p.rk) + stat(at));
    if (COUNTS && Traits::REVERSE) copy(COUNT, p.count + i);
    if (COUNTS && tid == 0)
      copy_async_4(shared_address(&count_before(stage)), Chunks<CHUNK>(p, bh()).count + position / CHUNK, true);
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
  // Computes σ, τ, ρ, κ of a chunk from what the forward pass saved. Rows past the end contribute nothing.
  DEVICE void coefficients(int stage, int position) const {
    if (MODE == FWD || tid >= CHUNK) return;
    const float* stats = reinterpret_cast<const float*>(smem + Shared::STATS) + stage * 3 * CHUNK + tid;
    bool ok = position + tid < p.N;
    float r = ok ? stats[0] : 0.f, inverse = HAS_G && ok ? 1.f / stats[CHUNK] : 0.f;
    float last = (HAS_G || MODE == DV) && ok ? stats[2 * CHUNK] : 0.f;
    const TokenStats saved = {inverse, last, r, last};
    const float factor = CONFIG::FACTOR_IN_W ? factor_in_w(token_decays(stage, NORM)[tid]) : 1.f;
    sigma[tid] = Traits::sigma(*this, saved);
    if (HAS_G) tau[tid] = Traits::tau(*this, saved);
    rho[tid] = Traits::rho(*this, saved) * factor;
    if (HAS_G) kappa[tid] = Traits::kappa(*this, saved) * factor;
    if (CONFIG::HAS_ZETA) zeta[tid] = Traits::zeta(*this, saved);
  }
  // The same, decayed to the end of a chunk of `len` tokens. Call it after a barrier: it reads other threads' σ and τ.
  DEVICE void coefficients_at_end(int stage, int len) const {
    if (tid >= CHUNK) return;
    float decay = to_end(stage, len, tid);
    float s = Traits::limit_sigma(sigma[tid] * decay);
    split<T, CONFIG::SIGMA_PARTS>([&](int part) { return (part ? sigma_rest() : sigma_end) + tid; }, s);
    if (CONFIG::SUMS_C)
      split<T, CONFIG::SUM_PARTS>(tau_end + tid, CHUNK, (MODE == FWD || !HAS_G ? 1.f : tau[tid]) * decay);
    if (CONFIG::SUMS_B)
      split<T, CONFIG::SUM_PARTS>(zeta_end + tid, CHUNK,
                                  MODE == FWD        ? s
                                  : CONFIG::HAS_ZETA ? zeta[tid] * decay
                                                     : decay);
  }
  // DQ: b, the factor of all rows of y; but 1 if b is 0, so that the gradient of b can still be computed.
  DEVICE float b_or_one() const { return MODE == DQ && coefficient() != 0.f ? coefficient() : 1.f; }
  // FACTOR_IN_W: the part of a row's factor that ρ and κ include.
  DEVICE float factor_in_w(float norm) const {
    return CONFIG::WHOLE_FACTOR ? b_or_one() * norm : mantissa(Traits::row_factor(*this, norm));
  }

  // Products of 16 rows with themselves: row g's square is on the diagonals, of lo for the first eight rows and of hi
  // for the others.
  static DEVICE void add_squares(float (&lo)[4], float (&hi)[4], u32 x0, u32 x1, u32 x2, u32 x3) {
    mma<T>(lo, x0, x1, x2, x3, x0, x2);
    mma<T>(hi, x0, x1, x2, x3, x1, x3);
  }
  // 1/‖row‖ from these; valid in lanes t == g/2, for rows g (x) and g + 8 (y).
  DEVICE float2 reciprocal_norms(const float (&lo)[4], const float (&hi)[4]) const {
    int normalize = p.normalize;
    return make_float2(reciprocal_norm(g & 1 ? lo[1] : lo[0], normalize),
                       reciprocal_norm(g & 1 ? hi[3] : hi[2], normalize));
  }
  // Writes σ of the rows of k that this warp owns (forward) to shared memory.
  DEVICE void key_norms(const float (&lo)[4], const float (&hi)[4], int position, bool save) const {
    float2 r = reciprocal_norms(lo, hi);
    if (t != g >> 1) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * warp + g + 8 * half;
      float value = half ? r.y : r.x;
      bool ok = position + row < p.N;
      sigma[row] = ok ? Traits::sigma(*this, {0.f, 0.f, value, 0.f}) : 0.f;
      if (save && ok) p.rk[stat(position + row)] = value;
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
  // Adds to 16 columns of d: a left operand times both halves of a right one.
  static DEVICE void mma_pair(float (&first)[4], float (&second)[4], const u32 (&a)[4], const u32 (&b)[4]) {
    mma<T>(first, a[0], a[1], a[2], a[3], b[0], b[1]);
    mma<T>(second, a[0], a[1], a[2], a[3], b[2], b[3]);
  }
  // Two neighbours in row g of PARTS rows of 16-bit numbers (0 for further rows): column (row) g of an operand.
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
};
