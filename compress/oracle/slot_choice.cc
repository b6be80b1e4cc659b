#include "compress/oracle/slot_choice.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace kvasir::compress {
namespace {

class Norm {
 public:
  // Finds the minimum and maximum of the candidates' numbers. There may be
  // no candidates.
  explicit Norm(std::span<const float> candidates) {
    if (candidates.empty()) return;
    const auto [least, greatest] =
        std::minmax_element(candidates.begin(), candidates.end());
    least_ = *least;
    range_ = *greatest - *least;
  }
  float Of(float x) const { return range_ > 0 ? (x - least_) / range_ : 0.0F; }

 private:
  float least_ = 0;
  float range_ = 0;
};

}  // namespace

std::vector<int64_t> ChooseSlots(const plan::ResolvedEviction& rule,
                                 const SlotScores& scores, int64_t kept) {
  const auto slots = static_cast<int64_t>(scores.mass.size());
  const int64_t recent = rule.scored ? rule.recent : kept - rule.sinks;
  KVASIR_CHECK(rule.sinks + recent <= kept && kept <= slots);
  const auto candidates = [&](std::span<const float> all) {
    return all.empty()
               ? all
               : all.subspan(static_cast<size_t>(rule.sinks),
                             static_cast<size_t>(slots - recent - rule.sinks));
  };
  const std::span<const float> mass = candidates(scores.mass);
  const std::span<const float> key = candidates(scores.key_error);
  const std::span<const float> value = candidates(scores.value_error);
  const Norm mass_norm(mass);
  const Norm key_norm(key);
  const Norm value_norm(value);
  std::vector<float> worth(mass.size());
  for (size_t i = 0; i < worth.size(); ++i) {
    const float k = 1.0F - (key.empty() ? 0.0F : key_norm.Of(key[i]));
    const float v = 1.0F - (value.empty() ? 0.0F : value_norm.Of(value[i]));
    worth[i] = rule.lambda * mass_norm.Of(mass[i]) +
               (1.0F - rule.lambda) * (rule.friendliness * (k + v));
  }
  std::vector<int64_t> best(worth.size());
  std::iota(best.begin(), best.end(), int64_t{0});
  const auto places = kept - rule.sinks - recent;
  std::partial_sort(best.begin(), best.begin() + places, best.end(),
                    [&worth](int64_t a, int64_t b) {
                      const float x = worth[static_cast<size_t>(a)];
                      const float y = worth[static_cast<size_t>(b)];
                      return x > y || (x == y && a < b);
                    });
  std::vector<int64_t> chosen(static_cast<size_t>(rule.sinks));
  std::iota(chosen.begin(), chosen.end(), int64_t{0});
  for (int64_t i = 0; i < places; ++i) {
    chosen.push_back(rule.sinks + best[static_cast<size_t>(i)]);
  }
  std::sort(chosen.begin(), chosen.end());
  for (int64_t i = slots - recent; i < slots; ++i) chosen.push_back(i);
  return chosen;
}

}  // namespace kvasir::compress
