// Per-token log decays g_t ≤ 0, −∞ for a reset: one pass over them computes what a scan needs, by position.
//
// With G_i = Σ_{t≤i} g_t, powers of γ become differences of G: γ^(i−j) → exp(G_i − G_j). Only differences within a
// chunk are taken, of Γ, the sum from the chunk's start, as G grows without bound. In reverse the decay between two
// neighbouring positions is that of the one scanned first (the later token). So position 0 has no decay, and that of
// token 0, which is scanned last, applies to the adjoint of the initial state.
#pragma once
#include "params.cuh"

// Threads per block of the kernels here. A block reads and writes eight heads (32 bytes) of [B, N, H] at once; each
// warp works on one of them.
constexpr int DECAY_THREADS = 256, DECAY_HEADS = DECAY_THREADS / 32;
static_assert(DECAY_THREADS == LAUNCH_DECAY_THREADS, "DECAY_THREADS of variants.py");
constexpr int DECAY_SPAN = 256, DECAY_ITEMS = DECAY_SPAN / 32;  // positions per block, and consecutive ones per lane
static_assert(DECAY_SPAN == LAUNCH_DECAY_SPAN, "DECAY_SPAN of variants.py");

// A thread's position in a grid (⌈N / DECAY_SPAN⌉, B·⌈H / DECAY_HEADS⌉).
struct DecayBlock {
  int batches, batch, first_head, first;  // first: position
  int warp, lane;
  i64 bh;
  DEVICE DecayBlock(const Params& p) {
    const int groups = (p.H + DECAY_HEADS - 1) / DECAY_HEADS;
    batches = gridDim.y / groups, batch = blockIdx.y / groups;
    first_head = blockIdx.y % groups * DECAY_HEADS, first = blockIdx.x * DECAY_SPAN;
    warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bh = i64(batch) * p.H + first_head + warp;
  }
  DEVICE bool has_head(const Params& p) const { return first_head + warp < p.H; }  // this warp
  // Calls use(i, head, place) for this thread's elements of the span in [B, N, H]: the position and the head within the
  // span, and the index of token(first + i).
  template <typename TOKEN, typename USE>
  DEVICE void each(const Params& p, TOKEN token, USE use) const {
    const int head = threadIdx.x % DECAY_HEADS;
    if (first_head + head >= p.H) return;
#pragma unroll
    for (int i = threadIdx.x / DECAY_HEADS; i < DECAY_SPAN; i += DECAY_THREADS / DECAY_HEADS)
      use(i, head, (i64(batch) * p.N + token(first + i)) * p.H + first_head + head);
  }
};
// One number per position and head in shared memory, padded so that reads along either have (almost) no bank conflicts.
struct DecayTile {
  float of[DECAY_HEADS][DECAY_SPAN + DECAY_SPAN / 8 + 4];
  DEVICE float& at(int head, int i) { return of[head][i + i / 8]; }
};

// log2 of a decay. Anything below LOG_ZERO (numerics.py), a decay of 0, is clamped to it, as −∞ − (−∞) would be NaN. A
// NaN stays NaN; fmaxf would turn it into a reset.
DEVICE float log2_decay_of(float log_decay) { return (log_decay < LOG_ZERO ? LOG_ZERO : log_decay) * LOG2_E; }
DEVICE float log2_decay_of(const Params& p, i64 bh, int token) {
  return log2_decay_of(p.log_decay[(bh / p.H * p.N + token) * p.H + bh % p.H]);
}

// Params::chunks, [BH, 2, chunks]: each chunk's log2 decay and its count, which `sum_counts` replaces by the count of
// all chunks before.
template <int CHUNK>
struct Chunks {
  float *log2_decay, *count;  // of one head
  int n;
  DEVICE Chunks(const Params& p, i64 bh) : n((p.N + CHUNK - 1) / CHUNK) {
    log2_decay = p.chunks + 2 * bh * n, count = log2_decay + n;
  }
};

// dL/dg_t is a suffix sum over all later tokens, so rounding errors accumulate with N. At a boundary, before every
// BOUNDARY_INTERVAL-th token, the sum is also <S, dS>, the inner product of the forward state (DQ has it) and its
// adjoint (DK has it). Restarting there keeps every sum within one window. Unless N is a multiple of CHUNK, DQ's and
// DK's chunk edges do not coincide, and no boundary is used: if N > BOUNDARY_INTERVAL, backend.py splits off the first
// N % CHUNK tokens.
constexpr int BOUNDARY_INTERVAL = LAUNCH_BOUNDARY_INTERVAL;
static_assert(BOUNDARY_INTERVAL % DECAY_SPAN == 0, "a span is of one window");
template <int D>
constexpr int BOUNDARY_SIZE = D * D / 2 + 2 * D + 16;  // fp32 numbers
template <int D>
struct Boundary {
  static_assert(BOUNDARY_SIZE<D> == LAUNCH_BOUNDARY_SIZE, "boundary_size of variants.py");
  uint4* state;          // S, rounded, in the order of DQ's lanes
  float *c, *b, *count;  // DQ's Σ τ c and Σ ζ b, [D] each, and count
  float* parts;          // <S, dS> without the decay into the token, a part per warp: outputs' warps, then token stats'
  DEVICE Boundary(const Params& p, i64 bh, int i) {
    float* at = p.boundaries + (bh * ((p.N - 1) / BOUNDARY_INTERVAL) + i) * BOUNDARY_SIZE<D>;
    state = reinterpret_cast<uint4*>(at), c = at + D * D / 2, b = c + D, parts = b + D, count = parts + 15;
  }
};

// The decay over a whole segment.
template <int CHUNK>
DEVICE float decay_of_segment(const Params& p, i64 bh, int segment) {
  const float* log2_decay = Chunks<CHUNK>(p, bh).log2_decay + segment * (p.segment_len / CHUNK);
  float sum = 0.f;
  for (int i = 0; i * CHUNK < tokens_of_segment(p, segment); i++) sum += log2_decay[i];
  return exp2f(sum);
}

DEVICE float from_lane(float x, int lane) { return __shfl_sync(FULL_WARP, x, lane & 31); }

// A range of positions: its total decay, and its decayed count.
struct Stretch {
  float log2_decay, count;
  DEVICE void append(Stretch x) { count = count * exp2f(x.log2_decay) + x.count, log2_decay += x.log2_decay; }
};
DEVICE Stretch from_lane(Stretch x, int lane) { return {from_lane(x.log2_decay, lane), from_lane(x.count, lane)}; }
// Inclusive scan: the range of all lanes up to this one.
DEVICE Stretch append_lanes(Stretch x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    Stretch before = from_lane(x, lane - d);
    if (lane >= d) before.append(x), x = before;
  }
  return x;
}

// A warp's part of `sum_decays`: one chunk.
template <int CHUNK, bool REVERSE, bool COUNTS>
DEVICE void sum_chunk_decays(const Params& p, const DecayBlock& block, DecayTile& decays, int in_span) {
  constexpr int ITEMS = CHUNK / 32;  // per lane
  const int lane = block.lane, begin = block.first + in_span, chunk = begin / CHUNK, position = begin + lane * ITEMS;
  const i64 first_of_head = block.bh * p.N;
  const Chunks<CHUNK> chunks(p, block.bh);
  Stretch up_to[ITEMS];  // up to each of this lane's positions
  float to_end[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int at = position + i;
    up_to[i].log2_decay = decays.at(block.warp, in_span + lane * ITEMS + i);
    up_to[i].count = !COUNTS || at >= p.N ? 0.f : REVERSE ? p.e[first_of_head + p.N - 1 - at] : 1.f;
  }
  to_end[ITEMS - 1] = 0.f;
#pragma unroll
  for (int i = ITEMS - 1; i > 0; i--) to_end[i - 1] = to_end[i] + up_to[i].log2_decay;
  float lanes_on = to_end[0] + up_to[0].log2_decay;  // sum over all lanes from this one on
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    float x = from_lane(lanes_on, lane + d);
    if (lane + d < 32) lanes_on += x;
  }
  float after = from_lane(lanes_on, lane + 1);
  if (lane == 31) after = 0.f;
#pragma unroll
  for (int i = 1; i < ITEMS; i++) {
    Stretch x = up_to[i - 1];
    x.append(up_to[i]), up_to[i] = x;
  }
  const Stretch lanes = append_lanes(up_to[ITEMS - 1], lane);
  Stretch before = from_lane(lanes, lane - 1);
  if (lane == 0) before = {0.f, 0.f};
  if (lane == 31) chunks.log2_decay[chunk] = lanes.log2_decay;
  if (COUNTS && lane == 31) chunks.count[chunk] = lanes.count;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    if (position + i >= p.N) break;
    Stretch x = before;
    x.append(up_to[i]);
    p.decay_cumsum[first_of_head + position + i] = x.log2_decay;
    p.to_end[first_of_head + position + i] = to_end[i] + after;
    if (REVERSE && COUNTS) p.count[first_of_head + position + i] = x.count;
  }
}

// Writes, by position:
//
//     decay_cumsum  Γ_i, the cumulative log2 decay from the chunk's start up to position i
//     to_end        what the rest of the chunk adds to it; summed from the end, so an earlier reset costs no accuracy
//     count         in reverse: Σ exp(G_i − G_j) e_i over i ≥ j of the chunk
//
// and chunks (see `Chunks`). COUNTS: with a normaliser; only that needs counts. Grid: DecayBlock.
template <int CHUNK, bool REVERSE, bool COUNTS>
__global__ void __launch_bounds__(DECAY_THREADS) sum_decays(const __grid_constant__ Params p) {
  __shared__ DecayTile decays;
  const DecayBlock block(p);
  block.each(
      p, [&](int position) { return REVERSE ? p.N - position : position; },
      [&](int i, int head, i64 place) {
        const int position = block.first + i;
        const bool decays_here = position < p.N && (!REVERSE || position > 0);
        decays.at(head, i) = decays_here ? log2_decay_of(p.log_decay[place]) : 0.f;
      });
  __syncthreads();
  if (!block.has_head(p)) return;
#pragma unroll
  for (int i = 0; i < DECAY_SPAN; i += CHUNK)
    if (block.first + i < p.N) sum_chunk_decays<CHUNK, REVERSE, COUNTS>(p, block, decays, i);
}

// After `sum_decays`: replaces each chunk's count by that of all chunks before. n_initial: the initial count; in
// reverse the gradient of the final one. count_out: the final count; in reverse the gradient of the initial one.
// Grid (1, B·H).
template <int CHUNK, bool REVERSE>
__global__ void __launch_bounds__(DECAY_THREADS) sum_counts(const __grid_constant__ Params p) {
  constexpr int WARPS = DECAY_THREADS / 32;
  __shared__ Stretch warps[2][WARPS];
  const i64 bh = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Chunks<CHUNK> chunks(p, bh);
  Stretch all = {0.f, p.n_initial ? (REVERSE ? -p.n_initial[bh] : p.n_initial[bh]) : 0.f};  // so far
  for (int first = 0, parity = 0; first < chunks.n; first += DECAY_THREADS, parity ^= 1) {
    const int chunk = first + threadIdx.x;
    const bool ok = chunk < chunks.n;
    const Stretch own = {ok ? chunks.log2_decay[chunk] : 0.f, ok ? chunks.count[chunk] : 0.f};
    const Stretch lanes = append_lanes(own, lane);
    if (lane == 31) warps[parity][warp] = lanes;
    Stretch before = from_lane(lanes, lane - 1), earlier = {0.f, 0.f};
    if (lane == 0) before = {0.f, 0.f};
    __syncthreads();
    for (int i = 0; i < WARPS; i++) {
      if (i == warp) earlier = all;
      all.append(warps[parity][i]);
    }
    earlier.append(before);
    if (ok) chunks.count[chunk] = earlier.count;
  }
  if (threadIdx.x == 0 && p.count_out)
    p.count_out[bh] = REVERSE ? -all.count * exp2f(log2_decay_of(p, bh, 0)) : all.count;
}

// A sum of fp32 numbers with its rounding errors: the dG_i of a whole sequence are summed, and nearly cancel.
struct LongSum {
  float high, low;
  DEVICE void add(LongSum x) {
    const float sum = high + x.high, from_x = sum - high;
    low += ((high - (sum - from_x)) + (x.high - from_x)) + x.low;
    high = sum;
  }
};
DEVICE LongSum from_lane(LongSum x, int lane) { return {from_lane(x.high, lane), from_lane(x.low, lane)}; }
DEVICE LongSum sum_of_lanes(LongSum x, int lane) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    LongSum other = from_lane(x, lane ^ d);
    x.add(other);
  }
  return x;
}

// The sum of this warp's numbers in a tile over the lanes before this one.
DEVICE LongSum sum_before(DecayTile& tile, const DecayBlock& block) {
  LongSum lanes = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < DECAY_ITEMS; i++) lanes.add({tile.at(block.warp, block.lane * DECAY_ITEMS + i), 0.f});
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    LongSum x = from_lane(lanes, block.lane - d);
    if (block.lane >= d) lanes.add(x);
  }
  LongSum sum = from_lane(lanes, block.lane - 1);
  if (block.lane == 0) sum = {0.f, 0.f};
  return sum;
}

// A lane's part of the sum at the boundary before `token`. WARPS: the number of warps of DK's scan, each with a part.
template <int D, int WARPS>
DEVICE float across_boundary(const Params& p, const DecayBlock& block, int token) {
  if (block.lane >= WARPS) return 0.f;
  return Boundary<D>(p, block.bh, token / BOUNDARY_INTERVAL - 1).parts[block.lane] *
         exp2f(log2_decay_of(p, block.bh, token));
}

// dL/dg_t = Σ_{i≥t} dG_i, as g_t is in G_i for i ≥ t; 0 at a reset. dG_i = row_i − column_i, which DQ and DK stored as
// PARTS addends by position. Launched first with TOTALS, which writes the sum of each span, then without, which writes
// d_log_decay. Each boundary has WARPS parts. Grid: DecayBlock, spans and tokens from the last to the first.
template <int D, int CHUNK, bool TOTALS, int PARTS, int WARPS>
__global__ void __launch_bounds__(DECAY_THREADS) decay_gradient(const __grid_constant__ Params p) {
  const DecayBlock block(p);
  const int spans = gridDim.x, last = spans * DECAY_SPAN - 1;
  const i64 first_of_head = block.bh * p.N, second_part = i64(block.batches) * p.H * p.N;
  auto dG = [&](int i) {
    const int token = last - block.first - i;
    const i64 row = first_of_head + token, column = first_of_head + p.N - 1 - token;
    if (!block.has_head(p) || token >= p.N) return 0.f;
    float sum = p.dG[row] - p.dG_columns[column];
    if (PARTS == 2) sum += p.dG[second_part + row] - p.dG_columns[second_part + column];
    return sum;
  };
  float *high = p.span_sums + 2 * block.bh * spans, *low = high + spans;
  LongSum all = {0.f, 0.f};
  if constexpr (TOTALS) {
#pragma unroll
    for (int i = block.lane; i < DECAY_SPAN; i += 32) all.add({dG(i), 0.f});
    all = sum_of_lanes(all, block.lane);
    if (block.lane == 0 && block.has_head(p)) high[blockIdx.x] = all.high, low[blockIdx.x] = all.low;
  } else {
    __shared__ DecayTile tile;
#pragma unroll
    for (int i = block.lane; i < DECAY_SPAN; i += 32) tile.at(block.warp, i) = dG(i);
    // The sums of the spans before, up to a boundary if there is one.
    const int end = ((last - block.first) / BOUNDARY_INTERVAL + 1) * BOUNDARY_INTERVAL;
    const bool bounded = p.N % CHUNK == 0 && end < p.N;
    const int first_span = bounded ? (last + 1 - end) / DECAY_SPAN : 0;
    for (int i = first_span + block.lane; block.has_head(p) && i < blockIdx.x; i += 32) all.add({high[i], low[i]});
    if (bounded && block.has_head(p)) all.add({across_boundary<D, WARPS>(p, block, end), 0.f});
    all = sum_of_lanes(all, block.lane);
    __syncwarp();
    LongSum sum = sum_before(tile, block);
    sum.add(all);
#pragma unroll
    for (int i = 0; i < DECAY_ITEMS; i++) {
      float& x = tile.at(block.warp, block.lane * DECAY_ITEMS + i);
      sum.add({x, 0.f}), x = sum.high + sum.low;
    }
    __syncthreads();
    block.each(
        p, [&](int position) { return last - position; },
        [&](int i, int head, i64 place) {
          if (last - block.first - i < p.N)
            p.d_log_decay[place] = p.log_decay[place] <= LOG_ZERO ? 0.f : tile.at(head, i);
        });
  }
}
