// Sparse draft attention: one query per request over a slot list, then the dense tail.
#include "include/attention_mma.cuh"

namespace vegas {

template <typename T, int D, int NT>
const char* launch_sparse(const AttentionParams& p, cudaStream_t stream) {
  // Two tiles of every warp in flight on A100, three (d 128: two of 8 KB more) from sm_90 on.
  constexpr int kDepth = 128 / D;
  if (has_large_smem()) {
    return launch_mma<MmaConfig<T, D, NT, 1, 8, 3 * kDepth, ScoreMode::kOff, true>>(p, stream);
  }
  return launch_mma<MmaConfig<T, D, NT, 1, 8, 2 * kDepth, ScoreMode::kOff, true>>(p, stream);
}

template <typename T>
const char* sparse_for(const AttentionParams& p, cudaStream_t stream) {
  const bool small = p.num_heads / p.num_kv_heads <= 8;
  if (p.head_dim == 64) {
    return small ? launch_sparse<T, 64, 1>(p, stream) : launch_sparse<T, 64, 2>(p, stream);
  }
  return small ? launch_sparse<T, 128, 1>(p, stream) : launch_sparse<T, 128, 2>(p, stream);
}

const char* sparse_attention(const AttentionParams& p, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kBFloat16 ? sparse_for<__nv_bfloat16>(p, s) : sparse_for<__half>(p, s);
}

}  // namespace vegas
