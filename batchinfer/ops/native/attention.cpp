// Paged attention for CPUs: decode rows and prompt chunks through one routine, so that a query row gives the same bits
// in either. Keys are reduced in tiles of kTile tokens at absolute positions, in ascending order, with a running
// maximum and sum (FlashAttention, arXiv:2205.14135). A row's sums never depend on the rows beside it: every sum runs
// over d or over t in ascending order, one fused multiply-add at a time.
//
// Storage: k, v are [blocks, kv_heads, block_size, head_dim]. head_dim is a multiple of 16, block_size a power of two.

#include <atomic>

#include "vector.h"

namespace {

using namespace batchinfer;

constexpr int kTile = 32;
constexpr int kVecs = kTile / kLanes;
constexpr int kQueries = 16;   // query tokens of a prompt chunk in one work item
constexpr int kMaxRows = 256;  // kQueries * query heads per kv head
constexpr int kMaxDim = 256;
constexpr float kMinusInf = -INFINITY;

struct Span {
  int64_t query_row;   // first row in q and out
  int64_t start;       // tokens before it
  int64_t count;       // query tokens
  const int32_t* blocks;
};

struct Args {
  const void* q;         // [T, heads, dim]
  void* out;             // [T, heads, dim], same type as q
  const void* k;
  const void* v;
  const int64_t* query_start;
  const int32_t* start;
  const int32_t* count;
  const int32_t* slots;
  const int32_t* block_table;
  const int32_t* item_span;   // work items: queries [item_first, item_first + kQueries) of a span
  const int32_t* item_first;
  int64_t table_width;
  int64_t num_items;
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t block_size;
  float scale;
};

inline float largest(Vec x) {
  float lanes[kLanes], best = kMinusInf;
  store(lanes, x);
  for (float lane : lanes) best = lane > best ? lane : best;
  return best;
}

// 16 x 16 floats, rows to columns, in four rounds of two-source shuffles.
inline void transpose(Vec* rows) {
  Vec t[kLanes];
#define ROUND(in, out, step, low, high)                                       \
  for (int i = 0; i < kLanes; ++i)                                            \
    if (!(i & step)) {                                                        \
      out[i] = __builtin_shuffle(in[i], in[i + step], low);                   \
      out[i + step] = __builtin_shuffle(in[i], in[i + step], high);           \
    }
  const IVec l8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const IVec h8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  const IVec l4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  const IVec h4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
  const IVec l2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const IVec h2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  const IVec l1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  const IVec h1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
  ROUND(rows, t, 8, l8, h8)
  ROUND(t, rows, 4, l4, h4)
  ROUND(rows, t, 2, l2, h2)
  ROUND(t, rows, 1, l1, h1)
#undef ROUND
}

struct Scratch {
  alignas(64) float q[kMaxRows * kMaxDim];
  alignas(64) float out[kMaxRows * kMaxDim];
  alignas(64) float keys[kMaxDim * kTile];    // [dim][kTile]
  alignas(64) float values[kTile * kMaxDim];  // [kTile][dim]
  alignas(64) float weights[kMaxRows * kTile];
  float highest[kMaxRows];
  float sum[kMaxRows];
};

// weights[r][t] = q[r] . keys[:, t] for kRows rows at a time; the number changes nothing about a row's own sums.
template <int kRows>
inline void scores(const float* q, const float* keys, float* weights, int dim) {
  Vec s[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) s[r][j] = Vec{};
  for (int d = 0; d < dim; ++d) {
    Vec key[kVecs];
    for (int j = 0; j < kVecs; ++j) key[j] = load(keys + d * kTile + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec x = splat(q[r * dim + d]);
      for (int j = 0; j < kVecs; ++j) s[r][j] = s[r][j] + x * key[j];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) store(weights + r * kTile + j * kLanes, s[r][j]);
}

// out[r] += weights[r] . values, over `tokens` tokens of the tile, 64 columns at a time.
template <int kRows, int kCols>
inline void accumulate(const float* weights, const float* values, float* out, int dim, int tokens) {
  Vec acc[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) acc[r][c] = load(out + r * dim + c * kLanes);
  for (int t = 0; t < tokens; ++t) {
    Vec value[kCols];
    for (int c = 0; c < kCols; ++c) value[c] = load(values + t * dim + c * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec w = splat(weights[r * kTile + t]);
      for (int c = 0; c < kCols; ++c) acc[r][c] = acc[r][c] + w * value[c];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) store(out + r * dim + c * kLanes, acc[r][c]);
}

template <int kRows>
inline void accumulate_all(const float* weights, const float* values, float* out, int dim, int tokens) {
  int c = 0;
  for (; c + 64 <= dim; c += 64) accumulate<kRows, 4>(weights, values + c, out + c, dim, tokens);
  for (; c < dim; c += 16) accumulate<kRows, 1>(weights, values + c, out + c, dim, tokens);
}

template <class Q, class KV>
struct Attention {
  const Args& a;
  int group, dim, size, shift;

  explicit Attention(const Args& args) : a(args), group(int(args.heads / args.kv_heads)), dim(int(args.dim)), size(int(args.block_size)), shift(__builtin_ctzll(args.block_size)) {}

  const KV* block(const void* cache, const Span& span, int64_t token, int64_t head) const {
    const int64_t id = span.blocks[token >> shift];
    return static_cast<const KV*>(cache) + ((id * a.kv_heads + head) * size + (token & (size - 1))) * dim;
  }

  void prefetch(const Span& span, int64_t token, int64_t end, int64_t head) const {
    for (; token < end; token += size) {
      const char* k = reinterpret_cast<const char*>(block(a.k, span, token, head));
      const char* v = reinterpret_cast<const char*>(block(a.v, span, token, head));
      const int64_t bytes = int64_t(size < kTile ? size : kTile) * dim * sizeof(KV);
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(k + i, 0, 2);
        __builtin_prefetch(v + i, 0, 2);
      }
      if (size >= kTile) break;
    }
  }

  // Keys of the tile as float columns, values as float rows; tokens past the end are zero.
  void gather(const Span& span, int64_t first, int tokens, int64_t head, Scratch& s) const {
    const KV* keys[kTile];
    for (int t = 0; t < tokens; ++t) keys[t] = block(a.k, span, first + t, head);
    for (int t0 = 0; t0 < kTile; t0 += kLanes)
      for (int d = 0; d < dim; d += kLanes) {
        Vec rows[kLanes];
        for (int t = 0; t < kLanes; ++t) rows[t] = t0 + t < tokens ? load(keys[t0 + t] + d) : Vec{};
        transpose(rows);
        for (int i = 0; i < kLanes; ++i) store(s.keys + (d + i) * kTile + t0, rows[i]);
      }
    for (int t = 0; t < tokens; ++t) {
      const KV* v = block(a.v, span, first + t, head);
      for (int d = 0; d < dim; d += kLanes) store(s.values + t * dim + d, load(v + d));
    }
  }

  // Turns scores into weights and rescales what was summed before. `seen`: tokens of the tile visible to the row.
  void soften(int row, int64_t seen, Scratch& s) const {
    float* w = s.weights + row * kTile;
    Vec x[kVecs];
    Vec best = splat(kMinusInf);
    const IVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int j = 0; j < kVecs; ++j) {
      x[j] = load(w + j * kLanes);
      if (seen < kTile) x[j] = lane + j * kLanes < int32_t(seen < 0 ? 0 : seen) ? x[j] : splat(kMinusInf);
      best = x[j] > best ? x[j] : best;
    }
    const float before = s.highest[row];
    const float tile_best = largest(best);
    const float highest = tile_best > before ? tile_best : before;
    Vec sum = Vec{};
    for (int j = 0; j < kVecs; ++j) {
      x[j] = exponential(x[j] - highest);
      sum = sum + x[j];
      store(w + j * kLanes, x[j]);
    }
    const float shrink = exponential(splat(before - highest))[0];
    s.sum[row] = s.sum[row] * shrink + total(sum);
    s.highest[row] = highest;
    if (shrink != 1.0f) {
      float* out = s.out + row * dim;
      for (int d = 0; d < dim; d += kLanes) store(out + d, load(out + d) * shrink);
    }
  }

  void run(const Span& span, int64_t first_query, int64_t queries, int64_t head, Scratch& s) const {
    const int rows = int(queries) * group;
    const Q* q = static_cast<const Q*>(a.q);
    for (int r = 0; r < rows; ++r) {
      const Q* from = q + ((span.query_row + first_query + r / group) * a.heads + head * group + r % group) * dim;
      for (int d = 0; d < dim; d += kLanes) store(s.q + r * dim + d, load(from + d) * a.scale);
      s.highest[r] = kMinusInf;
      s.sum[r] = 0.0f;
    }
    std::memset(s.out, 0, sizeof(float) * rows * dim);
    const int64_t end = span.start + first_query + queries;  // tokens that the last query sees
    for (int64_t tile = 0; tile < end; tile += kTile) {
      const int tokens = int(end - tile < kTile ? end - tile : kTile);
      if (tile + kTile < end) prefetch(span, tile + kTile, end < tile + 2 * kTile ? end : tile + 2 * kTile, head);
      gather(span, tile, tokens, head, s);
      int r = 0;
      for (; r + 4 <= rows; r += 4) scores<4>(s.q + r * dim, s.keys, s.weights + r * kTile, dim);
      for (; r + 3 <= rows; r += 3) scores<3>(s.q + r * dim, s.keys, s.weights + r * kTile, dim);
      for (; r < rows; ++r) scores<1>(s.q + r * dim, s.keys, s.weights + r * kTile, dim);
      for (r = 0; r < rows; ++r) soften(r, span.start + first_query + r / group + 1 - tile, s);
      for (r = 0; r + 4 <= rows; r += 4) accumulate_all<4>(s.weights + r * kTile, s.values, s.out + r * dim, dim, tokens);
      for (; r + 3 <= rows; r += 3) accumulate_all<3>(s.weights + r * kTile, s.values, s.out + r * dim, dim, tokens);
      for (; r < rows; ++r) accumulate_all<1>(s.weights + r * kTile, s.values, s.out + r * dim, dim, tokens);
    }
    Q* out = static_cast<Q*>(a.out);
    for (int r = 0; r < rows; ++r) {
      Q* to = out + ((span.query_row + first_query + r / group) * a.heads + head * group + r % group) * dim;
      const float inverse = 1.0f / s.sum[r];
      for (int d = 0; d < dim; d += kLanes) store(to + d, load(s.out + r * dim + d) * inverse);
    }
  }
};

struct Work {
  const Args* args;
  std::atomic<int64_t> next;
};

// Work items are claimed one by one: a fixed split would wait for the thread with the longest contexts.
template <class Q, class KV>
void worker(int64_t, int64_t, void* context) {
  Work& work = *static_cast<Work*>(context);
  const Args& a = *work.args;
  static thread_local Scratch scratch;
  const Attention<Q, KV> attention(a);
  for (;;) {
    const int64_t claim = work.next.fetch_add(1, std::memory_order_relaxed);
    if (claim >= a.num_items * a.kv_heads) return;
    const int64_t item = claim / a.kv_heads, i = a.item_span[item], first = a.item_first[item];
    const Span span = {a.query_start[i], a.start[i], a.count[i], a.block_table + int64_t(a.slots[i]) * a.table_width};
    const int64_t left = span.count - first;
    attention.run(span, first, left < kQueries ? left : kQueries, claim % a.kv_heads, scratch);
  }
}

template <class Q, class KV>
void run_all(const Args& args) {
  Work work{&args, {0}};
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  torch_parallel_for(0, threads, 1, worker<Q, KV>, &work);
}

}  // namespace

extern "C" void batchinfer_attention(const Args* args, int32_t q_is_bf16, int32_t kv_is_bf16) {
  if (q_is_bf16)
    kv_is_bf16 ? run_all<Bf16, Bf16>(*args) : run_all<Bf16, float>(*args);
  else
    kv_is_bf16 ? run_all<float, Bf16>(*args) : run_all<float, float>(*args);
}
