#include "cli/attention_flops.h"

#include "model/plan_tensors.h"

namespace kvasir::cli {
namespace {

using kvasir::v1::Part;

// A complex product of two components is 6 operations, 3 a dim.
constexpr int64_t kRotationFlopsPerDim = 3;
// A complex multiply-add is 8 operations, 4 a real channel.
constexpr int64_t kComplexFlopsPerChannel = 4;

// One latent and the heads that read it.
struct Latent {
  int64_t channels = 0;
  int64_t kv_heads = 0;
  int64_t query_heads = 0;
  int64_t pairs = 0;  // rope_low_rank
};

// Dims of a head, and how many of them are rotated after the lift.
struct HeadDims {
  int64_t all = 0;
  int64_t rotated = 0;
};

class PartCounter {
 public:
  PartCounter(const Part& part, int64_t head_dim, int64_t rotary_dims)
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
        Absorb(latent, 1);
        if (pre_rope_) Rotate(latent.channels);
        break;
      case Part::kRopeLowRank:
        RopeLowRank(latent);
        break;
      case Part::SPACE_NOT_SET:
        break;
    }
    return flops_;
  }

 private:
  void Absorb(const Latent& latent, int64_t terms) {
    flops_.attention += 2 * latent.query_heads * latent.channels * terms;
  }
  void Rotate(int64_t dims) {
    flops_.reconstruction += kRotationFlopsPerDim * dims;
  }
  void Rebuild(const Latent& latent, HeadDims dims) {
    flops_.reconstruction += 2 * latent.channels * latent.kv_heads * dims.all;
    if (pre_rope_) Rotate(latent.kv_heads * dims.rotated);
    flops_.attention += 2 * latent.query_heads * dims.all;
  }

  void Full(const Latent& latent) {
    if (part_.codec().has_basis_static() ||
        part_.codec().has_basis_sequence()) {
      Rebuild(latent, {head_dim_, rotary_dims_});
      return;
    }
    flops_.attention += 2 * latent.query_heads * head_dim_;
    if (pre_rope_) Rotate(latent.kv_heads * rotary_dims_);
  }

  HeadDims DimsOf(const Part::Use& use) const {
    if (use.pairs_size() > 0)
      return {2 * use.pairs_size(), 2 * use.pairs_size()};
    if (part_.uses_size() == 1 && part_.stored() != kvasir::v1::NO_ROPE) {
      return {head_dim_, rotary_dims_};
    }
    return {head_dim_ - rotary_dims_, 0};
  }

  void LowRankUse(const Latent& latent, const Part::Use& use) {
    if (use.has_reconstruct()) {
      Rebuild(latent, DimsOf(use));
    } else {
      Absorb(latent, use.has_anchored() ? use.anchored().order() + 1 : 1);
    }
  }

  void RopeLowRank(const Latent& latent) {
    if (pre_rope_) Rotate(latent.channels);
    int64_t terms = 1;
    for (const Part::Use& use : part_.uses()) {
      if (use.has_reconstruct()) {
        flops_.reconstruction +=
            kComplexFlopsPerChannel * latent.channels * latent.kv_heads;
        flops_.attention += 2 * latent.query_heads * 2 * latent.pairs;
        return;
      }
      if (use.has_anchored()) terms = use.anchored().order() + 1;
    }
    Absorb(latent, terms);
  }

  const Part& part_;
  const int64_t head_dim_;
  const int64_t rotary_dims_;  // of a head of this layer's side
  const bool pre_rope_;
  SideFlops flops_;
};

}  // namespace

SideFlops FlopsPerSlot(const model::DecoderSpec& spec, int64_t layer,
                       cache::Side side, const kvasir::v1::SidePlan& plan,
                       const cache::SideLayout& layout) {
  const bool rotates =
      side == cache::Side::kKey && spec.layers[static_cast<size_t>(layer)].rope;
  const int64_t queries = spec.num_heads / spec.num_kv_heads;
  SideFlops sum;
  for (const cache::PartLayout& laid_out : layout.parts) {
    const Part& part = plan.parts(laid_out.part_index);
    PartCounter counter(part, spec.head_dim,
                        rotates ? spec.rope.rotary_dim : 0);
    for (size_t g = 0; g < laid_out.groups.size(); ++g) {
      const cache::GroupLayout& group = laid_out.groups[g];
      Latent latent;
      latent.channels = model::StoredChannels(part.codec(), group.width);
      latent.kv_heads = static_cast<int64_t>(group.heads.size());
      latent.query_heads = latent.kv_heads * queries;
      if (part.has_rope_low_rank()) {
        latent.pairs =
            part.rope_low_rank().groups(static_cast<int>(g)).pairs_size();
      }
      const SideFlops flops = counter.Count(latent);
      sum.attention += flops.attention;
      sum.reconstruction += flops.reconstruction;
    }
  }
  return sum;
}

int64_t DenseFlopsPerSlot(const model::DecoderSpec& spec) {
  return 2 * spec.num_heads * spec.head_dim;
}

}  // namespace kvasir::cli
