// Operations on rows: normalisation, gated activation. A row's result depends on nothing but the row, and
// rounds to the storage type where the torch reference does. The inner size is a multiple of 16.

#include "vector.h"

namespace {

using namespace batchinfer;

constexpr int64_t kWorkPerThread = 16384;  // elements below which waking another thread costs more than it saves

inline Vec rounded(Vec x, const float*) { return x; }
inline Vec rounded(Vec x, const Bf16*) {
  Bf16 stored[kLanes];
  store(stored, x);
  return load(stored);
}

struct Norm {
  const void* x;
  const void* residual;  // null: normalise x alone
  const void* weight;
  void* out;
  void* total;  // x + residual
  int64_t rows;
  int64_t size;
  float eps;
};

template <class T>
void norm_rows(int64_t begin, int64_t end, void* context) {
  const Norm& a = *static_cast<const Norm*>(context);
  const T* weight = static_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.size;
    T* out = static_cast<T*>(a.out) + row * a.size;
    Vec squares = Vec{};
    if (a.residual) {
      const T* residual = static_cast<const T*>(a.residual) + row * a.size;
      T* sum = static_cast<T*>(a.total) + row * a.size;
      for (int64_t i = 0; i < a.size; i += kLanes) store(sum + i, load(x + i) + load(residual + i));
      x = sum;
    }
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const Vec v = load(x + i);
      squares = squares + v * v;
    }
    const float inverse = 1.0f / std::sqrt(total(squares) / float(a.size) + a.eps);
    for (int64_t i = 0; i < a.size; i += kLanes) store(out + i, load(weight + i) * rounded(load(x + i) * inverse, out));
  }
}

struct Gate {
  const void* gate_up;  // [rows, 2 * size]
  void* out;            // [rows, size]
  int64_t rows;
  int64_t size;
};

template <class T>
void gate_rows(int64_t begin, int64_t end, void* context) {
  const Gate& a = *static_cast<const Gate*>(context);
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * 2 * a.size;
    const T* up = gate + a.size;
    T* out = static_cast<T*>(a.out) + row * a.size;
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const Vec x = load(gate + i);
      const Vec e = exponential(x > Vec{} ? -x : x);
      const Vec sigmoid = (x > Vec{} ? splat(1.0f) : e) / (e + 1.0f);
      store(out + i, rounded(x * sigmoid, out) * load(up + i));
    }
  }
}

int64_t grain(int64_t elements_per_row) {
  const int64_t rows = kWorkPerThread / elements_per_row;
  return rows < 1 ? 1 : rows;
}

}  // namespace

extern "C" void batchinfer_rms_norm(const Norm* a, int32_t is_bf16) {
  torch_parallel_for(0, a->rows, grain(a->size), is_bf16 ? norm_rows<Bf16> : norm_rows<float>, const_cast<Norm*>(a));
}

extern "C" void batchinfer_silu_and_mul(const Gate* a, int32_t is_bf16) {
  torch_parallel_for(0, a->rows, grain(2 * a->size), is_bf16 ? gate_rows<Bf16> : gate_rows<float>, const_cast<Gate*>(a));
}
