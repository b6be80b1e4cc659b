#include "worker/program/attention_flops.h"

#include <algorithm>

namespace kvasir::worker {
namespace {

using plan::ResolvedPart;
using plan::ResolvedUse;
using plan::RopeSide;
using plan::Space;

// Rotating a pair of dims is a complex product, which takes 6 operations: 3 for
// each dim.
constexpr int64_t kRotationFlopsPerDim = 3;

// One latent and the heads that read it.
struct Latent {
  int64_t channels = 0;
  int64_t kv_heads = 0;
  int64_t query_heads = 0;
};

class KeyCounter {
 public:
  KeyCounter(const ResolvedPart& part, int64_t head_dim, int64_t rotary_dims)
      : part_(part),
        head_dim_(head_dim),
        rotary_dims_(rotary_dims),
        pre_rope_(part.stored == RopeSide::kBefore) {}

  SideFlops Count(const Latent& latent) {
    flops_ = {};
    int64_t terms = 1;
    for (const ResolvedUse& use : part_.uses) {
      if (use.lift == plan::Lift::kAnchored) terms = std::max(terms, use.terms);
    }
    switch (part_.space) {
      case Space::kFull:
        Full(latent);
        break;
      case Space::kLowRank:
        for (const ResolvedUse& use : part_.uses) LowRankUse(latent, use);
        break;
      case Space::kRopePairs:
        Channels(latent, 1);
        break;
      case Space::kRopeLowRank:
        Channels(latent, terms);
        break;
    }
    return flops_;
  }

 private:
  void Absorb(const Latent& latent, int64_t terms) {
    flops_.attention += 2 * latent.query_heads * latent.channels * terms;
  }
  void Rotate(const Latent& latent, int64_t dims) {
    flops_.reconstruction += kRotationFlopsPerDim * latent.kv_heads * dims;
  }
  void Rebuild(const Latent& latent, int64_t dims, int64_t rotated_dims) {
    flops_.reconstruction += 2 * latent.channels * latent.kv_heads * dims;
    if (pre_rope_) Rotate(latent, rotated_dims);
    flops_.attention += 2 * latent.query_heads * dims;
  }
  // Counts the work on channels that represent rotation pairs. If they are
  // stored unrotated, each KV head rotates them, without a lift.
  void Channels(const Latent& latent, int64_t terms) {
    Absorb(latent, terms);
    if (pre_rope_) Rotate(latent, latent.channels);
  }

  void Full(const Latent& latent) {
    if (!pre_rope_) {
      Absorb(latent, 1);  // the basis is applied to the query
    } else if (part_.has_basis()) {
      Rebuild(latent, head_dim_, rotary_dims_);
    } else {
      Absorb(latent, 1);
      Rotate(latent, rotary_dims_);
    }
  }

  void LowRankUse(const Latent& latent, const ResolvedUse& use) {
    // If keys do not rotate and have an online Hadamard transform, the query is
    // lifted instead of the keys.
    const bool absorbs =
        !pre_rope_ && part_.transform == plan::Transform::kHadamardOnline;
    if (use.lift == plan::Lift::kReconstruct && !absorbs) {
      Rebuild(latent, use.dims, use.rotated_dims);
    } else {
      Absorb(latent, use.terms);
    }
  }

  const ResolvedPart& part_;
  const int64_t head_dim_;
  const int64_t rotary_dims_;  // how many dims of a head rotate
  const bool pre_rope_;
  SideFlops flops_;
};

int64_t CountContained(const std::vector<int64_t>& heads,
                       plan::HeadRange of_rank) {
  return std::count_if(heads.begin(), heads.end(), [of_rank](int64_t head) {
    return of_rank.Contains(head);
  });
}

}  // namespace

SideFlops FlopsPerSlot(const plan::ResolvedPlan& plan, int64_t layer,
                       plan::Side side) {
  const plan::AttentionShape& shape = plan.shape;
  // Ranks that share a KV head divide its query heads among them.
  const int64_t queries = plan.query_heads.count / plan.kv_heads.count;
  SideFlops sum;
  for (const ResolvedPart& part : plan.attention_of(layer).side(side).parts) {
    KeyCounter keys(part, shape.head_dim, 2 * shape.num_pairs(layer));
    for (const plan::ResolvedLatent& from : part.latents) {
      if (!part.Holds(from, plan.kv_heads)) continue;
      Latent latent;
      latent.channels = from.stored_channels();
      latent.kv_heads = CountContained(from.heads, plan.kv_heads);
      latent.query_heads = latent.kv_heads * queries;
      if (side == plan::Side::kValue) {
        // Any lift of values is applied after the sum over tokens, so it costs
        // nothing per cached token.
        sum.attention += 2 * latent.query_heads * latent.channels;
        continue;
      }
      const SideFlops flops = keys.Count(latent);
      sum.attention += flops.attention;
      sum.reconstruction += flops.reconstruction;
    }
  }
  return sum;
}

int64_t DenseFlopsPerSlot(const plan::AttentionShape& shape) {
  return 2 * shape.num_heads * shape.head_dim;
}

std::vector<double> LiftFlops(const PartProgram& part, int64_t dims) {
  std::vector<double> flops;
  for (const int32_t group : part.group_of_head) {
    const int64_t stored = part.latents[static_cast<size_t>(group)].stored;
    flops.push_back(static_cast<double>(2 * stored * dims));
  }
  return flops;
}

std::vector<double> RebuildFlops(const KeyProgram& part) {
  std::vector<double> flops(part.group_of_head.size());
  if (!part.rebuild.has_value()) return flops;
  if (part.rebuild->lifted) flops = LiftFlops(part, part.rebuild->dims);
  const int64_t rotated_dims = 2 * part.rebuild->rotation.num_pairs;
  for (double& head : flops) {
    head += static_cast<double>(kRotationFlopsPerDim * rotated_dims);
  }
  return flops;
}

}  // namespace kvasir::worker
