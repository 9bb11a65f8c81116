#include "../include/sm90_verify.cuh"

namespace vegas {

template <>
const char* verify_attention_sm90_for<128, DType::kFloat16>(const AttentionParams& p, void* stream) {
  return verify_sm90<__half, 128>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace vegas
