// Chooses the tile shape of the mma.sync verification path from the number of packed rows.
#pragma once

#include "attention_mma.cuh"

namespace vegas {

template <typename T, int D, int NT, int RG, int KVW, int STAGES>
const char* launch_verify(const AttentionParams& p, cudaStream_t stream) {
  switch (p.score_mode) {
    case ScoreMode::kOff:
      return launch_mma<MmaConfig<T, D, NT, RG, KVW, STAGES, ScoreMode::kOff, false>>(p, stream);
    case ScoreMode::kHint:
      return launch_mma<MmaConfig<T, D, NT, RG, KVW, STAGES, ScoreMode::kHint, false>>(p, stream);
    default:
      return launch_mma<MmaConfig<T, D, NT, RG, KVW, STAGES, ScoreMode::kExact, false>>(p, stream);
  }
}

// Every shape keeps 128 KB of shared memory, which A100 has. A d 128 warp holds 16 rows (32 would
// spill), a d 64 warp 32; warps that share a KV group split the rows of larger blocks.
template <typename T, int D>
const char* verify_mma(const AttentionParams& p, cudaStream_t stream) {
  const int rows = p.max_queries * (p.num_heads / p.num_kv_heads);
  if (rows <= 16) return launch_verify<T, D, 2, 1, 8, 256 / D>(p, stream);
  if constexpr (D == 64) {
    if (rows <= 32) return launch_verify<T, D, 4, 1, 8, 4>(p, stream);
    if (rows <= 64) return launch_verify<T, D, 4, 2, 4, 8>(p, stream);
    return launch_verify<T, D, 4, 4, 2, 16>(p, stream);
  } else {
    if (rows <= 32) return launch_verify<T, D, 2, 2, 4, 4>(p, stream);
    if (rows <= 64) return launch_verify<T, D, 2, 4, 2, 8>(p, stream);
    return launch_verify<T, D, 2, 8, 1, 16>(p, stream);
  }
}

template <int D, DType TYPE>
const char* verify_attention_mma_for(const AttentionParams& p, void* stream);

}  // namespace vegas
