// evict_select: which of a sequence's slots each unit of a layer keeps. C++17.
#pragma once

#include <cstdint>

#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// One eviction of a sequence from all layers of a page group; the same on host
// and device. How many are kept is the caller's (cache/eviction); which, the
// scores'.
struct Eviction {
  int64_t num_slots = 0;  // n, before
  int64_t kept = 0;       // k, behind: at least sinks + recent, at most n
  int64_t sinks = 0;      // first slots that are kept
  int64_t recent = 0;     // last slots that are kept, at least one
  float lambda = 0.5f;    // share of the attention mass, 0 to 1
  float decay = 1.0f;     // of the mass, once per eviction, above 0
  // The friendliness of key and value counts half.
  bool halves_friendliness = false;
  // Where the units' kept slots begin in a launch's list: [U, k].
  int64_t first_kept = 0;
  DevicePtr<const int32_t> block_table;  // of n slots
  // Of k slots, for evict_compact: at each index the page that block_table has
  // there, or one that block_table does not have.
  DevicePtr<const int32_t> to_table;
};

// For every eviction and unit: the candidates are the slots from `sinks` to
// n - recent. Of these the k - sinks - recent with the greatest
//   lambda * norm(S) + (1 - lambda) * f,  f = (1 - norm(Ek)) + (1 - norm(Ev))
// (half of f, if asked), the lower slot first among equals. norm(x) =
// (x - least) / (greatest - least) over the unit's candidates, 0 if they are
// all the same; a side without errors is such a case, so that without codes
// lambda does not matter, and at lambda 1 neither do errors. S that is not
// finite counts as 0. float32, in the order that is written.
//
// A unit is judged by itself, where public code takes least and greatest over
// all heads of a layer: so the number of ranks does not change what is kept,
// where none holds part of a unit's heads, and a unit whose mass is spread
// evenly does not lose its own order beside one with a heavy sink.
//
// kept_slots receives sinks, the chosen ones and the recent ones, ascending.
// Then the mass of all n slots is multiplied by `decay`, if that is not 1.
template <template <typename> class Ptr>
struct EvictSelectParamsIn {
  SlotMetadataIn<Ptr> metadata;
  Ptr<const Eviction> evictions = nullptr;
  int64_t num_evictions = 0;
  int64_t most_slots = 0;             // of an eviction
  Ptr<int32_t> kept_slots = nullptr;  // [U, k] of each

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(metadata.arena, evictions, kept_slots);
  }
};
using EvictSelectParams = EvictSelectParamsIn<DevicePtr>;
using EvictSelectArgs = EvictSelectParamsIn<LaunchPtr>;

class CpuStream;
// `scratch`: [threads, most_slots].
void EvictSelectReference(const EvictSelectArgs& params, uint64_t* scratch,
                          CpuStream& stream);
void EvictSelectCpu(const EvictSelectArgs& params, uint64_t* scratch,
                    CpuStream& stream);

}  // namespace kvasir::kernels
