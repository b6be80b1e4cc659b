// evict_select: chooses which slots of a sequence each unit of a layer keeps. A
// unit is a set of KV heads that evict the same tokens. C++17.
#pragma once

#include <cstdint>

#include "kernels/latents/slot_metadata.h"

namespace kvasir::kernels {

// The eviction of slots of one sequence from all layers of a page group. Host
// and device have equal copies of this struct. The caller (cache/eviction)
// determines how many slots are kept; the scores determine which ones.
struct Eviction {
  int64_t num_slots = 0;  // n, slots before the eviction
  int64_t kept = 0;     // k, slots after it: at least sinks + recent, at most n
  int64_t sinks = 0;    // the first slots, always kept
  int64_t recent = 0;   // the last slots, always kept; at least one
  float lambda = 0.5f;  // weight of the attention mass, 0 to 1
  float decay = 1.0f;   // factor on the mass per eviction, above 0
  // Whether f (EvictSelectParams) is multiplied by 1/2.
  bool halves_friendliness = false;
  // Where the kept slots [U, k] of this eviction begin in the launch's list
  // kept_slots.
  int64_t first_kept = 0;
  DevicePtr<const int32_t> block_table;  // covers n slots
  // Covers k slots, for evict_compact. At each index it has the same page as
  // block_table, or a page that block_table does not contain.
  DevicePtr<const int32_t> to_table;
};

// For every eviction and unit: the candidates are the slots from `sinks` to n -
// recent. The k - sinks - recent candidates with the greatest
//   lambda * norm(S) + (1 - lambda) * f,  f = (1 - norm(Ek)) + (1 - norm(Ev))
// are kept. S is a slot's attention mass (score); Ek and Ev are the
// quantization errors of its key and value. f is halved if halves_friendliness.
// Among equal candidates the lower slots are kept. norm(x) = (x - least) /
// (greatest - least) over the unit's candidates, or 0 if all x are equal. A
// side (keys or values) without a plane of errors has norm 0, so if neither
// side has errors, only S decides (unless lambda is 0). An S that is not finite
// counts as 0. Everything is computed in float32, in the order that is written
// here.
//
// Each unit normalises over its own candidates; the published implementation
// normalises over all heads of a layer. Therefore the number of ranks does not
// change which slots are kept, as long as no rank holds only part of a unit's
// heads. Also, one unit's very heavy slot does not flatten the scores of other
// units.
//
// kept_slots receives the sinks, the chosen slots and the recent ones, in
// ascending order. Then the mass of all n slots is multiplied by `decay`, if
// that is not 1.
template <template <typename> class Ptr>
struct EvictSelectParamsIn {
  SlotMetadataIn<Ptr> metadata;
  Ptr<const Eviction> evictions = nullptr;
  int64_t num_evictions = 0;
  int64_t most_slots = 0;             // largest num_slots of the evictions
  Ptr<int32_t> kept_slots = nullptr;  // [U, k] for each eviction

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
