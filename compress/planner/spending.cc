#include "compress/planner/spending.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/normal_levels.h"

namespace kvasir::compress {

using kvasir::v1::Codec;
using kvasir::v1::Part;

namespace {

size_t WidthIndex(int width) {
  return static_cast<size_t>(
      std::find(kCodeWidths.begin(), kCodeWidths.end(), width) -
      kCodeWidths.begin());
}

// The two formulas of WindowFactor, fitted to measurements on SmolLM2-135M with
// 8 to 256 exact tokens. StaticFactor is for codes in static ranges,
// RotatedFactor for rotated levels.
double StaticFactor(int64_t window) {
  return std::pow(1 + static_cast<double>(window) / 0.54, -0.37);
}
double RotatedFactor(int64_t window) {
  return std::pow(1 + static_cast<double>(window) / 0.46, -0.6);
}

}  // namespace

double WindowFactor(const SpaceOption& option, int64_t window) {
  return option.rotated() ? RotatedFactor(window) : StaticFactor(window);
}

double OwnLoss(const TakenPart& taken) {
  double loss = 0;
  for (size_t g = 0; g < taken.widths.size(); ++g) {
    loss +=
        taken.candidate->channels.groups[g].loss[WidthIndex(taken.widths[g])];
  }
  return loss;
}

double LossOf(const SpentBytes& spent, int64_t window) {
  double loss = 0;
  for (const TakenPart& taken : spent.parts) {
    loss += OwnLoss(taken) * WindowFactor(taken.candidate->option, window);
  }
  return loss;
}

Spending::Spending(const PlanCandidates& candidates, int64_t window,
                   double nats_per_ns, int64_t max_grains)
    : candidates_(candidates), window_(window) {
  for (const PlanCandidate& candidate : candidates.all) {
    PartChannels& part = parts_.emplace_back(candidate.channels);
    for (ChannelGroup& group : part.groups) {
      for (double& loss : group.loss) {
        loss *= WindowFactor(candidate.option, window);
      }
    }
    part.loss_per_channel =
        nats_per_ns * StaticFactor(window) * candidate.ns_per_channel;
  }
  std::vector<ByteChoice> layers;
  for (const std::vector<int>& indices : candidates.by_layer) {
    layers.push_back(OfLayer(indices, max_grains));
  }
  all_.push_back(ByteChoice::Together(layers, max_grains));
}

SpentBytes Spending::Spend(int64_t grains) const {
  SpentBytes spent;
  for (const ByteChoice::Take& take : all().Choose(grains)) {
    const auto index = static_cast<size_t>(take.leaf);
    const PlanCandidate& candidate = candidates_.all[index];
    TakenPart taken{&candidate, WidthsFor(parts_[index], take.grains)};
    for (size_t g = 0; g < taken.widths.size(); ++g) {
      const ChannelGroup& group = candidate.channels.groups[g];
      if (taken.widths[g] == 0) continue;
      spent.ns +=
          candidate.ns_per_channel * static_cast<double>(group.channels);
    }
    // The widths may need fewer bytes than were assigned to this part, because
    // the loss falls in steps.
    spent.grains += GrainsOf(parts_[index], taken.widths);
    spent.parts.push_back(std::move(taken));
  }
  return spent;
}

ByteChoice Spending::OfLayer(const std::vector<int>& candidates,
                             int64_t max_grains) const {
  std::vector<ByteChoice> joint;
  std::vector<ByteChoice> key;
  std::vector<ByteChoice> value;
  for (const int index : candidates) {
    const auto at = static_cast<size_t>(index);
    const SpaceKind kind = candidates_.all[at].option.kind;
    const bool values =
        kind == SpaceKind::kValue || kind == SpaceKind::kRotatedValue;
    auto& list = kind == SpaceKind::kJoint ? joint : values ? value : key;
    list.push_back(ByteChoice::Leaf(index, LossByBytes(parts_[at])));
  }
  joint.push_back(ByteChoice::Together({ByteChoice::Either(std::move(key)),
                                        ByteChoice::Either(std::move(value))},
                                       max_grains));
  return ByteChoice::Either(std::move(joint));
}

namespace {

Part RotatedPart(const TakenPart& taken, bool rotates) {
  Part part;
  part.mutable_full();
  part.set_stored(taken.candidate->option.keys() && rotates
                      ? kvasir::v1::POST_ROPE
                      : kvasir::v1::NO_ROPE);
  Codec* codec = part.mutable_codec();
  const int bits = taken.widths[0];
  codec->mutable_bits()->add_schedule(static_cast<uint32_t>(bits));
  for (const double level : plan::LloydMaxLevels(bits)) {
    codec->mutable_per_token_norm()->add_levels(level);
  }
  codec->set_param_dtype(kvasir::v1::F16);
  codec->mutable_hadamard_online();
  return part;
}

}  // namespace

Part PartOf(const TakenPart& taken, const model::DecoderSpec& spec,
            bool rotates) {
  const SpaceOption& option = taken.candidate->option;
  if (option.rotated()) return RotatedPart(taken, rotates);
  const std::vector<LatentTransform>& latents = taken.candidate->latents;
  Part part;
  Codec* codec = part.mutable_codec();
  SetRuns(latents[0], taken.widths, *codec);
  codec->mutable_channel_static();
  codec->mutable_none();
  for (size_t g = 0; g < option.groups.size(); ++g) {
    const auto add_heads = [&](auto* group) {
      for (const int64_t head : option.groups[g]) {
        group->add_heads(static_cast<uint32_t>(head));
      }
      return group;
    };
    if (option.kind == SpaceKind::kRopeKey) {
      auto* group = add_heads(part.mutable_rope_low_rank()->add_groups());
      for (const int64_t pair : latents[g].pairs) {
        group->add_pairs(static_cast<uint32_t>(pair));
        group->add_rank_per_pair(1);
      }
      continue;
    }
    add_heads(part.mutable_low_rank()->add_groups())
        ->set_rank(static_cast<uint32_t>(latents[g].rank));
  }
  switch (option.kind) {
    case SpaceKind::kJoint: {
      part.set_stored(rotates ? kvasir::v1::PRE_ROPE : kvasir::v1::NO_ROPE);
      Part::Use* key = part.add_uses();
      key->mutable_reconstruct();
      key->set_serves(kvasir::v1::SERVES_KEY);
      Part::Use* value = part.add_uses();
      value->mutable_at_runtime();
      value->set_serves(kvasir::v1::SERVES_VALUE);
      return part;
    }
    case SpaceKind::kRopeKey:
      part.set_stored(kvasir::v1::POST_ROPE);
      part.set_latent_bias(spec.qkv_bias);
      part.add_uses()->mutable_at_runtime();
      return part;
    case SpaceKind::kKey:
      part.set_stored(rotates ? kvasir::v1::PRE_ROPE : kvasir::v1::NO_ROPE);
      break;
    default:
      part.set_stored(kvasir::v1::NO_ROPE);
  }
  if (option.kind == SpaceKind::kKey && rotates) {
    part.add_uses()->mutable_reconstruct();
  } else {
    part.add_uses()->mutable_at_runtime();
  }
  return part;
}

}  // namespace kvasir::compress
