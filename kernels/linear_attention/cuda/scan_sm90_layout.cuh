// The sm_90a scan's compile-time configuration, and the layout of its shared memory.
#pragma once
#include "modes.cuh"
#include "ptx/shared_memory.cuh"

constexpr int WARPGROUP = 128;  // threads

template <typename CONFIG>
struct SharedSm90;

// STATE_ONLY: computes only a segment's own state. UNSEGMENTED: a block has 64 columns of y and a whole sequence, and
// also writes the states before the segments to the scratch.
template <typename T_, int D_, int MODE_, Decay DECAY_, int ROPE_, Weights WEIGHTS_, bool STATE_ONLY_,
          bool UNSEGMENTED_>
struct ConfigSm90 {
  using T = T_;
  using Traits = ModeTraits<T, MODE_, WEIGHTS_>;
  static constexpr int D = D_, MODE = MODE_, ROPE = ROPE_;
  static constexpr Decay DECAY = DECAY_;
  static constexpr Weights WEIGHTS = WEIGHTS_;
  static constexpr bool STATE_ONLY = STATE_ONLY_, UNSEGMENTED = UNSEGMENTED_;
  static_assert(!UNSEGMENTED || MODE == FWD, "the others project a whole row, or read what another scan left");
  static_assert(ROPE <= PANEL_COLUMNS, "columns that rotate together must be in one group");

  static constexpr int CHUNK = 64;                                  // tokens
  static constexpr int PANELS = D / PANEL_COLUMNS;                  // of a row
  static constexpr int GROUPS = UNSEGMENTED ? 1 : PANELS;           // of outputs: panels of c and y that this block has
  static constexpr int D_STEPS = D / 16, CHUNK_STEPS = CHUNK / 16;  // of a product along D and along a chunk

  static constexpr bool PROJECTS = Traits::PROJECTS && !STATE_ONLY;
  static constexpr bool HAS_G = WEIGHTS == NORMALISED, HAS_A = WEIGHTS == AFFINE;
  static constexpr bool NORMALISES = HAS_G && MODE == FWD && !STATE_ONLY;  // needs Σ ζ b of each chunk, times queries
  static constexpr bool COMPUTES_E = HAS_G && MODE == DQ, COMPUTES_DB = MODE == DQ && !STATE_ONLY;
  static constexpr bool COMPUTES_DA = HAS_A && COMPUTES_DB, COMPUTES_DG = DECAY == PER_TOKEN && PROJECTS;
  // Sums decayed X by row, which also needs Σ ζ b times rows of a.
  static constexpr bool SUMS_X = COMPUTES_DA || (COMPUTES_DG && WEIGHTS != PRODUCTS);
  static constexpr bool SPLITS_B = NORMALISES || SUMS_X;  // for tensor cores
  // DQ and DK round the same W (modes.cuh): ρ and κ include a row's factor, or its mantissa; if ρ is a vector, already
  // in memory.
  static constexpr bool FACTOR_IN_W = COMPUTES_DG;
  static constexpr bool WHOLE_FACTOR = FACTOR_IN_W && !T::NARROW;  // fp16's range might not hold it
  // κ is a factor of the past only, and τ is one number for all tokens.
  static constexpr bool ADDS_A = HAS_A && Traits::VALUE_ROWS;
  static constexpr bool SUMS_C = HAS_G || ADDS_A;
  // The number of 16-bit parts of τ and ζ. In reverse (AFFINE) these are a, whose rounding error is the same for all tokens
  // and would not average out.
  static constexpr int TAU_PARTS = HAS_A && Traits::REVERSE ? 3 : 2;
  static constexpr bool SUMS_B =
      SUMS_X || (HAS_G && (MODE == FWD || STATE_ONLY)) || (HAS_A && MODE == DK && STATE_ONLY);

  // The vectors of one number per token that a chunk has besides σ. A factor of W without a vector is the same for all
  // tokens, or equals another one of its mode: DQ's τ is its σ.
  static constexpr bool HAS_RHO =
      MODE == FWD || MODE == DV || (HAS_G && MODE == DQ) || (FACTOR_IN_W && !HAS_G && MODE == DK && D == 64);
  // The vector that is exp(Γ) elsewhere is here multiplied by the row's factor.
  static constexpr bool FACTOR_IN_PAST = WHOLE_FACTOR && MODE == DK && !HAS_RHO;
  static constexpr bool HAS_KAPPA = HAS_G && MODE == DQ, HAS_TAU = HAS_G && Traits::REVERSE;
  static constexpr bool HAS_ROW = PROJECTS || NORMALISES;
  // With PER_TOKEN also exp(Γ), Γ and, if dG is computed, the part of it known so far; DK then has 1/g separate from σ.
  static constexpr bool HAS_FROM_START = DECAY == PER_TOKEN, HAS_CUMSUM = HAS_FROM_START && !STATE_ONLY;
  static constexpr bool HAS_DG = COMPUTES_DG && SUMS_X, HAS_INVERSE_G = HAS_G && COMPUTES_DG && MODE == DK;
  // If registers allow it, scores split exp(Γ_i − Γ_j) into a factor of the row and one of the column, and a token's
  // numbers as a column of W are adjacent, for one read: Γ, σ; in reverse τ, and DK's 1/g.
  static constexpr bool FACTORS_DECAYS = HAS_G && DECAY == PER_TOKEN && D == 128;
  static constexpr bool HAS_COLUMNS = FACTORS_DECAYS && !STATE_ONLY;
  static constexpr int COLUMN = HAS_TAU ? 4 : 2;  // numbers per column
  static constexpr int COLUMN_VECTORS =
      HAS_COLUMNS ? COLUMN : HAS_CUMSUM + HAS_INVERSE_G + (STATE_ONLY ? 0 : 1 + HAS_TAU);
  static constexpr int VECTORS =
      HAS_FROM_START + HAS_DG + COLUMN_VECTORS + (STATE_ONLY ? 0 : HAS_RHO + HAS_KAPPA + HAS_ROW);

  // The number of 16-bit parts of σ decayed to the chunk's end. With steep decays a few tokens make up a state, and the
  // rounding error of a token's σ, which is the same in its whole row, would not average out.
  static constexpr int SIGMA_PARTS = DECAY == PER_TOKEN ? 2 : 1;

  // The tile that stages y for its copy: one no longer needed, unless another group's outputs may still read it.
  static constexpr int Y_TILE = PROJECTS ? QK : A;
  static constexpr bool STAGES_Y = !PROJECTS && !STATE_ONLY && GROUPS > 1;
  // Whether the warpgroup that loads tiles also stores y: not in FWD, where outputs do it, as scores have more to do.
  static constexpr bool COPIER_STORES_Y = (MODE != FWD && !STATE_ONLY) || UNSEGMENTED;

  // Scores keep powers of γ in registers if there are enough.
  static constexpr bool KEEPS_POWERS = DECAY == PER_HEAD && D == 128 && !STATE_ONLY;
  // Where registers are scarcest, multiplying by γ = 1 makes ptxas order the instructions so that none are spilled.
  static constexpr bool DECAYS_PAST = DECAY == PER_HEAD || (D == 64 && ROPE && (HAS_KAPPA || COMPUTES_DA));

  using Shared = SharedSm90<ConfigSm90>;
};

template <typename CONFIG>
struct SharedSm90 {  // byte offsets; tiles first: swizzled, aligned to 1024
  static constexpr int D = CONFIG::D, CHUNK = CONFIG::CHUNK, GROUPS = CONFIG::GROUPS, PANELS = CONFIG::PANELS;
  static constexpr bool PROJECTS = CONFIG::PROJECTS;
  static constexpr int PANEL = CHUNK * ROW_BYTES;  // 64 columns of a tile
  static constexpr int EIGHT_ROWS = 8 * ROW_BYTES;
  static constexpr int ROW_TILES = CONFIG::STATE_ONLY ? 1 : PROJECTS ? 3 : 2;  // tiles of whole rows: (a,) b(, qk)
  static constexpr int TILE = PANELS * PANEL, STAGE = ROW_TILES * TILE + GROUPS * PANEL;
  static constexpr int STAGES = GROUPS < PANELS ? 4 : D == 64 && PROJECTS ? 2 : 3;

  static constexpr int SCORES = STAGES * STAGE;         // W of two chunks
  static constexpr int Y_STAGING = SCORES + 2 * PANEL;  // y of two chunks, if no tile can hold it
  // τ and ζ decayed to the chunk's end: two 16-bit numbers each in four rows of 64 tokens, with TAU_PARTS = 3 the third
  // numbers in two more; for two chunks (`states`: for every stage), then zeros
  static constexpr int END_COEFFICIENTS = Y_STAGING + (CONFIG::STAGES_Y ? 2 * GROUPS * PANEL : 0);
  // Σ ζ b before the chunk as three 16-bit numbers, three rows of 64 columns; five rows of zeros. FWD: for every stage
  static constexpr int B_SUMS = END_COEFFICIENTS + ((CONFIG::STATE_ONLY ? STAGES : 2) + 1) * EIGHT_ROWS;
  static constexpr int B_SUMS_SLOTS = CONFIG::NORMALISES ? STAGES : CONFIG::SPLITS_B;
  static constexpr int COEFFICIENTS = B_SUMS + B_SUMS_SLOTS * PANELS * EIGHT_ROWS;
  // per stage: the vectors; σ decayed to the chunk's end; Σ τ c before the chunk, one number per column
  static constexpr int STAGE_COEFFICIENTS =
      CONFIG::VECTORS * CHUNK * 4 + CONFIG::SIGMA_PARTS * CHUNK * 2 + GROUPS * PANEL_COLUMNS * 4;
  static constexpr int DB_SUMS = COEFFICIENTS + STAGES * STAGE_COEFFICIENTS;  // DQ: Σ q̂·y by token of a chunk
  // with PROJECTS: x̂·y of two chunks, one part per output warp; and two numbers per token and group
  static constexpr int PARTIAL_DOTS = DB_SUMS + CHUNK * 4;
  static constexpr int PROJECTIONS = PARTIAL_DOTS + (PROJECTS ? 2 * 4 * GROUPS * CHUNK * 4 : 0);
  static constexpr int POWERS = PROJECTIONS + (PROJECTS ? GROUPS * CHUNK * 8 : 0);
  // Distance from one table of powers to its copy: odd, so that every pair is aligned in one of them. Each table has 16
  // zeros before it.
  static constexpr int POWERS_TABLE = 16 + CHUNK + 5;
  static constexpr int HEADS = POWERS + (2 * POWERS_TABLE - 2) * 4;
  static constexpr int BARRIERS = HEADS + 6 * 8;
  static constexpr int BYTES = BARRIERS + (3 * STAGES + 2) * 8;
  static_assert(BYTES <= SHARED_BYTES, "what Sm90.shared of variants.py gives a block");
};
