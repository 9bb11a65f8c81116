// Prefix sums of work units per request: launched once per step, read by every layer's attention.
//
//   prefix[b] = sum over requests before b of their 64-token units, for one KV head
//
// One block; limited by launch latency.
#include <cuda_runtime.h>

#include "include/launch.h"
#include "include/schedule.h"

namespace vegas {

constexpr int kScheduleThreads = 1024;

__device__ int units_of(const ScheduleParams& p, int request) {
  if (request >= p.batch) return 0;
  const int length = p.seq_lens[request];
  if (p.counts) return sparse_units(p.counts[request], p.tail_start[request], length);
  return verify_units(length, p.query_start[request + 1] - p.query_start[request], p.window);
}

__global__ void __launch_bounds__(kScheduleThreads) schedule_kernel(const ScheduleParams p) {
  __shared__ int warp_sums[32];
  __shared__ int carry;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) {
    carry = 0;
    p.prefix[0] = 0;
  }
  __syncthreads();
  for (int base = 0; base < p.batch; base += kScheduleThreads) {
    const int request = base + static_cast<int>(threadIdx.x);
    int sum = units_of(p, request);
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      int total = warp_sums[lane];
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, total, step);
        if (lane >= step) total += other;
      }
      warp_sums[lane] = total;
    }
    __syncthreads();
    sum += carry + (warp > 0 ? warp_sums[warp - 1] : 0);
    if (request < p.batch) p.prefix[request + 1] = sum;
    __syncthreads();
    if (threadIdx.x == kScheduleThreads - 1) carry = sum;
    __syncthreads();
  }
}

const char* build_schedule(const ScheduleParams& params, void* stream) {
  schedule_kernel<<<1, kScheduleThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace vegas
