// What the attention kernels share: walking a slice, score codes, results and their merge.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"
#include "ptx.cuh"
#include "schedule.h"

namespace vegas {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// Finite stand-in for "no maximum yet": exp2(-inf - kNoMax) is 0, never NaN.
constexpr float kNoMax = -1e30f;
// A running maximum is only raised when a logit exceeds it by 2^8: P stays below 256.
constexpr float kLazyMargin = 8.0f;
// Hopper path: raised when a thread's share of a tile's row sum exceeds this.
constexpr float kSumLimit = 4096.0f;

// One (request, KV head, row block) and the part of it that this block computes.
struct Item {
  int request, head, row_block;
  int length, queries, query0;  // tokens cached; rows of this request; its first row in q
  int units, begin, end;        // units of the item; of them, ours
  __device__ bool is_whole() const { return begin == 0 && end == units; }
};

// Walks the items of this block's slice.
struct SliceWalk {
  int per_request;  // items per request
  int unit, end, slice, request;

  // Every thread of the block must call this.
  __device__ void start(const AttentionParams& p, int row_blocks) {
    per_request = p.num_kv_heads * row_blocks;
    const int total = p.prefix[p.batch] * per_request;
    slice = slice_units(total, gridDim.x);
    unit = blockIdx.x * slice;
    end = min(unit + slice, total);
    request = 0;
    if (unit >= end) return;
    for (int base = 0; base < p.batch; base += blockDim.x) {
      const int i = base + static_cast<int>(threadIdx.x);
      request += __syncthreads_count(i < p.batch && p.prefix[i + 1] * per_request <= unit);
    }
  }

  __device__ bool next(const AttentionParams& p, Item& item) {
    if (unit >= end) return false;
    while (p.prefix[request + 1] * per_request <= unit) ++request;
    const int first = p.prefix[request];
    item.units = p.prefix[request + 1] - first;
    const int local = unit - first * per_request;
    const int index = local / item.units;
    item.request = request;
    item.head = index % p.num_kv_heads;
    item.row_block = index / p.num_kv_heads;
    item.begin = local - index * item.units;
    item.end = min(item.units, item.begin + end - unit);
    item.length = p.seq_lens[request];
    item.query0 = p.query_start ? p.query_start[request] : request;
    item.queries = p.query_start ? p.query_start[request + 1] - item.query0 : 1;
    unit += item.end - item.begin;
    return true;
  }
};

// Blocks that share an item: first and last, from its place in the flat numbering. `unit` is where
// the walk stands after it took the block's part of the item.
struct ItemParts {
  int first, last;
  __device__ ItemParts(const Item& item, int unit, int slice) {
    const int unit0 = unit - item.end;
    first = unit0 / slice;
    last = (unit0 + item.units - 1) / slice;
  }
};

// Summed weight -> what is stored. NaN (a broken hint) becomes "none".
__device__ __forceinline__ void store_hint_score(const AttentionParams& p, int request, int head,
                                                 int token, float weight) {
  const int64_t at = request * p.score_batch_stride + head * p.score_head_stride + token;
  const bool some = weight > 0.0f;
  if (p.score_is_bf16) {
    const float kept = some ? fminf(weight, 3e38f) : 0.0f;
    static_cast<__nv_bfloat16*>(p.score)[at] = __float2bfloat16_rn(kept);
  } else {
    static_cast<uint8_t*>(p.score)[at] =
        some ? static_cast<uint8_t>(encode_score(__float_as_uint(weight))) : 0;
  }
}

// Whether packed row `row` is a real one, and which query and head of the group it is.
struct Row {
  int query, head;
  bool is_real;
  __device__ Row(int row, int group, int queries) {
    const int order = row / group;
    is_real = order < queries;
    query = is_real ? row_to_query(order, queries) : 0;
    head = row - order * group;
  }
};

// Whether scores of query `query` are collected.
__device__ __forceinline__ bool is_collected(const AttentionParams& p, int request, int query,
                                             int queries) {
  if (p.rows) return (p.rows[request] >> query) & 1;
  return query == 0 || query == queries - 1;
}

// 2^(max - hint), the factor that turns P into weights; 0 where nothing is collected.
__device__ __forceinline__ float hint_factor(float row_max, float hint_log2) {
  return exp2f(fminf(row_max - hint_log2, 120.0f));
}

// Exact scores: what is added to a bf16 weight's code. The reference is the hint rounded to a whole
// octave, maxima are whole numbers, so the difference is whole steps. A broken hint counts as 0.
constexpr int kNoCode = -8192;
__device__ __forceinline__ int exact_shift(float row_max, float hint_log2) {
  const float octaves = row_max - rintf(hint_log2);
  const float kept = octaves == octaves ? fminf(fmaxf(octaves, -500.0f), 100.0f) : 0.0f;
  return static_cast<int>(kept) * 8 - kCodeOffset;
}

// Codes of two bf16 weights, one in each half.
__device__ __forceinline__ uint32_t exact_codes(uint32_t weights, uint32_t shifts) {
  const uint32_t coarse = ((weights + 0x00080008u) >> 4) & 0x0fff0fffu;
  return __viaddmin_s16x2_relu(coarse, shifts, 0x00ff00ffu);
}

// log2-domain normaliser of a row, sink included, and the factor for its accumulator.
__device__ __forceinline__ float finish_row(float row_max, float sum, float sink_log2,
                                            float& factor) {
  const float top = fmaxf(row_max, sink_log2);
  const float scaled = sum * exp2f(row_max - top);
  const float total = scaled + (sink_log2 > kNoMax ? exp2f(sink_log2 - top) : 0.0f);
  factor = sum > 0.0f ? exp2f(row_max - top) / total : 0.0f;
  return total > 0.0f ? top + log2f(total) : -INFINITY;
}

__device__ __forceinline__ float sink_of(const AttentionParams& p, int head) {
  if (!p.sinks) return kNoMax;
  return fmaxf(p.sinks[head] * kLog2e, kNoMax);
}

template <typename T>
__device__ __forceinline__ void store_out4(const AttentionParams& p, int token, int head, int d,
                                           float4 o) {
  T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + d;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack<T>(o.x, o.y), pack<T>(o.z, o.w));
}

// Workspace of one partial result: rows x D accumulators, then rows x (max, sum).
template <int D>
__device__ __forceinline__ float* partial_of(const AttentionParams& p, int block, int slot,
                                             int rows) {
  return p.partials + (static_cast<int64_t>(block) * 2 + slot) * rows * (D + 2);
}

// Called by `threads` threads after they wrote their partial result (`rows` padded rows). The
// block that arrives last merges all parts in order, so that the result does not depend on
// timing. `flag` is one shared int; `sync` a barrier of the threads.
template <typename T, int D, int kElements, int kParts, typename Sync>
__device__ void merge_partials(const AttentionParams& p, const ItemParts& parts, const Item& item,
                               int rows, int row0, int num_rows, int thread, int threads,
                               int* flag, Sync sync) {
  sync();
  if (thread == 0) {
    const int id = (item.request * p.num_kv_heads + item.head) +
                   item.row_block * p.batch * p.num_kv_heads;
    // Release and acquire are cumulative: behind the barrier, one thread's covers all of them.
    *flag = arrive_in_turn(p.counters + id) == parts.last - parts.first;
    if (*flag) p.counters[id] = 0;
  }
  sync();
  if (!*flag) return;
  const int group = p.num_heads / p.num_kv_heads;
  // Loads of several elements and parts in flight together: one thread after another would wait
  // for the L2 cache `elements * parts` times.
  const int total = num_rows * (D / 4);
  for (int base = thread; base < total; base += kElements * threads) {
    float4 sum[kElements];
    float top[kElements], l[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      sum[e] = make_float4(0.f, 0.f, 0.f, 0.f);
      top[e] = kNoMax;
      l[e] = 0.0f;
    }
    for (int block = parts.first; block <= parts.last; block += kParts) {
      float4 o[kElements][kParts];
      float2 ml[kElements][kParts];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int i = min(base + e * threads, total - 1);
        const int row = i / (D / 4), d = (i % (D / 4)) * 4;
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          const int from = min(block + j, parts.last);
          const float* part = partial_of<D>(p, from, from == parts.first, rows);
          ml[e][j] = __ldcg(reinterpret_cast<const float2*>(part + rows * D + 2 * row));
          o[e][j] = __ldcg(reinterpret_cast<const float4*>(part + row * D + d));
        }
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        float next = top[e];
#pragma unroll
        for (int j = 0; j < kParts; ++j) next = fmaxf(next, ml[e][j].x);
        const float kept = exp2f(top[e] - next);
        top[e] = next;
        l[e] *= kept;
        sum[e] = make_float4(sum[e].x * kept, sum[e].y * kept, sum[e].z * kept, sum[e].w * kept);
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          const float f = block + j <= parts.last ? exp2f(ml[e][j].x - next) : 0.0f;
          l[e] = fmaf(ml[e][j].y, f, l[e]);
          sum[e].x = fmaf(o[e][j].x, f, sum[e].x);
          sum[e].y = fmaf(o[e][j].y, f, sum[e].y);
          sum[e].z = fmaf(o[e][j].z, f, sum[e].z);
          sum[e].w = fmaf(o[e][j].w, f, sum[e].w);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int i = base + e * threads;
      if (i >= total) break;
      const int row = i / (D / 4), d = (i % (D / 4)) * 4;
      const Row r(row0 + row, group, item.queries);
      const int head = item.head * group + r.head, token = item.query0 + r.query;
      float f;
      const float lse = finish_row(top[e], l[e], sink_of(p, head), f);
      store_out4<T>(p, token, head, d,
                    make_float4(sum[e].x * f, sum[e].y * f, sum[e].z * f, sum[e].w * f));
      if (d == 0) p.lse[static_cast<int64_t>(token) * p.num_heads + head] = lse * kLn2;
    }
  }
}

}  // namespace vegas
