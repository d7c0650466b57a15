// The role "token stats" of an sm_90a block: per-token computations. RoPE in place, norms, (1)'s coefficients, in DQ e,
// which DK and DV read; it also keeps the running sums (in `states`, outputs do).
#pragma once
#include "ptx/mma.cuh"
#include "rope.cuh"
#include "scan_sm90_running_sums.cuh"

template <typename CONFIG>
struct TokenStatsSm90 {
  using T = typename CONFIG::T;
  using Traits = typename CONFIG::Traits;
  using Shared = typename CONFIG::Shared;
  using Block = BlockSm90<CONFIG>;
  using Coefficients = typename Block::Coefficients;
  using Stage = typename Block::Stage;
  static constexpr int D = CONFIG::D, CHUNK = CONFIG::CHUNK, PANELS = CONFIG::PANELS;
  static constexpr int MODE = CONFIG::MODE, ROPE = CONFIG::ROPE;
  static constexpr Decay DECAY = CONFIG::DECAY;
  static constexpr bool STATE_ONLY = CONFIG::STATE_ONLY, HAS_G = CONFIG::HAS_G, SUMS_X = CONFIG::SUMS_X;
  static constexpr bool COMPUTES_E = CONFIG::COMPUTES_E, COMPUTES_DG = CONFIG::COMPUTES_DG;
  static constexpr bool KEEPS_SUMS = !STATE_ONLY && (CONFIG::SUMS_C || CONFIG::SUMS_B);

  // For RoPE a thread has ITEMS items of each tile. If they are few (a model's RoPE), angles are read a chunk ahead.
  using R = Rope<T, MODE, ROPE>;
  static constexpr int ITEMS = CHUNK * ROPE / 8 / WARPGROUP;
  static constexpr bool MANY_REGISTERS = MODE == FWD || (D == 128 && !(COMPUTES_DG && (T::NARROW || MODE == DK)));
  static constexpr bool READS_ANGLES_AHEAD = ROPE && ITEMS <= PANELS && MANY_REGISTERS;
  // DQ waits for o at the start of a chunk anyway; with per-token decays it has no registers for both.
  static constexpr bool READS_ANGLES_WITH_O = READS_ANGLES_AHEAD && COMPUTES_E && !COMPUTES_DG;
  static constexpr bool READS_ANGLES_LAST = READS_ANGLES_AHEAD && COMPUTES_E && COMPUTES_DG;
  // If registers allow it, all items are read before any is written, so that there is only one wait.
  static constexpr bool READS_ITEMS_AT_ONCE = READS_ANGLES_AHEAD && !COMPUTES_E;
  struct ChunkAngles {
    Angles of[READS_ANGLES_AHEAD ? ITEMS : 1];
  };

  struct OutputRows {  // a lane's part of two rows of o
    uint4 pieces[2][D / 32];
  };

  static DEVICE void run(Block& block) {
    const Params& p = block.p;
    constexpr bool POWERS = DECAY == PER_HEAD, COUNTS = HAS_G && MODE == FWD && DECAY != PER_TOKEN;
    float n = COUNTS ? tokens_before<POWERS>(p, block.bh(), block.log2_decay, block.begin()) : 0.f;
    const float chunk_tokens = COUNTS ? count_tokens<POWERS>(block.log2_decay, CHUNK) : 0.f;
    RunningSumsSm90<CONFIG> sums;
    block.recompute_addresses();
    if (KEEPS_SUMS) sums.load(block);
    Saved next = MODE == FWD ? Saved{} : read_saved(block, block.begin());
    TokenDecay token_decay = READS_DECAYS_AHEAD ? read_decay(block, block.begin()) : TokenDecay{};
    OutputRows o;
    if (READS_O_A_CHUNK_AHEAD) read_o(block, o, block.begin());
    ChunkAngles angles;
    if (READS_ANGLES_AHEAD && !READS_ANGLES_WITH_O) read_angles(block, angles, block.begin());
    auto segment = block.next_segment();
    if (KEEPS_SUMS) sums.add_zeros(block);
    float da = 0.f;
    Stage current;
    for (int position = block.begin(); position < block.end(); position += CHUNK, current.advance()) {
      block.recompute_addresses();
      const int stage = current.stage(), len = min(CHUNK, p.N - position);
      const int slot = !KEEPS_SUMS ? stage : u32(position - block.begin()) / CHUNK % 2;  // of τ and ζ
      if (!READS_DECAYS_AHEAD && !COMPUTES_E) token_decay = read_decay(block, position);
      mbarrier_wait(block.empty(stage), current.phase() ^ 1);  // so readers of the coefficients are done, too
      chunk(block, current, slot, position, len, n, next, token_decay, angles, o);
      if (COUNTS) n = DECAY ? n * block.power(CHUNK) + chunk_tokens : n + CHUNK;
      if (KEEPS_SUMS) {
        sums.wait(block);
        if (position > block.begin()) mbarrier_arrive(block.empty(current.previous()));
        if (block.enters(segment, position)) sums.store(block, block.before_segment(++segment.index));
        if (block.at_boundary(position)) cross_boundary(block, sums, token_decay, block.boundary(position));
        if (SUMS_X && !COMPUTES_E) block.sync_token_stats();  // all threads have used the previous chunk's Σ ζ b
        sums.write(block, stage);
      }
      fence_shared();  // makes copied, rotated and written data visible to products
      mbarrier_arrive(block.ready(stage));
      if (READS_DECAYS_AHEAD) token_decay = read_decay(block, position + CHUNK);
      if (READS_ANGLES_LAST) read_angles(block, angles, position + CHUNK);
      if (!KEEPS_SUMS) {
        mbarrier_arrive(block.empty(stage));
        continue;
      }
      float a_b[1][4];
      sums.start_chunk(block, stage, slot, len, a_b);
      if (SUMS_X) store_dG(block, a_b, stage, position, da);
    }
    block.recompute_addresses();
    if (!KEEPS_SUMS) return;
    sums.wait(block);
    if (block.begin() < block.end()) mbarrier_arrive(block.empty(current.previous()));
    if (block.has_final()) sums.store(block, block.final());
    if (CONFIG::COMPUTES_DA) block.store_da(da, 0);
  }

  // A token's numbers saved by the forward pass.
  struct Saved {
    float g, e, r_sigma, r_rho;  // the last two as in TokenStats
  };
  static DEVICE Saved read_saved(const Block& block, int position) {
    const Params& p = block.p;
    Saved s = {0.f, 0.f, 0.f, 0.f};
    if (block.uniform_warp() % 4 >= CHUNK / 32 || position + block.thread() >= p.N) return s;
    i64 i = block.stat(position + block.thread());
    if (HAS_G) s.g = p.g[i];
    s.r_sigma = (MODE == DQ ? p.rk : p.rq)[i], s.r_rho = (MODE == DQ ? p.rq : p.rk)[i];
    if (HAS_G && MODE == DK) s.e = p.e[i];
    return s;
  }

  // Global memory is read ahead only if there are registers for it.
  static constexpr bool READS_DECAYS_AHEAD = DECAY == PER_TOKEN && D == 128;
  static constexpr bool READS_O_AHEAD = COMPUTES_E && !(COMPUTES_DG && D == 64 && ROPE);
  static constexpr bool READS_O_A_CHUNK_AHEAD = COMPUTES_E && CONFIG::FACTORS_DECAYS && !ROPE;
  // PER_TOKEN: the results of token_decay.cuh for a row's token, as loaded: their first use waits for the load.
  struct TokenDecay {
    float cumsum, to_end;
    float count_before, count;  // of the chunks before; in reverse, of this chunk up to the row
  };
  static DEVICE TokenDecay read_decay(const Block& block, int position) {
    const Params& p = block.p;
    if (DECAY != PER_TOKEN || position >= p.N) return {0.f, 0.f, 0.f, 0.f};
    const i64 row = i64(block.bh()) * p.N + min(position + row_of_thread(block), p.N - 1);
    const bool counts = HAS_G && (MODE == FWD ? !STATE_ONLY : COMPUTES_DG);
    return {p.decay_cumsum[row], p.to_end[row], counts ? Chunks<CHUNK>(p, block.bh()).count[position / CHUNK] : 0.f,
            counts && Traits::REVERSE ? p.count[row] : 0.f};
  }
  static DEVICE float count(const TokenDecay& token_decay) {
    return token_decay.count_before * power_of_two(token_decay.cumsum) + token_decay.count;
  }
  // The decay from row `i` to the chunk's end. 0 for rows past the end, whose Γ is that of the last one.
  static DEVICE float to_end(const Block& block, const TokenDecay& token_decay, int len, int i) {
    if (i >= len) return 0.f;
    return DECAY == PER_TOKEN ? power_of_two(token_decay.to_end) : block.power(len - 1 - i + Traits::POWERS_TO_STATE);
  }
  static DEVICE void write_decay(const Coefficients& c, const TokenDecay& token_decay, int i, float factor = 1.f) {
    if (DECAY == PER_TOKEN) c.from_start[i] = power_of_two(token_decay.cumsum) * factor;
    if (CONFIG::HAS_CUMSUM && !CONFIG::HAS_COLUMNS) c.cumsum[i] = token_decay.cumsum;
  }
  // Writes the numbers that scores need of a token as a column of W.
  static DEVICE void write_column(const Coefficients& c, const TokenDecay& token_decay, int i, float sigma, float tau,
                                  float inverse_g) {
    if (CONFIG::COLUMN == 4)
      reinterpret_cast<float4*>(c.columns)[i] = make_float4(token_decay.cumsum, sigma, tau, inverse_g);
    else
      reinterpret_cast<float2*>(c.columns)[i] = make_float2(token_decay.cumsum, sigma);
  }

  // Writes a chunk's numbers to shared memory; `next`: the saved numbers of its tokens, then of the next chunk's.
  static DEVICE void chunk(Block& block, const Stage& current, int slot, int position, int len, float n, Saved& next,
                           TokenDecay& token_decay, ChunkAngles& angles, OutputRows& o) {
    const int stage = current.stage();
    const Coefficients c = block.coefficients(stage);
    if (READS_O_AHEAD && !READS_O_A_CHUNK_AHEAD) read_o(block, o, position);
    if (READS_ANGLES_WITH_O) read_angles(block, angles, position);
    if (MODE != FWD && !COMPUTES_E) write_coefficients(block, c, next, token_decay, len, block.thread(), slot);
    mbarrier_wait(block.full(stage), current.phase());
    if (ROPE) rotate_tiles(block, stage, position, angles);
    // Loads in flight at an mbarrier are waited for there, so they are issued as early as possible.
    if (READS_ANGLES_AHEAD && !COMPUTES_E) read_angles(block, angles, position + CHUNK);
    if (MODE == FWD) {
      if (ROPE) block.sync_token_stats();
      norms(block, c, stage, position, len, n, token_decay, slot);
    }
    if (COMPUTES_E) {
      block.recompute_addresses();
      if (!READS_O_AHEAD) read_o(block, o, position);
      row_products(block, o, block.tile(stage, A), c.row);
      if (READS_O_A_CHUNK_AHEAD) read_o(block, o, position + CHUNK);
      if (!READS_DECAYS_AHEAD) token_decay = read_decay(block, position);
      block.sync_token_stats();
      next.e = next.g != 0.f ? c.row[block.thread() % CHUNK] / next.g : 0.f;
      if (block.thread() < len) block.p.e[block.stat(position + block.thread())] = next.e;
      write_coefficients(block, c, next, token_decay, len, block.thread(), slot);
    }
    if (MODE != FWD) next = read_saved(block, position + CHUNK);
  }

  // Writes σ, τ, ρ, κ of a token, from the saved numbers. Rows past the end contribute nothing.
  static DEVICE void write_coefficients(const Block& block, const Coefficients& c, const Saved& s,
                                        const TokenDecay& token_decay, int len, int i, int slot) {
    if (block.uniform_warp() % 4 >= CHUNK / 32) return;
    const Params& p = block.p;
    bool ok = i < len;
    const TokenStats stats = {ok ? reciprocal(s.g) : 0.f, s.e, s.r_sigma, s.r_rho};
    float sigma = Traits::sigma(block, stats), tau = Traits::tau(block, stats);
    float rho = Traits::rho(block, stats), kappa = Traits::kappa(block, stats);
    if (CONFIG::FACTOR_IN_W) rho *= block.factor_in_w(s.r_rho), kappa *= block.factor_in_w(s.r_rho);
    float decay = to_end(block, token_decay, len, i);
    write_decay(c, token_decay, i, CONFIG::FACTOR_IN_PAST ? s.r_rho : 1.f);
    if (CONFIG::HAS_INVERSE_G && !CONFIG::HAS_COLUMNS) c.inverse_g[i] = stats.inverse_g;
    if (CONFIG::HAS_DG) c.dG[i] = HAS_G ? (MODE == DQ ? kappa : -1.f) * count(token_decay) : 0.f;
    if (!STATE_ONLY) {
      const float factor = CONFIG::HAS_INVERSE_G ? Traits::sigma(block, {1.f, s.e, s.r_sigma, s.r_rho}) : sigma;
      if (CONFIG::HAS_COLUMNS)
        write_column(c, token_decay, i, factor, tau, stats.inverse_g);
      else
        c.sigma[i] = factor;
      if (CONFIG::HAS_TAU && !CONFIG::HAS_COLUMNS) c.tau[i] = tau;
      if (CONFIG::HAS_RHO) c.rho[i] = rho;
      if (CONFIG::HAS_KAPPA) c.kappa[i] = kappa;
      if (CONFIG::HAS_ROW) c.row[i] = s.r_rho;
    }
    write_end_coefficients(block, c, slot, i, sigma * decay, tau * decay, Traits::zeta(block, stats) * decay);
  }
  // Writes σ, τ and ζ decayed to the chunk's end, as factors for tensor cores.
  static DEVICE void write_end_coefficients(const Block& block, const Coefficients& c, int slot, int i, float sigma,
                                            float tau, float zeta) {
    split<T, CONFIG::SIGMA_PARTS>([&](int part) { return Block::sigma_end_part(c, part, i); }, sigma);
    auto in_row = [&](int row) { return block.in_eight_rows(block.end_coefficients(slot), row, i); };
    constexpr int PARTS = CONFIG::TAU_PARTS;
    if (CONFIG::SUMS_C) split<T, PARTS>([&](int part) { return in_row(part < 2 ? part : 4); }, tau);
    if (CONFIG::SUMS_B) split<T, PARTS>([&](int part) { return in_row(part < 2 ? 2 + part : 6); }, zeta);
  }

  // Forward, with a thread per row: ρ of a query, and the (decayed) count of the tokens before the chunk, which is part
  // of its normaliser; σ of a key. `states` needs only keys, and has two threads for each.
  static constexpr int ROW_THREADS = STATE_ONLY ? 2 : 1;
  static DEVICE int row_of_thread(const Block& block) {
    return block.thread() / (MODE == FWD ? ROW_THREADS : 1) % CHUNK;
  }
  static DEVICE void norms(const Block& block, const Coefficients& c, int stage, int position, int len, float n,
                           const TokenDecay& token_decay, int slot) {
    const Params& p = block.p;
    const int i = row_of_thread(block);
    const bool ok = i < len, key = STATE_ONLY || block.uniform_warp() % 4 >= CHUNK / 32;
    float square = 0.f;
    if (HAS_G || p.normalize)
      square = squared_norm(block, block.tile(stage, key ? B : A), i, block.thread() % ROW_THREADS);
    if (ROW_THREADS == 2) square += __shfl_xor_sync(FULL_WARP, square, 1);
    const float r = reciprocal_norm(square, p.normalize);
    if (!STATE_ONLY && block.panel() == 0 && ok) (key ? p.rk : p.rq)[block.stat(position + i)] = r;
    const TokenStats stats = {0.f, 0.f, r, r};
    if (key) {
      float sigma = ok ? Traits::sigma(block, stats) : 0.f, decay = to_end(block, token_decay, len, i);
      float end = Traits::limit_sigma(sigma * decay);
      if (CONFIG::HAS_COLUMNS)
        write_column(c, token_decay, i, sigma, 1.f, 0.f);
      else if (!STATE_ONLY)
        c.sigma[i] = sigma;
      if (block.thread() % ROW_THREADS == 0) {
        write_end_coefficients(block, c, slot, i, end, decay, end);
        write_decay(c, token_decay, i);
      }
    } else {
      c.rho[i] = Traits::rho(block, stats);
      if (CONFIG::HAS_ROW) c.row[i] = DECAY == PER_TOKEN ? count(token_decay) : block.power(i + 1) * n;
    }
  }
  // The squared norm of a row of a tile, or of one half. Eight threads that read at once read eight rows, or the halves
  // of four.
  static DEVICE float squared_norm(const Block& block, u32 tile_address, int row, int half) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < D / 8 / ROW_THREADS; i++) {
      int piece = ROW_THREADS == 1 ? i : i / 4 * 8 + half * 4 + i % 4;
      uint4 x = ld_shared_v4(tile_address + swizzled<CHUNK>(row, piece));
      u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float2 both = unpack<T>(pairs[k]);
        sum[k] += both.x * both.x, sum[k] += both.y * both.y;
      }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  // The contribution of the tokens before the chunk to its rows (DK: columns) of dG, and to da. DQ: do/g times Σ v;
  // DK: v times Σ do/g.
  static DEVICE void store_dG(const Block& block, const float (&a_b)[1][4], int stage, int position, float& da) {
    const Params& p = block.p;
    const float first = RunningSumsSm90<CONFIG>::total(a_b, 0), second = RunningSumsSm90<CONFIG>::total(a_b, 1);
    const bool odd = block.t % 2;  // one of the four lanes' two rows
    const float sum = (odd ? second : first) + __shfl_xor_sync(FULL_WARP, odd ? first : second, 1);
    const int row = block.first_row() + block.g + 8 * block.t;
    if (block.t > 1 || position + row >= p.N) return;
    const Coefficients c = block.coefficients(stage);
    float scale = Traits::scale_y(p);
    if (MODE == DQ) scale = HAS_G ? c.rho[row] * reciprocal(block.scale_of_row(c.row[row])) : block.constant();
    if (CONFIG::COMPUTES_DA) da += block.from_start(c, row) * sum;
    if (COMPUTES_DG)
      p.dG[(i64(gridDim.y) + block.bh()) * p.N + position + row] = scale * block.from_start(c, row) * sum;
  }

  // At a boundary (token_decay.cuh): DQ stores its sums; DK computes their inner products with its own.
  static DEVICE void cross_boundary(Block& block, const RunningSumsSm90<CONFIG>& sums, const TokenDecay& token_decay,
                                    const Boundary<D>& boundary) {
    block.recompute_addresses();
    if (MODE == DQ) {
      sums.store(block, {nullptr, boundary.c, boundary.b, 1.f, 1.f, 1.f});
      if (block.thread() == 0) *boundary.count = token_decay.count_before;
    } else {
      float sum = sums.product(block, boundary.c, boundary.b, 1.f / Traits::scale_tau(block.p));
      if (HAS_G && block.thread() == 0) sum -= *boundary.count * token_decay.count_before;
      sum = sum_lanes<32>(sum);
      if (block.lane == 0) boundary.parts[4 * CONFIG::GROUPS + block.warp % 4] = sum;
    }
    block.recompute_addresses();
  }

  // Dot products of eight rows with eight others, on tensor cores: the diagonal of a product. A lane has row g of both,
  // the same eight columns of 32 at a time, which may differ from the columns the instruction assumes. Odd rows begin
  // with the other 32 of 64, so that lanes that read at once have no bank conflicts.
  static DEVICE int piece_of_lane(const Block& block, int j) { return 4 * (j ^ block.g % 2) + block.t; }
  static DEVICE uint4 read_piece(const Block& block, u32 tile_address, int first_row, int j) {
    return ld_shared_v4(tile_address + swizzled<CHUNK>(first_row + block.g, piece_of_lane(block, j)));
  }
  // Rows 8 to 15 of the instruction's left operand are rows 0 to 7 again, with other columns: 16 bytes are then an
  // operand as they are read. The first product has the dots of the first and third words, the second the others'.
  struct Dots {
    float first[4] = {}, second[4] = {};
  };
  static DEVICE void add_dots(Dots& dots, const uint4& x, const uint4& y) {
    mma<T>(dots.first, x.x, x.y, x.z, x.w, y.x, y.z);
    mma<T>(dots.second, x.x, x.y, x.z, x.w, y.y, y.w);
  }
  // Row g's dot product is in one lane of four.
  static DEVICE bool has_own_dot(const Block& block) { return block.t == block.g / 2; }
  static DEVICE float own_dot(const Block& block, const Dots& dots) {
    return block.g % 2 ? dots.first[1] + dots.second[3] : dots.first[0] + dots.second[2];
  }

  // do·o of this warp's rows; o is read directly from global memory, before the wait for the tiles.
  static DEVICE void read_o(const Block& block, OutputRows& o, int position) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < D / 32; j++) {
        const int at = position + block.first_row() + 8 * i + block.g;
        const int piece = piece_of_lane(block, j);
        const uint4* from = reinterpret_cast<const uint4*>(block.row(O, at)) + piece;
        const bool exists = at < block.p.N && block.has_column(O, 8 * piece);
        o.pieces[i][j] = exists ? *from : make_uint4(0, 0, 0, 0);
      }
  }
  static DEVICE void row_products(const Block& block, const OutputRows& o, u32 tile_address, float* to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int first_row = block.first_row() + 8 * i;
      Dots dots;
#pragma unroll
      for (int j = 0; j < D / 32; j++) add_dots(dots, read_piece(block, tile_address, first_row, j), o.pieces[i][j]);
      if (has_own_dot(block)) to[first_row + block.g] = own_dot(block, dots);
    }
  }

  // RoPE in place, on the tiles that need it.
  static DEVICE void read_angles(const Block& block, ChunkAngles& angles, int position) {
#pragma unroll
    for (int k = 0; k < ITEMS; k++) angles.of[k] = R::angles(block.p, position, block.thread() + k * WARPGROUP);
  }
  static DEVICE void rotate_tiles(const Block& block, int stage, int position, const ChunkAngles& ahead) {
    constexpr int UNROLL = READS_ANGLES_AHEAD ? ITEMS : 1, TILES = STATE_ONLY ? 1 : 2;
    constexpr bool ROPE_B = Traits::ROPE_B;
    char* first = block.smem + (block.tile(stage, ROPE_B && !STATE_ONLY ? A : ROPE_B ? B : C) - block.base);
    char* second = block.smem + (block.tile(stage, ROPE_B ? B : QK) - block.base);
#pragma unroll 1
    for (int done = 0; done < ITEMS; done += UNROLL) {
      const int i = block.thread() + done * WARPGROUP;
      typename R::Item items[UNROLL][TILES];
      auto read = [&](int k, int tile) {
        items[k][tile] = R::template read<CHUNK>(tile ? second : first, i + k * WARPGROUP);
      };
#pragma unroll
      for (int k = 0; k < (READS_ITEMS_AT_ONCE ? UNROLL : 0); k++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) read(k, tile);
#pragma unroll
      for (int k = 0; k < UNROLL; k++) {
        const Angles angles =
            READS_ANGLES_AHEAD ? ahead.of[READS_ANGLES_AHEAD ? k : 0] : R::angles(block.p, position, i);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          if (!READS_ITEMS_AT_ONCE) read(k, tile);
          R::rotate(items[k][tile], angles);
        }
      }
    }
  }
};
