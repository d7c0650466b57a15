// Asynchronous copies from global to shared memory (cp.async), 16 or 4 bytes per thread; prefetches.
#pragma once
#include "ptx/numbers.cuh"

// With valid = false, they write zeros and read nothing.
DEVICE void copy_async_16(u32 dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0));
}
DEVICE void copy_async_4(u32 dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0));
}
// To L2 alone, for loads later on.
DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}
