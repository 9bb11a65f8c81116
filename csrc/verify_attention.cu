// Verification attention: which path runs. Grid limits and layouts are checked in ops.py.
#include "include/launch.h"

namespace vegas {

const char* verify_attention(const AttentionParams& p, void* stream) {
  if (p.path == Path::kSm90 && !verify_attention_sm90_takes(p)) return "not a Hopper GPU";
  // Up to 32 rows mma.sync keeps up with memory, in finer row steps and with shorter prologues.
  // Above 64 rows the Hopper path is faster, but its latest version has not passed the correctness
  // grid on a GPU yet (benchmarks/KERNEL_LOG.md): until it has, it runs there only when asked for.
  const int rows = p.max_queries * (p.num_heads / p.num_kv_heads);
  const bool chosen = p.path == Path::kSm90 || (p.path == Path::kAuto && rows > 32 && rows <= 64);
  const bool hopper = chosen && verify_attention_sm90_takes(p);
  return hopper ? verify_attention_sm90(p, stream) : verify_attention_mma(p, stream);
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
