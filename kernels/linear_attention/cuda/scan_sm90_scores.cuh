// The role "scores" of an sm_90a block: computes W from X = A Bᵀ, once for all columns of y, and forward the
// normaliser. The warpgroup also copies, unless a block of 64 columns has another one for that.
#pragma once
#include "ptx/mma.cuh"
#include "scan_sm90_copies.cuh"

template <typename CONFIG>
struct ScoresSm90 {
  using T = typename CONFIG::T;
  using Shared = typename CONFIG::Shared;
  using Block = BlockSm90<CONFIG>;
  using Copies = CopiesSm90<CONFIG>;
  using Coefficients = typename Block::Coefficients;
  static constexpr int CHUNK = CONFIG::CHUNK, MODE = CONFIG::MODE, D_STEPS = CONFIG::D_STEPS;
  static constexpr Decay DECAY = CONFIG::DECAY;
  static constexpr bool KEEPS_POWERS = CONFIG::KEEPS_POWERS, SUMS_X = CONFIG::SUMS_X, HAS_G = CONFIG::HAS_G;

  // Per chunk: computes its W; then, once all roles are done with the chunk before, copies that one's y out and the next
  // tiles in.
  template <bool SCORES, bool COPIES>
  static DEVICE void run(Block& block) {
    if (SCORES) clear_above_diagonal(block);
    Powers powers;
    float da = 0.f;
    if (SCORES) read_powers(block, powers);
    typename Block::Stage current, previous;  // of this chunk and the one before
    PipelineState<2> scored;
    for (int position = block.begin() - (Shared::STAGES - 1) * CHUNK; position < block.end() + CHUNK;
         position += CHUNK, previous.advance()) {
      block.recompute_addresses();
      const int parity = scored.stage();
      if (position >= block.begin()) {
        if (SCORES && position < block.end()) {
          mbarrier_wait(block.ready(current.stage()), current.phase());
          compute(block, current.stage(), position, parity, powers, da);
          fence_shared();
          mbarrier_arrive(block.scored(parity));
        }
        mbarrier_wait(block.empty(previous.stage()), previous.phase() ^ 1);
        current.advance(), scored.advance();
      }
      if (!COPIES) continue;
      const int next = position + (Shared::STAGES - 1) * CHUNK;
      if (next < block.end()) Copies::load(block, previous.stage(), next, false);
      if (CONFIG::COPIER_STORES_Y && position > block.begin())
        Copies::template store_y<CONFIG::GROUPS>(block, block.y_tile(previous.stage(), parity ^ 1), position - CHUNK);
      if (next < block.end()) {
        Copies::load(block, previous.stage(), next, true);
        mbarrier_arrive_after_copies(block.full(previous.stage()));
      }
    }
    if (COPIES) copy_async_commit(), copy_async_wait<0>();
    if (CONFIG::COMPUTES_DA && SCORES) block.store_da(da, 4);
  }

  // A thread's two rows: their factors in W, and sums over their columns.
  struct Rows {
    float rho[2], kappa[2], sum[2];
    float cumsum[2];  // PER_TOKEN: Γ of the rows' tokens
  };
  static DEVICE Rows read_rows(const Block& block, const Coefficients& c, int first) {
    const float rho = CONFIG::Traits::scale_rho(block.p);
    Rows rows = {{rho, rho}, {1.f, 1.f}, {0.f, 0.f}, {0.f, 0.f}};
    if (CONFIG::HAS_RHO) rows.rho[0] = c.rho[first], rows.rho[1] = c.rho[first + 8];
    if (CONFIG::FACTOR_IN_W && !CONFIG::HAS_RHO)
      rows.rho[0] = block.scale_of_row(c.row[first]), rows.rho[1] = block.scale_of_row(c.row[first + 8]);
    if (CONFIG::HAS_KAPPA) rows.kappa[0] = c.kappa[first], rows.kappa[1] = c.kappa[first + 8];
    return rows;
  }
  // Powers of γ for the distances of a lane's rows of W from its columns: γ^(ahead + 8 − 8i) and γ^(ahead + 7 − 8i).
  struct Powers {
    float2 of[KEEPS_POWERS ? 9 : 1];
  };

  // Writes W of this warp's 16 rows to shared memory; forward also the normalisers. Above the diagonal it stays zero.
  static DEVICE void compute(Block& block, int stage, int position, int parity, const Powers& powers, float& da) {
    float x[8][4], past[1][4];
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < D_STEPS; k++)
      mma_ABt<T>(x, k_along_rows<CHUNK>(block.tile(stage, A), k), k_along_rows<CHUNK>(block.tile(stage, B), k), k > 0);
    // Forward: queries times Σ ζ b before the chunk, whose three 16-bit parts are columns.
#pragma unroll
    for (int k = 0; k < (CONFIG::NORMALISES ? D_STEPS : 0); k++)
      mma_ABt<T>(past, k_along_rows<CHUNK>(block.tile(stage, A), k),
                 k_along_rows<8>(block.base + block.b_sums(stage), k), k > 0);
    warpgroup_commit();
    warpgroup_wait();
    warpgroup_fence_operand(x);
    warpgroup_fence_operand(past);
    block.recompute_addresses();
    const Coefficients c = block.coefficients(stage);
    const int first = block.first_row() + block.g;
    Rows rows = read_rows(block, c, first);
    if constexpr (CONFIG::FACTORS_DECAYS) {
      compute_tiles(block, rows, x, c, parity);
    } else {
      if (DECAY == PER_TOKEN) rows.cumsum[0] = c.cumsum[first], rows.cumsum[1] = c.cumsum[first + 8];
      const int last = block.uniform_warp() % 4;
#pragma unroll
      for (int tile = 0; tile < 4; tile++)  // 16 × 16 tiles
        if (tile <= last) compute_tile(block, rows, x, c, tile, parity, powers);
    }
    if (CONFIG::NORMALISES) normalisers(block, rows, past, c, position);
    if (SUMS_X) {
      float sum = sum_of_row(block, rows);
      if (CONFIG::HAS_DG && block.t < 2) c.dG[first + 8 * block.t] += sum;
      if (CONFIG::COMPUTES_DA && block.t < 2) da += sum;
    }
  }
  // Computes the normalisers: of each four lanes, the first finishes one row and the second the other.
  static DEVICE void normalisers(Block& block, Rows& rows, const float (&past)[1][4], const Coefficients& c,
                                 int position) {
    const int first = block.first_row() + block.g;
#pragma unroll
    for (int half = 0; half < 2; half++)
      rows.sum[half] +=
          block.from_start(c, first + 8 * half) * rows.rho[half] * (past[0][2 * half] + past[0][2 * half + 1]);
    const float sum = sum_of_row(block, rows);
    if (block.t < 2) {
      const int row = first + 8 * block.t;
      float normaliser = sum + c.row[row];
      c.row[row] = block.p.divide ? reciprocal(normaliser) : 1.f;
      if (block.panel() == 0 && position + row < block.p.N) block.p.g[block.stat(position + row)] = normaliser;
    }
  }

  // The rows' sums over four lanes: the first row's in the first lane, the second row's in the second.
  static DEVICE float sum_of_row(const Block& block, const Rows& rows) {
    const bool second = block.t % 2;
    float sum =
        (second ? rows.sum[1] : rows.sum[0]) + __shfl_xor_sync(FULL_WARP, second ? rows.sum[0] : rows.sum[1], 1);
    return sum + __shfl_xor_sync(FULL_WARP, sum, 2);
  }

  static DEVICE void compute_tile(const Block& block, Rows& rows, const float (&x)[8][4], const Coefficients& c,
                                  int tile, int parity, const Powers& powers) {
    u32 pairs[4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      int j = 16 * tile + 8 * m + 2 * block.t;
      float2 sigma = *reinterpret_cast<float2*>(c.sigma + j), tau = make_float2(1.f, 1.f);
      if (CONFIG::ADDS_A) tau.x = tau.y = block.constant();
      if (CONFIG::HAS_TAU) tau = *reinterpret_cast<float2*>(c.tau + j);
      float2 cumsum = make_float2(0.f, 0.f), inverse_g = cumsum;
      if (DECAY == PER_TOKEN) cumsum = *reinterpret_cast<float2*>(c.cumsum + j);
      if (CONFIG::HAS_INVERSE_G) inverse_g = *reinterpret_cast<float2*>(c.inverse_g + j);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float2 decay = powers_of(block, powers, tile, half - m);
        int by = ahead(block) - 16 * tile + 8 * (half - m);
        if (DECAY == PER_TOKEN)
          decay = make_float2(by >= 0 ? power_of_two(rows.cumsum[half] - cumsum.x) : 0.f,
                              by >= 1 ? power_of_two(rows.cumsum[half] - cumsum.y) : 0.f);
        float x0 = x[2 * tile + m][2 * half], x1 = x[2 * tile + m][2 * half + 1];
        if (CONFIG::HAS_INVERSE_G) x0 *= inverse_g.x, x1 *= inverse_g.y;
        if (SUMS_X) {
          auto own = [&](float x) { return HAS_G && MODE == DQ ? rows.rho[half] * x + rows.kappa[half] : x; };
          if (!DECAY) decay = make_float2(by >= 0 ? 1.f : 0.f, by >= 1 ? 1.f : 0.f);
          rows.sum[half] += decay.x * own(x0), rows.sum[half] += decay.y * own(x1);
        }
        float w0 = score(rows, half, sigma.x, tau.x, x0, by, decay.x);
        float w1 = score(rows, half, sigma.y, tau.y, x1, by - 1, decay.y);
        u32 pair = pack<T>(w0, w1);
        pairs[2 * m + half] = pair;
        float2 rounded = unpack<T>(pair);  // the normaliser adds what the tensor cores multiply by
        if (CONFIG::NORMALISES) rows.sum[half] += rounded.x + rounded.y;
      }
    }
    stmatrix(address(block, parity, tile), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  // W_ij; 0 if i < j: with DECAY because `decay` is 0, else because `ahead` = i − j is negative.
  static DEVICE float score(const Rows& rows, int half, float sigma, float tau, float x, int ahead, float decay) {
    float y = rows.rho[half] * sigma * x;
    if (HAS_G && MODE == DQ) y = sigma * (rows.rho[half] * x + rows.kappa[half]);
    if ((HAS_G && MODE != DQ) || CONFIG::ADDS_A) y = rows.rho[half] * sigma * x + tau;
    if (HAS_G && MODE == DK) y = rows.rho[half] * (sigma * x + tau);
    return DECAY ? y * decay : ahead >= 0 ? y : 0.f;
  }

  // FACTORS_DECAYS: computes the tiles before the diagonal, and the one on it.
  static DEVICE void compute_tiles(const Block& block, Rows& rows, const float (&x)[8][4], const Coefficients& c,
                                   int parity) {
    const float* cumsum = c.columns + CONFIG::COLUMN * block.first_row();
    const float reference = cumsum[0];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float decay = power_of_two(cumsum[CONFIG::COLUMN * (block.g + 8 * half)] - reference);
      rows.rho[half] *= decay, rows.kappa[half] *= decay;
    }
    const int last = block.uniform_warp() % 4;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      if (tile > last) continue;
      if (tile < 3 && tile < last) {
        compute_tile_before(block, rows, x, c, reference, tile, parity);
        continue;
      }
      const float sum[2] = {(MODE == DK ? rows.kappa[0] : 1.f) * rows.sum[0],
                            (MODE == DK ? rows.kappa[1] : 1.f) * rows.sum[1]};
      rows = read_rows(block, c, block.first_row() + block.g);  // again, as registers are few
      rows.sum[0] = sum[0], rows.sum[1] = sum[1];
      compute_diagonal_tile(block, rows, x, c, tile, parity);
    }
  }
  struct Columns {  // of two tokens
    float2 cumsum, sigma, tau, inverse_g;
  };
  static DEVICE Columns read_columns(const Coefficients& c, int j) {
    const float4 x = *reinterpret_cast<const float4*>(c.columns + CONFIG::COLUMN * j);
    if (CONFIG::COLUMN == 2) return {{x.x, x.z}, {x.y, x.w}, {1.f, 1.f}, {1.f, 1.f}};
    const float4 y = *reinterpret_cast<const float4*>(c.columns + CONFIG::COLUMN * (j + 1));
    return {{x.x, y.x}, {x.y, y.y}, {x.z, y.z}, {x.w, y.w}};
  }
  // exp(Γ_i − Γ_j) is exp(Γ_i − Γ_r), which is in `rows`, times exp(Γ_r − Γ_j), the column's factor: r is the warp's
  // first row, which is between i and j, so that neither exceeds 1. DK's sums still lack the former factor.
  static DEVICE void compute_tile_before(const Block& block, Rows& rows, const float (&x)[8][4], const Coefficients& c,
                                         float reference, int tile, int parity) {
    u32 pairs[4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const Columns columns = read_columns(c, 16 * tile + 8 * m + 2 * block.t);
      float w[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        auto of = [&](float2 pair) { return i ? pair.y : pair.x; };
        const float decay = power_of_two(reference - of(columns.cumsum));
        const float inverse_g = decay * (CONFIG::HAS_INVERSE_G ? of(columns.inverse_g) : 1.f);
        const float sigma = of(columns.sigma) * inverse_g, tau = of(columns.tau) * decay;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float own = x[2 * tile + m][2 * half + i];
          if (MODE == DQ) {
            const float z = rows.rho[half] * own + rows.kappa[half];
            rows.sum[half] += decay * z, w[half][i] = sigma * z;
          } else if (MODE == DK) {
            rows.sum[half] += inverse_g * own, w[half][i] = rows.rho[half] * (sigma * own + tau);
          } else {
            w[half][i] = rows.rho[half] * (sigma * own) + rows.kappa[half] * tau;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) pairs[2 * m + half] = round(rows, half, w[half][0], w[half][1]);
    }
    stmatrix(address(block, parity, tile), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  // The 16 × 16 tile on the diagonal: two 8 × 8 tiles on it, one below it, and one above it, which is 0.
  static DEVICE void compute_diagonal_tile(const Block& block, Rows& rows, const float (&x)[8][4],
                                           const Coefficients& c, int tile, int parity) {
    const float* cumsum = c.columns + CONFIG::COLUMN * (block.first_row() + block.g);
    u32 pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const Columns columns = read_columns(c, 16 * tile + 8 * m + 2 * block.t);
#pragma unroll
      for (int half = m; half < 2; half++) {
        float w[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          auto of = [&](float2 pair) { return i ? pair.y : pair.x; };
          const bool counts = half > m || block.g >= 2 * block.t + i;  // else the decay may be above 1
          const float decay = counts ? power_of_two(cumsum[CONFIG::COLUMN * 8 * half] - of(columns.cumsum)) : 0.f;
          const float own = x[2 * tile + m][2 * half + i] * (CONFIG::HAS_INVERSE_G ? of(columns.inverse_g) : 1.f);
          if (SUMS_X) rows.sum[half] += decay * (MODE == DQ ? rows.rho[half] * own + rows.kappa[half] : own);
          w[i] = score(rows, half, of(columns.sigma), of(columns.tau), own, 0, decay);
        }
        pairs[2 * m + half] = round(rows, half, w[0], w[1]);
      }
    }
    stmatrix(address(block, parity, tile), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  // The normaliser adds what the tensor cores multiply by.
  static DEVICE u32 round(Rows& rows, int half, float w0, float w1) {
    const u32 pair = pack<T>(w0, w1);
    const float2 rounded = unpack<T>(pair);
    if (MODE == FWD) rows.sum[half] += rounded.x + rounded.y;
    return pair;
  }

  // The distance of this lane's first row from its first column.
  static DEVICE int ahead(const Block& block) { return block.first_row() + block.g - 2 * block.t; }
  static DEVICE void read_powers(const Block& block, Powers& powers) {
#pragma unroll
    for (int i = 0; i < (KEEPS_POWERS ? 9 : 0); i++) {
      auto read = [&](int by) { return block.powers[max(by, -1)]; };
      powers.of[i] = make_float2(read(ahead(block) + 8 - 8 * i), read(ahead(block) + 7 - 8 * i));
    }
  }
  static DEVICE float2 powers_of(const Block& block, const Powers& powers, int tile, int below) {  // 8·below rows on
    if (KEEPS_POWERS) return powers.of[1 + 2 * tile - below];
    if (DECAY != PER_HEAD) return make_float2(1.f, 1.f);
    const float* second =
        block.powers + (block.g % 2 ? 0 : Shared::POWERS_TABLE) + ahead(block) - 16 * tile + 8 * below - 1;
    float2 pair = *reinterpret_cast<const float2*>(second);
    return make_float2(pair.y, pair.x);
  }

  // The address of this lane's row in a 16 × 16 tile of this warp's scores.
  static DEVICE u32 address(const Block& block, int parity, int tile) {
    return block.scores_tile(parity) +
           (swizzled<CHUNK>(block.first_row() + block.lane % 16, block.lane / 16) ^ (tile << 5));
  }
  static DEVICE void clear_above_diagonal(const Block& block) {
    const int last = block.uniform_warp() % 4;
#pragma unroll
    for (int tile = 1; tile < 4; tile++)
#pragma unroll
      for (int parity = 0; parity < 2; parity++)
        if (tile > last) stmatrix(address(block, parity, tile), 0, 0, 0, 0);
  }
};
