#include "../include/verify_mma.cuh"

namespace vegas {

template <>
const char* verify_attention_mma_for<128, DType::kFloat16>(const AttentionParams& p, void* stream) {
  return verify_mma<__half, 128>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace vegas
