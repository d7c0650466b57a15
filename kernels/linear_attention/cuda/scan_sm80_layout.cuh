// The sm_80 scan's compile-time configuration, and the layout of its shared memory.
#pragma once
#include "modes.cuh"
#include "ptx/shared_memory.cuh"

// STATE_ONLY: computes only a segment's own state.
template <typename T_, int D_, int CHUNK_, int MODE_, Decay DECAY_, int ROPE_, Weights WEIGHTS_, bool STATE_ONLY_>
struct ConfigSm80 {
  using T = T_;
  using Traits = ModeTraits<T, MODE_, WEIGHTS_>;
  static constexpr int D = D_, CHUNK = CHUNK_, MODE = MODE_, ROPE = ROPE_;
  static constexpr Decay DECAY = DECAY_;
  static constexpr Weights WEIGHTS = WEIGHTS_;
  static constexpr bool STATE_ONLY = STATE_ONLY_;
  static constexpr bool POWERS = DECAY == PER_HEAD, PER_TOKEN_DECAY = DECAY == PER_TOKEN;

  static constexpr bool PROJECTS = Traits::PROJECTS && !STATE_ONLY;
  static constexpr bool HAS_G = WEIGHTS == NORMALISED, HAS_A = WEIGHTS == AFFINE;
  static constexpr bool NORMALISES = HAS_G && MODE == FWD && !STATE_ONLY;  // needs Σ ζ b of each chunk, times queries
  static constexpr bool COMPUTES_DB = MODE == DQ, COMPUTES_DA = HAS_A && MODE == DQ;
  static constexpr bool COMPUTES_DG = PER_TOKEN_DECAY && PROJECTS;
  // Sums decayed X by row, which also needs Σ ζ b times rows of a.
  static constexpr bool SUMS_X = COMPUTES_DA || (COMPUTES_DG && WEIGHTS != PRODUCTS);
  static constexpr bool SPLITS_B = (HAS_G && MODE == FWD) || SUMS_X;  // for tensor cores
  // DQ and DK round the same W (modes.cuh): ρ and κ include a row's factor, or its mantissa.
  static constexpr bool FACTOR_IN_W = COMPUTES_DG;
  static constexpr bool WHOLE_FACTOR = FACTOR_IN_W && !T::NARROW;  // fp16's range might not hold it
  // Weights add a constant to products: κ τ with the normaliser, else a, for which no vectors are kept.
  static constexpr bool ADDS_A = HAS_A && Traits::VALUE_ROWS;
  static constexpr bool SUMS_C = HAS_G || ADDS_A;
  static constexpr bool SUMS_B = SPLITS_B || (STATE_ONLY && (HAS_G || (HAS_A && MODE == DK)));
  static constexpr bool STORES_B = STATE_ONLY || MODE == FWD;  // DV has what DK would
  // In reverse Σ τ c and Σ ζ b are multiplied by a: each chunk's sums, once computed, in fp32.
  static constexpr bool A_TIMES_SUMS = HAS_A && Traits::REVERSE;
  static constexpr bool HAS_ZETA =
      HAS_G && (STATE_ONLY || (SUMS_X && MODE == DK));  // as a vector: neither 1 nor FWD's σ

  // The number of 16-bit parts of σ decayed to the chunk's end. With steep decays a few tokens make up a state, and the
  // rounding error of a token's σ, which is the same in its whole row, would not average out.
  static constexpr int SIGMA_PARTS = PER_TOKEN_DECAY ? 2 : 1;
  // τ and ζ too: two bf16 numbers give a decay only 2⁻¹⁷ accuracy, and nothing else in a's part of the state is
  // rounded.
  static constexpr int SUM_PARTS = PER_TOKEN_DECAY && HAS_A && Traits::REVERSE ? 3 : 2;
};

template <int D, int CHUNK, Decay DECAY>
struct SharedSm80 {  // byte offsets; tiles first: swizzled, aligned to 1024
  static constexpr int TILE = CHUNK * D * 2;
  static constexpr int STAGE = 3 * TILE;
  static constexpr int SCORES = 2 * STAGE;                    // W
  static constexpr int STATS = SCORES + CHUNK * ROW_BYTES;    // two stages of three rows of CHUNK floats
  static constexpr int COEFFICIENTS = STATS + 6 * CHUNK * 4;  // σ τ ρ κ ζ (DQ: Σ q̂·y)
  // decayed to the chunk's end: σ in 16 bits, τ and ζ as SUM_PARTS 16-bit numbers each
  static constexpr int END_COEFFICIENTS = COEFFICIENTS + 5 * CHUNK * 4;
  // Σ τ c and Σ ζ b; the latter also as three 16-bit numbers
  static constexpr int SUMS = END_COEFFICIENTS + (DECAY == PER_TOKEN ? 7 : 5) * CHUNK * 2;
  static constexpr int PARTIAL_DOTS = SUMS + 2 * D * 4 + 3 * D * 2;
  static constexpr int POWERS = PARTIAL_DOTS + 4 * CHUNK * 4;  // γ⁰ … γ^CHUNK; Σ γ^i of a chunk; a; b
  static constexpr int HEADS = POWERS + (CHUNK + 4) * 4;
  // PER_TOKEN: two stages of Γ, the log decay to the chunk's end, 1/‖x‖ and count; the part of Γ's gradient from the
  // scores; the second part of σ decayed to the chunk's end; in two stages the count before the chunk
  static constexpr int TOKEN_DECAYS = HEADS + 5 * 8;
  static constexpr int DG = TOKEN_DECAYS + 8 * CHUNK * 4;
  static constexpr int SIGMA_REST = DG + CHUNK * 4;
  static constexpr int COUNTS = SIGMA_REST + CHUNK * 2;
  static constexpr int BYTES = DECAY == PER_TOKEN ? COUNTS + 2 * 4 : TOKEN_DECAYS;
  static_assert(BYTES == SHARED_BYTES, "Sm80.shared of variants.py");
};
