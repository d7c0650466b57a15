// The scan on Hopper (sm_90a): warpgroups with roles, which synchronise at a few barriers, instead of phases.
//
//     token stats  a warpgroup: per-token computations. RoPE in place, norms, (1)'s coefficients, in DQ e, which DK and
//                  DV read; and, on tensor cores, the running sums Σ τ c and Σ ζ b (in `states`, outputs keep them)
//     scores       a warpgroup: W from X = A Bᵀ, in 16 bits, to shared memory, and the normaliser. It also copies:
//                  tiles into a ring of stages, asynchronously, and y, which outputs write there, to global memory
//     outputs      a warpgroup for every 64 columns of y and c: y, and the state
//     copier       a warpgroup that only copies, in unsegmented scans
//
// A block has all columns of a head, or (UNSEGMENTED) 64 of them: few long sequences then fill the card without being
// cut into segments.
//
// Each stage passes three barriers: full (tiles are loaded), ready (token stats have processed it), empty (outputs and
// token stats are done with it, and y can be stored). A fourth, scored, says that W is written; W is double-buffered,
// so scores are a chunk ahead of outputs.
//
// A role is a struct of functions on the block (scan_sm90_block.cuh): a thread runs one role's `run` from its first chunk
// to its last.
//
// TMA is not used: cp.async copies directly from strided views, forwards or reversed, while TMA would need a tensor map
// for every tensor and stride, which the host encodes for each new layout; it was not tried.
#pragma once
#include "scan_sm90_outputs.cuh"
#include "scan_sm90_scores.cuh"
#include "scan_sm90_token_stats.cuh"

// Registers per thread, by role. A block starts with the same number in every thread, and setmaxnreg moves registers to
// the outputs, which hold the state. No kernel spills with these budgets
// (tests/kernels/linear_attention/cuda/test_compile.py); if one role needs more, another can spare them.
struct RegisterBudget {
  int outputs, token_stats, scores, copier;
};
template <typename CONFIG>
__device__ constexpr RegisterBudget register_budget() {
  constexpr bool REVERSE = CONFIG::Traits::REVERSE;
  // A single group of outputs has enough registers to compute the scales of the past before waiting for it.
  if (CONFIG::UNSEGMENTED) return {240, 120, 112, 40};
  if (CONFIG::D == 64) {
    // Two blocks share a multiprocessor. The scores of dk and dv have a vector of τ, too: token stats leave them
    // registers.
    const int moved = REVERSE && !CONFIG::STATE_ONLY ? 8 : 0;
    return {128, 48 - moved, 64 + moved, 0};
  }
  // Scores that keep powers of γ get registers in reverse from token stats, which compute no norms there, else from
  // outputs.
  const int powers = CONFIG::KEEPS_POWERS ? 16 : 0;
  if (CONFIG::FACTORS_DECAYS && !CONFIG::STATE_ONLY) {
    // Token stats need more registers to compute e and the norms, and fewer in reverse.
    const int moved = REVERSE ? -8 : 8;
    return {176, 80 + moved, 80 - moved, 0};
  }
  if (REVERSE) return {176, 88 - powers, 72 + powers, 0};
  return {176 - powers / 2, 88, 72 + powers, 0};
}

template <typename CONFIG>
struct ScanSm90 {
  static constexpr int GROUPS = CONFIG::GROUPS, WARPGROUPS = GROUPS + 2 + CONFIG::UNSEGMENTED;
  static_assert(CONFIG::UNSEGMENTED || WARPGROUPS * WARPGROUP == SCAN_THREADS, "Variant.threads of variants.py");
  static constexpr RegisterBudget REGISTERS = register_budget<CONFIG>();
  // A multiprocessor's 65536 registers over the threads of one block (D = 128) or two, rounded down to multiples of 8.
  static constexpr int AT_LAUNCH = CONFIG::D == 64 ? 80 : 128;
  static constexpr int BUDGET =
      GROUPS * REGISTERS.outputs + REGISTERS.token_stats + REGISTERS.scores + REGISTERS.copier;
  static_assert(BUDGET <= WARPGROUPS * AT_LAUNCH, "a role would wait for ever for registers");

  BlockSm90<CONFIG> block;

  DEVICE ScanSm90(const Params& p, char* smem) : block(p, smem) {}
  DEVICE void run() {
    const int warp = block.uniform_warp();
    if (warp < 4 * GROUPS) {
      increase_registers<REGISTERS.outputs>();
      OutputsSm90<CONFIG>::run(block);
    } else if (warp < 4 * GROUPS + 4) {
      decrease_registers<REGISTERS.token_stats>();
      TokenStatsSm90<CONFIG>::run(block);
    } else if (!CONFIG::UNSEGMENTED || warp < 4 * GROUPS + 8) {
      decrease_registers<REGISTERS.scores>();
      ScoresSm90<CONFIG>::template run<!CONFIG::STATE_ONLY, !CONFIG::UNSEGMENTED>(block);
    } else {
      decrease_registers<REGISTERS.copier>();
      ScoresSm90<CONFIG>::template run<false, true>(block);
    }
  }
};
