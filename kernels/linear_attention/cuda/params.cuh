// The arguments of a launch: struct Params, which launch.py packs.
#pragma once
#include "ptx/numbers.cuh"

constexpr int THREADS = 128;  // per block of the sm_80 scan, of `prefix` and of `row_products`

enum Decay { NO_DECAY, PER_HEAD, PER_TOKEN };  // none; a constant γ per head; a decay per token

// The weight of token j for token i, with x = q̂_i·k̂_j: (1 + b x)/g_i, normalised; a + b x; or b x, if a = 0. The last
// two have no normaliser.
enum Weights { NORMALISED, AFFINE, PRODUCTS };

enum Operand { A, B, C, QK, Y, O };  // indices of Params::tensors; QK: the rows of the gradient, q for DQ, k for DK

struct State {  // fp32: S [BH, D, D] key by value, key vector [BH, D], value vector [BH, D]; any may be null
  float *S, *k, *v;
};

struct Strides {  // of a [B, N, H, D] tensor, in elements; the last dimension is contiguous
  i64 batch, head, token;
};

struct Params {
  // Pointers, different in each call.
  void* tensors[6];          // by Operand; O only if DQ computes e
  float *g, *rq, *rk;        // [BH, N]: written by FWD, read by the others
  float* e;                  // [BH, N]: (do·o)/g; do·o is the delta of FlashAttention
  const float* coefficient;  // b per head [H], or null: b_value
  const float* constant;     // AFFINE: a per head [H], or null: a_value
  const float* log_decay;    // natural logarithm: [H] with PER_HEAD, [B, N, H] with PER_TOKEN
  const float *cos, *sin;    // [N, rope], with ROPE
  State initial, final;      // before and after the whole sequence
  float* scratch;  // [BH, (segments − 1)·sub_segments, STATE_SIZE]: the states after all sub-segments but the last's
  const float* n_initial;  // [BH] or null
  float* db;               // [BH, segments]: DQ's sums of q̂·y
  float* da;               // AFFINE, [BH, segments]: DQ's sums of do·Σ v; on sm_90a 8 of each, one per warp
  // PER_TOKEN, by position: the results of `sum_decays` before a scan (token_decay.cuh), then parts of the gradient.
  float* decay_cumsum;    // Γ [BH, N], the cumulative log2 decay from the chunk's start
  float *to_end, *count;  // [BH, N]
  float* chunks;          // [BH, 2, chunks]
  float* count_out;       // [BH] or null
  float* dG;  // [BH, N]: DQ's rows and DK's columns; on sm_90a [2, BH, N], addends of outputs and of token stats
  float* boundaries;        // [BH, boundaries, BOUNDARY_SIZE]: struct Boundary
  const float* dG_columns;  // `decay_gradient`: DK's dG (dG is DQ's)
  float* span_sums;         // `decay_gradient`: [BH, 2, spans], the sum of each span of tokens, high and low part
  float* d_log_decay;       // `decay_gradient`: its result, [B, N, H]

  // The layout, which follows from shapes, strides and options.
  Strides strides[6];               // of the tensors
  int N, H, segments, segment_len;  // segment_len: tokens, a multiple of the chunk
  int sub_segments;                 // per segment; `states` scans each one in a separate block
  int normalize;
  int divide;   // FWD: y by the normaliser
  int columns;  // of a row of the tensors, a multiple of 8, at most D: kernels read zeros for the others
  float a_value, b_value;
  float range, inverse_range;  // fp16: a power of two that keeps 16-bit operands in range; bf16: 1
};

// Checks against the sizes that variants.py passes to the compiler.
static_assert(THREADS == LAUNCH_THREADS, "THREADS of variants.py");
#if __has_builtin(__builtin_offsetof)  // not in NVRTC 13.0
static_assert(__builtin_offsetof(Params, strides) == POINTERS_BYTES, "POINTERS of launch.py");
#endif
static_assert(sizeof(Params) == POINTERS_BYTES + LAYOUT_BYTES, "LAYOUT of launch.py");

// The tokens of a segment: the last ones may have fewer than the others, or none.
DEVICE int tokens_of_segment(const Params& p, int segment) {
  return max(0, min(p.segment_len, p.N - segment * p.segment_len));
}

// The address of a head of a sequence in one of the tensors.
DEVICE u16* head_of(const Params& p, int tensor, int batch, int h) {
  return static_cast<u16*>(p.tensors[tensor]) + batch * p.strides[tensor].batch + h * p.strides[tensor].head;
}
