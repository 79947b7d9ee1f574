// What attention needs of vectors beyond lanes.h: integers, products of 16-bit pairs, powers of two of negative numbers.

#pragma once

#include "lanes.h"

extern "C" int32_t torch_get_num_threads(uint32_t* count);

namespace batchinfer {

using namespace batchinfer_lanes;
using batchinfer_lanes::largest;
using batchinfer_lanes::splat;
using batchinfer_lanes::total;

typedef Bits IVec;
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));

#ifdef __AVX512F__
constexpr IVec kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr IVec kLane = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

inline IVec splat(int32_t x) { return x - IVec{}; }

inline IVec load_bits(const void* p) {
  IVec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store_bits(void* p, IVec x) { std::memcpy(p, &x, sizeof x); }

// To the nearest bf16, ties to even, as a float.
inline Vec rounded_to_bf16(Vec x) {
#ifdef __AVX512BF16__
  return (Vec)(__builtin_convertvector((Halves)_mm512_cvtneps_pbh((__m512)x), IVec) << 16);
#else
  const IVec bits = (IVec)x;
  const IVec nan = x != x;
  return (Vec)((nan & 0x7FC00000) | (~nan & (bits + 0x7FFF + ((bits >> 16) & 1)) & (int32_t)0xFFFF0000));
#endif
}

inline Vec max(Vec a, Vec b) {  // b where either is NaN
#ifdef __AVX512F__
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

// acc + a0 * b0 + a1 * b1 for pairs of signed 16-bit integers in each lane; exact.
inline IVec dot_int16(IVec acc, IVec a, IVec b) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return acc + (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return acc + (IVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// To nearest even, for |x| < 2^22; only the lower 16 bits are those of the integer.
inline IVec nearest_low_bits(Vec x) { return (IVec)(x + splat(12582912.0f)); }  // 1.5 * 2^23: adding it rounds to an integer
inline IVec nearest(Vec x) { return nearest_low_bits(x) - 0x4B400000; }

// 2^x for x <= 0, relative error 2e-7; 0 from -150 down, -infinity included.
inline Vec exp2_negative(Vec x) {
  x = max(splat(-150.0f), x);  // in this order NaN stays
#ifdef __AVX512F__
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, 0);
#else
  const Vec magic = splat(12582912.0f);
  const Vec shifted = x + magic;
  const Vec n = shifted - magic;
#endif
  const Vec r = x - n;
  const Vec p = exp2_fraction(r);
#ifdef __AVX512F__
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const IVec exponent = ((IVec)shifted - 0x4B400000) << 23;
  return x < splat(-125.0f) ? Vec{} : (Vec)((IVec)p + exponent);
#endif
}

inline int32_t total(IVec x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
#endif
}

inline float largest(Vec x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  return _mm_cvtss_f32(fold(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }));
#endif
}

}  // namespace batchinfer
