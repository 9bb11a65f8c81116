// Plain C view of every kernel: what bindings.cpp fills in and the .cu files read.
// No torch and no CUDA header, so that both sides stay cheap to compile.
#pragma once

#include <cstdint>

namespace vegas {

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1 };

// kHint: rows and heads of a KV group summed with a normaliser known beforehand.
// kExact: one byte per row of the first and last query; the final LSE is applied by `select`.
enum class ScoreMode : int32_t { kOff = 0, kHint = 1, kExact = 2 };

// Paged cache. K and V are strided views of the same geometry (elements, multiples of 8).
struct KvCache {
  const void* k;
  const void* v;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int32_t num_blocks;
  int32_t block_size;  // multiple of 16
};

// kAuto: the fastest that runs here. The others exist for tests and measurements.
enum class Path : int32_t { kAuto = 0, kMma = 1, kSm90 = 2 };

struct AttentionParams {
  const void* q;  // [T, H, D]
  int64_t q_token_stride;
  int64_t q_head_stride;
  KvCache cache;
  const int32_t* block_table;  // [B, blocks]
  int64_t table_stride;
  const int32_t* seq_lens;     // [B]
  const int32_t* query_start;  // [B + 1]; null: one query per request
  const int32_t* prefix;       // [B + 1] from build_schedule
  const int32_t* slots;        // [B, 1 or Hkv, n]; null in verify_attention
  int64_t slots_batch_stride;
  int64_t slots_head_stride;
  const int32_t* counts;      // [B]
  const int32_t* tail_start;  // [B]
  const float* sinks;         // [H] or null
  const float* hint;          // [B, H] natural-log LSE, or null
  const int32_t* rows;        // [B] bit i: query i is collected; null: first and last
  void* out;                  // [T, H, D]
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;  // [T, H]
  void* score;  // hint: [B, Hkv, n]; exact: [B, Hkv, n / 64, W, 64]
  int64_t score_batch_stride;
  int64_t score_head_stride;
  int64_t score_unit_stride;  // exact
  int32_t score_is_bf16;
  int32_t score_width;  // exact: W = 2 * group
  float* partials;      // 2 * grid * rows * (D + 2) floats
  int64_t partials_floats;
  int32_t* counters;  // [B * Hkv * row blocks], zero before and after
  int32_t batch, num_heads, num_kv_heads, head_dim, max_queries;
  int32_t window;  // 0: none
  int32_t overlap;  // sparse attention: lists and lengths are older than the kernel in front
  float scale;
  DType dtype;
  ScoreMode score_mode;
  Path path;
};

struct ScheduleParams {
  const int32_t* seq_lens;
  const int32_t* query_start;  // null in sparse attention
  const int32_t* counts;       // null in verification
  const int32_t* tail_start;
  int32_t* prefix;
  int32_t batch, window;
};

struct SelectParams {
  const void* score;  // hint: [R, B, Hkv, n] u8 or bf16; exact: [R, B, Hkv, n / 64, W, 64] u8
  int64_t layer_stride, batch_stride, head_stride;
  int32_t score_is_bf16;
  int32_t exact_width;  // 0: hint
  const float* reference;  // exact: [R, B, H] LSE the codes are relative to
  const float* lse;        // exact: [R, B, 2, H] LSE of the first and last query
  const int32_t* candidates;   // [B]
  const int32_t* budgets;      // [B]
  const int32_t* query_start;  // exact: [B + 1]
  const int32_t* block_table;  // null: write positions
  int64_t table_stride;
  int32_t block_size;
  uint16_t* keys;  // workspace [R, B, heads out, n]
  int64_t key_row_stride;
  int32_t* slots;  // [R, B, heads out, capacity]
  int64_t slots_row_stride;
  int32_t* counts;  // [B]
  int32_t layers, batch, num_kv_heads, group, length, capacity;
  int32_t per_head;
  int32_t sinks, recent;
};

// Each returns null, or what went wrong as static text.
const char* build_schedule(const ScheduleParams& params, void* stream);
const char* verify_attention(const AttentionParams& params, void* stream);
const char* sparse_attention(const AttentionParams& params, void* stream);
const char* select(const SelectParams& params, void* stream);

// Paths behind verify_attention.
const char* verify_attention_mma(const AttentionParams& params, void* stream);
const char* verify_attention_sm90(const AttentionParams& params, void* stream);
bool verify_attention_sm90_takes(const AttentionParams& params);

}  // namespace vegas
