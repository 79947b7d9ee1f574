// Chooses a token for rows that filter (top-k, top-p, min-p) without sorting the vocabulary: histograms over the values'
// range tell where a filter cuts, each over the one bucket of the one before in which the cut lies. A row's token
// depends on nothing but the row.

#include <algorithm>
#include <vector>

#include "sampling.h"

namespace {

using namespace batchinfer_lanes;

constexpr int32_t kBuckets = 512;
constexpr int64_t kSmall = 48;         // so few values are put in order one by one
constexpr int64_t kGroup = 16;  // vectors that are taken together, lane by lane

// Where a filter cuts: what is above `value` stays, and the first `ties` of those equal to it.
struct Cut {
  float value;
  int64_t ties;
};

Cut cut_of_ties(float value, double each, int64_t count, double above, double budget) {
  if (each <= 0) return {value, count};
  int64_t ties = int64_t(std::min(std::ceil((budget - above) / each), double(count)));
  ties = std::max<int64_t>(ties, 1);
  while (ties > 1 && above + double(ties - 1) * each >= budget) --ties;
  while (ties < count && above + double(ties) * each < budget) ++ties;
  return {value, ties};
}

// Values with a mass each: 1 to count them, or e^value to weigh them; with room for a vector behind the last.
struct Items {
  float* value;
  float* mass;
  int32_t* bucket;
};

Cut cut_of_few(Items items, int64_t count, double above, double budget) {
  float *value = items.value, *mass = items.mass;
  for (int64_t i = 1; i < count; ++i) {  // largest first
    const float v = value[i], m = mass[i];
    int64_t j = i;
    for (; j > 0 && value[j - 1] < v; --j) {
      value[j] = value[j - 1];
      mass[j] = mass[j - 1];
    }
    value[j] = v;
    mass[j] = m;
  }
  Cut cut = {kInfinity, 0};
  for (int64_t i = 0; i < count && above < budget; ++i) {
    cut = {value[i], value[i] == cut.value ? cut.ties + 1 : 1};
    above += mass[i];
  }
  return cut;
}

struct Range {
  float low, high;
};
Range range_of(const float* value, int64_t count) {  // at least kLanes values
  Vec most = load(value), least = -most;
  for (int64_t i = kLanes; i < count + kLanes; i += kLanes) {
    const Vec x = load(value + std::min(i, count - kLanes));  // the last two overlap
    most = max(x, most);
    least = max(-x, least);
  }
  return {-most_of(least), most_of(most)};
}

// The bucket of a value, counted from the top of a range: the highest is in the first and the lowest in one of the last.
// Scaled first, so that neither the widest nor the narrowest range leaves float32.
class Buckets {
 public:
  explicit Buckets(Range range) {
    const float width = range.high * 0.25f - range.low * 0.25f;
    scale_ = width < 1e-20f ? 0x1p100f : 0.25f;
    top_ = range.high * scale_;
    per_width_ = float(kBuckets - 1) / (top_ - range.low * scale_);
  }
  Bits of(Vec x) const { return __builtin_convertvector((top_ - x * scale_) * per_width_, Bits); }

 private:
  float scale_, top_, per_width_;
};

// The masses in every bucket. Two sums for neighbours, so that one does not wait for the other.
void add_up(const Items& items, int64_t count, double (*held)[kBuckets]) {
  int64_t i = 0;
  for (; i + 1 < count; i += 2) {
    held[0][items.bucket[i]] += items.mass[i];
    held[1][items.bucket[i + 1]] += items.mass[i + 1];
  }
  if (i < count) held[0][items.bucket[i]] += items.mass[i];
  for (int64_t j = 0; j < kBuckets; ++j) held[0][j] += held[1][j];
}

// In descending order an item stays while the mass before it is below `budget`, which is above 0. `items` are used up.
// Histograms over the values' range: whole buckets are passed from the top, and the one in which the budget ends is
// looked at again, over its own range. Sums are in double: counts and equal masses add up exactly.
Cut find_cut(Items items, int64_t count, double budget) {
  double above = 0;
  while (count > kSmall) {
    const Range range = range_of(items.value, count);
    if (range.low == range.high) return cut_of_ties(range.low, items.mass[0], count, above, budget);
    const Buckets buckets(range);
    for (int64_t i = 0; i < count; i += kLanes) store(items.bucket + i, buckets.of(load(items.value + i)));
    double held[2][kBuckets] = {};
    add_up(items, count, held);
    int32_t bucket = 0;
    while (bucket < kBuckets - 1 && above + held[0][bucket] < budget) above += held[0][bucket++];
    int64_t left = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Mask inside = equal(load(items.bucket + i), Bits{} + bucket) & first_lanes(count - i);
      pack(items.value + left, load(items.value + i), inside);
      pack(items.mass + left, load(items.mass + i), inside);
      left += __builtin_popcount(inside);
    }
    if (left == 0) return {range.low, count};  // the budget is more than there is: everything stays
    count = left;
  }
  return cut_of_few(items, count, above, budget);
}

struct Scratch {  // of one thread; holds a vocabulary
  std::vector<float> value, mass, spare_value, spare_mass;
  std::vector<int32_t> id, bucket;
  explicit Scratch(int64_t size) : value(size), mass(size), spare_value(size), spare_mass(size), id(size), bucket(size) {}
  Items spare() { return {spare_value.data(), spare_mass.data(), bucket.data()}; }
};

// The candidates that may pass a row's filters, in ascending order of their ids.
class Candidates {
 public:
  Candidates(const float* logits, int64_t size, float most, Scratch& scratch)
      : logits_(logits), size_(size), most_(most), scratch_(scratch), value_(scratch.value.data()), mass_(scratch.mass.data()),
        id_(scratch.id.data()) {}

  // Collect what the filters may keep, by cheap bounds, then cut exactly.
  void filter(int64_t top_k, float top_p, float min_p) {
    const bool few = top_k < size_, nucleus = top_p < 1.0f;
    double low = kLowest;  // -infinity is never drawn
    const double slack = 1e-3 + 1e-6 * std::fabs(most_);
    if (few) low = bound_of(top_k);
    // All that is less likely than (1 - top_p) / size of the most likely has, together, less mass than top-p leaves out.
    else if (nucleus) low = most_ - std::log(double(size_) / (1.0 - top_p)) - slack;
    if (!few || !nucleus) low = std::max(low, most_ + std::log(double(min_p)) - slack);
    const double total = collect(float(low), nucleus && !few);
    if (few && top_k < count_) {
      std::fill_n(scratch_.spare_mass.data(), count_, 1.0f);
      cut(double(top_k));
    }
    if (nucleus) {
      std::copy(mass_, mass_ + count_, scratch_.spare_mass.data());
      cut(top_p * (few ? sum() : total));
    }
    min_p_ = min_p;
  }

  // The token with the largest noisy logit, the lowest of them where several are equal.
  int32_t draw(const int32_t* keys) const {
    float best = -kInfinity;
    int32_t best_id = 0;
    uint32_t hopeless = hopeless_hash(best, most_);
    for (int64_t i = 0; i < count_; i += kLanes) {
      const Hashes hash = hashes_of(load(id_ + i), keys);
      const Mask fit = at_least(load(mass_ + i), splat(min_p_)) & at_most(hash, Hashes{} + hopeless) & first_lanes(count_ - i);
      if (!fit) continue;
      float noisy[kLanes];
      store(noisy, load(value_ + i) + gumbel(hash));
      for (Mask rest = fit; rest; rest &= rest - 1) {
        const int lane = first_lane(rest);
        if (!(noisy[lane] > best)) continue;
        best = noisy[lane];
        best_id = id_[i + lane];
      }
      hopeless = hopeless_hash(best, most_);
    }
    return best_id;
  }

 private:
  // At least `top_k` logits reach this: the top_k-th largest of the largest in groups of 16.
  float bound_of(int64_t top_k) {
    const Items items = scratch_.spare();
    int64_t groups = 0;
    for (int64_t first = 0; first < size_; first += kGroup * kLanes, groups += kLanes) {
      Vec high = splat(kLowest);
      const int64_t end = std::min(first + kGroup * kLanes, size_);
      for (int64_t i = first; i < end; i += kLanes) high = max(load_some(logits_ + i, size_ - i, 1.0f), high);
      store(items.value + groups, high);
    }
    if (top_k > groups) return kLowest;
    std::fill_n(items.mass, groups, 1.0f);
    return find_cut(items, groups, double(top_k)).value;
  }

  // Gather the logits from `low` on, and return the mass of the whole vocabulary if it is asked for.
  double collect(float low, bool weigh_all) {
    double total = 0;
    for (int64_t first = 0; first < size_; first += kGroup * kLanes) {
      Vec part = Vec{};
      const int64_t end = std::min(first + kGroup * kLanes, size_);
      for (int64_t i = first; i < end; i += kLanes) {
        const Vec x = load_some(logits_ + i, size_ - i, 1.0f);
        const Mask chosen = at_least(x, splat(low));
        if (!chosen && !weigh_all) continue;
        const Vec mass = exponential(x - most_);
        part += mass;
        pack(value_ + count_, x, chosen);
        pack(mass_ + count_, mass, chosen);
        pack(id_ + count_, kLane + int32_t(i), chosen);
        count_ += __builtin_popcount(chosen);
      }
      total += batchinfer_lanes::total(part);
    }
    return total;
  }

  // Drop what is beyond the budget; the spare masses are what each candidate takes of it.
  void cut(double budget) {
    std::copy(value_, value_ + count_, scratch_.spare_value.data());
    Cut at = find_cut(scratch_.spare(), count_, budget);
    int64_t left = 0;
    for (int64_t i = 0; i < count_; i += kLanes) {
      const Vec x = load(value_ + i);
      Mask stays = above(x, splat(at.value));
      for (Mask ties = equal(x, splat(at.value)) & first_lanes(count_ - i); ties && at.ties > 0; ties &= ties - 1, --at.ties)
        stays |= ties & -ties;
      stays &= first_lanes(count_ - i);
      const Bits ids = load(id_ + i);
      const Vec mass = load(mass_ + i);
      pack(value_ + left, x, stays);
      pack(mass_ + left, mass, stays);
      pack(id_ + left, ids, stays);
      left += __builtin_popcount(stays);
    }
    count_ = left;
  }

  double sum() const {
    double out = 0;
    for (int64_t i = 0; i < count_; ++i) out += mass_[i];
    return out;
  }

  const float* logits_;
  int64_t size_;
  float most_;
  Scratch& scratch_;
  float *value_, *mass_;
  int32_t* id_;
  int64_t count_ = 0;
  float min_p_ = 0;
};

struct Choice {
  const Draw* draw;
  const int32_t* rows;  // rows that filter and whose logits are sound
  int32_t* token_ids;
  int64_t count;
};

void choose_rows(int64_t begin, int64_t end, void* context) {
  const Choice& c = *static_cast<const Choice*>(context);
  const Draw& a = *c.draw;
  static thread_local std::vector<Scratch> own;
  const int64_t size = a.vocab_size + kGroup * kLanes;  // whole groups, and a vector beyond the last candidate
  if (own.empty() || int64_t(own[0].value.size()) < size) {
    own.clear();
    own.emplace_back(size);
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = c.rows[i];
    const float most = a.best[row] / a.temperature[row];
    Candidates candidates(a.kept + a.kept_row[row] * a.vocab_size, a.vocab_size, most, own[0]);
    candidates.filter(a.top_k[row], a.top_p[row], a.min_p[row]);
    c.token_ids[i] = candidates.draw(a.keys + 2 * row);
  }
}

}  // namespace

extern "C" void batchinfer_choose(const Choice* choice) {
  torch_parallel_for(0, choice->count, 1, choose_rows, const_cast<Choice*>(choice));
}
