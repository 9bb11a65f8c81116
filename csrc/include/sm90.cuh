// Hopper instructions: transaction barriers, bulk tensor copies, warpgroup matrix products.
#pragma once

#include <cuda.h>

#include "ptx.cuh"

namespace vegas {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Arrives when the thread's cp.async so far are done; the barrier's count includes this arrival.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Ordinary shared-memory stores become visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// One box of a 5-d tensor, from the start of its first two dimensions; what lies outside of the
// tensor arrives as zeros.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map,
                                         uint32_t barrier, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %3, %4, %5, %6}], [%2];\n" ::"r"(target),
      "l"(map), "r"(barrier), "r"(0), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Shared memory by its 32-bit address, which costs one register less than a pointer.
__device__ __forceinline__ void clear_shared_16(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint32_t (&value)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint32_t (&value)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(address), "r"(value[0]), "r"(value[1])
               : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&value)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&value)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n"
               : "=r"(value[0]), "=r"(value[1])
               : "r"(address)
               : "memory");
}

// Two bf16 at a time.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.bf16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;\n" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ float2 unpack_bf16x2(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Registers per thread of a warpgroup, all four warps at once.
template <int N>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}
// Keeps the compiler from reading accumulators ahead of a wait.
template <int N>
__device__ __forceinline__ void wgmma_settle(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Shared-memory operand in rows of 128 swizzled bytes; `leading` and `stride` in bytes.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, int leading, int stride) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         (static_cast<uint64_t>(leading >> 4) << 16) | (static_cast<uint64_t>(stride >> 4) << 32) |
         (1ull << 62);
}

#define VEGAS_R8(v, i)                                                                       \
  "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), \
      "+f"(v[i + 6]), "+f"(v[i + 7])

#define VEGAS_WGMMA_64(TYPE)                                                                 \
  asm volatile(                                                                              \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                            \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
      "%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}\n"     \
      : VEGAS_R8(c, 0), VEGAS_R8(c, 8), VEGAS_R8(c, 16), VEGAS_R8(c, 24)                     \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(TRANS))

#define VEGAS_WGMMA_128(TYPE)                                                                \
  asm volatile(                                                                              \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                           \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
      "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
      "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "   \
      "{%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}\n"                                           \
      : VEGAS_R8(c, 0), VEGAS_R8(c, 8), VEGAS_R8(c, 16), VEGAS_R8(c, 24), VEGAS_R8(c, 32),   \
        VEGAS_R8(c, 40), VEGAS_R8(c, 48), VEGAS_R8(c, 56)                                    \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(TRANS))

// C (64 x N) += or = A (64 x 16, registers) B (16 x N, shared). TRANS: B is stored k-major.
template <typename T, int TRANS>
__device__ __forceinline__ void wgmma(float (&c)[32], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    VEGAS_WGMMA_64("f16");
  } else {
    VEGAS_WGMMA_64("bf16");
  }
}
template <typename T, int TRANS>
__device__ __forceinline__ void wgmma(float (&c)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    VEGAS_WGMMA_128("f16");
  } else {
    VEGAS_WGMMA_128("bf16");
  }
}

}  // namespace vegas
