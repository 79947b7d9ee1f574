// Noise that belongs to (seed, position, token id), and what the sampling kernels share: bits per lane, a step's rows.

#pragma once

#include <limits>

#include "lanes.h"

namespace batchinfer_lanes {

typedef uint32_t Hashes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Mask;  // a bit per lane

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int kMostTies = 16;         // MOST_TIES in ops/draw.py
constexpr float kMostNoise = 22.25f;  // more than gumbel() gives: -ln(-ln(1 - 2^-32)) is 22.18

#ifdef __AVX512F__
constexpr Bits kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline Mask above(Vec x, Vec y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ); }
inline Mask at_least(Vec x, Vec y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GE_OQ); }
inline Mask equal(Vec x, Vec y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_EQ_OQ); }
inline Mask equal(Bits x, Bits y) { return _mm512_cmpeq_epi32_mask((__m512i)x, (__m512i)y); }
inline Mask at_most(Hashes x, Hashes y) { return _mm512_cmple_epu32_mask((__m512i)x, (__m512i)y); }
inline Mask is_nan(Vec x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q); }
inline float most_of(Vec x) { return _mm512_reduce_max_ps((__m512)x); }
// Writes the chosen lanes side by side; what lies behind them, up to a vector, is overwritten.
inline void pack(float* p, Vec x, Mask chosen) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(chosen, (__m512)x)); }
inline void pack(int32_t* p, Bits x, Mask chosen) { _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(chosen, (__m512i)x)); }
#else
constexpr Bits kLane = {0, 1, 2, 3, 4, 5, 6, 7};
inline Mask mask_of(Bits lanes) { return _mm256_movemask_ps((__m256)lanes); }
inline Mask above(Vec x, Vec y) { return mask_of(x > y); }
inline Mask at_least(Vec x, Vec y) { return mask_of(x >= y); }
inline Mask equal(Vec x, Vec y) { return mask_of(x == y); }
inline Mask equal(Bits x, Bits y) { return mask_of(x == y); }
inline Mask at_most(Hashes x, Hashes y) { return mask_of(x <= y); }
inline Mask is_nan(Vec x) { return mask_of(x != x); }
inline float most_of(Vec x) {
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
inline void pack(float* p, Vec x, Mask chosen) {
  for (; chosen; chosen &= chosen - 1) *p++ = x[__builtin_ctz(chosen)];
}
inline void pack(int32_t* p, Bits x, Mask chosen) {
  for (; chosen; chosen &= chosen - 1) *p++ = x[__builtin_ctz(chosen)];
}
#endif

constexpr Mask kAll = (1u << kLanes) - 1;
inline int first_lane(Mask mask) { return __builtin_ctz(mask); }
inline Mask first_lanes(int64_t count) { return count >= kLanes ? kAll : (1u << count) - 1; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN

inline Bits load(const int32_t* p) {
  Bits x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(int32_t* p, Bits x) { std::memcpy(p, &x, sizeof x); }

// The values at p times `scale`, of which `count` are there; lanes beyond are -infinity.
template <class T>
inline Vec load_some(const T* p, int64_t count, float scale) {
  if (count >= kLanes) return load(p) * scale;
  T part[kLanes] = {};
  std::memcpy(part, p, count * sizeof(T));
  return kLane < int32_t(count) ? load(part) * scale : splat(-kInfinity);
}

// ln(1 + r) + k ln 2 for r in [sqrt(1/2) - 1, sqrt(2) - 1] (Cephes' logf); relative error 1e-7 where k is 0.
inline Vec log_terms(Vec r, Vec k) {
  const Vec square = r * r;
  Vec p = splat(7.0376836292e-2f);
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  p = p * r * square - k * 2.12194440e-4f;
  p = p - square * 0.5f;
  return r + p + k * 0.693359375f;
}

struct Parts {
  Vec fraction;  // x = fraction * 2^exponent, fraction in [sqrt(1/2), sqrt(2))
  Vec exponent;
};
inline Parts split(Vec x) {  // x above 0, no denormal
  const Bits exponent = ((Bits)x - 0x3F3504F3) >> 23;  // the bits of sqrt(1/2)
  return {(Vec)((Bits)x - (exponent << 23)), __builtin_convertvector(exponent, Vec)};
}
inline Vec log_of(Vec x) {
  const Parts parts = split(x);
  return log_terms(parts.fraction - 1.0f, parts.exponent);
}
inline Vec log_of_complement(Vec u) {  // ln(1 - u) for u in (0, 1), exact in its leading digits for small u too
  const Parts parts = split(1.0f - u);
  const Bits small = u < splat(0.29f);
  return log_terms(small ? -u : parts.fraction - 1.0f, small ? Vec{} : parts.exponent);
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' expf); 1 at 0, and 0 below -87.
inline Vec exponential(Vec x) {
  const Vec clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Vec shifted = clamped * 1.44269504088896341f + splat(kRounding);
  const Vec n = shifted - splat(kRounding);
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Vec y = (Vec)((Bits)p + (((Bits)shifted - 0x4B400000) << 23));
  return x < splat(-87.0f) ? Vec{} : y;
}

inline Hashes mixed(Hashes h) {  // murmur3's finaliser
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// The tokens' hashes under a row's two keys; the same as in runtime/noise.py. For a token and its successors, or for any.
constexpr uint32_t kGolden = 0x9E3779B9;
inline Hashes hashes_of_spread(Hashes spread, const int32_t* keys) { return mixed(mixed(spread ^ uint32_t(keys[0])) + uint32_t(keys[1])); }
inline Hashes hashes_from(int64_t first_id, const int32_t* keys) {
  return hashes_of_spread((Hashes)kLane * kGolden + uint32_t(first_id) * kGolden, keys);
}
inline Hashes hashes_of(Bits ids, const int32_t* keys) { return hashes_of_spread((Hashes)ids * kGolden, keys); }

// Standard Gumbel noise, from -2.9 to 22.2; the larger the smaller the hash.
inline Vec gumbel(Hashes h) {
  Vec u = (__builtin_convertvector((Bits)(h >> 1), Vec) + 0.5f) * 0x1p-31f;
  u = u < splat(0x1.fffffep-1f) ? u : splat(0x1.fffffep-1f);
  return -log_of(-log_of_complement(u));
}

// Hashes above this give too little noise to lift any value up to `most` above `best`: most draws need no logarithm.
// The margin is far above the rounding of noise and sum.
inline uint32_t hopeless_hash(float best, float most) {
  const double margin = 1e-3 + 1e-6 * (std::fabs(best) + std::fabs(most));
  const double chance = -std::expm1(-std::exp(double(most) - best + margin));  // of more noise than that
  return uint32_t(std::fmin(chance * 0x1p32 + 2, 0x1p32 - 1));
}

// The rows of a step: what each asks for, and what is known of it so far.
struct Draw {
  const float* temperature;  // 0: the largest logit
  const float* top_p;
  const float* min_p;
  const int32_t* top_k;     // the vocabulary's size where off
  const int32_t* keys;      // [rows, 2]
  const int32_t* kept_row;  // row of `kept`, or -1 for rows that do not filter
  float* best;              // largest logit; NaN once the row has one
  int32_t* best_id;
  float* noisy;  // largest logit / temperature + noise
  int32_t* noisy_id;
  float* kept;  // [.., vocab_size]: logits / temperature
  int32_t* ties;      // [rows, kMostTies]: ids with the largest logit in rows of temperature 0, ascending; null: not wanted
  int32_t* num_ties;  // [rows]
  int64_t rows;
  int64_t vocab_size;
};

}  // namespace batchinfer_lanes
