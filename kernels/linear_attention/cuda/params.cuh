// What a launch passes: struct Params, which launch.py packs.
#pragma once
#include "ptx/numbers.cuh"

constexpr int THREADS = 128;  // of a block of the sm_80 scan, of `prefix` and of `row_products`

enum Decay { NO_DECAY, PER_HEAD, PER_TOKEN };  // a constant γ of each head, or a decay of each token's own

// Of a token j for a token i, with x = q̂_i·k̂_j: (1 + b x)/g_i, the normalised form; a + b x; and b x, where a = 0. The last two
// have no normaliser.
enum Weights { NORMALISED, AFFINE, PRODUCTS };

enum Operand { A, B, C, QK, Y, O };  // of Params::tensors; QK: the rows whose gradient a mode finds, q for DQ, k for DK

struct State {  // fp32: S [BH, D, D] key by value, key vector [BH, D], value vector [BH, D]; any may be null
  float *S, *k, *v;
};

struct Strides {  // of [B, N, H, D], in elements; the last dimension is contiguous
  i64 batch, head, token;
};

struct Params {
  // Pointers, which every call has its own.
  void* tensors[6];          // by Operand; o where DQ computes e
  float *g, *rq, *rk;        // [BH, N]: written by FWD, read by the others
  float* e;                  // [BH, N]: (do·o)/g; do·o is the delta of FlashAttention
  const float* coefficient;  // b per head [H], or null: b_value
  const float* constant;     // AFFINE: a per head [H], or null: a_value
  const float* log_decay;    // natural logarithm: [H] with PER_HEAD, [B, N, H] with PER_TOKEN
  const float *cos, *sin;    // [N, rope], with ROPE
  State initial, final;      // of the whole sequence
  float* scratch;  // [BH, (segments − 1)·sub_segments, STATE_SIZE]: the states after all sub-segments but the last's
  const float* n_initial;  // [BH] or null
  float* db;               // [BH, segments]: DQ's sums of q̂·y
  float* da;               // AFFINE, [BH, segments]: DQ's sums of do·Σ v; on sm_90a 8 of each, of warps
  // PER_TOKEN, by position: what `sum_decays` finds before a scan (token_decay.cuh), then the parts of the gradient.
  float* decay_cumsum;    // Γ [BH, N], the cumulative log2 decay from the chunk's start
  float *to_end, *count;  // [BH, N]
  float* chunks;          // [BH, 2, chunks]
  float* count_out;       // [BH] or null
  float* dG;  // [BH, N]: DQ's rows and DK's columns; on sm_90a [2, BH, N], addends of outputs and of token stats
  float* boundaries;        // [BH, boundaries, BOUNDARY_SIZE]: what crosses them
  const float* dG_columns;  // `decay_gradient`: DK's dG, where dG is DQ's
  float* span_sums;         // `decay_gradient`: [BH, 2, spans], of each span of tokens, high and low part
  float* d_log_decay;       // `decay_gradient`: its result, [B, N, H]

  // The layout, which follows from shapes, strides and options.
  Strides strides[6];               // of the tensors
  int N, H, segments, segment_len;  // segment_len: tokens, a multiple of the chunk
  int sub_segments;                 // of a segment: `states` scans each in a block of its own
  int normalize;
  float a_value, b_value;
  float range, inverse_range;  // fp16: a power of two that keeps 16-bit operands in range; bf16: 1
};

// Python's side of this, which launch.py hands to the compiler.
static_assert(THREADS == LAUNCH_THREADS, "THREADS of launch.py");
#if __has_builtin(__builtin_offsetof)  // not in NVRTC 13.0
static_assert(__builtin_offsetof(Params, strides) == POINTERS_BYTES, "POINTERS of launch.py");
#endif
static_assert(sizeof(Params) == POINTERS_BYTES + LAYOUT_BYTES, "LAYOUT of launch.py");

// Where a head of a sequence begins in one of the tensors.
DEVICE u16* head_of(const Params& p, int tensor, int batch, int h) {
  return static_cast<u16*>(p.tensors[tensor]) + batch * p.strides[tensor].batch + h * p.strides[tensor].head;
}
