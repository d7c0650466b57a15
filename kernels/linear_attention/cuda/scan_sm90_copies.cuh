// Copies of an sm_90a block, each by a warpgroup: loads tiles, asynchronously, and stores y.
#pragma once
#include "ptx/copy.cuh"
#include "scan_sm90_block.cuh"

template <typename CONFIG>
struct CopiesSm90 {
  using Traits = typename CONFIG::Traits;
  using Shared = typename CONFIG::Shared;
  using Block = BlockSm90<CONFIG>;
  static constexpr int CHUNK = CONFIG::CHUNK, GROUPS = CONFIG::GROUPS, PANELS = CONFIG::PANELS;

  // Loads all tiles except the one that y may be in, or (last) that one.
  static DEVICE void load(const Block& block, int stage, int position, bool last) {
    if (position + CHUNK <= block.p.N && block.p.columns == CONFIG::D)
      load_tiles<true>(block, stage, position, last);
    else
      load_tiles<false>(block, stage, position, last);
  }
  template <bool WHOLE>  // all rows and columns exist
  static DEVICE void load_tiles(const Block& block, int stage, int position, bool last) {
    constexpr int Y_TILE = CONFIG::Y_TILE;
    if (last) {
#pragma unroll
      for (int panel = 0; panel < (CONFIG::STATE_ONLY ? 0 : PANELS); panel += GROUPS)
        load_tile<GROUPS, WHOLE>(block, block.tile(stage, Y_TILE) + panel * Shared::PANEL, Y_TILE, position,
                                 PANEL_COLUMNS * panel);
      return;
    }
    if (CONFIG::PROJECTS) load_tile<PANELS, WHOLE>(block, block.tile(stage, A), A, position);
    load_tile<PANELS, WHOLE>(block, block.tile(stage, B), B, position);
    load_tile<GROUPS, WHOLE>(block, block.tile(stage, C), C, position);
  }
  // Loads COLUMNS × 64 columns with 128 threads, a multiple of 8 rows at a time. When y is stored, a thread reads the
  // places that it will load to next (so both use the same number of columns), without waiting for other threads.
  template <int COLUMNS, bool WHOLE>
  static DEVICE void load_tile(const Block& block, u32 dst, int tensor, int position, int from_column = 0) {
    constexpr int PIECES = 8 * COLUMNS, STEP = WARPGROUP / PIECES, UNROLL = WHOLE ? CHUNK / STEP : 1;
    const int first = u32(block.tid) % WARPGROUP / PIECES, piece = u32(block.tid) % PIECES;
    const u16* src = block.row(tensor, position + first) + from_column + 8 * piece;
    i64 step = (Traits::REVERSE ? -STEP : STEP) * block.p.strides[tensor].token;
    int remaining = block.has_column(tensor, from_column + 8 * piece) ? block.p.N - position - first : 0;
    dst += swizzled<CHUNK>(first, piece);
#pragma unroll UNROLL
    for (int i = 0; i < CHUNK; i += STEP, src += step) copy_async_16(dst + i * ROW_BYTES, src, WHOLE || i < remaining);
  }
  // Stores y from a tile of COLUMNS × 64 columns, its first row that of `position`.
  template <int COLUMNS>
  static DEVICE void store_y(const Block& block, u32 src, int position, int from_column = 0) {
    constexpr int PIECES = 8 * COLUMNS, STEP = WARPGROUP / PIECES;
    const int first = u32(block.tid) % WARPGROUP / PIECES, piece = u32(block.tid) % PIECES;
    i64 token = Traits::REVERSE ? -block.p.strides[Y].token : block.p.strides[Y].token;
    int remaining = block.has_column(Y, from_column + 8 * piece) ? block.p.N - position - first : 0;
    u16* dst = block.row(Y, position + first) + from_column + 8 * piece;
    src += swizzled<CHUNK>(first, piece);
#pragma unroll
    for (int i = 0; i < CHUNK; i += STEP, dst += STEP * token) {
      uint4 x = ld_shared_v4(src + i * ROW_BYTES);
      if (i < remaining) st_global_v4(dst, x);
    }
  }
};
