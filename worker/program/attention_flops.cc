#include "worker/program/attention_flops.h"

#include <algorithm>

#include "model/checkpoint/plan_tensors.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::Part;

// A complex product of two components is 6 operations, 3 a dim.
constexpr int64_t kRotationFlopsPerDim = 3;

// One latent and the heads that read it.
struct Latent {
  int64_t channels = 0;
  int64_t kv_heads = 0;
  int64_t query_heads = 0;
};

// Dims of a head, and how many of them are rotated after the lift.
struct HeadDims {
  int64_t all = 0;
  int64_t rotated = 0;
};

class KeyCounter {
 public:
  KeyCounter(const Part& part, int64_t head_dim, int64_t rotary_dims)
      : part_(part),
        head_dim_(head_dim),
        rotary_dims_(rotary_dims),
        pre_rope_(part.stored() == kvasir::v1::PRE_ROPE) {}

  SideFlops Count(const Latent& latent) {
    flops_ = {};
    switch (part_.space_case()) {
      case Part::kFull:
        Full(latent);
        break;
      case Part::kLowRank:
        for (const Part::Use& use : part_.uses()) LowRankUse(latent, use);
        break;
      case Part::kRopePairs:
        Channels(latent, 1);
        break;
      case Part::kRopeLowRank: {
        int64_t terms = 1;
        for (const Part::Use& use : part_.uses()) {
          terms = std::max(terms, Terms(use));
        }
        Channels(latent, terms);
        break;
      }
      case Part::SPACE_NOT_SET:
        break;
    }
    return flops_;
  }

 private:
  static int64_t Terms(const Part::Use& use) {
    return use.has_anchored() ? use.anchored().order() + 1 : 1;
  }

  void Absorb(const Latent& latent, int64_t terms) {
    flops_.attention += 2 * latent.query_heads * latent.channels * terms;
  }
  void Rotate(const Latent& latent, int64_t dims) {
    flops_.reconstruction += kRotationFlopsPerDim * latent.kv_heads * dims;
  }
  void Rebuild(const Latent& latent, HeadDims dims) {
    flops_.reconstruction += 2 * latent.channels * latent.kv_heads * dims.all;
    if (pre_rope_) Rotate(latent, dims.rotated);
    flops_.attention += 2 * latent.query_heads * dims.all;
  }
  // Channels that stand for pairs: they turn as they are, for each head anew.
  void Channels(const Latent& latent, int64_t terms) {
    Absorb(latent, terms);
    if (pre_rope_) Rotate(latent, latent.channels);
  }

  void Full(const Latent& latent) {
    const bool basis =
        part_.codec().has_basis_static() || part_.codec().has_basis_sequence();
    if (!pre_rope_) {
      Absorb(latent, 1);  // a basis moves to the query
    } else if (basis) {
      Rebuild(latent, {head_dim_, rotary_dims_});
    } else {
      Absorb(latent, 1);
      Rotate(latent, rotary_dims_);
    }
  }

  HeadDims DimsOf(const Part::Use& use) const {
    const int64_t paired = int64_t{2} * use.pairs_size();
    if (paired > 0) return {paired, paired};
    if (part_.uses_size() == 1 && part_.stored() != kvasir::v1::NO_ROPE) {
      return {head_dim_, rotary_dims_};
    }
    return {head_dim_ - rotary_dims_, 0};
  }

  void LowRankUse(const Latent& latent, const Part::Use& use) {
    // Keys that do not rotate and have signs to take back absorb their lift.
    const bool absorbs = !pre_rope_ && part_.codec().has_hadamard_online();
    if (use.has_reconstruct() && !absorbs) {
      Rebuild(latent, DimsOf(use));
    } else {
      Absorb(latent, Terms(use));
    }
  }

  const Part& part_;
  const int64_t head_dim_;
  const int64_t rotary_dims_;  // of a head of this layer
  const bool pre_rope_;
  SideFlops flops_;
};

int64_t CountContained(const std::vector<int64_t>& heads,
                       base::HeadRange of_rank) {
  return std::count_if(heads.begin(), heads.end(), [of_rank](int64_t head) {
    return of_rank.Contains(head);
  });
}

}  // namespace

SideFlops FlopsPerSlot(const model::DecoderSpec& spec, int64_t layer,
                       cache::Side side, const kvasir::v1::SidePlan& plan,
                       const cache::PageLayout& layout) {
  const bool rotates = spec.layers[static_cast<size_t>(layer)].rope;
  // Ranks that share a KV head have its query heads dealt among them.
  const int64_t queries =
      spec.num_heads / layout.shard().size / layout.kv_heads().count;
  SideFlops sum;
  for (const cache::PartLayout& laid_out :
       layout.layer(layer).side(side).parts) {
    const Part& part = plan.parts(laid_out.part_index);
    KeyCounter keys(part, spec.head_dim, rotates ? spec.rope.rotary_dim : 0);
    for (const cache::GroupLayout& group : laid_out.groups) {
      Latent latent;
      latent.channels = model::StoredChannels(part.codec(), group.width);
      latent.kv_heads = CountContained(group.heads, layout.kv_heads());
      latent.query_heads = latent.kv_heads * queries;
      if (side == cache::Side::kValue) {
        // Whatever lifts a value stands behind the sum.
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

int64_t DenseFlopsPerSlot(const model::DecoderSpec& spec) {
  return 2 * spec.num_heads * spec.head_dim;
}

std::vector<double> LiftFlops(const PartProgram& part, int64_t dims) {
  std::vector<double> flops;
  for (const int32_t group : part.group_of_head) {
    const int64_t width = part.latents[static_cast<size_t>(group)].width;
    flops.push_back(static_cast<double>(2 * width * dims));
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
