// The left form where several slices of c and y share a and b: what depends on a, b and the decays alone, ã, b̃, A and the
// decays of 16 tokens, is computed once (PrepareChunk) instead of once a slice, and read by the scan and by `states`.
//
// These are then products only. A scan's warps wait for each other once a chunk, and chunks are copied ahead.
#pragma once
#include "channel_decay_left.cuh"

// What is prepared of 32 tokens, contiguous: byte offsets. Rows are in the direction of the scan, chunks too.
template <int BD>
struct PreparedChunk {
  static constexpr int A = 0;                                   // ã [32, BD]
  static constexpr int B = A + CHANNEL_CHUNK * BD * 2;          // b̃ [32, BD]
  static constexpr int WHOLE = B + CHANNEL_CHUNK * BD * 2;      // [SUBS, BD], in the order of LeftScan::whole_at
  static constexpr int SCORES = WHOLE + CHANNEL_SUBS * BD * 4;  // A [32, 16]
  static constexpr int BYTES = SCORES + CHANNEL_CHUNK * 32;
  // That of these blocks' head and of a segment, and row `row` of it.
  static DEVICE char* of(const ChannelParams& p, int segment, int row) {
    const int chunks = p.segment_len / CHANNEL_CHUNK;
    return p.prepared + ((i64(blockIdx.y) * p.part + segment % p.part) * chunks + row / CHANNEL_CHUNK) * BYTES;
  }
};

// A block prepares 32 tokens, PART channels of a and b at a time, as the left scan does: it is one of PART channels.
template <typename T, typename G, int BD, int PART, bool REVERSE>
struct PrepareChunk : LeftScan<T, G, PART, PART, REVERSE> {
  using Scan = LeftScan<T, G, PART, PART, REVERSE>;
  using Shared = SharedLeft<G, PART, PART>;
  using Scan::p, Scan::block, Scan::smem, Scan::THREADS, Scan::WARPS, Scan::TASKS, Scan::warp;
  static constexpr int OWN_TASKS = (TASKS + WARPS - 1) / WARPS;

  DEVICE PrepareChunk(const ChannelParams& params, char* shared) : Scan(params, shared, blockIdx.z) {}
  DEVICE int row() const { return blockIdx.x * CHANNEL_CHUNK; }

  DEVICE void load(int column) const {
    block.template load_gates<PART, THREADS>(block.base + Shared::GATES, column, row());
    block.template load<PART, THREADS>(block.base + Shared::B, p.b + column, p.strides_b, row());
    block.template load<PART, THREADS>(block.base + Shared::A, p.a + column, p.strides_a, row());
  }
  // ROWS of PIECES 16-byte pieces; GAP: bytes between each eight rows and the next ones.
  template <int ROWS, int PIECES, int FROM_ROW, int GAP>
  DEVICE void store_rows(char* to, int to_row, u32 from) const {
#pragma unroll
    for (int n = 0; n < (ROWS * PIECES + THREADS - 1) / THREADS; n++) {
      const u32 i = u32(block.tid) + n * THREADS, r = i / PIECES, piece = i % PIECES;
      if (i < ROWS * PIECES)
        st_global_v4(to + r * to_row + 16 * piece, ld_shared_v4(from + r * FROM_ROW + r / 8 * GAP + 16 * piece));
    }
  }

  DEVICE void run() {
    if (row() >= block.length) return;
    using To = PreparedChunk<BD>;
    using Rows = Tile<PART>;
    char* to = To::of(p, block.segment, row());
    float first[OWN_TASKS][4] = {}, second[OWN_TASKS][4] = {};
    Scan::clear_scores();
#pragma unroll 1
    for (int column = 0; column < BD; column += PART) {
      load(column);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
      Scan::weigh();
      __syncthreads();
      constexpr int PIECES = PART / 8;
      store_rows<CHANNEL_CHUNK, PIECES, Rows::ROW, Rows::GAP_BYTES>(to + To::A + 2 * column, 2 * BD,
                                                                    block.base + Shared::A_FROM_START);
      store_rows<CHANNEL_CHUNK, PIECES, Rows::ROW, Rows::GAP_BYTES>(to + To::B + 2 * column, 2 * BD,
                                                                    block.base + Shared::B_TO_END);
      store_rows<CHANNEL_SUBS, PART / 4, 4 * PART, 0>(to + To::WHOLE + 4 * column, 4 * BD, block.base + Shared::WHOLE);
#pragma unroll
      for (int n = 0; n < OWN_TASKS; n++)
        if (warp() + n * WARPS < TASKS) Scan::add_scores(warp() + n * WARPS, first[n], second[n]);
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < OWN_TASKS; n++)
      if (warp() + n * WARPS < TASKS) Scan::store_scores(warp() + n * WARPS, first[n], second[n]);
    __syncthreads();
    store_rows<CHANNEL_CHUNK, 2, Scan::SCORE_ROW, 0>(to + To::SCORES, 32, block.base + Shared::SCORES);
  }
};

template <int BD, int M>
struct SharedPrepared {  // byte offsets in a stage of the scan
  static constexpr int SCORE_ROW = 48;
  static constexpr int A = 0;
  static constexpr int B = A + Tile<BD>::SIZE;
  static constexpr int C = B + Tile<BD>::SIZE;  // y takes its place
  static constexpr int WHOLE = C + Tile<M>::SIZE;
  static constexpr int SCORES = WHOLE + CHANNEL_SUBS * BD * 4;
  static constexpr int STAGE = SCORES + CHANNEL_CHUNK * SCORE_ROW;
  // Before the stages: each warp's part of 16 tokens of y in the other's channels, twice.
  static constexpr int WARP_EXCHANGE = 1024, EXCHANGE = CHANNEL_SUBS * M / 16 * WARP_EXCHANGE;
};

// A warp multiplies each row of ã and b̃ that it reads with 32 channels of c and y: of two warps that share these, each has
// half of the state's columns, and they exchange their parts of y.
template <typename T, int BD, int M, bool REVERSE, int STAGES>
struct PreparedScan : LeftState<T, T, BD, M, REVERSE, true> {
  using State = LeftState<T, T, BD, M, REVERSE, true>;
  using Shared = SharedPrepared<BD, M>;
  using State::p, State::block, State::state, State::THREADS, State::warp, State::slice;
  static constexpr int COLUMNS = BD / 2;  // of the state, which a warp has

  DEVICE PreparedScan(const ChannelParams& params, char* shared) : State(params, shared, blockIdx.z * params.run_len) {}
  DEVICE u32 stage(int row) const {
    return block.base + Shared::EXCHANGE + u32(row / CHANNEL_CHUNK) % STAGES * Shared::STAGE;
  }

  DEVICE void load(int row) const {
    const u32 to = stage(row);
    const char* from = PreparedChunk<BD>::of(p, block.segment, row);
    using From = PreparedChunk<BD>;
    block.template copy<BD / 8, THREADS, Tile<BD>>(to + Shared::A, from + From::A, 2 * BD, 0, CHANNEL_CHUNK);
    block.template copy<BD / 8, THREADS, Tile<BD>>(to + Shared::B, from + From::B, 2 * BD, 0, CHANNEL_CHUNK);
    block.template load<M, THREADS>(to + Shared::C, p.c + slice(), p.strides_c, row);
    block.template copy_contiguous<CHANNEL_SUBS * BD / 4, THREADS>(to + Shared::WHOLE, from + From::WHOLE);
    block.template copy_contiguous<2 * CHANNEL_CHUNK, THREADS, 2, Shared::SCORE_ROW>(to + Shared::SCORES,
                                                                                     from + From::SCORES);
  }

  // One block of 16 tokens. Of each 16 columns of the state, their part of y and then their new value: these do not wait
  // for each other. y[0] is of the warp's own channels, y[1] of the other's.
  DEVICE void advance(int sub, u32 from) {
    const int lane = block.tid % 32, first = warp() % 2 * COLUMNS;
    const u32 a_tile = fragment_lanes_crosswise<BD>(from + Shared::A, block.tid) + Tile<BD>::at(16 * sub, first);
    const u32 b_tile = fragment_lanes<BD>(from + Shared::B, block.tid) + Tile<BD>::at(16 * sub, first);
    const u32 decays = from + Shared::WHOLE + (sub * BD + first + lane % 4 * 4) * 4;
    const u32 c_tile = fragment_lanes_crosswise<M>(from + Shared::C, block.tid) + fragment_step<M>(sub, 0);
    float y[2][2][4] = {};
    u32 c[2][4], w[4];
#pragma unroll
    for (int i = 0; i < 2; i++) ldmatrix_trans(c[i], c_tile + 32 * (warp() ^ i));
    ldmatrix(w, from + Shared::SCORES + (16 * sub + lane % 16) * Shared::SCORE_ROW + lane / 16 * 16);
    mma<T>(y[0][0], c[0][0], c[0][1], c[0][2], c[0][3], w[0], w[2]);
    mma<T>(y[0][1], c[0][0], c[0][1], c[0][2], c[0][3], w[1], w[3]);
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) {
      u32 a[4], b[4];
      ldmatrix(a, a_tile + 32 * k);
      ldmatrix_trans(b, b_tile + 32 * k);
      const uint4 both = ld_shared_v4(decays + 64 * k);
      const float lo = __uint_as_float(both.x), hi = __uint_as_float(both.y);
      const float lo2 = __uint_as_float(both.z), hi2 = __uint_as_float(both.w);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float (&s)[4] = state[i * (COLUMNS / 8) + 2 * k], (&s2)[4] = state[i * (COLUMNS / 8) + 2 * k + 1];
        const u32 x0 = pack<T>(s[0], s[1]), x1 = pack<T>(s[2], s[3]), x2 = pack<T>(s2[0], s2[1]),
                  x3 = pack<T>(s2[2], s2[3]);
        mma<T>(y[i][0], x0, x1, x2, x3, a[0], a[1]);
        mma<T>(y[i][1], x0, x1, x2, x3, a[2], a[3]);
        s[0] *= lo, s[1] *= hi, s[2] *= lo, s[3] *= hi;
        s2[0] *= lo2, s2[1] *= hi2, s2[2] *= lo2, s2[3] *= hi2;
        mma<T>(s, c[i][0], c[i][1], c[i][2], c[i][3], b[0], b[1]);
        mma<T>(s2, c[i][0], c[i][1], c[i][2], c[i][3], b[2], b[3]);
      }
    }
    exchange(y, sub);
    State::put_y(y[0], sub, from + Shared::C, c_tile + 32 * warp());
  }

  // Adds the other warp's part of y. Behind the barrier neither reads c any more, whose place y takes.
  DEVICE void exchange(float (&y)[2][2][4], int sub) const {
    const u32 exchange = block.base + sub * (Shared::EXCHANGE / CHANNEL_SUBS) + block.tid % 32 * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) st_shared_v4(exchange + warp() * Shared::WARP_EXCHANGE + 512 * i, y[1][i]);
    named_barrier_sync(1 + warp() / 2, 64);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 x = ld_shared_v4(exchange + (warp() ^ 1) * Shared::WARP_EXCHANGE + 512 * i);
      y[0][i][0] += __uint_as_float(x.x), y[0][i][1] += __uint_as_float(x.y);
      y[0][i][2] += __uint_as_float(x.z), y[0][i][3] += __uint_as_float(x.w);
    }
  }

  // Copies are STAGES − 2 chunks ahead: one stage has y, which all warps store together.
  DEVICE void scan_segment() {
    static_assert(STAGES >= 3, "a chunk on its way, one in use, one of y");
#pragma unroll 1
    for (int i = 0; i < STAGES - 2; i++) {
      if (i * CHANNEL_CHUNK < block.length) load(i * CHANNEL_CHUNK);
      copy_async_commit();
    }
#pragma unroll 1
    for (int row = 0; row < block.length; row += CHANNEL_CHUNK) {
      copy_async_wait<STAGES - 3>();
      __syncthreads();
      if (row) State::store_y(row - CHANNEL_CHUNK, stage(row - CHANNEL_CHUNK) + Shared::C);
      const int next = row + (STAGES - 2) * CHANNEL_CHUNK;
      if (next < block.length) load(next);
      copy_async_commit();
      block.recompute_addresses();
#pragma unroll 1
      for (int sub = 0; sub < CHANNEL_SUBS; sub++) advance(sub, stage(row));
      block.recompute_addresses();
    }
    __syncthreads();
    const int last = (block.length - 1) / CHANNEL_CHUNK * CHANNEL_CHUNK;
    State::store_y(last, stage(last) + Shared::C);
  }
  DEVICE void run() {
    State::each_segment([this] { scan_segment(); });
  }
};

template <int BD, int M>
struct SharedPreparedStates {  // byte offsets in a stage
  static constexpr int B = 0;
  static constexpr int C = B + Tile<BD>::SIZE;
  static constexpr int WHOLE = C + Tile<M>::SIZE;
  static constexpr int STAGE = WHOLE + CHANNEL_SUBS * BD * 4;
};

// What a segment adds to the state, from its first token to its last: S ← diag(α_0 ⋯ α_15) S + b̃ᵀ c. A warp has 32
// channels of b and half of the slice's of c: each row that it reads serves two products.
template <typename T, int BD, int M, bool REVERSE, int STAGES>
struct PreparedStates {
  using Shared = SharedPreparedStates<BD, M>;
  static constexpr int THREADS = 2 * BD, COLUMNS = M / 2;

  const ChannelParams& p;
  ChannelBlock<T, T, REVERSE> block;
  float state[2][COLUMNS / 8][4] = {};
  float all[4] = {1.f, 1.f, 1.f, 1.f};  // the segment's decays, of channels g, g + 8, g + 16, g + 24

  DEVICE PreparedStates(const ChannelParams& params, char* shared) : p(params), block(params, shared, blockIdx.z) {}
  DEVICE int slice() const { return blockIdx.x * M; }
  DEVICE int own() const { return block.tid / 64 * 32; }              // the warp's first channel of b
  DEVICE int column() const { return block.tid / 32 % 2 * COLUMNS; }  // and of the slice
  DEVICE u32 stage(int row) const { return block.base + u32(row / CHANNEL_CHUNK) % STAGES * Shared::STAGE; }

  DEVICE void load(int row) const {
    using From = PreparedChunk<BD>;
    const u32 to = stage(row);
    const char* from = From::of(p, block.segment, row);
    block.template copy<BD / 8, THREADS, Tile<BD>>(to + Shared::B, from + From::B, 2 * BD, 0, CHANNEL_CHUNK);
    block.template load<M, THREADS>(to + Shared::C, p.c + slice(), p.strides_c, row);
    block.template copy_contiguous<CHANNEL_SUBS * BD / 4, THREADS>(to + Shared::WHOLE, from + From::WHOLE);
  }

  DEVICE void add(int sub, u32 from) {
    const int g = block.tid % 32 / 4;
    const u32 b_tile = fragment_lanes_crosswise<BD>(from + Shared::B, block.tid) + Tile<BD>::at(16 * sub, own());
    const u32 c_tile = fragment_lanes<M>(from + Shared::C, block.tid) + Tile<M>::at(16 * sub, column());
    // LeftScan::whole_at, of channel own() + g
    const u32 decays = from + Shared::WHOLE + (sub * BD + own() + g / 2 * 4 + g % 2) * 4;
    u32 b[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      ldmatrix_trans(b[i], b_tile + 32 * i);
      const float lo = __uint_as_float(ld_shared_b32(decays + 64 * i));
      const float hi = __uint_as_float(ld_shared_b32(decays + 64 * i + 8));
      all[2 * i] *= lo, all[2 * i + 1] *= hi;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        float (&s)[4] = state[i][n];
        s[0] *= lo, s[1] *= lo, s[2] *= hi, s[3] *= hi;
      }
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; n++) {
      u32 c[4];
      ldmatrix_trans(c, c_tile + 32 * n);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma<T>(state[i][2 * n], b[i][0], b[i][1], b[i][2], b[i][3], c[0], c[1]);
        mma<T>(state[i][2 * n + 1], b[i][0], b[i][1], b[i][2], b[i][3], c[2], c[3]);
      }
    }
  }

  DEVICE void store() const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4, V = p.channels;
    const i64 after = block.state_after();
    float* S = p.states + after * (i64(BD) * V) + slice() + column() + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int channel = own() + g + 8 * i;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) {
        const float (&s)[4] = state[i / 2][n];
        *reinterpret_cast<float2*>(S + i64(channel) * V + 8 * n) = make_float2(s[i % 2 * 2], s[i % 2 * 2 + 1]);
      }
      if (t == 0 && column() == 0 && slice() == 0) p.decays[after * BD + channel] = all[i];
    }
  }

  DEVICE void run() {
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {
      if (i * CHANNEL_CHUNK < block.length) load(i * CHANNEL_CHUNK);
      copy_async_commit();
    }
#pragma unroll 1
    for (int row = 0; row < block.length; row += CHANNEL_CHUNK) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();
      const int next = row + (STAGES - 1) * CHANNEL_CHUNK;
      if (next < block.length) load(next);
      copy_async_commit();
      block.recompute_addresses();
#pragma unroll 1
      for (int sub = 0; sub < CHANNEL_SUBS; sub++) add(sub, stage(row));
      block.recompute_addresses();
    }
    store();
  }
};
