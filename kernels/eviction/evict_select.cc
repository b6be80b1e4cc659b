#include "kernels/eviction/evict_select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/device/dispatch.h"
#include "kernels/device/parallel.h"
#include "kernels/eviction/ops.h"
#include "kernels/latents/latent_check.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<EvictSelectParams, DevicePtr<uint64_t>> kKernels = {
    "evict_select", &EvictSelectReference, &EvictSelectCpu};

// The slots that one unit may evict in one eviction. Each slot has a worth,
// the number that EvictSelectParams defines. The slots with the greatest worth
// are kept.
class Candidates {
 public:
  Candidates(const EvictSelectArgs& params, const Eviction& eviction,
             int64_t unit)
      : params_(params),
        eviction_(eviction),
        unit_(unit),
        mass_(RangeOf([this](int64_t s) { return Mass(s); })),
        key_(RangeOf([this](int64_t s) { return Error(kKeyError, s); })),
        value_(RangeOf([this](int64_t s) { return Error(kValueError, s); })) {}

  int64_t begin() const { return eviction_.sinks; }
  int64_t end() const { return eviction_.num_slots - eviction_.recent; }
  // Returns the number of candidates to keep.
  int64_t places() const {
    return eviction_.kept - eviction_.sinks - eviction_.recent;
  }

  float WorthOf(int64_t slot) const {
    const float mass = mass_.Norm(Mass(slot));
    const float key = 1.0f - key_.Norm(Error(kKeyError, slot));
    const float value = 1.0f - value_.Norm(Error(kValueError, slot));
    const float friendliness =
        eviction_.halves_friendliness ? 0.5f * (key + value) : key + value;
    return eviction_.lambda * mass + (1.0f - eviction_.lambda) * friendliness;
  }

  float& ScoreAt(int64_t slot) const {
    const int64_t page_tokens = params_.metadata.page_tokens;
    return ScoresOf(params_.metadata, PageOf(slot), unit_)[slot % page_tokens];
  }
  int32_t* kept() const {
    return params_.kept_slots + eviction_.first_kept + unit_ * eviction_.kept;
  }

 private:
  struct Range {
    float least = 0.0f;
    float greatest = 0.0f;

    float Norm(float x) const {
      return greatest > least ? (x - least) / (greatest - least) : 0.0f;
    }
  };
  template <typename Get>
  Range RangeOf(const Get& get) const {
    if (begin() >= end()) return {};
    Range range = {get(begin()), get(begin())};
    for (int64_t s = begin() + 1; s < end(); ++s) {
      const float x = get(s);
      range.least = x < range.least ? x : range.least;
      range.greatest = x > range.greatest ? x : range.greatest;
    }
    return range;
  }

  int64_t PageOf(int64_t slot) const {
    return eviction_.block_table
        .device_address()[slot / params_.metadata.page_tokens];
  }
  float Mass(int64_t slot) const {
    const float mass = ScoreAt(slot);
    return std::isfinite(mass) ? mass : 0.0f;
  }
  float Error(int side, int64_t slot) const {
    const uint8_t* errors =
        ErrorsOf(params_.metadata, side, PageOf(slot), unit_);
    return errors == nullptr
               ? 0.0f
               : DecodeError(errors[slot % params_.metadata.page_tokens]);
  }

  const EvictSelectArgs& params_;
  const Eviction& eviction_;
  const int64_t unit_;
  const Range mass_;
  const Range key_;
  const Range value_;
};

void Decay(const Eviction& eviction, const Candidates& candidates) {
  if (eviction.decay == 1.0f) return;
  for (int64_t s = 0; s < eviction.num_slots; ++s) {
    float& score = candidates.ScoreAt(s);
    score = score * eviction.decay;
  }
}

// Returns a key by which slots are sorted: slots of greater worth first, and
// lower slots first among those of equal worth. Worth is never negative, so its
// bits have the same order as its values.
uint64_t KeyOf(float worth, int64_t slot) {
  return uint64_t{~std::bit_cast<uint32_t>(worth)} << 32 |
         static_cast<uint32_t>(slot);
}

void SelectUnit(const EvictSelectArgs& params, const Eviction& eviction,
                int64_t unit, uint64_t* keys) {
  const Candidates candidates(params, eviction, unit);
  int32_t* to = candidates.kept();
  for (int64_t s = 0; s < candidates.begin(); ++s) {
    *to++ = static_cast<int32_t>(s);
  }
  const int64_t count = candidates.end() - candidates.begin();
  const int64_t places = candidates.places();
  if (places > 0) {
    for (int64_t s = candidates.begin(); s < candidates.end(); ++s) {
      keys[s - candidates.begin()] = KeyOf(candidates.WorthOf(s), s);
    }
    std::nth_element(keys, keys + places - 1, keys + count);
    // The lower 32 bits of a key are the slot number.
    for (int64_t i = 0; i < places; ++i) keys[i] &= 0xffffffffu;
    std::sort(keys, keys + places);
    for (int64_t i = 0; i < places; ++i) *to++ = static_cast<int32_t>(keys[i]);
  }
  for (int64_t s = candidates.end(); s < eviction.num_slots; ++s) {
    *to++ = static_cast<int32_t>(s);
  }
  Decay(eviction, candidates);
}

}  // namespace

// The reference implementation: sorts all candidates.
void EvictSelectReference(const EvictSelectArgs& params, uint64_t*,
                          CpuStream&) {
  for (int64_t i = 0; i < params.num_evictions; ++i) {
    const Eviction& eviction = params.evictions[i];
    for (int64_t unit = 0; unit < params.metadata.num_units; ++unit) {
      const Candidates candidates(params, eviction, unit);
      std::vector<std::pair<float, int64_t>> best;
      for (int64_t s = candidates.begin(); s < candidates.end(); ++s) {
        best.emplace_back(-candidates.WorthOf(s), s);
      }
      std::sort(best.begin(), best.end());
      best.resize(static_cast<size_t>(candidates.places()));
      std::vector<int32_t> kept;
      for (const auto& [worth, slot] : best) {
        kept.push_back(static_cast<int32_t>(slot));
      }
      for (int64_t s = 0; s < eviction.num_slots; ++s) {
        if (s >= candidates.begin() && s < candidates.end()) continue;
        kept.push_back(static_cast<int32_t>(s));
      }
      std::sort(kept.begin(), kept.end());
      std::copy(kept.begin(), kept.end(), candidates.kept());
      Decay(eviction, candidates);
    }
  }
}

void EvictSelectCpu(const EvictSelectArgs& params, uint64_t* scratch,
                    CpuStream& stream) {
  const int64_t num_units = params.metadata.num_units;
  ForRows(stream, params.num_evictions * num_units, params.most_slots,
          [&](int64_t begin, int64_t end, int thread) {
            for (int64_t i = begin; i < end; ++i) {
              SelectUnit(params, params.evictions[i / num_units], i % num_units,
                         scratch + thread * params.most_slots);
            }
          });
}

absl::StatusOr<EvictionStep> CheckEvictions(
    int64_t num_units, absl::Span<const Eviction> evictions) {
  EvictionStep step;
  for (size_t i = 0; i < evictions.size(); ++i) {
    const Eviction& eviction = evictions[i];
    const auto refuse = [i](const char* what, auto least, auto most,
                            auto have) {
      return absl::InvalidArgumentError(
          absl::StrCat("eviction ", i, ": ", what, ": must be ", least, " to ",
                       most, ", but is ", have));
    };
    constexpr int64_t kMostSlots = std::numeric_limits<int32_t>::max();
    if (eviction.num_slots < 1 || eviction.num_slots > kMostSlots) {
      return refuse("slots", 1, kMostSlots, eviction.num_slots);
    }
    if (eviction.sinks < 0 || eviction.sinks > eviction.num_slots) {
      return refuse("sinks", 0, eviction.num_slots, eviction.sinks);
    }
    // At least one recent slot must be kept: otherwise the newest token, which
    // has the smallest mass, would be evicted at once.
    if (eviction.recent < 1 || eviction.recent > eviction.num_slots) {
      return refuse("recent slots", 1, eviction.num_slots, eviction.recent);
    }
    if (eviction.kept < eviction.sinks + eviction.recent ||
        eviction.kept > eviction.num_slots) {
      return refuse("kept slots", eviction.sinks + eviction.recent,
                    eviction.num_slots, eviction.kept);
    }
    if (!(eviction.lambda >= 0.0f && eviction.lambda <= 1.0f)) {
      return refuse("lambda", 0, 1, eviction.lambda);
    }
    if (!(eviction.decay > 0.0f && eviction.decay <= 1.0f)) {
      return refuse("decay", "more than 0 and up", 1, eviction.decay);
    }
    if (eviction.first_kept < 0 || eviction.first_kept > kMostSlots) {
      return refuse("first kept slot", 0, kMostSlots, eviction.first_kept);
    }
    step.most_slots = std::max(step.most_slots, eviction.num_slots);
    step.kept_slots = std::max(step.kept_slots,
                               eviction.first_kept + num_units * eviction.kept);
  }
  return step;
}

absl::Status EvictSelect(Stream& stream, const PreparedEviction& prepared,
                         const EvictionRows& rows, const EvictionStep& step,
                         Workspace& workspace) {
  if (rows.num_evictions < 0) {
    return Refuse(kKernels.op, "evictions", 0, rows.num_evictions);
  }
  Workspace::Scope scope(&workspace);
  const DevicePtr<uint64_t> scratch =
      workspace.Take<uint64_t>(step.most_slots * ScratchThreads(stream));
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  EvictSelectParams params;
  params.metadata = prepared.metadata;
  params.evictions = rows.evictions;
  params.num_evictions = rows.num_evictions;
  params.most_slots = step.most_slots;
  params.kept_slots = rows.kept_slots;
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
