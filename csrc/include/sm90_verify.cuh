// Verification attention on Hopper: the same operation as the mma.sync path, for any row count.
//
//   S = Q K^T;  P = 2^(S c - m);  O += P V;  score[t] = sum over collected rows of P f
//
// A block owns an equal slice of all work, in tiles of TN tokens of one (request, KV head). WG
// consumer warpgroups hold 64 packed rows each (Q, S, P and O in registers, K and V from shared
// memory). Q K^T of the next tile and P V of the last one are in flight while softmax runs. Helper
// warps copy tiles: with the bulk tensor engine, 16 tokens at a time (one box of K and V where they
// lie side by side, else one of each and eight tokens; boxes are few and large because each takes
// its warp about 120 clocks to issue), or at d 128 up to 64 rows by cp.async, which is faster there
// (KERNEL_LOG.md). To collect, a consumer warp leaves its registers of P in shared memory; score
// warps reduce, code and store them, off the critical path.
//
// Limit: memory bandwidth; at d 64 and 128 rows also exponentials and tensor cores (58 % each).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "attention.cuh"
#include "sm90.cuh"

namespace vegas {

// How tiles reach shared memory: by the bulk tensor engine, or by cp.async in whole tokens.
enum class Copy : int { kBoxes, kTokens };

template <typename T_, int D_, int WG_, int TN_, int STAGES_, int BLOCKS_, Copy COPY_,
          ScoreMode SCORE_>
struct Sm90Config {
  using T = T_;
  static constexpr int D = D_, WG = WG_, TN = TN_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr Copy COPY = COPY_;
  static constexpr ScoreMode SCORE = SCORE_;
  static constexpr int ROWS = 64 * WG, CONSUMERS = 128 * WG;
  // Helper warps: some copy, the others score. Two consumer warpgroups need more registers than an
  // even split gives, so that there the helpers are a warpgroup that hands registers over.
  static constexpr bool COLLECTS = SCORE != ScoreMode::kOff;
  static constexpr bool REBALANCE = WG > 1 || (COLLECTS && COPY == Copy::kTokens);
  static constexpr int PRODUCERS = COPY == Copy::kBoxes ? 1 : 4;
  static constexpr int SCORERS = WG > 1 ? 2 : 1;
  static constexpr int HELPERS = REBALANCE ? 12 - 4 * WG : PRODUCERS + (COLLECTS ? 1 : 0);
  // Of the 168 a thread that a block of twelve warps starts with: more would wait for ever.
  static constexpr int CONSUMER_REGISTERS = WG == 1 ? 240 : 232;
  static constexpr int HELPER_REGISTERS = WG == 1 ? 128 : 40;
  static_assert(WG * CONSUMER_REGISTERS + (3 - WG) * HELPER_REGISTERS <= 3 * 168,
                "registers of the block");
  static constexpr int THREADS = CONSUMERS + 32 * HELPERS;
  static constexpr int WALKERS = CONSUMERS + 32 * (PRODUCERS + (COLLECTS ? SCORERS : 0));
  // A tile in shared memory: [8 tokens][panel][8 x 128 bytes], a panel being 64 elements of K or V.
  // In this order one box of the tensor map fills two octets with everything they have.
  static constexpr int ATOM_BYTES = 1024, PANELS = D / 64;
  static constexpr int V_BYTES = PANELS * ATOM_BYTES;  // where V's panels begin
  static constexpr int OCTET_BYTES = 2 * V_BYTES;
  static constexpr int STAGE_BYTES = TN / 8 * OCTET_BYTES;
  // Tiles whose P waits for the score warps. A multiple of SCORERS, so that one warp sees every
  // phase of a slot's barrier: a wait for a phase two ahead would pass at once.
  static constexpr int SLOTS = 2;
  // What a warp leaves for the score warps: sums over pairs of rows (hint), or P and code shifts.
  static constexpr int WARP_BYTES = SCORE == ScoreMode::kHint ? TN / 16 * 256 : TN / 16 * 512 + 256;
  static constexpr int SLOT_BYTES = COLLECTS ? 4 * WG * WARP_BYTES : 0;
  static constexpr int BARRIERS = 2 * STAGES + 2 * SLOTS;
  static constexpr int SMEM_BYTES =
      1024 + STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES + BARRIERS * 8 + 16;
  static_assert(D == 64 || D == 128, "panels are 64 elements wide");
  static_assert(TN == 64 || TN == 128, "tiles are one or two units");
  static_assert(SLOTS % SCORERS == 0, "a slot belongs to one score warp");
  static_assert(COPY == Copy::kBoxes || (D == 128 && WG == 1),
                "one instruction copies one token of d 128; four warps need registers");
};

// Counter of a ring: stage, and the parity of its current phase.
template <int N>
struct Ring {
  int stage = 0, phase = 0;
  __device__ void advance() {
    if (++stage == N) stage = 0, phase ^= 1;
  }
};

// K and V of a token and head are one stretch of memory.
__host__ __device__ inline bool is_interleaved(const AttentionParams& p) {
  return static_cast<const char*>(p.cache.v) - static_cast<const char*>(p.cache.k) ==
         p.head_dim * 2;
}

template <typename C>
struct Sm90Kernel {
  using T = typename C::T;
  static constexpr int D = C::D, TN = C::TN, KSTEPS = D / 16, TSTEPS = TN / 16;
  static constexpr unsigned kAll = 0xffffffffu;
  const AttentionParams& p;
  uint32_t tiles;  // shared address of stage 0, 1024-byte aligned; slots and barriers follow
  int warp, lane, group;
  int sharers;  // consumer warps that may hold collected rows; the others hand nothing over
  SliceWalk walk;
  Item item;
  int first_token, limit, end_tile;

  __device__ Sm90Kernel(const AttentionParams& params, char* shared) : p(params) {
    tiles = (smem_address(shared) + 1023) & ~1023u;
    warp = threadIdx.x >> 5;
    lane = threadIdx.x & 31;
    group = p.num_heads / p.num_kv_heads;
    sharers = warps_of(p.max_queries);
  }

  __device__ uint32_t slot(int i) const {
    return tiles + C::STAGES * C::STAGE_BYTES + i * C::SLOT_BYTES;
  }
  __device__ uint32_t barrier(int i) const { return slot(C::SLOTS) + i * 8; }
  __device__ uint32_t full(int stage) const { return barrier(stage); }
  __device__ uint32_t empty(int stage) const { return barrier(C::STAGES + stage); }
  __device__ uint32_t slot_full(int i) const { return barrier(2 * C::STAGES + i); }
  __device__ uint32_t slot_empty(int i) const { return barrier(2 * C::STAGES + C::SLOTS + i); }

  __device__ void init_barriers() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::STAGES; ++i) {
        mbarrier_init(full(i), C::COPY == Copy::kBoxes ? 1 : 32 * C::PRODUCERS);
        mbarrier_init(empty(i), 4 * C::WG);
      }
      for (int i = 0; i < C::SLOTS; ++i) {
        mbarrier_init(slot_full(i), max(sharers, 1));
        mbarrier_init(slot_empty(i), 1);
      }
      fence_barrier_init();
    }
  }

  // The next item that has rows in its row block; the same for every warp.
  __device__ bool next_item() {
    while (walk.next(p, item, threadIdx.x, C::WALKERS, [] { named_barrier(4, C::WALKERS); })) {
      if (item.row_block * C::ROWS < item.queries * group) {
        first_token = aligned_down(first_visible(item.length, item.queries, p.window)) +
                      item.begin * kUnitTokens;
        limit = min(item.length, first_token + (item.end - item.begin) * kUnitTokens);
        // One at least, as the consumers expect, should lengths have changed since the schedule.
        end_tile = max(1, ceil_div(limit - first_token, TN));
        return true;
      }
    }
    return false;
  }

  // ---- copies --------------------------------------------------------------------------------

  // Looks up cache blocks of 16-token groups, 32 at a time and one batch ahead: under load a look-up
  // takes longer than a tile. `token_of` gives a group's first token.
  template <typename TokenOf>
  struct BlockLookup {
    const int32_t* table;
    int size, limit, lane, none;
    TokenOf token_of;
    int blocks, coming;
    __device__ void start() {
      blocks = load(lane);
      coming = load(32 + lane);
    }
    __device__ int load(int i) const {
      const int token = token_of(i);
      return token < limit ? table[token / size] : none;
    }
    // Block of group `i`; the caller moves on with `advance` when i passes a multiple of 32.
    __device__ int get(int i) const { return __shfl_sync(kAll, blocks, i & 31); }
    __device__ void advance(int i) {
      blocks = coming;
      coming = load(i + 32 + lane);
    }
  };
  template <typename TokenOf>
  __device__ BlockLookup<TokenOf> block_lookup(int none, TokenOf token_of) const {
    BlockLookup<TokenOf> made{p.block_table + item.request * p.table_stride,
                              p.cache.block_size, limit, lane, none, token_of, 0, 0};
    made.start();
    return made;
  }

  // cp.async: an instruction copies K and V of one token, 512 bytes that mostly lie together.
  __device__ void produce_tokens(int self) {
    constexpr int kGroups = TN / 16 / C::PRODUCERS;  // of a tile, for this warp
    const int size = p.cache.block_size;
    const int64_t token_bytes = p.cache.token_stride * 2;
    const char* source = static_cast<const char*>(lane < 16 ? p.cache.k : p.cache.v) +
                         (lane & 15) * 16;
    const uint32_t place = tiles + self * kGroups * 2 * C::OCTET_BYTES +
                           (lane >> 4) * C::V_BYTES + ((lane >> 3) & 1) * C::ATOM_BYTES;
    Ring<C::STAGES> ring;
    while (next_item()) {
      const char* head = source + item.head * p.cache.head_stride * 2;
      auto token_of = [first = first_token, self](int i) {
        return first + i / kGroups * TN + (self * kGroups + i % kGroups) * 16;
      };
      auto lookup = block_lookup(0, token_of);
      int i = 0;
      for (int tile = 0; tile < end_tile; ++tile) {
        mbarrier_wait(empty(ring.stage), ring.phase ^ 1);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int token = token_of(i), left = limit - token;
          const char* from = head + lookup.get(i) * p.cache.block_stride * 2 +
                             token % size * token_bytes;
          const uint32_t to = place + ring.stage * C::STAGE_BYTES + g * 2 * C::OCTET_BYTES;
#pragma unroll
          for (int t = 0; t < 16; ++t) {
            // Behind the limit zeros: 0 * NaN would be NaN.
            cp_async_16(to + t / 8 * C::OCTET_BYTES + t % 8 * 128 + ((lane ^ t) & 7) * 16,
                        from + t * token_bytes, t < left);
          }
          if ((++i & 31) == 0) lookup.advance(i);
        }
        mbarrier_arrive_after_copies(full(ring.stage));
        ring.advance();
      }
    }
  }

  __device__ void produce_boxes(const CUtensorMap* k_map, const CUtensorMap* v_map) {
    constexpr int kGroups = TN / 16;
    const int size = p.cache.block_size;
    const int head_panels = static_cast<int>(p.cache.head_stride / 64);
    const bool side_by_side = is_interleaved(p);
    Ring<C::STAGES> ring;
    while (next_item()) {
      // Lanes 0 .. TN / 16 - 1 copy 16 tokens each; behind the limit, zeros from outside.
      auto lookup = block_lookup(p.cache.num_blocks,
                                 [first = first_token](int i) { return first + i * 16; });
      int i = 0;
      for (int tile = 0; tile < end_tile; ++tile) {
        const int block = lookup.get(i + (lane & (kGroups - 1)));
        if (((i += kGroups) & 31) == 0) lookup.advance(i);
        mbarrier_wait(empty(ring.stage), ring.phase ^ 1);
        if (lane == 0) mbarrier_expect(full(ring.stage), C::STAGE_BYTES);
        __syncwarp();
        if (lane < kGroups) {
          const int octet = (first_token + tile * TN + lane * 16) % size / 8;
          const int panel = item.head * head_panels;
          const uint32_t target = tiles + ring.stage * C::STAGE_BYTES + lane * 2 * C::OCTET_BYTES;
          copy_box(target, k_map, full(ring.stage), panel, octet, block);
          if (!side_by_side) {
            copy_box(target + C::V_BYTES, v_map, full(ring.stage), panel, octet, block);
            copy_box(target + C::OCTET_BYTES, k_map, full(ring.stage), panel, octet + 1, block);
            copy_box(target + C::OCTET_BYTES + C::V_BYTES, v_map, full(ring.stage), panel,
                     octet + 1, block);
          }
        }
        ring.advance();
      }
    }
  }

  // ---- scores --------------------------------------------------------------------------------

  // Warps that hold collected rows; exact scores have bytes for two queries even if there is one.
  __device__ int warps_of(int queries) const {
    if (!p.rows) queries = min(queries, 2);
    const int rows = C::SCORE == ScoreMode::kExact ? p.score_width : queries * group;
    return min(4 * C::WG, ceil_div(rows, 16));
  }
  __device__ int num_writers() const {
    return C::COLLECTS && item.row_block == 0 ? warps_of(item.queries) : 0;
  }

  // What one of the score warps does: every SCORERS-th tile.
  __device__ void score_tiles(int self) {
    int count = 0, turn = 0;
    while (next_item()) {
      const int writers = num_writers();
      if (writers == 0) continue;
      for (int tile = 0; tile < end_tile; ++tile, ++count) {
        if (turn == self) {
          const int i = count % C::SLOTS;
          mbarrier_wait(slot_full(i), (count / C::SLOTS) & 1);
          if constexpr (C::SCORE == ScoreMode::kHint) {
            score_hint(tile, writers, i);
          } else {
            score_exact(tile, writers, i);
          }
        }
        turn = turn == C::SCORERS - 1 ? 0 : turn + 1;
      }
    }
  }

  __device__ void release_slot(int i) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(slot_empty(i));
  }

  // Sums over warps in bf16 pairs, then over the eight lanes that hold the same tokens: lanes that
  // differ in one bit exchange halves, which leaves lane l with tokens 2 l, 2 l + 1 of 64.
  __device__ void score_hint(int tile, int writers, int i) {
#pragma unroll 1
    for (int part = 0; part < TN / 64; ++part) {
      uint32_t v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      uint32_t from = slot(i) + part * 1024 + lane * 16;
#pragma unroll 1
      for (int w = 0; w < writers; ++w, from += C::WARP_BYTES) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t own[4];
          load_shared(from + half * 512, own);
#pragma unroll
          for (int j = 0; j < 4; ++j) v[4 * half + j] = add_bf16x2(own[j], v[4 * half + j]);
        }
      }
      if (part == TN / 64 - 1) release_slot(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) exchange(v[j], v[j + 4], 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) exchange(v[j], v[j + 2], 8);
      exchange(v[0], v[1], 4);
      store_pair(tile, part, unpack_bf16x2(v[0]));
    }
  }

  // low = own half + the partner's same half; lanes with `bit` set keep the high one.
  __device__ void exchange(uint32_t& low, uint32_t high, int bit) const {
    const bool upper = lane & bit;
    const uint32_t mine = upper ? high : low, other = upper ? low : high;
    low = add_bf16x2(mine, __shfl_xor_sync(kAll, other, bit));
  }

  // Codes of the first and last query's rows, [unit, row, 64]; 16 bytes per lane and row in the
  // order in which P holds them (`exact_position`).
  __device__ void score_exact(int tile, int writers, int i) {
    // One half of a warp's rows of one unit at a time, with few registers.
#pragma unroll 1
    for (int step = 0; step < writers * (TN / 64) * 2; ++step) {
      const int half = step & 1, part = (step >> 1) % (TN / 64), w = (step >> 1) / (TN / 64);
      const uint32_t from = slot(i) + w * C::WARP_BYTES;
      uint32_t shifts[2], words[4];
      load_shared(from + TSTEPS * 512 + lane * 8, shifts);
      const uint32_t shift = half ? shifts[1] : shifts[0];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t own[4];
        load_shared(from + (part * 4 + t) * 512 + lane * 16, own);
        words[t] = __byte_perm(exact_codes(half ? own[1] : own[0], shift),
                               exact_codes(half ? own[3] : own[2], shift), 0x6420);
      }
      const int token = first_token + tile * TN + part * 64;
      const int row = w * 16 + (lane >> 2) + half * 8;
      if (token >= limit || row >= p.score_width) continue;
      uint8_t* at = static_cast<uint8_t*>(p.score) + item.request * p.score_batch_stride +
                    item.head * p.score_head_stride +
                    static_cast<int64_t>(token / 64) * p.score_unit_stride + row * 64 +
                    (lane & 3) * 16;
      *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    release_slot(i);
  }

  __device__ static uint32_t hint_byte(float weight) {
    return weight > 0.0f ? encode_score(__float_as_uint(weight)) : 0;
  }

  // Scores of tokens 2 * lane and 2 * lane + 1 of 64.
  __device__ void store_pair(int tile, int part, float2 sum) const {
    const int token = first_token + tile * TN + part * 64 + 2 * lane;
    if (TN > kUnitTokens && token >= ((limit + 63) & ~63)) return;
    const int64_t at =
        item.request * p.score_batch_stride + item.head * p.score_head_stride + token;
    if (p.score_is_bf16) {
      const float x = sum.x > 0.0f ? fminf(sum.x, 3e38f) : 0.0f;
      const float y = sum.y > 0.0f ? fminf(sum.y, 3e38f) : 0.0f;
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.score) + at) =
          pack<__nv_bfloat16>(x, y);
    } else {
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.score) + at) =
          static_cast<uint16_t>(hint_byte(sum.x) | (hint_byte(sum.y) << 8));
    }
  }

  // ---- consumers -----------------------------------------------------------------------------

  using Fragments = uint32_t[TSTEPS][4];
  uint32_t q[KSTEPS][4];
  float o[D / 2];
  Fragments probabilities;
  float row_max[2], row_sum[2], rescale[2];
  uint32_t weights[2];  // of the thread's rows, twice: hint: factors, bf16; exact: code shifts
  float scale_log2;
  float hint_log2[2];  // of the thread's rows: the normaliser; infinite where nothing is collected

  __device__ int packed_row(int i) const {
    return item.row_block * C::ROWS + warp * 16 + (lane >> 2) + i * 8;
  }

  __device__ void load_queries() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Row r(packed_row(i), group, item.queries);
      const T* row = static_cast<const T*>(p.q) + (item.query0 + r.query) * p.q_token_stride +
                     (item.head * group + r.head) * p.q_head_stride + (lane & 3) * 2;
#pragma unroll
      for (int k = 0; k < KSTEPS; ++k) {
        q[k][i] = r.is_real ? *reinterpret_cast<const uint32_t*>(row + k * 16) : 0u;
        q[k][i + 2] = r.is_real ? *reinterpret_cast<const uint32_t*>(row + k * 16 + 8) : 0u;
      }
      row_max[i] = kNoMax;
      row_sum[i] = 0.0f;
      rescale[i] = 1.0f;
      weights[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
    load_hints();
  }

  static constexpr int kWeights = C::SCORE == ScoreMode::kOff ? 0 : 2;

  // Fetched with the queries: under load the way to memory takes longer than a tile. An infinite
  // normaliser makes all scores of a row nothing.
  __device__ void load_hints() {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const Row r(packed_row(i), group, item.queries);
      const bool taken = C::SCORE == ScoreMode::kExact
                             ? packed_row(i) < p.score_width
                             : is_collected(p, item.request, r.query, item.queries);
      const int at = item.request * p.num_heads + item.head * group + r.head;
      hint_log2[i] = r.is_real && taken ? kLog2e * p.hint[at] : INFINITY;
    }
  }

  // What turns P into scores changes with the maxima.
  __device__ void update_weights() {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      if constexpr (C::SCORE == ScoreMode::kExact) {
        const int shift = exact_shift(row_max[i], hint_log2[i]);
        weights[i] = static_cast<uint32_t>(shift & 0xffff) * 0x10001u;
      } else {
        const float factor = hint_factor(row_max[i], hint_log2[i]);
        weights[i] = pack<__nv_bfloat16>(factor, factor);
      }
    }
  }

  // S = Q K^T of the stage.
  __device__ void multiply_keys(float (&s)[TN / 2], int stage) {
    const uint32_t base = tiles + stage * C::STAGE_BYTES;
#pragma unroll
    for (int k = 0; k < KSTEPS; ++k) {
      const uint32_t at = base + (k / 4) * C::ATOM_BYTES + (k % 4) * 32;
      wgmma<T, 0>(s, q[k][0], q[k][1], q[k][2], q[k][3], wgmma_operand(at, 16, C::OCTET_BYTES),
                  k > 0);
    }
    wgmma_commit();
  }

  // O += P V of the stage.
  __device__ void multiply_values(int stage) {
    const uint32_t base = tiles + stage * C::STAGE_BYTES + C::V_BYTES;
#pragma unroll
    for (int t = 0; t < TSTEPS; ++t) {
      wgmma<T, 1>(
          o, probabilities[t][0], probabilities[t][1], probabilities[t][2], probabilities[t][3],
          wgmma_operand(base + t * 2 * C::OCTET_BYTES, C::ATOM_BYTES, C::OCTET_BYTES), 1);
    }
    wgmma_commit();
  }

  __device__ void mask(float (&s)[TN / 2], int tile) const {
    const int token = first_token + tile * TN;
    const bool above = token + TN > min(limit, item.length - item.queries + 1);
    const bool below = p.window > 0 && token < item.length - p.window;
    if (!above && !below) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const Row r(packed_row(row), group, item.queries);
      const int seen = item.length - item.queries + r.query + 1;
      const int high = min(limit, seen), low = p.window > 0 ? seen - p.window : 0;
#pragma unroll
      for (int i = 0; i < TN / 2; ++i) {
        const int t = token + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1);
        if (((i >> 1) & 1) == row && (t >= high || t < low)) s[i] = -INFINITY;
      }
    }
  }

  // Makes a tile that arrived ready for the tensor cores. cp.async needs a fence between the two
  // ways to shared memory. Boxes bring rows behind the request's end, which may hold anything, and
  // 0 * NaN is NaN: they are cleared in V.
  __device__ void make_ready(int stage, int tile) const {
    if constexpr (C::COPY == Copy::kTokens) {
      fence_async_proxy();
      return;
    }
    const int token = first_token + tile * TN, rows = item.length - token;
    if (rows <= 0 || rows >= TN || (rows & 15) == 0) return;
    const int pieces = (16 - (rows & 15)) * 8 * C::PANELS;
    const uint32_t base = tiles + stage * C::STAGE_BYTES + C::V_BYTES;
    for (int i = threadIdx.x & 127; i < pieces; i += 128) {
      const int row = rows + i / (8 * C::PANELS), column = i % (8 * C::PANELS);
      clear_shared_16(base + (row >> 3) * C::OCTET_BYTES + (column >> 3) * C::ATOM_BYTES +
                      (row & 7) * 128 + (column & 7) * 16);
    }
    fence_async_proxy();
    named_barrier(2 + (warp >> 2), 128);
  }

  // New maxima where the tile exceeds them, as whole numbers: P of any two maxima differ by a
  // power of two, and exact codes by whole steps.
  __device__ void raise(const float (&s)[TN / 2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = -INFINITY;
#pragma unroll
      for (int i = 0; i < TN / 2; ++i) {
        if (((i >> 1) & 1) == row) top = fmaxf(top, s[i]);
      }
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = ceilf(fmaxf(top, __shfl_xor_sync(kAll, top, 2)) * scale_log2);
      const float next = fmaxf(top, row_max[row]);
      rescale[row] = exp2f(row_max[row] - next);
      row_max[row] = next;
      row_sum[row] *= rescale[row];
    }
    update_weights();
  }

  // `next` = P, rounded; the sums are of unrounded values.
  __device__ float2 exponentials(const float (&s)[TN / 2], Fragments& next) const {
    float sums[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < TN / 2; i += 2) {
      const int row = (i >> 1) & 1;
      const float low = exp2_fast(fmaf(s[i], scale_log2, -row_max[row]));
      const float high = exp2_fast(fmaf(s[i + 1], scale_log2, -row_max[row]));
      sums[row][0] += low;
      sums[row][1] += high;
      next[i / 8][(i & 7) / 2] = pack<T>(low, high);
    }
    return make_float2(sums[0][0] + sums[0][1], sums[1][0] + sums[1][1]);
  }

  // Returns whether O must be multiplied by `rescale`. Maxima are left alone until a sum shows
  // that one is far too low: no comparison per logit.
  __device__ bool softmax(const float (&s)[TN / 2], Fragments& next) {
    float2 sums = exponentials(s, next);
    const bool raised = __any_sync(kAll, fmaxf(sums.x, sums.y) > kSumLimit);
    if (raised) {
      raise(s);
      sums = exponentials(s, next);
    }
    row_sum[0] += sums.x;
    row_sum[1] += sums.y;
    return raised;
  }

  // Moves `next` into the registers that the tensor cores read, after they are done with the old
  // ones. An exclusive or with a zero that the assembler cannot see through: it would merge plain
  // moves with the conversions before the wait, and then serialise the products (C7513).
  __device__ void adopt(const Fragments& next) {
    const uint32_t zero = static_cast<uint32_t>(p.batch) >> 30;
#pragma unroll
    for (int t = 0; t < TSTEPS; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) probabilities[t][i] = next[t][i] ^ zero;
    }
  }

  // P as bf16 pairs: float16 has no range for the factors.
  __device__ uint32_t rounded(int t, int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return probabilities[t][i];
    const uint32_t bits = probabilities[t][i];
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    return pack<__nv_bfloat16>(pair.x, pair.y);
  }

  // Two tokens' P of the thread's two rows, weighted and summed.
  __device__ uint32_t weighted(int t, int i) const {
    return fma_bf16x2(rounded(t, i), weights[0], mul_bf16x2(rounded(t, i + 1), weights[1]));
  }

  // Hands the warp's scores to the score warps, while the tensor cores read the registers of P.
  __device__ void leave_scores(int writers, int& count) {
    if (writers == 0 || warp >= sharers) return;
    const int i = count % C::SLOTS;
    mbarrier_wait(slot_empty(i), ((count / C::SLOTS) & 1) ^ 1);
    ++count;
    if (warp < writers) {
      const uint32_t to = slot(i) + warp * C::WARP_BYTES;
      if constexpr (C::SCORE == ScoreMode::kHint) {
#pragma unroll
        for (int t = 0; t < TSTEPS; t += 2) {
          const uint32_t sums[4] = {weighted(t, 0), weighted(t, 2), weighted(t + 1, 0),
                                    weighted(t + 1, 2)};
          store_shared(to + t * 256 + lane * 16, sums);
        }
      } else {
#pragma unroll
        for (int t = 0; t < TSTEPS; ++t) {
          const uint32_t own[4] = {rounded(t, 0), rounded(t, 1), rounded(t, 2), rounded(t, 3)};
          store_shared(to + t * 512 + lane * 16, own);
        }
        store_shared(to + TSTEPS * 512 + lane * 8, weights);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(slot_full(i));
  }

  __device__ void apply_rescale() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= rescale[(i >> 1) & 1];
  }

  __device__ void consume() {
    Ring<C::STAGES> ring;
    int count = 0;  // tiles handed to the score warps
    scale_log2 = p.scale * kLog2e;
    while (next_item()) {
      load_queries();
      const int writers = num_writers();
      float s[TN / 2];
      Fragments next;
      mbarrier_wait(full(ring.stage), ring.phase);
      make_ready(ring.stage, 0);
      wgmma_fence();
      multiply_keys(s, ring.stage);
      wgmma_wait<0>();
      wgmma_settle(s);
      mask(s, 0);
      raise(s);  // from nothing; O is still zero
      softmax(s, next);
      adopt(next);
      int last = ring.stage;
      ring.advance();
      for (int tile = 1; tile < end_tile; ++tile) {
        mbarrier_wait(full(ring.stage), ring.phase);
        make_ready(ring.stage, tile);
        wgmma_settle(o);
        wgmma_fence();
        multiply_keys(s, ring.stage);
        multiply_values(last);
        leave_scores(writers, count);
        wgmma_wait<1>();
        wgmma_settle(s);
        mask(s, tile);
        const bool raised = softmax(s, next);
        wgmma_wait<0>();
        wgmma_settle(o);
        if (lane == 0) mbarrier_arrive(empty(last));
        if (raised) apply_rescale();
        adopt(next);
        last = ring.stage;
        ring.advance();
      }
      wgmma_settle(o);
      wgmma_fence();
      multiply_values(last);
      leave_scores(writers, count);
      wgmma_wait<0>();
      wgmma_settle(o);
      if (lane == 0) mbarrier_arrive(empty(last));
      finish();
    }
  }

  __device__ void finish() {
    // Read again: rather a load per item than a register through the main loop.
    const int4 known = walk.known(item.request);
    item.query0 = known.z;
    item.units = walk.known(item.request + 1).x - known.x;
    const bool whole = item.is_whole();
    float* partial = partial_of<D>(p, blockIdx.x, item.begin == 0 ? 1 : 0, C::ROWS);
    const int row0 = item.row_block * C::ROWS;
    const int rows = min(C::ROWS, item.queries * group - row0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = row_sum[i];
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      const int local = packed_row(i) - row0;
      if (local >= rows) continue;
      const int column = (lane & 3) * 2;
      if (!whole) {
        float* target = partial + local * D + column;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          __stcg(reinterpret_cast<float2*>(target + j * 8),
                 make_float2(o[j * 4 + i * 2], o[j * 4 + i * 2 + 1]));
        }
        if ((lane & 3) == 0) {
          __stcg(reinterpret_cast<float2*>(partial + C::ROWS * D + 2 * local),
                 make_float2(row_max[i], sum));
        }
        continue;
      }
      const Row r(row0 + local, group, item.queries);
      const int head = item.head * group + r.head, token = item.query0 + r.query;
      float f;
      const float lse = finish_row(row_max[i], sum, sink_of(p, head), f);
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        *reinterpret_cast<uint32_t*>(out + j * 8 + column) =
            pack<T>(o[j * 4 + i * 2] * f, o[j * 4 + i * 2 + 1] * f);
      }
      if ((lane & 3) == 0) p.lse[static_cast<int64_t>(token) * p.num_heads + head] = lse * kLn2;
    }
    if (!whole) {
      __shared__ int flag;
      constexpr int kMergeElements = C::WG == 1 && D == 128 ? 4 : 2;
      constexpr int kMergeParts = C::WG == 1 && D == 128 ? 8 : 4;
      merge_partials<T, D, kMergeElements, kMergeParts>(
          p, ItemParts(item, walk.unit, walk.slice()), item, C::ROWS, row0, rows,
          threadIdx.x, C::CONSUMERS, &flag, [] { named_barrier(1, C::CONSUMERS); });
    }
  }
};

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    sm90_verify_kernel(const __grid_constant__ AttentionParams p,
                       const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) char shared[];
  Sm90Kernel<C> kernel(p, shared);
  kernel.init_barriers();
  kernel.walk.start(p, ceil_div(p.max_queries * kernel.group, C::ROWS));
  __syncthreads();
  if (kernel.warp < 4 * C::WG) {
    if constexpr (C::REBALANCE) raise_registers<C::CONSUMER_REGISTERS>();
    kernel.consume();
  } else {
    if constexpr (C::REBALANCE) lower_registers<C::HELPER_REGISTERS>();
    const int helper = kernel.warp - 4 * C::WG;
    if (helper < C::PRODUCERS) {
      if constexpr (C::COPY == Copy::kTokens) {
        kernel.produce_tokens(helper);
      } else {
        prefetch_tensor_map(&k_map);
        prefetch_tensor_map(&v_map);
        kernel.produce_boxes(&k_map, &v_map);
      }
    } else if (C::COLLECTS && helper < C::PRODUCERS + C::SCORERS) {
      kernel.score_tiles(helper - C::PRODUCERS);
    }
  }
#endif
}

// ---- launch ------------------------------------------------------------------------------------

// Tensor maps of K and V; false where the driver refuses.
bool make_maps(const AttentionParams& p, CUtensorMap* k_map, CUtensorMap* v_map);

template <typename C>
const char* launch_sm90(const AttentionParams& p, cudaStream_t stream) {
  static const cudaError_t configured = cudaFuncSetAttribute(
      sm90_verify_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM_BYTES);
  if (configured != cudaSuccess) return cudaGetErrorString(configured);
  int device = 0, units = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device);
  const int grid = units * C::BLOCKS;
  if (p.partials_floats < static_cast<int64_t>(2) * grid * C::ROWS * (C::D + 2)) {
    return "the workspace is smaller than make_workspace() makes it";
  }
  CUtensorMap k_map, v_map;
  if (!make_maps(p, &k_map, &v_map)) return "the driver refused a tensor map of the KV cache";
  sm90_verify_kernel<C><<<grid, C::THREADS, C::SMEM_BYTES, stream>>>(p, k_map, v_map);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int D, int WG, int TN, int STAGES, int BLOCKS, Copy COPY>
const char* launch_mode(const AttentionParams& p, cudaStream_t stream) {
  switch (p.score_mode) {
    case ScoreMode::kOff:
      return launch_sm90<Sm90Config<T, D, WG, TN, STAGES, BLOCKS, COPY, ScoreMode::kOff>>(p, stream);
    case ScoreMode::kHint:
      return launch_sm90<Sm90Config<T, D, WG, TN, STAGES, BLOCKS, COPY, ScoreMode::kHint>>(p, stream);
    default:
      return launch_sm90<Sm90Config<T, D, WG, TN, STAGES, BLOCKS, COPY, ScoreMode::kExact>>(p, stream);
  }
}

// One warpgroup up to 64 rows, else two; d 64 has work for two blocks per multiprocessor.
template <typename T, int D>
const char* verify_sm90(const AttentionParams& p, cudaStream_t stream) {
  const bool small = p.max_queries * (p.num_heads / p.num_kv_heads) <= 64;
  if constexpr (D == 64) {
    return small ? launch_mode<T, 64, 1, 64, 5, 2, Copy::kBoxes>(p, stream)
                 : launch_mode<T, 64, 2, 128, 4, 1, Copy::kBoxes>(p, stream);
  } else {
    return small ? launch_mode<T, 128, 1, 64, 6, 1, Copy::kTokens>(p, stream)
                 : launch_mode<T, 128, 2, 64, 5, 1, Copy::kBoxes>(p, stream);
  }
}

template <int D, DType TYPE>
const char* verify_attention_sm90_for(const AttentionParams& p, void* stream);


}  // namespace vegas
