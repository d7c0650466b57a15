// The parameters of the kernels with a decay for each channel, and what their blocks share: tokens, tiles, copies.
#pragma once
#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

struct ChannelStrides {
  i64 batch, token, head;  // in elements
};

// A scan computes y_i = scale Σ_{j≤i} (a_i·b_j) c_j with the decays of the tokens j+1 … i on the channels of a and b
// (LEFT: FWD, DV) or on those of c and y (RIGHT: DQ, DK). DV and DK run in reverse, over j ≥ i.
//         a   b   c   y
//   FWD   q   k   v   o
//   DV    k   q   do  dv
//   DQ    do  v   k   dq
//   DK    v   do  q   dk
struct ChannelParams {
  const u16 *a, *b, *c;
  const void* gate;  // log decays [B, N, H, Dk]
  u16* y;            // [B, N, H, ·], contiguous
  u16* y_rest;       // DQ: what rounding leaves out of y
  // DK: also the gradient of the gates, from k, dq [B, N, H, Dk], contiguous, and the states at the segments' ends
  const u16 *k, *dq, *dq_rest;
  void* dgate;            // [B, N, H, Dk], contiguous
  const float *ends, *S;  // [B, H, segments − 1, Dk, Dv], those between segments; [B, H, Dk, Dv], the final one
  // The states between segments in the direction of the scan, [B, H, segments − 1, Dk, Dv]; `states` writes what the
  // segment before adds, and its decay [B, H, segments − 1, Dk]; `final`: the state behind the last segment, or null
  float *states, *decays, *final;
  const float* initial;  // the state before the scan [B, H, Dk, Dv], or null: 0
  char* prepared;        // PreparedChunk [B, H, part, chunks of a segment], a workspace
  ChannelStrides strides_a, strides_b, strides_c, strides_gate, strides_k;
  int N, H, segments, segment_len;
  int part, first;  // these launches take so many segments, or what is left, from this one on, in the scan's direction
  int run_len;      // segments that a block of the left scan takes in turn
  int channels;     // of c and y
  float scale;
  int unused;
};
static_assert(sizeof(ChannelParams) == CHANNEL_PARAMS_BYTES, "POINTERS and LAYOUT of channel_decay.py");

constexpr int CHANNEL_CHUNK = 32;  // tokens that a block takes at a time, in blocks of 16
constexpr int CHANNEL_SUBS = CHANNEL_CHUNK / 16;

// A tile: rows of COLUMNS 16-bit numbers (gates: of BYTES each). The gaps after each eight rows spread the rows that
// ldmatrix reads at once, and two rows eight apart, over all banks.
template <int COLUMNS, int BYTES = 2, int GAP = 64>
struct Tile {
  static constexpr int ROW = COLUMNS * BYTES + 16, GAP_BYTES = GAP;
  static DEVICE constexpr int at(int row, int column) { return row * ROW + row / 8 * GAP + column * BYTES; }
  static constexpr int SIZE = (CHANNEL_CHUNK * ROW + CHANNEL_CHUNK / 8 * GAP + 127) / 128 * 128;
};
// One whose gaps spread two rows of each eight (SegmentStates::lanes).
template <int COLUMNS, int BYTES = 2>
using SpreadTile = Tile<COLUMNS, BYTES, 32>;

// Log decays in fp32 or 16 bits.
template <typename G>
DEVICE float2 unpack_gates(u32 address) {
  return unpack<G>(ld_shared_b32(address));
}
template <>
DEVICE float2 unpack_gates<float>(u32 address) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
  return r;
}
template <typename G>
struct Bytes {
  static constexpr int N = 2;
};
template <>
struct Bytes<float> {
  static constexpr int N = 4;
};

DEVICE float2 operator*(float2 x, float2 y) { return make_float2(x.x * y.x, x.y * y.y); }
DEVICE float2 operator*(float2 x, float y) { return make_float2(x.x * y, x.y * y); }
DEVICE float2 operator+(float2 x, float2 y) { return make_float2(x.x + y.x, x.y + y.y); }
DEVICE float2 decay(float2 log) { return make_float2(power_of_two(log.x * LOG2_E), power_of_two(log.y * LOG2_E)); }
DEVICE float2 swap_halves(float2 x) {
  return make_float2(__shfl_xor_sync(FULL_WARP, x.x, 16), __shfl_xor_sync(FULL_WARP, x.y, 16));
}
DEVICE float2 ld_shared_float2(const float* from) { return *reinterpret_cast<const float2*>(from); }

// A block's head and segment, at first the step-th of the part in the direction of the scan. Rows count in that direction,
// too: row 0 is the segment's first token, in reverse its last.
//
// A grid has the slices of a head (`prepare`: the chunks of a segment), the heads, and the segments or runs: slices, which
// read the same a and b, run side by side, so that L2 has these for all but the first.
template <typename T, typename G, bool REVERSE>
struct ChannelBlock {
  const ChannelParams& p;
  int tid, batch, head, segment, begin, length;
  u32 base;  // the address of its shared memory

  DEVICE ChannelBlock(const ChannelParams& params, const char* smem, int step) : p(params) {
    tid = threadIdx.x, base = shared_address(smem), batch = blockIdx.y / p.H, head = blockIdx.y % p.H;
    enter(REVERSE ? p.segments - 1 - p.first - step : p.first + step);
  }
  DEVICE void enter(int next) {
    segment = next, begin = segment * p.segment_len, length = min(p.segment_len, p.N - begin);
  }
  DEVICE void enter_next() { enter(segment + (REVERSE ? -1 : 1)); }
  // Called between the phases of a chunk, which then recompute their addresses.
  DEVICE void recompute_addresses() { reload(tid, base); }
  DEVICE int token(int row) const { return REVERSE ? begin + length - 1 - row : begin + row; }
  DEVICE i64 bh() const { return i64(blockIdx.y); }
  // The first segment of the scan, whose state before it is the initial one; the last one.
  DEVICE bool is_first() const { return segment == (REVERSE ? p.segments - 1 : 0); }
  DEVICE bool is_last() const { return segment == (REVERSE ? 0 : p.segments - 1); }
  DEVICE bool ends_part() const { return (REVERSE ? p.segments - 1 - segment : segment) == p.first + p.part - 1; }
  // Among the states between segments, the one after this segment in the direction of the scan.
  DEVICE i64 state_after() const { return bh() * (p.segments - 1) + segment - (REVERSE ? 1 : 0); }
  // The state before this segment, of so many numbers; null: 0.
  DEVICE const float* state_before(i64 numbers) const {
    if (is_first()) return p.initial ? p.initial + bh() * numbers : nullptr;
    return p.states + (state_after() + (REVERSE ? 1 : -1)) * numbers;
  }
  template <typename E>
  DEVICE E* start(E* x, const ChannelStrides& s) const {
    return x + batch * s.batch + head * s.head;
  }

  // Elements from a row to the next one of a tensor with so many between two tokens.
  DEVICE i64 step(i64 token_stride) const { return REVERSE ? -token_stride : token_stride; }

  // Copies rows of PIECES 16-byte pieces, `row_bytes` apart, to a tile; those before `first` or from `rows` on are zeros.
  // A thread's copies are at one column, where PIECES divide THREADS, and their rows, less the first, are constants.
  template <int PIECES, int THREADS, typename TILE>
  DEVICE void copy(u32 tile, const char* from, i64 row_bytes, int first, int rows) const {
    constexpr int COPIES = (CHANNEL_CHUNK * PIECES + THREADS - 1) / THREADS;
    constexpr bool ALIGNED = THREADS % PIECES == 0, EIGHTS = ALIGNED && THREADS / PIECES % 8 == 0;
    const u32 r0 = u32(tid) / PIECES, piece0 = u32(tid) % PIECES;
    from += r0 * row_bytes + 16 * piece0, tile += TILE::ROW * r0 + 16 * piece0;
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
      const u32 i = u32(tid) + n * THREADS;
      const int r = ALIGNED ? r0 + n * (THREADS / PIECES) : i / PIECES;
      if (CHANNEL_CHUNK * PIECES % THREADS && r >= CHANNEL_CHUNK) break;
      const int rows_on = ALIGNED ? n * (THREADS / PIECES) : r - int(r0);
      const int bytes_on = ALIGNED ? 0 : 16 * int(i % PIECES - piece0);
      const int gaps = EIGHTS ? int(r0 / 8) + rows_on / 8 : r / 8;
      copy_async_16(tile + rows_on * TILE::ROW + gaps * TILE::GAP_BYTES + bytes_on,
                    from + rows_on * row_bytes + bytes_on, r >= first && r < rows);
    }
  }
  // PIECES contiguous 16-byte pieces to rows of ROW_PIECES, ROW bytes apart.
  template <int PIECES, int THREADS, int ROW_PIECES = PIECES, int ROW = 16 * PIECES>
  DEVICE void copy_contiguous(u32 to, const char* from) const {
#pragma unroll
    for (int n = 0; n < (PIECES + THREADS - 1) / THREADS; n++) {
      const u32 i = u32(tid) + n * THREADS;
      if (i < PIECES) copy_async_16(to + i / ROW_PIECES * ROW + i % ROW_PIECES * 16, from + 16 * i, true);
    }
  }
  // To L2: LINES of 128 bytes of each of so many rows, CHANNEL_CHUNK at most, `row_bytes` apart. Loads would wait long for HBM.
  template <int LINES, int THREADS>
  DEVICE void prefetch(const void* from, i64 row_bytes, int rows) const {
#pragma unroll 1
    for (int i = tid; i < LINES * CHANNEL_CHUNK; i += THREADS) {
      const int r = i % CHANNEL_CHUNK;
      if (r < rows) prefetch_l2(static_cast<const char*>(from) + r * row_bytes + i / CHANNEL_CHUNK * 128);
    }
  }
  // COLUMNS columns of CHANNEL_CHUNK rows; rows past the segment's end are zeros.
  template <int COLUMNS, int THREADS, typename TILE = Tile<COLUMNS>>
  DEVICE void load(u32 tile, const u16* x, const ChannelStrides& s, int row) const {
    const u16* from = start(x, s) + token(row) * s.token;
    copy<COLUMNS / 8, THREADS, TILE>(tile, reinterpret_cast<const char*>(from), 2 * step(s.token), 0, length - row);
  }
  // The same of gates. A row's decay is what its state before is multiplied by: in reverse that of the token after it.
  template <int COLUMNS, int THREADS, typename TILE = Tile<COLUMNS, Bytes<G>::N>>
  DEVICE void load_gates(u32 tile, int column, int row) const {
    constexpr int BYTES = Bytes<G>::N;
    const ChannelStrides& s = p.strides_gate;
    const int at = token(row) + (REVERSE ? 1 : 0);
    const char* from =
        reinterpret_cast<const char*>(p.gate) + (batch * s.batch + head * s.head + at * s.token + column) * BYTES;
    copy<COLUMNS * BYTES / 16, THREADS, TILE>(tile, from, BYTES * step(s.token), REVERSE && at >= p.N, length - row);
  }
};

// Fragments of a tile, r[0] … r[3]. This is the address of lane % 16's row, and of eight columns further for the upper
// lanes. As it is: the left operand; as the transposed right one r[0], r[2] are the first eight rows and r[1], r[3] the
// others. Transposed: r[0], r[1] are the right operand's first eight columns, r[2], r[3] the others.
template <int COLUMNS>
DEVICE u32 fragment_lanes(u32 tile, u32 tid) {
  u32 lane = tid % 32;
  return tile + Tile<COLUMNS>::at(lane % 16, lane / 16 * 8);
}
// The same with r[1] and r[2] exchanged, so that mma, which wants neighbouring registers, has them without moves. As it
// is: the transposed right operand's first eight rows are r[0], r[1], and r[2], r[3] the others. Transposed: the left one.
template <int COLUMNS>
DEVICE u32 fragment_lanes_crosswise(u32 tile, u32 tid) {
  u32 lane = tid % 32;
  return tile + Tile<COLUMNS>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
}
// How much further those of rows 16s … 16s+15, columns 16k … 16k+15 are.
template <int COLUMNS>
DEVICE constexpr int fragment_step(int s, int k) {
  return Tile<COLUMNS>::at(16 * s, 16 * k);
}

// Adds the product of a warp's 16 rows of the state, in accumulators of eight columns each and here rounded, with a's
// 16 tokens, whose crosswise fragments begin at a_tile: y[0] has the first eight tokens, y[1] the others.
template <typename T, int COLUMN_BLOCKS>
DEVICE void add_state_product(float (&y)[2][4], const float (&state)[COLUMN_BLOCKS][4], u32 a_tile) {
#pragma unroll
  for (int k = 0; k < COLUMN_BLOCKS / 2; k++) {
    u32 a[4];
    ldmatrix(a, a_tile + 32 * k);
    const float (&s)[4] = state[2 * k], (&s2)[4] = state[2 * k + 1];
    const u32 x0 = pack<T>(s[0], s[1]), x1 = pack<T>(s[2], s[3]), x2 = pack<T>(s2[0], s2[1]),
              x3 = pack<T>(s2[2], s2[3]);
    mma<T>(y[0], x0, x1, x2, x3, a[0], a[1]);
    mma<T>(y[1], x0, x1, x2, x3, a[2], a[3]);
  }
}
