// Products of rows with packed weights in matrix registers (AMX): bf16 rows with bf16 weights, 8-bit rows with 8-bit ones.
//
// Weights lie as the instructions read them: panels of 32 outputs, of each panel steps of 64 bytes of inputs, of each step
// two tiles. A block of 32 rows by 32 outputs is four tiles of sums, which two tiles of rows and two of weights feed. A
// row's sum runs over the steps in one order, whatever rows stand beside it, and no step is shared between threads.

#include "amx.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

extern "C" {
// torch's own thread pool (torch/csrc/stable/c/shim.h), so that no second pool competes with it.
int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
}

namespace {

struct Product {
  const void* x;         // [rows, in]: bf16, or 8-bit codes without sign
  const void* tiles;     // [panels, steps, 2, 16, 64 bytes]: bf16, or 8-bit codes with sign
  const float* scale;    // of 8-bit weights [out]
  const int32_t* shift;  // [out], subtracted from sums of codes: what the rows' zero point adds
  const float* bias;     // [out] or null
  void* y;               // [rows, out], bf16, or float32 of 8-bit rows
  int64_t rows;
  int64_t in;  // a multiple of what 64 bytes hold
  int64_t out;
};

#ifdef BATCHINFER_AMX

constexpr int kRows = 2 * kTileRows, kOutputs = 32;  // of a block
constexpr int64_t kStepBytes = 2 * kTileRows * kTileBytes;
constexpr int64_t kFirstCache = 40 << 10;  // a panel of so many bytes can stay there while rows pass by
constexpr int64_t kSecondCache = 1 << 20;  // bytes of rows that can stay there while panels pass by
constexpr int64_t kStepsPerThread = 256;   // of a block, below which waking another thread costs more than it saves

struct Bf16 {
  using Sum = float;
  using Out = uint16_t;
  static constexpr Kind kKind = Kind::kBf16;
  static constexpr int kItemBytes = 2;

  // A row of 32 sums to the outputs from `first` on, those of `mask`.
  static void write(const Product& a, const Sum* sums, int64_t first, __mmask32 mask, Out* y) {
    __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
    if (a.bias) {
      low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(__mmask16(mask), a.bias + first));
      high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(__mmask16(mask >> 16), a.bias + first + 16));
    }
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
};

struct Int8 {
  using Sum = int32_t;
  using Out = float;
  static constexpr Kind kKind = Kind::kUnsignedBySigned;
  static constexpr int kItemBytes = 1;

  static void write(const Product& a, const Sum* sums, int64_t first, __mmask32 mask, Out* y) {
    for (int half = 0; half < 2; ++half, mask >>= 16, first += 16) {
      const __m512i sum = _mm512_sub_epi32(_mm512_load_si512(sums + half * 16), _mm512_maskz_loadu_epi32(__mmask16(mask), a.shift + first));
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_maskz_loadu_ps(__mmask16(mask), a.scale + first));
      _mm512_mask_storeu_ps(y + half * 16, __mmask16(mask), scaled);
    }
  }
};

// The sums of a block on their way to memory: written a few rows at a time between the steps of the next block, whose
// multiplications they do not wait for. The lines that the next block will write are asked for meanwhile.
template <class F>
class Results {
 public:
  explicit Results(const Product& a) : a_(a) {}

  // The block whose sums are coming, before its first step.
  void expect(int64_t row, int rows, int64_t first) {
    coming_ = asked_ = static_cast<typename F::Out*>(a_.y) + row * a_.out + first;
    num_rows_ = rows;
    asked_end_ = asked_ + rows * a_.out;
    coming_first_ = first;
  }

  // Between two steps: some rows of the block before.
  void write(int rows) {
    for (int i = 0; i < rows && asked_ < asked_end_; ++i, asked_ += a_.out)
      for (int byte = 0; byte < kOutputs * int(sizeof *asked_); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(asked_) + byte, 1);
    for (int i = 0; i < rows && next_ < end_; ++i, next_ += kOutputs, y_ += a_.out) F::write(a_, next_, first_, mask_, y_);
  }

  // Takes the sums of the block that was expected from the registers.
  void take() {
    write_all();
    store_tile<0>(sums_, kOutputs * 4);
    store_tile<1>(sums_ + kTileRows, kOutputs * 4);
    if (num_rows_ > kTileRows) {
      store_tile<2>(sums_ + kTileRows * kOutputs, kOutputs * 4);
      store_tile<3>(sums_ + kTileRows * kOutputs + kTileRows, kOutputs * 4);
    }
    next_ = sums_;
    end_ = sums_ + num_rows_ * kOutputs;
    first_ = coming_first_;
    mask_ = a_.out - first_ >= kOutputs ? ~__mmask32{} : __mmask32((1u << (a_.out - first_)) - 1);
    y_ = coming_;
  }

  void write_all() { write(kRows); }

 private:
  const Product& a_;
  alignas(64) typename F::Sum sums_[kRows * kOutputs];
  const typename F::Sum *next_ = nullptr, *end_ = nullptr;
  typename F::Out *y_ = nullptr, *coming_ = nullptr, *asked_ = nullptr, *asked_end_ = nullptr;
  int64_t first_ = 0, coming_first_ = 0;
  int num_rows_ = 0;
  __mmask32 mask_ = 0;
};

// Asks for a panel while another one is multiplied, some lines with each step: weights come from memory.
struct Ahead {
  const char* next;
  int lines;

  void ask() {
    for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// The sums of a block: of 17 to 32 rows, or of up to 16.
template <class F, bool kTwo, bool kKeepsPanel>
inline void multiply(const char* rows, int64_t row_bytes, const char* panel, int64_t steps, Ahead& ahead, Results<F>& before) {
  const auto load_rows = [&](auto to, const char* from) {
    if constexpr (kKeepsPanel)
      stream_tile<to>(from, row_bytes);
    else
      load_tile<to>(from, row_bytes);
  };
  const auto load_weights = [&](auto to, const char* from) {
    if constexpr (kKeepsPanel)
      load_tile<to>(from, kTileBytes);
    else
      stream_tile<to>(from, kTileBytes);
  };
  const int written = int((kRows + steps - 1) / steps);
  const char* second = rows + kTileRows * row_bytes;
  zero_tile<0>(), zero_tile<1>();
  if (kTwo) zero_tile<2>(), zero_tile<3>();
  for (int64_t k = 0; k < steps; ++k, panel += kStepBytes) {
    load_weights(std::integral_constant<int, 6>{}, panel);
    load_rows(std::integral_constant<int, 4>{}, rows + k * kTileBytes);
    multiply_tiles<F::kKind, 0, 4, 6>();
    if constexpr (kTwo) {
      load_rows(std::integral_constant<int, 5>{}, second + k * kTileBytes);
      multiply_tiles<F::kKind, 2, 5, 6>();
    }
    load_weights(std::integral_constant<int, 7>{}, panel + kTileRows * kTileBytes);
    multiply_tiles<F::kKind, 1, 4, 7>();
    if constexpr (kTwo) multiply_tiles<F::kKind, 3, 5, 7>();
    ahead.ask();
    before.write(written);
  }
}

struct Work {
  const Product& product;
  int64_t panels;
  int64_t chunk;  // rows that meet every panel before the next ones do
};

template <class F, bool kKeepsPanel>
void multiply_panels(int64_t begin, int64_t end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const Product& a = work.product;
  const int64_t row_bytes = a.in * F::kItemBytes, steps = row_bytes / kTileBytes;
  TileShapes shapes;
  Results<F> results(a);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t panel = i % work.panels, first = i / work.panels * work.chunk, last = std::min(a.rows, first + work.chunk);
    const char* tiles = static_cast<const char*>(a.tiles) + panel * steps * kStepBytes;
    const int64_t blocks = (last - first + kRows - 1) / kRows, lines = (kStepBytes / 64 + blocks - 1) / blocks;
    Ahead ahead{tiles + (panel + 1 < work.panels ? steps * kStepBytes : -panel * steps * kStepBytes), i + 1 < end ? int(lines) : 0};
    for (int64_t row = first; row < last; row += kRows) {
      const int rows = int(std::min<int64_t>(kRows, last - row));
      const char* x = static_cast<const char*>(a.x) + row * row_bytes;
      results.expect(row, rows, panel * kOutputs);
      if (rows > kTileRows) {
        shapes.set_rows(kTileRows, rows - kTileRows);
        multiply<F, true, kKeepsPanel>(x, row_bytes, tiles, steps, ahead, results);
      } else {
        shapes.set_rows(rows);
        multiply<F, false, kKeepsPanel>(x, row_bytes, tiles, steps, ahead, results);
      }
      results.take();
    }
  }
  results.write_all();
}

template <class F>
void multiply_all(const Product& a) {
  const int64_t row_bytes = a.in * F::kItemBytes, steps = row_bytes / kTileBytes;
  const int64_t chunks = (a.rows * row_bytes + kSecondCache - 1) / kSecondCache;
  const int64_t chunk = ((a.rows + chunks - 1) / chunks + kRows - 1) / kRows * kRows;
  Work work{a, (a.out + kOutputs - 1) / kOutputs, chunk};
  const int64_t grain = std::max<int64_t>(1, kStepsPerThread / (steps * (std::min(chunk, a.rows) + kRows - 1) / kRows));
  const auto body = steps * kStepBytes <= kFirstCache ? multiply_panels<F, true> : multiply_panels<F, false>;
  torch_parallel_for(0, (a.rows + chunk - 1) / chunk * work.panels, grain, body, &work);
}
#endif

}  // namespace

extern "C" int32_t batchinfer_can_multiply_tiles() {
#ifdef BATCHINFER_AMX
  return 1;
#else
  return 0;
#endif
}

extern "C" void batchinfer_multiply_tiles(const Product* a, int32_t is_bf16) {
#ifdef BATCHINFER_AMX
  if (a->rows == 0) return;
  is_bf16 ? multiply_all<Bf16>(*a) : multiply_all<Int8>(*a);
#endif
}
