// Σ τ c and Σ ζ b of an sm_90a block over all tokens so far, in a warpgroup's accumulators: transposed tiles times τ
// and ζ.
//
// Token stats keep them, as their results per chunk need them; in `states`, each group of outputs keeps those of its
// own columns.
//
// Fragment layout: each warp owns 16 of 64 columns, each lane two rows (g, g + 8). Lanes t = 0 hold Σ τ c, lanes t = 1
// Σ ζ b: [2·half] is the high 16-bit part's sum, [2·half + 1] the low part's. With TAU_PARTS = 3 the third part's is in
// lane|2.
#pragma once
#include "scan_sm90_block.cuh"

template <typename CONFIG>
struct RunningSumsSm90 {
  using T = typename CONFIG::T;
  using Shared = typename CONFIG::Shared;
  using Block = BlockSm90<CONFIG>;
  static constexpr int CHUNK = CONFIG::CHUNK, GROUPS = CONFIG::GROUPS, PANELS = CONFIG::PANELS;
  static constexpr bool STATE_ONLY = CONFIG::STATE_ONLY, NORMALISES = CONFIG::NORMALISES;
  static constexpr bool STORES_B = STATE_ONLY || CONFIG::MODE == FWD || CONFIG::MODE == DQ;  // DV has what DK would
  static constexpr int C_PANELS = !CONFIG::SUMS_C ? 0 : STATE_ONLY ? 1 : GROUPS;
  static constexpr int B_PANELS = !CONFIG::SUMS_B ? 0 : STATE_ONLY ? 1 : PANELS;

  static constexpr bool FACTOR_A = CONFIG::ADDS_A && CONFIG::MODE == FWD;

  float c[C_PANELS ? C_PANELS : 1][1][4], b[B_PANELS ? B_PANELS : 1][1][4];

  DEVICE int first_panel(const Block& block) const { return STATE_ONLY ? block.group() : 0; }
  DEVICE int column(const Block& block, int panel, int half) const {
    return PANEL_COLUMNS * (first_panel(block) + panel) + block.first_row() + block.g + 8 * half;
  }
  // Calls use(sum, tensor, panel) for each sum.
  template <typename USE>
  DEVICE void each(const Block& block, USE use) {
#pragma unroll
    for (int i = 0; i < C_PANELS; i++) use(c[i], C, first_panel(block) + i);
#pragma unroll
    for (int i = 0; i < B_PANELS; i++) use(b[i], B, first_panel(block) + i);
  }

  // Issues the products of a chunk; call it between warpgroup_arrive and warpgroup_commit.
  DEVICE void add_chunk(const Block& block, int stage, int slot) {
    each(block, [&](float (&sum)[1][4], int tensor, int panel) {
#pragma unroll
      for (int s = 0; s < CONFIG::CHUNK_STEPS; s++)
        mma_AtBt<T>(sum, k_down_columns<CHUNK>(block.tile(stage, tensor) + panel * Shared::PANEL, s),
                    k_along_rows<8>(block.base + block.end_coefficients(slot), s), 1);
    });
  }
  // Called before the first chunk: ptxas keeps products in flight across iterations of a loop only if some are in flight
  // on every path into it.
  DEVICE void add_zeros(const Block& block) {
    const Descriptor zeros = k_down_columns<CHUNK>(block.base + block.end_coefficients(1), 0);
    const Descriptor more = k_along_rows<8>(block.base + block.end_coefficients(2), 0);
    warpgroup_arrive();
    each(block, [&](float (&sum)[1][4], int, int) { mma_AtBt<T>(sum, zeros, more, 1); });
    warpgroup_commit();
  }
  // a_b (SUMS_X; complete on return): the chunk's rows of a times Σ ζ b of the tokens before the chunk, whose three 16-bit
  // parts are columns.
  DEVICE void start_chunk(Block& block, int stage, int slot, int len, float (&a_b)[1][4]) {
    block.sync_token_stats();  // τ and ζ are written, and rows are rotated
    block.recompute_addresses();
    decay(block, block.chunk_decay(block.coefficients(stage), len));
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < (CONFIG::SUMS_X ? CONFIG::D_STEPS : 0); k++)
      mma_ABt<T>(a_b, k_along_rows<CHUNK>(block.tile(stage, A), k),
                 k_along_rows<8>(block.base + block.b_sums(stage), k), k > 0);
    if (CONFIG::SUMS_X) warpgroup_commit();
    add_chunk(block, stage, slot);
    warpgroup_commit();
    if (CONFIG::SUMS_X) warpgroup_wait<1>(), warpgroup_fence_operand(a_b);
  }
  DEVICE void decay(const Block& block, float decay) {
    if (!CONFIG::DECAY) return;
    each(block, [&](float (&sum)[1][4], int, int) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum[0][i] *= decay;
    });
  }
  DEVICE void wait(const Block& block) {
    warpgroup_wait();
    each(block, [&](float (&sum)[1][4], int, int) { warpgroup_fence_operand(sum); });
  }

  // The sum of one of a lane's two rows: its high plus its low part.
  static DEVICE float total(const float (&sum)[1][4], int half) { return sum[0][2 * half] + sum[0][2 * half + 1]; }
  static DEVICE float total(const Block& block, const float (&sum)[1][4], int half) {  // plus the third part
    const float others = CONFIG::TAU_PARTS == 3 ? __shfl_sync(FULL_WARP, sum[0][2 * half], block.lane | 2) : 0.f;
    return total(sum, half) + others;
  }
  // Writes the sums to shared memory, for a stage's chunk. Σ τ c is multiplied by κ if that is a. Each of four lanes
  // writes one column of Σ ζ b.
  DEVICE void write(const Block& block, int stage) const {
    float* to = block.coefficients(stage).c_sum;
    float own = 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < C_PANELS; i++) {
        const float sum = (FACTOR_A ? block.constant() : 1.f) * total(block, c[i], half);
        if (block.t == 0) to[column(block, i, half)] = sum;
      }
#pragma unroll
      for (int i = 0; i < (CONFIG::SPLITS_B ? B_PANELS : 0); i++) {
        float sum = __shfl_sync(FULL_WARP, total(block, b[i], half), block.lane & ~3 | 1);
        if (block.t == 2 * i + half) own = sum;
      }
    }
    if (CONFIG::SPLITS_B && block.t < 2 * PANELS) {
      int panel = block.b_sums(stage) + block.t / 2 * Shared::EIGHT_ROWS;
      split<T, 3>([&](int part) { return block.in_eight_rows(panel, part, column(block, 0, block.t % 2)); }, own);
    }
  }
  DEVICE void load(const Block& block) {
    *this = {};
    if (!block.has_initial()) return;
    const StateSource from = block.initial();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < C_PANELS; i++)
        if (block.t == 0) c[i][0][2 * half] = from.scale_c * from.c[block.first_column() + column(block, i, half)];
#pragma unroll
      for (int i = 0; i < B_PANELS; i++)
        if (block.t == 1) b[i][0][2 * half] = from.scale_b * from.b[column(block, i, half)];
    }
  }
  // This thread's part of the inner products of Σ τ c with `with_c` and of Σ ζ b with `with_b`, the latter times scale_b.
  DEVICE float product(const Block& block, const float* with_c, const float* with_b, float scale_b) const {
    float of_c = 0.f, of_b = 0.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < C_PANELS; i++)
        of_c += total(block, c[i], half) * (block.t == 0 ? with_c[column(block, i, half)] : 0.f);
#pragma unroll
      for (int i = 0; i < B_PANELS; i++)
        of_b += total(block, b[i], half) * (block.t == 1 ? with_b[column(block, i, half)] : 0.f);
    }
    return of_c + scale_b * of_b;
  }
  DEVICE void store(const Block& block, const StateTarget& to) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < C_PANELS; i++) {
        const float sum = to.scale_c * total(block, c[i], half);
        if (block.t == 0) to.c[block.first_column() + column(block, i, half)] = sum;
      }
#pragma unroll
      for (int i = 0; i < (STORES_B ? B_PANELS : 0); i++) {
        const float sum = to.scale_b * total(block, b[i], half);
        if (block.t == 1 && block.panel() == 0) to.b[column(block, i, half)] = sum;
      }
    }
  }
};
