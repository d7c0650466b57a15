// Linear attention in fp32 with a decay that all channels share, on tensor cores (sm_80 on): scans, and what is
// elementwise around them. docs/kernel.md, "A shared decay in fp32".
#include "tf32_rows.cuh"
#include "tf32_scan.cuh"

extern __shared__ __align__(128) char tf32_smem[];

// A block has a slice of c's channels, a head and a segment, or with STATES a sub-segment: grid (slices, B·H, segments).
template <int D, int WARPS, int CHUNK, bool LAST, bool STATES, bool NORMS, int BLOCKS>
__global__ void __launch_bounds__(32 * (WARPS + 1), BLOCKS) tf32_scan(const __grid_constant__ Tf32Params p) {
  using Scan = Tf32Scan<D, WARPS, CHUNK, LAST, STATES, NORMS>;
  static_assert(sizeof(typename Scan::Shared) == (STATES ? STATES_BYTES : SCAN_BYTES), "shared of tf32.py");
  Scan(p, *reinterpret_cast<typename Scan::Shared*>(tf32_smem)).run();
}

// From what each sub-segment adds to the states after them. A thread has a number of the state.
template <int D>
__global__ void tf32_prefix(const __grid_constant__ Tf32Params p) {
  constexpr int SIZE = (D + 1) * (D + 1);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= SIZE) return;
  float before = p.initial ? p.initial[i64(blockIdx.y) * SIZE + i] : 0.f;
  const int last = (p.N - 1) / p.segment_len * p.sub_segments;  // the last segment's first sub-segment
  for (int sub_segment = 0; sub_segment < last; sub_segment++) {
    const i64 head = i64(sub_segment) * gridDim.y + blockIdx.y;
    float& at = p.states[head * SIZE + i];
    before = at = at + before * p.decays[head];
  }
}
