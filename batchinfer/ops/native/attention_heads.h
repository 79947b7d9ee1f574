// Heads on their way into attention (attention.cpp): read from the product of a layer, rotated, and written into the
// pool as it stores keys and values, or made ready to be multiplied by stored keys.

#pragma once

#include "attention_tiles.h"

namespace {

template <class P>
struct Heads {
  const Args& a;
  const int dim, words;  // words of a prepared query
  const int64_t size, group_bytes, block_bytes, row_elements;

  explicit Heads(const Args& args)
      : a(args),
        dim(int(args.dim)),
        words(int(args.dim) / P::kPack * P::kWords),
        size(args.block_size),
        group_bytes(args.dim * kGroup * kItemBytes<P>),
        block_bytes(args.block_size * (args.dim * kItemBytes<P> + (P::kScaled ? 4 : 0))),
        row_elements((args.heads + 2 * args.kv_heads) * args.dim) {}

  // One head of a row of qkv as floats rounded to the run's dtype.
  void read_head(int64_t row, int64_t head, float* to) const {
    const int64_t column = head * dim, at = row * row_elements + column;
    const Vec factor = splat(a.row_scale ? a.row_scale[row] : 1.0f);
    for (int d = 0; d < dim; d += kLanes) {
      Vec x = a.qkv_is_bf16 ? load(static_cast<const Bf16*>(a.qkv) + at + d) : load(static_cast<const float*>(a.qkv) + at + d);
      if (a.row_scale) {
        x = x * factor;
        if (a.bias) x = x + load(a.bias + column + d);
      }
      store(to + d, in_run_dtype(x));
    }
  }

  Vec in_run_dtype(Vec x) const { return a.run_is_bf16 ? rounded_to_bf16(x) : x; }

  // Entries i and i + rotated form a pair (Su et al., arXiv:2104.09864).
  void rotate(int64_t row, float* x) const {
    const int n = int(a.rotated);
    const float *cos = a.cos + row * n, *sin = a.sin + row * n;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Vec first = load(x + i), second = load(x + n + i), c = load(cos + i), s = load(sin + i);
      store(x + i, in_run_dtype(first * c - second * s));
      store(x + n + i, in_run_dtype(second * c + first * s));
    }
    for (; i < n; ++i) {
      const float first = x[i], second = x[n + i];
      x[i] = in_run_dtype(splat(first * cos[i] - second * sin[i]))[0];
      x[n + i] = in_run_dtype(splat(second * cos[i] + first * sin[i]))[0];
    }
  }

  // 8-bit codes of a head with zero point 128, and its scale; as attention/kv_cache.py quantises.
  float encode(const float* x, uint8_t* codes) const {
    Vec best = Vec{}, odd = Vec{};
    for (int d = 0; d < dim; d += kLanes) {
      const Vec y = load(x + d);
      best = max((Vec)((IVec)y & 0x7FFFFFFF), best);
      odd = odd + (y - y);  // NaN where an entry is NaN or infinite
    }
    const float most = largest(best), inverse = most > 0.0f && most < INFINITY ? 127.0f / most : 0.0f;
    for (int d = 0; d < dim; d += kLanes) {
      const IVec code = nearest(load(x + d) * inverse) + kZeroPoint;
      for (int i = 0; i < kLanes; ++i) codes[d + i] = uint8_t(code[i]);
    }
    return most / 127.0f + total(odd);
  }

  // Rotates and stores the keys and values of one token.
  void write(int64_t row, Scratch& s) const {
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const int64_t block = (a.write_block[row] * a.kv_heads + head) * block_bytes, t = a.write_offset[row];
      uint8_t *k = a.k + block, *v = a.v + block;
      read_head(row, a.heads + head, s.head);
      rotate(row, s.head);
      const float key_scale = put(s.head, k + t / kGroup * group_bytes + t % kGroup * 4, 64);
      read_head(row, a.heads + a.kv_heads + head, s.head);
      const float value_scale = put_between(s.head, v + t / P::kPack * dim * 4 + t % P::kPack * kItemBytes<P>);
      if (P::kScaled) {
        reinterpret_cast<float*>(k + size * dim)[t] = key_scale;
        reinterpret_cast<float*>(v + size * dim)[t] = value_scale;
      }
    }
  }

  void expect_write(int64_t row) const {
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      const int64_t block = (a.write_block[row] * a.kv_heads + head) * block_bytes, t = a.write_offset[row];
      const uint8_t *k = a.k + block + t / kGroup * group_bytes, *v = a.v + block + t / P::kPack * dim * 4;
      for (int i = 0; i < dim / P::kPack; ++i) __builtin_prefetch(k + i * 64, 1, 3);
      for (int i = 0; i < dim; i += 16) __builtin_prefetch(v + i * 4, 1, 3);
    }
  }

  // A head as stored words, `stride` bytes apart.
  float put(const float* x, uint8_t* to, int64_t stride) const {
    alignas(64) uint8_t stored[kMaxDim * 4];
    const float scale = as_stored(x, stored);
    for (int i = 0; i < dim / P::kPack; ++i) std::memcpy(to + i * stride, stored + i * 4, 4);
    return scale;
  }

  // A head's elements, each in a word of its own.
  float put_between(const float* x, uint8_t* to) const {
    alignas(64) uint8_t stored[kMaxDim * 4];
    const float scale = as_stored(x, stored);
    for (int d = 0; d < dim; ++d) std::memcpy(to + d * 4, stored + d * kItemBytes<P>, kItemBytes<P>);
    return scale;
  }

  float as_stored(const float* x, uint8_t* stored) const {
    if constexpr (P::kPack == 4) {
      return encode(x, stored);
    } else if constexpr (P::kPack == 2) {
      for (int d = 0; d < dim; d += kLanes) store(reinterpret_cast<Bf16*>(stored) + d, load(x + d));
    } else {
      std::memcpy(stored, x, dim * 4);
    }
    return 0.0f;
  }

  // A rotated query head in the words that stored keys are multiplied by.
  void prepare_query(const float* x, int r, Scratch& s) const {
    uint32_t* q = s.q + r * words;
    if constexpr (P::kPack == 4) {
      Vec best = Vec{};
      Vec odd = Vec{};
      for (int d = 0; d < dim; d += kLanes) {
        best = max((Vec)((IVec)load(x + d) & 0x7FFFFFFF), best);
        odd = odd + (load(x + d) - load(x + d));
      }
      const float most = largest(best), inverse = most > 0.0f && most < INFINITY ? kSteps16 / most : 0.0f;
      IVec sum = IVec{};
      for (int d = 0; d < dim; d += 2 * kLanes) {
        const IVec low = nearest(load(x + d) * inverse);
        const IVec high = d + kLanes < dim ? nearest(load(x + d + kLanes) * inverse) : IVec{};
        store_bits(q + d / 2, pack_int16(low, high));
        sum = sum + low + high;
      }
      s.query_shift[r] = kZeroPoint * total(sum);
      s.query_step[r] = most / kSteps16 + total(odd);
    } else {
      for (int d = 0; d < dim; d += kLanes) P::to_words(q, d, load(x + d));
    }
  }
};

}  // namespace
