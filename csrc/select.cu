// Selection: each request's k highest-scoring KV entries, ascending, lowest position wins ties.
//
//   key[t]  = leading 16 bits of float32(sum over heads (and rows) of decoded scores)
//   k       = entries_kept(budget, candidates, ...), per request, read on the device
//
// 1. keys_kernel: one block per 4096 tokens of a row (layer, request[, KV head]); reads every score
//    byte once. Limit: memory bandwidth. Left out where the score bytes are the keys (one head).
// 2. pick_kernel: one block per row; radix select over 8 key bits at a time in shared-memory
//    histograms: the leading byte from a sample of the keys, which the count of all of them then
//    confirms or corrects; the last one per warp, so that every warp knows where its section
//    writes. Limit: L2 and issue slots.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "include/launch.h"
#include "include/schedule.h"

namespace vegas {

constexpr int kKeyThreads = 256;
constexpr int kKeysPerThread = 16;
constexpr int kPickThreads = 1024;
constexpr int kPickWarps = kPickThreads / 32;
constexpr int kCopies = 32;  // one histogram per lane, so that no two lanes meet in a bank
constexpr float kLog2eSelect = 1.4426950408889634f;

struct SelectRow {
  int layer, request, head;  // head: -1 where all are summed
  __device__ SelectRow(const SelectParams& p, int row) {
    const int heads = p.per_head ? p.num_kv_heads : 1;
    head = p.per_head ? row % heads : -1;
    const int outer = row / heads;
    request = outer % p.batch;
    layer = outer / p.batch;
  }
};

__device__ __forceinline__ float decoded(uint32_t word, int byte) {
  return __uint_as_float(decode_score(__byte_perm(word, 0, 0x4440 + byte)));
}

// Adds 16 tokens of one head's hint scores.
__device__ __forceinline__ void add_hint(const SelectParams& p, int64_t at, float (&sum)[16]) {
  if (p.score_is_bf16) {
    const uint4* source =
        reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.score) + at);
    uint4 words[2] = {source[0], source[1]};
    const uint32_t* w = reinterpret_cast<const uint32_t*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[2 * i] += __uint_as_float(w[i] << 16);
      sum[2 * i + 1] += __uint_as_float(w[i] & 0xffff0000u);
    }
    return;
  }
  const uint4 words =
      *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.score) + at);
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] += decoded(w[i / 4], i % 4);
}

// Adds 16 tokens of one head's exact scores, in stored order: quarter `c` of every row of a unit.
__device__ __forceinline__ void add_exact(const SelectParams& p, int head, int64_t at,
                                          const float* factors, float (&sum)[16]) {
  const uint8_t* source = static_cast<const uint8_t*>(p.score) + at;
#pragma unroll 4
  for (int row = 0; row < p.exact_width; ++row) {
    const float f = factors[head * p.exact_width + row];
    const uint4 words = *reinterpret_cast<const uint4*>(source + row * 64);
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[i] = fmaf(decoded(w[i / 4], i % 4), f, sum[i]);
  }
}

// 2^(reference - lse) per (head, packed row); 0 for rows that do not exist. The reference is the
// hint rounded to a whole octave, as the collecting kernels do.
__device__ void load_factors(const SelectParams& p, const SelectRow& row, float* factors) {
  const int heads = p.num_kv_heads * p.group;
  const int queries = p.query_start[row.request + 1] - p.query_start[row.request];
  const int64_t outer = static_cast<int64_t>(row.layer) * p.batch + row.request;
  for (int i = threadIdx.x; i < p.num_kv_heads * p.exact_width; i += blockDim.x) {
    const int head = i / p.exact_width, packed = i % p.exact_width;
    const int order = packed / p.group;
    const int q_head = head * p.group + packed % p.group;
    float f = 0.0f;
    if (order < min_int(queries, 2)) {
      const float octave = rintf(kLog2eSelect * p.reference[outer * heads + q_head]);
      f = exp2f(fminf(octave - kLog2eSelect * p.lse[(outer * 2 + order) * heads + q_head], 120.0f));
    }
    factors[i] = f;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kKeyThreads) keys_kernel(const SelectParams p) {
  extern __shared__ float factors[];
  const SelectRow row(p, blockIdx.y);
  const int candidates = p.candidates[row.request];
  const int token = (blockIdx.x * kKeyThreads + threadIdx.x) * kKeysPerThread;
  if (blockIdx.x * kKeyThreads * kKeysPerThread >= candidates) return;
  if (p.exact_width > 0) load_factors(p, row, factors);
  // Exact scores of a unit's tokens are spread over four threads, so whole units are ranked.
  if ((p.exact_width > 0 ? token & ~63 : token) >= candidates) return;
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = 0.0f;
  const int64_t base = row.layer * p.layer_stride + row.request * p.batch_stride;
  const int first = row.head < 0 ? 0 : row.head;
  const int last = row.head < 0 ? p.num_kv_heads : row.head + 1;
#pragma unroll 4
  for (int head = first; head < last; ++head) {
    if (p.exact_width > 0) {
      add_exact(p, head,
                base + head * p.head_stride + int64_t(token / 64) * p.exact_width * 64 + token % 64,
                factors, sum);
    } else {
      add_hint(p, base + head * p.head_stride + token, sum);
    }
  }
  uint32_t packed[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    packed[i] = (__float_as_uint(sum[2 * i]) >> 16) |
                (__float_as_uint(sum[2 * i + 1]) & 0xffff0000u);
  }
  uint16_t* keys = p.keys + blockIdx.y * p.key_row_stride;
  if (p.exact_width > 0) {
    // Quarter c holds tokens 16 t + 2 c, + 1, + 8, + 9 of its unit for t = 0 .. 3.
    uint16_t* unit = keys + (token & ~63) + (token & 63) / 16 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *reinterpret_cast<uint32_t*>(unit + (i / 2) * 16 + (i % 2) * 8) = packed[i];
    }
    return;
  }
  uint4* target = reinterpret_cast<uint4*>(keys + token);
  target[0] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  target[1] = make_uint4(packed[4], packed[5], packed[6], packed[7]);
}

// A lane's 16 bytes of keys: 16 of one byte or 8 of two.
template <typename Key>
struct KeyVector {
  static constexpr int N = 16 / sizeof(Key);
  uint32_t words[4];
  __device__ void load(const Key* keys, int token, int end) {
    // Rows are padded to 16 bytes; what lies beyond `end` is never looked at.
    const uint4 v = token < end ? *reinterpret_cast<const uint4*>(keys + token)
                                : make_uint4(0, 0, 0, 0);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  __device__ int get(int i) const {
    if constexpr (sizeof(Key) == 1) return __byte_perm(words[i / 4], 0, 0x4440 + i % 4);
    return i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu;
  }
};

// Masks of two keys that are larger than or equal to those in `limit`. Keys are leading halves of
// sums that are not negative, so their order as bfloat16 is that of their bits.
__device__ __forceinline__ __nv_bfloat162 as_pair(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ __forceinline__ uint32_t larger_keys(uint32_t keys, uint32_t limit) {
  return __hgt2_mask(as_pair(keys), as_pair(limit));
}
__device__ __forceinline__ uint32_t equal_keys(uint32_t keys, uint32_t limit) {
  return __heq2_mask(as_pair(keys), as_pair(limit));
}
constexpr uint32_t kBelowAll = 0xbf80bf80u, kBeyondAll = 0x7fff7fffu;  // -1; not a number

// The block's view of its row.
template <typename Key>
struct Pick {
  const Key* keys;
  int low, high;  // scored positions [low, high); the others are kept anyway
  int section;    // tokens per warp
};

// Counts scored keys by their higher byte: bins [byte, lane].
// `step` tokens lie between a thread's reads: more than all threads' vectors is a sample.
__device__ void count_high_bytes(const Pick<uint16_t>& row, int* bins, int first, int step) {
  for (int i = threadIdx.x; i < 256 * kCopies; i += kPickThreads) bins[i] = 0;
  __syncthreads();
  constexpr int N = KeyVector<uint16_t>::N;
  int* own = bins + (threadIdx.x & (kCopies - 1));
#pragma unroll 2
  for (int token = first; token < row.high; token += step) {
    KeyVector<uint16_t> v;
    v.load(row.keys, token, row.high);
    const bool inner = token >= row.low && token + N <= row.high;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (inner || (token + i >= row.low && token + i < row.high)) {
        atomicAdd(own + (v.get(i) >> 8) * kCopies, 1);
      }
    }
  }
  __syncthreads();
}

// Counts the last byte of the keys whose higher byte is `prefix`, every warp its own section into
// its own bins [warp, byte]; returns how many of the lane's keys have a larger higher byte.
template <typename Key>
__device__ int count_low_bytes(const Pick<Key>& row, int prefix, int* bins) {
  for (int i = threadIdx.x; i < 256 * kPickWarps; i += kPickThreads) bins[i] = 0;
  __syncthreads();
  constexpr int N = KeyVector<Key>::N;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int begin = warp * row.section, end = min_int(begin + row.section, row.high);
  int* own = bins + warp * 256;
  int above = 0;
  uint32_t pairs = 0;
  const uint32_t first_of_prefix = static_cast<uint32_t>(prefix) * 0x01000100u;
  const uint32_t last_of_prefix = first_of_prefix | 0x00ff00ffu;
  constexpr int kUnroll = sizeof(Key) == 1 ? 1 : 2;  // 32 registers
#pragma unroll kUnroll
  for (int token = begin + lane * N; token < end; token += 32 * N) {
    KeyVector<Key> v;
    v.load(row.keys, token, row.high);
    const bool inner = token >= row.low && token + N <= row.high;
    if (sizeof(Key) == 2 && inner) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = v.words[i];
        // Both halves count at once; a lane has fewer than 65,536 keys of each.
        pairs += larger_keys(pair, last_of_prefix) & 0x00010001u;
        const uint32_t differs = pair ^ first_of_prefix;
        if ((differs & 0xff00u) == 0) atomicAdd(own + (pair & 255), 1);
        if ((differs & 0xff000000u) == 0) atomicAdd(own + ((pair >> 16) & 255), 1);
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int key = v.get(i);
      if (!inner && (token + i < row.low || token + i >= row.high)) continue;
      if (sizeof(Key) == 1) {
        atomicAdd(own + key, 1);
      } else {
        above += (key >> 8) > prefix;
        if ((key >> 8) == prefix) atomicAdd(own + (key & 255), 1);
      }
    }
  }
  __syncthreads();
  above += (pairs & 0xffffu) + (pairs >> 16);
  return above;
}

// The byte of the `wanted`-th largest key, and how many keys have a larger one. Bins lie
// `byte_stride` apart, copies of a bin `copy_stride`.
__device__ void find_byte(const int* bins, int byte_stride, int copy_stride, int wanted,
                          int* result) {
  __shared__ int warp_sums[8];
  const int thread = threadIdx.x, lane = thread & 31;
  int own = 0, sum = 0;
  if (thread < 256) {
    const int byte = 255 - thread;  // from the top
    for (int c = 0; c < 32; ++c) {
      own += bins[byte * byte_stride + ((c + thread) & 31) * copy_stride];
    }
    sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[thread >> 5] = sum;
  }
  if (thread == 0) result[0] = -1;
  __syncthreads();
  if (thread < 256) {
    for (int w = 0; w < (thread >> 5); ++w) sum += warp_sums[w];
    if (sum >= wanted && sum - own < wanted) {
      result[0] = 255 - thread;
      result[1] = sum - own;
    }
  }
  __syncthreads();
}

// Bit i of `above` / `equal`: token i of the vector is kept for sure / ties with the threshold.
template <typename Key>
__device__ __forceinline__ void classify(const Pick<Key>& row, const KeyVector<Key>& v, int token,
                                         int end, int threshold, uint32_t& above,
                                         uint32_t& equal) {
  above = equal = 0;
  if constexpr (sizeof(Key) == 2) {
    const uint32_t limit = threshold < 0        ? kBelowAll
                           : threshold > 0xffff ? kBeyondAll
                                                : static_cast<uint32_t>(threshold) * 0x00010001u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Token 2 i to bit 2 i, token 2 i + 1 to bit 2 i + 17.
      const uint32_t bits = 0x00020001u << (2 * i);
      above |= larger_keys(v.words[i], limit) & bits;
      equal |= equal_keys(v.words[i], limit) & bits;
    }
    above = (above | (above >> 16)) & 0xffu;
    equal = (equal | (equal >> 16)) & 0xffu;
  } else {
#pragma unroll
    for (int i = 0; i < KeyVector<Key>::N; ++i) {
      const int key = v.get(i);
      above |= static_cast<uint32_t>(key > threshold) << i;
      equal |= static_cast<uint32_t>(key == threshold) << i;
    }
  }
  constexpr int N = KeyVector<Key>::N;
  if (token < row.low || token + N > row.high) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int t = token + i;
      if (t < row.low || t >= row.high) {
        above = t < end ? above | (1u << i) : above & ~(1u << i);
        equal &= ~(1u << i);
      }
    }
  }
}

template <typename Key>
__global__ void __launch_bounds__(kPickThreads, 2) pick_kernel(const SelectParams p) {
  static_assert(kCopies == kPickWarps, "both histograms use the same memory");
  __shared__ int bins[256 * kCopies];
  __shared__ int found[2];
  __shared__ int all_larger;
  __shared__ int warp_above[kPickWarps], warp_equal[kPickWarps];
  const SelectRow which(p, blockIdx.x);
  const int candidates = p.candidates[which.request];
  const int forced_low = min_int(p.sinks, candidates);
  const int forced_high = min_int(p.recent, candidates - forced_low);
  const int forced = forced_low + forced_high;
  const int budget = entries_kept(p.budgets[which.request], candidates, forced, p.capacity);
  if (which.layer == 0 && which.head <= 0 && threadIdx.x == 0) {
    p.counts[which.request] = budget;
  }
  if (candidates <= 0) return;

  Pick<Key> row;
  if constexpr (sizeof(Key) == 1) {
    row.keys = static_cast<const uint8_t*>(p.score) + which.layer * p.layer_stride +
               which.request * p.batch_stride + max_int(which.head, 0) * p.head_stride;
  } else {
    row.keys = p.keys + blockIdx.x * p.key_row_stride;
  }
  row.low = forced_low;
  row.high = candidates - forced_high;
  constexpr int kStep = 32 * KeyVector<Key>::N;
  row.section = ceil_div(ceil_div(candidates, kPickWarps), kStep) * kStep;

  // The threshold: `wanted` scored keys are at or above it, `quota` of its ties are kept.
  const int wanted = budget - forced;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int begin = warp * row.section, end = min_int(begin + row.section, candidates);
  // Entries of the section that are kept whatever they score.
  const int scored = max_int(0, min_int(end, row.high) - max_int(begin, row.low));
  int above_count = max_int(0, end - begin) - scored, equal_count = 0;
  int threshold = -1, quota = 0;
  if (wanted <= 0) {
    threshold = 1 << 20;
  } else if (wanted >= row.high - row.low) {
    above_count += scored;
  } else {
    int prefix = 0, left = wanted, larger = 0;
    constexpr int N = KeyVector<Key>::N;
    if constexpr (sizeof(Key) == 2) {
      // The higher byte of the threshold, from a sample of 8 keys a thread. All keys are counted
      // below, which shows whether it is right; if not its neighbour is tried, then all keys.
      const int spread = row.high / kPickThreads & ~(N - 1);
      int tries = spread > 2 * N ? 0 : 2;
      if (tries == 0) {
        count_high_bytes(row, bins, threadIdx.x * spread, row.high);
        const float share = static_cast<float>(kPickThreads * N) / (row.high - row.low);
        find_byte(bins, kCopies, 1, max_int(1, static_cast<int>(wanted * share)), found);
        prefix = max_int(0, found[0]);
      }
      for (;; ++tries) {
        if (tries == 2) {
          count_high_bytes(row, bins, threadIdx.x * N, kPickThreads * N);
          find_byte(bins, kCopies, 1, wanted, found);
          prefix = found[0];
        }
        if (threadIdx.x == 0) all_larger = 0;
        larger = count_low_bytes<Key>(row, prefix, bins);
        const int of_warp = __reduce_add_sync(0xffffffffu, larger);
        if (lane == 0) atomicAdd(&all_larger, of_warp);
        __syncthreads();
        left = wanted - all_larger;
        find_byte(bins, 1, 256, left, found);
        if (found[0] >= 0 || tries >= 2) break;
        prefix = min_int(255, max_int(0, left <= 0 ? prefix + 1 : prefix - 1));
      }
    } else {
      larger = count_low_bytes<Key>(row, prefix, bins);
      find_byte(bins, 1, 256, left, found);
    }
    const int byte = found[0];
    threshold = prefix * 256 + byte;
    quota = left - found[1];
    int mine = larger;
    for (int i = lane; i < 256; i += 32) mine += i > byte ? bins[warp * 256 + i] : 0;
    above_count += __reduce_add_sync(0xffffffffu, mine);
    equal_count = bins[warp * 256 + byte];
  }
  if (lane == 0) {
    warp_above[warp] = above_count;
    warp_equal[warp] = equal_count;
  }
  __syncthreads();
  int above_before = 0, equal_before = 0;
  for (int w = 0; w < warp; ++w) {
    above_before += warp_above[w];
    equal_before += warp_equal[w];
  }

  int32_t* slots = p.slots + blockIdx.x * p.slots_row_stride;
  const int32_t* table = p.block_table ? p.block_table + which.request * p.table_stride : nullptr;
  for (int start = begin; start < end; start += kStep) {
    const int token = start + lane * KeyVector<Key>::N;
    KeyVector<Key> v;
    v.load(row.keys, token, candidates);
    uint32_t above = 0, equal = 0;
    if (token < end) classify(row, v, token, candidates, threshold, above, equal);
    // Both running counts in one scan: a step has at most 512 tokens.
    int mine = __popc(above) | (__popc(equal) << 16), sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const int total = __shfl_sync(0xffffffffu, sum, 31);
    // Ties are kept up to the quota, so all of a lane's or none, but for one lane of the row.
    const int ties_before = equal_before + ((sum - mine) >> 16);
    const int kept_ties = max_int(0, min_int(quota - ties_before, __popc(equal)));
#pragma unroll 1
    for (int extra = __popc(equal) - kept_ties; extra > 0; --extra) {
      equal &= ~(0x80000000u >> __clz(equal));
    }
    int at = above_before + ((sum - mine) & 0xffff) + min_int(ties_before, quota);
#pragma unroll 1
    for (uint32_t left = above | equal; left; left &= left - 1) {
      const int position = token + __ffs(left) - 1;
      int slot = position;
      if (table) {
        const int block = position / p.block_size;
        slot = table[block] * p.block_size + (position - block * p.block_size);
      }
      slots[at++] = slot;
    }
    above_before += total & 0xffff;
    equal_before += total >> 16;
  }
}

const char* select(const SelectParams& p, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int rows = p.layers * p.batch * (p.per_head ? p.num_kv_heads : 1);
  if (rows == 0) return nullptr;
  const bool bytes_are_keys = p.exact_width == 0 && !p.score_is_bf16 &&
                              (p.per_head || p.num_kv_heads == 1);
  if (bytes_are_keys) {
    pick_kernel<uint8_t><<<rows, kPickThreads, 0, s>>>(p);
  } else {
    const dim3 grid(ceil_div(p.length, kKeyThreads * kKeysPerThread), rows);
    const int bytes = p.exact_width * p.num_kv_heads * static_cast<int>(sizeof(float));
    keys_kernel<<<grid, kKeyThreads, bytes, s>>>(p);
    pick_kernel<uint16_t><<<rows, kPickThreads, 0, s>>>(p);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace vegas
