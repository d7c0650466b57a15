// Shared memory: 32-bit addresses, loads and stores of one instruction each, and the swizzle of a tile.
#pragma once
#include "ptx/numbers.cuh"

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE u32 ld_shared_b32(u32 address) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
DEVICE uint4 ld_shared_v4(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
DEVICE u16* ld_shared_pointer(u32 address) {
  u16* r;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(r) : "r"(address) : "memory");
  return r;
}
DEVICE void st_shared_b32(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
DEVICE void st_shared_v4(u32 address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
// Stores to global memory in one instruction: the compiler was seen to split an assignment of uint4 into four, and to
// branch around one on a condition.
DEVICE void st_global_v4(void* to, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}
DEVICE void st_global_b32_if(void* to, u32 x, bool condition) {
  asm volatile(
      "{\n.reg .pred condition;\nsetp.ne.u32 condition, %2, 0;\n@condition st.global.b32 [%0], %1;\n}" ::"l"(to),
      "r"(x), "r"(u32(condition)));
}

// A tile of ROWS rows of 16-bit numbers consists of panels of 64 columns, one after another, with rows of 128 bytes.
constexpr int PANEL_COLUMNS = 64, ROW_BYTES = 128;  // of a panel

// The byte offset of 16-byte piece `piece` (eight columns) of row `row`. The exclusive or spreads the eight rows that
// an ldmatrix reads at once over all banks; it is also the 128-byte swizzle that wgmma reads.
template <int ROWS>
DEVICE u32 swizzled(u32 row, u32 piece) {
  return (piece / 8) * ROWS * ROW_BYTES + row * ROW_BYTES + (((piece % 8) ^ (row & 7)) << 4);
}
