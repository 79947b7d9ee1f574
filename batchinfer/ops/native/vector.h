// Vectors of 16 lanes of 32 bits, and bf16 storage. Written with the compiler's vector types: 64-byte operations with
// AVX-512, two 32-byte ones with AVX2; intrinsics where the processor has an instruction that the types cannot say.

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

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint32_t UVec __attribute__((vector_size(64)));
typedef uint16_t HVec __attribute__((vector_size(32)));

constexpr int kLanes = 16;
constexpr IVec kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

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
inline HVec to_bf16(Vec x) {  // rounds to nearest even
#ifdef __AVX512BF16__
  return (HVec)_mm512_cvtneps_pbh((__m512)x);
#else
  const IVec bits = (IVec)x;
  IVec rounded = (IVec)((UVec)(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  const IVec nan = x != x;
  rounded = (nan & 0x7FC0) | (~nan & rounded);
  return __builtin_convertvector(rounded, HVec);
#endif
}
inline void store(Bf16* p, Vec x) {
  const HVec half = to_bf16(x);
  std::memcpy(p, &half, sizeof half);
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN

// acc + a0 * b0 + a1 * b1 for pairs of bf16 in each lane.
inline Vec dot_bf16(Vec acc, IVec a, IVec b) {
#ifdef __AVX512BF16__
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc = acc + (Vec)(a << 16) * (Vec)(b << 16);
  return acc + (Vec)(a & (int32_t)0xFFFF0000) * (Vec)(b & (int32_t)0xFFFF0000);
#endif
}

// acc + a0 * b0 + a1 * b1 for pairs of signed 16-bit integers in each lane; exact.
inline IVec dot_int16(IVec acc, IVec a, IVec b) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return acc + (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  union Halves {
    IVec whole;
    __m256i part[2];
  };
  const Halves x = {a}, y = {b};
  Halves z;
  z.part[0] = _mm256_madd_epi16(x.part[0], y.part[0]);
  z.part[1] = _mm256_madd_epi16(x.part[1], y.part[1]);
  return acc + z.whole;
#endif
}

inline IVec nearest(Vec x) {  // to nearest even, for |x| < 2^22
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  return (IVec)(x + magic) - 0x4B400000;
}

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

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' expf coefficients); below -87 it is 0.
inline Vec exponential(Vec x) {
  Vec clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Vec magic = splat(12582912.0f);
  Vec shifted = clamped * 1.44269504088896341f + magic;
  Vec n = shifted - magic;
  Vec r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  IVec exponent = ((IVec)shifted - 0x4B400000) << 23;
  Vec y = (Vec)((IVec)p + exponent);
  return x < splat(-87.0f) ? Vec{} : y;
}

inline float total(Vec x) {  // in one fixed order
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

inline int32_t total(IVec x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

inline float largest(Vec x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

}  // namespace batchinfer
