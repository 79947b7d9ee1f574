// Products of bf16 rows with weights in 4 bits, on processors that multiply bf16 themselves. Codes are widened by setting
// bits: 128 + code is exact in bf16, and the 128 is taken back through the sums of a row's groups. A row's product runs over
// the inputs in one order, whatever rows stand beside it.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {
// torch's own thread pool (torch/csrc/stable/c/shim.h), so that no second pool competes with it.
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
}

namespace {

struct Product {
  const uint16_t* x;     // bf16 [rows, in]
  const int32_t* codes;  // [out / 16, in / 32, 4, 16]: a lane holds eight inputs' codes of one output
  const uint16_t* grid;  // float16 [out / 16, in / 32, 2, 16]: steps, then least values
  const float* bias;     // [out] or null
  void* y;               // [rows, out], bf16 or float32
  float* sums;           // scratch [rows, in / 32]
  int64_t rows;
  int64_t in;
  int64_t out;
};

#ifdef __AVX512BF16__

constexpr int kGroup = 32;                   // inputs that share a step and a least value
constexpr int kLanes = 16;                   // outputs of a vector
constexpr int kPanel = 2;                    // vectors that are multiplied side by side, with
constexpr int kMostRows = 6;                 // rows: 24 registers for sums
constexpr int64_t kCacheElements = 1 << 18;  // of rows that are multiplied before the next: they stay in the second-level cache
constexpr int64_t kWorkPerThread = 400000;   // products below which waking another thread costs more than it saves

void sum_rows(int64_t begin, int64_t end, void* context) {
  const Product& a = *static_cast<const Product*>(context);
  const int64_t groups = a.in / kGroup;
  for (int64_t i = begin * groups; i < end * groups; ++i) {
    const __m512i x = _mm512_loadu_si512(a.x + i * kGroup);
    const __m512 even = (__m512)_mm512_slli_epi32(x, 16), odd = (__m512)_mm512_and_si512(x, _mm512_set1_epi32(0xFFFF0000));
    a.sums[i] = _mm512_reduce_add_ps(even + odd);
  }
}

inline void write(float* p, __m512 y) { _mm512_storeu_ps(p, y); }
inline void write(uint16_t* p, __m512 y) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(y)); }

template <class T, int kRows, int kVectors>
void multiply(const Product& a, int64_t row, int64_t vector) {
  const int64_t groups = a.in / kGroup;
  const int32_t* codes[kVectors];
  const uint16_t* grid[kVectors];
  for (int c = 0; c < kVectors; ++c) {
    codes[c] = a.codes + (vector + c) * groups * 64;
    grid[c] = a.grid + (vector + c) * groups * 32;
  }
  const __m512i mask = _mm512_set1_epi32(0x000F000F), top = _mm512_set1_epi32(0x43004300);
  __m512 total[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) total[r][c] = _mm512_setzero_ps();
  const uint16_t* x = a.x + row * a.in;
  const float* sums = a.sums + row * groups;
  for (int64_t g = 0; g < groups; ++g) {
    __m512 sum[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kVectors; ++c) sum[r][c] = _mm512_set1_ps(-128.0f * sums[r * groups + g]);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m512i w[kVectors];
      for (int c = 0; c < kVectors; ++c) w[c] = _mm512_loadu_si512(codes[c] + g * 64 + part * 16);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        __m512i wide[kVectors];
        for (int c = 0; c < kVectors; ++c) wide[c] = _mm512_ternarylogic_epi32(_mm512_srli_epi32(w[c], 4 * pair), mask, top, 0xEA);
        for (int r = 0; r < kRows; ++r) {
          int32_t both;
          std::memcpy(&both, x + r * a.in + g * kGroup + part * 8 + pair * 2, 4);
          const __m512i xs = _mm512_set1_epi32(both);
          for (int c = 0; c < kVectors; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)wide[c], (__m512bh)xs);
        }
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      const __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(grid[c] + g * 32)));
      const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(grid[c] + g * 32 + 16)));
      for (int r = 0; r < kRows; ++r) {
        total[r][c] = _mm512_fmadd_ps(step, sum[r][c], total[r][c]);
        total[r][c] = _mm512_fmadd_ps(least, _mm512_set1_ps(sums[r * groups + g]), total[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) {
      __m512 y = total[r][c];
      const int64_t at = (vector + c) * kLanes;
      if (a.bias) y = _mm512_add_ps(y, _mm512_loadu_ps(a.bias + at));
      write(static_cast<T*>(a.y) + (row + r) * a.out + at, y);
    }
}

template <class T, int kVectors>
void multiply_some(const Product& a, int64_t row, int64_t rows, int64_t vector) {
  switch (rows) {
    case 1: return multiply<T, 1, kVectors>(a, row, vector);
    case 2: return multiply<T, 2, kVectors>(a, row, vector);
    case 3: return multiply<T, 3, kVectors>(a, row, vector);
    case 4: return multiply<T, 4, kVectors>(a, row, vector);
    case 5: return multiply<T, 5, kVectors>(a, row, vector);
    default: return multiply<T, 6, kVectors>(a, row, vector);
  }
}

template <class T>
void multiply_panels(int64_t begin, int64_t end, void* context) {
  const Product& a = *static_cast<const Product*>(context);
  const int64_t vectors = a.out / kLanes;
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t vector = panel * kPanel;
    for (int64_t row = 0; row < a.rows; row += kMostRows) {
      const int64_t rows = std::min<int64_t>(kMostRows, a.rows - row);
      if (vector + kPanel <= vectors)
        multiply_some<T, kPanel>(a, row, rows, vector);
      else
        multiply_some<T, 1>(a, row, rows, vector);
    }
  }
}
#endif

}  // namespace

extern "C" int32_t batchinfer_can_int4() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

extern "C" void batchinfer_int4(const Product* all, int32_t y_is_bf16) {
#ifdef __AVX512BF16__
  const int64_t panels = (all->out / kLanes + kPanel - 1) / kPanel;
  const int64_t most = std::max<int64_t>(1, kCacheElements / (all->in * kMostRows)) * kMostRows;
  for (int64_t first = 0; first < all->rows; first += most) {
    Product a = *all;
    a.rows = std::min(most, all->rows - first);
    a.x += first * a.in;
    a.y = static_cast<char*>(a.y) + first * a.out * (y_is_bf16 ? 2 : 4);
    torch_parallel_for(0, a.rows, std::max<int64_t>(1, kWorkPerThread / a.in), sum_rows, &a);
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / (kPanel * kLanes * a.in * a.rows));
    torch_parallel_for(0, panels, grain, y_is_bf16 ? multiply_panels<uint16_t> : multiply_panels<float>, &a);
  }
#endif
}
