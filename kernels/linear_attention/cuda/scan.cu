// Normalised linear attention, forward and backward: one chunkwise scan serves all four outputs.
//
// With rows a, b, c of three tensors and scalars per token, every output is
//
//     y_i = Σ_{j≤i} γ^(i−j) (ρ_i σ_j (a_i·b_j) + κ_i τ_j) c_j                                            (1)
//
//            a   b   c    σ              τ           ρ           κ     order of tokens      then
//     FWD    q   k   v    r_k            1           b r_q       1     first to last        o  = y / g
//     DQ     do  v   k    r_k            r_k         1/g         −e    first to last        dq = b r_q (y − q̂ (q̂·y))
//     DK     v   do  q    b r_q / g      −b e r_q    1           1     last to first        dk = r_k (y − k̂ (k̂·y))
//     DV     k   q   do   b r_q / g      1/g         r_k         1     last to first        dv = y
//
// where r_x = 1/‖x‖, g is the normaliser and e = (do·o)/g (docs/kernel.md derives it from the paper's eq. 16–21).
//
// A block owns one head of one sequence, or a segment of it, and walks it in chunks of C tokens. The running state
// Σ σ_j c_j b_jᵀ stays in the fp32 accumulators of the tensor cores, its rows (the columns of c and y) shared out over
// the warps. Within a chunk
//
//     X = A Bᵀ
//     W = (1)'s weights, masked → 16 bits → shared memory
//     Y = ρ A·state + κ Σ τ c + W C
//     state = γ^C state + (σ C)ᵀ B
//
// There are two walks, of one algorithm:
//     Scan        from sm_80 on: four warps and mma.sync. A warp has 16 rows of X and W and all columns, then D/4
//                 columns of Y and all rows; the state goes from accumulators to operands without leaving registers.
//     HopperScan  sm_90a, in hopper.cuh: wgmma, and warps with roles, so that loading, what belongs to single tokens,
//                 and the products overlap.
//
// Operands of the tensor cores are raw rows of q, k, v, do; norms and normalisers are applied in fp32. Sums over
// tokens and the normaliser are fp32. Nothing is added atomically: the same inputs give the same bits.
//
// When a sequence is split into segments, `states` first computes the state each segment adds, `prefix` sums them,
// and every scan starts from what came before it. A scratch state is S [D, D] (key, value), then two vectors [D].

#include "mma.cuh"

enum Mode { FWD = 0, DQ = 1, DK = 2, DV = 3 };
enum Tensor { A = 0, B = 1, C_ = 2, UNIT = 3, Y = 4, O = 5 };

constexpr int THREADS = 128;  // of a block of the portable scans, `prefix` and `row_products`

struct Strides {  // of [B, N, H, D], in elements; the last dimension is contiguous
  i64 batch, head, token;
};

struct State {  // fp32: S [BH, D, D] key by value, key vector [BH, D], value vector [BH, D]; any may be null
  float *S, *k, *v;
};

struct Params {  // pointers, which every call has its own, then what follows from shapes and options
  void* tensors[6];                // a, b, c, unit (q for DQ, k for DK), y, o (where DQ computes e)
  float *g, *rq, *rk;              // [BH, N]: written by FWD, read by the others
  float* e;                        // [BH, N]
  const float* coefficient;        // b per head [H], or null: b_value
  const float* log_decay;          // [H], natural logarithm, with DECAY
  const float *cos, *sin;          // [N, rope], with ROPE
  State initial, final;            // of the whole scan
  float* scratch;                  // [BH, (segments − 1)·parts, D·D + 2D]: the states behind parts of segments 0, 1, …
  const float* n_initial;          // [BH] or null
  float* db;                       // [BH, segments]: DQ's sums of q̂·y
  Strides strides[6];              // of the tensors
  int N, H, segments, segment_len;  // segment_len: tokens, a multiple of the chunk
  int parts;                        // of a segment: what `states` walks at once
  int normalize;
  float b_value;
  float range, inverse_range;      // fp16: a power of two that keeps 16-bit operands in range; bf16: 1
};

// Where a head of a sequence begins in one of the tensors.
__device__ __forceinline__ u16* rows_of_head(const Params& p, int tensor, int batch, int h) {
  return static_cast<u16*>(p.tensors[tensor]) + batch * p.strides[tensor].batch + h * p.strides[tensor].head;
}

// The state behind a segment.
template <int D>
__device__ __forceinline__ float* scratch_state(const Params& p, int bh, int segment) {
  return p.scratch + (i64(bh) * (p.segments - 1) * p.parts + (segment + 1) * p.parts - 1) * (D * D + 2 * D);
}

// Where S [D, D], Σ τ c and Σ ζ b come from or go to, each times its scale.
template <typename POINTER>
struct Ends {
  POINTER S, c, b;
  float scale, scale_c, scale_b;
};
using Source = Ends<const float*>;
using Target = Ends<float*>;

// ------------------------------------------------------------------------------------------- per-mode facts
template <typename T, int MODE>
struct Facts {
  static constexpr bool REVERSE = MODE == DK || MODE == DV;
  // The state's rows are value columns (FWD, DV) or key columns (DQ, DK) of S [key, value].
  static constexpr bool VALUE_ROWS = MODE == FWD || MODE == DV;
  static constexpr bool PROJECTS = MODE == DQ || MODE == DK;  // ends in the gradient of a normalised row
  static constexpr bool ROPE_A = MODE == FWD || MODE == DV;
  static constexpr bool ROPE_B = MODE == FWD || MODE == DV;
  static constexpr bool ROPE_C = MODE == DQ || MODE == DK;

  static __device__ __forceinline__ int token(const Params& p, int position) {
    return REVERSE ? p.N - 1 - position : position;
  }

  // fp16: powers of two on both sides of (1) that keep 16-bit operands away from overflow and underflow.
  static __device__ __forceinline__ float range(const Params& p) { return T::NARROW ? p.range : 1.f; }
  static __device__ __forceinline__ float inverse_range(const Params& p) { return T::NARROW ? p.inverse_range : 1.f; }
  static __device__ __forceinline__ float scale_sigma(const Params& p) {
    return MODE == FWD || MODE == DQ ? inverse_range(p) : range(p);
  }
  static __device__ __forceinline__ float scale_tau(const Params& p) { return MODE == FWD ? 1.f : scale_sigma(p); }
  static __device__ __forceinline__ float scale_rho(const Params& p) {
    return MODE == FWD ? range(p) : MODE == DQ ? range(p) * range(p) : 1.f;
  }
  static __device__ __forceinline__ float scale_kappa(const Params& p) {
    return MODE == DQ ? range(p) * range(p) : 1.f;
  }
  static __device__ __forceinline__ float scale_y(const Params& p) { return MODE == FWD ? 1.f : inverse_range(p); }

  // States in and out: what `states` and `prefix` leave before a segment, and the caller's. In reverse the caller's
  // belongs to the last token walked, token 0, and its adjoint to the one before: one more decay on the way out, and one
  // less on the way in.
  template <int D>
  static __device__ __forceinline__ Target before_segment(const Params& p, int bh, int segment) {
    float* S = scratch_state<D>(p, bh, segment - 1);
    float *k = S + D * D, *v = k + D;
    return {S, VALUE_ROWS ? v : k, VALUE_ROWS ? k : v, 1.f, 1.f, 1.f};
  }
  template <int D>
  static __device__ __forceinline__ Source initial(const Params& p, int bh, int segment, float log2_decay) {
    if (segment) {
      Target left = before_segment<D>(p, bh, segment);
      return {left.S, left.c, left.b, left.scale, left.scale_c, left.scale_b};
    }
    const float *S = p.initial.S + i64(bh) * D * D, *k = p.initial.k + bh * D, *v = p.initial.v + bh * D;
    float undo = REVERSE ? exp2f(-log2_decay) : 1.f;
    float s = scale_sigma(p) * undo, sv = scale_tau(p) * undo, sk = MODE == FWD ? s : sv;
    if (VALUE_ROWS) return {S, v, k, s, sv, sk};
    return {S, k, v, s, sk, sv};
  }
  template <int D>
  static __device__ __forceinline__ Target final(const Params& p, int bh, float log2_decay) {
    float *S = p.final.S + i64(bh) * D * D, *k = p.final.k + bh * D, *v = p.final.v + bh * D;
    float more = REVERSE ? exp2f(log2_decay) : 1.f, s = more / scale_sigma(p), st = more / scale_tau(p);
    return {S, VALUE_ROWS ? v : k, VALUE_ROWS ? k : v, s, st, s};
  }

  // RoPE in place, on the leading columns of tiles of C rows that have landed; rounded as a model in 16 bits would.
  // Piece i of C·ROPE/8 is four columns of a row and the four that rotate with them.
  struct Angles {
    float4 cos, sin;
  };
  template <int ROPE>
  static __device__ __forceinline__ Angles angles(const Params& p, int position, int i) {
    constexpr int HALF = ROPE ? ROPE / 16 : 1;
    int row = min(position + i / (2 * HALF), p.N - 1);  // a row past the end is zero
    i64 at = i64(token(p, row)) * ROPE + i % (2 * HALF) * 4;
    return {*reinterpret_cast<const float4*>(p.cos + at), *reinterpret_cast<const float4*>(p.sin + at)};
  }
  template <int C, int ROPE>
  static __device__ __forceinline__ void rotate(char* tile, int i, const Angles& angles) {
    constexpr int HALF = ROPE ? ROPE / 16 : 1;
    int row = i / (2 * HALF), piece = i / 2 % HALF;
    tile += i % 2 * 8;
    uint2* lo = reinterpret_cast<uint2*>(tile + place<C>(row, piece));
    uint2* hi = reinterpret_cast<uint2*>(tile + place<C>(row, piece + HALF));
    uint2 x = *lo, y = *hi;
    const float4 &cos = angles.cos, &sin = angles.sin;
    rotate_pair<T>(x.x, y.x, make_float2(cos.x, cos.y), make_float2(sin.x, sin.y));
    rotate_pair<T>(x.y, y.y, make_float2(cos.z, cos.w), make_float2(sin.z, sin.w));
    *lo = x, *hi = y;
  }
};

// 1/‖row‖ from its square (NORM_EPS of common.py).
__device__ __forceinline__ float reciprocal_norm(float square, int normalize) {
  return normalize ? rsqrtf(square + 1e-12f) : 1.f;
}
// The same of 16 rows from add_squares; valid in lanes t == g/2, rows g (x) and g + 8 (y).
__device__ __forceinline__ float2 reciprocal_norms(const float (&lo)[4], const float (&hi)[4], int g, int normalize) {
  return make_float2(reciprocal_norm(g & 1 ? lo[1] : lo[0], normalize), reciprocal_norm(g & 1 ? hi[3] : hi[2], normalize));
}

// Σ γ^i over i < n: the decayed count of n tokens.
template <bool DECAY>
__device__ __forceinline__ float count(float log2_decay, int n) {
  float x = DECAY ? log2_decay * 0.6931471805599453f : 0.f;
  return x == 0.f ? float(n) : expm1f(x * float(n)) / expm1f(x);
}
// Of the tokens before position `begin`.
template <bool DECAY>
__device__ __forceinline__ float tokens_before(const Params& p, int bh, float log2_decay, int begin) {
  float n0 = p.n_initial ? p.n_initial[bh] : 0.f;
  return (DECAY ? n0 * exp2f(log2_decay * float(begin)) : n0) + count<DECAY>(log2_decay, begin);
}

template <int D, int C>
struct Shared {  // byte offsets; tiles first: swizzled, aligned to 1024
  static constexpr int TILE = C * D * 2;
  static constexpr int STAGE = 3 * TILE;
  static constexpr int WEIGHTS = 2 * STAGE;               // W
  static constexpr int STATS = WEIGHTS + C * 128;         // two stages of three rows of C floats
  static constexpr int COEFFICIENTS = STATS + 6 * C * 4;  // σ τ ρ κ ζ (DQ: Σ q̂·y)
  static constexpr int PARTS = COEFFICIENTS + 5 * C * 4;  // decayed to the chunk's end: σ in 16 bits, τ and ζ in two such
  static constexpr int SUMS = PARTS + 5 * C * 2;          // Σ τ c and Σ ζ b; the latter also as three 16-bit numbers
  static constexpr int PARTIAL = SUMS + 2 * D * 4 + 3 * D * 2;
  static constexpr int POWERS = PARTIAL + 4 * C * 4;
  static constexpr int HEADS = POWERS + (C + 4) * 4;
  static constexpr int BYTES = HEADS + 5 * 8;
};

// ------------------------------------------------------------------------------------------------- the scan
template <typename T, int D, int C, int MODE, bool DECAY, int ROPE, bool STATES>
struct Scan {
  using F = Facts<T, MODE>;
  using L = Shared<D, C>;
  static constexpr int WARPS = THREADS / 32;
  static constexpr int PIECES = D / 8;         // 16-byte pieces of a row
  static constexpr int KS = D / 16;            // steps of 16 along D
  static constexpr int CS = C / 16;            // steps of 16 along a chunk
  static constexpr int NT = D / (8 * WARPS);   // 8-column tiles of y that a warp owns
  static constexpr int MT = NT / 2;            // the same as 16-row tiles of the state

  const Params& p;
  char* smem;
  u32 base;
  int tid, warp, g, t;         // g, t: the lane's row and column pair in a tensor-core tile
  u32 lane;
  int begin;                   // the segment's first position; position i is token i, or N−1−i in reverse
  float log2_decay;
  float *sigma, *tau, *rho, *kappa, *zeta, *c_sum, *b_sum, *partial, *powers;
  u16 *sigma_end, *tau_parts, *zeta_parts, *b_parts;  // [C], [2][C], [2][C], [3][D]

  float state[MT][D / 8][4];

  __device__ __forceinline__ Scan(const Params& params, char* shared) : p(params), smem(shared) {
    tid = threadIdx.x;
    find_lane();
    base = shared_address(smem);
    int batch = bh() / p.H, h = bh() % p.H;
    if (tid < 5) {  // every tensor's row of this head at position 0: five pointers fewer in registers
      i64 last = F::REVERSE ? (p.N - 1) * p.strides[tid].token : 0;
      reinterpret_cast<u16**>(smem + L::HEADS)[tid] = rows_of_head(p, tid, batch, h) + last;
    }
    __syncthreads();
    begin = seg() * p.segment_len;
    if (tid == 0) *reinterpret_cast<float*>(smem + L::POWERS + (C + 3) * 4) = p.coefficient ? p.coefficient[h] : p.b_value;
    log2_decay = DECAY ? p.log_decay[h] * 1.4426950408889634f : 0.f;
    sigma = reinterpret_cast<float*>(smem + L::COEFFICIENTS);
    tau = sigma + C, rho = tau + C, kappa = rho + C, zeta = kappa + C;
    sigma_end = reinterpret_cast<u16*>(smem + L::PARTS), tau_parts = sigma_end + C, zeta_parts = tau_parts + 2 * C;
    c_sum = reinterpret_cast<float*>(smem + L::SUMS), b_sum = c_sum + D;
    b_parts = reinterpret_cast<u16*>(b_sum + D);
    partial = reinterpret_cast<float*>(smem + L::PARTIAL);
    powers = reinterpret_cast<float*>(smem + L::POWERS);
    if (DECAY)
      for (int i = tid; i <= C; i += THREADS) powers[i] = exp2f(log2_decay * i);
    if (DECAY && MODE == FWD && tid == 0) powers[C + 1] = count<DECAY>(log2_decay, C);
  }

  // Head, segment and its end, read anew where they are needed: registers are short.
  __device__ __forceinline__ int bh() const {
    int r;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(r));
    return r;
  }
  __device__ __forceinline__ int seg() const {
    int r;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(r));
    return r;
  }
  __device__ __forceinline__ int end() const { return min((seg() + 1) * p.segment_len, p.N); }
  __device__ __forceinline__ int token(int position) const {
    return F::token(p, position);
  }
  __device__ __forceinline__ float coefficient() const {  // b
    return __uint_as_float(read4(base + L::POWERS + (C + 3) * 4));
  }
  // Row `position` of tensor a, b, c, unit or y (0 … 4).
  __device__ __forceinline__ u16* row(int tensor, int position) const {
    const Strides& x = p.strides[tensor];
    return read_pointer(base + L::HEADS + 8 * tensor) + i64(position) * (F::REVERSE ? -x.token : x.token);
  }
  __device__ __forceinline__ i64 stat(int position) const {  // of [BH, N]
    return i64((unsigned long long)u32(bh()) * u32(p.N)) + token(position);
  }
  __device__ __forceinline__ float power(int i) const { return DECAY ? powers[i] : 1.f; }

  // ------------------------------------------------------------------------------------------- loading
  __device__ __forceinline__ u32 tile(int stage, int which) const {
    // `states` reads no a: two stages of two tiles, in the place of the first four.
    return base + (STATES ? (2 * stage + which - 1) * L::TILE : stage * L::STAGE + which * L::TILE);
  }
  __device__ __forceinline__ void load_tile(u32 dst, int tensor, int position) const {
    constexpr int ROWS = THREADS / PIECES;
    int row = u32(tid) / PIECES, piece = u32(tid) % PIECES;
    const u16* src = this->row(tensor, position + row) + 8 * piece;
    i64 step = (F::REVERSE ? -ROWS : ROWS) * p.strides[tensor].token;
    dst += place<C>(row, piece);  // ROWS is a multiple of 8: the same for every step
#pragma unroll
    for (int i = 0; i < C / ROWS; i++, src += step) {
      bool ok = position + row + i * ROWS < p.N;
      copy16(dst + i * ROWS * 128, src, ok);
    }
  }
  template <bool WITH_A>
  __device__ __forceinline__ void load(int stage, int position) const {
    if (position < end()) {
      if (WITH_A) load_tile(tile(stage, 0), A, position);
      load_tile(tile(stage, 1), B, position);
      load_tile(tile(stage, 2), C_, position);
      load_stats(stage, position);
    }
    copy_commit();
  }
  __device__ __forceinline__ void load_stats(int stage, int position) const {
    if (MODE == FWD || tid >= C) return;
    bool ok = position + tid < p.N;
    i64 i = stat(ok ? position + tid : 0);
    u32 dst = base + L::STATS + stage * 3 * C * 4 + tid * 4;
    copy4(dst, (MODE == DQ ? p.rk : p.rq) + i, ok);
    copy4(dst + C * 4, p.g + i, ok);
    copy4(dst + 2 * C * 4, (MODE == DV ? p.rk : p.e) + i, ok);
  }

  __device__ __forceinline__ void rotate(u32 tile_address, int position) const {
    for (int i = tid; i < C * ROPE / 8; i += THREADS)
      F::template rotate<C, ROPE>(smem + (tile_address - base), i, F::template angles<ROPE>(p, position, i));
  }

  // ----------------------------------------------------------------------------- per-token coefficients
  // σ, τ, ρ, κ of a chunk, from the norms and normalisers that the forward pass saved. Rows past the end count nothing.
  __device__ __forceinline__ void coefficients(int stage, int position) const {
    if (MODE == FWD || tid >= C) return;
    const float* stats = reinterpret_cast<const float*>(smem + L::STATS) + stage * 3 * C + tid;
    bool ok = position + tid < p.N;
    float r = ok ? stats[0] : 0.f, inverse = ok ? 1.f / stats[C] : 0.f, last = ok ? stats[2 * C] : 0.f;
    sigma[tid] = F::scale_sigma(p) * (MODE == DQ ? r : coefficient() * r * inverse);
    tau[tid] = F::scale_tau(p) * (MODE == DQ ? r : MODE == DK ? -coefficient() * last * r : inverse);
    rho[tid] = F::scale_rho(p) * (MODE == DQ ? inverse : MODE == DV ? last : 1.f);
    kappa[tid] = F::scale_kappa(p) * (MODE == DQ ? -last : 1.f);
    if (STATES) zeta[tid] = F::scale_tau(p) * inverse;  // of the adjoint: Σ do/g
  }
  // The same, decayed to the end of a chunk of `len` tokens; after a barrier behind σ and τ.
  __device__ __forceinline__ void coefficients_at_end(int len) const {
    if (tid >= C) return;
    float decay = tid < len ? power(len - 1 - tid) : 0.f;
    float s = sigma[tid] * decay;
    if (T::NARROW && F::VALUE_ROWS) s = fminf(s, 2048.f);  // 1/‖k‖ of a row of (almost) zeros times v stays finite
    split<T, 1>(sigma_end + tid, C, s);
    split<T, 2>(tau_parts + tid, C, (MODE == FWD ? 1.f : tau[tid]) * decay);
    if (STATES || MODE == FWD) split<T, 2>(zeta_parts + tid, C, MODE == FWD ? s : zeta[tid] * decay);
  }

  // ------------------------------------------------------------------------------ fragments of the tiles
  // Part g of two neighbours (lanes with g ≥ PARTS: 0): column (row) g of an operand.
  template <int PARTS>
  __device__ __forceinline__ u32 part(const u16* from, int stride, int i) const {
    return g < PARTS ? *reinterpret_cast<const u32*>(from + g * stride + i) : 0;
  }

  // Keeps the compiler from carrying every address it can compute from the lane through the whole walk, in registers
  // that it does not have: called between the phases of a chunk, which find their place anew.
  __device__ __forceinline__ void forget_addresses() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    asm volatile("" : "+r"(base));
    find_lane();
  }
  __device__ __forceinline__ void find_lane() {
    warp = u32(tid) / 32, lane = u32(tid) % 32, g = lane / 4, t = lane % 4;
  }

  // Within a row the 16-byte pieces are permuted by an exclusive or with row % 8 (mma.cuh). Stepping by 16 columns is
  // then one more exclusive or, and by 16 rows an addition: one register serves a whole tile.
  static __device__ __forceinline__ u32 step(u32 address, int s, int k) {
    return (address ^ ((k % 4) << 5)) + (k / 4) * C * 128 + s * 2048;
  }
  __device__ __forceinline__ void rows_left(u32 (&r)[4], u32 address, int s, int k) const {
    // Rows 16s … 16s+15 of columns 16k … 16k+15, as the left operand.
    ldmatrix(r, step(address + place<C>(lane % 16, lane / 16), s, k));
  }
  __device__ __forceinline__ void rows_right(u32 (&r)[4], u32 address, int s, int k) const {
    // The same, as the (transposed) right operand: r[0], r[1] for the first eight rows, r[2], r[3] for the others.
    ldmatrix(r, step(address + place<C>(lane % 8 + (lane / 16) * 8, (lane / 8) % 2), s, k));
  }
  __device__ __forceinline__ void columns(u32 (&r)[4], u32 address, int s, int k) const {
    // Tokens 16s … 16s+15 of columns 16k … 16k+15: as the right operand r[0], r[1] for the first eight columns and
    // r[2], r[3] for the others; as the transposed left operand r[0], r[2], r[1], r[3].
    ldmatrix_trans(r, step(address + place<C>(lane % 16, lane / 16), s, k));
  }
  __device__ __forceinline__ void own_columns(u32 (&r)[4], u32 address, int s, int i) const {
    // The same of this warp's i-th pair of 8-column tiles.
    int piece = lane / 16 ? own_tile(2 * i + 1) : own_tile(2 * i);
    ldmatrix_trans(r, address + place<C>(lane % 16, piece) + s * 2048);
  }
  // The n-th of the 8-column tiles whose part of the state this warp holds. With RoPE on them, tiles that rotate
  // together are neighbours.
  __device__ __forceinline__ int own_tile(int n) const {
    constexpr int HALF = F::PROJECTS ? ROPE / 16 : 0;
    int i = warp * NT + n;
    return i < 2 * HALF ? i / 2 + (i % 2) * HALF : i;
  }

  // --------------------------------------------------------------------------------------------- norms
  // σ of the rows of k that this warp owns (forward), into shared memory.
  template <bool SAVE>
  __device__ __forceinline__ void key_norms(const float (&lo)[4], const float (&hi)[4], int position) const {
    float2 r = reciprocal_norms(lo, hi, g, p.normalize);
    if (t != g >> 1) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * warp + g + 8 * half;
      float value = half ? r.y : r.x;
      bool ok = position + row < p.N;
      sigma[row] = ok ? value * F::scale_sigma(p) : 0.f;
      if (SAVE && ok) p.rk[stat(position + row)] = value;
    }
  }

  // ---------------------------------------------------------------------------------------------- state
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++) state[i][j][x] = 0.f;
    for (int i = tid; i < D; i += THREADS) {
      c_sum[i] = b_sum[i] = 0.f;
      if (MODE == DQ && i < C) along_sum()[i] = 0.f;
      split<T, 3>(b_parts + i, D, 0.f);
    }
  }
  __device__ __forceinline__ int state_row(int i, int half) const { return 8 * own_tile(2 * i + half) + g; }
  static __device__ __forceinline__ int at(int row, int column) {
    return F::VALUE_ROWS ? column * D + row : row * D + column;
  }

  __device__ __forceinline__ void load_state() {
    clear();
    if (!seg() && !p.initial.S) return;
    Source from = F::template initial<D>(p, bh(), seg(), log2_decay);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++)
          state[i][j][x] = from.scale * from.S[at(state_row(i, x / 2), 8 * j + 2 * t + x % 2)];
    for (int i = tid; i < D; i += THREADS) {
      c_sum[i] = from.scale_c * from.c[i], b_sum[i] = from.scale_b * from.b[i];
      split<T, 3>(b_parts + i, D, b_sum[i]);
    }
  }
  // To global memory; after a barrier behind the sums.
  __device__ __forceinline__ void store_state(const Target& to) {
    if (MODE != DV)
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int x = 0; x < 4; x++)
            to.S[at(state_row(i, x / 2), 8 * j + 2 * t + x % 2)] = to.scale * state[i][j][x];
    for (int i = tid; i < D; i += THREADS) {
      to.c[i] = to.scale_c * c_sum[i];
      if (STATES || MODE == FWD) to.b[i] = to.scale_b * b_sum[i];
    }
  }

  // state += (σ C)ᵀ B, Σ τ c and (forward and `states`) Σ ζ b, everything decayed to the chunk's end.
  template <bool WITH_B_SUM>
  __device__ __forceinline__ void update(int stage, int len) {
    u32 tile_b = tile(stage, 1), tile_c = tile(stage, 2);
    if (DECAY) {
      float decay = power(len);
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int x = 0; x < 4; x++) state[i][j][x] *= decay;
    }
    // Sums over tokens on the tensor cores: a 16-bit factor and its rounding remainder, in two columns (rows).
    float csum[MT][4] = {}, bsum[NT][4] = {};
#pragma unroll
    for (int s = 0; s < CS; s++) {
      int j = 16 * s + 2 * t;
      u32 near = *reinterpret_cast<u32*>(sigma_end + j), far = *reinterpret_cast<u32*>(sigma_end + j + 8);
      u32 tau0 = part<2>(tau_parts, C, j), tau1 = part<2>(tau_parts, C, j + 8);
      u32 zeta0 = WITH_B_SUM ? part<2>(zeta_parts, C, j) : 0, zeta1 = WITH_B_SUM ? part<2>(zeta_parts, C, j + 8) : 0;
      u32 left[MT][4];
#pragma unroll
      for (int i = 0; i < MT; i++) {
        u32 r[4];
        own_columns(r, tile_c, s, i);
        mma<T>(csum[i], r[0], r[2], r[1], r[3], tau0, tau1);
        left[i][0] = multiply<T>(r[0], near), left[i][1] = multiply<T>(r[2], near);
        left[i][2] = multiply<T>(r[1], far), left[i][3] = multiply<T>(r[3], far);
      }
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        u32 r[4];
        columns(r, tile_b, s, n);
#pragma unroll
        for (int i = 0; i < MT; i++) {
          mma<T>(state[i][2 * n], left[i][0], left[i][1], left[i][2], left[i][3], r[0], r[1]);
          mma<T>(state[i][2 * n + 1], left[i][0], left[i][1], left[i][2], left[i][3], r[2], r[3]);
        }
        if (WITH_B_SUM && n / MT == warp) {
          mma<T>(bsum[2 * (n % MT)], zeta0, 0, zeta1, 0, r[0], r[1]);
          mma<T>(bsum[2 * (n % MT) + 1], zeta0, 0, zeta1, 0, r[2], r[3]);
        }
      }
    }
    add_sums(csum, bsum, power(len));
  }
  // A chunk's sums onto the running ones. This warp's columns: nobody else reads or writes them before a barrier.
  __device__ __forceinline__ void add_sums(const float (&csum)[MT][4], const float (&bsum)[NT][4], float decay) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float* at = c_sum + state_row(i, half);
        if (t == 0) *at = *at * decay + (csum[i][2 * half] + csum[i][2 * half + 1]);
      }
#pragma unroll
    for (int i = 0; i < (STATES || MODE == FWD ? NT : 0); i++) {
      float2 sum = make_float2(bsum[i][0] + __shfl_down_sync(FULL, bsum[i][0], 4),
                               bsum[i][1] + __shfl_down_sync(FULL, bsum[i][1], 4));
      int column = 8 * (warp * NT + i) + 2 * t;
      if (g == 0) {
        float2* at = reinterpret_cast<float2*>(b_sum + column);
        sum = make_float2(at->x * decay + sum.x, at->y * decay + sum.y);
        *at = sum;
        if (MODE == FWD) split<T, 3>(b_parts + column, D, sum);
      }
    }
  }

  // --------------------------------------------------------------------------------------- a chunk's output
  // W into shared memory: this warp's 16 rows (all columns: skipping masked ones costs more in branches than it
  // saves). Forward also the norms (written before the barrier inside) and g.
  __device__ __forceinline__ void weights(int stage, int position, int len, float n_before) {
    u32 tile_a = tile(stage, 0), tile_b = tile(stage, 1);
    const bool mine = CS == 4 || warp < CS;
    float x[C / 8][4] = {}, q_lo[4] = {}, q_hi[4] = {}, k_lo[4] = {}, k_hi[4] = {}, zq[4] = {};
    if (mine) {
#pragma unroll
      for (int k = 0; k < KS; k++) {
        u32 left[4], r[4];
        rows_left(left, tile_a, warp, k);
#pragma unroll
        for (int n = 0; n < CS; n++) {
          rows_right(r, tile_b, n, k);
          mma<T>(x[2 * n], left[0], left[1], left[2], left[3], r[0], r[1]);
          mma<T>(x[2 * n + 1], left[0], left[1], left[2], left[3], r[2], r[3]);
        }
        if (MODE == FWD) {
          rows_right(r, tile_b, warp, k);
          mma<T>(k_lo, r[0], r[2], r[1], r[3], r[0], r[1]);
          mma<T>(k_hi, r[0], r[2], r[1], r[3], r[2], r[3]);
          add_squares<T>(q_lo, q_hi, left);
          mma<T>(zq, left[0], left[1], left[2], left[3], part<3>(b_parts, D, 16 * k + 2 * t),
                 part<3>(b_parts, D, 16 * k + 2 * t + 8));
        }
      }
      if (MODE == FWD) key_norms<true>(k_lo, k_hi, position);
    }
    __syncthreads();  // σ (and τ, ρ, κ) of the whole chunk are there
    coefficients_at_end(len);
    if (!mine) return;
    float2 r = reciprocal_norms(q_lo, q_hi, g, p.normalize);
    int source = (lane & ~3u) | (g >> 1);
    r.x = __shfl_sync(FULL, r.x, source), r.y = __shfl_sync(FULL, r.y, source);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * warp + g + 8 * half;
      float rq = half ? r.y : r.x;
      float rho_i = MODE == FWD ? coefficient() * rq * F::scale_rho(p) : rho[row];
      float kappa_i = MODE == FWD ? 1.f : kappa[row];
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < C / 8; n++) {
        int j = 8 * n + 2 * t;
        float2 s = *reinterpret_cast<float2*>(sigma + j);
        float2 ta = MODE == FWD ? make_float2(1.f, 1.f) : *reinterpret_cast<float2*>(tau + j);
        float w0 = rho_i * s.x * x[n][2 * half] + kappa_i * ta.x;
        float w1 = rho_i * s.y * x[n][2 * half + 1] + kappa_i * ta.y;
        if (DECAY) w0 *= powers[max(row - j, 0)], w1 *= powers[max(row - j - 1, 0)];
        w0 = j <= row ? w0 : 0.f, w1 = j + 1 <= row ? w1 : 0.f;
        u32 w = pack<T>(w0, w1);
        write4((base + L::WEIGHTS + place<C>(row, 0) + 4 * t) ^ (n << 4), w);
        float2 rounded = unpack<T>(w);
        sum += rounded.x + rounded.y;  // the normaliser adds what the tensor cores multiply by
      }
      if (MODE == FWD) {
        float inner = half ? zq[2] + zq[3] : zq[0] + zq[1];
        for (int d = 1; d < 4; d *= 2) {
          sum += __shfl_xor_sync(FULL, sum, d);
          inner += __shfl_xor_sync(FULL, inner, d);
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
  __device__ __forceinline__ void outputs(int stage, int position, float (&y)[CS][NT][4]) {
    u32 tile_a = tile(stage, 0), tile_c = tile(stage, 2);
#pragma unroll
    for (int m = 0; m < CS; m++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) y[m][n][x] = 0.f;
#pragma unroll
    for (int k = 0; k < KS; k++) {
      u32 right[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float(&s)[4] = state[n / 2][2 * k + half];
          right[n][half] = n % 2 ? pack<T>(s[2], s[3]) : pack<T>(s[0], s[1]);
        }
#pragma unroll
      for (int m = 0; m < CS; m++) {
        u32 r[4];
        rows_left(r, tile_a, m, k);
#pragma unroll
        for (int n = 0; n < NT; n++) mma<T>(y[m][n], r[0], r[1], r[2], r[3], right[n][0], right[n][1]);
      }
    }
    __syncthreads();  // W, and forward ρ and 1/g, are there; the tile of a is free
    if (F::PROJECTS) {
      load_tile(tile_a, UNIT, position);
      copy_commit();
    }
    float2 sum[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) sum[n] = *reinterpret_cast<float2*>(c_sum + 8 * own_tile(n) + 2 * t);
#pragma unroll
    for (int m = 0; m < CS; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = 16 * m + g + 8 * half;
        float decay = power(row + 1), r = rho[row] * decay, k = (MODE == FWD ? 1.f : kappa[row]) * decay;
#pragma unroll
        for (int n = 0; n < NT; n++) {
          y[m][n][2 * half] = r * y[m][n][2 * half] + k * sum[n].x;
          y[m][n][2 * half + 1] = r * y[m][n][2 * half + 1] + k * sum[n].y;
        }
      }
#pragma unroll
    for (int s = 0; s < CS; s++) {
      u32 right[MT][4];
#pragma unroll
      for (int i = 0; i < MT; i++) own_columns(right[i], tile_c, s, i);
#pragma unroll
      for (int m = s; m < CS; m++) {
        u32 r[4];
        ldmatrix(r, ((base + L::WEIGHTS + place<C>(lane % 16, lane / 16)) ^ (s << 5)) + m * 2048);
#pragma unroll
        for (int n = 0; n < NT; n++)
          mma<T>(y[m][n], r[0], r[1], r[2], r[3], right[n / 2][2 * (n % 2)], right[n / 2][2 * (n % 2) + 1]);
      }
    }
  }

  // This warp's columns of the output from a tile in shared memory that it has written, a 16-byte piece a lane.
  __device__ __forceinline__ void store(u32 tile_address, int position) const {
    constexpr int STEP = 32 / NT;  // rows that a warp stores at once
    int piece = own_tile(lane % NT), row = lane / NT, left = p.N - position - row;
    u32 from = tile_address + place<C>(row, piece);
    u16* to = this->row(Y, position + row) + 8 * piece;
    i64 step = (F::REVERSE ? -STEP : STEP) * p.strides[Y].token;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C / STEP; i++, to += step) {
      uint4 v = read16((from ^ (((i * STEP) % 8) << 4)) + i * STEP * 128);
      if (i * STEP < left) store16(to, v);
    }
  }
  // This lane's two columns of the n-th of this warp's tiles (row % 8 == g).
  __device__ __forceinline__ u32 own_word(u32 tile_address, int row, int n) const {
    return tile_address + place<C>(row, own_tile(n)) + 4 * t;
  }

  // FWD: o = y/g; DV: dv = y. Through the tile of a, which is free.
  __device__ __forceinline__ void finish(int stage, const float (&y)[CS][NT][4], int position) {
#pragma unroll
    for (int m = 0; m < CS; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = 16 * m + g + 8 * half;
        float scale = MODE == FWD ? kappa[row] : F::scale_y(p);
#pragma unroll
        for (int n = 0; n < NT; n++)
          write4(own_word(tile(stage, 0), row, n), pack<T>(y[m][n][2 * half] * scale, y[m][n][2 * half + 1] * scale));
      }
    store(tile(stage, 0), position);
  }

  // The transpose of RoPE on two columns of two tiles that rotate together.
  __device__ __forceinline__ void rotate_back(float2& lo, float2& hi, int position, int column) const {
    i64 at = i64(token(min(position, p.N - 1))) * ROPE + column;
    float2 cos = *reinterpret_cast<const float2*>(p.cos + at), sin = *reinterpret_cast<const float2*>(p.sin + at);
    ::rotate_back(lo, hi, cos, sin);
  }

  // DQ: Σ q̂·y of row i of every chunk, in place of ζ, which only FWD and `states` need.
  __device__ __forceinline__ float* along_sum() const { return zeta; }
  __device__ __forceinline__ void store_db() const {
    if (warp > 0) return;
    float sum = along_sum()[lane] + (C > 32 ? along_sum()[lane + 32] : 0.f);
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(FULL, sum, d);
    if (lane == 0) p.db[bh() * p.segments + seg()] = sum;
  }

  // DQ, DK: through the norm, dx = r (y − x̂ (x̂·y)), and through RoPE; b and r as the table says. The tile of a holds
  // the rows x by now, and then the result.
  __device__ __forceinline__ void project(int stage, float (&y)[CS][NT][4], int position) {
    const float* r = MODE == DQ ? p.rq : p.rk;
    u32 tile_unit = tile(stage, 0);
    copy_wait<0>();
    __syncthreads();
    if (ROPE) {
      rotate(tile_unit, position);
      __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2 * CS; m++) {
      int row = 8 * m + g;
      float dot = 0.f;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float2 x = unpack<T>(read4(own_word(tile_unit, row, n)));
        dot += x.x * y[m / 2][n][2 * (m % 2)] + x.y * y[m / 2][n][2 * (m % 2) + 1];
      }
      dot += __shfl_xor_sync(FULL, dot, 1);
      dot += __shfl_xor_sync(FULL, dot, 2);
      if (t == 0) partial[row * WARPS + warp] = dot;
    }
    __syncthreads();
    forget_addresses();
#pragma unroll
    for (int m = 0; m < 2 * CS; m++) {
      int row = 8 * m + g, at = position + row;
      float4 d = *reinterpret_cast<float4*>(partial + row * WARPS);
      float dot = (d.x + d.y) + (d.z + d.w);
      float norm = r[stat(min(at, p.N - 1))];
      float out = (MODE == DQ ? coefficient() : 1.f) * norm * F::scale_y(p);
      float along = p.normalize ? norm * norm * dot : 0.f;
      if (MODE == DQ && at < p.N && warp == 0 && t == 0) along_sum()[row] += norm * dot * F::scale_y(p);
#pragma unroll
      for (int n = 0; n < NT; n += 2) {
        u32 first = own_word(tile_unit, row, n), second = own_word(tile_unit, row, n + 1);
        float2 x = unpack<T>(read4(first)), z = unpack<T>(read4(second));
        float2 lo = make_float2(out * (y[m / 2][n][2 * (m % 2)] - along * x.x),
                                out * (y[m / 2][n][2 * (m % 2) + 1] - along * x.y));
        float2 hi = make_float2(out * (y[m / 2][n + 1][2 * (m % 2)] - along * z.x),
                                out * (y[m / 2][n + 1][2 * (m % 2) + 1] - along * z.y));
        if (warp * NT + n < ROPE / 8) rotate_back(lo, hi, at, 8 * own_tile(n) + 2 * t);
        write4(first, pack<T>(lo.x, lo.y)), write4(second, pack<T>(hi.x, hi.y));
      }
    }
    store(tile_unit, position);
  }

  // ----------------------------------------------------------------------------------------------- the walk
  __device__ __forceinline__ void rotate_tiles(int stage, int position, bool with_a) const {
    if (!ROPE) return;
    if (with_a && F::ROPE_A) rotate(tile(stage, 0), position);
    if (F::ROPE_B) rotate(tile(stage, 1), position);
    if (F::ROPE_C) rotate(tile(stage, 2), position);
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    load<true>(0, begin);
    load_state();
    float n = MODE == FWD ? tokens_before<DECAY>(p, bh(), log2_decay, begin) : 0.f;
    int stage = 0;
    for (int position = begin; position < end(); position += C, stage ^= 1) {
      forget_addresses();
      int len = min(C, p.N - position);
      copy_wait<0>();
      __syncthreads();  // the tiles are there, and everybody is done with the other stage
      load<true>(stage ^ 1, position + C);
      rotate_tiles(stage, position, true);
      coefficients(stage, position);
      weights(stage, position, len, n);
      float y[CS][NT][4];
      forget_addresses();
      outputs(stage, position, y);
      forget_addresses();
      if constexpr (F::PROJECTS)
        project(stage, y, position);
      else
        finish(stage, y, position);
      forget_addresses();
      update<MODE == FWD>(stage, len);
      if (MODE == FWD) n = DECAY ? n * power(C) + powers[C + 1] : n + C;
    }
    __syncthreads();
    if (MODE != DQ && seg() == p.segments - 1 && p.final.S) store_state(F::template final<D>(p, bh(), log2_decay));
    if (MODE == DQ) store_db();
  }

  // What this segment adds to the state: FWD's S, Σ k̂, Σ v; DK's and DV's adjoints of them.
  __device__ __forceinline__ void run_states() {
    load<false>(0, begin);
    clear();
    int stage = 0;
    for (int position = begin; position < end(); position += C, stage ^= 1) {
      forget_addresses();
      copy_wait<0>();
      __syncthreads();
      load<false>(stage ^ 1, position + C);
      rotate_tiles(stage, position, false);
      coefficients(stage, position);
      if (MODE == FWD && warp < CS) {
        float lo[4] = {}, hi[4] = {};
#pragma unroll
        for (int k = 0; k < KS; k++) {
          u32 r[4];
          rows_right(r, tile(stage, 1), warp, k);
          mma<T>(lo, r[0], r[2], r[1], r[3], r[0], r[1]);
          mma<T>(hi, r[0], r[2], r[1], r[3], r[2], r[3]);
        }
        key_norms<false>(lo, hi, position);
      }
      __syncthreads();
      int len = min(C, p.N - position);
      coefficients_at_end(len);
      __syncthreads();
      forget_addresses();
      update<true>(stage, len);
    }
    __syncthreads();
    store_state(F::template before_segment<D>(p, bh(), seg() + 1));
  }
};

#ifdef HOPPER_BUILD
#include "hopper.cuh"
#endif

// ------------------------------------------------------------------------------------------------- kernels
#ifdef HOPPER_BUILD
template <int D>
constexpr int BLOCK = 2 * D + 256;
#else
template <int D>
constexpr int BLOCK = THREADS;
#endif

// Grid (segments, B·H); Variant.shared of launch.py says how much dynamic shared memory.
template <typename T, int D, int C, int MODE, bool DECAY, int ROPE, int BLOCKS>
__global__ void __launch_bounds__(BLOCK<D>, BLOCKS) scan(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
#ifdef HOPPER_BUILD
  HopperScan<T, D, MODE, DECAY, ROPE, false>(p, smem).run();
#else
  Scan<T, D, C, MODE, DECAY, ROPE, false>(p, smem).run();
#endif
}

// Grid (segments − 1, B·H); every part of a segment is a segment here. MODE: FWD, or DK for the adjoint.
template <typename T, int D, int C, int MODE, bool DECAY, int ROPE, int BLOCKS>
__global__ void __launch_bounds__(BLOCK<D>, BLOCKS) states(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
#ifdef HOPPER_BUILD
  HopperScan<T, D, MODE, DECAY, ROPE, true>(p, smem).run();
#else
  Scan<T, D, C, MODE, DECAY, ROPE, true>(p, smem).run_states();
#endif
}

#ifdef HOPPER_BUILD
// The forward scan of whole sequences, 64 columns of o a block. Grid (D/64, B·H).
template <typename T, int D, bool DECAY, int ROPE>
__global__ void __launch_bounds__(512, 1) scan_whole(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char smem[];
  HopperScan<T, D, FWD, DECAY, ROPE, false, true>(p, smem).run();
}

// dk and dv side by side, at once: what both read may come from device memory once. Grid (segments, B·H, 2).
template <typename T, int D, bool DECAY, int ROPE, int BLOCKS>
__global__ void __launch_bounds__(BLOCK<D>, BLOCKS)
    scan_pair(const __grid_constant__ Params dk, const __grid_constant__ Params dv) {
  extern __shared__ __align__(1024) char smem[];
  if (blockIdx.z == 0)
    HopperScan<T, D, DK, DECAY, ROPE, false>(dk, smem).run();
  else
    HopperScan<T, D, DV, DECAY, ROPE, false>(dv, smem).run();
}
#endif

// Scratch: what each segment adds → the state before the next one. Grid (⌈(D·D + 2D)/THREADS⌉, B·H).
template <int D, bool REVERSE, bool DECAY>
__global__ void __launch_bounds__(THREADS) prefix(const __grid_constant__ Params p) {
  constexpr int SIZE = D * D + 2 * D;
  int i = blockIdx.x * THREADS + threadIdx.x;
  i64 bh = blockIdx.y;
  if (i >= SIZE) return;
  float log_decay = DECAY ? p.log_decay[bh % p.H] : 0.f, decay = expf(log_decay * p.segment_len);
  float sum = 0.f;
  if (p.initial.S) {
    float scale = REVERSE ? p.range * expf(-log_decay) : i < D * D + D ? p.inverse_range : 1.f;
    sum = scale * (i < D * D       ? p.initial.S[bh * D * D + i]
                   : i < D * D + D ? p.initial.k[bh * D + i - D * D]
                                   : p.initial.v[bh * D + i - D * D - D]);
  }
  float* at = p.scratch + bh * (p.segments - 1) * SIZE + i;
  for (int s = 0; s < p.segments - 1; s++, at += SIZE) *at = sum = sum * decay + *at;
}

// e = (do·o)/g of every token. y: o, a: do. D/8 lanes a row; grid (⌈N·H · D/8 / THREADS⌉, B).
template <typename T, int D>
__global__ void __launch_bounds__(THREADS) row_products(const __grid_constant__ Params p) {
  constexpr int LANES = D / 8;
  i64 row = (i64(blockIdx.x) * THREADS + threadIdx.x) / LANES, n = row / p.H;  // (token, head)
  int piece = threadIdx.x % LANES, h = row % p.H, batch = blockIdx.y;
  float sum = 0.f;
  if (n < p.N) {
    auto read = [&](int tensor) {
      const u16* from = rows_of_head(p, tensor, batch, h) + n * p.strides[tensor].token + piece * 8;
      return *reinterpret_cast<const uint4*>(from);
    };
    uint4 x = read(Y), d = read(A);
    sum = dot<T>(x.x, d.x) + dot<T>(x.y, d.y) + dot<T>(x.z, d.z) + dot<T>(x.w, d.w);
  }
#pragma unroll
  for (int d = 1; d < LANES; d *= 2) sum += __shfl_xor_sync(FULL, sum, d);
  if (piece == 0 && n < p.N) {
    i64 at = (i64(batch) * p.H + h) * p.N + n;
    p.e[at] = sum / p.g[at];
  }
}
