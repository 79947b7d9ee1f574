// Operations on rows: normalisation, gated activation, quantisation to 8 bits. A row's result depends on nothing but the
// row. Plain rows round to the storage type where the torch reference does; around 8-bit products all is float32 until
// the codes, and rows are rotated before they are rounded (ops/rows.py says why). The inner size is a multiple of 16.

#include <memory>

#include "lanes.h"

namespace {

using namespace batchinfer_lanes;

constexpr int64_t kWorkPerThread = 16384;  // elements below which waking another thread costs more than it saves

struct Input {  // [rows, size]: plain rows, or float32 products whose row scale and bias are not applied yet
  const void* values;
  const float* scale;  // [rows], null for plain rows
  const float* bias;   // [size] or null
};

template <class T>
struct PlainRow {
  const T* x;
  PlainRow(const Input& in, int64_t row, int64_t size) : x(static_cast<const T*>(in.values) + row * size) {}
  Vec operator[](int64_t i) const { return load(x + i); }
};

template <bool kBias>
struct ScaledRow {
  const float* x;
  const float* bias;
  Vec scale;
  ScaledRow(const Input& in, int64_t row, int64_t size)
      : x(static_cast<const float*>(in.values) + row * size), bias(in.bias), scale(splat(in.scale[row])) {}
  Vec operator[](int64_t i) const {
    const Vec y = load(x + i) * scale;
    return kBias ? y + load(bias + i) : y;
  }
};

struct Output {  // [rows, size] in 8 bits: rotated x = (code - 128) * scale
  uint8_t* codes;
  float* scale;  // [rows]
};

// One stage of a Walsh-Hadamard transform: lanes whose numbers differ in one bit become their sum and their difference.
template <int kBit>
inline Vec butterfly(Vec x) {
  Bits partner = {};
  Vec sign = {};
  for (int i = 0; i < kLanes; ++i) {
    partner[i] = i ^ kBit;
    sign[i] = i & kBit ? -1.0f : 1.0f;
  }
  return sign * x + __builtin_shuffle(x, partner);
}

// Transforms blocks of kVectors vectors in place; returns the largest magnitudes.
template <int kVectors>
Bits rotate_blocks(float* x, int64_t size) {
  Bits most = Bits{};
  for (int64_t block = 0; block < size; block += kVectors * kLanes) {
    Vec v[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      v[i] = butterfly<4>(butterfly<2>(butterfly<1>(load(x + block + i * kLanes))));
      if (kLanes == 16) v[i] = butterfly<8>(v[i]);
    }
    for (int step = 1; step < kVectors; step *= 2)
      for (int i = 0; i < kVectors; ++i)
        if (!(i & step)) {
          const Vec a = v[i], b = v[i + step];
          v[i] = a + b;
          v[i + step] = a - b;
        }
    for (int i = 0; i < kVectors; ++i) {
      most = larger(most, magnitude(v[i]));
      store(x + block + i * kLanes, v[i]);
    }
  }
  return most;
}

// Writes a row's codes, and its scale as `factor` times the row; `x` is used up.
void emit_row(float* x, int64_t size, float factor, const Output& out, int64_t row) {
  const Bits most = size % 64 == 0 ? rotate_blocks<64 / kLanes>(x, size)
                    : size % 32 == 0 ? rotate_blocks<32 / kLanes>(x, size)
                                     : rotate_blocks<16 / kLanes>(x, size);
  const float top = largest(most);
  // 0 for rows too small to matter, so that no product is infinite.
  const Vec steps = splat(top > 1e-30f ? 127.0f / top : (top != top ? top : 0.0f));
  uint8_t* codes = out.codes + row * size;
  for (int64_t i = 0; i < size; i += kLanes) store_low_bytes(codes + i, (Bits)(load(x + i) * steps + splat(kRounding + 128.0f)));
  out.scale[row] = top * factor / 127.0f;
}

struct Norm {
  Input x;
  const void* residual;  // null: normalise x alone
  const void* weight;    // of the run's type, float32 for 8-bit rows
  void* total;           // x + residual
  void* out;             // plain rows
  Output codes;          // or rows in 8 bits
  int64_t rows;
  int64_t size;
  float eps;
};

inline float inverse_root(Vec squares, const Norm& a) { return 1.0f / std::sqrt(total(squares) / float(a.size) + a.eps); }

template <class T>
void norm_rows(int64_t begin, int64_t end, void* context) {
  const Norm& a = *static_cast<const Norm*>(context);
  const T* weight = static_cast<const T*>(a.weight);
  const std::unique_ptr<float[]> wide(new float[a.size]);  // widening twice costs more than a detour through L1
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x.values) + row * a.size;
    T* out = static_cast<T*>(a.out) + row * a.size;
    Vec squares = Vec{};
    const auto take = [&](int64_t i, Vec v) {
      squares = squares + v * v;
      store(&wide[i], v);
    };
    if (a.residual) {
      const T* residual = static_cast<const T*>(a.residual) + row * a.size;
      T* sum = static_cast<T*>(a.total) + row * a.size;
      for (int64_t i = 0; i < a.size; i += kLanes) {
        const Vec v = rounded(load(x + i) + load(residual + i), sum);
        store(sum + i, v);
        take(i, v);
      }
    } else {
      for (int64_t i = 0; i < a.size; i += kLanes) take(i, load(x + i));
    }
    const Vec inverse = splat(inverse_root(squares, a));
    for (int64_t i = 0; i < a.size; i += kLanes) store(out + i, load(weight + i) * rounded(load(&wide[i]) * inverse, out));
  }
}

// The factor 1 / rms is the same for the whole row: it does not change the codes, only their scale, so one pass is enough.
template <class Row, class T>
void norm_rows_int8(int64_t begin, int64_t end, void* context) {
  const Norm& a = *static_cast<const Norm*>(context);
  const float* weight = static_cast<const float*>(a.weight);
  const std::unique_ptr<float[]> weighted(new float[a.size]);
  for (int64_t row = begin; row < end; ++row) {
    const Row x(a.x, row, a.size);
    Vec squares = Vec{};
    const auto take = [&](int64_t i, Vec v) {
      squares = squares + v * v;
      store(&weighted[i], v * load(weight + i));
    };
    if (a.residual) {
      const T* residual = static_cast<const T*>(a.residual) + row * a.size;
      T* sum = static_cast<T*>(a.total) + row * a.size;
      for (int64_t i = 0; i < a.size; i += kLanes) {
        const Vec v = x[i] + load(residual + i);
        store(sum + i, v);
        take(i, v);
      }
    } else {
      for (int64_t i = 0; i < a.size; i += kLanes) take(i, x[i]);
    }
    emit_row(weighted.get(), a.size, inverse_root(squares, a), a.codes, row);
  }
}

struct Gate {
  Input gate_up;  // [rows, 2 * size]
  void* out;      // [rows, size], plain
  Output codes;   // or in 8 bits
  int64_t rows;
  int64_t size;
};

template <class T>
void gate_rows(int64_t begin, int64_t end, void* context) {
  const Gate& a = *static_cast<const Gate*>(context);
  for (int64_t row = begin; row < end; ++row) {
    const PlainRow<T> x(a.gate_up, row, 2 * a.size);
    T* out = static_cast<T*>(a.out) + row * a.size;
    for (int64_t i = 0; i < a.size; i += kLanes) store(out + i, rounded(silu(x[i]), out) * x[a.size + i]);
  }
}

template <class Row>
void gate_rows_int8(int64_t begin, int64_t end, void* context) {
  const Gate& a = *static_cast<const Gate*>(context);
  const std::unique_ptr<float[]> gated(new float[a.size]);
  for (int64_t row = begin; row < end; ++row) {
    const Row x(a.gate_up, row, 2 * a.size);
    for (int64_t i = 0; i < a.size; i += kLanes) store(&gated[i], silu(x[i]) * x[a.size + i]);
    emit_row(gated.get(), a.size, 1.0f, a.codes, row);
  }
}

struct Quantise {
  const void* x;
  Output codes;
  int64_t rows;
  int64_t size;
};

template <class T>
void quantise_rows(int64_t begin, int64_t end, void* context) {
  const Quantise& a = *static_cast<const Quantise*>(context);
  const std::unique_ptr<float[]> wide(new float[a.size]);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.size;
    for (int64_t i = 0; i < a.size; i += kLanes) store(&wide[i], load(x + i));
    emit_row(wide.get(), a.size, 1.0f, a.codes, row);
  }
}

typedef void (*Body)(int64_t, int64_t, void*);

template <class T>
Body norm_body(const Norm& a) {
  if (!a.codes.codes) return norm_rows<T>;
  if (!a.x.scale) return norm_rows_int8<PlainRow<T>, T>;
  return a.x.bias ? norm_rows_int8<ScaledRow<true>, T> : norm_rows_int8<ScaledRow<false>, T>;
}

template <class T>
Body gate_body(const Gate& a) {
  if (!a.codes.codes) return gate_rows<T>;
  if (!a.gate_up.scale) return gate_rows_int8<PlainRow<T>>;
  return a.gate_up.bias ? gate_rows_int8<ScaledRow<true>> : gate_rows_int8<ScaledRow<false>>;
}

void run(Body body, int64_t rows, int64_t elements_per_row, const void* context) {
  const int64_t grain = kWorkPerThread / elements_per_row;
  torch_parallel_for(0, rows, grain < 1 ? 1 : grain, body, const_cast<void*>(context));
}

}  // namespace

extern "C" void batchinfer_rms_norm(const Norm* a, int32_t is_bf16) {
  run(is_bf16 ? norm_body<Bf16>(*a) : norm_body<float>(*a), a->rows, a->size, a);
}

extern "C" void batchinfer_silu_and_mul(const Gate* a, int32_t is_bf16) {
  run(is_bf16 ? gate_body<Bf16>(*a) : gate_body<float>(*a), a->rows, 2 * a->size, a);
}

extern "C" void batchinfer_quantise(const Quantise* a, int32_t is_bf16) {
  run(is_bf16 ? quantise_rows<Bf16> : quantise_rows<float>, a->rows, a->size, a);
}
