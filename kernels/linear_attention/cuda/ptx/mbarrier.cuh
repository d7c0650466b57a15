// Barriers for some of a block's threads: in shared memory (mbarrier, sm_90), and the hardware's named barriers.
#pragma once
#include "ptx/numbers.cuh"

DEVICE void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Every thread arrives itself: as fast as one lane arriving after __syncwarp, and racecheck can follow it.
DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when the thread's copies so far are complete.
DEVICE void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A stage of a ring of buffers, and the number of passes through the ring mod 2, the parity for mbarrier_wait.
template <int STAGES>
struct PipelineState {
  static constexpr bool POWER_OF_TWO = (STAGES & STAGES - 1) == 0;
  int i = 0;
  u32 passed = 0;
  DEVICE int stage() const { return POWER_OF_TWO ? i & STAGES - 1 : i; }
  DEVICE int previous() const { return POWER_OF_TWO ? i - 1 & STAGES - 1 : i ? i - 1 : STAGES - 1; }
  DEVICE u32 phase() const { return POWER_OF_TWO ? i / u32(STAGES) & 1 : passed; }
  DEVICE void advance() {
    if (++i == STAGES && !POWER_OF_TWO) i = 0, passed ^= 1;
  }
};
