// Shared by all roles of an sm_90a block: its head and segment, addresses, barriers, and the tables of a head.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "scan_sm90_layout.cuh"
#include "segments.cuh"
#include "token_decay.cuh"

template <typename CONFIG>
struct BlockSm90 {
  using Traits = typename CONFIG::Traits;
  using Shared = typename CONFIG::Shared;
  using States = SegmentStates<typename CONFIG::T, CONFIG::MODE, CONFIG::D, CONFIG::WEIGHTS>;
  using Stage = PipelineState<Shared::STAGES>;
  static constexpr int D = CONFIG::D, CHUNK = CONFIG::CHUNK, GROUPS = CONFIG::GROUPS, PANELS = CONFIG::PANELS;
  static constexpr Decay DECAY = CONFIG::DECAY;
  static constexpr bool STATE_ONLY = CONFIG::STATE_ONLY, UNSEGMENTED = CONFIG::UNSEGMENTED;

  const Params& p;
  char* smem;
  u32 base;
  int tid, warp, lane, g, t;  // g, t: the lane's row and column pair in a tensor-core tile
  float log2_decay;
  float* powers;  // 16 zeros, γ⁰ … γ⁶⁴, b, a; if scores read pairs of powers, a copy of the zeros and powers

  DEVICE BlockSm90(const Params& params, char* shared) : p(params), smem(shared) {
    base = shared_address(smem);
    find_thread();
    powers = reinterpret_cast<float*>(smem + Shared::POWERS) + 16;
    int batch = bh() / p.H, h = bh() % p.H;
    if (tid < 6) {  // every tensor's row of this head at position 0
      u16* first = head_of(p, tid, batch, h) + (tid == C || tid == Y ? first_column() : 0);
      i64 last = Traits::REVERSE ? (p.N - 1) * p.strides[tid].token : 0;
      reinterpret_cast<u16**>(smem + Shared::HEADS)[tid] = first + last;
    }
    if (tid == CHUNK + 1) powers[tid] = p.coefficient ? p.coefficient[h] : p.b_value;
    if (CONFIG::HAS_A && tid == CHUNK + 2) powers[tid] = p.constant ? p.constant[h] : p.a_value;
    log2_decay = DECAY == PER_HEAD ? p.log_decay[h] * LOG2_E : 0.f;
    if (CONFIG::DECAYS_PAST && tid < 16 + CHUNK + 1) {
      float power = tid < 16 ? 0.f : exp2f(log2_decay * (tid - 16));
      powers[tid - 16] = power;
      if (DECAY && !CONFIG::KEEPS_POWERS) powers[tid - 16 + Shared::POWERS_TABLE] = power;
    }
    if (tid == 0) {
      for (int i = 0; i < Shared::STAGES; i++) {
        mbarrier_init(full(i), WARPGROUP);
        mbarrier_init(ready(i), WARPGROUP);
        mbarrier_init(empty(i), GROUPS * WARPGROUP + WARPGROUP);
      }
      for (int i = 0; i < 2; i++) mbarrier_init(scored(i), WARPGROUP);
    }
    for (int i = Shared::END_COEFFICIENTS + 16 * tid; i < Shared::COEFFICIENTS; i += 16 * blockDim.x)
      *reinterpret_cast<uint4*>(smem + i) = make_uint4(0, 0, 0, 0);
    fence_shared();
    __syncthreads();
  }

  DEVICE void find_thread() {
    reload(tid, base);
    warp = u32(tid) / 32, lane = u32(tid) % 32, g = lane / 4, t = lane % 4;
  }
  // Called between the phases of a chunk, which then recompute their addresses, to save registers.
  DEVICE void recompute_addresses() {
    if (!UNSEGMENTED && !STATE_ONLY) find_thread();
  }

  // ------------------------------------------------------------------------------------- head, segment, tokens
  DEVICE int bh() const { return blockIdx.y; }
  DEVICE int segment() const { return UNSEGMENTED ? 0 : blockIdx.x; }
  DEVICE int panel() const { return UNSEGMENTED ? blockIdx.x : 0; }  // the first panel of c and y
  DEVICE int first_column() const { return UNSEGMENTED ? PANEL_COLUMNS * panel() : 0; }
  DEVICE int begin() const { return UNSEGMENTED ? 0 : segment() * p.segment_len; }
  DEVICE int end() const {
    int x = UNSEGMENTED ? p.N : min(begin() + p.segment_len, p.N);
    asm volatile("" : "+r"(x));  // recomputed, not kept in a register
    return x;
  }
  DEVICE int token(int position) const { return Traits::token(p, position); }
  DEVICE i64 stat(int position) const { return i64(bh()) * p.N + token(position); }  // of [BH, N]
  DEVICE float power(int i) const { return DECAY == PER_HEAD ? powers[i] : 1.f; }
  DEVICE float coefficient() const { return powers[CHUNK + 1]; }                     // b
  DEVICE float constant() const { return CONFIG::HAS_A ? powers[CHUNK + 2] : 0.f; }  // a
  // Row `position` of tensor a, b, c, qk, y or o (0 … 5).
  DEVICE u16* row(int tensor, int position) const { return Traits::row(p, base + Shared::HEADS, tensor, position); }

  // Whether the tensor has a column, which counts from the first that `row` points to.
  DEVICE bool has_column(int tensor, int column) const {
    return column + (tensor == C || tensor == Y ? first_column() : 0) < p.columns;
  }

  // --------------------------------------------------------------------------------------------------- threads
  DEVICE int thread() const { return u32(tid) % WARPGROUP; }
  // `warp` in a form that the compiler knows to be equal in all lanes: branches on it are then uniform, and later
  // computations for products, above all their descriptors, stay in uniform registers.
  DEVICE int uniform_warp() const { return __shfl_sync(FULL_WARP, warp, 0); }
  DEVICE int group() const { return GROUPS == 1 ? 0 : warp / 4; }  // of outputs
  // A warp's rows of a chunk, or columns of a panel.
  DEVICE int first_row() const { return 16 * (warp % 4); }

  // -------------------------------------------------------------------------------------------------- barriers
  DEVICE u32 full(int stage) const { return base + Shared::BARRIERS + 8 * stage; }
  DEVICE u32 ready(int stage) const { return full(Shared::STAGES + stage); }
  DEVICE u32 empty(int stage) const { return full(2 * Shared::STAGES + stage); }
  DEVICE u32 scored(int parity) const { return full(3 * Shared::STAGES + parity); }
  enum { TOKEN_STATS_BARRIER = 1, OUTPUTS_BARRIER = 2, GROUP_BARRIER = 3 };
  DEVICE void sync_token_stats() const { named_barrier_sync(TOKEN_STATS_BARRIER, WARPGROUP); }
  DEVICE void sync_outputs(int threads = GROUPS * WARPGROUP) const { named_barrier_sync(OUTPUTS_BARRIER, threads); }
  DEVICE void sync_group() const { named_barrier_sync(GROUP_BARRIER + group(), WARPGROUP); }

  // --------------------------------------------------------------------------------------------- shared memory
  // The address of a tile; they are in the order A, B, QK, C: only the last may have fewer columns. `states` has no A.
  DEVICE u32 tile(int stage, int which) const {
    constexpr int WITH_A = STATE_ONLY ? 0 : 1, WITH_QK = CONFIG::PROJECTS ? 1 : 0;
    int before = which == A ? 0 : which == B ? WITH_A : which == QK ? WITH_A + 1 : WITH_A + 1 + WITH_QK;
    return base + stage * Shared::STAGE + before * Shared::TILE;
  }
  DEVICE u32 scores_tile(int parity) const { return base + Shared::SCORES + parity * Shared::PANEL; }
  DEVICE u32 y_tile(int stage, int parity) const {
    return CONFIG::STAGES_Y ? base + Shared::Y_STAGING + parity * GROUPS * Shared::PANEL : tile(stage, CONFIG::Y_TILE);
  }
  // Offsets of tiles with eight rows of 16-bit numbers, and the address of a number in one.
  DEVICE int b_sums(int stage) const {
    return Shared::B_SUMS + (CONFIG::NORMALISES ? stage * PANELS * Shared::EIGHT_ROWS : 0);
  }
  DEVICE int end_coefficients(int slot) const { return Shared::END_COEFFICIENTS + slot * Shared::EIGHT_ROWS; }
  DEVICE u16* in_eight_rows(int tile, int row, int column) const {
    return reinterpret_cast<u16*>(smem + tile + swizzled<8>(row, column / 8)) + column % 8;
  }

  struct Coefficients {
    float *from_start, *cumsum;  // PER_TOKEN: exp(Γ), with FACTOR_IN_PAST times the factor, and Γ in log2
    float *inverse_g, *dG;       // COMPUTES_DG, if it sums X
    float *sigma, *tau, *rho, *kappa;
    float* columns;  // HAS_COLUMNS: [CHUNK][COLUMN], cumsum, sigma, tau and inverse_g
    float* row;      // DQ, DK: 1/‖x‖; FWD: the decayed count before the chunk, then 1/g
    u16* sigma_end;  // [SIGMA_PARTS][CHUNK]; FACTORS_DECAYS: sigma_end_part
    float* c_sum;
  };
  DEVICE Coefficients coefficients(int stage) const {
    float* x = reinterpret_cast<float*>(smem + Shared::COEFFICIENTS + stage * Shared::STAGE_COEFFICIENTS);
    constexpr bool APART = !CONFIG::HAS_COLUMNS;
    float *columns = x, *from_start = columns + (APART ? 0 : CONFIG::COLUMN * CHUNK);
    float* cumsum = from_start + CONFIG::HAS_FROM_START * CHUNK;
    float* inverse_g = cumsum + (APART && CONFIG::HAS_CUMSUM) * CHUNK;
    float* dG = inverse_g + (APART && CONFIG::HAS_INVERSE_G) * CHUNK;
    float* sigma = dG + CONFIG::HAS_DG * CHUNK;
    float *tau = sigma + APART * CHUNK, *rho = tau + (APART && CONFIG::HAS_TAU) * CHUNK;
    float *kappa = rho + CONFIG::HAS_RHO * CHUNK, *row = kappa + CONFIG::HAS_KAPPA * CHUNK;
    u16* end = reinterpret_cast<u16*>(x + CONFIG::VECTORS * CHUNK);
    float* c_sum = reinterpret_cast<float*>(end + CONFIG::SIGMA_PARTS * CHUNK);
    return {from_start, cumsum, inverse_g, dG, sigma, tau, rho, kappa, columns, row, end, c_sum};
  }
  // The address of a part of token i's σ decayed to the chunk's end. FACTORS_DECAYS: the numbers that a lane of outputs
  // needs of 16 tokens are 16 adjacent bytes: of two neighbours, of the two eight further, then their other parts.
  static DEVICE u16* sigma_end_part(const Coefficients& c, int part, int i) {
    if (!CONFIG::FACTORS_DECAYS) return c.sigma_end + part * CHUNK + i;
    return c.sigma_end + i / 16 * 32 + i % 8 / 2 * 8 + part * 4 + i / 8 % 2 * 2 + i % 2;
  }
  // DQ: stores a warp's part of the gradient of a, one of eight.
  DEVICE void store_da(float sum, int first) const {
    sum = sum_lanes<32>(sum);
    if (lane == 0) p.da[(bh() * p.segments + segment()) * 8 + first + warp % 4] = sum;
  }
  // DQ: Σ q̂·y, the gradient of b, by token of a chunk.
  DEVICE float* db_sums() const { return reinterpret_cast<float*>(smem + Shared::DB_SUMS); }

  // The decay of the past over a whole chunk; and, in `from_start`, up to row `i`.
  DEVICE float chunk_decay(const Coefficients& c, int len) const {
    return DECAY == PER_TOKEN ? from_start(c, CHUNK - 1) : power(len);
  }
  DEVICE float from_start(const Coefficients& c, int i) const {
    if (CONFIG::FACTOR_IN_PAST) return power_of_two(CONFIG::HAS_COLUMNS ? c.columns[CONFIG::COLUMN * i] : c.cumsum[i]);
    return DECAY == PER_TOKEN ? c.from_start[i] : power(i + Traits::POWERS_FROM_STATE);
  }
  // DQ: b, the factor of all rows of y; but 1 if b is 0, so that the gradient of b can still be computed.
  DEVICE float b_or_one() const { return CONFIG::MODE == DQ && coefficient() != 0.f ? coefficient() : 1.f; }
  // DQ, DK: the part of a row's factor that ρ and κ include, given 1/‖row‖; and ρ, without DQ's 1/g.
  DEVICE float factor_in_w(float norm) const {
    if (!CONFIG::FACTOR_IN_W) return 1.f;
    return CONFIG::WHOLE_FACTOR ? b_or_one() * norm : mantissa(Traits::row_factor(*this, norm));
  }
  DEVICE float scale_of_row(float norm) const { return Traits::scale_rho(p) * factor_in_w(norm); }

  // Whether a chunk begins at one of the sequence's boundaries (token_decay.cuh), and that boundary.
  DEVICE bool at_boundary(int position) const {
    return CONFIG::COMPUTES_DG && position > 0 && p.N % CHUNK == 0 && boundary_token(position) % BOUNDARY_INTERVAL == 0;
  }
  DEVICE int boundary_token(int position) const { return Traits::REVERSE ? p.N - position : position; }
  DEVICE Boundary<D> boundary(int position) const {
    return {p, bh(), boundary_token(position) / BOUNDARY_INTERVAL - 1};
  }

  // ---------------------------------------------------------------------------------------- states in and out
  // No pointer here may be null for callers to test: ptxas 13.0 was seen to test one before its zero was written.
  DEVICE bool has_initial() const { return !STATE_ONLY && (segment() || p.initial.S); }
  DEVICE StateSource initial() const { return States::initial(p, bh(), segment()); }
  DEVICE StateTarget before_segment(int i) const { return States::before_segment(p, bh(), i); }
  // The last segment stores the final state; `states` its segment's own state.
  DEVICE bool has_final() const {
    return STATE_ONLY || ((UNSEGMENTED || segment() == p.segments - 1) && CONFIG::MODE != DQ && p.final.S);
  }
  DEVICE StateTarget final() const {
    const bool own = DECAY == PER_TOKEN && Traits::REVERSE;
    return STATE_ONLY ? before_segment(segment() + 1) : States::final(p, bh(), own ? log2_decay_of(p, bh(), 0) : 0.f);
  }
  struct NextSegment {  // UNSEGMENTED: where the next segment begins, before which the state is stored in the scratch
    int position, index;
  };
  DEVICE NextSegment next_segment() const { return {p.segment_len, 0}; }
  DEVICE bool enters(NextSegment& next, int position) const {
    if (!UNSEGMENTED || position != next.position) return false;
    next.position += p.segment_len;
    return true;
  }
};
