// Noise that belongs to (seed, position, token id), and what the sampling kernels share: bits per lane, a step's rows.

#pragma once

#include <limits>

#include "vector.h"

namespace batchinfer {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMostNoise = 22.25f;  // more than gumbel() gives: -ln(-ln(1 - 2^-32)) is 22.18

typedef uint32_t Mask;  // a bit per lane

#ifdef __AVX512F__
inline Mask above(Vec x, Vec y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ); }
inline Mask at_least(Vec x, Vec y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GE_OQ); }
inline Mask equal(Vec x, Vec y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_EQ_OQ); }
inline Mask is_nan(Vec x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q); }
#else
inline Mask bits(IVec lanes) {
  union {
    IVec whole;
    __m256 part[2];
  } x = {lanes};
  return Mask(_mm256_movemask_ps(x.part[0])) | Mask(_mm256_movemask_ps(x.part[1])) << 8;
}
inline Mask above(Vec x, Vec y) { return bits(x > y); }
inline Mask at_least(Vec x, Vec y) { return bits(x >= y); }
inline Mask equal(Vec x, Vec y) { return bits(x == y); }
inline Mask is_nan(Vec x) { return bits(x != x); }
#endif

inline int first_lane(Mask mask) { return __builtin_ctz(mask); }

// The values at p times `scale`, of which `count` are there; lanes beyond are -infinity.
template <class T>
inline Vec load_some(const T* p, int64_t count, float scale) {
  if (count >= kLanes) return load(p) * scale;
  T part[kLanes] = {};
  std::memcpy(part, p, count * sizeof(T));
  return kLane < splat(int32_t(count)) ? load(part) * scale : splat(-kInfinity);
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
  const IVec shifted = (IVec)x - 0x3F3504F3;  // the bits of sqrt(1/2)
  const IVec exponent = shifted >> 23;
  return {(Vec)((IVec)x - (exponent << 23)), __builtin_convertvector(exponent, Vec)};
}
inline Vec log_of(Vec x) {
  const Parts parts = split(x);
  return log_terms(parts.fraction - 1.0f, parts.exponent);
}
inline Vec log_of_complement(Vec u) {  // ln(1 - u) for u in (0, 1), exact in its leading digits for small u too
  const Parts parts = split(1.0f - u);
  const IVec small = u < splat(0.29f);
  return log_terms(small ? -u : parts.fraction - 1.0f, small ? Vec{} : parts.exponent);
}

inline UVec mix(UVec h) {  // murmur3's finaliser
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// Standard Gumbel noise of the tokens `ids` under a row's two keys; the same u as runtime/noise.py.
inline Vec gumbel(IVec ids, const int32_t* keys) {
  UVec h = mix((UVec)ids * 0x9E3779B9u ^ uint32_t(keys[0]));
  h = mix(h + uint32_t(keys[1]));
  Vec u = (__builtin_convertvector((IVec)(h >> 1), Vec) + 0.5f) * 0x1p-31f;
  u = u < splat(0x1.fffffep-1f) ? u : splat(0x1.fffffep-1f);
  return -log_of(-log_of_complement(u));
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
  int64_t rows;
  int64_t vocab_size;
};

}  // namespace batchinfer
