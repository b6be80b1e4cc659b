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
  int64_t kept = 0;     // k, slots after the eviction; sinks + recent <= k <= n
  int64_t sinks = 0;    // the first slots, always kept
  int64_t recent = 0;   // the last slots, always kept; at least one
  float lambda = 0.5f;  // weight of the attention mass, 0 to 1
  float decay = 1.0f;   // factor of the mass; above 0 and at most 1
  // True if f is multiplied by 1/2 in the formula of EvictSelectParams.
  bool halves_friendliness = false;
  // The index at which this eviction's slots [units, k] begin in
  // EvictSelectParams::kept_slots.
  int64_t first_kept = 0;
  DevicePtr<const int32_t> block_table;  // covers n slots
  // The pages to which evict_compact moves the k kept slots. At each index this
  // table has the same page as block_table, or a page that block_table does not
  // contain.
  DevicePtr<const int32_t> to_table;
};

// Chooses the k slots that each unit keeps in each eviction: the sinks, the
// recent slots, and the best candidates. The candidates are the slots between
// the sinks and the recent slots. The best ones have the greatest
//   lambda * norm(S) + (1 - lambda) * f,  f = (1 - norm(Ek)) + (1 - norm(Ev))
// computed in float32 in this order. S is the attention mass (score) of a slot;
// Ek and Ev are the quantization errors of its key and value. f (friendliness)
// is large if these errors are small; it is halved if halves_friendliness is
// set. Among equal candidates the lower slots are kept.
//
// norm(x) = (x - least) / (greatest - least) over the unit's candidates, or 0
// if all x are equal. If the errors of keys or values are not stored, their
// norm is 0. An S that is not finite counts as 0.
//
// Each unit has its own least and greatest x. So the number of ranks does not
// change which slots are kept, as long as each unit is on one rank. Also, a
// slot with a very large mass in one unit does not flatten the scores of
// other units.
//
// kept_slots receives the kept slots in ascending order. Then the mass of all n
// slots is multiplied by `decay`.
template <template <typename> class Ptr>
struct EvictSelectParamsIn {
  SlotMetadataIn<Ptr> metadata;
  Ptr<const Eviction> evictions = nullptr;
  int64_t num_evictions = 0;
  int64_t most_slots = 0;             // largest num_slots of the evictions
  Ptr<int32_t> kept_slots = nullptr;  // [units, k] for each eviction

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
