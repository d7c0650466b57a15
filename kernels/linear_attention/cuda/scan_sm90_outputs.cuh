// The role "outputs" of an sm_90a block, a warpgroup for every 64 columns of y and c: computes y and the state.
//
// Y is computed transposed, columns of c by tokens, so that the state, whose rows are columns of c, goes from
// accumulators to operands without leaving registers. Per chunk a group issues
//
//     Yᵀ = state Aᵀ, scaled
//     Yᵀ += Cᵀ Wᵀ               and  state += (σ C)ᵀ B      (both at once; y is finished during the latter)
#pragma once
#include "ptx/mma.cuh"
#include "rope.cuh"
#include "scan_sm90_copies.cuh"
#include "scan_sm90_running_sums.cuh"

template <typename CONFIG>
struct OutputsSm90 {
  using T = typename CONFIG::T;
  using Traits = typename CONFIG::Traits;
  using Shared = typename CONFIG::Shared;
  using Block = BlockSm90<CONFIG>;
  using Copies = CopiesSm90<CONFIG>;
  using Coefficients = typename Block::Coefficients;
  static constexpr int D = CONFIG::D, CHUNK = CONFIG::CHUNK, MODE = CONFIG::MODE, ROPE = CONFIG::ROPE;
  static constexpr int GROUPS = CONFIG::GROUPS, D_STEPS = CONFIG::D_STEPS, CHUNK_STEPS = CONFIG::CHUNK_STEPS;
  static constexpr bool STATE_ONLY = CONFIG::STATE_ONLY, PROJECTS = CONFIG::PROJECTS, UNSEGMENTED = CONFIG::UNSEGMENTED;
  static constexpr bool WHOLE_FACTOR = CONFIG::WHOLE_FACTOR;
  static constexpr bool DECAYS_PAST = CONFIG::DECAYS_PAST, PER_TOKEN_DECAY = CONFIG::DECAY == PER_TOKEN;

  // To save registers.
  static constexpr bool READS_OWN_LATE = CONFIG::KEEPS_POWERS || (CONFIG::FACTOR_IN_W && D == 64 && CONFIG::HAS_A);

  static DEVICE void run(Block& block) {
    float state[D / 8][4];
    RunningSumsSm90<CONFIG> sums = {};
    load_state(block, state);
    if (CONFIG::COMPUTES_DB && block.tid < CHUNK) block.db_sums()[block.tid] = 0.f;
    auto segment = block.next_segment();
    typename Block::Stage current;
    PipelineState<2> scored;
    cross_boundary(block, state, block.begin());
    for (; block.begin() + CHUNK * scored.i < block.end(); current.advance(), scored.advance()) {
      block.recompute_addresses();
      const int position = block.begin() + CHUNK * scored.i, stage = current.stage(), parity = scored.stage();
      const int len = min(CHUNK, block.p.N - position);
      const Coefficients c = block.coefficients(stage);
      if (block.enters(segment, position)) store_state(block, state, block.before_segment(++segment.index));
      mbarrier_wait(block.full(stage),
                    current.phase());  // `ready` implies it, but racecheck follows one barrier, not two
      mbarrier_wait(block.ready(stage), current.phase());
      u32 own[CHUNK_STEPS][4], lhs[CHUNK_STEPS][4];
      float y[8][4];
      if (!STATE_ONLY) multiply_state(block, y, state, stage);
      decay_state(block, state, block.chunk_decay(c, len));
      if (STATE_ONLY) sums.decay(block, block.chunk_decay(c, len));
      block.recompute_addresses();
      if (!READS_OWN_LATE) read_own(block, own, block.tile(stage, C));
      if (!STATE_ONLY) scale_past(block, y, c);
      if (READS_OWN_LATE) block.recompute_addresses(), read_own(block, own, block.tile(stage, C));
      scale_own(block, lhs, own, c);
      if (!STATE_ONLY) mbarrier_wait(block.scored(parity), scored.phase());
      warpgroup_arrive();
#pragma unroll
      for (int s = 0; s < (STATE_ONLY ? 0 : CHUNK_STEPS); s++)
        mma_ABt<T>(y, own[s], k_along_rows<CHUNK>(block.scores_tile(parity), s), 1);
      warpgroup_commit();
#pragma unroll
      for (int s = 0; s < CHUNK_STEPS; s++) mma_AB<T>(state, lhs[s], k_down_columns<CHUNK>(block.tile(stage, B), s), 1);
      if (STATE_ONLY) sums.add_chunk(block, stage, stage);
      warpgroup_commit();
      if constexpr (PROJECTS) project(block, y, stage, parity, position);
      if constexpr (!PROJECTS && !STATE_ONLY) scale(block, y, stage, parity);
      if (!CONFIG::COPIER_STORES_Y && !STATE_ONLY) {
        block.sync_group();
        Copies::template store_y<1>(block, block.y_tile(stage, parity) + block.group() * Shared::PANEL, position,
                                    PANEL_COLUMNS * block.group());
      }
      warpgroup_wait();
      warpgroup_fence_operand(state);
      if (STATE_ONLY) sums.wait(block);
      mbarrier_arrive(block.empty(stage));
      block.recompute_addresses();
      cross_boundary(block, state, position + CHUNK);
    }
    if (STATE_ONLY) sums.store(block, block.final());
    if (block.has_final() && MODE != DV) store_state(block, state, block.final());
    if (CONFIG::COMPUTES_DB && block.warp < 2) store_db(block);
  }

  // A warp's 16 columns of y and c, two tiles of eight. With RoPE on them, one lane has columns that rotate together.
  static DEVICE int own_tile(const Block& block, int half) {
    constexpr int HALF = Traits::PROJECTS ? ROPE / 16 : 0;
    int i = 2 * block.warp + half;
    return i < 2 * HALF ? i / 2 + half * HALF : i;
  }
  // The index of a row of the state, which is a column of c.
  static DEVICE int own_row(const Block& block, int half) { return 8 * own_tile(block, half) + block.g; }
  static DEVICE int state_row(const Block& block, int half) { return block.first_column() + own_row(block, half); }

  // --------------------------------------------------------------------------------------------------- state
  static DEVICE void load_state(const Block& block, float (&state)[D / 8][4]) {
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[j][i] = 0.f;
    if (!block.has_initial()) return;
    const StateSource from = block.initial();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 2; x++)
          state[j][2 * half + x] =
              from.scale * from.S[Block::States::element(state_row(block, half), 8 * j + 2 * block.t + x)];
  }
  static DEVICE void store_state(const Block& block, const float (&state)[D / 8][4], const StateTarget& to) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 2; x++)
          to.S[Block::States::element(state_row(block, half), 8 * j + 2 * block.t + x)] =
              to.scale * state[j][2 * half + x];
  }
  // At a boundary (token_decay.cuh): DQ stores its state, in 16 bits and in the order of its lanes; DK, whose lanes
  // hold the same elements, computes its inner product with its own.
  static DEVICE void cross_boundary(const Block& block, const float (&state)[D / 8][4], int position) {
    if (!block.at_boundary(position) || position >= block.end()) return;
    const Boundary<D> boundary = block.boundary(position);
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < D_STEPS; k++) {
      uint4& at = boundary.state[(k * GROUPS + block.group()) * WARPGROUP + block.thread()];
      if (MODE == DQ) {
        at = make_uint4(round(state, k, 0), round(state, k, 1), round(state, k, 2), round(state, k, 3));
        continue;
      }
      const uint4 read = at;
      const u32 x[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 pair = unpack<T>(x[i]);
        sum += pair.x * state[2 * k + i / 2][2 * (i % 2)], sum += pair.y * state[2 * k + i / 2][2 * (i % 2) + 1];
      }
    }
    if (MODE == DQ) return;
    sum = sum_lanes<32>(sum) * (Traits::range(block.p) / Traits::scale_sigma(block.p));
    if (block.lane == 0) boundary.parts[block.warp] = sum;
  }
  static DEVICE u32 round(const float (&state)[D / 8][4], int k, int i) {
    return pack<T>(state[2 * k + i / 2][2 * (i % 2)], state[2 * k + i / 2][2 * (i % 2) + 1]);
  }
  static DEVICE void decay_state(const Block& block, float (&state)[D / 8][4], float decay) {
    // A branch, so that ptxas leaves this during the product that reads the state, and not after the wait for it.
    if (PER_TOKEN_DECAY && __all_sync(FULL_WARP, decay == 1.f)) return;
    if (PER_TOKEN_DECAY) warpgroup_fence_operand(state);
#pragma unroll
    for (int j = 0; j < (CONFIG::DECAY ? D / 8 : 0); j++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[j][i] *= decay;
  }

  // Issues, without waiting, Yᵀ's part from the state before the chunk.
  static DEVICE void multiply_state(const Block& block, float (&y)[8][4], const float (&state)[D / 8][4], int stage) {
    u32 rounded[D_STEPS][4];
#pragma unroll
    for (int k = 0; k < D_STEPS; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) rounded[k][i] = round(state, k, i);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < D_STEPS; k++) mma_ABt<T>(y, rounded[k], k_along_rows<CHUNK>(block.tile(stage, A), k), k > 0);
    warpgroup_commit();
  }
  // Waits for that product y, and turns it into γ^(i+1) (ρ y + κ Σ τ c).
  static DEVICE void scale_past(Block& block, float (&y)[8][4], const Coefficients& c) {
    constexpr bool SUMS_C = CONFIG::SUMS_C;
    const float c_sum[2] = {SUMS_C ? c.c_sum[own_row(block, 0)] : 0.f, SUMS_C ? c.c_sum[own_row(block, 1)] : 0.f},
                step = DECAYS_PAST ? block.powers[8] : 1.f, scale_rho = Traits::scale_rho(block.p);
    const float* from_state = block.powers + Traits::POWERS_FROM_STATE + 2 * block.t;
    float past[2] = {DECAYS_PAST ? from_state[0] : 1.f, DECAYS_PAST ? from_state[1] : 1.f};
    float scale[8][2], shift[8][4];
    auto find = [&](int n) {  // of two tokens
      float2 rho = make_float2(scale_rho, scale_rho), kappa = make_float2(1.f, 1.f);
      if (CONFIG::HAS_RHO) rho = *reinterpret_cast<float2*>(c.rho + 8 * n + 2 * block.t);
      if (CONFIG::HAS_KAPPA) kappa = *reinterpret_cast<float2*>(c.kappa + 8 * n + 2 * block.t);
      if (CONFIG::FACTOR_IN_W && !CONFIG::HAS_RHO && !CONFIG::FACTOR_IN_PAST) {
        const float2 norm = *reinterpret_cast<float2*>(c.row + 8 * n + 2 * block.t);
        rho = make_float2(block.scale_of_row(norm.x), block.scale_of_row(norm.y));
      }
      if (CONFIG::FACTOR_IN_W && MODE == DK && CONFIG::HAS_G) kappa = rho;
      if (PER_TOKEN_DECAY) {
        float2 decay = *reinterpret_cast<float2*>(c.from_start + 8 * n + 2 * block.t);
        past[0] = decay.x * step, past[1] = decay.y * step;  // γ = 1
      }
      scale[n][0] = past[0] * rho.x, scale[n][1] = past[1] * rho.y;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        shift[n][2 * half] = past[0] * kappa.x * c_sum[half];
        shift[n][2 * half + 1] = past[1] * kappa.y * c_sum[half];
      }
      if (!PER_TOKEN_DECAY) past[0] *= step, past[1] *= step;
    };
    if (UNSEGMENTED) {
#pragma unroll
      for (int n = 0; n < 8; n++) find(n);
    }
    warpgroup_wait();
    warpgroup_fence_operand(y);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      if (!UNSEGMENTED) find(n);
#pragma unroll
      for (int i = 0; i < 4; i++)
        y[n][i] = SUMS_C ? scale[n][i % 2] * y[n][i] + shift[n][i] : scale[n][i % 2] * y[n][i];
    }
  }

  // Reads tiles of eight tokens by eight of this warp's columns, transposed: fragments of Cᵀ, in the layout of Yᵀ's.
  static DEVICE void read_own(const Block& block, u32 (&r)[CHUNK_STEPS][4], u32 tile_address) {
#pragma unroll
    for (int s = 0; s < CHUNK_STEPS; s++) read_own(block, r[s], tile_address, s);
  }
  static DEVICE void read_own(const Block& block, u32 (&r)[4], u32 tile_address, int s) {
    ldmatrix_trans(r, tile_address +
                          swizzled<CHUNK>(block.lane % 8 + 8 * (block.lane / 16), own_tile(block, block.lane / 8 % 2)) +
                          s * 16 * ROW_BYTES);
  }
  // Computes σ C, with σ decayed to the chunk's end: the state's increment is (σ C)ᵀ B.
  static DEVICE void scale_own(const Block& block, u32 (&lhs)[CHUNK_STEPS][4], const u32 (&own)[CHUNK_STEPS][4],
                               const Coefficients& c) {
#pragma unroll
    for (int s = 0; s < CHUNK_STEPS; s++) {
      if (CONFIG::FACTORS_DECAYS) {
        const uint4 x = *reinterpret_cast<const uint4*>(Block::sigma_end_part(c, 0, 16 * s + 2 * block.t));
        const u32 sigma[2] = {x.x, x.y}, rest[2] = {x.z, x.w};  // of two tokens, and of the two that are eight further
#pragma unroll
        for (int i = 0; i < 4; i++)
          lhs[s][i] = multiply_add<T>(own[s][i], sigma[i / 2], multiply<T>(own[s][i], rest[i / 2]));
        continue;
      }
      const u16* sigma = c.sigma_end + 16 * s + 2 * block.t;
      u32 near = *reinterpret_cast<const u32*>(sigma), far = *reinterpret_cast<const u32*>(sigma + 8);
      lhs[s][0] = multiply<T>(own[s][0], near), lhs[s][1] = multiply<T>(own[s][1], near);
      lhs[s][2] = multiply<T>(own[s][2], far), lhs[s][3] = multiply<T>(own[s][3], far);
      if (CONFIG::SIGMA_PARTS == 1) continue;
      u32 near_rest = *reinterpret_cast<const u32*>(sigma + CHUNK),
          far_rest = *reinterpret_cast<const u32*>(sigma + CHUNK + 8);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 x = own[s][i], rest = multiply<T>(x, i < 2 ? near_rest : far_rest);
        lhs[s][i] = multiply_add<T>(x, i < 2 ? near : far, rest);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------- y, finished
  // The address of this lane's row in this warp's two tiles of y, for the first eight tokens.
  static DEVICE u32 own_y(const Block& block, int stage, int parity) {
    return block.y_tile(stage, parity) + block.group() * Shared::PANEL +
           swizzled<CHUNK>(block.lane % 8 + 8 * (block.lane / 16), own_tile(block, (block.lane / 8) % 2) % 8);
  }
  // FWD: o = y/g, or y; DV: dv = y.
  static DEVICE void scale(Block& block, float (&y)[8][4], int stage, int parity) {
    const float scale = Traits::scale_y(block.p);
    float2 scales[8];  // of two tokens, read during the product
#pragma unroll
    for (int n = 0; n < 8; n++) {
      scales[n] = make_float2(scale, scale);
      if (CONFIG::NORMALISES)
        scales[n] = *reinterpret_cast<float2*>(block.coefficients(stage).row + 8 * n + 2 * block.t);
    }
    warpgroup_wait<1>();
    warpgroup_fence_operand(y);
    block.recompute_addresses();
    u32 to = own_y(block, stage, parity);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const float2 r = scales[n + m];
        pairs[2 * m] = pack<T>(y[n + m][0] * r.x, y[n + m][1] * r.y);
        pairs[2 * m + 1] = pack<T>(y[n + m][2] * r.x, y[n + m][3] * r.y);
      }
      stmatrix_trans(to + n * 8 * ROW_BYTES, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  // DQ, DK: the gradient through the norm, dx = r (y − x̂ (x̂·y)), and through RoPE; b and r as in the table.
  static DEVICE void project(Block& block, float (&y)[8][4], int stage, int parity, int position) {
    u32 x[CHUNK_STEPS][4];
    if (READS_QK_EARLY) read_own(block, x, block.tile(stage, QK));
    warpgroup_wait<1>();
    warpgroup_fence_operand(y);
    block.recompute_addresses();
    PairAngles angles[ANGLES];
    if (ROPE) {
      if (D == 64) warpgroup_wait();  // frees registers
      read_angles<EARLY_ANGLES>(block, angles, position, 0);
      block.recompute_addresses();
    }
    dots(block, x, y, stage, parity);
    if (ROPE && EARLY_ANGLES < ANGLES) {
      block.recompute_addresses();
      read_angles<ANGLES - EARLY_ANGLES>(block, angles, position, EARLY_ANGLES);
    }
    block.sync_outputs();
    if (block.uniform_warp() % 4 < CHUNK / 32) write_projection(block, block.thread(), stage, parity, position);
    block.sync_group();
    const bool rotates = ROPE && block.uniform_warp() < ROPE / 16;
    u32 to = own_y(block, stage, parity);
    float2 along[8], out[8];  // of two tokens: Projection's `along` and `out`
    auto read_projection = [&](int n) {
      if (WHOLE_FACTOR) {
        along[n] = *reinterpret_cast<float2*>(group_projections(block) + 8 * n + 2 * block.t);
        return;
      }
      const float4 read = *reinterpret_cast<float4*>(group_projections(block) + 2 * (8 * n + 2 * block.t));
      out[n] = make_float2(read.x, read.z), along[n] = make_float2(read.y, read.w);
    };
#pragma unroll
    for (int n = 0; n < (READS_PROJECTIONS_AT_ONCE ? 8 : 0); n++) read_projection(n);
    if (WHOLE_FACTOR && MODE == DQ && __all_sync(FULL_WARP, block.coefficient() == 0.f)) {
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) y[n][i] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      if (READS_QK_TWICE) read_own(block, x[n / 2], block.tile(stage, QK), n / 2);
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        if (!READS_PROJECTIONS_AT_ONCE) read_projection(n + m);
        const float2 back = along[n + m], scale = WHOLE_FACTOR ? make_float2(1.f, 1.f) : out[n + m];
        float2 lo = unpack<T>(x[n / 2][2 * m]), hi = unpack<T>(x[n / 2][2 * m + 1]);
        lo = make_float2(scale.x * (y[n + m][0] - back.x * lo.x), scale.y * (y[n + m][1] - back.y * lo.y));
        hi = make_float2(scale.x * (y[n + m][2] - back.x * hi.x), scale.y * (y[n + m][3] - back.y * hi.y));
        if (ROPE && rotates) {
          const PairAngles& pair = angles[(n + m) % ANGLES];
          rotate_back(lo, hi, pair.cos, pair.sin);
        }
        pairs[2 * m] = pack<T>(lo.x, lo.y), pairs[2 * m + 1] = pack<T>(hi.x, hi.y);
      }
      stmatrix_trans(to + n * 8 * ROW_BYTES, pairs[0], pairs[1], pairs[2], pairs[3]);
      if (ROPE && n + ANGLES < 8) read_angles<2>(block, angles, position, n + ANGLES);
    }
  }
  // Sums a token's x·y over all warps' parts; writes its (out, along) for this group.
  static DEVICE void write_projection(Block& block, int token, int stage, int parity, int position) {
    const Params& p = block.p;
    const float* from = partial_dots(block, parity) + token;
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; i++) dot += from[i * CHUNK];
    float norm = block.coefficients(stage).row[token];
    auto [out, along] = Traits::projection(block, norm, dot);
    float unit_dot = norm * dot * Traits::scale_y(p);  // x̂·y; rows past the end have norm 0
    if (WHOLE_FACTOR) {
      unit_dot = dot * reciprocal(block.b_or_one());
      group_projections(block)[token] = MODE == DQ && block.coefficient() == 0.f ? 0.f : along;
    } else {
      if (CONFIG::FACTOR_IN_W) unit_dot *= reciprocal(mantissa(out)), out = exponent(out);
      *reinterpret_cast<float2*>(group_projections(block) + 2 * token) = make_float2(out, along);
    }
    if (CONFIG::COMPUTES_DB && block.tid < CHUNK) block.db_sums()[block.tid] += unit_dot;
    if (CONFIG::COMPUTES_DG && block.tid < CHUNK && position + token < p.N) {
      float& dG = p.dG[i64(block.bh()) * p.N + position + token];
      const Coefficients c = block.coefficients(stage);
      float known = CONFIG::HAS_DG ? c.dG[token] : 0.f;
      if (CONFIG::HAS_DG && CONFIG::HAS_A) known *= block.constant();
      if (CONFIG::HAS_G && MODE == DQ) known *= reciprocal(block.scale_of_row(norm));
      dG = known + (MODE == DQ ? block.coefficient() * unit_dot : unit_dot);
    }
  }
  static DEVICE float* group_projections(const Block& block) {
    return reinterpret_cast<float*>(block.smem + Shared::PROJECTIONS) + block.group() * 2 * CHUNK;
  }
  static DEVICE float* partial_dots(const Block& block, int parity) {
    return reinterpret_cast<float*>(block.smem + Shared::PARTIAL_DOTS) + parity * 4 * GROUPS * CHUNK;
  }
  // Computes x·y of every token over this warp's columns.
  static DEVICE void dots(const Block& block, u32 (&x)[CHUNK_STEPS][4], const float (&y)[8][4], int stage, int parity) {
    float d[4][2];
    auto part = [](float2 pair, int i) { return i ? pair.y : pair.x; };
    auto dot = [&](int n, int i) {
      return part(unpack<T>(x[n / 2][2 * (n % 2)]), i) * y[n][i] +
             part(unpack<T>(x[n / 2][2 * (n % 2) + 1]), i) * y[n][2 + i];
    };
    // Sums over g: each step halves the number of tokens per lane, down to two.
    auto halve = [&](float low, float high, int bit) {
      bool upper = block.g & bit;
      return (upper ? high : low) + __shfl_xor_sync(FULL_WARP, upper ? low : high, 4 * bit);
    };
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (!READS_QK_EARLY && n % 2 == 0)
        for (int s = n / 2; s < CHUNK_STEPS; s += 2) read_own(block, x[s], block.tile(stage, QK), s);
#pragma unroll
      for (int i = 0; i < 2; i++) d[n][i] = halve(dot(n, i), dot(n + 4, i), 4);
    }
#pragma unroll
    for (int half = 2; half > 0; half /= 2)
#pragma unroll
      for (int n = 0; n < half; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) d[n][i] = halve(d[n][i], d[n + half][i], half);
    *reinterpret_cast<float2*>(partial_dots(block, parity) + block.warp * CHUNK + 8 * block.g + 2 * block.t) =
        make_float2(d[0][0], d[0][1]);
  }
  // x̂ is read while products run, and kept, if registers allow it.
  static constexpr bool READS_QK_EARLY = D == 128 && !(ROPE && CONFIG::DECAY), READS_QK_TWICE = ROPE || D == 64;
  static constexpr bool READS_PROJECTIONS_AT_ONCE = !READS_QK_TWICE && CONFIG::DECAY != PER_HEAD;

  // The angles of two tokens in the two columns of this lane that rotate together. Registers hold those of ANGLES pairs of
  // tokens; EARLY_ANGLES of them are read before the dots, which hide the latency, the rest as soon as others are used.
  static constexpr bool FEW_REGISTERS = CONFIG::COMPUTES_DG && (MODE == DQ || D == 64);
  static constexpr int ANGLES = FEW_REGISTERS ? 4 : D == 128 ? 8 : ROPE > 16 ? 4 : MODE == DQ ? 6 : 8;
  static constexpr int EARLY_ANGLES = D == 128 && !CONFIG::COMPUTES_DG ? 8 : 4;
  struct PairAngles {
    float2 cos, sin;
  };
  // Reads the angles of COUNT pairs of tokens, from the chunk's token 8·first on. Warps that rotate nothing get zeros:
  // registers that are not written on every path would stay live throughout the loop.
  template <int COUNT>
  static DEVICE void read_angles(const Block& block, PairAngles (&angles)[ANGLES], int position, int first) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) angles[(first + n) % ANGLES] = {};
    if (block.uniform_warp() >= ROPE / 16) return;
    const Params& p = block.p;
    const int token = position + 8 * first + 2 * block.t, remaining = p.N - token;
    const i64 at = i64(block.token(token)) * ROPE + 8 * own_tile(block, 0) + block.g;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
      auto read = [&](const float* x, int i) {
        return i < remaining ? x[at + i * (Traits::REVERSE ? -ROPE : ROPE)] : 0.f;
      };
      PairAngles& pair = angles[(first + n) % ANGLES];
      pair.cos = make_float2(read(p.cos, 8 * n), read(p.cos, 8 * n + 1));
      pair.sin = make_float2(read(p.sin, 8 * n), read(p.sin, 8 * n + 1));
    }
  }

  static DEVICE void store_db(const Block& block) {
    float sum = sum_lanes<32>(block.db_sums()[block.tid]);
    if (block.lane == 0) block.db_sums()[block.tid] = sum;
    block.sync_outputs(CHUNK);
    if (block.tid == 0)
      block.p.db[block.bh() * block.p.segments + block.segment()] = block.db_sums()[0] + block.db_sums()[32];
  }
};
