// Sparse draft attention: which instance of include/sparse_mma.cuh runs.
#include "include/sparse_mma.cuh"

namespace vegas {

// Shared memory of sm_80 (163 KB) holds two tiles of each of 8 warps beside the merge of 8 rows, or
// four warps' three beside that of 16; sm_90 (227 KB) three of 8 warps, or two. Tiles of d 64 are
// half as large.
template <typename T, int D, int NT>
const char* sparse_for_group(const AttentionParams& p, cudaStream_t stream) {
  constexpr int kDepth = 128 / D;
  constexpr int kLarge = (NT == 1 ? 3 : 2) * kDepth, kSmall = (NT == 1 ? 2 : 3) * kDepth;
  constexpr int kSmallWarps = NT == 1 ? 8 : 4;
  const bool hopper = has_large_smem();
  // Two small blocks per multiprocessor overlap one's end with the other's middle. Not where items
  // are so few that each would be split between more than ten blocks: merging them costs more.
  if constexpr (NT == 1) {
    if (hopper && 10 * p.batch * p.num_kv_heads >= 2 * num_multiprocessors()) {
      return launch_sparse<MmaConfig<T, D, NT, 1, 4, kLarge, ScoreMode::kOff, true>, 2>(
          p, stream, true);
    }
  }
  return hopper ? launch_sparse<MmaConfig<T, D, NT, 1, 8, kLarge, ScoreMode::kOff, true>>(
                      p, stream, true)
                : launch_sparse<MmaConfig<T, D, NT, 1, kSmallWarps, kSmall, ScoreMode::kOff, true>>(
                      p, stream, false);
}

template <typename T>
const char* sparse_for(const AttentionParams& p, cudaStream_t stream) {
  const bool small = p.num_heads / p.num_kv_heads <= 8;
  if (p.head_dim == 64) {
    return small ? sparse_for_group<T, 64, 1>(p, stream) : sparse_for_group<T, 64, 2>(p, stream);
  }
  return small ? sparse_for_group<T, 128, 1>(p, stream) : sparse_for_group<T, 128, 2>(p, stream);
}

const char* sparse_attention(const AttentionParams& p, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kBFloat16 ? sparse_for<__nv_bfloat16>(p, s) : sparse_for<__half>(p, s);
}

}  // namespace vegas
