// Paged attention for CPUs: rotary, the write of keys and values, and attention, for decode rows and prompt chunks
// through one routine, so that a query row gives the same bits in either. Keys are reduced in tiles of kTile tokens at
// absolute positions, in ascending order, with a running maximum and sum (FlashAttention, arXiv:2205.14135). A row's
// sums never depend on the rows beside it: each runs over d or over t in an order that is the same for all rows.
// attention_heads.h reads and writes single heads; the products of a tile are in attention_tiles.h, in attention_amx.h
// for matrix registers, and in attention_pairs.h for few rows beside these.

#include <algorithm>
#include <atomic>

#include "attention_amx.h"
#include "attention_heads.h"

namespace {

// ---- Attention of one span's queries to one key head.

// Some queries of a span and the key head that they share.
struct Item {
  const int32_t* blocks;
  int64_t first_row;    // of qkv and out
  int64_t first_query;  // position of the first query
  int64_t queries;
  int64_t head;

  int64_t end() const { return first_query + queries; }  // tokens that the last query sees
};

// Products: Vectors of attention_tiles.h, or what has the same methods.
template <class P, class Products>
struct Attention {
  const Args& a;
  const Heads<P> heads;
  Products products;
  const int group, dim, shift;
  const int64_t size, group_bytes, block_bytes;
  const float unit;  // of a score's exponent: softmax runs on powers of two

  explicit Attention(const Args& args)
      : a(args),
        heads(args),
        products(args),
        group(int(args.heads / args.kv_heads)),
        dim(heads.dim),
        shift(__builtin_ctzll(args.block_size)),
        size(heads.size),
        group_bytes(heads.group_bytes),
        block_bytes(heads.block_bytes),
        unit(args.softcap == 0.0f ? args.scale * kLog2e : args.scale / args.softcap) {}

  void locate(const int32_t* blocks, int64_t head, int64_t token, int64_t end, Tile& tile) const {
    tile.groups = int(end - token < kTile ? (end - token + kGroup - 1) / kGroup : kGroups);
    for (int j = 0; j < kGroups; ++j) {
      const int64_t t = token + (j < tile.groups ? j : 0) * kGroup, inside = t & (size - 1);
      const int64_t block = (blocks[t >> shift] * a.kv_heads + head) * block_bytes;
      const int64_t at = block + inside / kGroup * group_bytes;
      tile.keys[j] = a.k + at;
      tile.values[j] = a.v + at;
      if (P::kScaled) {
        tile.key_scales[j] = reinterpret_cast<const float*>(a.k + block + size * dim) + inside;
        tile.value_scales[j] = reinterpret_cast<const float*>(a.v + block + size * dim) + inside;
        __builtin_prefetch(tile.key_scales[j], 0, kPrefetchLevel);
        __builtin_prefetch(tile.value_scales[j], 0, kPrefetchLevel);
      }
    }
  }

  View view(const Item& item, int row, int64_t token) const {
    const int64_t seen = item.first_query + row / group + 1 - token;
    return {int32_t(a.window ? seen - a.window : 0), int32_t(seen)};
  }

  // A softmax in three passes, so that rows overlap in the processor: the rows' maxima, what they make of the sums so
  // far, and the weights.
  void soften(const Item& item, int first, int rows, int64_t token, Tile& tile, Scratch& s) const {
    if (tile.groups == kGroups)
      soften_groups<kGroups>(item, first, rows, token, tile, s);
    else if (tile.groups == 3)
      soften_groups<3>(item, first, rows, token, tile, s);
    else if (tile.groups == 2)
      soften_groups<2>(item, first, rows, token, tile, s);
    else
      soften_groups<1>(item, first, rows, token, tile, s);
  }

  template <int kCount>
  void soften_groups(const Item& item, int first, int rows, int64_t token, Tile& tile, Scratch& s) const {
    for (int r = first; r < rows; ++r) find_highest<kCount>(r, view(item, r, token), tile, s);
    for (int r = first; r < rows; r += kLanes) store(s.shrink + r, exp2_negative(load(s.before + r) - load(s.highest + r)));
    if (P::kScaled) tile.value_most = most_value_scale<kCount>(View{0, kTile}, tile);
    for (int r = first; r < rows; ++r) weigh<kCount>(r, view(item, r, token), tile, s);
  }

  // Products to scores in units of log2(e), with the row's maximum so far.
  template <int kCount>
  void find_highest(int row, View view, const Tile& tile, Scratch& s) const {
    float* scores = s.scores + row * kTile;
    Vec best = splat(kMinusInf);
    const float step = P::kScaled ? s.query_step[row] * unit : unit;
    for (int v = 0; v < kCount * kParts; ++v) {
      Vec x;
      if constexpr (P::kScaled) {
        const Vec product = __builtin_convertvector(products.product(s, scores, v) - s.query_shift[row], Vec);
        x = product * step * Tile::scales(tile.key_scales, v);
      } else {
        x = load(scores + v * kLanes) * step;
      }
      if (a.softcap != 0.0f) x = capped(x);
      if (!view.whole(v)) x = view.mask(v) ? x : splat(kMinusInf);
      store(scores + v * kLanes, x);
      best = max(x, best);
    }
    const float before = s.highest[row], tile_best = largest(best);
    s.before[row] = before;
    s.highest[row] = tile_best > before ? tile_best : before;
  }

  // The largest scale of the values that a row sees: 16-bit weights are steps of it.
  template <int kCount>
  float most_value_scale(View view, const Tile& tile) const {
    Vec best = Vec{};
    for (int v = 0; v < kCount * kParts; ++v) {
      const Vec scale = Tile::scales(tile.value_scales, v);
      best = max(view.whole(v) ? scale : view.mask(v) ? scale : Vec{}, best);
    }
    return largest(best);
  }

  template <int kCount>
  void weigh(int row, View view, const Tile& tile, Scratch& s) const {
    const float* scores = s.scores + row * kTile;
    const float highest = s.highest[row];
    uint32_t* words = s.weights + row * kWeightWords<P>;
    constexpr int kVectors = kCount * kParts;
    Vec x[kVectors + 1] = {}, sum = Vec{};
    for (int v = 0; v < kVectors; ++v) {
      x[v] = exp2_negative(load(scores + v * kLanes) - highest);
      sum = sum + x[v];
      if constexpr (!P::kScaled) P::to_words(words, v * kLanes, x[v]);
    }
    Products::template fill<kCount>(words);
    float* sums = s.sum + row * kLanes;
    store(sums, load(sums) * s.shrink[row] + sum);
    if constexpr (P::kScaled) {
      const float most = view.low <= 0 && view.high >= kCount * kGroup ? tile.value_most : most_value_scale<kCount>(view, tile);
      const float inverse = most > 0.0f && most < INFINITY ? kSteps16 / most : 0.0f;
      IVec all = IVec{};
      for (int v = 0; v < kVectors; v += 2) {
        const IVec low = nearest_low_bits(x[v] * Tile::scales(tile.value_scales, v) * inverse);
        const IVec high = v + 1 < kVectors ? nearest_low_bits(x[v + 1] * Tile::scales(tile.value_scales, v + 1) * inverse) : IVec{};
        all = all + Products::put_weights(words, v, low, high);
      }
      s.weight_shift[row] = kZeroPoint * total(all);
      s.weight_step[row] = most / kSteps16;
    }
  }

  // x: score / softcap.
  Vec capped(Vec x) const {
    const Vec e = exp2_negative((Vec)((IVec)x & 0x7FFFFFFF) * (-2.0f * kLog2e));
    const Vec tanh = (1.0f - e) / (1.0f + e);
    return (Vec)((IVec)tanh | ((IVec)x & (int32_t)0x80000000)) * (a.softcap * kLog2e);
  }

  Item item(int64_t claim) const {
    const int64_t number = claim / a.kv_heads, span = a.item_span[number], first = a.item_first[number], left = a.count[span] - first;
    const int32_t* blocks = a.block_table + int64_t(a.slots[span]) * a.table_width;
    const int64_t queries = left < a.item_queries ? left : a.item_queries;
    return {blocks, a.query_start[span] + first, a.start[span] + first, queries, claim % a.kv_heads};
  }

  int64_t first_tile(const Item& item) const {
    const int64_t low = a.window ? item.first_query + 1 - a.window : 0;
    return low <= 0 ? 0 : low / kTile * kTile;
  }

  void locate_first(const Item& item, Tile& tile) const { locate(item.blocks, item.head, first_tile(item), item.end(), tile); }

  // The end of the rows that see as many groups of the tile as row `first` does: only these are computed. What is
  // beyond a row's own token has no weight, so that the cut changes none of its bits.
  int same_groups(const Item& item, int first, int rows, int64_t token, int present, Tile& tile) const {
    const int64_t before = item.first_query - token, seen = before + first / group + 1;
    const int64_t groups = (seen + kGroup - 1) / kGroup;
    tile.groups = int(groups < present ? groups : present);
    if (groups >= present) return rows;
    const int64_t last = (groups * kGroup - before) * group;
    return int(last < rows ? last : rows);
  }

  // `tile` is the item's first; `next` is the item that this thread does after it, or null.
  void run(const Item& item, const Item* next, Scratch& s) {
    const int rows = int(item.queries) * group;
    // One thing at a time for all rows, so that these short chains of dependent operations overlap; the queries wait
    // where the sums will be.
    for (int r = 0; r < rows; ++r) heads.read_head(item.first_row + r / group, item.head * group + r % group, s.out + r * dim);
    for (int r = 0; r < rows; ++r) heads.rotate(item.first_row + r / group, s.out + r * dim);
    for (int r = 0; r < rows; ++r) heads.prepare_query(s.out + r * dim, r, s);
    products.begin(rows, s);
    std::fill(s.highest, s.highest + rows, kLevel);
    std::memset(s.sum, 0, sizeof(float) * rows * kLanes);
    std::memset(s.out, 0, sizeof(float) * rows * dim);
    Tile tile, ahead;
    locate_first(item, ahead);
    for (int64_t token = first_tile(item); token < item.end(); token += kTile) {
      tile = ahead;
      if (token + kTile < item.end())
        locate(item.blocks, item.head, token + kTile, item.end(), ahead);
      else if (next)
        locate_first(*next, ahead);
      // Queries before the tile see nothing of it.
      int first = token > item.first_query ? int(token - item.first_query) * group : 0;
      const int present = tile.groups;
      for (int last; first < rows; first = last) {
        last = same_groups(item, first, rows, token, present, tile);
        products.score(first, last, tile, ahead, s);
        soften(item, first, last, token, tile, s);
        products.accumulate(first, last, tile, ahead, s);
      }
      tile.groups = present;
      for (int j = tile.groups; j < ahead.groups; ++j)
        for (int64_t i = 0; i < group_bytes; i += 64) {
          __builtin_prefetch(ahead.keys[j] + i, 0, kPrefetchLevel);
          __builtin_prefetch(ahead.values[j] + i, 0, kPrefetchLevel);
        }
    }
    for (int r = 0; r < rows; ++r) finish(item, r, s);
  }

  void finish(const Item& item, int r, const Scratch& s) const {
    const int64_t at = ((item.first_row + r / group) * a.heads + item.head * group + r % group) * dim;
    const float inverse = 1.0f / total(load(s.sum + r * kLanes));
    for (int d = 0; d < dim; d += kLanes) {
      const Vec x = load(s.out + r * dim + d) * inverse;
      if (a.run_is_bf16)
        store(static_cast<Bf16*>(a.out) + at + d, x);
      else
        store(static_cast<float*>(a.out) + at + d, x);
    }
  }
};

// ---- Threads.

struct Work {
  const Args* args;
  std::atomic<int64_t> next;
};

template <class P>
void write_rows(int64_t begin, int64_t end, void* context) {
  const Heads<P> heads(*static_cast<const Work*>(context)->args);
  if (begin < end) heads.expect_write(begin);
  for (int64_t row = begin; row < end; ++row) {
    if (row + 1 < end) heads.expect_write(row + 1);
    heads.write(row, scratch());
  }
}

// Work items are claimed one by one: a fixed split would wait for the thread with the longest contexts. Each thread
// claims one ahead, to prefetch its first tile.
template <class Attend>
void attend_items(int64_t, int64_t, void* context) {
  Work& work = *static_cast<Work*>(context);
  const Args& a = *work.args;
  Attend attention(a);
  const int64_t claims = a.num_items * a.kv_heads;
  int64_t claim = work.next.fetch_add(1, std::memory_order_relaxed);
  while (claim < claims) {
    const int64_t after = work.next.fetch_add(1, std::memory_order_relaxed);
    const auto item = attention.item(claim), next = attention.item(after < claims ? after : claim);
    attention.run(item, after < claims ? &next : nullptr, scratch());
    claim = after;
  }
}

template <class P, class Attend>
void run_all(const Args& args) {
  Work work{&args, {0}};
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  torch_parallel_for(0, args.num_tokens, 8, write_rows<P>, &work);
  torch_parallel_for(0, threads, 1, attend_items<Attend>, &work);
}

#ifdef BATCHINFER_AMX
// Few rows, such as those of one token, are multiplied in vectors; from kFewest on, which is where it was measured to be
// faster, in matrix registers. Both give the same bits.
template <class Few, class Many, int kFewest>
struct Mixed {
  Few few;
  Many many;

  explicit Mixed(const Args& args) : few(args), many(args) {}

  Item item(int64_t claim) const { return few.item(claim); }

  void run(const Item& item, const Item* next, Scratch& s) {
    if (item.queries * few.group < kFewest)
      few.run(item, next, s);
    else
      many.run(item, next, s);
  }
};

struct MixedBFloat16 : Mixed<Attention<WideBFloat16, Pairs>, Attention<BFloat16, Matrices<BFloat16>>, 4> {
  const FlushedDenormals flushed;  // as the matrix registers do
  using Mixed::Mixed;
};

typedef Mixed<Attention<Int8, Vectors<Int8>>, Attention<Int8, Matrices<Int8>>, 12> MixedInt8;
#endif

}  // namespace

// kv_bytes: bytes of a stored element, 4 (float), 2 (bf16) or 1 (codes with scales).
extern "C" void batchinfer_attention(const Args* args, int32_t kv_bytes) {
#ifdef BATCHINFER_AMX
  if (kv_bytes == 2 && Matrices<BFloat16>::serve(*args)) return run_all<BFloat16, MixedBFloat16>(*args);
  if (kv_bytes == 1 && Matrices<Int8>::serve(*args)) return run_all<Int8, MixedInt8>(*args);
#endif
  if (kv_bytes == 4)
    run_all<Float32, Attention<Float32, Vectors<Float32>>>(*args);
  else if (kv_bytes == 2)
    run_all<BFloat16, Attention<BFloat16, Vectors<BFloat16>>>(*args);
  else
    run_all<Int8, Attention<Int8, Vectors<Int8>>>(*args);
}
