// Reads slices of logits while they are in the cache: the largest logit of each row, and the largest logit over
// temperature plus noise (the Gumbel-max trick), or all logits of rows that filter (filters.cpp). A row's result depends
// on nothing but the row.

#include <algorithm>

#include "sampling.h"

namespace {

using namespace batchinfer_lanes;

constexpr int64_t kWorkPerThread = 1 << 18;  // logits looked at once below which waking another thread costs more than it saves
constexpr int64_t kWorkOfNoise = 10;         // how much more a logit costs in a row that is drawn from

struct Slice {
  const Draw* draw;
  const void* values;  // [rows, width], rows `stride` apart
  const float* scale;  // factor of each row, or null
  int64_t stride;
  int64_t first_id;
  int64_t width;
};

// What has no chance against a row's best so far, in a slice whose largest logit is `top`.
struct Hopeless {
  float logit;    // neither this nor any smaller one can win
  uint32_t hash;  // no larger one can win

  Hopeless(float best, float top, float t) : logit(-kInfinity), hash(hopeless_hash(best, top / t)) {
    // x / t + kMostNoise stays below `best`, rounded as the sum itself is. Division and sum are monotone: checking one
    // value proves it for all below.
    float cut = (best - kMostNoise) * t;
    for (int tries = 0; tries < 8 && best > -kInfinity; ++tries) {
      if (cut / t + kMostNoise < best) {
        logit = cut;
        break;
      }
      cut -= std::fabs(cut) * 1e-6f + std::numeric_limits<float>::min();
    }
  }
};

template <class T>
struct RowSlice {
  const T* x;
  float scale;
  int64_t width;

  Vec at(int64_t i) const { return load_some(x + i, width - i, scale); }
  int64_t position_of(float value) const {
    for (int64_t i = 0; i < width; i += kLanes)
      if (const Mask found = equal(at(i), splat(value))) return i + first_lane(found);
    return 0;
  }
};

template <class T>
void add_noise(const Draw& a, int64_t row, const RowSlice<T>& slice, int64_t first_id, float top) {
  const float t = a.temperature[row];
  const int32_t* keys = a.keys + 2 * row;
  float best = a.noisy[row];
  int32_t best_id = a.noisy_id[row];
  Hopeless hopeless(best, top, t);
  if (!(top > hopeless.logit)) return;
  // The vector with the largest logit goes first: what it draws rules most others out before their noise is made.
  const int64_t likely = slice.position_of(top) / kLanes * kLanes;
  for (int64_t step = -kLanes; step < slice.width; step += kLanes) {
    const int64_t i = step < 0 ? likely : step;
    const Vec x = slice.at(i);
    const Mask fit = above(x, splat(hopeless.logit));
    if (!fit) continue;
    const Hashes hash = hashes_from(first_id + i, keys);
    if (!(fit & at_most(hash, Hashes{} + hopeless.hash))) continue;
    const Vec noisy = x / t + gumbel(hash);
    const float value = most_of(noisy);
    if (value < best) continue;
    const int32_t id = int32_t(first_id + i) + first_lane(equal(noisy, splat(value)));
    if (value == best && id >= best_id) continue;
    best = value;
    best_id = id;
    hopeless = Hopeless(best, top, t);
  }
  a.noisy[row] = best;
  a.noisy_id[row] = best_id;
}

template <class T>
void keep(const Draw& a, int64_t row, const RowSlice<T>& slice, int64_t first_id) {
  float* kept = a.kept + a.kept_row[row] * a.vocab_size + first_id;
  const float t = a.temperature[row];
  const int64_t whole = slice.width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(kept + i, slice.at(i) / t);
  float rest[kLanes];
  store(rest, slice.at(whole) / t);
  std::memcpy(kept + whole, rest, (slice.width - whole) * sizeof(float));
}

// Adds the ids whose logits are the row's largest so far, `top`, from `place` in the slice on.
template <class T>
void note_ties(const Draw& a, int64_t row, const RowSlice<T>& slice, int64_t first_id, float top, int64_t place) {
  int32_t* ids = a.ties + row * kMostTies;
  int32_t count = a.num_ties[row];
  for (int64_t i = place / kLanes * kLanes; i < slice.width; i += kLanes)
    for (Mask found = equal(slice.at(i), splat(top)); found && count < kMostTies; found &= found - 1)
      ids[count++] = int32_t(first_id + i) + first_lane(found);
  a.num_ties[row] = count;
}

template <class T>
void take_rows(int64_t begin, int64_t end, void* context) {
  const Slice& s = *static_cast<const Slice*>(context);
  const Draw& a = *s.draw;
  for (int64_t row = begin; row < end; ++row) {
    const RowSlice<T> slice = {static_cast<const T*>(s.values) + row * s.stride, s.scale ? s.scale[row] : 1.0f, s.width};
    Vec high = splat(-kInfinity);
    Mask nan = 0;
    for (int64_t i = 0; i < s.width; i += kLanes) {
      const Vec x = slice.at(i);
      high = max(x, high);
      nan |= is_nan(x);
    }
    if (nan) a.best[row] = std::numeric_limits<float>::quiet_NaN();
    if (std::isnan(a.best[row])) continue;
    const float top = most_of(high);
    int64_t place = 0;
    const bool ties = a.ties && a.temperature[row] <= 0 && top >= a.best[row];
    if (top > a.best[row]) {
      place = slice.position_of(top);
      a.best[row] = top;
      a.best_id[row] = int32_t(s.first_id + place);
      if (ties) a.num_ties[row] = 0;
    }
    if (ties) note_ties(a, row, slice, s.first_id, top, place);
    if (a.kept_row[row] >= 0) {
      keep(a, row, slice, s.first_id);
    } else if (a.temperature[row] > 0) {
      add_noise(a, row, slice, s.first_id, top);
    }
  }
}

}  // namespace

extern "C" void batchinfer_take_slice(const Slice* slice, int32_t is_bf16) {
  const float* temperature = slice->draw->temperature;
  const int64_t rows = slice->draw->rows;
  const bool drawn = std::any_of(temperature, temperature + rows, [](float t) { return t > 0; });
  const int64_t work = slice->width * (drawn ? kWorkOfNoise : 1);
  const int64_t grain = std::max<int64_t>(1, kWorkPerThread / work);
  torch_parallel_for(0, rows, grain, is_bf16 ? take_rows<Bf16> : take_rows<float>, const_cast<Slice*>(slice));
}
