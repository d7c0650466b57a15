// Small kernels, right and wrong, on which the emulator itself is tested. One block each.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

extern __shared__ __align__(1024) u16 tiles[];  // dynamic
__device__ __forceinline__ u32 address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra wait;\n"
      "done:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\ncp.async.commit_group;" ::"r"(to), "l"(from), "r"(16)
               : "memory");
}
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// ------------------------------------------------------------------------------- registers (test_scalar, test_control)
extern "C" __global__ void integers(const int* a, const int* b, int* out) {
  int i = threadIdx.x, x = a[i], y = b[i];
  u32 ux = x, uy = y;
  long long wide = (long long)x * y;
  int found[] = {x / y,
                 x % y,
                 int(ux / uy),
                 int(ux % uy),
                 __mulhi(x, y),
                 int(__umulhi(ux, uy)),
                 int(wide >> 20),
                 int((u64(uy) << 32 | ux) << (x & 31) >> 32),
                 x >> (y & 63),
                 x << (y & 31),
                 min(x, y),
                 int(max(ux, uy)),
                 __shfl_xor_sync(0xffffffffu, x, 5),
                 __shfl_down_sync(0xffffffffu, x, 2, 8),
                 __shfl_sync(0xffffffffu, x, i * 7),
                 (x & y) | (~x ^ (y | 5)),
                 __all_sync(0xffffffffu, x > -2000000000) + 2 * __any_sync(0xffffffffu, x > 2000000000)};
#pragma unroll
  for (int k = 0; k < 17; k++) out[k * blockDim.x + i] = found[k];
}
extern "C" __global__ void floats(const float* a, const float* b, float* out) {
  int i = threadIdx.x, T = blockDim.x;
  float x = a[i], y = b[i];
  out[i] = __fmaf_rn(x, y, 1.f / 3.f), out[T + i] = __fmaf_rd(x, y, 1.f / 3.f), out[2 * T + i] = x / y;
  out[3 * T + i] = fminf(x, y), out[4 * T + i] = __float2int_rn(x), out[5 * T + i] = __float2int_rd(x);
  out[6 * T + i] = exp2f(y), out[7 * T + i] = rsqrtf(x * x), out[8 * T + i] = x < y ? x : -y;
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(y));
  out[9 * T + i] = __uint_as_float(pair), out[10 * T + i] = __uint_as_float(pair & 0xffff0000u);
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(y));
  out[11 * T + i] = __uint_as_float(pair);
}
// Lanes diverge, for different times, and converge again at the shuffle.
extern "C" __global__ void branches(int* out) {
  int i = threadIdx.x, x = 0;
  for (int k = 0; k < i % 7; k++) {
    if (k % 2)
      x += k;
    else if (i % 3 == 0)
      continue;
    else
      x -= 1;
    if (x > 5) break;
  }
  out[i] = x + 1000 * __shfl_xor_sync(0xffffffffu, x, 1);
}

extern "C" __global__ void running_sum(const float* a, float* out) {  // in fp64, over 16 lanes
  double sum = a[threadIdx.x];
  for (int d = 1; d < 16; d *= 2) {
    double before = __shfl_up_sync(0xffffffffu, sum, d, 16);
    if (threadIdx.x % 16 >= d) sum += before;
  }
  out[threadIdx.x] = float(sum - __shfl_sync(0xffffffffu, sum, 0, 16));
}

// --------------------------------------------------------- memory (test_memory, test_race, test_copies, test_mbarrier)
extern "C" __global__ void past_the_end(const int* a, int* out, int shift) {
  out[threadIdx.x] = a[threadIdx.x + shift];
}
extern "C" __global__ void prefetch_past_the_end(const int* a, int shift) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(a + threadIdx.x + shift));
}
extern "C" __global__ void misaligned(const char* a, int* out) {
  out[threadIdx.x] = *reinterpret_cast<const int*>(a + 4 * threadIdx.x + (threadIdx.x == 9));
}
extern "C" __global__ void reverse(const int* a, int* out, int sync) {
  __shared__ int tile[128];
  tile[threadIdx.x] = a[threadIdx.x];
  if (sync) __syncthreads();
  out[threadIdx.x] = tile[127 - threadIdx.x];
}
extern "C" __global__ void overwrite(const int* a, int* out, int sync) {  // a read, and then a write elsewhere
  __shared__ int tile[128];
  tile[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[127 - threadIdx.x];
  if (sync) asm volatile("bar.sync 3, 128;" ::: "memory");
  tile[threadIdx.x] = 0;
}
extern "C" __global__ void read_unwritten(float* out) {
  __shared__ float tile[32];
  if (threadIdx.x < 16) tile[threadIdx.x] = 1.f;
  __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x];
}
extern "C" __global__ void copy(const int* a, int* out, int wait) {  // by cp.async
  __shared__ __align__(16) int tile[128];
  copy16(address(tile + 4 * threadIdx.x), a + 4 * threadIdx.x);
  if (wait) copy_wait();
  out[threadIdx.x] = tile[4 * threadIdx.x];
}
extern "C" __global__ void leave_early(int* out, int early) {
  if (threadIdx.x < early) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
extern "C" __global__ void hand_over(const int* a, int* out, int arrivals) {  // warp 0 writes, the others wait
  __shared__ int tile[32];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) barrier_init(address(&barrier), arrivals);
  __syncthreads();
  if (threadIdx.x < 32) {
    tile[threadIdx.x] = a[threadIdx.x];
    barrier_arrive(address(&barrier));
  } else {
    barrier_wait(address(&barrier), 0);
    out[threadIdx.x - 32] = tile[threadIdx.x % 32];
  }
}
extern "C" __global__ void copy_arrives(const int* a, int* out,
                                        int early) {  // cp.async that arrives at an mbarrier by itself
  __shared__ __align__(16) int tile[128];
  __shared__ u64 barrier;
  if (threadIdx.x == 0) barrier_init(address(&barrier), 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    copy16(address(tile + 4 * threadIdx.x), a + 4 * threadIdx.x);
    if (early)
      barrier_arrive(address(&barrier));
    else
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(&barrier)) : "memory");
  } else {
    barrier_wait(address(&barrier), 0);
    for (int i = threadIdx.x - 32; i < 128; i += 32) out[i] = tile[i];
  }
}

// ------------------------------------------------------------------------------------------ tensor cores (test_tensor)
// c[16×8] = a[16×8]·b[8×8] of one warp, tf32.
extern "C" __global__ void multiply_tf32(const float* a, const float* b, float* c) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float d[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[8 * g + t])), "r"(__float_as_uint(a[8 * (g + 8) + t])),
        "r"(__float_as_uint(a[8 * g + t + 4])), "r"(__float_as_uint(a[8 * (g + 8) + t + 4])),
        "r"(__float_as_uint(b[8 * t + g])), "r"(__float_as_uint(b[8 * (t + 4) + g])));
  for (int i = 0; i < 4; i++) c[8 * (g + i / 2 * 8) + 2 * t + i % 2] = d[i];
}
// c[16×8] = a[16×16]·b[16×8] of one warp, bf16; the operands in shared memory, row by row.
extern "C" __global__ void multiply(const u16* a, const u16* b, float* c, u16* back) {
  __shared__ __align__(16) u16 left[256], right[128], out[64];
  for (int i = threadIdx.x; i < 256; i += 32) left[i] = a[i];
  for (int i = threadIdx.x; i < 128; i += 32) right[i] = b[i];
  __syncwarp();
  u32 x[4], y[2];
  int lane = threadIdx.x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address(left + lane % 16 * 16 + lane / 16 * 8))
               : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(y[0]), "=r"(y[1])
               : "r"(address(right + lane % 16 * 8))
               : "memory");
  float d[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  for (int i = 0; i < 4; i++) c[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = d[i];
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address(out + lane % 8 * 8)),
               "r"(x[0])
               : "memory");
  __syncwarp();
  for (int i = lane; i < 64; i += 32) back[i] = out[i];
}

// d[64×64] = a·bᵀ of one warpgroup, 64 deep. a: [64 rows, 64], b: [64 columns, 64], or the transpose of either.
// `mistake`: 1 no fence.proxy.async, 2 the accumulators are read before the wait, 3 an operand is overwritten.
__device__ __forceinline__ u32 swizzled(u32 row, u32 column) { return row * 64 + (column ^ (row % 8 * 8)); }
__device__ __forceinline__ u64 descriptor(u32 at) {
  return u64(at >> 4) | u64(8192 >> 4) << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define PRODUCT(TRANSPOSED)                                                                                          \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, " TRANSPOSED ";\n}\n"    \
      : SIXTEEN(d, 0), SIXTEEN(d, 16)                                                                                \
      : "l"(x), "l"(y), "r"(int(k > 0)))

template <bool TRANSPOSED>
__device__ __forceinline__ void group_product(const u16* a, const u16* b, float* c, int mistake) {
  u16 *left = tiles, *right = tiles + 4096;
  for (int i = threadIdx.x; i < 4096; i += 128)
    left[swizzled(i / 64, i % 64)] = a[i], right[swizzled(i / 64, i % 64)] = b[i];
  if (mistake != 1) fence_proxy();
  __syncthreads();
  float d[32], early = 0.f;
  for (int i = 0; i < 32; i++) d[i] = 0.f;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u64 x = descriptor(address(left) + k * (TRANSPOSED ? 2048 : 32)),
        y = descriptor(address(right) + k * (TRANSPOSED ? 2048 : 32));
    if (TRANSPOSED)
      PRODUCT("1, 1");
    else
      PRODUCT("0, 0");
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if (mistake == 2) asm volatile("mov.f32 %0, %1;" : "=f"(early) : "f"(d[0]));
  if (mistake == 3) right[threadIdx.x] = 0;
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
  if (mistake == 2) d[0] = early;
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 32; i++) c[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

extern "C" __global__ void group_multiply(const u16* a, const u16* b, float* c, int mistake) {
  group_product<false>(a, b, c, mistake);
}
extern "C" __global__ void group_multiply_transposed(const u16* a, const u16* b, float* c, int mistake) {
  group_product<true>(a, b, c, mistake);
}

// d[64×8] = a·bᵀ of one warpgroup, from step `first` to `end` of 16 of K's 128. b: [8, 128], two swizzle atoms, one behind
// the other. a: [64, 128] in registers (A = 0) or in two panels behind b (1), or its transpose [128, 64] there (2).
// `poked`: which numbers of shared memory are overwritten before the wait.
#define NARROW(TYPE, A, B, ADD, FLAGS, ...)                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD                                                \
               ", 0;\n"                                                                               \
               "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE " {%0,%1,%2,%3}, " A ", " B \
               ", p, 1, 1, " FLAGS ";\n}\n"                                                           \
               : FOUR(d, 0)                                                                           \
               : __VA_ARGS__, "l"(y), "r"(int(k > first)))
#define NARROW_REGISTERS(TYPE) \
  NARROW(TYPE, "{%4,%5,%6,%7}", "%8", "%9", "0", "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]))
#define NARROW_SHARED(TYPE, TRANSPOSED) NARROW(TYPE, "%4", "%5", "%6", TRANSPOSED ", 0", "l"(at))

template <int A, bool HALF>
__global__ void narrow(const u16* a, const u16* b, float* c, int first, int end, int fence, const u16* poked) {
  u16 *left = tiles + 1024, *right = tiles;
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = threadIdx.x; i < 1024; i += 128) right[i % 128 / 64 * 512 + swizzled(i / 128, i % 64)] = b[i];
  if (A == 1)
    for (int i = threadIdx.x; i < 8192; i += 128) left[i % 128 / 64 * 4096 + swizzled(i / 128, i % 64)] = a[i];
  if (A == 2)
    for (int i = threadIdx.x; i < 8192; i += 128) left[swizzled(i / 64, i % 64)] = a[i];
  if (fence) fence_proxy();
  __syncthreads();
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
  for (int k = first; k < end; k++) {
    u64 y = descriptor(address(right) + k / 4 * 1024 + k % 4 * 32);
    if (A == 0) {
      u32 x[4];
      for (int i = 0; i < 4; i++)
        x[i] = *reinterpret_cast<const u32*>(a + (row + i % 2 * 8) * 128 + k % 8 * 16 + i / 2 * 8 + lane % 4 * 2);
      if (HALF)
        NARROW_REGISTERS("f16");
      else
        NARROW_REGISTERS("bf16");
    } else {
      u64 at = descriptor(address(left) + (A == 2 ? k * 2048 : k / 4 * 8192 + k % 4 * 32));
      if (A == 1 && HALF)
        NARROW_SHARED("f16", "0");
      else if (A == 1)
        NARROW_SHARED("bf16", "0");
      if (A == 2 && HALF)
        NARROW_SHARED("f16", "1");
      else if (A == 2)
        NARROW_SHARED("bf16", "1");
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  for (int i = threadIdx.x; i < (A ? 9216 : 1024); i += 128)
    if (poked[i]) tiles[i] = 0;
  asm volatile("wgmma.wait_group.sync.aligned 0;" : FOUR(d, 0)::"memory");
  for (int i = 0; i < 4; i++) c[(row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
