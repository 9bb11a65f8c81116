// Verification attention: which path runs. Grid limits and layouts are checked in kernels/arguments.py.
#include "include/launch.h"

namespace vegas {

const char* verify_attention(const AttentionParams& p, void* stream) {
  const bool takes = p.path != Path::kMma && verify_attention_sm90_takes(p);
  if (p.path == Path::kSm90 && !takes) {
    return "not a Hopper GPU, or KV heads that are no multiple of 64 elements apart";
  }
  // The choice may not look at the score mode: output must not depend on whether scores are
  // collected, to the bit.
  return takes ? verify_attention_sm90(p, stream) : verify_attention_mma(p, stream);
}

template <int D, DType TYPE>
const char* verify_attention_mma_for(const AttentionParams& p, void* stream);

const char* verify_attention_mma(const AttentionParams& p, void* stream) {
  const bool bf16 = p.dtype == DType::kBFloat16;
  if (p.head_dim == 64) {
    return bf16 ? verify_attention_mma_for<64, DType::kBFloat16>(p, stream)
                : verify_attention_mma_for<64, DType::kFloat16>(p, stream);
  }
  return bf16 ? verify_attention_mma_for<128, DType::kBFloat16>(p, stream)
              : verify_attention_mma_for<128, DType::kFloat16>(p, stream);
}

}  // namespace vegas
