// Segments of a sequence: the states before and after them, and the number of tokens before.
//
// `states` computes each segment's own state, `prefix` sums them in a fixed order, and every scan starts from the state
// before its segment. A scratch state is S [D, D] (key, value), then two vectors [D], of keys and of values.
#pragma once
#include "modes.cuh"

template <int D>
constexpr int STATE_SIZE = D * D + 2 * D;  // fp32 numbers in a scratch state

// The address of the state after a segment, that is, after its last sub-segment.
template <int D>
DEVICE float* scratch_state(const Params& p, int bh, int segment) {
  return p.scratch + (i64(bh) * (p.segments - 1) * p.sub_segments + (segment + 1) * p.sub_segments - 1) * STATE_SIZE<D>;
}

// Source or target of a state's S [D, D], Σ τ c and Σ ζ b, with the scale of each.
template <typename POINTER>
struct StateAt {
  POINTER S, c, b;
  float scale, scale_c, scale_b;
};
using StateSource = StateAt<const float*>;
using StateTarget = StateAt<float*>;

// States in and out of a mode's scan: the state of `states` and `prefix` before a segment, and the caller's. In reverse
// a state belongs to the token scanned next, γ times its value at the one before, so the caller's states are used and
// returned without a decay. (PER_TOKEN: with one more decay on the way out, token_decay.cuh.)
template <typename T, int MODE, int D, Weights WEIGHTS = NORMALISED>
struct SegmentStates {
  using Traits = ModeTraits<T, MODE, WEIGHTS>;
  static_assert(STATE_SIZE<D> == LAUNCH_STATE_SIZE, "state_size of variants.py");

  static DEVICE StateTarget before_segment(const Params& p, int bh, int segment) {
    float* S = scratch_state<D>(p, bh, segment - 1);
    float *k = S + D * D, *v = k + D;
    return {S, Traits::VALUE_ROWS ? v : k, Traits::VALUE_ROWS ? k : v, 1.f, 1.f, 1.f};
  }
  static DEVICE StateSource initial(const Params& p, int bh, int segment) {
    if (segment) {
      StateTarget before = before_segment(p, bh, segment);
      return {before.S, before.c, before.b, before.scale, before.scale_c, before.scale_b};
    }
    const float *S = p.initial.S + i64(bh) * D * D, *k = p.initial.k + bh * D, *v = p.initial.v + bh * D;
    float s = Traits::scale_sigma(p), sv = Traits::REVERSE ? Traits::scale_tau(p) : 1.f;
    if (Traits::VALUE_ROWS) return {S, v, k, s, sv, s};
    return {S, k, v, s, s, sv};
  }
  // log2_decay: with PER_TOKEN, the log2 of the decay between the last token scanned and the state; else 0.
  static DEVICE StateTarget final(const Params& p, int bh, float log2_decay) {
    float *S = p.final.S + i64(bh) * D * D, *k = p.final.k + bh * D, *v = p.final.v + bh * D;
    float more = exp2f(log2_decay);
    float s = more / Traits::scale_sigma(p), st = more / Traits::scale_tau(p);
    return {S, Traits::VALUE_ROWS ? v : k, Traits::VALUE_ROWS ? k : v, s, st, s};
  }
  // Index in S [key, value], from the row (a column of c) and the column (of b) of the state in registers.
  static DEVICE int element(int row, int column) { return Traits::VALUE_ROWS ? column * D + row : row * D + column; }
};

// Σ γ^i over i < n: the decayed count of n tokens.
template <bool DECAY>
DEVICE float count_tokens(float log2_decay, int n) {
  float x = DECAY ? log2_decay * LN_2 : 0.f;
  return x == 0.f ? float(n) : expm1f(x * float(n)) / expm1f(x);
}
// The decayed count of the tokens before position `begin`.
template <bool DECAY>
DEVICE float tokens_before(const Params& p, int bh, float log2_decay, int begin) {
  float n0 = p.n_initial ? p.n_initial[bh] : 0.f;
  return (DECAY ? n0 * exp2f(log2_decay * float(begin)) : n0) + count_tokens<DECAY>(log2_decay, begin);
}
