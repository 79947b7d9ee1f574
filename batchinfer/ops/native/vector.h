// Vectors as wide as the processor's registers, 16 lanes of 32 bits with AVX-512 and 8 with AVX2, and bf16 storage.
// Written with the compiler's vector types (of one register each: GCC turns much that is done with wider ones into scalar
// code); intrinsics where the processor has an instruction that the types cannot say.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" {
// torch's own thread pool (torch/csrc/stable/c/shim.h), so that no second pool competes with it.
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
int32_t torch_get_num_threads(uint32_t* count);
}

namespace batchinfer {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HVec __attribute__((vector_size(2 * kLanes)));

#ifdef __AVX512F__
constexpr IVec kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr IVec kLane = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

struct Bf16 {
  uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }
inline IVec splat(int32_t x) { return x - IVec{}; }

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Vec load(const Bf16* p) {
  HVec half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, IVec) << 16);
}
inline IVec load_bits(const void* p) {
  IVec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline void store_bits(void* p, IVec x) { std::memcpy(p, &x, sizeof x); }
// To the nearest bf16, ties to even, as a float.
inline Vec rounded_to_bf16(Vec x) {
#ifdef __AVX512BF16__
  return (Vec)(__builtin_convertvector((HVec)_mm512_cvtneps_pbh((__m512)x), IVec) << 16);
#else
  const IVec bits = (IVec)x;
  const IVec nan = x != x;
  return (Vec)((nan & 0x7FC00000) | (~nan & (bits + 0x7FFF + ((bits >> 16) & 1)) & (int32_t)0xFFFF0000));
#endif
}
inline HVec to_bf16(Vec x) {
#if defined(__AVX512BF16__)
  return (HVec)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__AVX512F__)
  return (HVec)_mm512_cvtepi32_epi16((__m512i)((IVec)rounded_to_bf16(x) >> 16));
#else
  const __m256i words = (__m256i)((UVec)rounded_to_bf16(x) >> 16);
  return (HVec)_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#endif
}
inline void store(Bf16* p, Vec x) {
  const HVec half = to_bf16(x);
  std::memcpy(p, &half, sizeof half);
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
  Vec p = splat(1.33335581e-3f) + r * 1.54035304e-4f;  // Taylor of 2^r on [-1/2, 1/2], ln(2)^k / k!
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const IVec exponent = ((IVec)shifted - 0x4B400000) << 23;
  return x < splat(-125.0f) ? Vec{} : (Vec)((IVec)p + exponent);
#endif
}

#ifndef __AVX512F__
// Joins the two halves of a vector with `f`, then the halves of that, down to one lane.
template <class F>
inline __m128 fold(Vec x, const F& f) {
  __m128 y = f(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  y = f(y, _mm_movehl_ps(y, y));
  return f(y, _mm_movehdup_ps(y));
}
#endif

inline float total(Vec x) {  // in one fixed order
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  return _mm_cvtss_f32(fold(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); }));
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
