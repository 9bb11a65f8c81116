// Index logic shared by host and device: work split, row order, the one-byte score code.
//
// Work is counted in units of 64 KV tokens of one (request, KV head, row block) item. Units are
// numbered request by request, item by item; block i of the grid owns the i-th equal slice. A
// slice is at most: the tail of one item, whole items, the head of another, so a block writes at
// most two partial results: slot 0 for an item it did not begin, slot 1 for one it did not end.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define VEGAS_HD __host__ __device__ __forceinline__
#else
#define VEGAS_HD inline
#endif

namespace vegas {

constexpr int kUnitTokens = 64;
constexpr int kTileTokens = 16;
// Shorter slices cost more in merging than they gain in balance.
constexpr int kMinSliceUnits = 2;

VEGAS_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }
VEGAS_HD int max_int(int a, int b) { return a > b ? a : b; }
VEGAS_HD int min_int(int a, int b) { return a < b ? a : b; }

// First token any row of the block sees; 0 without a window.
VEGAS_HD int first_visible(int length, int queries, int window) {
  return window > 0 ? max_int(0, length - queries - window + 1) : 0;
}

// Tiles start at multiples of 16 tokens, so that each lies in one cache block.
VEGAS_HD int aligned_down(int token) { return token & ~(kTileTokens - 1); }

VEGAS_HD int verify_units(int length, int queries, int window) {
  if (length <= 0 || queries <= 0) return 0;
  return ceil_div(length - aligned_down(first_visible(length, queries, window)), kUnitTokens);
}

// 16-token tiles: selected slots first, then the dense tail.
VEGAS_HD int sparse_list_tiles(int count) { return ceil_div(count, kTileTokens); }
VEGAS_HD int sparse_tiles(int count, int tail_start, int length) {
  int tail = length > tail_start ? ceil_div(length - aligned_down(tail_start), kTileTokens) : 0;
  return sparse_list_tiles(count) + tail;
}
VEGAS_HD int sparse_units(int count, int tail_start, int length) {
  if (length <= 0) return 0;
  return ceil_div(sparse_tiles(count, tail_start, length), kUnitTokens / kTileTokens);
}

VEGAS_HD int slice_units(int total, int grid) {
  return max_int(kMinSliceUnits, ceil_div(total, grid));
}

// Packed query rows: first query, last query, then the rest, so that the rows collected by
// default are rows 0 .. 2G-1.
VEGAS_HD int row_to_query(int order, int queries) {
  return order == 0 ? 0 : (order == 1 ? queries - 1 : order - 1);
}

// Score code: an unsigned float with 5 exponent and 3 mantissa bits, so that coding is a shift and
// an addition on float32 bits. 192 is weight 1, 255 is 240 (more saturates), 1 is 1.125 * 2^-24.
// Steps are 1/8 of a power of two: at most 1/16 relative error. 0 is "less, or none".
constexpr int kCodeOffset = 127 * 8 - 192;

VEGAS_HD int clamp_code(int code) { return max_int(0, min_int(code, 255)); }
// Bits of a non-negative, non-NaN float.
VEGAS_HD int encode_score(uint32_t bits) {
  return clamp_code(static_cast<int>((bits + (1u << 19)) >> 20) - kCodeOffset);
}
VEGAS_HD uint32_t decode_score(uint32_t code) {
  return (code + static_cast<uint32_t>(kCodeOffset)) << 20;
}

// Where exact scores of a 64-token unit keep token `t`: the order in which a thread of a quad holds
// accumulator columns, so that it stores 16 bytes.
VEGAS_HD int exact_position(int t) {
  return ((t >> 1) & 3) * 16 + (t >> 4) * 4 + ((t >> 3) & 1) * 2 + (t & 1);
}

// Entries kept of `candidates` on a budget, forced ones included.
VEGAS_HD int entries_kept(int budget, int candidates, int forced, int capacity) {
  return min_int(min_int(max_int(budget, forced), candidates), capacity);
}

}  // namespace vegas
