// Vectors of 16 floats, and bf16 storage. Written with the compiler's vector types: 64-byte operations with AVX-512,
// two 32-byte ones with AVX2.

#pragma once

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
typedef uint16_t HVec __attribute__((vector_size(32)));

constexpr int kLanes = 16;

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
  HVec half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, IVec) << 16);
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline void store(Bf16* p, Vec x) {  // round to nearest even
  IVec bits = (IVec)x;
  IVec rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  IVec nan = x != x;
  rounded = (nan & 0x7FC0) | (~nan & rounded);
  HVec half = __builtin_convertvector(rounded, HVec);
  std::memcpy(p, &half, sizeof half);
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' expf coefficients); below -87 it is 0.
inline Vec exponential(Vec x) {
  Vec clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
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
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

}  // namespace batchinfer
