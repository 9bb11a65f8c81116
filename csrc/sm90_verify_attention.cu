// Host side of verification attention on Hopper (include/sm90_verify.cuh): tensor maps, dispatch.
#include <cuda.h>
#include <cuda_runtime.h>

#include "include/sm90_verify.cuh"

namespace vegas {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Asked of the runtime, so that the library loads on machines without a driver.
static EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    const bool usable = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<EncodeTiled>(found) : nullptr;
  }();
  return function;
}

// Dimensions: 64 elements of a panel, a token of an octet, panel, octet, cache block. Heads are steps
// of `head_stride / 64` panels. A box is `octets` octets with `panels` panels each.
static bool make_map(const AttentionParams& p, const void* base, int panels, int octets,
                     CUtensorMap* map) {
  const cuuint64_t token = static_cast<cuuint64_t>(p.cache.token_stride) * 2;
  const cuuint64_t head_panels = static_cast<cuuint64_t>(p.cache.head_stride) / 64;
  const cuuint64_t sizes[5] = {64, 8, (p.num_kv_heads - 1) * head_panels + panels,
                               static_cast<cuuint64_t>(p.cache.block_size) / 8,
                               static_cast<cuuint64_t>(p.cache.num_blocks)};
  const cuuint64_t strides[4] = {token, 128, 8 * token,
                                 static_cast<cuuint64_t>(p.cache.block_stride) * 2};
  const cuuint32_t box[5] = {64, 8, static_cast<cuuint32_t>(panels),
                             static_cast<cuuint32_t>(octets), 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = p.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode_tiled()(map, type, 5, const_cast<void*>(base), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool make_maps(const AttentionParams& p, CUtensorMap* k_map, CUtensorMap* v_map) {
  const int panels = p.head_dim / 64;
  if (is_interleaved(p)) {
    return make_map(p, p.cache.k, 2 * panels, 2, k_map) &&
           make_map(p, p.cache.v, panels, 1, v_map);
  }
  return make_map(p, p.cache.k, panels, 1, k_map) && make_map(p, p.cache.v, panels, 1, v_map);
}

bool verify_attention_sm90_takes(const AttentionParams& p) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0 && encode_tiled() != nullptr && p.cache.num_blocks > 0 &&
         p.cache.head_stride % 64 == 0;
}

const char* verify_attention_sm90(const AttentionParams& p, void* stream) {
  const bool bf16 = p.dtype == DType::kBFloat16;
  if (p.head_dim == 64) {
    return bf16 ? verify_attention_sm90_for<64, DType::kBFloat16>(p, stream)
                : verify_attention_sm90_for<64, DType::kFloat16>(p, stream);
  }
  return bf16 ? verify_attention_sm90_for<128, DType::kBFloat16>(p, stream)
              : verify_attention_sm90_for<128, DType::kFloat16>(p, stream);
}

}  // namespace vegas
