// evict_select on a GPU. One CTA chooses the slots of one unit in one eviction.
// It reads the candidates in six passes. The first one finds the ranges of
// masses and errors, four find the threshold, and the last one writes the kept
// slots. The last five passes compute each candidate's worth again, because
// that costs less than storing it.
//
// The threshold is the worth of the last candidate that is kept. It is found by
// radix selection: each pass counts the candidates whose higher bits equal
// those of the threshold, by the next 8 bits of their worth. All candidates
// above the threshold are kept. If several candidates equal it, the lowest
// slots are kept until no place is left. The CTA counts both kinds in the order
// of slots, so the kept slots are written in ascending order.
//
// Worth is computed by the float32 operations of evict_select.cc in the same
// order, so a GPU keeps the same slots as a CPU.
//
// Layout: the planes of a page have the masses and errors of neighbouring slots
// next to each other, and neighbouring threads read neighbouring slots.
//
// Bytes per candidate and unit: 4 to 6 (mass and errors), read once from memory
// and five times from caches. Decay reads and writes all masses. Operations:
// about 30 for each candidate and pass. Lower bound of the time: the latency of
// about 6 n / 512 dependent steps for n slots, because each unit has only one
// CTA.
#include "kernels/eviction/evict_select.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / simt::kWarp;
constexpr uint32_t kDigits = 256;
constexpr uint32_t kLaneDigits = kDigits / simt::kWarp;
constexpr int kRanges = 3;  // of the masses, the errors of keys, and of values

// The shared memory of a CTA. Consecutive turns of WriteBest use different
// halves of `above` and `equal`, so one barrier per turn is enough.
struct SelectMemory {
  float least[kRanges][kWarps];
  float greatest[kRanges][kWarps];
  uint32_t count[kDigits];
  uint32_t digit;   // the digit of the threshold in this pass
  uint32_t places;  // how many candidates with the threshold's digits are kept
  int32_t above[2][kWarps];
  int32_t equal[2][kWarps];
};

KVASIR_DEVICE bool IsFinite(float x) { return x * 0.0f == 0.0f; }

struct Range {
  float least = 0.0f;
  float greatest = 0.0f;

  KVASIR_DEVICE float Norm(float x) const {
    return greatest > least ? (x - least) / (greatest - least) : 0.0f;
  }
};

// Chooses the slots of a unit. All threads of the CTA must call Run.
class SelectUnit {
 public:
  KVASIR_DEVICE SelectUnit(const EvictSelectArgs& args,
                           const Eviction& eviction, int64_t unit)
      : metadata_(args.metadata),
        eviction_(eviction),
        unit_(unit),
        table_(simt::BitsAs<const int32_t*>(eviction.block_table)),
        begin_(static_cast<uint32_t>(eviction.sinks)),
        end_(static_cast<uint32_t>(eviction.num_slots - eviction.recent)),
        kept_(args.kept_slots + eviction.first_kept + unit * eviction.kept) {}

  KVASIR_DEVICE void Run() {
    const auto sinks = static_cast<uint32_t>(eviction_.sinks);
    const auto recent = static_cast<uint32_t>(eviction_.recent);
    const auto kept = static_cast<uint32_t>(eviction_.kept);
    const uint32_t places = kept - sinks - recent;
    if (places > 0) {
      FindRanges();
      WriteBest(FindThreshold(places));
    }
    for (uint32_t i = simt::Thread(); i < sinks; i += kThreads) {
      simt::StoreGlobal(kept_ + i, static_cast<int32_t>(i));
    }
    for (uint32_t i = simt::Thread(); i < recent; i += kThreads) {
      simt::StoreGlobal(kept_ + kept - recent + i,
                        static_cast<int32_t>(end_ + i));
    }
    Decay();
  }

 private:
  struct Threshold {
    uint32_t order;   // the complement of the bits of the threshold
    uint32_t places;  // how many candidates that equal it are kept
  };

  static KVASIR_DEVICE SelectMemory* Memory() {
    return reinterpret_cast<SelectMemory*>(simt::Shared());
  }
  struct Place {
    int64_t page;
    uint32_t slot;  // in the page
  };
  KVASIR_DEVICE Place PlaceOf(uint32_t slot) const {
    const auto page_tokens = static_cast<uint32_t>(metadata_.page_tokens);
    return {simt::LoadGlobal(table_ + slot / page_tokens), slot % page_tokens};
  }
  // Returns the mass of a slot (i = 0) or the error of its key or its value.
  KVASIR_DEVICE float Number(int i, const Place& place) const {
    if (i == 0) {
      const float mass =
          simt::LoadGlobal(ScoresOf(metadata_, place.page, unit_) + place.slot);
      return IsFinite(mass) ? mass : 0.0f;
    }
    const uint8_t* const errors = ErrorsOf(metadata_, i - 1, place.page, unit_);
    return errors == nullptr
               ? 0.0f
               : DecodeError(simt::LoadGlobal(errors + place.slot));
  }
  // Returns a number by which candidates are ordered: a greater worth has a
  // smaller number. Worth is never negative, so its bits have the same order as
  // its values.
  KVASIR_DEVICE uint32_t OrderOf(uint32_t slot) const {
    const Place place = PlaceOf(slot);
    const float mass = ranges_[0].Norm(Number(0, place));
    const float key = 1.0f - ranges_[1].Norm(Number(1, place));
    const float value = 1.0f - ranges_[2].Norm(Number(2, place));
    const float friendliness =
        eviction_.halves_friendliness ? 0.5f * (key + value) : key + value;
    return ~simt::BitsAs<uint32_t>(eviction_.lambda * mass +
                                   (1.0f - eviction_.lambda) * friendliness);
  }

  KVASIR_DEVICE void FindRanges() {
    constexpr float kMost = 3.402823466e38f;
    KVASIR_UNROLL
    for (Range& range : ranges_) range = {kMost, -kMost};
    for (uint32_t s = begin_ + simt::Thread(); s < end_; s += kThreads) {
      const Place place = PlaceOf(s);
      KVASIR_UNROLL
      for (int i = 0; i < kRanges; ++i) {
        const float x = Number(i, place);
        ranges_[i].least = x < ranges_[i].least ? x : ranges_[i].least;
        ranges_[i].greatest = x > ranges_[i].greatest ? x : ranges_[i].greatest;
      }
    }
    KVASIR_UNROLL
    for (int i = 0; i < kRanges; ++i) {
      const float least = -simt::WarpMax(-ranges_[i].least);
      const float greatest = simt::WarpMax(ranges_[i].greatest);
      if (simt::Lane() == 0) {
        simt::StoreShared(&Memory()->least[i][simt::Warp()], least);
        simt::StoreShared(&Memory()->greatest[i][simt::Warp()], greatest);
      }
    }
    simt::SyncCta();
    KVASIR_UNROLL
    for (int i = 0; i < kRanges; ++i) {
      const uint32_t warp = simt::Lane() % kWarps;
      ranges_[i].least =
          -simt::WarpMax(-simt::LoadShared(&Memory()->least[i][warp]));
      ranges_[i].greatest =
          simt::WarpMax(simt::LoadShared(&Memory()->greatest[i][warp]));
    }
  }

  // Returns the threshold: the OrderOf of the last candidate that is kept.
  KVASIR_DEVICE Threshold FindThreshold(uint32_t places) const {
    SelectMemory* const memory = Memory();
    Threshold threshold = {0, places};
    for (uint32_t shift = 32; shift > 0;) {
      const uint32_t known = shift < 32 ? ~0u << shift : 0u;
      shift -= 8;
      for (uint32_t i = simt::Thread(); i < kDigits; i += kThreads) {
        simt::StoreShared(memory->count + i, 0u);
      }
      simt::SyncCta();
      for (uint32_t s = begin_ + simt::Thread(); s < end_; s += kThreads) {
        const uint32_t order = OrderOf(s);
        if (((order ^ threshold.order) & known) != 0) continue;
        simt::AtomicAdd<simt::Scope::kCta>(
            memory->count + (order >> shift & (kDigits - 1)), 1u);
      }
      simt::SyncCta();
      if (simt::Warp() == 0) FindDigit(threshold.places);
      simt::SyncCta();
      threshold.order |= simt::LoadShared(&memory->digit) << shift;
      threshold.places = simt::LoadShared(&memory->places);
    }
    return threshold;
  }
  // Finds the digit of the candidate that takes the last of `places` places, in
  // the counts of this pass. A warp calls it; a lane has kLaneDigits digits.
  static KVASIR_DEVICE void FindDigit(uint32_t places) {
    SelectMemory* const memory = Memory();
    uint32_t counts[kLaneDigits];
    uint32_t own = 0;
    KVASIR_UNROLL
    for (uint32_t i = 0; i < kLaneDigits; ++i) {
      counts[i] =
          simt::LoadShared(memory->count + simt::Lane() * kLaneDigits + i);
      own += counts[i];
    }
    uint32_t through = own;  // the candidates of this lane and of lower ones
    KVASIR_UNROLL
    for (uint32_t lanes = 1; lanes < simt::kWarp; lanes *= 2) {
      const uint32_t other = simt::ShuffleUp(through, lanes);
      if (simt::Lane() >= lanes) through += other;
    }
    uint32_t before = through - own;
    if (before >= places || through < places) return;
    KVASIR_UNROLL
    for (uint32_t i = 0; i < kLaneDigits; ++i) {
      if (before < places && before + counts[i] >= places) {
        simt::StoreShared(&memory->digit, simt::Lane() * kLaneDigits + i);
        simt::StoreShared(&memory->places, places - before);
      }
      before += counts[i];
    }
  }

  // Writes the best candidates in ascending order.
  KVASIR_DEVICE void WriteBest(const Threshold& threshold) const {
    SelectMemory* const memory = Memory();
    // The numbers of candidates in earlier steps.
    int32_t above = 0;
    int32_t equal = 0;
    const auto places = static_cast<int32_t>(threshold.places);
    uint32_t parity = 0;
    for (uint32_t first = begin_; first < end_; first += kThreads) {
      const uint32_t slot = first + simt::Thread();
      const uint32_t order = slot < end_ ? OrderOf(slot) : ~0u;
      const bool is_above = slot < end_ && order < threshold.order;
      const bool is_equal = slot < end_ && order == threshold.order;
      const uint32_t all_above = simt::Ballot(is_above);
      const uint32_t all_equal = simt::Ballot(is_equal);
      if (simt::Lane() == 0) {
        simt::StoreShared(&memory->above[parity][simt::Warp()],
                          simt::CountBits(all_above));
        simt::StoreShared(&memory->equal[parity][simt::Warp()],
                          simt::CountBits(all_equal));
      }
      simt::SyncCta();
      // The numbers of candidates before this one.
      int32_t above_before = above + simt::LanesBefore(all_above);
      int32_t equal_before = equal + simt::LanesBefore(all_equal);
      for (uint32_t warp = 0; warp < kWarps; ++warp) {
        const int32_t a = simt::LoadShared(&memory->above[parity][warp]);
        const int32_t e = simt::LoadShared(&memory->equal[parity][warp]);
        above += a;
        equal += e;
        if (warp < simt::Warp()) above_before += a;
        if (warp < simt::Warp()) equal_before += e;
      }
      if (is_above || (is_equal && equal_before < places)) {
        const int32_t ties = equal_before < places ? equal_before : places;
        simt::StoreGlobal(kept_ + begin_ + above_before + ties,
                          static_cast<int32_t>(slot));
      }
      parity ^= 1;
    }
  }

  KVASIR_DEVICE void Decay() const {
    if (eviction_.decay == 1.0f) return;
    // All threads have read the masses before the last barrier of WriteBest.
    const auto num_slots = static_cast<uint32_t>(eviction_.num_slots);
    for (uint32_t s = simt::Thread(); s < num_slots; s += kThreads) {
      const Place place = PlaceOf(s);
      float* const score = ScoresOf(metadata_, place.page, unit_) + place.slot;
      const float mass = simt::LoadGlobal(score);
      // A GPU would change the bits of a NaN.
      if (mass == mass) simt::StoreGlobal(score, mass * eviction_.decay);
    }
  }

  const SlotMetadataArgs& metadata_;
  const Eviction& eviction_;
  const int64_t unit_;
  const int32_t* const table_;
  const uint32_t begin_, end_;  // the candidates
  int32_t* const kept_;
  Range ranges_[kRanges];
};

KVASIR_KERNEL(kThreads)
EvictSelectKernel(EvictSelectArgs args) {
  const auto units = static_cast<uint32_t>(args.metadata.num_units);
  const Eviction eviction = args.evictions[simt::CtaX() / units];
  SelectUnit(args, eviction, simt::CtaX() % units).Run();
}

}  // namespace

void EvictSelectCuda(const EvictSelectArgs& args, uint64_t* /*scratch*/,
                     Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "evict_select";
  launch.grid_x = simt::Ctas(args.num_evictions * args.metadata.num_units);
  launch.threads = kThreads;
  launch.shared_bytes = sizeof(SelectMemory);
  simt::Launch(launcher, launch, EvictSelectKernel, args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
