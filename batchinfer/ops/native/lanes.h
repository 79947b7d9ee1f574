// Vectors as wide as the processor's registers, for work that needs no fixed number of lanes: 16 with AVX-512, 8 with
// AVX2 (where GCC turns selections among 64-byte vectors into scalar code).

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" {
// torch's own thread pool (torch/csrc/stable/c/shim.h), so that no second pool competes with it.
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
}

namespace batchinfer_lanes {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct Bf16 {
  uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Vec load(const Bf16* p) {
  Halves half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, Bits) << 16);
}

// To the nearest bf16, ties to even. A NaN stays one: its low half is 0, as it came from a bf16 or an invalid operation.
inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const Bf16*) {
  const Bits bits = (Bits)x;
  return (Vec)((bits + 0x7FFF + ((bits >> 16) & 1)) & (int32_t)0xFFFF0000);
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline void store(Bf16* p, Vec x) {
#ifdef __AVX512BF16__
  const Halves half = (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const Bits nan = x != x;
  const Bits bits = (nan & 0x7FC00000) | (~nan & (Bits)rounded(x, p));
#ifdef __AVX512F__
  const Halves half = (Halves)_mm512_cvtepi32_epi16((__m512i)(bits >> 16));
#else
  const __m256i words = _mm256_packus_epi32((__m256i)(bits >> 16) & _mm256_set1_epi32(0xFFFF), _mm256_setzero_si256());
  const Halves half = (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0xD8));
#endif
#endif
  std::memcpy(p, &half, sizeof half);
}

inline void store_low_bytes(uint8_t* p, Bits x) {
#ifdef __AVX512F__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
#else
  const __m256i low = (__m256i)(x & 0xFF);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
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

// Magnitudes are compared by their bits: NaN lies above infinity there, and infinity above every number.
inline Bits magnitude(Vec x) { return (Bits)x & 0x7FFFFFFF; }
inline Bits larger(Bits a, Bits b) { return a > b ? a : b; }
inline float largest(Bits magnitudes) {
#ifdef __AVX512F__
  const int32_t most = _mm512_reduce_max_epi32((__m512i)magnitudes);
#else
  int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = magnitudes[i] > most ? magnitudes[i] : most;
#endif
  float x;
  std::memcpy(&x, &most, sizeof x);
  return x;
}

constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits

// 2^r on [-1/2, 1/2], relative error 2e-7: Taylor, ln(2)^k / k!
inline Vec exp2_fraction(Vec r) {
  Vec p = splat(1.33335581e-3f) + r * 1.54035304e-4f;
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  return p * r + 1.0f;
}

// x / (1 + e^-x), relative error 1e-6 where it is not tiny.
inline Vec silu(Vec x) {
  Vec t = x * -1.44269504f;
#ifdef __AVX512F__
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)t, 0);
#else
  t = t > splat(126.0f) ? splat(126.0f) : t;
  t = t < splat(-126.0f) ? splat(-126.0f) : t;
  const Vec shifted = t + splat(kRounding);
  const Vec n = shifted - splat(kRounding);
#endif
  const Vec r = t - n;
  const Vec p = exp2_fraction(r);
#ifdef __AVX512F__
  const Vec e = (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Vec e = (Vec)((Bits)p + (((Bits)shifted - 0x4B400000) << 23));
#endif
  return x / (e + 1.0f);
}

}  // namespace batchinfer_lanes
