// The scan from sm_80 on: four warps with mma.sync, all in the same phases.
//
// A warp computes 16 rows of X and W, all columns, then D/4 columns of Y, all rows. It owns the rows of the state that
// belong to these columns; the state goes from accumulators to operands without leaving registers.
#pragma once
#include "scan_sm80_block.cuh"

template <typename CONFIG>
struct ScanSm80 : BlockSm80<CONFIG> {
  using Block = BlockSm80<CONFIG>;
  // C++ does not look up names in a base class that depends on a template parameter.
  using Block::D, Block::CHUNK, Block::MODE, Block::ROPE, Block::STATE_ONLY, Block::POWERS, Block::PER_TOKEN_DECAY,
      Block::HAS_G, Block::SUMS_X, Block::WARPS, Block::D_STEPS, Block::CHUNK_STEPS, Block::Y_TILES, Block::STATE_TILES,
      Block::SIXTEEN_ROWS, Block::p, Block::base, Block::tid, Block::warp, Block::g, Block::t, Block::lane,
      Block::begin, Block::log2_decay, Block::sigma, Block::tau, Block::rho, Block::kappa, Block::zeta, Block::c_sum,
      Block::b_sum, Block::partial_dots, Block::powers, Block::sigma_end, Block::tau_end, Block::zeta_end,
      Block::b_sum_parts, Block::CUMSUM, Block::NORM, Block::COUNT, Block::add_squares, Block::b_or_one, Block::bh,
      Block::coefficient, Block::coefficients, Block::coefficients_at_end, Block::constant, Block::count_before,
      Block::dG, Block::end, Block::factor_in_w, Block::recompute_addresses, Block::fragment_A, Block::fragment_B,
      Block::fragment_Bt, Block::fragment_own, Block::from_start, Block::token_decays, Block::key_norms, Block::load,
      Block::load_tile, Block::mma_pair, Block::own_tile, Block::part, Block::power, Block::reciprocal_norms,
      Block::rotate, Block::rotate_tiles, Block::row, Block::segment, Block::sigma_rest, Block::stat, Block::tile,
      Block::chunk_decay;
  using typename Block::Shared;
  using typename Block::States;
  using typename Block::T;
  using typename Block::Traits;

  float state[STATE_TILES][D / 8][4];

  DEVICE ScanSm80(const Params& params, char* shared) : Block(params, shared) {}

  DEVICE void run() {
    if constexpr (STATE_ONLY)
      run_states();
    else
      run_scan();
  }
  DEVICE void run_scan() {
    load<true>(0, begin);
    load_state();
    constexpr bool COUNTS = CONFIG::NORMALISES && !PER_TOKEN_DECAY;
    float n = COUNTS ? tokens_before<POWERS>(p, bh(), log2_decay, begin) : 0.f;
    int stage = 0;
    for (int position = begin; position < end(); position += CHUNK, stage ^= 1) {
      recompute_addresses();
      int len = min(CHUNK, p.N - position);
      copy_async_wait<0>();
      __syncthreads();  // the tiles are loaded, and all threads are done with the other stage
      load<true>(stage ^ 1, position + CHUNK);
      if (CONFIG::COMPUTES_DG) cross_boundary(stage, position);
      rotate_tiles(stage, position, true);
      coefficients(stage, position);
      scores(stage, position, len, n);
      float y[CHUNK_STEPS][Y_TILES][4];
      recompute_addresses();
      outputs(stage, position, y);
      recompute_addresses();
      if constexpr (Traits::PROJECTS)
        project(stage, y, position);
      else
        scale(stage, y, position);
      recompute_addresses();
      update(stage, len);
      if (COUNTS) n = POWERS ? n * power(CHUNK) + powers[CHUNK + 1] : n + CHUNK;
    }
    __syncthreads();
    if (MODE != DQ && segment() == p.segments - 1 && p.final.S) {
      const bool own = PER_TOKEN_DECAY && Traits::REVERSE;
      store_state(States::final(p, bh(), own ? log2_decay_of(p, bh(), 0) : 0.f));
    }
    if (CONFIG::COMPUTES_DB) store_sum(p.db, db_sums());
    if (CONFIG::COMPUTES_DA) store_sum(p.da, da_sums());
  }

  // Computes this segment's own state: FWD's S, Σ k̂, Σ v; DK's and DV's adjoints of them.
  DEVICE void run_states() {
    load<false>(0, begin);
    clear_state();
    int stage = 0;
    for (int position = begin; position < end(); position += CHUNK, stage ^= 1) {
      recompute_addresses();
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
        key_norms(lo, hi, position, false);
      }
      __syncthreads();
      int len = min(CHUNK, p.N - position);
      coefficients_at_end(stage, len);
      __syncthreads();
      recompute_addresses();
      update(stage, len);
    }
    __syncthreads();
    store_state(States::before_segment(p, bh(), segment() + 1));
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
      if (CONFIG::COMPUTES_DB && i < CHUNK) db_sums()[i] = 0.f;
      if (CONFIG::COMPUTES_DA && i < CHUNK) da_sums()[i] = 0.f;
      split<T, 3>(b_sum_parts + i, D, 0.f);
    }
  }
  DEVICE int state_row(int i, int half) const { return 8 * own_tile(2 * i + half) + g; }

  DEVICE void load_state() {
    clear_state();
    if (!segment() && !p.initial.S) return;
    StateSource from = States::initial(p, bh(), segment());
#pragma unroll
    for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int x = 0; x < 4; x++)
          state[i][j][x] = from.scale * from.S[States::element(state_row(i, x / 2), 8 * j + 2 * t + x % 2)];
    for (int i = tid; i < D; i += THREADS) {
      if (CONFIG::SUMS_C) c_sum[i] = from.scale_c * from.c[i];
      if (CONFIG::SUMS_B) b_sum[i] = from.scale_b * from.b[i];
      split<T, 3>(b_sum_parts + i, D, b_sum[i]);
    }
  }
  // Stores the state to global memory. Call it after a barrier, as it stores sums of other threads.
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
      if (CONFIG::SUMS_C) to.c[i] = to.scale_c * c_sum[i];
      if (CONFIG::SUMS_B && CONFIG::STORES_B) to.b[i] = to.scale_b * b_sum[i];
    }
  }

  // At a boundary (token_decay.cuh): DQ stores its sums and its state, the latter in 16 bits and in the order of its
  // lanes; DK, whose lanes hold the same elements, computes their inner products with its own.
  DEVICE void cross_boundary(int stage, int position) const {
    const int token = Traits::REVERSE ? p.N - position : position;
    if (position == 0 || p.N % CHUNK || token % BOUNDARY_INTERVAL) return;
    const Boundary<D> boundary(p, bh(), token / BOUNDARY_INTERVAL - 1);
    if (MODE == DQ)
      leave_at(boundary, stage);
    else
      multiply_by(boundary, stage);
  }
  DEVICE void leave_at(const Boundary<D>& boundary, int stage) const {
#pragma unroll
    for (int k = 0; k < STATE_TILES * D_STEPS; k++) {
      const float (&x)[4] = state[k / D_STEPS][2 * (k % D_STEPS)], (&y)[4] = state[k / D_STEPS][2 * (k % D_STEPS) + 1];
      boundary.state[k * THREADS + tid] =
          make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(y[0], y[1]), pack<T>(y[2], y[3]));
    }
    for (int i = tid; i < D; i += THREADS) {
      if (CONFIG::SUMS_C) boundary.c[i] = c_sum[i];
      if (CONFIG::SUMS_B) boundary.b[i] = b_sum[i];
    }
    if (HAS_G && tid == 0) *boundary.count = count_before(stage);
  }
  DEVICE void multiply_by(const Boundary<D>& boundary, int stage) const {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < STATE_TILES * D_STEPS; k++) {
      const uint4 read = boundary.state[k * THREADS + tid];
      const u32 pairs[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 x = unpack<T>(pairs[i]);
        const float (&own)[4] = state[k / D_STEPS][2 * (k % D_STEPS) + i / 2];
        sum += x.x * own[2 * (i % 2)], sum += x.y * own[2 * (i % 2) + 1];
      }
    }
    if (Traits::AS_FWD) sum *= Traits::range(p) * Traits::range(p);  // undoes both σ's scales, whose product is else 1
    for (int i = tid; i < D; i += THREADS) {
      if (CONFIG::SUMS_C) sum += c_sum[i] * boundary.c[i];
      if (CONFIG::SUMS_B) sum += b_sum[i] * boundary.b[i] * Traits::scale_y(p);
    }
    if (HAS_G && tid == 0) sum -= *boundary.count * count_before(stage);
    sum = sum_lanes<32>(sum);
    if (lane == 0) boundary.parts[warp] = sum;
  }

  // state += (σ C)ᵀ B, Σ τ c and Σ ζ b, everything decayed to the chunk's end.
  DEVICE void update(int stage, int len) {
    u32 tile_b = tile(stage, B), tile_c = tile(stage, C);
    if (POWERS || PER_TOKEN_DECAY) {
      float decay = chunk_decay(stage, len);
#pragma unroll
      for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int x = 0; x < 4; x++) state[i][j][x] *= decay;
    }
    // Sums over tokens on the tensor cores: a 16-bit factor and its rounding remainder, in two columns.
    float csum[STATE_TILES][4] = {}, bsum[STATE_TILES][4] = {};
#pragma unroll
    for (int s = 0; s < CHUNK_STEPS; s++) {
      int j = 16 * s + 2 * t;
      u32 near = *reinterpret_cast<u32*>(sigma_end + j), far = *reinterpret_cast<u32*>(sigma_end + j + 8);
      u32 near_rest = PER_TOKEN_DECAY ? *reinterpret_cast<u32*>(sigma_rest() + j) : 0,
          far_rest = PER_TOKEN_DECAY ? *reinterpret_cast<u32*>(sigma_rest() + j + 8) : 0;
      u32 tau0 = CONFIG::SUMS_C ? part<CONFIG::SUM_PARTS>(tau_end, CHUNK, j) : 0,
          tau1 = CONFIG::SUMS_C ? part<CONFIG::SUM_PARTS>(tau_end, CHUNK, j + 8) : 0;
      u32 zeta0 = CONFIG::SUMS_B ? part<CONFIG::SUM_PARTS>(zeta_end, CHUNK, j) : 0,
          zeta1 = CONFIG::SUMS_B ? part<CONFIG::SUM_PARTS>(zeta_end, CHUNK, j + 8) : 0;
      u32 lhs[STATE_TILES][4];
#pragma unroll
      for (int i = 0; i < STATE_TILES; i++) {
        u32 r[4];
        fragment_own(r, tile_c, s, i);
        if (CONFIG::SUMS_C) mma<T>(csum[i], r[0], r[2], r[1], r[3], tau0, tau1);
        lhs[i][0] = times_sigma(r[0], near, near_rest), lhs[i][1] = times_sigma(r[2], near, near_rest);
        lhs[i][2] = times_sigma(r[1], far, far_rest), lhs[i][3] = times_sigma(r[3], far, far_rest);
        if (!CONFIG::SUMS_B) continue;
        fragment_B(r, tile_b, s, warp * STATE_TILES + i);
        mma<T>(bsum[i], r[0], r[2], r[1], r[3], zeta0, zeta1);
      }
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        u32 r[4];
        fragment_B(r, tile_b, s, n);
#pragma unroll
        for (int i = 0; i < STATE_TILES; i++) mma_pair(state[i][2 * n], state[i][2 * n + 1], lhs[i], r);
      }
    }
    add_sums(csum, bsum, chunk_decay(stage, len));
  }
  static DEVICE u32 times_sigma(u32 x, u32 sigma, u32 rest) {
    return PER_TOKEN_DECAY ? multiply_add<T>(x, sigma, multiply<T>(x, rest)) : multiply<T>(x, sigma);
  }
  // Adds a chunk's sums to the running ones, in this warp's columns: no other warp accesses them before a barrier.
  DEVICE void add_sums(const float (&csum)[STATE_TILES][4], const float (&bsum)[STATE_TILES][4], float decay) {
    const float factor = CONFIG::A_TIMES_SUMS ? constant() : 1.f;
#pragma unroll
    for (int i = 0; i < STATE_TILES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float c = CONFIG::SUMS_C ? sum_of_parts(csum[i], half) : 0.f;
        const float b = CONFIG::SUMS_B ? sum_of_parts(bsum[i], half) : 0.f;
        if (t > 0) continue;
        auto add = [&](float* at, float sum) { return *at = *at * decay + factor * sum; };
        if (CONFIG::SUMS_C) add(c_sum + state_row(i, half), c);
        if (!CONFIG::SUMS_B) continue;
        const int column = 16 * (warp * STATE_TILES + i) + 8 * half + g;
        const float sum = add(b_sum + column, b);
        if (CONFIG::SPLITS_B) split<T, 3>(b_sum_parts + column, D, sum);
      }
  }
  // The sum of a row over its columns, valid in lanes t == 0. All lanes call it.
  static DEVICE float sum_of_parts(const float (&sum)[4], int half) {
    const float two = sum[2 * half] + sum[2 * half + 1];
    return CONFIG::SUM_PARTS == 3 ? two + __shfl_down_sync(FULL_WARP, sum[2 * half], 1) : two;
  }

  // --------------------------------------------------------------------------------------- a chunk's output
  // Writes W to shared memory: this warp's 16 rows (all columns: skipping masked ones costs more in branches than it
  // saves). Forward also computes the norms (written before the barrier inside) and g; SUMS_X: the sums of X's rows.
  DEVICE void scores(int stage, int position, int len, float n_before) {
    u32 tile_a = tile(stage, A), tile_b = tile(stage, B);
    const bool has_rows = CHUNK_STEPS == 4 || warp < CHUNK_STEPS;
    float x[CHUNK / 8][4] = {}, q_lo[4] = {}, q_hi[4] = {}, k_lo[4] = {}, k_hi[4] = {}, zq[4] = {};
    if (has_rows) {
#pragma unroll
      for (int k = 0; k < D_STEPS; k++) {  // X = A Bᵀ
        u32 lhs[4], r[4];
        fragment_A(lhs, tile_a, warp, k);
#pragma unroll
        for (int n = 0; n < CHUNK_STEPS; n++) {
          fragment_Bt(r, tile_b, n, k);
          mma_pair(x[2 * n], x[2 * n + 1], lhs, r);
        }
        if (MODE == FWD) {
          fragment_Bt(r, tile_b, warp, k);
          add_squares(k_lo, k_hi, r[0], r[2], r[1], r[3]);
          add_squares(q_lo, q_hi, lhs[0], lhs[1], lhs[2], lhs[3]);
        }
        if (CONFIG::SPLITS_B)
          mma<T>(zq, lhs[0], lhs[1], lhs[2], lhs[3], part<3>(b_sum_parts, D, 16 * k + 2 * t),
                 part<3>(b_sum_parts, D, 16 * k + 2 * t + 8));
      }
      if (MODE == FWD) key_norms(k_lo, k_hi, position, true);
    }
    __syncthreads();  // σ (and τ, ρ, κ) of the whole chunk are written
    coefficients_at_end(stage, len);
    if (!has_rows) return;
    float2 r = reciprocal_norms(q_lo, q_hi);
    int source = (lane & ~3u) | (g >> 1);
    r.x = __shfl_sync(FULL_WARP, r.x, source), r.y = __shfl_sync(FULL_WARP, r.y, source);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (SUMS_X) recompute_addresses();  // few registers here, too
      int row = 16 * warp + g + 8 * half;
      float rq = half ? r.y : r.x;
      float rho_i = MODE == FWD ? Traits::rho(*this, {0.f, 0.f, 0.f, rq}) : rho[row];
      float kappa_i = CONFIG::ADDS_A ? constant() : MODE == FWD || !HAS_G ? 1.f : kappa[row];
      float sum = weigh_row(stage, row, x, half, rho_i, kappa_i);
      if (CONFIG::NORMALISES || SUMS_X) {
        float inner = half ? zq[2] + zq[3] : zq[0] + zq[1];
        for (int d = 1; d < 4; d *= 2) {  // two sums over four lanes, in turn
          sum += __shfl_xor_sync(FULL_WARP, sum, d);
          inner += __shfl_xor_sync(FULL_WARP, inner, d);
        }
        if (PER_TOKEN_DECAY && HAS_G) n_before = count_before(stage);
        if (SUMS_X)
          finish_row(stage, row, sum, inner, n_before);
        else
          normalise_row(stage, position, row, sum, rho_i * inner + n_before);
      }
      if (MODE == FWD && t == 0) {
        rho[row] = rho_i;
        if (position + row < p.N) p.rq[stat(position + row)] = rq;
      }
    }
  }
  // Writes a row of W to shared memory. Returns this lane's part of the row's sum; with SUMS_X, that of its decayed X.
  DEVICE float weigh_row(int stage, int row, const float (&x)[CHUNK / 8][4], int half, float rho_i,
                         float kappa_i) const {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
      int j = 8 * n + 2 * t;
      float2 s = *reinterpret_cast<float2*>(sigma + j);
      float2 ta = added_by_columns(j), decay = decays(stage, row, j);
      float x0 = x[n][2 * half], x1 = x[n][2 * half + 1];
      if (SUMS_X) sum += decay.x * addend(rho_i, kappa_i, x0, j) + decay.y * addend(rho_i, kappa_i, x1, j + 1);
      float w0 = score(rho_i, kappa_i, s.x, ta.x, x0), w1 = score(rho_i, kappa_i, s.y, ta.y, x1);
      if (CONFIG::DECAY || SUMS_X) w0 *= decay.x, w1 *= decay.y;
      if (!MASKS_DECAYS) w0 = j <= row ? w0 : 0.f, w1 = j + 1 <= row ? w1 : 0.f;
      u32 w = pack<T>(w0, w1);
      st_shared_b32((base + Shared::SCORES + swizzled<CHUNK>(row, 0) + 4 * t) ^ (n << 4), w);
      float2 rounded = unpack<T>(w);
      if (!SUMS_X) sum += rounded.x + rounded.y;  // the normaliser adds what the tensor cores multiply by
    }
    return sum;
  }
  // g of a row, from the sum of its weights within the chunk and, not decayed yet, before it.
  DEVICE void normalise_row(int stage, int position, int row, float own, float before) const {
    float normaliser = own + from_start(stage, row) * before;
    if (t > 0) return;
    kappa[row] = p.divide ? 1.f / normaliser : 1.f;
    if (position + row < p.N) p.g[stat(position + row)] = normaliser;
  }
  // Computes da, and the scores' part of a row's (DK: column's) dG, from the row's sum of decayed X (own) and its row
  // of a times Σ ζ b of the tokens before the chunk (before).
  DEVICE void finish_row(int stage, int row, float own, float before, float n_before) const {
    if (t > 0) return;
    const float past = from_start(stage, row);
    float known;
    if (HAS_G && MODE == DQ) {
      known = own + past * (rho[row] * before + kappa[row] * n_before);
      known *= reciprocal(Traits::scale_rho(p) * factor_in_w(token_decays(stage, NORM)[row]));
    } else if (HAS_G) {
      known = Traits::scale_y(p) * (own + past * before) - (past * n_before + token_decays(stage, COUNT)[row]);
    } else {
      if (CONFIG::COMPUTES_DA) da_sums()[row] += own + past * before;
      known = MODE == DQ ? constant() * (own + past * before) : constant() * own + past * before;
    }
    if (CONFIG::COMPUTES_DG) dG()[row] = known;
  }
  // For two neighbouring columns: what they add to a row's products, and their decays at the row. MASKS_DECAYS: decays
  // are 0 if they come after the row; selected, not multiplied by 0, as an exponential may overflow there.
  static constexpr bool MASKS_DECAYS = PER_TOKEN_DECAY || SUMS_X;
  DEVICE float2 added_by_columns(int j) const {
    return MODE == FWD || !HAS_G ? make_float2(1.f, 1.f) : *reinterpret_cast<float2*>(tau + j);
  }
  DEVICE float2 decays(int stage, int row, int j) const {
    float2 decay = make_float2(1.f, 1.f);
    if (POWERS) decay = make_float2(powers[max(row - j, 0)], powers[max(row - j - 1, 0)]);
    if (PER_TOKEN_DECAY) {
      const float own = token_decays(stage, CUMSUM)[row];
      const float2 cumsum = *reinterpret_cast<const float2*>(token_decays(stage, CUMSUM) + j);
      decay = make_float2(power_of_two(own - cumsum.x), power_of_two(own - cumsum.y));
    }
    if (MASKS_DECAYS) decay.x = j <= row ? decay.x : 0.f, decay.y = j + 1 <= row ? decay.y : 0.f;
    return decay;
  }
  // One addend of a row's sum of X, without its decay.
  DEVICE float addend(float rho, float kappa, float x, int j) const {
    return !HAS_G ? x : MODE == DQ ? rho * x + kappa : x * zeta[j];
  }
  // An element of W, without its decay.
  static DEVICE float score(float rho, float kappa, float sigma, float tau, float x) {
    if (!HAS_G) return CONFIG::ADDS_A ? rho * sigma * x + kappa : rho * sigma * x;
    if (CONFIG::COMPUTES_DG) return MODE == DQ ? sigma * (rho * x + kappa) : rho * (sigma * x + tau);
    return rho * sigma * x + kappa * tau;
  }

  // Computes Y of all rows in this warp's columns, unscaled: the part of the state before the chunk, then W C.
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
    __syncthreads();  // W, and forward ρ and 1/g, are written; the tile of a is free
    if (Traits::PROJECTS) {
      load_tile(tile_a, QK, position);
      copy_async_commit();
    }
    float2 sum[Y_TILES];
#pragma unroll
    for (int n = 0; n < Y_TILES; n++) sum[n] = *reinterpret_cast<float2*>(c_sum + 8 * own_tile(n) + 2 * t);
    const float factor = CONFIG::ADDS_A && MODE == FWD ? constant() : 1.f;  // in reverse the sums have it
#pragma unroll
    for (int n = 0; n < Y_TILES; n++) sum[n].x *= factor, sum[n].y *= factor;
#pragma unroll
    for (int m = 0; m < CHUNK_STEPS; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = 16 * m + g + 8 * half;
        float decay = from_start(stage, row), r = rho[row] * decay,
              k = (MODE == FWD || !HAS_G ? 1.f : kappa[row]) * decay;
#pragma unroll
        for (int n = 0; n < Y_TILES; n++) {
          y[m][n][2 * half] = r * y[m][n][2 * half] + (CONFIG::SUMS_C ? k * sum[n].x : 0.f);
          y[m][n][2 * half + 1] = r * y[m][n][2 * half + 1] + (CONFIG::SUMS_C ? k * sum[n].y : 0.f);
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

  // Stores this warp's columns of the output from a tile in shared memory that it has written, 16 bytes per lane.
  DEVICE void store(u32 tile_address, int position) const {
    constexpr int STEP = 32 / Y_TILES;  // rows that a warp stores at once
    int piece = own_tile(lane % Y_TILES), row = lane / Y_TILES;
    int remaining = 8 * piece < p.columns ? p.N - position - row : 0;
    u32 from = tile_address + swizzled<CHUNK>(row, piece);
    u16* to = this->row(Y, position + row) + 8 * piece;
    i64 step = (Traits::REVERSE ? -STEP : STEP) * p.strides[Y].token;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / STEP; i++, to += step) {
      uint4 v = ld_shared_v4((from ^ (((i * STEP) % 8) << 4)) + i * STEP * ROW_BYTES);
      if (i * STEP < remaining) st_global_v4(to, v);
    }
  }
  // The address of this lane's two columns in the n-th of this warp's tiles (row % 8 == g).
  DEVICE u32 own_pair(u32 tile_address, int row, int n) const {
    return tile_address + swizzled<CHUNK>(row, own_tile(n)) + 4 * t;
  }

  // FWD: o = y/g; DV: dv = y. Stored through the tile of a, which is free.
  DEVICE void scale(int stage, const float (&y)[CHUNK_STEPS][Y_TILES][4], int position) {
#pragma unroll
    for (int m = 0; m < CHUNK_STEPS; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = 16 * m + g + 8 * half;
        float scale = CONFIG::NORMALISES ? kappa[row] : Traits::scale_y(p);
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

  // DQ: Σ q̂·y over row i of all chunks, and with a also the sums of X; they use the memory of ζ and τ, unused in DQ.
  DEVICE float* db_sums() const { return zeta; }
  DEVICE float* da_sums() const { return tau; }
  DEVICE void store_sum(float* to, const float* rows) const {
    if (warp > 0) return;
    float sum = sum_lanes<32>(rows[lane] + (CHUNK > 32 ? rows[lane + 32] : 0.f));
    if (lane == 0) to[bh() * p.segments + segment()] = sum;
  }

  // DQ, DK: the gradient through the norm, dx = r (y − x̂ (x̂·y)), and through RoPE; b and r as in the table. The tile
  // of a holds the rows x by now, and then the result.
  DEVICE void project(int stage, float (&y)[CHUNK_STEPS][Y_TILES][4], int position) {
    const float* r = MODE == DQ ? p.rq : p.rk;
    u32 tile_qk = tile(stage, A);
    copy_async_wait<0>();
    __syncthreads();
    if (ROPE) {
      rotate(tile_qk, position);
      __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2 * CHUNK_STEPS; m++) {
      int row = 8 * m + g;
      float dot = 0.f;
#pragma unroll
      for (int n = 0; n < Y_TILES; n++) {
        float2 x = unpack<T>(ld_shared_b32(own_pair(tile_qk, row, n)));
        dot += x.x * y[m / 2][n][2 * (m % 2)] + x.y * y[m / 2][n][2 * (m % 2) + 1];
      }
      dot = sum_lanes<4>(dot);
      if (t == 0) partial_dots[row * WARPS + warp] = dot;
    }
    __syncthreads();
    recompute_addresses();
#pragma unroll
    for (int m = 0; m < 2 * CHUNK_STEPS; m++) {
      int row = 8 * m + g, at = position + row;
      float4 d = *reinterpret_cast<float4*>(partial_dots + row * WARPS);
      float dot = (d.x + d.y) + (d.z + d.w);
      float norm = CONFIG::COMPUTES_DG ? token_decays(stage, NORM)[row] : r[stat(min(at, p.N - 1))];
      auto [out, along] = Traits::projection(*this, norm, dot);
      if (CONFIG::FACTOR_IN_W) {
        const float factor = out;
        out = left_of_factor(factor);
        if (at < p.N && warp == 0 && t == 0) {
          if (MODE == DQ) db_sums()[row] += dot * per_unit_dot(norm, factor);
          p.dG[i64(bh()) * p.N + at] = (SUMS_X ? dG()[row] : 0.f) + out * dot;  // with x̂·dx̂
        }
      } else {
        if (MODE == DQ && at < p.N && warp == 0 && t == 0) db_sums()[row] += norm * dot * Traits::scale_y(p);
      }
#pragma unroll
      for (int n = 0; n < Y_TILES; n += 2) {
        u32 first = own_pair(tile_qk, row, n), second = own_pair(tile_qk, row, n + 1);
        float2 x = unpack<T>(ld_shared_b32(first)), z = unpack<T>(ld_shared_b32(second));
        float2 lo = make_float2(out * (y[m / 2][n][2 * (m % 2)] - along * x.x),
                                out * (y[m / 2][n][2 * (m % 2) + 1] - along * x.y));
        float2 hi = make_float2(out * (y[m / 2][n + 1][2 * (m % 2)] - along * z.x),
                                out * (y[m / 2][n + 1][2 * (m % 2) + 1] - along * z.y));
        if (warp * Y_TILES + n < ROPE / 8) rotate_pair_back(lo, hi, at, 8 * own_tile(n) + 2 * t);
        st_shared_b32(first, pack<T>(lo.x, lo.y)), st_shared_b32(second, pack<T>(hi.x, hi.y));
      }
    }
    store(tile_qk, position);
  }
  // FACTOR_IN_W: y already includes the row's factor, or in fp16 its mantissa. left_of_factor: the factor that y still
  // lacks. per_unit_dot: the ratio of x̂·y without the factor to x·y with it.
  DEVICE float left_of_factor(float factor) const {
    if (!CONFIG::WHOLE_FACTOR) return exponent(factor);
    return MODE == DQ && coefficient() == 0.f ? 0.f : 1.f;  // else b_or_one() is b
  }
  DEVICE float per_unit_dot(float norm, float factor) const {
    if (CONFIG::WHOLE_FACTOR) return reciprocal(b_or_one());
    return norm * Traits::scale_y(p) * reciprocal(mantissa(factor));
  }
};
