// What the planner chooses from and how it spends bytes: spaces of layers with
// what their codes lose, and the choices of all layers together.
#pragma once

#include <cstdint>
#include <vector>

#include "compress/planner/allocation.h"
#include "compress/planner/layer_spaces.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// A space of a layer with what its codes cost.
struct PlanCandidate {
  int64_t layer = 0;
  SpaceOption option;
  PartChannels channels;
  // Without their matrices; none of whole heads.
  std::vector<LatentTransform> latents;
  double ns_per_channel = 0;  // of each latent, all latents together
};

// All of them; keys and values of a layer apart, or a joint one.
struct PlanCandidates {
  std::vector<PlanCandidate> all;
  std::vector<std::vector<int>> of_layer;  // in `all`
};

// A candidate with the widths of its groups of channels.
struct TakenPart {
  const PlanCandidate* candidate = nullptr;
  std::vector<int> widths;
};

// One way to spend so many bytes.
struct SpentBytes {
  std::vector<TakenPart> parts;  // by layer, keys before values
  int64_t grains = 0;
  double loss = 0;  // without kappa and window
  double ns = 0;
};

// Where a width is in kCodeWidths.
size_t WidthIndex(int width);

// The choices of all layers when a nanosecond of a slot is worth so many nats.
// The candidates outlive it.
class Spending {
 public:
  Spending(const PlanCandidates& candidates, double nats_per_ns,
           int64_t max_grains);

  const ByteChoice& all() const { return all_[0]; }
  // The best of so many grains at most; CHECK that there is one.
  SpentBytes Spend(int64_t grains) const;

 private:
  ByteChoice OfLayer(const std::vector<int>& candidates,
                     int64_t max_grains) const;

  const PlanCandidates& candidates_;
  std::vector<PartChannels> parts_;
  std::vector<ByteChoice> all_;  // one
};

// The part of a plan that it comes to.
kvasir::v1::Part PartOf(const TakenPart& taken, const model::DecoderSpec& spec,
                        bool rotates);

}  // namespace kvasir::compress
