// Sparse attention: one query per request over its slot list, then its dense tail.
//
// The products of attention_mma.cuh. Items are short (tens of tiles), so copies do not stop at an
// item's end: every warp runs its copies ahead of its products through all items of the slice, and
// results merge beside the ring. Tiles go to the warps in turn over the whole slice.
//
// Limit: memory bandwidth, plus a fixed cost: launch, three dependent loads before the first copy
// (lengths, slots, rows), merge.
#pragma once

#include "attention_mma.cuh"

namespace vegas {

// What the loops need to know of the requests from `first` on, in shared memory.
struct Requests {
  // As many as fit beside two blocks per multiprocessor.
  static constexpr int kWindow = 12;
  int first;
  int4* window;  // first unit (of one head), length, listed entries, start of the tail

  __device__ static int4 load(const AttentionParams& p, int request) {
    const bool real = request < p.batch;
    return make_int4(p.prefix[request], real ? p.seq_lens[request] : 0,
                     real ? p.counts[request] : 0, real ? p.tail_start[request] : 0);
  }
  __device__ int4 get(const AttentionParams& p, int request) const {
    return request - first < kWindow ? window[request - first] : load(p, request);
  }
};

// One item and the tiles of it that a warp still has to do.
struct SparseItem {
  Item item;
  int list_count, list_tiles, tail_low, first_token;
  int tile, tile_end;
};

template <typename C>
struct SparseKernel : MmaKernel<C> {
  using Base = MmaKernel<C>;
  using Base::KVW;
  using Base::group_id;
  using Base::lane;
  using Base::p;
  static constexpr int WINDOW_BYTES = Requests::kWindow * sizeof(int4);
  static constexpr int SMEM_BYTES = C::SMEM_BYTES + WINDOW_BYTES;
  static_assert((KVW & (KVW - 1)) == 0, "tiles are dealt out modulo the warps");

  // Where a walk through the slice stands.
  struct Cursor {
    int request, unit;
    int passed;  // tiles of earlier items
  };

  Requests requests;
  int slice, slice_end;
  Cursor ahead;  // of the copies
  SparseItem coming;
  bool any_coming;

  __device__ SparseKernel(const AttentionParams& params, char* shared) : Base(params, shared) {
    requests.window = reinterpret_cast<int4*>(shared + C::SMEM_BYTES);
  }

  // Finds the block's slice; every thread must call this. Loads that do not depend on each other
  // are asked for together: each round trip costs the call half a microsecond.
  __device__ bool start() {
    const int thread = static_cast<int>(threadIdx.x), heads = p.num_kv_heads;
    const int4 mine = Requests::load(p, min(thread, p.batch));
    const int next = p.prefix[min(thread + 1, p.batch)];
    const int total = p.prefix[p.batch] * heads;
    slice = slice_units(total, gridDim.x);
    ahead.unit = blockIdx.x * slice;
    slice_end = min(ahead.unit + slice, total);
    if (ahead.unit >= slice_end) return false;
    int request = __syncthreads_count(thread < p.batch && next * heads <= ahead.unit);
    for (int base = C::THREADS; base < p.batch; base += C::THREADS) {
      const int i = base + thread;
      request += __syncthreads_count(i < p.batch && p.prefix[i + 1] * heads <= ahead.unit);
    }
    ahead.request = requests.first = request;
    ahead.passed = 0;
    if (p.batch < C::THREADS) {
      const int i = thread - request;
      if (i >= 0 && i < Requests::kWindow && thread <= p.batch) requests.window[i] = mine;
    } else if (thread < Requests::kWindow && request + thread <= p.batch) {
      requests.window[thread] = Requests::load(p, request + thread);
    }
    __syncthreads();
    return true;
  }

  // The next item of a walk, with this warp's first tile.
  __device__ bool next(Cursor& at, SparseItem& found) const {
    if (at.unit >= slice_end) return false;
    int4 info = requests.get(p, at.request);
    int end = requests.get(p, at.request + 1).x;
    while (end * p.num_kv_heads <= at.unit) {
      ++at.request;
      info = requests.get(p, at.request);
      end = requests.get(p, at.request + 1).x;
    }
    Item& item = found.item;
    item.units = end - info.x;
    const int local = at.unit - info.x * p.num_kv_heads;
    item.request = item.query0 = at.request;
    item.head = local / item.units;
    item.begin = local - item.head * item.units;
    item.end = min(item.units, item.begin + slice_end - at.unit);
    item.length = info.y;
    item.queries = 1;
    item.row_block = 0;
    found.list_count = info.z;
    found.list_tiles = sparse_list_tiles(info.z);
    found.tail_low = info.w;
    found.first_token = aligned_down(info.w);
    const int first = item.begin * kUnitTiles;
    found.tile_end = min(sparse_tiles(info.z, info.w, info.y), item.end * kUnitTiles);
    found.tile = first + ((group_id - at.passed) & (KVW - 1));
    at.passed += found.tile_end - first;
    at.unit += item.end - item.begin;
    return true;
  }

  // Skips items that end before this warp's turn.
  __device__ void find_coming() {
    do {
      any_coming = next(ahead, coming);
    } while (any_coming && coming.tile >= coming.tile_end);
  }

  // A lane's row of a tile to copy: slot of the list (in_block < 0), or block of the table.
  struct Lookup {
    int fetched, in_block, head;
    bool is_tile;
  };

  // Looks up the tile after the last one; its load returns while others are computed.
  __device__ Lookup look_up() {
    Lookup found{-1, -1, 0, any_coming};
    if (!any_coming) return found;
    const Item& item = coming.item;
    found.head = item.head;
    if (coming.tile < coming.list_tiles) {
      const int i = coming.tile * kTileTokens + (lane & 15);
      if (i < coming.list_count) {
        found.fetched =
            p.slots[item.request * p.slots_batch_stride + item.head * p.slots_head_stride + i];
      }
    } else {
      const int token = coming.first_token + (coming.tile - coming.list_tiles) * kTileTokens;
      const int row = token + (lane & 15), block = this->block_of(token);
      if (row >= coming.tail_low && row < item.length) {
        found.fetched = p.block_table[item.request * p.table_stride + block];
        found.in_block = row - block * p.cache.block_size;
      }
    }
    coming.tile += KVW;
    if (coming.tile >= coming.tile_end) find_coming();
    return found;
  }

  __device__ void issue(const Lookup& found, int stage) {
    if (found.is_tile) {
      uint32_t offset = kNoRow;
      if (found.fetched >= 0) {
        const bool listed = found.in_block < 0;
        const int block = listed ? this->block_of(found.fetched) : found.fetched;
        const int row = listed ? found.fetched - block * p.cache.block_size : found.in_block;
        offset = this->offset_of(block, row, found.head);
      }
      this->copy_rows(offset, stage);
    }
    cp_async_commit();
  }

  // The first copies of every warp. They may run while the kernel in front still does: all that it
  // may have written is queries, the tail, and workspace.
  __device__ Lookup begin_copies() {
    Lookup found = look_up();
#pragma unroll
    for (int i = 0; i < C::STAGES - 1; ++i) {
      const Lookup following = look_up();
      if (__any_sync(0xffffffffu, found.in_block >= 0)) wait_for_previous_kernel();
      issue(found, i);
      found = following;
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    return found;
  }

  __device__ void enter(const SparseItem& now) {
    this->item = now.item;
    this->list_count = now.list_count;
    this->list_tiles = now.list_tiles;
    this->tail_low = now.tail_low;
    this->first_token = now.first_token;
    this->tile_end = now.tile_end;
    this->num_rows = p.num_heads / p.num_kv_heads;
    this->reset();
  }

  __device__ void run() {
    Cursor here = ahead;
    find_coming();
    Lookup found = begin_copies();
    SparseItem now;
    bool any = next(here, now);
    this->fetch_queries(now.item, this->q);
    int stage = 0;
    while (any) {
      enter(now);
      for (int tile = now.tile; tile < now.tile_end; tile += KVW) {
        const Lookup following = look_up();
        cp_async_wait<C::STAGES - 2>();
        __syncwarp();
        issue(found, stage == 0 ? C::STAGES - 1 : stage - 1);
        found = following;
        this->compute(tile, stage, 0);
        stage = stage == C::STAGES - 1 ? 0 : stage + 1;
      }
      // The next item's queries are on their way while this one is merged.
      const ItemParts parts(now.item, here.unit, slice);
      any = next(here, now);
      if (any) this->fetch_queries(now.item, this->q);
      this->finish();
      if (!this->item.is_whole()) {
        merge_partials<typename C::T, C::D, 1, C::KVW == 4 ? 16 : 8>(
            p, parts, this->item, C::ROWS, 0, this->num_rows, threadIdx.x, C::THREADS, this->flag,
            [] { __syncthreads(); });
      }
    }
    cp_async_wait<0>();
  }
};

template <typename C, int BLOCKS>
__global__ void __launch_bounds__(C::THREADS, BLOCKS)
    sparse_attention_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char shared[];
  if (!p.overlap) wait_for_previous_kernel();
  SparseKernel<C> kernel(p, shared);
  if (kernel.start()) {
    kernel.run();
  } else {
    wait_for_previous_kernel();  // or this call could end before the one in front
  }
}

// Launched so that blocks take their places, and with `overlap` begin, while the kernel in front
// ends. A kernel lets the next one start only after its own wait, so that whatever starts may rely
// on all kernels but the one right in front.
template <typename C, int BLOCKS = 1>
const char* launch_sparse(const AttentionParams& p, cudaStream_t stream, bool programmatic) {
  constexpr int kBytes = SparseKernel<C>::SMEM_BYTES;
  static const cudaError_t configured = cudaFuncSetAttribute(
      sparse_attention_kernel<C, BLOCKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (configured != cudaSuccess) return cudaGetErrorString(configured);
  const int grid = BLOCKS * num_multiprocessors();
  if (p.partials_floats < static_cast<int64_t>(2) * grid * C::ROWS * (C::D + 2)) {
    return "the workspace is smaller than make_workspace() makes it";
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = C::THREADS;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, sparse_attention_kernel<C, BLOCKS>, p);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace vegas
