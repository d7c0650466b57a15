// The walk of scan.cu on Hopper (sm_90a): roles instead of phases. Included by scan.cu, whose names it uses.
//
//     rows        a warpgroup: what belongs to a token alone. RoPE in place, norms, (1)'s coefficients, in DQ e, which DK
//                 and DV read; and, on tensor cores, the sums Σ τ c and Σ ζ b (in `states`, outputs find them)
//     weights     a warpgroup: W from X = A Bᵀ, in 16 bits, into shared memory, and the normaliser. It also copies: tiles
//                 into a ring of stages, asynchronously, and what is left there of y out
//     outputs     a warpgroup for every 64 columns of y and c: y, and the state
//
// A block has all columns of a head, or (WHOLE) 64 of them: few long sequences then fill the card without being cut, and
// a warpgroup of its own copies.
//
// Each stage passes three barriers: full (tiles have landed), ready (rows are done with it), empty (outputs and rows are,
// and y can go out). A fourth says that W is there; it has two places, so weights are a chunk ahead of outputs.
//
// Y is made transposed, columns of c by tokens: the state, whose rows are columns of c, then goes from accumulators to
// operands without leaving registers. Per chunk a group of outputs issues
//
//     Yᵀ = state Aᵀ, scaled
//     Yᵀ += Cᵀ Wᵀ               and  state += (σ C)ᵀ B      (both at once; y is finished under the latter)
#pragma once
#include "wgmma.cuh"

// --------------------------------------------------------------------------------------------------- barriers
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Every thread arrives for itself: as fast as one lane behind __syncwarp, and racecheck can follow it.
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
// ROW_TILES: of whole rows, beside c's; VECTORS: a number a token; STAGING: y has no tile to go to; INNER: Σ ζ b is needed
// on the way.
template <int D, int GROUPS, int ROW_TILES, int VECTORS, bool STAGING, bool INNER>
struct HopperShared {  // byte offsets; tiles first: swizzled, aligned to 1024
  static constexpr int C = 64;
  static constexpr int PANEL = C * 128;  // 64 columns of a tile
  static constexpr int EIGHT_ROWS = 8 * 128;
  static constexpr int TILE = D / 64 * PANEL, STAGE = ROW_TILES * TILE + GROUPS * PANEL;
  static constexpr bool PROJECTS = ROW_TILES == 3;
  static constexpr int STAGES = GROUPS < D / 64 ? 4 : D == 64 && PROJECTS ? 2 : 3;
  static constexpr int WEIGHTS = STAGES * STAGE;  // W of two chunks
  static constexpr int OUT = WEIGHTS + 2 * PANEL;  // y of two chunks on its way out
  // τ and ζ decayed to the chunk's end as two 16-bit numbers each, four rows of 64 tokens; of two chunks (`states`: of every
  // stage), then zeros
  static constexpr int ENDS = OUT + (STAGING ? 2 * GROUPS * PANEL : 0);
  // Σ ζ b from before as three 16-bit numbers, three rows of 64 columns, of every stage; five rows of zeros
  static constexpr int KEYS = ENDS + ((ROW_TILES == 1 ? STAGES : 2) + 1) * EIGHT_ROWS;
  static constexpr int COEFFICIENTS = KEYS + (INNER ? STAGES * D / 64 * EIGHT_ROWS : 0);
  // of a stage: the vectors; σ decayed to the chunk's end, 16 bits; Σ τ c from before, a number a column
  static constexpr int STAGE_COEFFICIENTS = VECTORS * C * 4 + C * 2 + GROUPS * 64 * 4;
  static constexpr int ALONG = COEFFICIENTS + STAGES * STAGE_COEFFICIENTS;  // DQ: Σ q̂·y by token of a chunk
  static constexpr int PARTIAL = ALONG + C * 4;  // where a row is projected, x̂·y: two chunks, a part of each output warp
  static constexpr int SCALES = PARTIAL + (PROJECTS ? 2 * 4 * GROUPS * C * 4 : 0);  // and two numbers a token and group
  static constexpr int POWERS = SCALES + (PROJECTS ? GROUPS * C * 8 : 0);
  static constexpr int TABLE = 16 + C + 5;  // powers: from one table to its copy, odd, so that one of them has a pair aligned
  static constexpr int HEADS = POWERS + (2 * TABLE - 2) * 4;
  static constexpr int BARRIERS = HEADS + 6 * 8;
  static constexpr int BYTES = BARRIERS + (3 * STAGES + 2) * 8;
  static_assert(BYTES <= (D == 128 ? 232448 : 115712), "what launch.py gives a block (Variant.shared)");
};

// --------------------------------------------------------------------------------------------------- the walk
// STATES: only what a segment adds to the state. WHOLE: 64 columns of y, uncut; the states before the segments are left
// in the scratch on the way.
template <typename T, int D, int MODE, bool DECAY, int ROPE, bool STATES, bool WHOLE = false>
struct HopperScan {
  using F = Facts<T, MODE>;
  static constexpr int C = 64, PANELS = D / 64, GROUPS = WHOLE ? 1 : PANELS;  // of 64 columns: a row, this block's of c and y
  static constexpr int OUTPUTS = 128 * GROUPS, ROWS = 128, WEIGHTS = 128, COPIERS = 128;  // threads
  static constexpr int KS = D / 16, CS = C / 16;  // steps of 16 along D and along a chunk
  static constexpr bool PROJECTS = F::PROJECTS && !STATES;
  static constexpr bool SUMS_B = MODE == FWD || STATES;
  static constexpr bool FINDS_E = MODE == DQ, SUMS_DB = MODE == DQ && !STATES;
  static constexpr bool INNER = MODE == FWD && !STATES;  // Σ ζ b is needed on the way, times queries
  // Which vectors a token has beside σ. Others' factors of W are one or another's: DQ's τ is its σ.
  static constexpr bool HAS_RHO = MODE != DK, HAS_KAPPA = MODE == DQ, HAS_TAU = F::REVERSE, HAS_ROW = MODE != DV;
  static constexpr int VECTORS = STATES ? 0 : 1 + HAS_RHO + HAS_KAPPA + HAS_TAU + HAS_ROW;
  // Where y goes, on its way out: a tile that nobody needs any more, unless another group's outputs may.
  static constexpr int Y_TILE = PROJECTS ? UNIT : A;
  static constexpr bool STAGING = !PROJECTS && !STATES && GROUPS > 1;
  // Who copies it: whoever copies tiles in, but FWD's weights have enough to do, and outputs less.
  static constexpr bool COPIES_OUT = (MODE != FWD && !STATES) || WHOLE;
  using L = HopperShared<D, GROUPS, STATES ? 1 : PROJECTS ? 3 : 2, VECTORS, STAGING, INNER>;
  static_assert(!WHOLE || MODE == FWD, "the others project a whole row, or read what another walk left");
  static_assert(ROPE <= 64, "columns that rotate together must be in one group");
  enum { ROWS_BARRIER = 1, OUTPUTS_BARRIER = 2, GROUP_BARRIER = 3 };

  const Params& p;
  char* smem;
  u32 base;
  int tid, warp, lane, g, t;  // g, t: the lane's row and column pair in a tensor-core tile
  float log2_decay;
  float* powers;  // 16 zeros, γ⁰ … γ⁶⁴, b; where weights read pairs of powers, the zeros and powers again

  struct Coefficients {
    float *sigma, *tau, *rho, *kappa;
    float* row;  // DQ, DK: 1/‖x‖; FWD: the normaliser's part that all keys before share, then 1/g
    u16* sigma_end;
    float* c_sum;
  };
  // Powers of γ by how far a lane's rows of W are ahead of its columns: γ^(ahead + 8 − 8i) and γ^(ahead + 7 − 8i). Kept
  // where registers are enough.
  static constexpr bool KEEPS_DECAYS = DECAY && D == 128 && !STATES;
  struct Decays {
    float2 of[KEEPS_DECAYS ? 9 : 1];
  };
  template <int SIZE>
  struct Ring {  // a chunk's place in a ring, and how often, mod 2, the ring was passed
    static constexpr bool POWER = (SIZE & SIZE - 1) == 0;
    int i = 0;
    u32 passed = 0;
    __device__ __forceinline__ int stage() const { return POWER ? i & SIZE - 1 : i; }
    __device__ __forceinline__ int before() const { return POWER ? i - 1 & SIZE - 1 : i ? i - 1 : SIZE - 1; }
    __device__ __forceinline__ u32 phase() const { return POWER ? i / u32(SIZE) & 1 : passed; }
    __device__ __forceinline__ void next() {
      if (++i == SIZE && !POWER) i = 0, passed ^= 1;
    }
  };
  using Stages = Ring<L::STAGES>;

  __device__ __forceinline__ HopperScan(const Params& params, char* shared) : p(params), smem(shared) {
    base = shared_address(smem);
    find_thread();
    powers = reinterpret_cast<float*>(smem + L::POWERS) + 16;
    int batch = bh() / p.H, h = bh() % p.H;
    if (tid < 6) {  // every tensor's row of this head at position 0
      u16* first = rows_of_head(p, tid, batch, h) + (tid == C_ || tid == Y ? first_column() : 0);
      i64 last = F::REVERSE ? (p.N - 1) * p.strides[tid].token : 0;
      reinterpret_cast<u16**>(smem + L::HEADS)[tid] = first + last;
    }
    if (tid == C + 1) powers[tid] = p.coefficient ? p.coefficient[h] : p.b_value;
    log2_decay = DECAY ? p.log_decay[h] * 1.4426950408889634f : 0.f;
    if (DECAYS_PAST && tid < 16 + C + 1) {
      float power = tid < 16 ? 0.f : exp2f(log2_decay * (tid - 16));
      powers[tid - 16] = power;
      if (DECAY && !KEEPS_DECAYS) powers[tid - 16 + L::TABLE] = power;
    }
    if (tid == 0) {
      for (int i = 0; i < L::STAGES; i++) {
        barrier_init(full(i), COPIERS);
        barrier_init(ready(i), ROWS);
        barrier_init(empty(i), OUTPUTS + ROWS);
      }
      for (int i = 0; i < 2; i++) barrier_init(weighed(i), WEIGHTS);
    }
    for (int i = L::ENDS + 16 * tid; i < L::COEFFICIENTS; i += 16 * blockDim.x)
      *reinterpret_cast<uint4*>(smem + i) = make_uint4(0, 0, 0, 0);
    fence_shared();
    __syncthreads();
  }
  // Registers of a thread: at launch 128 or 80. What weights need more, others leave to them: at D = 64 rows, to keep
  // decays rows in reverse and else outputs.
  static constexpr int FEW = F::REVERSE && !STATES && D == 64 ? 8 : 0, KEPT = KEEPS_DECAYS ? 16 : 0;
  static constexpr int OUTPUT_REGISTERS = WHOLE ? 240 : D == 64 ? 128 : F::REVERSE ? 176 : 176 - KEPT / 2;
  static constexpr int ROW_REGISTERS = WHOLE ? 112 : D == 64 ? 48 - FEW : F::REVERSE ? 88 - KEPT : 88;
  static constexpr int WEIGHT_REGISTERS = WHOLE ? 112 : D == 64 ? 64 + FEW : 72 + KEPT;
  static constexpr int COPIER_REGISTERS = 40;
  __device__ __forceinline__ void run() {
    if (warp < 4 * GROUPS) {
      take_registers<OUTPUT_REGISTERS>();
      outputs();
    } else if (warp < 4 * GROUPS + 4) {
      give_registers<ROW_REGISTERS>();
      rows();
    } else if (!WHOLE || warp < 4 * GROUPS + 8) {
      give_registers<WEIGHT_REGISTERS>();
      weigh_and_copy<!STATES, !WHOLE>();
    } else {
      give_registers<COPIER_REGISTERS>();
      weigh_and_copy<false, true>();
    }
  }

  __device__ __forceinline__ void find_thread() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    asm volatile("" : "+r"(base));
    warp = u32(tid) / 32, lane = u32(tid) % 32, g = lane / 4, t = lane % 4;
  }
  // Keeps the compiler from carrying every address it can compute from the lane through the whole walk, in registers
  // that it does not have: called between the phases of a chunk, which find their place anew.
  __device__ __forceinline__ void forget_addresses() {
    if (!WHOLE && !STATES) find_thread();
  }

  // ------------------------------------------------------------------------------------------- places
  __device__ __forceinline__ int bh() const { return blockIdx.y; }
  __device__ __forceinline__ int segment() const { return WHOLE ? 0 : blockIdx.x; }
  __device__ __forceinline__ int part() const { return WHOLE ? blockIdx.x : 0; }  // columns of c and y: those from 64·part
  __device__ __forceinline__ int begin() const { return WHOLE ? 0 : segment() * p.segment_len; }
  __device__ __forceinline__ int end() const {
    int x = WHOLE ? p.N : min(begin() + p.segment_len, p.N);
    asm volatile("" : "+r"(x));  // found anew, not carried in a register
    return x;
  }
  __device__ __forceinline__ u32 full(int stage) const { return base + L::BARRIERS + 8 * stage; }
  __device__ __forceinline__ u32 ready(int stage) const { return full(L::STAGES + stage); }
  __device__ __forceinline__ u32 empty(int stage) const { return full(2 * L::STAGES + stage); }
  __device__ __forceinline__ u32 weighed(int parity) const { return full(3 * L::STAGES + parity); }
  __device__ __forceinline__ u32 place_of_weights(int parity) const { return base + L::WEIGHTS + parity * L::PANEL; }
  __device__ __forceinline__ u32 place_of_y(int stage, int parity) const {
    return STAGING ? base + L::OUT + parity * GROUPS * L::PANEL : tile(stage, Y_TILE);
  }
  __device__ __forceinline__ int keys(int stage) const { return L::KEYS + stage * PANELS * L::EIGHT_ROWS; }  // offsets
  __device__ __forceinline__ int ends(int slot) const { return L::ENDS + slot * L::EIGHT_ROWS; }
  __device__ __forceinline__ float* group_scales() const {
    return reinterpret_cast<float*>(smem + L::SCALES) + group() * 2 * C;
  }
  // In the order A, B, UNIT, C: only the last may have fewer columns. `states` has no A.
  __device__ __forceinline__ u32 tile(int stage, int which) const {
    constexpr int WITH_A = STATES ? 0 : 1, UNITS = PROJECTS ? 1 : 0;
    int before = which == A ? 0 : which == B ? WITH_A : which == UNIT ? WITH_A + 1 : WITH_A + 1 + UNITS;
    return base + stage * L::STAGE + before * L::TILE;
  }
  __device__ __forceinline__ int first_column() const { return WHOLE ? 64 * part() : 0; }
  __device__ __forceinline__ Coefficients coefficients(int stage) const {
    float* x = reinterpret_cast<float*>(smem + L::COEFFICIENTS + stage * L::STAGE_COEFFICIENTS);
    float *tau = x + C, *rho = tau + HAS_TAU * C, *kappa = rho + HAS_RHO * C, *row = kappa + HAS_KAPPA * C;
    u16* end = reinterpret_cast<u16*>(x + VECTORS * C);
    return {x, tau, rho, kappa, row, end, reinterpret_cast<float*>(end + C)};
  }
  __device__ __forceinline__ int token(int position) const { return F::token(p, position); }
  __device__ __forceinline__ i64 stat(int position) const { return i64(bh()) * p.N + token(position); }  // of [BH, N]
  __device__ __forceinline__ float power(int i) const { return DECAY ? powers[i] : 1.f; }
  __device__ __forceinline__ float b() const { return powers[C + 1]; }
  // Row `position` of tensor a, b, c, unit, y or o (0 … 5).
  __device__ __forceinline__ u16* row(int tensor, int position) const {
    const Strides& x = p.strides[tensor];
    return read_pointer(base + L::HEADS + 8 * tensor) + i64(position) * (F::REVERSE ? -x.token : x.token);
  }

  // --------------------------------------------------------------------------------------------- the weights
  // Chunk by chunk: W of this one; then the one before, when all are done with it: y out, and the next tiles in.
  template <bool WEIGHS, bool COPIES>
  __device__ __forceinline__ void weigh_and_copy() {
    if (WEIGHS) clear_above_diagonal();
    Decays decays;
    if (WEIGHS) read_decays(decays);
    Stages ring, behind;  // of this chunk and the one before
    Ring<2> w;
    for (int position = begin() - (L::STAGES - 1) * C; position < end() + C; position += C, behind.next()) {
      forget_addresses();
      const int parity = w.stage();
      if (position >= begin()) {
        if (WEIGHS && position < end()) {
          barrier_wait(ready(ring.stage()), ring.phase());
          weigh(ring.stage(), position, parity, decays);
          fence_shared();
          barrier_arrive(weighed(parity));
        }
        barrier_wait(empty(behind.stage()), behind.phase() ^ 1);
        ring.next(), w.next();
      }
      if (!COPIES) continue;
      const int next = position + (L::STAGES - 1) * C;
      if (next < end()) load(behind.stage(), next, false);
      if (COPIES_OUT && position > begin())
        copy_out<GROUPS>(place_of_y(behind.stage(), parity ^ 1), row(Y, position - C), position - C);
      if (next < end()) {
        load(behind.stage(), next, true);
        barrier_arrive_after_copies(full(behind.stage()));
      }
    }
    if (COPIES) copy_commit(), copy_wait<0>();
  }
  // All tiles but the one that y may be in, or that.
  __device__ __forceinline__ void load(int stage, int position, bool last) const {
    if (position + C <= p.N)
      load_tiles<true>(stage, position, last);
    else
      load_tiles<false>(stage, position, last);
  }
  template <bool FULL>
  __device__ __forceinline__ void load_tiles(int stage, int position, bool last) const {
    if (last) {
#pragma unroll
      for (int panel = 0; panel < (STATES ? 0 : PANELS); panel += GROUPS)
        load_tile<GROUPS, FULL>(tile(stage, Y_TILE) + panel * L::PANEL, Y_TILE, position, 64 * panel);
      return;
    }
    if (PROJECTS) load_tile<PANELS, FULL>(tile(stage, A), A, position);
    load_tile<PANELS, FULL>(tile(stage, B), B, position);
    load_tile<GROUPS, FULL>(tile(stage, C_), C_, position);
  }
  // COLUMNS of 64 by 128 threads, rows that are copied at once a multiple of 8. Copied out, a thread reads the places that
  // it will copy to (so both take as many columns): what comes next need not wait for other threads.
  template <int COLUMNS, bool FULL>
  __device__ __forceinline__ void load_tile(u32 dst, int tensor, int position, int from_column = 0) const {
    constexpr int PIECES = 8 * COLUMNS, STEP = 128 / PIECES, UNROLL = FULL ? C / STEP : 1;
    const int first = u32(tid) % 128 / PIECES, piece = u32(tid) % PIECES;
    const u16* src = row(tensor, position + first) + from_column + 8 * piece;
    i64 step = (F::REVERSE ? -STEP : STEP) * p.strides[tensor].token;
    int left = p.N - position - first;
    dst += place<C>(first, piece);
#pragma unroll UNROLL
    for (int i = 0; i < C; i += STEP, src += step) copy16(dst + i * 128, src, FULL || i < left);
  }
  template <int COLUMNS>
  __device__ __forceinline__ void copy_out(u32 src, u16* dst, int position) const {
    constexpr int PIECES = 8 * COLUMNS, STEP = 128 / PIECES;
    const int first = u32(tid) % 128 / PIECES, piece = u32(tid) % PIECES;
    i64 token = F::REVERSE ? -p.strides[Y].token : p.strides[Y].token;
    int left = p.N - position - first;
    dst += first * token + 8 * piece, src += place<C>(first, piece);
#pragma unroll
    for (int i = 0; i < C; i += STEP, dst += STEP * token) {
      uint4 x = read16(src + i * 128);
      if (i < left) store16(dst, x);
    }
  }

  // W of this warp's 16 rows, into shared memory; forward also the normalisers. What is above the diagonal stays zero.
  __device__ __forceinline__ void weigh(int stage, int position, int parity, const Decays& decays) {
    float x[8][4], past[1][4];
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < KS; k++)
      Warpgroup<T, 0, 8>::mma(x, k_columns<C>(tile(stage, A), k), k_columns<C>(tile(stage, B), k), k > 0);
#pragma unroll
    for (int k = 0; k < (INNER ? KS : 0); k++)
      Warpgroup<T, 0, 1>::mma(past, k_columns<C>(tile(stage, A), k), k_columns<8>(base + keys(stage), k), k > 0);
    warpgroup_commit();
    warpgroup_wait();
    settle(x);
    settle(past);
    forget_addresses();
    const Coefficients c = coefficients(stage);
    const int first = first_row() + g;
    Weights w = {{1.f, 1.f}, {1.f, 1.f}, {0.f, 0.f}};
    if (HAS_RHO) w.rho[0] = c.rho[first], w.rho[1] = c.rho[first + 8];
    if (HAS_KAPPA) w.kappa[0] = c.kappa[first], w.kappa[1] = c.kappa[first + 8];
#pragma unroll
    for (int tile = 0; tile < 4; tile++)  // of 16 × 16
      if (tile <= warp % 4) weigh_tile(w, x, c, tile, parity, decays);
    if (MODE == FWD) {  // of four lanes, the first finishes one row and the second the other
#pragma unroll
      for (int half = 0; half < 2; half++)
        w.sum[half] += power(first + 8 * half + 1) * w.rho[half] * (past[0][2 * half] + past[0][2 * half + 1]);
      const bool second = t % 2;
      float sum = (second ? w.sum[1] : w.sum[0]) + __shfl_xor_sync(FULL, second ? w.sum[0] : w.sum[1], 1);
      sum += __shfl_xor_sync(FULL, sum, 2);
      if (t < 2) {
        const int row = first + 8 * second;
        float normaliser = sum + c.row[row];
        c.row[row] = reciprocal(normaliser);
        if (part() == 0 && position + row < p.N) p.g[stat(position + row)] = normaliser;
      }
    }
  }
  struct Weights {  // of a thread's two rows: what W is made of, and the sums of what became of it
    float rho[2], kappa[2], sum[2];
  };
  __device__ __forceinline__ int ahead() const { return first_row() + g - 2 * t; }  // of the first column
  __device__ __forceinline__ void read_decays(Decays& decays) const {
#pragma unroll
    for (int i = 0; i < (KEEPS_DECAYS ? 9 : 0); i++) {
      auto read = [&](int by) { return powers[max(by, -1)]; };
      decays.of[i] = make_float2(read(ahead() + 8 - 8 * i), read(ahead() + 7 - 8 * i));
    }
  }
  __device__ __forceinline__ float2 decays_of(const Decays& decays, int tile, int below) const {  // 8·below rows on
    if (KEEPS_DECAYS) return decays.of[1 + 2 * tile - below];
    if (!DECAY) return make_float2(1.f, 1.f);
    const float* second = powers + (g % 2 ? 0 : L::TABLE) + ahead() - 16 * tile + 8 * below - 1;
    float2 pair = *reinterpret_cast<const float2*>(second);
    return make_float2(pair.y, pair.x);
  }
  __device__ __forceinline__ void weigh_tile(Weights& w, const float (&x)[8][4], const Coefficients& c, int tile,
                                             int parity, const Decays& decays) const {
    u32 pairs[4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      int j = 16 * tile + 8 * m + 2 * t;
      float2 sigma = *reinterpret_cast<float2*>(c.sigma + j), tau = make_float2(1.f, 1.f);
      if (HAS_TAU) tau = *reinterpret_cast<float2*>(c.tau + j);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float2 decay = decays_of(decays, tile, half - m);
        int by = ahead() - 16 * tile + 8 * (half - m);
        float w0 = weight(w, half, sigma.x, tau.x, x[2 * tile + m][2 * half], by, decay.x);
        float w1 = weight(w, half, sigma.y, tau.y, x[2 * tile + m][2 * half + 1], by - 1, decay.y);
        u32 pair = pack<T>(w0, w1);
        pairs[2 * m + half] = pair;
        float2 rounded = unpack<T>(pair);
        if (MODE == FWD) w.sum[half] += rounded.x + rounded.y;  // the normaliser adds what the tensor cores multiply by
      }
    }
    stmatrix(weights_at(parity, tile), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  // w of a pair of tokens, one so far ahead of the other; its decay is zero if it is behind.
  __device__ __forceinline__ float weight(const Weights& w, int half, float sigma, float tau, float x, int ahead,
                                          float decay) const {
    float y = MODE == DQ ? sigma * (w.rho[half] * x + w.kappa[half]) : w.rho[half] * sigma * x + tau;
    return DECAY ? y * decay : ahead >= 0 ? y : 0.f;
  }
  // Where this lane's row of 16 × 16 of this warp's weights is.
  __device__ __forceinline__ u32 weights_at(int parity, int tile) const {
    return place_of_weights(parity) + (place<C>(first_row() + lane % 16, lane / 16) ^ (tile << 5));
  }
  __device__ __forceinline__ void clear_above_diagonal() const {
#pragma unroll
    for (int tile = 1; tile < 4; tile++)
#pragma unroll
      for (int parity = 0; parity < 2; parity++)
        if (tile > warp % 4) stmatrix(weights_at(parity, tile), 0, 0, 0, 0);
  }

  // ------------------------------------------------------------------------------------------------ the rows
  __device__ __forceinline__ void rows() {
    float n = MODE == FWD ? tokens_before<DECAY>(p, bh(), log2_decay, begin()) : 0.f;
    const float chunk_tokens = MODE == FWD ? count<DECAY>(log2_decay, C) : 0.f;
    Sums sums;
    forget_addresses();
    if (!STATES) load_sums(sums);
    Stats next = MODE == FWD ? Stats{} : stats(begin());
    Turns turns;
    if (TURNS_AHEAD) read_angles(turns, begin());
    Leave leave = {p.segment_len, 0};
    if (!STATES) add_nothing(sums);
    Stages ring;
    for (int position = begin(); position < end(); position += C, ring.next()) {
      forget_addresses();
      const int stage = ring.stage(), len = min(C, p.N - position);
      const int slot = STATES ? stage : u32(position - begin()) / C % 2;  // of τ and ζ
      barrier_wait(empty(stage), ring.phase() ^ 1);  // the coefficients' old readers, too, are done
      token_numbers(ring, slot, position, len, n, next, turns);
      if (MODE == FWD) n = DECAY ? n * power(C) + chunk_tokens : n + C;
      if (!STATES) {
        finish_sums(sums);
        if (position > begin()) barrier_arrive(empty(ring.before()));
        if (leaves_state(leave, position)) store_sums(sums, scratch(leave.index++));
        write_sums(sums, stage);
      }
      fence_shared();  // what was copied, rotated and written, for the warpgroups' products
      barrier_arrive(ready(stage));
      if (TURNS_AHEAD) read_angles(turns, position + C);
      if (STATES)
        barrier_arrive(empty(stage));
      else
        start_sums(sums, stage, slot, len);
    }
    forget_addresses();
    if (STATES) return;
    finish_sums(sums);
    if (begin() < end()) barrier_arrive(empty(ring.before()));
    if (has_final()) store_sums(sums, final());
  }
  __device__ __forceinline__ int thread() const { return u32(tid) % ROWS; }
  // For RoPE a thread has ROPE/16 pieces of each tile; a model's few have their angles read a chunk ahead.
  static constexpr int PIECES = ROPE / 16;
  static constexpr bool TURNS_AHEAD = ROPE && PIECES <= D / 64 && (D == 128 || MODE == FWD);
  struct Turns {
    typename F::Angles of[TURNS_AHEAD ? PIECES : 1];
  };
  // What the forward pass saved of a token.
  struct Stats {
    float g, e, r, unit;  // r: 1/‖·‖ of what σ scales (k for DQ, q for DK and DV); unit: of what is projected, or of k
  };
  __device__ __forceinline__ Stats stats(int position) const {
    Stats s = {0.f, 0.f, 0.f, 0.f};
    if (thread() >= C || position + thread() >= p.N) return s;
    i64 i = stat(position + thread());
    s.g = p.g[i], s.r = (MODE == DQ ? p.rk : p.rq)[i], s.unit = (MODE == DQ ? p.rq : p.rk)[i];
    if (MODE == DK) s.e = p.e[i];
    return s;
  }
  // What belongs to the chunk's single tokens, into shared memory; `next`: what was saved of them, then of the next ones.
  __device__ __forceinline__ void token_numbers(const Stages& ring, int slot, int position, int len, float n, Stats& next,
                                                const Turns& turns) {
    const int stage = ring.stage();
    const Coefficients c = coefficients(stage);
    uint4 o[4][PANELS];
    if (FINDS_E) read_outputs(o, position);
    if (MODE != FWD && !FINDS_E) write_coefficients(c, next, len, thread(), slot);
    barrier_wait(full(stage), ring.phase());
    if (ROPE) rotate_tiles(stage, position, turns);
    if (MODE == FWD) {
      if (ROPE) sync_some(ROWS_BARRIER, ROWS);
      token_rows(c, stage, position, len, n, slot);
    }
    if (FINDS_E) {
      forget_addresses();
      row_products(o, tile(stage, A), c.row);
      sync_some(ROWS_BARRIER, ROWS);
      next.e = next.g != 0.f ? c.row[thread() % C] / next.g : 0.f;
      if (thread() < len) p.e[stat(position + thread())] = next.e;
      write_coefficients(c, next, len, thread(), slot);
    }
    if (MODE != FWD) next = stats(position + C);
  }
  // σ, τ, ρ, κ of a token, from what was saved. Rows past the end count nothing.
  __device__ __forceinline__ void write_coefficients(const Coefficients& c, const Stats& s, int len, int i, int slot) const {
    if (i >= C) return;
    bool ok = i < len;
    float inverse = ok ? reciprocal(s.g) : 0.f, scale_tau = F::scale_tau(p);
    float sigma = F::scale_sigma(p) * (MODE == DQ ? s.r : b() * s.r * inverse);
    float tau = scale_tau * (MODE == DQ ? s.r : MODE == DK ? -b() * s.e * s.r : inverse);
    float rho = F::scale_rho(p) * (MODE == DQ ? inverse : MODE == DV ? s.unit : 1.f);
    float kappa = F::scale_kappa(p) * (MODE == DQ ? -s.e : 1.f);
    float decay = ok ? power(len - 1 - i) : 0.f;
    if (!STATES) {
      c.sigma[i] = sigma;
      if (HAS_TAU) c.tau[i] = tau;
      if (HAS_RHO) c.rho[i] = rho;
      if (HAS_KAPPA) c.kappa[i] = kappa;
      if (HAS_ROW) c.row[i] = s.unit;
    }
    write_end(c, slot, i, sigma * decay, tau * decay, scale_tau * inverse * decay);  // ζ: of the adjoint, for Σ do/g
  }
  // σ, τ and ζ decayed to the chunk's end, as factors for tensor cores.
  __device__ __forceinline__ void write_end(const Coefficients& c, int slot, int i, float sigma, float tau, float zeta) const {
    split<T, 1>([&](int) { return c.sigma_end + i; }, sigma);
    split<T, 2>([&](int part) { return down(ends(slot), part, i); }, tau);
    if (SUMS_B) split<T, 2>([&](int part) { return down(ends(slot), 2 + part, i); }, zeta);
  }
  // Of eight rows of 64 numbers of 16 bits, one in a row.
  __device__ __forceinline__ u16* down(int eight_rows, int row, int column) const {
    return reinterpret_cast<u16*>(smem + eight_rows + place<8>(row, column / 8)) + column % 8;
  }

  // A warp's rows of a chunk, or columns of a panel.
  __device__ __forceinline__ int first_row() const { return 16 * (warp % 4); }
  // Forward, a row a thread: of queries ρ and the normaliser's part that all keys before share, of keys σ. `states` needs
  // keys alone, and has two threads for each.
  static constexpr int A_ROW = STATES ? 2 : 1;
  __device__ __forceinline__ void token_rows(const Coefficients& c, int stage, int position, int len, float n,
                                             int slot) const {
    const int i = thread() / A_ROW % C;
    const bool ok = i < len, key = STATES || thread() >= C;
    float square = squared_norm(tile(stage, key ? B : A), i, thread() % A_ROW);
    if (A_ROW == 2) square += __shfl_xor_sync(FULL, square, 1);
    const float r = reciprocal_norm(square, p.normalize);
    if (!STATES && part() == 0 && ok) (key ? p.rk : p.rq)[stat(position + i)] = r;
    if (key) {
      float sigma = ok ? r * F::scale_sigma(p) : 0.f, decay = ok ? power(len - 1 - i) : 0.f, end = sigma * decay;
      if (T::NARROW) end = fminf(end, 2048.f);  // 1/‖k‖ of a row of (almost) zeros times v stays finite
      if (!STATES) c.sigma[i] = sigma;
      if (thread() % A_ROW == 0) write_end(c, slot, i, end, decay, end);
    } else {
      c.rho[i] = b() * r * F::scale_rho(p);
      c.row[i] = power(i + 1) * n;
    }
  }
  // Of a row of a tile, all of it or one half. Eight threads that read at once read eight rows, or halves of four.
  __device__ __forceinline__ float squared_norm(u32 tile_address, int row, int half) const {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < D / 8 / A_ROW; i++) {
      int piece = A_ROW == 1 ? i : i / 4 * 8 + half * 4 + i % 4;
      uint4 x = read16(tile_address + place<C>(row, piece));
      u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float2 both = unpack<T>(pairs[k]);
        sum[k] += both.x * both.x, sum[k] += both.y * both.y;
      }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
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

  // Σ τ c and Σ ζ b of everything so far: tiles, their rows turned to columns, times τ and ζ. Of 64 columns a warp has 16,
  // a lane two rows' sums: of c lanes t = 0, of b lanes t = 1, those of the first and of the second 16-bit numbers. Rows
  // keep them, as what they find of a chunk needs them; for `states`, the outputs do, each group of its own columns.
  static constexpr int C_PANELS = STATES ? 1 : GROUPS, B_PANELS = STATES ? 1 : SUMS_B ? PANELS : 0;
  struct Sums {
    float c[C_PANELS][1][4], b[B_PANELS ? B_PANELS : 1][1][4];
  };
  __device__ __forceinline__ int first_panel() const { return STATES ? group() : 0; }
  __device__ __forceinline__ int column(int panel, int half) const {
    return 64 * (first_panel() + panel) + first_row() + g + 8 * half;
  }
  // use(sum, tensor, panel) for each.
  template <typename USE>
  __device__ __forceinline__ void each(Sums& sums, USE use) const {
#pragma unroll
    for (int i = 0; i < C_PANELS; i++) use(sums.c[i], C_, first_panel() + i);
#pragma unroll
    for (int i = 0; i < B_PANELS; i++) use(sums.b[i], B, first_panel() + i);
  }
  // Products only: between warpgroup_arrive and warpgroup_commit.
  __device__ __forceinline__ void add_to_sums(Sums& sums, int stage, int slot) const {
    each(sums, [&](float(&sum)[1][4], int tensor, int panel) {
#pragma unroll
      for (int s = 0; s < CS; s++)
        Warpgroup<T, 0, 1, 1>::mma(sum, k_rows<C>(tile(stage, tensor) + panel * L::PANEL, s),
                                   k_columns<8>(base + ends(slot), s), 1);
    });
  }
  // Before the first chunk: ptxas lets products run on around a loop only if some do on every way into it.
  __device__ __forceinline__ void add_nothing(Sums& sums) const {
    const Descriptor zeros = k_rows<C>(base + ends(1), 0), more = k_columns<8>(base + ends(2), 0);
    warpgroup_arrive();
    each(sums, [&](float(&sum)[1][4], int, int) { Warpgroup<T, 0, 1, 1>::mma(sum, zeros, more, 1); });
    warpgroup_commit();
  }
  __device__ __forceinline__ void start_sums(Sums& sums, int stage, int slot, int len) {
    sync_some(ROWS_BARRIER, ROWS);  // τ and ζ are written, and rows are rotated
    forget_addresses();
    decay_sums(sums, len);
    warpgroup_arrive();
    add_to_sums(sums, stage, slot);
    warpgroup_commit();
  }
  __device__ __forceinline__ void decay_sums(Sums& sums, int len) const {
    if (!DECAY) return;
    const float decay = power(len);
    each(sums, [&](float(&sum)[1][4], int, int) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum[0][i] *= decay;
    });
  }
  __device__ __forceinline__ void finish_sums(Sums& sums) const {
    warpgroup_wait();
    each(sums, [&](float(&sum)[1][4], int, int) { settle(sum); });
  }
  // Of a lane's two rows of a sum, one: its first and its second part.
  static __device__ __forceinline__ float whole(const float (&sum)[1][4], int half) {
    return sum[0][2 * half] + sum[0][2 * half + 1];
  }
  // For the chunk in a stage. Of Σ ζ b's columns, each of four lanes takes one.
  __device__ __forceinline__ void write_sums(const Sums& sums, int stage) const {
    float* to = coefficients(stage).c_sum;
    float mine = 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
        if (t == 0) to[column(i, half)] = whole(sums.c[i], half);
#pragma unroll
      for (int i = 0; i < (INNER ? B_PANELS : 0); i++) {
        float sum = __shfl_sync(FULL, whole(sums.b[i], half), lane & ~3 | 1);
        if (t == 2 * i + half) mine = sum;
      }
    }
    if (INNER && t < 2 * PANELS) {
      int panel = keys(stage) + t / 2 * L::EIGHT_ROWS;
      split<T, 3>([&](int part) { return down(panel, part, column(0, t % 2)); }, mine);
    }
  }
  __device__ __forceinline__ void load_sums(Sums& sums) const {
    sums = {};
    if (!has_initial()) return;
    const Source from = initial();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < C_PANELS; i++)
        if (t == 0) sums.c[i][0][2 * half] = from.scale_c * from.c[first_column() + column(i, half)];
#pragma unroll
      for (int i = 0; i < B_PANELS; i++)
        if (t == 1) sums.b[i][0][2 * half] = from.scale_b * from.b[column(i, half)];
    }
  }
  __device__ __forceinline__ void store_sums(const Sums& sums, const Target& to) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < C_PANELS; i++)
        if (t == 0) to.c[first_column() + column(i, half)] = to.scale_c * whole(sums.c[i], half);
#pragma unroll
      for (int i = 0; i < B_PANELS; i++)
        if (t == 1 && part() == 0) to.b[column(i, half)] = to.scale_b * whole(sums.b[i], half);
    }
  }

  // RoPE in place, of the tiles that it concerns.
  __device__ __forceinline__ void read_angles(Turns& turns, int position) const {
#pragma unroll
    for (int k = 0; k < PIECES; k++) turns.of[k] = F::template angles<ROPE>(p, position, thread() + k * ROWS);
  }
  __device__ __forceinline__ void rotate_tiles(int stage, int position, const Turns& turns) const {
    constexpr int UNROLL = TURNS_AHEAD ? PIECES : 1;
    char* first = smem + (tile(stage, F::ROPE_B && !STATES ? A : F::ROPE_B ? B : C_) - base);
    char* second = smem + (tile(stage, F::ROPE_B ? B : UNIT) - base);
#pragma unroll UNROLL
    for (int k = 0; k < PIECES; k++) {
      int i = thread() + k * ROWS;
      typename F::Angles angles = TURNS_AHEAD ? turns.of[TURNS_AHEAD ? k : 0] : F::template angles<ROPE>(p, position, i);
      F::template rotate<C, ROPE>(first, i, angles);
      if (!STATES) F::template rotate<C, ROPE>(second, i, angles);
    }
  }

  // ---------------------------------------------------------------------------------- states in and out
  // No pointer here may be null, and tested: ptxas 13.0 was seen to test one before its zero was there.
  __device__ __forceinline__ bool has_initial() const { return !STATES && (segment() || p.initial.S); }
  __device__ __forceinline__ Source initial() const {
    return F::template initial<D>(p, bh(), segment(), log2_decay);
  }
  __device__ __forceinline__ Target scratch(int i) const {  // the state before segment i + 1
    return F::template before_segment<D>(p, bh(), i + 1);
  }
  struct Leave {  // WHOLE: where the next segment begins, before which the state is left behind
    int position, index;
  };
  __device__ __forceinline__ bool leaves_state(Leave& leave, int position) const {
    if (!WHOLE || position != leave.position) return false;
    leave.position += p.segment_len;
    return true;
  }
  // The last segment leaves the final state; `states` what its segment adds.
  __device__ __forceinline__ bool has_final() const {
    return STATES || ((WHOLE || segment() == p.segments - 1) && MODE != DQ && p.final.S);
  }
  __device__ __forceinline__ Target final() const {
    return STATES ? scratch(segment()) : F::template final<D>(p, bh(), log2_decay);
  }
  static __device__ __forceinline__ int at(int row, int column) {
    return F::VALUE_ROWS ? column * D + row : row * D + column;
  }

  // --------------------------------------------------------------------------------------------- the outputs
  __device__ __forceinline__ int group() const { return GROUPS == 1 ? 0 : warp / 4; }
  // A warp's 16 columns of y and c, two tiles of eight. With RoPE on them, columns that rotate together are in one lane.
  __device__ __forceinline__ int own_tile(int half) const {
    constexpr int HALF = F::PROJECTS ? ROPE / 16 : 0;
    int i = 2 * warp + half;
    return i < 2 * HALF ? i / 2 + half * HALF : i;
  }
  __device__ __forceinline__ int own_row(int half) const { return 8 * own_tile(half) + g; }  // of the state: a column of c
  __device__ __forceinline__ int state_row(int half) const { return first_column() + own_row(half); }

  __device__ __forceinline__ void outputs() {
    float state[D / 8][4];
    Sums sums = {};
    load_state(state);
    if (SUMS_DB && tid < C) along()[tid] = 0.f;
    Leave leave = {p.segment_len, 0};
    Stages ring;
    Ring<2> w;
    for (; begin() + C * w.i < end(); ring.next(), w.next()) {
      forget_addresses();
      const int position = begin() + C * w.i, stage = ring.stage(), parity = w.stage(), len = min(C, p.N - position);
      const Coefficients c = coefficients(stage);
      if (leaves_state(leave, position)) store_state(state, scratch(leave.index++));
      barrier_wait(full(stage), ring.phase());  // `ready` implies it, but racecheck follows one barrier, not two
      barrier_wait(ready(stage), ring.phase());
      u32 own[CS][4], left[CS][4];
      float y[8][4];
      if (!STATES) multiply_state(y, state, stage);
      decay_state(state, len);
      if (STATES) decay_sums(sums, len);
      forget_addresses();
      read_own(own, tile(stage, C_));
      if (!STATES) scale_past(y, c);
      weigh_own(left, own, c);
      if (!STATES) barrier_wait(weighed(parity), w.phase());
      warpgroup_arrive();
#pragma unroll
      for (int s = 0; s < (STATES ? 0 : CS); s++)
        Warpgroup<T, 0, 8>::mma(y, own[s], k_columns<C>(place_of_weights(parity), s), 1);
      warpgroup_commit();
#pragma unroll
      for (int s = 0; s < CS; s++) Warpgroup<T, 1, D / 8>::mma(state, left[s], k_rows<C>(tile(stage, B), s), 1);
      if (STATES) add_to_sums(sums, stage, stage);
      warpgroup_commit();
      if constexpr (PROJECTS) project(y, stage, parity, position);
      if constexpr (!PROJECTS && !STATES) finish(y, stage, parity);
      if (!COPIES_OUT && !STATES) {
        sync_group();
        copy_out<1>(place_of_y(stage, parity) + group() * L::PANEL, row(Y, position) + 64 * group(), position);
      }
      warpgroup_wait();
      settle(state);
      if (STATES) finish_sums(sums);
      barrier_arrive(empty(stage));
    }
    if (STATES) store_sums(sums, final());
    if (has_final() && MODE != DV) store_state(state, final());
    if (SUMS_DB && warp < 2) store_db();
  }
  __device__ __forceinline__ void sync_group() const { sync_some(GROUP_BARRIER + group(), 128); }

  __device__ __forceinline__ void load_state(float (&state)[D / 8][4]) const {
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[j][i] = 0.f;
    if (!has_initial()) return;
    const Source from = initial();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 2; x++)
          state[j][2 * half + x] = from.scale * from.S[at(state_row(half), 8 * j + 2 * t + x)];
  }
  __device__ __forceinline__ void store_state(const float (&state)[D / 8][4], const Target& to) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 2; x++) to.S[at(state_row(half), 8 * j + 2 * t + x)] = to.scale * state[j][2 * half + x];
  }

  // Yᵀ of what came before the chunk: issued, and not waited for.
  __device__ __forceinline__ void multiply_state(float (&y)[8][4], const float (&state)[D / 8][4], int stage) const {
    u32 rounded[KS][4];
#pragma unroll
    for (int k = 0; k < KS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        rounded[k][i] = pack<T>(state[2 * k + i / 2][2 * (i % 2)], state[2 * k + i / 2][2 * (i % 2) + 1]);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < KS; k++) Warpgroup<T, 0, 8>::mma(y, rounded[k], k_columns<C>(tile(stage, A), k), k > 0);
    warpgroup_commit();
  }
  // It, waited for: γ^(i+1) (ρ y + κ Σ τ c). Where registers are fewest, a product with γ = 1 leads ptxas to an order of
  // instructions that needs no more than there are.
  static constexpr bool DECAYS_PAST = DECAY || (D == 64 && ROPE && HAS_KAPPA);
  __device__ __forceinline__ void scale_past(float (&y)[8][4], const Coefficients& c) {
    const float c_sum[2] = {c.c_sum[own_row(0)], c.c_sum[own_row(1)]}, step = DECAYS_PAST ? powers[8] : 1.f;
    float past[2] = {DECAYS_PAST ? powers[2 * t + 1] : 1.f, DECAYS_PAST ? powers[2 * t + 2] : 1.f};
    float scale[8][2], shift[8][4];
    auto find = [&](int n) {  // of two tokens
      float2 rho = make_float2(1.f, 1.f), kappa = rho;
      if (HAS_RHO) rho = *reinterpret_cast<float2*>(c.rho + 8 * n + 2 * t);
      if (HAS_KAPPA) kappa = *reinterpret_cast<float2*>(c.kappa + 8 * n + 2 * t);
      scale[n][0] = past[0] * rho.x, scale[n][1] = past[1] * rho.y;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        shift[n][2 * half] = past[0] * kappa.x * c_sum[half];
        shift[n][2 * half + 1] = past[1] * kappa.y * c_sum[half];
      }
      past[0] *= step, past[1] *= step;
    };
    if (WHOLE) {
#pragma unroll
      for (int n = 0; n < 8; n++) find(n);
    }
    warpgroup_wait();
    settle(y);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      if (!WHOLE) find(n);
#pragma unroll
      for (int i = 0; i < 4; i++) y[n][i] = scale[n][i % 2] * y[n][i] + shift[n][i];
    }
  }

  // Tiles of eight tokens by eight of this warp's columns, transposed: fragments of Cᵀ, and in the places of Yᵀ's.
  __device__ __forceinline__ void read_own(u32 (&r)[CS][4], u32 tile_address) const {
#pragma unroll
    for (int s = 0; s < CS; s++) read_own(r[s], tile_address, s);
  }
  __device__ __forceinline__ void read_own(u32 (&r)[4], u32 tile_address, int s) const {
    ldmatrix_trans(r, tile_address + place<C>(lane % 16, own_tile(lane / 16)) + s * 2048);
    u32 x = r[1];  // from (column tile, token tile) order to that of a left operand
    r[1] = r[2], r[2] = x;
  }

  // σ C, σ decayed to the chunk's end: what the state gains is (σ C)ᵀ B.
  __device__ __forceinline__ void weigh_own(u32 (&left)[CS][4], const u32 (&own)[CS][4], const Coefficients& c) const {
#pragma unroll
    for (int s = 0; s < CS; s++) {
      const u16* sigma = c.sigma_end + 16 * s + 2 * t;
      u32 near = *reinterpret_cast<const u32*>(sigma), far = *reinterpret_cast<const u32*>(sigma + 8);
      left[s][0] = multiply<T>(own[s][0], near), left[s][1] = multiply<T>(own[s][1], near);
      left[s][2] = multiply<T>(own[s][2], far), left[s][3] = multiply<T>(own[s][3], far);
    }
  }
  __device__ __forceinline__ void decay_state(float (&state)[D / 8][4], int len) const {
    if (!DECAY) return;
    float decay = power(len);
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[j][i] *= decay;
  }

  // This lane's row of this warp's two tiles of y, in the places of the first eight tokens.
  __device__ __forceinline__ u32 own_place_of_y(int stage, int parity) const {
    return place_of_y(stage, parity) + group() * L::PANEL +
           place<C>(lane % 8 + 8 * (lane / 16), own_tile((lane / 8) % 2) % 8);
  }
  // FWD: o = y/g; DV: dv = y.
  __device__ __forceinline__ void finish(float (&y)[8][4], int stage, int parity) {
    warpgroup_wait<1>();
    settle(y);
    forget_addresses();
    float scale = F::scale_y(p);
    u32 to = own_place_of_y(stage, parity);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        float2 r = make_float2(scale, scale);
        if (MODE == FWD) r = *reinterpret_cast<float2*>(coefficients(stage).row + 8 * (n + m) + 2 * t);
        pairs[2 * m] = pack<T>(y[n + m][0] * r.x, y[n + m][1] * r.y);
        pairs[2 * m + 1] = pack<T>(y[n + m][2] * r.x, y[n + m][3] * r.y);
      }
      stmatrix_trans(to + n * 1024, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  // DQ, DK: through the norm, dx = r (y − x̂ (x̂·y)), and through RoPE; b and r as the table says.
  __device__ __forceinline__ void project(float (&y)[8][4], int stage, int parity, int position) {
    u32 x[CS][4];
    if (!AGAIN) read_own(x, tile(stage, UNIT));
    warpgroup_wait<1>();
    settle(y);
    forget_addresses();
    dots(x, y, stage, parity);
    Turn turns[BATCH];
    if (ROPE) {
      warpgroup_wait();  // frees registers
      forget_addresses();
      if (BATCH > 1) read_turns(turns, position, 0);
    }
    sync_some(OUTPUTS_BARRIER, OUTPUTS);
    int thread = tid % 128;
    if (thread < C) {
      const float* from = partial(parity) + thread;
      float dot = 0.f;
#pragma unroll
      for (int i = 0; i < 4 * GROUPS; i++) dot += from[i * C];
      float norm = coefficients(stage).row[thread], scale = F::scale_y(p);
      float out = (MODE == DQ ? b() : 1.f) * norm * scale;
      *reinterpret_cast<float2*>(group_scales() + 2 * thread) = make_float2(out, p.normalize ? norm * norm * dot : 0.f);
      if (SUMS_DB && tid < C) along()[tid] += norm * dot * scale;  // rows past the end have norm 0
    }
    sync_group();
    u32 to = own_place_of_y(stage, parity);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      if (AGAIN) read_own(x[n / 2], tile(stage, UNIT), n / 2);
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {  // two tokens: what to scale by, and how far to go back along x
        if (ROPE && (n + m > 0 || BATCH == 1) && (n + m) % BATCH == 0) read_turns(turns, position, 8 * (n + m));
        float4 s = *reinterpret_cast<float4*>(group_scales() + 2 * (8 * (n + m) + 2 * t));
        float2 lo = unpack<T>(x[n / 2][2 * m]), hi = unpack<T>(x[n / 2][2 * m + 1]);
        lo = make_float2(s.x * (y[n + m][0] - s.y * lo.x), s.z * (y[n + m][1] - s.w * lo.y));
        hi = make_float2(s.x * (y[n + m][2] - s.y * hi.x), s.z * (y[n + m][3] - s.w * hi.y));
        if (ROPE && warp < ROPE / 16) {
          const Turn& turn = turns[(n + m) % BATCH];
          ::rotate_back(lo, hi, turn.cos, turn.sin);
        }
        pairs[2 * m] = pack<T>(lo.x, lo.y), pairs[2 * m + 1] = pack<T>(hi.x, hi.y);
      }
      stmatrix_trans(to + n * 1024, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
  __device__ __forceinline__ float* partial(int parity) const {
    return reinterpret_cast<float*>(smem + L::PARTIAL) + parity * 4 * GROUPS * C;
  }
  // x·y of every token over this warp's columns.
  __device__ __forceinline__ void dots(u32 (&x)[CS][4], const float (&y)[8][4], int stage, int parity) const {
    float d[4][2];
    auto part = [](float2 pair, int i) { return i ? pair.y : pair.x; };
    auto dot = [&](int n, int i) {
      return part(unpack<T>(x[n / 2][2 * (n % 2)]), i) * y[n][i] + part(unpack<T>(x[n / 2][2 * (n % 2) + 1]), i) * y[n][2 + i];
    };
    // Sums over g: each step halves the tokens a lane is left with, in the end two.
    auto halve = [&](float low, float high, int bit) {
      bool upper = g & bit;
      return (upper ? high : low) + __shfl_xor_sync(FULL, upper ? low : high, 4 * bit);
    };
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (AGAIN && n % 2 == 0)
        for (int s = n / 2; s < CS; s += 2) read_own(x[s], tile(stage, UNIT), s);
#pragma unroll
      for (int i = 0; i < 2; i++) d[n][i] = halve(dot(n, i), dot(n + 4, i), 4);
    }
#pragma unroll
    for (int half = 2; half > 0; half /= 2)
#pragma unroll
      for (int n = 0; n < half; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) d[n][i] = halve(d[n][i], d[n + half][i], half);
    *reinterpret_cast<float2*>(partial(parity) + warp * C + 8 * g + 2 * t) = make_float2(d[0][0], d[0][1]);
  }
  // The angles of two tokens in the two columns of this lane that rotate together: for so many pairs of tokens at once
  // that the wait for them is short, or hidden behind the barriers before their use.
  struct Turn {
    float2 cos, sin;
  };
  static constexpr int BATCH = D == 64 ? 1 : MODE == DQ ? 2 : 4;
  static constexpr bool AGAIN = ROPE || D == 64;  // x̂ is read anew, as registers are few
  __device__ __forceinline__ void read_turns(Turn (&turns)[BATCH], int position, int token_in_chunk) const {
    if (warp >= ROPE / 16) return;
    const int first = position + token_in_chunk + 2 * t, left = p.N - first;
    const i64 at = i64(token(first)) * ROPE + 8 * own_tile(0) + g;
#pragma unroll
    for (int n = 0; n < BATCH; n++) {
      auto read = [&](const float* x, int i) {
        return i < left ? x[at + i * (F::REVERSE ? -ROPE : ROPE)] : 0.f;
      };
      turns[n].cos = make_float2(read(p.cos, 8 * n), read(p.cos, 8 * n + 1));
      turns[n].sin = make_float2(read(p.sin, 8 * n), read(p.sin, 8 * n + 1));
    }
  }
  // DQ: Σ q̂·y, the gradient of b, by token of a chunk; in the end of all.
  __device__ __forceinline__ float* along() const { return reinterpret_cast<float*>(smem + L::ALONG); }
  __device__ __forceinline__ void store_db() const {
    float sum = along()[tid];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(FULL, sum, d);
    if (lane == 0) along()[tid] = sum;
    sync_some(OUTPUTS_BARRIER, C);
    if (tid == 0) p.db[bh() * p.segments + segment()] = along()[0] + along()[32];
  }
};
