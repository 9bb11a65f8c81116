// Attention of few query rows over a long paged cache, for every GPU from sm_80 on.
//
//   S^T = K Q^T;  P = 2^(S c - m);  O^T = V^T P^T;  score[t] = sum over collected rows of P f
//
// Tokens are the M side of the tensor-core products (swap A/B), rows the N side: rows come in
// eights, not sixteens, and a row's maximum is only looked at (one vote per tile), so the hot loop
// has no shuffle. P^T moves from accumulator to operand layout with one movmatrix per 8x8.
//
// A block owns an equal slice of all work. Its warps form KV groups of RG warps; a group owns
// every KVW-th 16-token tile, loads it with cp.async into its own ring, and keeps private (m, l,
// O) of NT * 8 rows per warp; groups merge through shared memory once per item.
//
// Limit: memory bandwidth up to 32 rows (d 64) or 64 rows (d 128); above that, issue slots.
#pragma once

#include "attention.cuh"

namespace vegas {

template <typename T_, int D_, int NT_, int RG_, int KVW_, int STAGES_, ScoreMode SCORE_,
          bool SPARSE_>
struct MmaConfig {
  using T = T_;
  static constexpr int D = D_, NT = NT_, RG = RG_, KVW = KVW_, STAGES = STAGES_;
  static constexpr ScoreMode SCORE = SCORE_;
  static constexpr bool SPARSE = SPARSE_;
  static constexpr int WARPS = RG * KVW, THREADS = WARPS * 32;
  static constexpr int ROWS = NT * 8 * RG;
  static constexpr int CHUNKS = D / 8;                      // 16-byte pieces of a row
  static constexpr int HALF_BYTES = kTileTokens * D * 2;    // K or V of a tile
  static constexpr int RING_BYTES = KVW * STAGES * 2 * HALF_BYTES;
  static constexpr int MERGE_PITCH = D + 4;                 // conflict-free transposed stores
  static constexpr int MERGE_BYTES = KVW * ROWS * (MERGE_PITCH + 2) * 4;
  static constexpr int SCORE_BYTES = RG > 1 ? KVW * 2 * RG * kTileTokens * 4 : 0;
  // Sparse attention goes on copying while it merges; otherwise the merge reuses the ring.
  static constexpr int MERGE_AT = SPARSE ? RING_BYTES : 0;
  static constexpr int BUFFER_BYTES =
      RING_BYTES > MERGE_AT + MERGE_BYTES ? RING_BYTES : MERGE_AT + MERGE_BYTES;
  static constexpr int SMEM_BYTES = BUFFER_BYTES + SCORE_BYTES + 16;
  static_assert(D == 64 || D == 128, "rows are 8 or 16 pieces of 16 bytes");
  static_assert(!SPARSE || RG == 1, "sparse attention has one query per request");
};

// Where a group's lanes find the rows of a tile: in units of 16 bytes from the cache base.
constexpr uint32_t kNoRow = 0xffffffffu;
constexpr int kUnitTiles = kUnitTokens / kTileTokens;

template <typename C>
struct MmaKernel {
  using T = typename C::T;
  static constexpr int D = C::D, NT = C::NT, RG = C::RG, KVW = C::KVW;
  static constexpr int KSTEPS = D / 16, LANES = 32 * RG;

  const AttentionParams& p;
  char* smem;
  float* score_smem;
  int* flag;
  int warp, lane, group_id, rg, group_lane;
  int shift;  // log2 of the block size, or -1

  // Current item.
  Item item;
  int tile_end, list_tiles, list_count, first_token, tail_low, num_rows;

  // Registers of the row block.
  uint32_t q[NT][KSTEPS][2];
  float o[KSTEPS][NT][4];
  float row_max[NT][2], row_sum[NT][2], factor[NT][2];
  float scale_log2;

  __device__ MmaKernel(const AttentionParams& params, char* shared) : p(params), smem(shared) {
    warp = threadIdx.x >> 5;
    lane = threadIdx.x & 31;
    group_id = warp / RG;
    rg = warp % RG;
    group_lane = rg * 32 + lane;
    char* after = smem + C::BUFFER_BYTES;
    score_smem = reinterpret_cast<float*>(after);
    flag = reinterpret_cast<int*>(after + C::SCORE_BYTES);
    const int size = p.cache.block_size;
    shift = (size & (size - 1)) == 0 ? __ffs(size) - 1 : -1;
    scale_log2 = p.scale * kLog2e;
  }

  __device__ void group_sync() {
    if constexpr (RG == 1) {
      __syncwarp();
    } else {
      named_barrier(1 + group_id, LANES);
    }
  }

  // ---- loading -------------------------------------------------------------------------------

  __device__ int block_of(int token) const {
    return shift >= 0 ? token >> shift : token / p.cache.block_size;
  }

  __device__ uint32_t offset_of(int block, int in_block, int head) const {
    const int64_t at = block * p.cache.block_stride + in_block * p.cache.token_stride +
                       head * p.cache.head_stride;
    return static_cast<uint32_t>(at >> 3);
  }

  // Physical block of `tile`: loaded one round before it is used.
  __device__ int prefetch(int tile) const {
    if (tile >= tile_end) return -1;
    return p.block_table[item.request * p.table_stride + block_of(token_of(tile))];
  }

  __device__ int token_of(int tile) const {
    return first_token + (tile - (C::SPARSE ? list_tiles : 0)) * kTileTokens;
  }

  // Offset of row lane & 15 of `tile`; kNoRow is filled with zeros.
  __device__ uint32_t row_offset(int tile, int fetched) const {
    const int token = token_of(tile), row = token + (lane & 15);
    if (row >= item.length || row < tail_low) return kNoRow;
    return offset_of(fetched, row - block_of(token) * p.cache.block_size, item.head);
  }

  __device__ uint32_t stage_address(int stage) const {
    return smem_address(smem) + (group_id * C::STAGES + stage) * 2 * C::HALF_BYTES;
  }

  __device__ void issue(int tile, int stage, int fetched) {
    if (tile < tile_end) copy_rows(row_offset(tile, fetched), stage);
    cp_async_commit();
  }

  // Copies 16 rows of K and V; lanes i and i + 16 know where row i is.
  __device__ void copy_rows(uint32_t mine, int stage) {
    const uint32_t base = stage_address(stage);
    const char* k = static_cast<const char*>(p.cache.k);
    const char* v = static_cast<const char*>(p.cache.v);
#pragma unroll
    for (int i = 0; i < kTileTokens * C::CHUNKS / LANES; ++i) {
      const int piece = group_lane + i * LANES;
      const int row = piece / C::CHUNKS, column = piece % C::CHUNKS;
      const uint32_t offset = __shfl_sync(0xffffffffu, mine, row);
      const bool valid = offset != kNoRow;
      const int64_t at = (valid ? static_cast<int64_t>(offset) : 0) * 16 + column * 16;
      const uint32_t target = base + row * (D * 2) + ((column ^ (row & 7)) & (C::CHUNKS - 1)) * 16;
      cp_async_16(target, k + at, valid);
      cp_async_16(target + C::HALF_BYTES, v + at, valid);
    }
  }

  // ---- rows ----------------------------------------------------------------------------------

  __device__ int packed_row(int n, int j) const {
    return item.row_block * C::ROWS + (rg * NT + n) * 8 + (lane & 3) * 2 + j;
  }

  using Queries = uint32_t[NT][KSTEPS][2];

  __device__ void fetch_queries(const Item& of, Queries& fetched) const {
    const int group = p.num_heads / p.num_kv_heads;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const Row r(of.row_block * C::ROWS + (rg * NT + n) * 8 + (lane >> 2), group, of.queries);
      const T* row = static_cast<const T*>(p.q) + (of.query0 + r.query) * p.q_token_stride +
                     (of.head * group + r.head) * p.q_head_stride + (lane & 3) * 2;
#pragma unroll
      for (int k = 0; k < KSTEPS; ++k) {
        fetched[n][k][0] = r.is_real ? *reinterpret_cast<const uint32_t*>(row + k * 16) : 0u;
        fetched[n][k][1] = r.is_real ? *reinterpret_cast<const uint32_t*>(row + k * 16 + 8) : 0u;
      }
    }
  }

  // Nothing seen yet.
  __device__ void reset() {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        row_max[n][j] = kNoMax;
        row_sum[n][j] = 0.0f;
        factor[n][j] = 0.0f;
      }
#pragma unroll
      for (int k = 0; k < KSTEPS; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[k][n][i] = 0.0f;
      }
    }
  }

  // Lowest and one past the highest token that a packed row sees.
  __device__ void visible(int n, int j, int& low, int& high) const {
    const Row r(packed_row(n, j), p.num_heads / p.num_kv_heads, item.queries);
    high = item.length - item.queries + r.query + 1;
    low = p.window > 0 ? high - p.window : 0;
  }

  __device__ float factor_of(int n, int j) const {
    const int group = p.num_heads / p.num_kv_heads;
    const Row r(packed_row(n, j), group, item.queries);
    const float hint =
        kLog2e * p.hint[item.request * p.num_heads + item.head * group + r.head];
    if constexpr (C::SCORE == ScoreMode::kExact) {
      const bool stored = r.is_real && packed_row(n, j) < p.score_width;
      return __int_as_float(stored ? exact_shift(row_max[n][j], hint) : kNoCode);
    }
    if (!r.is_real || !is_collected(p, item.request, r.query, item.queries)) return 0.0f;
    return hint_factor(row_max[n][j], hint);
  }

  // ---- one tile ------------------------------------------------------------------------------

  __device__ void mask(int tile, float (&s)[NT][4]) const {
    const int row = lane >> 2;
    if constexpr (C::SPARSE) {
      if (tile < list_tiles) {
        const int left = list_count - tile * kTileTokens;
        if (left >= kTileTokens) return;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (row + (i >> 1) * 8 >= left) s[n][i] = -INFINITY;
          }
        }
        return;
      }
    }
    const int token = token_of(tile);
    const bool above = token + kTileTokens > item.length - item.queries + 1;
    const bool below = C::SPARSE ? token < tail_low
                                 : p.window > 0 && token < item.length - p.window;
    if (!above && !below) return;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int low, high;
        visible(n, j, low, high);
        if constexpr (C::SPARSE) low = tail_low;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = token + row + half * 8;
          if (t < low || t >= high) s[n][half * 2 + j] = -INFINITY;
        }
      }
    }
  }

  // Raise the maxima of the rows that need it; rescale what was summed so far.
  __device__ void raise(const float (&s)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = fmaxf(s[n][j], s[n][2 + j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        }
        // A whole number: P of any two maxima differ by a power of two.
        top = ceilf(top * scale_log2);
        const bool grows = top > row_max[n][j] + kLazyMargin;
        const float next = grows ? top : row_max[n][j];
        const float f = exp2f(row_max[n][j] - next);
        row_max[n][j] = next;
        row_sum[n][j] *= f;
#pragma unroll
        for (int k = 0; k < KSTEPS; ++k) {
          o[k][n][j] *= f;
          o[k][n][2 + j] *= f;
        }
        if constexpr (C::SCORE != ScoreMode::kOff) factor[n][j] = factor_of(n, j);
      }
    }
  }

  __device__ void compute(int tile, int stage, int parity) {
    const uint32_t base = stage_address(stage);
    float s[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    }
    {
      const int row = lane & 15;
      const uint32_t address = base + row * (D * 2);
#pragma unroll
      for (int k = 0; k < KSTEPS; ++k) {
        uint32_t a[4];
        ldmatrix_x4(a, address + ((((lane >> 4) + 2 * k) ^ (row & 7)) & (C::CHUNKS - 1)) * 16);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_16x8x16<T>(s[n], a, q[n][k][0], q[n][k][1]);
      }
    }
    mask(tile, s);
    float worst = -INFINITY;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        worst = fmaxf(worst, fmaf(s[n][i], scale_log2, -row_max[n][i & 1]));
      }
    }
    if (__any_sync(0xffffffffu, worst > kLazyMargin)) raise(s);
    uint32_t pt[NT][2];
    float weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float w = exp2_fast(fmaf(s[n][i], scale_log2, -row_max[n][i & 1]));
        s[n][i] = w;
        row_sum[n][i & 1] += w;
        if constexpr (C::SCORE == ScoreMode::kHint) {
          weight[i >> 1] = fmaf(w, factor[n][i & 1], weight[i >> 1]);
        }
      }
      pt[n][0] = transpose_8x8(pack<T>(s[n][0], s[n][1]));
      pt[n][1] = transpose_8x8(pack<T>(s[n][2], s[n][3]));
      if constexpr (C::SCORE == ScoreMode::kExact) store_exact(tile, n, s[n]);
    }
    if constexpr (C::SCORE == ScoreMode::kHint) collect(tile, weight, parity);
    {
      const int row = (lane & 7) + ((lane >> 4) << 3);
      const uint32_t address = base + C::HALF_BYTES + row * (D * 2);
#pragma unroll
      for (int k = 0; k < KSTEPS; ++k) {
        uint32_t a[4];
        ldmatrix_x4_trans(
            a, address + ((((lane >> 3) & 1) + 2 * k) ^ (row & 7)) * 16);
#pragma unroll
        for (int n = 0; n < NT; ++n) mma_16x8x16<T>(o[k][n], a, pt[n][0], pt[n][1]);
      }
    }
  }

  // ---- scores --------------------------------------------------------------------------------

  __device__ void collect(int tile, float (&weight)[2], int parity) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weight[half] += __shfl_xor_sync(0xffffffffu, weight[half], 1);
      weight[half] += __shfl_xor_sync(0xffffffffu, weight[half], 2);
    }
    const float mine = (lane & 1) ? weight[1] : weight[0];
    if ((lane & 3) < 2 && item.row_block == 0) {  // collected rows lie in the first block
      const int t = (lane >> 2) + (lane & 1) * 8;
      if constexpr (RG == 1) {
        store_hint_score(p, item.request, item.head, token_of(tile) + t, mine);
      } else {
        score_smem[((group_id * 2 + parity) * RG + rg) * kTileTokens + t] = mine;
      }
    }
  }

  // Sum what the group's warps collected one tile ago: a barrier lies in between.
  __device__ void flush_scores(int tile, int parity) {
    if constexpr (C::SCORE == ScoreMode::kHint && RG > 1) {
      if (rg == 0 && lane < kTileTokens && item.row_block == 0) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < RG; ++r) {
          sum += score_smem[((group_id * 2 + parity) * RG + r) * kTileTokens + lane];
        }
        store_hint_score(p, item.request, item.head, token_of(tile) + lane, sum);
      }
    }
  }

  // Codes of the first and last query's rows, [unit, row, 64] in the order of `exact_position`.
  __device__ void store_exact(int tile, int n, const float (&w)[4]) {
    if (item.row_block != 0 || (rg * NT + n) * 8 >= p.score_width) return;
    const int row = (rg * NT + n) * 8 + (lane >> 2);
    // After the transposition this lane holds row lane / 4, whose shift is at lane / 8.
    const int low = __shfl_sync(0xffffffffu, __float_as_int(factor[n][0]), lane >> 3);
    const int high = __shfl_sync(0xffffffffu, __float_as_int(factor[n][1]), lane >> 3);
    const uint32_t shifts = static_cast<uint32_t>(((lane >> 2) & 1 ? high : low) & 0xffff) * 0x10001u;
    const uint32_t first = transpose_8x8(pack<__nv_bfloat16>(w[0], w[1]));
    const uint32_t second = transpose_8x8(pack<__nv_bfloat16>(w[2], w[3]));
    if (row >= p.score_width) return;
    const int token = token_of(tile);
    uint8_t* at = static_cast<uint8_t*>(p.score) + item.request * p.score_batch_stride +
                  item.head * p.score_head_stride +
                  static_cast<int64_t>(token / kUnitTokens) * p.score_unit_stride + row * 64 +
                  (lane & 3) * 16 + (token & 48) / 4;
    *reinterpret_cast<uint32_t*>(at) =
        __byte_perm(exact_codes(first, shifts), exact_codes(second, shifts), 0x6420);
  }

  // ---- one item ------------------------------------------------------------------------------

  __device__ void begin_item() {
    list_count = list_tiles = 0;
    tail_low = first_visible(item.length, item.queries, p.window);
    first_token = aligned_down(tail_low);
    tile_end = min(ceil_div(item.length - first_token, kTileTokens), item.end * kUnitTiles);
    const int rows = item.queries * (p.num_heads / p.num_kv_heads);
    num_rows = min(C::ROWS, rows - item.row_block * C::ROWS);
  }

  __device__ void run_item() {
    begin_item();
    const int first = item.begin * kUnitTiles + group_id;
    int fetched = prefetch(first);
#pragma unroll
    for (int i = 0; i < C::STAGES - 1; ++i) {
      const int following = prefetch(first + (i + 1) * KVW);
      issue(first + i * KVW, i, fetched);
      fetched = following;
    }
    fetch_queries(item, q);
    reset();
    int stage = 0, parity = 0;
    for (int tile = first; tile < tile_end; tile += KVW) {
      const int ahead = tile + (C::STAGES - 1) * KVW;
      const int following = prefetch(ahead + KVW);
      cp_async_wait<C::STAGES - 2>();
      group_sync();
      if (tile != first) flush_scores(tile - KVW, parity ^ 1);
      issue(ahead, stage == 0 ? C::STAGES - 1 : stage - 1, fetched);
      fetched = following;
      compute(tile, stage, parity);
      stage = stage == C::STAGES - 1 ? 0 : stage + 1;
      parity ^= 1;
    }
    cp_async_wait<0>();
    group_sync();
    if (first < tile_end) {
      const int last = first + (tile_end - 1 - first) / KVW * KVW;
      flush_scores(last, parity ^ 1);
    }
    finish();
  }

  // Merge the groups' private results in order; write the row block or a partial result.
  __device__ void finish() {
    float* buffer = reinterpret_cast<float*>(smem + C::MERGE_AT);
    float* ml = buffer + KVW * C::ROWS * C::MERGE_PITCH;
    if constexpr (C::MERGE_AT == 0) __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float l = row_sum[n][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l += __shfl_xor_sync(0xffffffffu, l, step);
        const int row = (rg * NT + n) * 8 + (lane & 3) * 2 + j;
        if (lane < 4) {
          ml[(group_id * C::ROWS + row) * 2] = row_max[n][j];
          ml[(group_id * C::ROWS + row) * 2 + 1] = l;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < KSTEPS; ++k) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = (rg * NT + n) * 8 + (lane & 3) * 2 + (i & 1);
          const int d = k * 16 + (lane >> 2) + (i >> 1) * 8;
          buffer[(group_id * C::ROWS + row) * C::MERGE_PITCH + d] = o[k][n][i];
        }
      }
    }
    __syncthreads();
    const bool whole = item.is_whole();
    float* partial = partial_of<D>(p, blockIdx.x, item.begin == 0 ? 1 : 0, C::ROWS);
    const int group = p.num_heads / p.num_kv_heads;
    for (int i = threadIdx.x; i < num_rows * (D / 4); i += C::THREADS) {
      const int row = i / (D / 4), d = (i % (D / 4)) * 4;
      float top = kNoMax, l = 0.0f;
#pragma unroll
      for (int g = 0; g < KVW; ++g) top = fmaxf(top, ml[(g * C::ROWS + row) * 2]);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int g = 0; g < KVW; ++g) {
        const float f = exp2f(ml[(g * C::ROWS + row) * 2] - top);
        const float4 part = *reinterpret_cast<const float4*>(
            buffer + (g * C::ROWS + row) * C::MERGE_PITCH + d);
        l = fmaf(ml[(g * C::ROWS + row) * 2 + 1], f, l);
        sum.x = fmaf(part.x, f, sum.x);
        sum.y = fmaf(part.y, f, sum.y);
        sum.z = fmaf(part.z, f, sum.z);
        sum.w = fmaf(part.w, f, sum.w);
      }
      if (whole) {
        const Row r(item.row_block * C::ROWS + row, group, item.queries);
        const int head = item.head * group + r.head, token = item.query0 + r.query;
        float f;
        const float lse = finish_row(top, l, sink_of(p, head), f);
        store_out4<T>(p, token, head, d,
                      make_float4(sum.x * f, sum.y * f, sum.z * f, sum.w * f));
        if (d == 0) p.lse[static_cast<int64_t>(token) * p.num_heads + head] = lse * kLn2;
      } else {
        __stcg(reinterpret_cast<float4*>(partial + row * D + d), sum);
        if (d == 0) {
          __stcg(reinterpret_cast<float2*>(partial + C::ROWS * D + 2 * row), make_float2(top, l));
        }
      }
    }
    __syncthreads();
  }
};

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1)
    attention_mma_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kRows = C::ROWS;
  const int rows = p.max_queries * (p.num_heads / p.num_kv_heads);
  SliceWalk walk;
  walk.start(p, ceil_div(rows, kRows));
  __syncthreads();
  MmaKernel<C> kernel(p, shared);
  while (walk.next(p, kernel.item, threadIdx.x, C::THREADS, [] { __syncthreads(); })) {
    const int own = kernel.item.queries * (p.num_heads / p.num_kv_heads);
    if (kernel.item.row_block * kRows >= own) continue;  // a short request has fewer row blocks
    kernel.run_item();
    if (!kernel.item.is_whole()) {
      merge_partials<typename C::T, C::D, 1, 4>(
          p, ItemParts(kernel.item, walk.unit, walk.slice()), kernel.item, kRows,
          kernel.item.row_block * kRows, kernel.num_rows, threadIdx.x, C::THREADS, kernel.flag,
          [] { __syncthreads(); });
    }
  }
}

// Grid of a launch: every multiprocessor once.
inline int num_multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

template <typename C>
const char* launch_mma(const AttentionParams& p, cudaStream_t stream) {
  static const cudaError_t configured = cudaFuncSetAttribute(
      attention_mma_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM_BYTES);
  if (configured != cudaSuccess) return cudaGetErrorString(configured);
  const int grid = num_multiprocessors();
  if (p.partials_floats < static_cast<int64_t>(2) * grid * C::ROWS * (C::D + 2)) {
    return "the workspace is smaller than make_workspace() makes it";
  }
  attention_mma_kernel<C><<<grid, C::THREADS, C::SMEM_BYTES, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Ring depths of 8 warps: 128 KB on GPUs with 163 KB of shared memory, 192 KB from sm_90 on.
inline bool has_large_smem() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes >= 200 * 1024;
}

}  // namespace vegas
