// How paged attention (attention.cpp) stores keys and values, and the products of a tile of them.
//
// Storage (attention/kv_cache.py): a block of one head is contiguous. Keys lie as [size / 16][dim / kPack][16][kPack],
// values as [size / kPack][dim][kPack], kPack elements in 32 bits; 8-bit codes (zero point 128) are followed by one
// float scale a token. So 16 tokens are one run of memory for keys and for values: a "group". dim is a multiple of 16,
// block_size a power of two from 16 on.

#pragma once

#include <type_traits>

#include "vector.h"

namespace {

using namespace batchinfer;

constexpr int kGroup = 16;  // tokens
constexpr int kGroups = 4;  // in a tile
constexpr int kTile = kGroup * kGroups;
constexpr int kParts = kGroup / kLanes;  // vectors in a group
// Sums that are kept in registers: kMostRows rows by kScoreGroups groups, or by kColumns columns. 24 of 32 registers with
// AVX-512; 8 of 16 with AVX2, which needs others for both halves of a stored word and for what multiplies them.
#ifdef __AVX512F__
constexpr int kMostRows = 6, kScoreGroups = kGroups, kColumns = 64;
#else
constexpr int kMostRows = 4, kScoreGroups = 1, kColumns = 16;
#endif
constexpr int kMaxRows = 256;  // query tokens of a work item times query heads per key head
constexpr int kMaxDim = 256;
constexpr float kMinusInf = -INFINITY;
constexpr float kLevel = -1e30f;  // below any score: stands for the maximum of a row that has seen nothing yet
constexpr float kLog2e = 1.44269504088896341f;
constexpr int32_t kZeroPoint = 128;
constexpr float kSteps16 = 32767.0f;
// Keys and values are read once: they are asked for a tile ahead, into the second-level cache (in the first they would
// push each other out).
constexpr int kPrefetchLevel = 2;

struct Args {
  const void* qkv;         // [T, (heads + 2 * kv_heads) * dim]
  const float* row_scale;  // [T], null: qkv is plain
  const float* bias;       // [(heads + 2 * kv_heads) * dim], null: none
  void* out;               // [T, heads * dim]
  const float* cos;
  const float* sin;  // [T, rotated]
  uint8_t* k;
  uint8_t* v;
  const int64_t* query_start;  // per span: first row of qkv
  const int32_t* start;        // tokens before it
  const int32_t* count;        // query tokens
  const int32_t* slots;
  const int32_t* block_table;
  const int32_t* item_span;   // work items: queries [item_first, item_first + item_queries) of a span
  const int32_t* item_first;
  const int64_t* write_block;
  const int64_t* write_offset;  // [T]
  int64_t num_tokens;
  int64_t table_width;
  int64_t num_items;
  int64_t item_queries;
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t rotated;  // pairs
  int64_t block_size;
  int64_t window;  // tokens that a query sees, itself included; 0: all
  float scale;
  float softcap;  // 0: none
  int32_t qkv_is_bf16;
  int32_t run_is_bf16;  // the run's dtype: activations are rounded to it, and out has it
};

struct Scratch {
  alignas(64) uint32_t q[kMaxRows * kMaxDim + kLanes];
  alignas(64) float out[kMaxRows * kMaxDim];
  alignas(64) float scores[(kMaxRows + 16) * kTile];  // of a tile; int32 bits from 8-bit keys
  alignas(64) uint32_t weights[kMaxRows * kTile];
  alignas(64) float head[kMaxDim];
  alignas(64) float sum[kMaxRows * kLanes];      // of weights, one of each lane
  float highest[kMaxRows + kLanes];  // kLanes rows are rescaled at a time
  float before[kMaxRows + kLanes];
  float shrink[kMaxRows + kLanes];
  float query_step[kMaxRows];   // of 16-bit queries
  int32_t query_shift[kMaxRows];
  float weight_step[kMaxRows];  // of a tile's 16-bit weights
  int32_t weight_shift[kMaxRows];
};

// A thread's own.
Scratch& scratch() {
  static thread_local Scratch own;
  return own;
}

// Where a tile's groups lie. Absent groups repeat a present one, so that they may be prefetched.
struct Tile {
  const uint8_t* keys[kGroups];
  const uint8_t* values[kGroups];
  const float* key_scales[kGroups];
  const float* value_scales[kGroups];
  int groups = 0;
  float value_most;  // largest of the value scales

  // The v-th vector of scales.
  static Vec scales(const float* const* groups, int v) { return load(groups[v / kParts] + v % kParts * kLanes); }
};

// The tile's tokens [low, high) are those that a row sees.
struct View {
  int32_t low, high;
  bool whole(int v) const { return low <= v * kLanes && high >= (v + 1) * kLanes; }  // the v-th vector of them
  IVec mask(int v) const {
    const IVec t = kLane + v * kLanes;
    return (t < high) & (t >= low);
  }
};

// ---- How stored elements are multiplied. kWords: 32-bit words of a query or of weights for one 32-bit word of storage.
// to_words(words, i, x): the vector from element i on as such words (8-bit elements: pack_int16).

struct Float32 {
  static constexpr int kPack = 1, kWords = 1;
  static constexpr bool kScaled = false;
  typedef Vec Sum;
  static Sum dot(Sum acc, IVec stored, const uint32_t* words) {
    float x;
    std::memcpy(&x, words, sizeof x);
    return acc + (Vec)stored * x;
  }
  static void to_words(uint32_t* words, int element, Vec x) { store(reinterpret_cast<float*>(words) + element, x); }
};

// Elements of storage times floats that have bf16 values: only the stored side has to be widened.
struct WideBFloat16 {
  static constexpr int kPack = 2, kWords = 2;
  static constexpr bool kScaled = false;
  typedef Vec Sum;
  static Vec even(IVec stored) { return (Vec)(stored << 16); }
  static Vec odd(IVec stored) { return (Vec)(stored & (int32_t)0xFFFF0000); }
  static Sum dot(Sum acc, IVec stored, const uint32_t* words) {
    acc = Float32::dot(acc, (IVec)even(stored), words);
    return Float32::dot(acc, (IVec)odd(stored), words + 1);
  }
  static void to_words(uint32_t* words, int element, Vec x) { Float32::to_words(words, element, rounded_to_bf16(x)); }
};

#ifdef __AVX512BF16__
// Pairs times pairs.
struct BFloat16 {
  static constexpr int kPack = 2, kWords = 1;
  static constexpr bool kScaled = false;
  typedef Vec Sum;
  static Sum dot(Sum acc, IVec stored, const uint32_t* words) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)stored, (__m512bh)splat(int32_t(words[0])));
  }
  static void to_words(uint32_t* words, int element, Vec x) { store(reinterpret_cast<Bf16*>(words) + element, x); }
};
#else
typedef WideBFloat16 BFloat16;
#endif

// Codes are multiplied by 16-bit integers: even bytes by the pairs of words[0], odd ones by those of words[1]. Exact.
struct Int8 {
  static constexpr int kPack = 4, kWords = 2;
  static constexpr bool kScaled = true;
  typedef IVec Sum;
  static Sum dot(Sum acc, IVec stored, const uint32_t* words) {
    acc = dot_int16(acc, stored & 0x00FF00FF, splat(int32_t(words[0])));
    return dot_int16(acc, (IVec)((UVec)stored >> 8) & 0x00FF00FF, splat(int32_t(words[1])));
  }
};

template <class P>
constexpr int kItemBytes = 4 / P::kPack;

template <class P>
constexpr int kWeightWords = kTile / P::kPack * P::kWords;  // of a row

inline void save(float* p, Vec x) { store(p, x); }
inline void save(float* p, IVec x) { store_bits(p, x); }

// 16-bit integers of two vectors as the words of Int8: for every four, (x0, x2) and (x1, x3).
inline IVec pack_int16(IVec low, IVec high) {
  const IVec first = kLane + (kLane & ~1);  // 0, 1, 4, 5, 8, 9 ...
  return (__builtin_shuffle(low, high, first) & 0xFFFF) | __builtin_shuffle(low, high, first + 2) << 16;
}

// ---- Products of a tile.

// scores[r][t] = q[r] . key[t], kRows rows by kCount groups at a time; the numbers change nothing about a row's own sums.
template <class P, int kRows, int kCount>
[[gnu::noinline]] void score(const uint32_t* q, int words, const uint8_t* const* keys, const uint8_t* const* ahead, float* scores) {
  constexpr int kVectors = kCount * kParts;
  typename P::Sum sum[kRows][kVectors] = {};
  const int steps = words / P::kWords;
  for (int i = 0; i < steps; ++i) {
    for (int j = 0; j < kCount; ++j) __builtin_prefetch(ahead[j] + i * 64, 0, kPrefetchLevel);
    IVec key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = load_bits(keys[v / kParts] + i * 64 + v % kParts * sizeof(IVec));
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) sum[r][v] = P::dot(sum[r][v], key[v], q + r * words + i * P::kWords);
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) save(scores + r * kTile + v * kLanes, sum[r][v]);
}

template <class P, int kRows>
inline void score_groups(const uint32_t* q, int words, const Tile& tile, const Tile& ahead, float* scores) {
  int j = 0;
  for (; j + kScoreGroups <= tile.groups; j += kScoreGroups)
    score<P, kRows, kScoreGroups>(q, words, tile.keys + j, ahead.keys + j, scores + j * kGroup);
  for (; j < tile.groups; ++j) score<P, kRows, 1>(q, words, tile.keys + j, ahead.keys + j, scores + j * kGroup);
}

// Adds weights . values of the tile to what was summed before times shrink, kWidth columns at a time.
template <class P, int kRows, int kWidth>
[[gnu::noinline]] void accumulate(int row, int first, int dim, const Tile& tile, const Tile& ahead, Scratch& s) {
  constexpr int kVectors = kWidth / kLanes;
  typename P::Sum sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) {
      if constexpr (P::kScaled)
        sum[r][c] = IVec{};
      else
        sum[r][c] = load(s.out + (row + r) * dim + first + c * kLanes) * s.shrink[row + r];
    }
  constexpr int kSteps = kGroup / P::kPack, kRowWords = kWeightWords<P>;
  const uint32_t* weights = s.weights + row * kRowWords;
  for (int j = 0; j < tile.groups; ++j)
    for (int i = 0; i < kSteps; ++i) {
      const int at = (i * dim + first) * 4;
      IVec value[kVectors];
      for (int c = 0; c < kVectors; ++c) {
        if (c % kParts == 0) __builtin_prefetch(ahead.values[j] + at + c * sizeof(IVec), 0, kPrefetchLevel);
        value[c] = load_bits(tile.values[j] + at + c * sizeof(IVec));
      }
      const uint32_t* words = weights + (j * kSteps + i) * P::kWords;
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kVectors; ++c) sum[r][c] = P::dot(sum[r][c], value[c], words + r * kRowWords);
    }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) {
      float* out = s.out + (row + r) * dim + first + c * kLanes;
      if constexpr (P::kScaled) {
        const Vec product = __builtin_convertvector(sum[r][c] - s.weight_shift[row + r], Vec);
        store(out, load(out) * s.shrink[row + r] + product * s.weight_step[row + r]);
      } else {
        store(out, sum[r][c]);
      }
    }
}

template <class P, int kRows>
inline void accumulate_columns(int row, int dim, const Tile& tile, const Tile& ahead, Scratch& s) {
  int first = 0;
  for (; first + kColumns <= dim; first += kColumns) accumulate<P, kRows, kColumns>(row, first, dim, tile, ahead, s);
  for (; first < dim; first += 16) accumulate<P, kRows, 16>(row, first, dim, tile, ahead, s);
}

// Calls f.operator()<kRows>(row) for rows [first, last), as many at a time as the registers hold.
template <class F>
inline void by_rows(int first, int last, const F& f) {
  int r = first;
  for (; r + kMostRows <= last; r += kMostRows) f(std::integral_constant<int, kMostRows>{}, r);
  if (r + 4 <= last) f(std::integral_constant<int, 4>{}, r), r += 4;
  if (r + 3 <= last) f(std::integral_constant<int, 3>{}, r), r += 3;
  for (; r + 2 <= last; r += 2) f(std::integral_constant<int, 2>{}, r);
  if (r < last) f(std::integral_constant<int, 1>{}, r);
}

// Both products of a tile in vector registers, and how weights are laid out for them.
template <class P>
class Vectors {
 public:
  explicit Vectors(const Args& args) : dim_(int(args.dim)), words_(dim_ / P::kPack * P::kWords) {}

  // `rows` queries of a work item lie in s.q.
  void begin(int, Scratch&) const {}

  void score(int first, int last, const Tile& tile, const Tile& ahead, Scratch& s) const {
    by_rows(first, last, [&](auto count, int r) { score_groups<P, count>(s.q + r * words_, words_, tile, ahead, s.scores + r * kTile); });
  }

  void accumulate(int first, int last, const Tile& tile, const Tile& ahead, Scratch& s) const {
    by_rows(first, last, [&](auto count, int r) { accumulate_columns<P, count>(r, dim_, tile, ahead, s); });
  }

  // The v-th vector of a row's integer products.
  IVec product(const Scratch&, const float* scores, int v) const { return load_bits(scores + v * kLanes); }

  // Two vectors of 16-bit weights, of which only the lower halves count, from the v-th on; returns what to sum.
  static IVec put_weights(uint32_t* words, int v, IVec low, IVec high) {
    const IVec packed = pack_int16(low, high);
    store_bits(words + v * kLanes / 2, packed);
    return dot_int16(IVec{}, packed, splat(0x00010001));
  }

  // Weights of groups that are absent are not read.
  template <int kCount>
  static void fill(uint32_t*) {}

 private:
  const int dim_, words_;
};

}  // namespace
