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
  double ns = 0;
};

// Predicted loss of an option's codes behind an exact window over that without
// one: next to the query most of it arises, of rotated levels more than of
// codes that are shaped by what all queries see.
double WindowFactor(const SpaceOption& option, int64_t window);

// What a part's codes lose, without kappa and window.
double OwnLoss(const TakenPart& taken);
// The same of all parts behind an exact window.
double LossOf(const SpentBytes& spent, int64_t window);

// The choices of all layers behind an exact window, when a nanosecond of a slot
// is worth so many nats without one. The candidates outlive it.
class Spending {
 public:
  Spending(const PlanCandidates& candidates, int64_t window, double nats_per_ns,
           int64_t max_grains);

  int64_t window() const { return window_; }
  // Its losses have the window's factors, not kappa.
  const ByteChoice& all() const { return all_[0]; }
  // The best of so many grains at most; CHECK that there is one.
  SpentBytes Spend(int64_t grains) const;

 private:
  ByteChoice OfLayer(const std::vector<int>& candidates,
                     int64_t max_grains) const;

  const PlanCandidates& candidates_;
  int64_t window_ = 0;
  std::vector<PartChannels> parts_;
  std::vector<ByteChoice> all_;  // one
};

// The part of a plan that it comes to.
kvasir::v1::Part PartOf(const TakenPart& taken, const model::DecoderSpec& spec,
                        bool rotates);

}  // namespace kvasir::compress
