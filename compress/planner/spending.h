// How the planner spends bytes: the spaces that each layer can use, with the
// loss of their codes, and the best choice over all layers.
#pragma once

#include <cstdint>
#include <vector>

#include "compress/planner/allocation.h"
#include "compress/planner/layer_spaces.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// A latent space that a layer can use, and the loss for each way to code it.
struct PlanCandidate {
  int64_t layer = 0;
  SpaceOption option;
  PartChannels channels;
  // The transforms without their matrices; empty for whole heads.
  std::vector<LatentTransform> latents;
  // attention's time for one channel, summed over the latents
  double ns_per_channel = 0;
};

// All candidates of all layers. A layer stores keys in one part and values in
// another part, or both in a joint part.
struct PlanCandidates {
  std::vector<PlanCandidate> all;
  // by_layer[l] has the indices in `all` of layer l's candidates
  std::vector<std::vector<int>> by_layer;
};

// A candidate that was chosen, with the bit widths of its channel groups.
struct TakenPart {
  const PlanCandidate* candidate = nullptr;
  std::vector<int> widths;
};

// One way to spend a number of bytes.
struct SpentBytes {
  std::vector<TakenPart> parts;  // ordered by layer; keys come before values
  int64_t grains = 0;
  double ns = 0;
};

// Returns the factor by which an exact window reduces the predicted loss of an
// option's codes.
double WindowFactor(const SpaceOption& option, int64_t window);

// Returns the loss of a part's codes, before the factors kappa and
// WindowFactor.
double OwnLoss(const TakenPart& taken);
// Returns the loss of all parts with an exact window.
double LossOf(const SpentBytes& spent, int64_t window);

// Finds the best way to spend bytes on all layers with a given exact window.
// Each nanosecond of attention per cached token counts as a loss of
// `nats_per_ns`. The candidates must outlive the object.
class Spending {
 public:
  Spending(const PlanCandidates& candidates, int64_t window, double nats_per_ns,
           int64_t max_grains);

  int64_t window() const { return window_; }
  // The ways to spend bytes on all layers together. Their losses include the
  // WindowFactor, but not kappa.
  const ByteChoice& all() const { return all_[0]; }
  // Returns the best way to spend at most `grains`; CHECK-fails if there is
  // none.
  SpentBytes Spend(int64_t grains) const;

 private:
  ByteChoice OfLayer(const std::vector<int>& candidates,
                     int64_t max_grains) const;

  const PlanCandidates& candidates_;
  int64_t window_ = 0;
  std::vector<PartChannels> parts_;
  std::vector<ByteChoice> all_;
};

// Makes the plan's Part for a candidate that was taken.
kvasir::v1::Part PartOf(const TakenPart& taken, const model::DecoderSpec& spec,
                        bool rotates);

}  // namespace kvasir::compress
