// Registers the CUDA implementations of the operations that vegas_runtime/kernels/ops.py defines.
// The only file that includes torch headers, and only the stable ABI: one binary serves every
// torch from 2.10 on. Shapes, dtypes and strides were checked in Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "include/launch.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <typename T>
T* data(const OptionalTensor& tensor) {
  return tensor.has_value() ? data<T>(*tensor) : nullptr;
}

// Runs `launch` on the current stream of the tensor's device.
template <typename Launch>
void on_device_of(const Tensor& tensor, Launch launch) {
  const auto device = tensor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  const bool found = aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS;
  STD_TORCH_CHECK(found, "torch named no current CUDA stream");
  const char* problem = launch(stream);
  STD_TORCH_CHECK(problem == nullptr, "vegas kernel launch failed: ", problem);
}

vegas::KvCache cache_of(const Tensor& k, const Tensor& v) {
  vegas::KvCache cache{};
  cache.k = k.data_ptr();
  cache.v = v.data_ptr();
  cache.block_stride = k.stride(0);
  cache.token_stride = k.stride(1);
  cache.head_stride = k.stride(2);
  cache.num_blocks = static_cast<int32_t>(k.size(0));
  cache.block_size = static_cast<int32_t>(k.size(1));
  return cache;
}

// What both attention operations fill in alike.
vegas::AttentionParams attention_params(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& block_table, const Tensor& seq_lens,
                                        const Tensor& prefix, double scale,
                                        const OptionalTensor& sinks, const Tensor& out,
                                        const Tensor& lse, const Tensor& partials,
                                        const Tensor& counters) {
  vegas::AttentionParams p{};
  p.q = q.data_ptr();
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.cache = cache_of(k, v);
  p.block_table = data<int32_t>(block_table);
  p.table_stride = block_table.stride(0);
  p.seq_lens = data<int32_t>(seq_lens);
  p.prefix = data<int32_t>(prefix);
  p.sinks = data<float>(sinks);
  p.out = out.data_ptr();
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.lse = data<float>(lse);
  p.partials = data<float>(partials);
  p.partials_floats = partials.numel();
  p.counters = data<int32_t>(counters);
  p.batch = static_cast<int32_t>(seq_lens.size(0));
  p.num_heads = static_cast<int32_t>(q.size(1));
  p.num_kv_heads = static_cast<int32_t>(k.size(2));
  p.head_dim = static_cast<int32_t>(q.size(2));
  p.scale = static_cast<float>(scale);
  p.dtype = q.scalar_type() == torch::headeronly::ScalarType::BFloat16
                ? vegas::DType::kBFloat16
                : vegas::DType::kFloat16;
  return p;
}

void build_schedule(const Tensor& seq_lens, const OptionalTensor& query_start,
                    const OptionalTensor& counts, const OptionalTensor& tail_start,
                    int64_t window, const Tensor& prefix) {
  vegas::ScheduleParams p{};
  p.seq_lens = data<int32_t>(seq_lens);
  p.query_start = data<int32_t>(query_start);
  p.counts = data<int32_t>(counts);
  p.tail_start = data<int32_t>(tail_start);
  p.prefix = data<int32_t>(prefix);
  p.batch = static_cast<int32_t>(seq_lens.size(0));
  p.window = static_cast<int32_t>(window);
  on_device_of(prefix, [&](void* stream) { return vegas::build_schedule(p, stream); });
}

void verify_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& block_table, const Tensor& seq_lens,
                      const Tensor& query_start, const Tensor& prefix, int64_t max_queries,
                      double scale, int64_t window, const OptionalTensor& sinks,
                      const OptionalTensor& hint, const OptionalTensor& rows, int64_t path,
                      const Tensor& out,
                      const Tensor& lse, const OptionalTensor& score, const Tensor& partials,
                      const Tensor& counters) {
  auto p = attention_params(q, k, v, block_table, seq_lens, prefix, scale, sinks, out, lse,
                            partials, counters);
  p.query_start = data<int32_t>(query_start);
  p.max_queries = static_cast<int32_t>(max_queries);
  p.window = static_cast<int32_t>(window);
  p.path = static_cast<vegas::Path>(path);
  if (score.has_value()) {
    const bool exact = score->dim() == 5;
    p.hint = data<float>(hint);
    p.rows = data<int32_t>(rows);
    p.score = score->data_ptr();
    p.score_batch_stride = score->stride(0);
    p.score_head_stride = score->stride(1);
    p.score_unit_stride = exact ? score->stride(2) : 0;
    p.score_width = exact ? static_cast<int32_t>(score->size(3)) : 0;
    p.score_is_bf16 = score->scalar_type() == torch::headeronly::ScalarType::BFloat16;
    p.score_mode = exact ? vegas::ScoreMode::kExact : vegas::ScoreMode::kHint;
  }
  on_device_of(q, [&](void* stream) { return vegas::verify_attention(p, stream); });
}

void sparse_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& slots,
                      const Tensor& counts, const Tensor& block_table, const Tensor& tail_start,
                      const Tensor& seq_lens, const Tensor& prefix, double scale,
                      const OptionalTensor& sinks, bool overlap, const Tensor& out,
                      const Tensor& lse, const Tensor& partials, const Tensor& counters) {
  auto p = attention_params(q, k, v, block_table, seq_lens, prefix, scale, sinks, out, lse,
                            partials, counters);
  p.max_queries = 1;
  p.overlap = overlap;
  p.slots = data<int32_t>(slots);
  p.slots_batch_stride = slots.stride(0);
  p.slots_head_stride = slots.size(1) == 1 ? 0 : slots.stride(1);
  p.counts = data<int32_t>(counts);
  p.tail_start = data<int32_t>(tail_start);
  on_device_of(q, [&](void* stream) { return vegas::sparse_attention(p, stream); });
}

void run_select(const Tensor& score, const Tensor& candidates, const Tensor& budgets, int64_t sinks,
                int64_t recent, const OptionalTensor& block_table, int64_t block_size,
                const OptionalTensor& reference, const OptionalTensor& lse,
                const OptionalTensor& query_start, const Tensor& keys, const Tensor& slots,
                const Tensor& counts) {
  vegas::SelectParams p{};
  const bool exact = score.dim() == 6;
  p.score = score.data_ptr();
  p.layer_stride = score.stride(0);
  p.batch_stride = score.stride(1);
  p.head_stride = score.stride(2);
  p.score_is_bf16 = score.scalar_type() == torch::headeronly::ScalarType::BFloat16;
  p.layers = static_cast<int32_t>(score.size(0));
  p.batch = static_cast<int32_t>(score.size(1));
  p.num_kv_heads = static_cast<int32_t>(score.size(2));
  p.length = static_cast<int32_t>(score.size(3)) * (exact ? 64 : 1);
  if (exact) {
    p.exact_width = static_cast<int32_t>(score.size(4));
    p.reference = data<float>(reference);
    p.lse = data<float>(lse);
    p.query_start = data<int32_t>(query_start);
    p.group = static_cast<int32_t>(reference->size(2)) / p.num_kv_heads;
  }
  p.candidates = data<int32_t>(candidates);
  p.budgets = data<int32_t>(budgets);
  p.block_table = data<int32_t>(block_table);
  p.table_stride = block_table.has_value() ? block_table->stride(0) : 0;
  p.block_size = static_cast<int32_t>(block_size);
  p.keys = data<uint16_t>(keys);
  p.key_row_stride = keys.dim() == 4 ? keys.stride(2) : 0;
  p.slots = data<int32_t>(slots);
  p.slots_row_stride = slots.stride(2);
  p.capacity = static_cast<int32_t>(slots.size(3));
  p.counts = data<int32_t>(counts);
  p.per_head = slots.size(2) == score.size(2) && score.size(2) > 1;
  p.sinks = static_cast<int32_t>(sinks);
  p.recent = static_cast<int32_t>(recent);
  on_device_of(score, [&](void* stream) { return vegas::select(p, stream); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(vegas, CUDA, m) {
  m.impl("build_schedule", TORCH_BOX(&build_schedule));
  m.impl("verify_attention", TORCH_BOX(&verify_attention));
  m.impl("sparse_attention", TORCH_BOX(&sparse_attention));
  m.impl("select", TORCH_BOX(&run_select));
}
