// Chooses a token for rows that filter (top-k, top-p, min-p) without sorting the vocabulary: histograms over the values'
// range tell where a filter cuts, each over the one bucket of the one before in which the cut lies. A row's token
// depends on nothing but the row.

#include <algorithm>
#include <vector>

#include "sampling.h"

namespace {

using namespace batchinfer;

constexpr int64_t kBuckets = 512;
constexpr int64_t kSmall = 48;         // so few values are put in order one by one
constexpr int64_t kGroupVectors = 16;  // vectors whose lanes are searched for their largest together

// Where a filter cuts: what is above `value` stays, and the first `ties` of those equal to it.
struct Cut {
  float value;
  int64_t ties;
};

// Values with a mass each: 1 to count them, or e^value to weigh them.
struct Items {
  float* value;
  float* mass;
};

Cut cut_of_ties(float value, double each, int64_t count, double above, double budget) {
  if (each <= 0) return {value, count};
  int64_t ties = int64_t(std::min(std::ceil((budget - above) / each), double(count)));
  ties = std::max<int64_t>(ties, 1);
  while (ties > 1 && above + double(ties - 1) * each >= budget) --ties;
  while (ties < count && above + double(ties) * each < budget) ++ties;
  return {value, ties};
}

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
  double low, high;
};
Range range_of(const float* value, int64_t count) {  // at least kLanes values
  Vec most = load(value), least = -most;
  for (int64_t i = kLanes; i < count + kLanes; i += kLanes) {
    const Vec x = load(value + std::min(i, count - kLanes));  // the last two overlap
    most = max(x, most);
    least = max(-x, least);
  }
  return {-largest(least), largest(most)};
}

// In descending order an item stays while the mass before it is below `budget`, which is above 0. `items` are used up.
// Histograms over the values' range: whole buckets are passed from the top, and the one in which the budget ends is
// looked at again, over its own range. Sums are in double: counts and equal masses add up exactly.
Cut find_cut(Items items, int64_t count, double budget) {
  float *value = items.value, *mass = items.mass;
  double above = 0;
  while (count > kSmall) {
    const Range range = range_of(value, count);
    if (range.low == range.high) return cut_of_ties(value[0], mass[0], count, above, budget);
    const double per_width = double(kBuckets - 1) / (range.high - range.low);  // no value falls beyond the last bucket
    const auto bucket_of = [&](float v) { return int64_t((range.high - v) * per_width); };
    double held[kBuckets] = {};
    for (int64_t i = 0; i < count; ++i) held[bucket_of(value[i])] += mass[i];
    int64_t bucket = 0;
    while (bucket < kBuckets - 1 && above + held[bucket] < budget) above += held[bucket++];
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      value[left] = value[i];
      mass[left] = mass[i];
      left += bucket_of(value[i]) == bucket;
    }
    if (left == 0) return {float(range.low), count};  // the budget is more than there is: everything stays
    count = left;
  }
  return cut_of_few(items, count, above, budget);
}

struct Scratch {  // of one thread; holds a vocabulary
  std::vector<float> value, mass, spare_value, spare_mass;
  std::vector<int32_t> id;
  explicit Scratch(int64_t size) : value(size), mass(size), spare_value(size), spare_mass(size), id(size) {}
};

// The candidates that may pass a row's filters, in ascending order of their ids.
class Candidates {
 public:
  Candidates(const float* logits, int64_t size, float most, Scratch& scratch)
      : logits_(logits), size_(size), most_(most), scratch_(scratch), value_(scratch.value.data()), mass_(scratch.mass.data()),
        id_(scratch.id.data()) {}

  // Collect what the filters may keep: cheap bounds first, then exact cuts.
  void filter(int64_t top_k, float top_p, float min_p) {
    const bool few = top_k < size_, nucleus = top_p < 1.0f;
    double low = -std::numeric_limits<float>::max();  // -infinity is never drawn
    const double slack = 1e-3 + 1e-6 * std::fabs(most_);
    if (few) low = bound_of(top_k);
    // All that is less likely than (1 - top_p) / size of the most likely has, together, less mass than top-p leaves out.
    else if (nucleus) low = most_ - std::log(double(size_) / (1.0 - top_p)) - slack;
    if (!few || !nucleus) low = std::max(low, most_ + std::log(double(min_p)) - slack);
    collect(float(low));
    if (few && top_k < count_) {
      std::fill(mass_, mass_ + count_, 1.0f);
      cut(double(top_k));
    }
    for (int64_t i = 0; i < count_; i += kLanes) store(mass_ + i, exponential(load(value_ + i) - most_));
    if (nucleus) cut(top_p * (few ? sum(mass_, count_) : total()));
    min_p_ = min_p;
  }

  // The token with the largest noisy logit, the lowest of them where several are equal.
  int32_t draw(const int32_t* keys) const {
    float best = -kInfinity;
    int32_t best_id = 0;
    for (int64_t i = 0; i < count_; i += kLanes) {
      const IVec ids = load_bits(id_ + i);
      const IVec kept = (load(mass_ + i) >= splat(min_p_)) & (kLane < splat(int32_t(std::min<int64_t>(count_ - i, kLanes))));
      const Vec noisy = kept ? load(value_ + i) + gumbel(ids, keys) : splat(-kInfinity);
      const float value = largest(noisy);
      if (!(value > best)) continue;
      best = value;
      best_id = id_[i + first_lane(equal(noisy, splat(value)))];
    }
    return best_id;
  }

 private:
  // At least `top_k` logits reach this: the top_k-th largest of the largest in groups of 16.
  double bound_of(int64_t top_k) {
    float* largest_of = scratch_.spare_value.data();
    int64_t groups = 0;
    for (int64_t first = 0; first < size_; first += kGroupVectors * kLanes, groups += kLanes) {
      Vec high = splat(-std::numeric_limits<float>::max());
      const int64_t end = std::min(first + kGroupVectors * kLanes, size_);
      for (int64_t i = first; i < end; i += kLanes) high = max(load_some(logits_ + i, size_ - i, 1.0f), high);
      store(largest_of + groups, high);
    }
    if (top_k > groups) return -std::numeric_limits<float>::max();
    std::fill_n(scratch_.spare_mass.data(), groups, 1.0f);
    return find_cut({largest_of, scratch_.spare_mass.data()}, groups, double(top_k)).value;
  }

  void collect(float low) {
    for (int64_t i = 0; i < size_; i += kLanes) {
      const Vec x = load_some(logits_ + i, size_ - i, 1.0f);
      for (Mask found = at_least(x, splat(low)); found; found &= found - 1) {
        id_[count_] = int32_t(i) + first_lane(found);
        value_[count_] = logits_[id_[count_]];
        ++count_;
      }
    }
  }

  void cut(double budget) {
    std::copy(value_, value_ + count_, scratch_.spare_value.data());
    std::copy(mass_, mass_ + count_, scratch_.spare_mass.data());
    Cut at = find_cut({scratch_.spare_value.data(), scratch_.spare_mass.data()}, count_, budget);
    int64_t left = 0;
    for (int64_t i = 0; i < count_; ++i) {
      if (value_[i] < at.value || (value_[i] == at.value && at.ties-- <= 0)) continue;
      value_[left] = value_[i];
      mass_[left] = mass_[i];
      id_[left++] = id_[i];
    }
    count_ = left;
  }

  static double sum(const float* mass, int64_t count) {
    double out = 0;
    for (int64_t i = 0; i < count; ++i) out += mass[i];
    return out;
  }

  double total() const {  // mass of the whole vocabulary
    double out = 0;
    for (int64_t first = 0; first < size_; first += kGroupVectors * kLanes) {
      Vec part = Vec{};
      const int64_t end = std::min(first + kGroupVectors * kLanes, size_);
      for (int64_t i = first; i < end; i += kLanes) part += exponential(load_some(logits_ + i, size_ - i, 1.0f) - most_);
      out += batchinfer::total(part);
    }
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
  const int64_t size = a.vocab_size + kGroupVectors * kLanes;  // whole groups, and a vector beyond the last candidate
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
