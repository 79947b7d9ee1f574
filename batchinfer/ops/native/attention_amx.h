// The products of a tile of bf16 or 8-bit keys and values in Intel's matrix registers (AMX).
//
// An instruction multiplies up to 16 rows by 16 columns over 64 bytes of each, which is as stored keys and values lie:
// 32 entries of a bf16 key or 64 of an 8-bit one; 32 tokens of bf16 values (two groups), or 64 of 8-bit ones (a tile).
// Each instruction sums its own entries before it adds them to what was there, so for bf16 these are fixed by absolute
// position: a row's sums stay a function of the row alone. Sums of codes are exact, and so those of attention_tiles.h:
// 16-bit queries and weights are multiplied as a high and a low byte.

#pragma once

#include "amx.h"
#include "attention_pairs.h"

#ifdef BATCHINFER_AMX

namespace {

// Calls f with 0, 1, ... as constants.
template <int kCount, class F>
inline void unrolled(const F& f) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(f);
    f(std::integral_constant<int, kCount - 1>{});
  }
}

// ---- Rows times what is stored.

// Where the two operands of a product lie. Step k multiplies the 64 bytes at rows + 64 k by tile j at stored(j, k).
// expect(j, k) asks for what lies there in the next tile.
template <class Stored, class Expect>
struct Operands {
  const uint8_t* rows;
  int64_t row_stride;
  int64_t high_bytes;  // of 16-bit rows: from their low bytes to their high ones
  Stored stored;
  int64_t stored_stride;
  Expect expect;
  int steps;
};

// to[r][16 j + i] = the row's product with column i of stored tile j < kCount.
template <int kCount, class... Functions>
inline void multiply_bf16(const Operands<Functions...>& x, float* to, int64_t to_stride) {
  unrolled<kCount>([](auto j) { zero_tile<j>(); });
  for (int k = 0; k < x.steps; ++k) {
    load_tile<4>(x.rows + k * kTileBytes, x.row_stride);
    unrolled<kCount>([&](auto j) {
      load_tile<6 + j % 2>(x.stored(j, k), x.stored_stride);
      x.expect(j, k);
      multiply_tiles<Kind::kBf16, j, 4, 6 + j % 2>();
    });
  }
  unrolled<kCount>([&](auto j) { store_tile<j>(to + j * kTileRows, to_stride); });
}

// The same with 8-bit codes, kCount <= 2: products with the low bytes to `low`, with the high ones to `high`.
template <int kCount, class... Functions>
inline void multiply_codes(const Operands<Functions...>& x, void* low, void* high, int64_t to_stride) {
  unrolled<kCount>([](auto j) { zero_tile<j>(), zero_tile<2 + j>(); });
  for (int k = 0; k < x.steps; ++k) {
    load_tile<4>(x.rows + k * kTileBytes, x.row_stride);
    load_tile<5>(x.rows + x.high_bytes + k * kTileBytes, x.row_stride);
    unrolled<kCount>([&](auto j) {
      load_tile<6 + j>(x.stored(j, k), x.stored_stride);
      x.expect(j, k);
      multiply_tiles<Kind::kUnsigned, j, 4, 6 + j>();
      multiply_tiles<Kind::kSignedByUnsigned, 2 + j, 5, 6 + j>();
    });
  }
  unrolled<kCount>([&](auto j) {
    store_tile<j>(static_cast<int32_t*>(low) + j * kTileRows, to_stride);
    store_tile<2 + j>(static_cast<int32_t*>(high) + j * kTileRows, to_stride);
  });
}

struct MatrixScratch {
  alignas(64) int32_t high[(kMaxRows + kTileRows) * kTile];  // products of the queries' high bytes
  alignas(64) float sums[kTileRows * kTile];                 // of weights and values: 16 rows, 64 columns
  alignas(64) int32_t high_sums[kTileRows * kTile];
  alignas(64) uint8_t values[2][kTileRows * kMaxDim * 4];  // of groups that do not lie side by side
};

MatrixScratch& matrix_scratch() {
  static thread_local MatrixScratch own;
  return own;
}

// As Vectors of attention_tiles.h. Heads must fill the 64 bytes of a tile's rows.
template <class P>
class Matrices {
 public:
  static constexpr bool kCodes = P::kScaled;
  static constexpr int kSpan = kCodes ? kGroups : 2;          // groups of values in an instruction
  static constexpr int kSpans = kGroups / kSpan;
  static constexpr int kAtOnce = kCodes ? 2 : 4;              // sums that are kept in registers
  static constexpr int kRowBytes = kWeightWords<P> * 4;

  static bool serve(const Args& args) { return args.dim % (kTileBytes / kItemBytes<P>) == 0; }

  explicit Matrices(const Args& args)
      : dim_(int(args.dim)), words_(dim_ / P::kPack * P::kWords), group_bytes_(args.dim * kGroup * kItemBytes<P>), own_(matrix_scratch()) {}

  // `rows` queries of a work item lie in s.q: they are taken in as few tiles as hold them, no higher than need be.
  void begin(int rows, Scratch& s) {
    const int blocks = (rows + kTileRows - 1) / kTileRows;
    height_ = (rows + blocks - 1) / blocks;
    shapes_.set_rows(height_);
    if constexpr (kCodes)
      for (int r = 0; r < rows; ++r) split(reinterpret_cast<uint8_t*>(s.q + r * words_));
  }

  void score(int first, int last, const Tile& tile, const Tile& next, Scratch& s) const {
    const Tile* ahead = &next;
    for (int r = first; r < last; r += height_, ahead = nullptr) {
      int j = 0;
      for (; j + kAtOnce <= tile.groups; j += kAtOnce) score_groups<kAtOnce>(r, j, tile, ahead, s);
      if constexpr (kAtOnce > 2) {
        if (tile.groups - j == 3) score_groups<3>(r, j, tile, ahead, s);
        if (tile.groups - j == 2) score_groups<2>(r, j, tile, ahead, s);
      }
      if (tile.groups - j == 1) score_groups<1>(r, j, tile, ahead, s);
    }
  }

  void accumulate(int first, int last, const Tile& tile, const Tile& next, Scratch& s) const {
    const Tile* ahead = &next;
    const uint8_t* spans[kSpans];
    for (int i = 0; i * kSpan < tile.groups; ++i) spans[i] = side_by_side(i, tile);
    for (int r = first; r < last; r += height_, ahead = nullptr) {
      const Rows rows{r, r + height_ < last ? height_ : last - r};
      int column = 0;
      for (; column + kAtOnce * kTileRows <= dim_; column += kAtOnce * kTileRows) add<kAtOnce>(rows, column, tile, spans, ahead, s);
      for (; column < dim_; column += 2 * kTileRows) add<2>(rows, column, tile, spans, ahead, s);
    }
  }

  // The v-th vector of a row's integer products.
  IVec product(const Scratch& s, const float* scores, int v) const {
    return (load_bits(own_.high + (scores - s.scores) + v * kLanes) << 8) + load_bits(scores + v * kLanes);
  }

  // Two vectors of 16-bit weights, of which only the lower halves count, from the v-th on; returns what to sum.
  static IVec put_weights(uint32_t* words, int v, IVec low, IVec high) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(words) + v * kLanes;
    store_low_bytes(bytes, low);
    store_low_bytes(bytes + kLanes, high);
    store_low_bytes(bytes + kTile, low >> 8);
    store_low_bytes(bytes + kTile + kLanes, high >> 8);
    return (low & 0xFFFF) + (high & 0xFFFF);
  }

  // What is multiplied and not seen has no weight.
  template <int kCount>
  static void fill(uint32_t* words) {
    if constexpr (kCodes) {
      for (int j = kCount + kCount % 2; j < kGroups; j += 2) put_weights(words, j, IVec{}, IVec{});
    } else if constexpr (kCount % 2 == 1) {
      P::to_words(words, kCount * kLanes, Vec{});
    }
  }

 private:
  struct Rows {
    int first, count;
  };

  template <int kBytes>
  static void prefetch(const uint8_t* from) {
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(from + i, 0, kPrefetchLevel);
  }

  // 16-bit integers in the order of pack_int16 to low bytes, then high bytes, in their own order.
  void split(uint8_t* row) const {
    const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 2, 6, 8, 12, 10, 14, 1, 5, 3, 7, 9, 13, 11, 15));
    const __m512i gathered = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    alignas(64) uint8_t packed[kMaxDim * 2];
    std::memcpy(packed, row, dim_ * 2);
    for (int i = 0; i < dim_; i += 32) {
      const __m512i x = _mm512_permutexvar_epi64(gathered, _mm512_shuffle_epi8(_mm512_load_si512(packed + i * 2), apart));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + i), _mm512_castsi512_si256(x));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + dim_ + i), _mm512_extracti64x4_epi64(x, 1));
    }
  }

  template <int kCount>
  void score_groups(int row, int group, const Tile& tile, const Tile* ahead, Scratch& s) const {
    const auto key = [&](int j, int k) { return tile.keys[group + j] + k * kTileRows * kTileBytes; };
    const auto expect = [&](int j, int k) {
      if (ahead) prefetch<kTileRows * kTileBytes>(ahead->keys[group + j] + k * kTileRows * kTileBytes);
    };
    const Operands<decltype(key), decltype(expect)> x{
        reinterpret_cast<const uint8_t*>(s.q + row * words_), words_ * 4, dim_, key, kTileBytes, expect, dim_ * kItemBytes<P> / kTileBytes};
    const int at = row * kTile + group * kGroup;
    if constexpr (kCodes)
      multiply_codes<kCount>(x, s.scores + at, own_.high + at, kTile * 4);
    else
      multiply_bf16<kCount>(x, s.scores + at, kTile * 4);
  }

  // The groups of values that an instruction multiplies, in one run of memory: copied where they are not. A bf16 value
  // without weight must still be a number; an 8-bit one is.
  const uint8_t* side_by_side(int span, const Tile& tile) const {
    const uint8_t* const* groups = tile.values + span * kSpan;
    const int present = tile.groups - span * kSpan < kSpan ? tile.groups - span * kSpan : kSpan;
    bool together = kCodes || present == kSpan;
    for (int j = 1; j < present; ++j) together = together && groups[j] == groups[0] + j * group_bytes_;
    if (together && present == kSpan) return groups[0];
    for (int j = 0; j < present; ++j) std::memcpy(own_.values[span] + j * group_bytes_, groups[j], group_bytes_);
    if (!kCodes && present < kSpan) std::memset(own_.values[span] + present * group_bytes_, 0, (kSpan - present) * group_bytes_);
    return own_.values[span];
  }

  // Adds weights . values of kCount * 16 columns to what was summed before times shrink.
  template <int kCount>
  void add(Rows rows, int column, const Tile& tile, const uint8_t* const* spans, const Tile* ahead, Scratch& s) const {
    const auto value = [&](int j, int k) { return spans[k] + (column + j * kTileRows) * 4; };
    const int steps = (tile.groups + kSpan - 1) / kSpan;
    constexpr int kPart = kTileRows * kTileBytes / kSpan;  // of a group
    const auto expect = [&](int j, int k) {
      if (ahead)
        for (int i = 0; i < kSpan; ++i) prefetch<kPart>(ahead->values[k * kSpan + i] + (column / kTileRows + j) * kPart);
    };
    const Operands<decltype(value), decltype(expect)> x{
        reinterpret_cast<const uint8_t*>(s.weights) + rows.first * kRowBytes, kRowBytes, kTile, value, int64_t(dim_) * 4, expect, steps};
    float* out = s.out + rows.first * dim_ + column;
    if constexpr (kCodes) {
      multiply_codes<kCount>(x, own_.sums, own_.high_sums, kTile * 4);
      for (int r = 0; r < rows.count; ++r)
        for (int j = 0; j < kCount; ++j) {
          const int at = r * kTile + j * kLanes, row = rows.first + r;
          const IVec sum = (load_bits(own_.high_sums + at) << 8) + load_bits(own_.sums + at);
          const Vec product = __builtin_convertvector(sum - s.weight_shift[row], Vec);
          float* to = out + r * dim_ + j * kLanes;
          store(to, load(to) * s.shrink[row] + product * s.weight_step[row]);
        }
    } else {
      multiply_bf16<kCount>(x, own_.sums, kTile * 4);
      for (int r = 0; r < rows.count; ++r)
        for (int j = 0; j < kCount; ++j) {
          float* to = out + r * dim_ + j * kLanes;
          store(to, add_to_rescaled(load(to), s.shrink[rows.first + r], load(own_.sums + r * kTile + j * kLanes)));
        }
    }
  }

  const int dim_, words_;
  const int64_t group_bytes_;
  MatrixScratch& own_;
  TileShapes shapes_;
  int height_ = 0;
};

}  // namespace

#endif
