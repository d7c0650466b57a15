// The walk of scan.cu on Hopper (sm_90a): roles instead of phases. Included by scan.cu, whose names it uses.
//
//     producers   four warps: asynchronous copies of a chunk's tiles into a ring of stages
//     rows        four warps: what belongs to a token alone. RoPE in place, norms, the normaliser's part from before
//                 the chunk, (1)'s coefficients, Σ ζ b, and in DQ e, which DK and DV read
//     consumers   a warpgroup for every 64 columns of y and c: the products, y, and the state
//
// A block has all columns of a head, or (WHOLE) 64 of them: few long sequences then fill the card without being cut.
//
// Each stage passes three barriers: full (tiles have landed), ready (rows are done with it), empty (consumers are).
//
// Y is made transposed, columns of c by tokens: the state, whose rows are columns of c, then goes from accumulators to
// operands without leaving registers. Per chunk a consumer group issues
//
//     X = A Bᵀ                  and  Yᵀ = state Aᵀ          (both at once)
//     W from X → 16 bits → shared memory; Yᵀ scaled
//     Yᵀ += Cᵀ Wᵀ               and  state += (σ C)ᵀ B      (both at once; y is finished and stored under the latter)
#pragma once
#include "wgmma.cuh"

// --------------------------------------------------------------------------------------------------- barriers
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when the thread's copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// A barrier of some of the block's warps.
__device__ __forceinline__ void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// 1/x to one unit in the last place, without a branch for what is no normal number.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// What an accumulator holds is there only after the wait: nothing that reads it may move before this.
template <int M>
__device__ __forceinline__ void settle(float (&d)[M][4]) {
#pragma unroll
  for (int i = 0; i < M; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// ---------------------------------------------------------------------------------------------- shared memory
template <int D, int GROUPS, int ROW_TILES, bool STAGING>
struct HopperShared {  // byte offsets; tiles first: swizzled, aligned to 1024. ROW_TILES: of whole rows, beside c's
  static constexpr int C = 64;
  static constexpr int PANEL = C * 128;  // 64 columns of a tile
  static constexpr int TILE = D / 64 * PANEL, STAGE = ROW_TILES * TILE + GROUPS * PANEL;
  static constexpr bool PROJECTS = ROW_TILES == 3;
  static constexpr int STAGES = GROUPS < D / 64 ? 4 : D == 64 && PROJECTS ? 2 : 3;
  static constexpr int WEIGHTS = STAGES * STAGE;              // W, one of each group
  static constexpr int OUT = WEIGHTS + GROUPS * PANEL;        // y on its way out, where no tile is free for it
  static constexpr int COEFFICIENTS = OUT + (STAGING ? GROUPS * PANEL : 0);
  // of a stage: σ τ ρ κ, the last two decayed from the chunk's start, and 1/‖x‖ or the normaliser's part from before;
  // decayed to the chunk's end: σ in 16 bits, τ in two such
  static constexpr int STAGE_COEFFICIENTS = 7 * C * 4 + 3 * C * 2;
  static constexpr int SUMS = COEFFICIENTS + STAGES * STAGE_COEFFICIENTS;  // Σ ζ b in 32 and in 3 × 16 bits; ζ in 2 × 16
  static constexpr int PARTIAL = SUMS + 10 * D + 4 * C;  // x̂·y: two chunks, a part of each consumer warp
  static constexpr int SCALES = PARTIAL + (PROJECTS ? 2 * 4 * GROUPS * C * 4 : 0);  // two numbers a token and group
  static constexpr int POWERS = SCALES + GROUPS * C * 8;
  static constexpr int HEADS = POWERS + (C + 4) * 4;
  static constexpr int BARRIERS = HEADS + 6 * 8;
  static constexpr int BYTES = BARRIERS + 3 * STAGES * 8;
  static_assert(BYTES <= (D == 128 ? 226568 : 98440), "what launch.py gives a block (Variant.shared)");
};

// --------------------------------------------------------------------------------------------------- the walk
// STATES: only what a segment adds to the state. WHOLE: 64 columns of y, uncut; the states before the segments are left
// in the scratch on the way.
template <typename T, int D, int MODE, bool DECAY, int ROPE, bool STATES, bool WHOLE = false>
struct HopperScan {
  using F = Facts<T, MODE>;
  static constexpr int C = 64, PANELS = D / 64, GROUPS = WHOLE ? 1 : PANELS;  // of 64 columns: a row, this block's of c and y
  static constexpr int CONSUMERS = 128 * GROUPS, ROWS = 128, PRODUCERS = 128;
  static constexpr int KS = D / 16, CS = C / 16;  // steps of 16 along D and along a chunk
  static constexpr bool PROJECTS = F::PROJECTS && !STATES;
  static constexpr bool SUMS_B = MODE == FWD || STATES;
  static constexpr bool FINDS_E = MODE == DQ;
  using L = HopperShared<D, GROUPS, STATES ? 1 : PROJECTS ? 3 : 2, !PROJECTS && !STATES>;
  static_assert(!WHOLE || MODE == FWD, "the others project a whole row, or read what another walk left");
  static_assert(ROPE <= 64, "columns that rotate together must be in one group");
  enum { ROWS_BARRIER = 1, CONSUMERS_BARRIER = 2, GROUP_BARRIER = 3 };

  const Params& p;
  char* smem;
  u32 base;
  int tid, warp, lane, g, t;  // g, t: the lane's row and column pair in a tensor-core tile
  int segment, part, bh, begin, end;  // part: the columns of c and y are those from 64·GROUPS·part
  float b, log2_decay;
  float* powers;

  struct Coefficients {
    float *sigma, *tau, *rho, *kappa, *past_rho, *past_kappa, *row;
    u16 *sigma_end, *tau_parts;
  };
  template <typename POINTER>
  struct Ends {  // where S [D, D], Σ τ c and Σ ζ b come from or go to, each times its scale; null: zero, nowhere
    POINTER S, c, b;
    float scale, scale_c, scale_b;
  };
  using Source = Ends<const float*>;
  using Target = Ends<float*>;
  struct Ring {  // a place in the ring of stages
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
      if (++stage == L::STAGES) stage = 0, phase ^= 1;
    }
  };

  __device__ __forceinline__ HopperScan(const Params& params, char* shared, int segment_, int part_ = 0)
      : p(params), smem(shared), segment(segment_), part(part_) {
    base = shared_address(smem);
    forget_addresses();
    bh = blockIdx.y;
    begin = WHOLE ? 0 : segment * p.segment_len, end = WHOLE ? p.N : min(begin + p.segment_len, p.N);
    powers = reinterpret_cast<float*>(smem + L::POWERS);
    int batch = bh / p.H, h = bh % p.H;
    if (tid < 6) {  // every tensor's row of this head at position 0
      const Rows& x = (&p.a)[tid];
      u16* first = static_cast<u16*>(x.data) + batch * x.batch + h * x.head;
      if (tid == C_ || tid == Y) first += first_column();
      reinterpret_cast<u16**>(smem + L::HEADS)[tid] = first + (F::REVERSE ? i64(p.N - 1) * x.token : 0);
    }
    b = p.coefficient ? p.coefficient[h] : p.b_value;
    log2_decay = DECAY ? p.log_decay[h] * 1.4426950408889634f : 0.f;
    if (DECAY && tid <= C) powers[tid] = exp2f(log2_decay * tid);
    if (tid == 0) {
      for (int i = 0; i < L::STAGES; i++) {
        barrier_init(full(i), PRODUCERS);
        barrier_init(ready(i), ROWS);
        barrier_init(empty(i), 4 * GROUPS + (SUMS_B ? 4 : 0));
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void run() {
    if (warp < 4 * GROUPS) {
      take_registers<WHOLE ? 240 : D == 128 ? 192 : 144>();  // of 168, 128 and 80 at launch
      consume();
    } else if (warp < 4 * GROUPS + 4) {
      give_registers<D == 128 ? 88 : 64>();
      rows();
    } else {
      give_registers<D == 128 ? 40 : 32>();
      produce();
    }
  }

  // Keeps the compiler from carrying every address it can compute from the lane through the whole walk, in registers
  // that it does not have: called between the phases of a chunk, which find their place anew.
  __device__ __forceinline__ void forget_addresses() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    asm volatile("" : "+r"(base));
    warp = u32(tid) / 32, lane = u32(tid) % 32, g = lane / 4, t = lane % 4;
  }

  // ------------------------------------------------------------------------------------------- places
  __device__ __forceinline__ u32 full(int stage) const { return base + L::BARRIERS + 8 * stage; }
  __device__ __forceinline__ u32 ready(int stage) const { return full(L::STAGES + stage); }
  __device__ __forceinline__ u32 empty(int stage) const { return full(2 * L::STAGES + stage); }
  // In the order A, B, UNIT, C: only the last may have fewer columns. `states` has no A.
  __device__ __forceinline__ u32 tile(int stage, int which) const {
    constexpr int WITH_A = STATES ? 0 : 1, UNITS = PROJECTS ? 1 : 0;
    int before = which == A ? 0 : which == B ? WITH_A : which == UNIT ? WITH_A + 1 : WITH_A + 1 + UNITS;
    return base + stage * L::STAGE + before * L::TILE;
  }
  __device__ __forceinline__ int first_column() const { return WHOLE ? 64 * part : 0; }
  __device__ __forceinline__ Coefficients coefficients(int stage) const {
    float* x = reinterpret_cast<float*>(smem + L::COEFFICIENTS + stage * L::STAGE_COEFFICIENTS);
    u16* y = reinterpret_cast<u16*>(x + 7 * C);
    return {x, x + C, x + 2 * C, x + 3 * C, x + 4 * C, x + 5 * C, x + 6 * C, y, y + C};
  }
  __device__ __forceinline__ int token(int position) const { return F::token(p, position); }
  __device__ __forceinline__ i64 stat(int position) const { return i64(bh) * p.N + token(position); }  // of [BH, N]
  __device__ __forceinline__ float power(int i) const { return DECAY ? powers[i] : 1.f; }
  // Row `position` of tensor a, b, c, unit, y or o (0 … 5).
  __device__ __forceinline__ u16* row(int tensor, int position) const {
    const Rows& x = (&p.a)[tensor];
    return read_pointer(base + L::HEADS + 8 * tensor) + i64(position) * (F::REVERSE ? -x.token : x.token);
  }

  // ------------------------------------------------------------------------------------------- the producer
  __device__ __forceinline__ void produce() {
    Ring ring;
    for (int position = begin; position < end; position += C, ring.next()) {
      barrier_wait(empty(ring.stage), ring.phase ^ 1);
      if (!STATES) load_tile<PANELS>(tile(ring.stage, A), A, position);
      load_tile<PANELS>(tile(ring.stage, B), B, position);
      load_tile<GROUPS>(tile(ring.stage, C_), C_, position);
      if (PROJECTS) load_tile<PANELS>(tile(ring.stage, UNIT), UNIT, position);
      barrier_arrive_after_copies(full(ring.stage));
    }
    copy_commit();
    copy_wait<0>();
  }
  template <int COLUMNS>  // of 64
  __device__ __forceinline__ void load_tile(u32 dst, int tensor, int position) const {
    constexpr int PIECES = 8 * COLUMNS, STEP = PRODUCERS / PIECES;  // rows that are copied at once: a multiple of 8
    int first = (tid % PRODUCERS) / PIECES, piece = tid % PIECES;
    const u16* src = row(tensor, position + first) + 8 * piece;
    i64 step = (F::REVERSE ? -STEP : STEP) * i64((&p.a)[tensor].token);
    int left = p.N - position - first;
    dst += place<C>(first, piece);
#pragma unroll
    for (int i = 0; i < C; i += STEP, src += step) copy16(dst + i * 128, src, i < left);
  }

  // ------------------------------------------------------------------------------------------- the rows
  __device__ __forceinline__ void rows() {
    float n = MODE == FWD ? tokens_before<DECAY>(p, bh, log2_decay, begin) : 0.f, chunk_tokens = 0.f;
    if (MODE == FWD && DECAY)
      for (int i = 0; i < C; i++) chunk_tokens += powers[i];
    if (SUMS_B) load_sums(tid % ROWS);
    Stats next = MODE == FWD ? Stats{} : stats(begin, tid % ROWS);
    Ring ring;
    for (int position = begin; position < end; position += C, ring.next()) {
      forget_addresses();
      const int thread = tid % ROWS, stage = ring.stage, len = min(C, p.N - position);
      Coefficients c = coefficients(stage);
      if (leaves_state(position)) store_sums(thread, scratch(position / p.segment_len - 1));
      barrier_wait(empty(stage), ring.phase ^ 1);  // the coefficients' old readers, too, are done
      uint4 o[4][PANELS];
      if (FINDS_E) read_outputs(o, position);
      if (MODE != FWD && !FINDS_E) write_coefficients(c, next, len, thread);
      barrier_wait(full(stage), ring.phase);
      if (ROPE) rotate_tiles(stage, position, thread);
      if (MODE == FWD) {
        if (ROPE) sync_some(ROWS_BARRIER, ROWS);
        if (!STATES) query_rows(c, tile(stage, A), position, n);
        key_rows(c, tile(stage, B), position, len);
        n = DECAY ? n * power(C) + chunk_tokens : n + C;
      }
      if (FINDS_E) {
        row_products(o, tile(stage, A), c.row);
        sync_some(ROWS_BARRIER, ROWS);
        next.e = next.g != 0.f ? c.row[thread % C] / next.g : 0.f;
        if (thread < len) p.e[stat(position + thread)] = next.e;
        write_coefficients(c, next, len, thread);
      }
      if (MODE != FWD) next = stats(position + C, thread);
      fence_shared();  // what was copied and rotated, for the consumers' products
      barrier_arrive(ready(stage));
      if (SUMS_B) {
        sync_some(ROWS_BARRIER, ROWS);  // ζ is written, and rows are rotated
        add_sums(tile(stage, B), len);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(stage));
        sync_some(ROWS_BARRIER, ROWS);
      }
    }
    if (SUMS_B) store_sums(tid % ROWS, final());
  }
  // What the forward pass saved of a token.
  struct Stats {
    float g, e, r, unit;  // r: 1/‖·‖ of what σ scales (k for DQ, q for DK and DV); unit: of what is projected, or of k
  };
  __device__ __forceinline__ Stats stats(int position, int thread) const {
    Stats s = {0.f, 0.f, 0.f, 0.f};
    if (thread >= C || position + thread >= p.N) return s;
    i64 i = stat(position + thread);
    s.g = p.g[i], s.r = (MODE == DQ ? p.rk : p.rq)[i], s.unit = (MODE == DQ ? p.rq : p.rk)[i];
    if (MODE == DK) s.e = p.e[i];
    return s;
  }
  // σ, τ, ρ, κ of a token, from what was saved. Rows past the end count nothing.
  __device__ __forceinline__ void write_coefficients(const Coefficients& c, const Stats& s, int len, int i) const {
    if (i >= C) return;
    bool ok = i < len;
    float inverse = ok ? reciprocal(s.g) : 0.f, scale_tau = F::scale_tau(p);
    float sigma = F::scale_sigma(p) * (MODE == DQ ? s.r : b * s.r * inverse);
    float tau = scale_tau * (MODE == DQ ? s.r : MODE == DK ? -b * s.e * s.r : inverse);
    float rho = F::scale_rho(p) * (MODE == DQ ? inverse : MODE == DV ? s.unit : 1.f);
    float kappa = F::scale_kappa(p) * (MODE == DQ ? -s.e : 1.f);
    float decay = ok ? power(len - 1 - i) : 0.f, past = power(i + 1);
    c.sigma[i] = sigma, c.tau[i] = tau, c.rho[i] = rho, c.kappa[i] = kappa;
    c.past_rho[i] = rho * past, c.past_kappa[i] = kappa * past;
    c.row[i] = s.unit;
    write_end(c, i, sigma * decay, tau * decay, scale_tau * inverse * decay);  // ζ: of the adjoint, for Σ do/g
  }
  // σ, τ and ζ decayed to the chunk's end, as factors for tensor cores.
  __device__ __forceinline__ void write_end(const Coefficients& c, int i, float sigma, float tau, float zeta) const {
    split<T, 1>(c.sigma_end + i, C, sigma);
    split<T, 2>(c.tau_parts + i, C, tau);
    if (SUMS_B) split<T, 2>(zeta_parts() + i, C, zeta);
  }

  // A warp has 16 rows, whose products with themselves, on the tensor cores' diagonal, are the squared norms.
  __device__ __forceinline__ int first_row() const { return 16 * (warp % 4); }
  __device__ __forceinline__ u32 own_rows(u32 tile_address, int k) const {  // of columns 16k … 16k+15
    u32 address = tile_address + place<C>(first_row() + lane % 16, lane / 16);
    return (address ^ ((k % 4) << 5)) + (k / 4) * L::PANEL;
  }
  // Forward: ρ and the normaliser's part from before the chunk, of this warp's queries.
  __device__ __forceinline__ void query_rows(const Coefficients& c, u32 tile_address, int position, float n) const {
    float lo[4] = {}, hi[4] = {}, inner[4] = {};
#pragma unroll
    for (int k = 0; k < KS; k++) {
      u32 x[4];
      ldmatrix(x, own_rows(tile_address, k));
      add_squares<T>(lo, hi, x);
      const u16* z = b_parts() + 16 * k + 2 * t + (g < 3 ? g : 0) * D;  // Σ k̂ as three 16-bit numbers, in columns
      u32 near = *reinterpret_cast<const u32*>(z), far = *reinterpret_cast<const u32*>(z + 8);
      mma<T>(inner, x[0], x[1], x[2], x[3], g < 3 ? near : 0, g < 3 ? far : 0);
    }
    float2 r = reciprocal_norms(lo, hi, g, p.normalize);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float dot = inner[2 * half] + inner[2 * half + 1];
      dot += __shfl_xor_sync(FULL, dot, 1);
      dot += __shfl_xor_sync(FULL, dot, 2);
      int i = first_row() + g + 8 * half;
      float rq = half ? r.y : r.x, rho = b * rq * F::scale_rho(p), past = power(i + 1);
      if (t != g >> 1) continue;
      c.rho[i] = rho, c.past_rho[i] = rho * past, c.past_kappa[i] = past;
      c.row[i] = past * (n + rho * dot);
      if (part == 0 && position + i < p.N) p.rq[stat(position + i)] = rq;
    }
  }
  // Forward: σ of this warp's keys.
  __device__ __forceinline__ void key_rows(const Coefficients& c, u32 tile_address, int position, int len) const {
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int k = 0; k < KS; k++) {
      u32 x[4];
      ldmatrix(x, own_rows(tile_address, k));
      add_squares<T>(lo, hi, x);
    }
    float2 r = reciprocal_norms(lo, hi, g, p.normalize);
    if (t != g >> 1) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int i = first_row() + g + 8 * half;
      bool ok = i < len;
      float rk = half ? r.y : r.x, sigma = ok ? rk * F::scale_sigma(p) : 0.f;
      float decay = ok ? power(len - 1 - i) : 0.f, end = sigma * decay;
      if (T::NARROW) end = fminf(end, 2048.f);  // 1/‖k‖ of a row of (almost) zeros times v stays finite
      c.sigma[i] = sigma;
      write_end(c, i, end, decay, end);
      if (!STATES && part == 0 && ok) p.rk[stat(position + i)] = rk;
    }
  }

  // do·o of this warp's rows, eight lanes a row; o comes straight from global memory, asked for before the wait for
  // the tiles.
  __device__ __forceinline__ int eighth_row(int i) const { return first_row() + lane / 8 + 4 * i; }
  __device__ __forceinline__ void read_outputs(uint4 (&o)[4][PANELS], int position) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int k = 0; k < PANELS; k++) {
        int at = position + eighth_row(i);
        const uint4* from = reinterpret_cast<const uint4*>(row(O, at)) + lane % 8 + 8 * k;
        o[i][k] = at < p.N ? *from : make_uint4(0, 0, 0, 0);
      }
  }
  __device__ __forceinline__ void row_products(const uint4 (&o)[4][PANELS], u32 tile_address, float* to) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < PANELS; k++) {
        uint4 x = read16(tile_address + place<C>(eighth_row(i), lane % 8 + 8 * k));
        sum += dot<T>(x.x, o[i][k].x) + dot<T>(x.y, o[i][k].y) + dot<T>(x.z, o[i][k].z) + dot<T>(x.w, o[i][k].w);
      }
#pragma unroll
      for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(FULL, sum, d);
      if (lane % 8 == 0) to[eighth_row(i)] = sum;
    }
  }

  // Σ ζ b, a number a column, and the same as three 16-bit numbers; ζ of the chunk as two.
  __device__ __forceinline__ float* b_sum() const { return reinterpret_cast<float*>(smem + L::SUMS); }
  __device__ __forceinline__ u16* b_parts() const { return reinterpret_cast<u16*>(b_sum() + D); }
  __device__ __forceinline__ u16* zeta_parts() const { return b_parts() + 3 * D; }
  // Adds a chunk's, on the tensor cores; a warp has a quarter of the columns.
  __device__ __forceinline__ void add_sums(u32 tile_address, int len) const {
    constexpr int PAIRS = D / 64;  // of 8-column tiles
    float sum[2 * PAIRS][4] = {};
#pragma unroll
    for (int s = 0; s < CS; s++) {
      const u16* zeta = zeta_parts() + 16 * s + 2 * t + (g < 2 ? g : 0) * C;
      u32 near = g < 2 ? *reinterpret_cast<const u32*>(zeta) : 0, far = g < 2 ? *reinterpret_cast<const u32*>(zeta + 8) : 0;
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        u32 r[4];
        ldmatrix_trans(r, tile_address + place<C>(16 * s + lane % 16, 2 * (PAIRS * (warp % 4) + i) + lane / 16));
        mma<T>(sum[2 * i], near, 0, far, 0, r[0], r[1]);
        mma<T>(sum[2 * i + 1], near, 0, far, 0, r[2], r[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) {
      float2 both = make_float2(sum[i][0] + __shfl_down_sync(FULL, sum[i][0], 4),
                                sum[i][1] + __shfl_down_sync(FULL, sum[i][1], 4));
      if (g == 0) write_sums(8 * (2 * PAIRS * (warp % 4) + i) + 2 * t, both, power(len));
    }
  }
  __device__ __forceinline__ void write_sums(int column, float2 sum, float decay) const {
    float2* at = reinterpret_cast<float2*>(b_sum() + column);
    sum = make_float2(at->x * decay + sum.x, at->y * decay + sum.y);
    *at = sum;
    split<T, 3>(b_parts() + column, D, sum);
  }
  __device__ __forceinline__ void load_sums(int thread) const {
    const Source from = initial();
    if (thread < D) {
      b_sum()[thread] = from.b ? from.scale_b * from.b[thread] : 0.f;
      split<T, 3>(b_parts() + thread, D, b_sum()[thread]);
    }
    sync_some(ROWS_BARRIER, ROWS);
  }
  __device__ __forceinline__ void store_sums(int thread, const Target& to) const {
    if (part == 0 && thread < D && to.b) to.b[thread] = to.scale_b * b_sum()[thread];
  }

  // RoPE in place, of the tiles that it concerns.
  __device__ __forceinline__ void rotate_tiles(int stage, int position, int thread) const {
    if (F::ROPE_A && !STATES) rotate(tile(stage, A), position, thread);
    if (F::ROPE_B) rotate(tile(stage, B), position, thread);
    if (F::ROPE_C) rotate(tile(stage, C_), position, thread);
    if (PROJECTS) rotate(tile(stage, UNIT), position, thread);
  }
  __device__ __forceinline__ void rotate(u32 tile_address, int position, int thread) const {
    F::template rotate<C, ROPE, ROWS>(p, smem, tile_address - base, position, thread);
  }

  // ---------------------------------------------------------------------------------- states in and out
  __device__ __forceinline__ Source initial() const {
    if (STATES) return {nullptr, nullptr, nullptr, 1.f, 1.f, 1.f};
    if (!WHOLE && segment) {  // what `states` and `prefix` left
      Target left = scratch(segment - 1);
      return {left.S, left.c, left.b, 1.f, 1.f, 1.f};
    }
    if (!p.initial.S) return {nullptr, nullptr, nullptr, 1.f, 1.f, 1.f};
    const float *S = p.initial.S + i64(bh) * D * D, *k = p.initial.k + bh * D, *v = p.initial.v + bh * D;
    float undo = F::REVERSE && DECAY ? exp2f(-log2_decay) : 1.f;  // see final()
    float s = F::scale_sigma(p) * undo, sv = F::scale_tau(p) * undo, sk = MODE == FWD ? s : sv;
    if (F::VALUE_ROWS) return {S, v, k, s, sv, sk};
    return {S, k, v, s, sk, sv};
  }
  __device__ __forceinline__ Target scratch(int i) const {  // the state before segment i + 1
    float* S = p.scratch + (i64(bh) * (p.segments - 1) + i) * (D * D + 2 * D);
    float *k = S + D * D, *v = k + D;
    return {S, F::VALUE_ROWS ? v : k, F::VALUE_ROWS ? k : v, 1.f, 1.f, 1.f};
  }
  // WHOLE: is this where a segment begins, whose state is to be left behind?
  __device__ __forceinline__ bool leaves_state(int position) const {
    return WHOLE && position && position % p.segment_len == 0;
  }
  // The last segment leaves the final state. In reverse the state belongs to the last token walked, token 0, and its
  // adjoint to the one before: one more decay (and one less on the way in). `states` leaves what its segment adds.
  __device__ __forceinline__ Target final() const {
    if (STATES) return scratch(segment);
    if ((!WHOLE && segment != p.segments - 1) || MODE == DQ) return {nullptr, nullptr, nullptr, 0.f, 0.f, 0.f};
    float more = F::REVERSE ? power(1) : 1.f, s = more / F::scale_sigma(p);
    float st = more / F::scale_tau(p);
    float* S = p.final.S ? p.final.S + i64(bh) * D * D : nullptr;
    float* k = p.final.k ? p.final.k + bh * D : nullptr;
    float* v = p.final.v ? p.final.v + bh * D : nullptr;
    if (MODE == FWD) return {S, v, k, s, st, s};
    if (MODE == DK) return {S, k, nullptr, s, st, 0.f};
    return {nullptr, v, nullptr, s, st, 0.f};
  }
  static __device__ __forceinline__ int at(int row, int column) {
    return F::VALUE_ROWS ? column * D + row : row * D + column;
  }

  // ------------------------------------------------------------------------------------------- the consumers
  __device__ __forceinline__ int group() const { return GROUPS == 1 ? 0 : warp / 4; }
  // A warp's 16 columns of y and c, two tiles of eight. With RoPE on them, columns that rotate together are in one lane.
  __device__ __forceinline__ int own_tile(int half) const {
    constexpr int HALF = F::PROJECTS ? ROPE / 16 : 0;
    int i = 2 * warp + half;
    return i < 2 * HALF ? i / 2 + half * HALF : i;
  }
  __device__ __forceinline__ int state_row(int half) const { return first_column() + 8 * own_tile(half) + g; }

  __device__ __forceinline__ void consume() {
    float state[D / 8][4], c_sum[2];
    load_state(state, c_sum);
    float along = 0.f;  // DQ: Σ q̂·y of this thread's tokens
    Ring ring;
    for (int position = begin; position < end; position += C, ring.next()) {
      forget_addresses();
      const int stage = ring.stage, len = min(C, p.N - position);
      const Coefficients c = coefficients(stage);
      if (leaves_state(position)) store_state(state, c_sum, scratch(position / p.segment_len - 1));
      barrier_wait(ready(stage), ring.phase);
      if constexpr (STATES) {
        u32 raw[CS][4];
        read_own(raw, tile(stage, C_));
        update(state, c_sum, raw, c, stage, len);
      } else {
        float y[8][4];
        u32 raw[CS][4];
        forget_addresses();
        output_before(y, state, c_sum, c, stage, position);
        forget_addresses();
        read_own(raw, tile(stage, C_));
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < CS; s++) Warpgroup<T, 0, 8>::mma(y, raw[s], k_columns<C>(weights(), s), 1);
        warpgroup_commit();
        update(state, c_sum, raw, c, stage, len);
        warpgroup_wait<1>();
        settle(y);
        forget_addresses();
        if constexpr (PROJECTS)
          project(y, c, stage, position, along);
        else
          finish(y, position);
      }
      warpgroup_wait();
      settle(state);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty(stage));
    }
    store_state(state, c_sum, final());
    if (MODE == DQ && !STATES && group() == 0) store_db(along);
  }
  __device__ __forceinline__ u32 weights() const { return base + L::WEIGHTS + group() * L::PANEL; }
  __device__ __forceinline__ void sync_group() const { sync_some(GROUP_BARRIER + group(), 128); }

  __device__ __forceinline__ void load_state(float (&state)[D / 8][4], float (&c_sum)[2]) const {
    const Source from = initial();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = state_row(half);
      c_sum[half] = from.c ? from.scale_c * from.c[row] : 0.f;
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 2; x++)
          state[j][2 * half + x] = from.S ? from.scale * from.S[at(row, 8 * j + 2 * t + x)] : 0.f;
    }
  }
  __device__ __forceinline__ void store_state(const float (&state)[D / 8][4], const float (&c_sum)[2],
                                              const Target& to) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = state_row(half);
      if (to.c && t == 0) to.c[row] = to.scale_c * c_sum[half];
      if (to.S)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int x = 0; x < 2; x++) to.S[at(row, 8 * j + 2 * t + x)] = to.scale * state[j][2 * half + x];
    }
  }

  // Yᵀ of what came before the chunk, and W in shared memory.
  __device__ __forceinline__ void output_before(float (&y)[8][4], const float (&state)[D / 8][4],
                                                const float (&c_sum)[2], const Coefficients& c, int stage,
                                                int position) const {
    float x[8][4];
    u32 rounded[KS][4];
#pragma unroll
    for (int k = 0; k < KS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        rounded[k][i] = pack<T>(state[2 * k + i / 2][2 * (i % 2)], state[2 * k + i / 2][2 * (i % 2) + 1]);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < KS; k++)
      Warpgroup<T, 0, 8>::mma(x, k_columns<C>(tile(stage, A), k), k_columns<C>(tile(stage, B), k), k > 0);
    warpgroup_commit();
#pragma unroll
    for (int k = 0; k < KS; k++) Warpgroup<T, 0, 8>::mma(y, rounded[k], k_columns<C>(tile(stage, A), k), k > 0);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(x);
    weigh(x, c, position);
    fence_shared();
    warpgroup_wait();
    settle(y);
#pragma unroll
    for (int n = 0; n < 8; n++) {  // two tokens
      float2 rho = *reinterpret_cast<float2*>(c.past_rho + 8 * n + 2 * t);
      float2 kappa = *reinterpret_cast<float2*>(c.past_kappa + 8 * n + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        y[n][2 * half] = rho.x * y[n][2 * half] + kappa.x * c_sum[half];
        y[n][2 * half + 1] = rho.y * y[n][2 * half + 1] + kappa.y * c_sum[half];
      }
    }
    sync_group();  // all of W is there
  }

  // W of this warp's 16 rows from X, into shared memory; forward also the normalisers.
  __device__ __forceinline__ void weigh(const float (&x)[8][4], const Coefficients& c, int position) const {
    const int first = 16 * (warp % 4) + g;
    float rho[2] = {c.rho[first], c.rho[first + 8]}, kappa[2] = {1.f, 1.f}, sum[2] = {0.f, 0.f};
    if (MODE != FWD) kappa[0] = c.kappa[first], kappa[1] = c.kappa[first + 8];
    u32 to = weights() + place<C>(16 * (warp % 4) + lane % 16, lane / 16);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        int j = 8 * (n + m) + 2 * t;
        float2 sigma = *reinterpret_cast<float2*>(c.sigma + j);
        float2 tau = MODE == FWD ? make_float2(1.f, 1.f) : *reinterpret_cast<float2*>(c.tau + j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int row = first + 8 * half;
          float w0 = rho[half] * sigma.x * x[n + m][2 * half] + kappa[half] * tau.x;
          float w1 = rho[half] * sigma.y * x[n + m][2 * half + 1] + kappa[half] * tau.y;
          if (DECAY) w0 *= powers[max(row - j, 0)], w1 *= powers[max(row - j - 1, 0)];
          u32 pair = pack<T>(j <= row ? w0 : 0.f, j + 1 <= row ? w1 : 0.f);
          pairs[2 * m + half] = pair;
          float2 rounded = unpack<T>(pair);
          sum[half] += rounded.x + rounded.y;  // the normaliser adds what the tensor cores multiply by
        }
      }
      stmatrix(to ^ (n << 4), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
#pragma unroll
    for (int half = 0; half < (MODE == FWD ? 2 : 0); half++) {
      int row = first + 8 * half;
      sum[half] += __shfl_xor_sync(FULL, sum[half], 1);
      sum[half] += __shfl_xor_sync(FULL, sum[half], 2);
      float normaliser = sum[half] + c.row[row];
      if (t == 0) {
        scales()[row] = reciprocal(normaliser);
        if (part == 0 && group() == 0 && position + row < p.N) p.g[stat(position + row)] = normaliser;
      }
    }
  }
  __device__ __forceinline__ float* scales() const {
    return reinterpret_cast<float*>(smem + L::SCALES) + group() * 2 * C;
  }

  // Tiles of eight tokens by eight of this warp's columns, transposed: fragments of Cᵀ, and in the places of Yᵀ's.
  __device__ __forceinline__ void read_own(u32 (&r)[CS][4], u32 tile_address) const {
    u32 from = tile_address + place<C>(lane % 16, own_tile(lane / 16));
#pragma unroll
    for (int s = 0; s < CS; s++) ldmatrix_trans(r[s], from + s * 2048);
#pragma unroll
    for (int s = 0; s < CS; s++) {  // from (column tile, token tile) order to that of a left operand
      u32 x = r[s][1];
      r[s][1] = r[s][2], r[s][2] = x;
    }
  }

  // state += (σ C)ᵀ B, issued and not waited for; Σ τ c; both decayed to the chunk's end.
  __device__ __forceinline__ void update(float (&state)[D / 8][4], float (&c_sum)[2], const u32 (&raw)[CS][4],
                                         const Coefficients& c, int stage, int len) const {
    if (DECAY) {
      float decay = power(len);
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) state[j][i] *= decay;
    }
    u32 left[CS][4];
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < CS; s++) {
      int j = 16 * s + 2 * t;
      u32 near = *reinterpret_cast<u32*>(c.sigma_end + j), far = *reinterpret_cast<u32*>(c.sigma_end + j + 8);
      const u16* tau = c.tau_parts + (g % 2) * C + j;  // τ and what rounding it left over, in alternate columns
      mma<T>(sum, raw[s][0], raw[s][1], raw[s][2], raw[s][3], *reinterpret_cast<const u32*>(tau),
             *reinterpret_cast<const u32*>(tau + 8));
      left[s][0] = multiply<T>(raw[s][0], near), left[s][1] = multiply<T>(raw[s][1], near);
      left[s][2] = multiply<T>(raw[s][2], far), left[s][3] = multiply<T>(raw[s][3], far);
    }
    warpgroup_arrive();
#pragma unroll
    for (int s = 0; s < CS; s++) Warpgroup<T, 1, D / 8>::mma(state, left[s], k_rows<C>(tile(stage, B), s), 1);
    warpgroup_commit();
#pragma unroll
    for (int half = 0; half < 2; half++)
      c_sum[half] = c_sum[half] * power(len) + (sum[2 * half] + sum[2 * half + 1]);
  }

  // FWD: o = y/g; DV: dv = y.
  __device__ __forceinline__ void finish(float (&y)[8][4], int position) const {
    u32 out = base + L::OUT + group() * L::PANEL;
    float scale = F::scale_y(p);
    u32 to = out + place<C>(lane % 8 + 8 * (lane / 16), (own_tile((lane / 8) % 2)) % 8);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        float2 r = make_float2(scale, scale);
        if (MODE == FWD) r = *reinterpret_cast<float2*>(scales() + 8 * (n + m) + 2 * t);
        pairs[2 * m] = pack<T>(y[n + m][0] * r.x, y[n + m][1] * r.y);
        pairs[2 * m + 1] = pack<T>(y[n + m][2] * r.x, y[n + m][3] * r.y);
      }
      stmatrix_trans(to + n * 1024, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    store(out, position);
  }
  // A group's 64 columns of y from a panel in shared memory that its warps have written.
  __device__ __forceinline__ void store(u32 panel, int position) const {
    sync_group();
    int thread = tid % 128, row = thread / 8, piece = thread % 8;
    u16* to = this->row(Y, position + row) + 64 * group() + 8 * piece;
    i64 step = (F::REVERSE ? -16 : 16) * i64(p.y.token);
#pragma unroll
    for (int i = 0; i < C; i += 16, to += step) {
      uint4 v = read16(panel + place<C>(row, piece) + i * 128);
      if (position + row + i < p.N) *reinterpret_cast<uint4*>(to) = v;
    }
  }

  // DQ, DK: through the norm, dx = r (y − x̂ (x̂·y)), and through RoPE; b and r as the table says.
  __device__ __forceinline__ void project(float (&y)[8][4], const Coefficients& c, int stage, int position,
                                          float& along_sum) const {
    u32 x[CS][4];
    read_own(x, tile(stage, UNIT));
    dots(x, y, position);
    sync_some(CONSUMERS_BARRIER, CONSUMERS);
    int thread = tid % 128;
    if (thread < C) {
      const float* from = partial(position) + thread;
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < 4 * GROUPS; i++) dot += from[i * C];
      float norm = c.row[thread], scale = F::scale_y(p);
      float out = (MODE == DQ ? b : 1.f) * norm * scale;
      *reinterpret_cast<float2*>(scales() + 2 * thread) = make_float2(out, p.normalize ? norm * norm * dot : 0.f);
      along_sum += norm * dot * scale;  // rows past the end have norm 0
    }
    sync_group();
    u32 panel = tile(stage, UNIT) + group() * L::PANEL;
    u32 to = panel + place<C>(lane % 8 + 8 * (lane / 16), own_tile((lane / 8) % 2) % 8);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {  // two tokens: what to scale by, and how far to go back along x
        float4 s = *reinterpret_cast<float4*>(scales() + 2 * (8 * (n + m) + 2 * t));
        float2 lo = unpack<T>(x[n / 2][2 * m]), hi = unpack<T>(x[n / 2][2 * m + 1]);
        lo = make_float2(s.x * (y[n + m][0] - s.y * lo.x), s.z * (y[n + m][1] - s.w * lo.y));
        hi = make_float2(s.x * (y[n + m][2] - s.y * hi.x), s.z * (y[n + m][3] - s.w * hi.y));
        if (ROPE && warp < ROPE / 16) rotate_back(lo, hi, position + 8 * (n + m) + 2 * t);
        pairs[2 * m] = pack<T>(lo.x, lo.y), pairs[2 * m + 1] = pack<T>(hi.x, hi.y);
      }
      stmatrix_trans(to + n * 1024, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    store(panel, position);
  }
  __device__ __forceinline__ float* partial(int position) const {  // of even and of odd chunks
    return reinterpret_cast<float*>(smem + L::PARTIAL) + (position / C % 2) * 4 * GROUPS * C;
  }
  // x·y of every token over this warp's columns.
  __device__ __forceinline__ void dots(const u32 (&x)[CS][4], const float (&y)[8][4], int position) const {
    float d[8][2];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      float2 lo = unpack<T>(x[n / 2][2 * (n % 2)]), hi = unpack<T>(x[n / 2][2 * (n % 2) + 1]);
      d[n][0] = lo.x * y[n][0] + hi.x * y[n][2], d[n][1] = lo.y * y[n][1] + hi.y * y[n][3];
    }
    // Sums over g: each step halves the tokens a lane is left with, in the end two.
#pragma unroll
    for (int half = 4; half > 0; half /= 2)
#pragma unroll
      for (int n = 0; n < half; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          bool upper = g & half;
          float keep = upper ? d[n + half][i] : d[n][i], give = upper ? d[n][i] : d[n + half][i];
          d[n][i] = keep + __shfl_xor_sync(FULL, give, 4 * half);
        }
    *reinterpret_cast<float2*>(partial(position) + warp * C + 8 * g + 2 * t) = make_float2(d[0][0], d[0][1]);
  }
  // The transpose of RoPE: two tokens' numbers in two columns that rotate together.
  __device__ __forceinline__ void rotate_back(float2& lo, float2& hi, int position) const {
    int column = 8 * own_tile(0) + g;
    i64 first = i64(token(min(position, p.N - 1))) * ROPE + column;
    i64 second = i64(token(min(position + 1, p.N - 1))) * ROPE + column;
    float2 cos = make_float2(p.cos[first], p.cos[second]), sin = make_float2(p.sin[first], p.sin[second]);
    ::rotate_back(lo, hi, cos, sin);
  }
  __device__ __forceinline__ void store_db(float sum) const {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(FULL, sum, d);
    if (lane == 0) scales()[warp] = sum;
    sync_group();
    if (tid == 0) p.db[bh * p.segments + segment] = scales()[0] + scales()[1];
  }
};
