// The four modes of a scan: all outputs are one sum with different operands.
//
// With rows a, b, c of three tensors and scalars per token, every output is
//
//     y_i = Σ_{j≤i} γ^(i−j) (ρ_i σ_j (a_i·b_j) + κ_i τ_j) c_j                                            (1)
//
//            a   b   c    σ              τ           ρ           κ     order of tokens      then
//     FWD    q   k   v    r_k            1           b r_q       1     first to last        o  = y / g
//     DQ     do  v   k    r_k            r_k         1/g         −e    first to last        dq = b r_q (y − q̂ (q̂·y))
//     DK     v   do  q    b r_q / g      −b e r_q    1           1     last to first        dk = r_k (y − k̂ (k̂·y))
//     DV     k   q   do   b r_q / g      1/g         r_k         1     last to first        dv = y
//
// where r_x = 1/‖x‖, g is the normaliser and e = (do·o)/g (docs/kernel.md derives it from the paper's eq. 16–21). In
// reverse j ≤ i counts from the end: a token's position is its place in its mode's order.
//
// Without the normaliser g = 1, e = 0 and o = y, with weights a + b q̂·k̂ (AFFINE) or b q̂·k̂ (PRODUCTS). The table is:
//
//            σ              κ τ         ρ           then
//     FWD    r_k            a           b r_q       o  = y
//     DQ     r_k            0           1           dq = b r_q (y − q̂ (q̂·y))
//     DK     b r_q          0           1           dk = r_k (y − k̂ (k̂·y))
//     DV     b r_q          a           r_k         dv = y
//
// With per-token log decays g_t, exp(G_i − G_j) replaces γ^(i−j), G_i = Σ_{t≤i} g_t (token_decay.cuh). DQ and DK then
// also compute the gradient of G, from q̂·dq̂ and k̂·dk̂ and sums that they have anyway, dG_i = row_i − column_i:
//
//     row_i    = (do_i/g_i)·Σ_{j≤i} exp(G_i − G_j) v_j − e_i Σ_{j≤i} exp(G_i − G_j) + q̂_i·dq̂_i
//     column_j = v_j·Σ_{i≥j} exp(G_i − G_j) do_i/g_i − Σ_{i≥j} exp(G_i − G_j) e_i + k̂_j·dk̂_j
//
// (AFFINE: a times the first sum; the sum of do_i·Σ v over i is the gradient of a. PRODUCTS: only q̂·dq̂ and k̂·dk̂.)
// Pairs of tokens that are both ≥ t must cancel exactly between Σ_{i≥t} row_i and Σ_{j≥t} column_j. Therefore DQ and DK use
// bit-identical 16-bit W_ij: the factors b r_q and r_k of a row of y, in the table under "then", are part of ρ and κ. In fp16
// only their mantissas are, and y is scaled by their exponents afterwards.
#pragma once
#include "params.cuh"
#include "ptx/shared_memory.cuh"

enum Mode { FWD, DQ, DK, DV };

struct TokenStats {  // the numbers of a token in (1)
  float inverse_g, e;
  float r_sigma;  // 1/‖·‖ of the row that σ scales: k for FWD and DQ, q for DK and DV
  float r_rho;    // 1/‖·‖ of the row that ρ or the projection scales: q for FWD and DQ, k for DK and DV
};

template <typename T, int MODE, Weights WEIGHTS = NORMALISED>
struct ModeTraits {
  static constexpr bool NORMALISED_WEIGHTS = WEIGHTS == NORMALISED;
  static constexpr bool REVERSE = MODE == DK || MODE == DV;
  // The state's rows are value columns (FWD, DV) or key columns (DQ, DK) of S [key, value].
  static constexpr bool VALUE_ROWS = MODE == FWD || MODE == DV;
  // Powers of γ from the state before a chunk to its first row, and from a chunk's last row to the state after it: in
  // reverse a state belongs to the token scanned next.
  static constexpr int POWERS_FROM_STATE = REVERSE ? 0 : 1, POWERS_TO_STATE = REVERSE ? 1 : 0;
  static constexpr bool PROJECTS = MODE == DQ || MODE == DK;  // whether the output is the gradient of a normalised row
  // The operands that are q or k, which RoPE rotates.
  static constexpr bool ROPE_A = MODE == FWD || MODE == DV;
  static constexpr bool ROPE_B = MODE == FWD || MODE == DV;
  static constexpr bool ROPE_C = MODE == DQ || MODE == DK;

  static DEVICE int token(const Params& p, int position) { return REVERSE ? p.N - 1 - position : position; }
  // Row `position` of a tensor of this head, from a table of the rows at position 0, in shared memory.
  static DEVICE u16* row(const Params& p, u32 heads, int tensor, int position) {
    const Strides& x = p.strides[tensor];
    return ld_shared_pointer(heads + 8 * tensor) + i64(position) * (REVERSE ? -x.token : x.token);
  }

  // The table's σ, τ, ρ, κ of a token, scaled. `scan` provides p and coefficient(), b of the head, which is read only
  // if needed.
  template <typename SCAN>
  static DEVICE float sigma(const SCAN& scan, const TokenStats& s) {
    if constexpr (!NORMALISED_WEIGHTS)
      return scale_sigma(scan.p) * (REVERSE ? scan.coefficient() * s.r_sigma : s.r_sigma);
    return scale_sigma(scan.p) * (REVERSE ? scan.coefficient() * s.r_sigma * s.inverse_g : s.r_sigma);
  }
  template <typename SCAN>
  static DEVICE float tau(const SCAN& scan, const TokenStats& s) {
    if constexpr (!NORMALISED_WEIGHTS) return MODE == DV ? scan.constant() : 1.f;
    return scale_tau(scan.p) * (MODE == FWD  ? 1.f
                                : MODE == DQ ? s.r_sigma
                                : MODE == DK ? -scan.coefficient() * s.e * s.r_sigma
                                             : s.inverse_g);
  }
  template <typename SCAN>
  static DEVICE float rho(const SCAN& scan, const TokenStats& s) {
    return scale_rho(scan.p) * (MODE == FWD  ? scan.coefficient() * s.r_rho
                                : MODE == DQ ? (NORMALISED_WEIGHTS ? s.inverse_g : 1.f)
                                : MODE == DV ? s.r_rho
                                             : 1.f);
  }
  template <typename SCAN>
  static DEVICE float kappa(const SCAN& scan, const TokenStats& s) {
    return scale_kappa(scan.p) * (MODE == DQ ? -s.e : 1.f);
  }
  // The factor of b in the sum that becomes the state's second vector: FWD's Σ k̂, DQ's Σ v, the adjoint's Σ do/g, or a Σ do.
  template <typename SCAN>
  static DEVICE float zeta(const SCAN& scan, const TokenStats& s) {
    if constexpr (!NORMALISED_WEIGHTS) return REVERSE ? scan.constant() : 1.f;
    return MODE == FWD ? scale_sigma(scan.p) * s.r_sigma : MODE == DQ ? 1.f : scale_tau(scan.p) * s.inverse_g;
  }
  // Limits σ decayed to the chunk's end, a 16-bit operand, so that 1/‖k‖ of a row of (almost) zeros times v is finite.
  static DEVICE float limit_sigma(float sigma) { return T::NARROW && VALUE_ROWS ? fminf(sigma, LARGEST_SIGMA) : sigma; }

  // DQ, DK: the factor of a whole row of y.
  template <typename SCAN>
  static DEVICE float row_factor(const SCAN& scan, float norm) {
    return (MODE == DQ ? scan.coefficient() : 1.f) * norm;
  }
  // DQ, DK: dx = out (y − along x), from 1/‖x‖ and x·y.
  struct Projection {
    float out, along;
  };
  template <typename SCAN>
  static DEVICE Projection projection(const SCAN& scan, float norm, float dot) {
    return {row_factor(scan, norm) * scale_y(scan.p), scan.p.normalize ? norm * norm * dot : 0.f};
  }

  // fp16: powers of two on both sides of (1) that keep 16-bit operands away from overflow and underflow.
  static constexpr float LARGEST_SIGMA = 2048.f;
  static DEVICE float range(const Params& p) { return T::NARROW ? p.range : 1.f; }
  static DEVICE float inverse_range(const Params& p) { return T::NARROW ? p.inverse_range : 1.f; }
  // The others are scaled differently from FWD because of 1/g, which falls with the sequence length; without it, alike.
  static constexpr bool AS_FWD = MODE == FWD || !NORMALISED_WEIGHTS;
  static DEVICE float scale_sigma(const Params& p) { return REVERSE && !AS_FWD ? range(p) : inverse_range(p); }
  static DEVICE float scale_tau(const Params& p) { return AS_FWD ? 1.f : scale_sigma(p); }
  static DEVICE float scale_rho(const Params& p) { return AS_FWD ? range(p) : MODE == DQ ? range(p) * range(p) : 1.f; }
  static DEVICE float scale_kappa(const Params& p) { return MODE == DQ && !AS_FWD ? range(p) * range(p) : 1.f; }
  static DEVICE float scale_y(const Params& p) { return AS_FWD ? 1.f : inverse_range(p); }
};

// 1/‖row‖ from ‖row‖². NORM_EPS is a define, from numerics.py, which has it for all backends.
DEVICE float reciprocal_norm(float square, int normalize) { return normalize ? rsqrtf(square + NORM_EPS) : 1.f; }
