// The bf16 products of attention_amx.h in vectors, for few rows: with the same bits, because they sum as the instruction
// tdpbf16ps is defined to (Intel's Software Developer's Manual): even and odd entries of its 64 bytes apart, each by
// fused multiplications in ascending order, then both together, then what was there. It flushes denormals.

#pragma once

#include "attention_tiles.h"

#ifdef BATCHINFER_AMX

namespace {

constexpr int kSpanWords = 16;  // pairs of entries in 64 bytes

// Denormals count as zero while this lives.
class FlushedDenormals {
 public:
  FlushedDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  FlushedDenormals(const FlushedDenormals&) = delete;
  FlushedDenormals& operator=(const FlushedDenormals&) = delete;
  ~FlushedDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

inline Vec add_product(Vec sum, Vec a, float b) { return (Vec)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)sum); }

// What a row has gathered so far, and a tile's share of it.
inline Vec add_to_rescaled(Vec out, float shrink, Vec product) { return add_product(product, out, shrink); }

// The sums of one instruction, of kRows rows.
template <int kRows, int kVectors>
struct PairSums {
  Vec even[kRows][kVectors] = {}, odd[kRows][kVectors] = {};

  void add(int v, IVec stored, const float* pair, int stride) {
    const Vec first = WideBFloat16::even(stored), second = WideBFloat16::odd(stored);
    for (int r = 0; r < kRows; ++r) {
      even[r][v] = add_product(even[r][v], first, pair[r * stride]);
      odd[r][v] = add_product(odd[r][v], second, pair[r * stride + 1]);
    }
  }

  Vec total(int r, int v) const { return even[r][v] + odd[r][v]; }
};

// As Vectors of attention_tiles.h.
class Pairs {
 public:
  static constexpr int kMost = 3;  // rows whose sums, and the even and odd halves of a stored vector, are held in registers

  explicit Pairs(const Args& args) : dim_(int(args.dim)) {}

  void begin(int, Scratch&) const {}

  void score(int first, int last, const Tile& tile, const Tile& ahead, Scratch& s) const {
    by_most(first, last, [&](auto rows, int r) {
      if (tile.groups == kGroups)
        score_groups<rows, kGroups>(r, 0, tile, ahead, s);
      else
        for (int j = 0; j < tile.groups; ++j) score_groups<rows, 1>(r, j, tile, ahead, s);
    });
  }

  void accumulate(int first, int last, const Tile& tile, const Tile& ahead, Scratch& s) const {
    by_most(first, last, [&](auto rows, int r) {
      int column = 0;
      for (; column + 64 <= dim_; column += 64) add<rows, 4>(r, column, tile, ahead, s);
      for (; column < dim_; column += 32) add<rows, 2>(r, column, tile, ahead, s);
    });
  }

  template <int kCount>
  static void fill(uint32_t*) {}

 private:
  template <class F>
  static void by_most(int first, int last, const F& f) {
    int r = first;
    for (; r + kMost <= last; r += kMost) f(std::integral_constant<int, kMost>{}, r);
    if (last - r == 2) f(std::integral_constant<int, 2>{}, r);
    if (last - r == 1) f(std::integral_constant<int, 1>{}, r);
  }

  template <int kRows, int kCount>
  [[gnu::noinline]] void score_groups(int row, int group, const Tile& tile, const Tile& ahead, Scratch& s) const {
    float* scores = s.scores + row * kTile + group * kGroup;
    for (int i = 0; i < dim_ / 2; i += kSpanWords) {
      PairSums<kRows, kCount> sums;
      for (int w = i; w < i + kSpanWords; ++w)
        for (int j = 0; j < kCount; ++j) {
          __builtin_prefetch(ahead.keys[group + j] + w * 64, 0, kPrefetchLevel);
          sums.add(j, load_bits(tile.keys[group + j] + w * 64), reinterpret_cast<const float*>(s.q) + row * dim_ + w * 2, dim_);
        }
      for (int r = 0; r < kRows; ++r)
        for (int j = 0; j < kCount; ++j) {
          float* to = scores + r * kTile + j * kLanes;
          store(to, (i > 0 ? load(to) : Vec{}) + sums.total(r, j));
        }
    }
  }

  template <int kRows, int kVectors>
  [[gnu::noinline]] void add(int row, int column, const Tile& tile, const Tile& ahead, Scratch& s) const {
    constexpr int kSteps = kGroup / 2;
    const float* weights = reinterpret_cast<const float*>(s.weights) + row * kTile;
    Vec gathered[kRows][kVectors] = {};
    for (int j = 0; j < tile.groups;) {
      PairSums<kRows, kVectors> sums;
      const int both = j + kSpanWords / kSteps;  // groups of an instruction
      for (; j < both && j < tile.groups; ++j)
        for (int i = 0; i < kSteps; ++i)
          for (int c = 0; c < kVectors; ++c) {
            const int at = (i * dim_ + column + c * kLanes) * 4;
            __builtin_prefetch(ahead.values[j] + at, 0, kPrefetchLevel);
            sums.add(c, load_bits(tile.values[j] + at), weights + j * kGroup + i * 2, kTile);
          }
      for (int r = 0; r < kRows; ++r)
        for (int c = 0; c < kVectors; ++c) gathered[r][c] = gathered[r][c] + sums.total(r, c);
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) {
        float* out = s.out + (row + r) * dim_ + column + c * kLanes;
        store(out, add_to_rescaled(load(out), s.shrink[row + r], gathered[r][c]));
      }
  }

  const int dim_;
};

}  // namespace

#endif
