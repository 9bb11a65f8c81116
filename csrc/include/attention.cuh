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

// Walks the items of this block's slice. What it must know of requests, a block reads once, into
// shared memory: its warps work on the same tiles, and would wait for each other for ever if
// lengths changed under them and they disagreed.
struct SliceWalk {
  static constexpr int kWindow = 64;
  int unit, request;  // where this thread stands

  // The same for all threads, and looked up once per item: rather there than in registers.
  struct Shared {
    int per_request;       // items per request
    int end, slice;        // units
    int first;             // request that `window` begins with
    int4 window[kWindow];  // first unit (of one item), length, first row, first row of the next
  };
  __device__ static Shared& shared() {
    __shared__ Shared of_block;
    return of_block;
  }
  __device__ static int4 known(int request) {
    return shared().window[request - shared().first];
  }
  __device__ static int slice() { return shared().slice; }

  __device__ static int4 load(const AttentionParams& p, int request) {
    if (request >= p.batch) return make_int4(p.prefix[p.batch], 0, 0, 0);
    const int row = p.query_start ? p.query_start[request] : request;
    return make_int4(p.prefix[request], p.seq_lens[request], row,
                     p.query_start ? p.query_start[request + 1] : request + 1);
  }

  // Every thread of the block must call this, and a barrier follow. Loads that do not depend on
  // each other are asked for together.
  __device__ void start(const AttentionParams& p, int row_blocks) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int4 mine = load(p, min(thread, p.batch));
    const int next = p.prefix[min(thread + 1, p.batch)];
    const int per_request = p.num_kv_heads * row_blocks;
    const int total = p.prefix[p.batch] * per_request;
    const int slice = slice_units(total, gridDim.x);
    unit = blockIdx.x * slice;
    request = __syncthreads_count(thread < p.batch && next * per_request <= unit);
    for (int base = threads; base < p.batch; base += threads) {
      const int i = base + thread;
      request += __syncthreads_count(i < p.batch && p.prefix[i + 1] * per_request <= unit);
    }
    if (thread == 0) {
      shared().per_request = per_request;
      shared().end = min(unit + slice, total);
      shared().slice = slice;
      shared().first = request;
    }
    if (p.batch < threads) {
      const int i = thread - request;
      if (i >= 0 && i < kWindow) shared().window[i] = mine;
    } else if (thread < kWindow) {
      shared().window[thread] = load(p, request + thread);
    }
  }

  // The next item. `sync` is a barrier of the `threads` threads that walk; this is number `thread`.
  template <typename Sync>
  __device__ bool next(const AttentionParams& p, Item& item, int thread, int threads, Sync sync) {
    const int per_request = shared().per_request, end = shared().end;
    if (unit >= end) return false;
    for (;; ++request) {
      if (request + 1 - shared().first >= kWindow) {
        sync();
        for (int i = thread; i < kWindow; i += threads) {
          shared().window[i] = load(p, request + i);
        }
        if (thread == 0) shared().first = request;
        sync();
      }
      if (request >= p.batch) return false;  // only if lengths changed since the start
      if (known(request + 1).x * per_request > unit) break;
    }
    const int4 now = known(request);
    item.units = known(request + 1).x - now.x;
    const int local = unit - now.x * per_request;
    const int index = local / item.units;
    item.request = request;
    item.head = index % p.num_kv_heads;
    item.row_block = index / p.num_kv_heads;
    item.begin = local - index * item.units;
    item.end = min(item.units, item.begin + end - unit);
    item.length = now.y;
    item.query0 = now.z;
    item.queries = now.w - now.z;
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
  // This code runs once per item, and while memory is busy its instructions come slowly: few round
  // trips and short code both count. A row's pieces of four elements lie in kLanes lanes; a piece's
  // index also is its place in a part. Lane i fetches maximum and sum of part i modulo
  // kParts and hands its factor round; at the end lane e finishes the row of element e.
  constexpr int kLanes = D / 4;
  static_assert((kParts & (kParts - 1)) == 0 && kParts <= kLanes, "lanes share parts' factors");
  static_assert(kElements <= kLanes, "one lane finishes one row");
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = thread & 31, own = lane & (kParts - 1), in_row = lane & (kLanes - 1);
  const int total = num_rows * kLanes, stride = 2 * rows * (D + 2);
  const float* first = partial_of<D>(p, parts.first, 0, rows);
  for (int base = thread - lane; base < total; base += kElements * threads) {
    float4 sum[kElements];
    float top[kElements], l[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      sum[e] = make_float4(0.f, 0.f, 0.f, 0.f);
      top[e] = kNoMax;
      l[e] = 0.0f;
    }
    const int count = parts.last - parts.first + 1;
    for (int done = 0; done < count; done += kParts) {
      float4 o[kElements][kParts];
      float2 ml[kElements];
      // Only the first part is one that its block did not begin: slot 1.
      const float* from = first + done * stride + 4 * (base + lane);
      const float* from0 = done == 0 ? from + rows * (D + 2) : from;
      const int part = done + own;
      const float* own_ml = first + part * stride + (part == 0 ? rows * (D + 2) : 0) + rows * D +
                            2 * ((base + lane) / kLanes);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const bool real = base + lane + e * threads < total;
        ml[e] = make_float2(kNoMax, 0.0f);
        if (real && part < count) {
          ml[e] = __ldcg(reinterpret_cast<const float2*>(own_ml + 2 * e * (threads / kLanes)));
        }
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          o[e][j] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (real && done + j < count) {
            o[e][j] = __ldcg(reinterpret_cast<const float4*>((j == 0 ? from0 : from + j * stride) +
                                                             4 * e * threads));
          }
        }
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        float next = fmaxf(top[e], ml[e].x);
#pragma unroll
        for (int step = 1; step < kParts; step *= 2) {
          next = fmaxf(next, __shfl_xor_sync(kAll, next, step));
        }
        const float kept = exp2_fast(top[e] - next), f = exp2_fast(ml[e].x - next);
        float added = ml[e].y * f;
#pragma unroll
        for (int step = 1; step < kParts; step *= 2) {
          added += __shfl_xor_sync(kAll, added, step);
        }
        top[e] = next;
        l[e] = fmaf(l[e], kept, added);
        sum[e] = make_float4(sum[e].x * kept, sum[e].y * kept, sum[e].z * kept, sum[e].w * kept);
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          const float g = __shfl_sync(kAll, f, j, kParts);
          sum[e].x = fmaf(o[e][j].x, g, sum[e].x);
          sum[e].y = fmaf(o[e][j].y, g, sum[e].y);
          sum[e].z = fmaf(o[e][j].z, g, sum[e].z);
          sum[e].w = fmaf(o[e][j].w, g, sum[e].w);
        }
      }
    }
    float own_top = top[0], own_l = l[0];
#pragma unroll
    for (int e = 1; e < kElements; ++e) {
      own_top = in_row == e ? top[e] : own_top;
      own_l = in_row == e ? l[e] : own_l;
    }
    const int row = (base + lane) / kLanes + in_row * (threads / kLanes);
    const bool finishes = in_row < kElements && row < num_rows;
    const Row r(row0 + (finishes ? row : 0), p.num_heads / p.num_kv_heads, item.queries);
    const int head = item.head * (p.num_heads / p.num_kv_heads) + r.head;
    const int token = item.query0 + r.query;
    float own_f;
    const float lse = finish_row(own_top, own_l, sink_of(p, head), own_f);
    if (finishes) p.lse[static_cast<int64_t>(token) * p.num_heads + head] = lse * kLn2;
    const long long own_at = token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const float f = __shfl_sync(kAll, own_f, e, kLanes);
      const long long at = __shfl_sync(kAll, own_at, e, kLanes);
      if (base + lane + e * threads >= total) continue;
      *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + at + 4 * in_row) =
          make_uint2(pack<T>(sum[e].x * f, sum[e].y * f), pack<T>(sum[e].z * f, sum[e].w * f));
    }
  }
}

}  // namespace vegas
