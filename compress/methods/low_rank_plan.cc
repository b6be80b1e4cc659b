#include "compress/methods/low_rank_plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/tp_dealt.h"
#include "plan/resolved_plan.h"
#include "plan/tp_size.h"

namespace kvasir::compress {

using kvasir::v1::Codec;
using kvasir::v1::KvPlan;
using kvasir::v1::Part;

namespace {

bool Rotates(const model::DecoderSpec& spec, int64_t layer) {
  return spec.rope.rotary_dim > 0 &&
         spec.layers[static_cast<size_t>(layer)].rope;
}

// Returns whether all parts are low_rank with full rank in every group, and
// store their latents without codes or transforms.
bool KeepsAll(const model::DecoderSpec& spec,
              const kvasir::v1::SidePlan& side) {
  int64_t ranks = 0;
  for (const Part& part : side.parts()) {
    const Codec& codec = part.codec();
    const bool plain = codec.has_dtype() &&
                       (codec.transform_case() == Codec::TRANSFORM_NOT_SET ||
                        codec.has_none());
    if (!part.has_low_rank() || !plain) return false;
    for (const auto& group : part.low_rank().groups()) ranks += group.rank();
  }
  // The rank of a group cannot exceed its number of rows. So if the ranks add
  // up to the number of all rows, all groups have full rank.
  return ranks == spec.num_kv_heads * spec.head_dim;
}

void StoreWholeSidesAsTheyAre(const model::DecoderSpec& spec, KvPlan& plan) {
  for (int l = 0; l < plan.layers_size(); ++l) {
    auto* layer = plan.mutable_layers(l);
    for (const plan::Side side : {plan::Side::kKey, plan::Side::kValue}) {
      auto* planned = side == plan::Side::kKey ? layer->mutable_key()
                                               : layer->mutable_value();
      if (!KeepsAll(spec, *planned)) continue;
      const Codec codec = planned->parts(0).codec();
      planned->clear_parts();
      *planned->add_parts() = FullPart(spec, l, side, codec);
    }
  }
}

}  // namespace

std::vector<Section> KeySections(const model::DecoderSpec& spec, int64_t layer,
                                 PartialRotary partial) {
  const int64_t rotary = Rotates(spec, layer) ? spec.rope.rotary_dim : 0;
  const bool whole = rotary == 0 || rotary == spec.head_dim;
  if (whole || partial == PartialRotary::kOnePart) {
    return {{.num_dims = spec.head_dim, .rotates = rotary > 0}};
  }
  return {{.num_dims = rotary, .rotates = true, .rotary_only = true},
          {.first_dim = rotary, .num_dims = spec.head_dim - rotary}};
}

Section ValueSection(const model::DecoderSpec& spec) {
  return {.side = plan::Side::kValue, .num_dims = spec.head_dim};
}

absl::Status CheckPlanRequest(const PlanRequest& request) {
  if (!(request.keep > 0 && request.keep <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the kept share must be above 0 and at most 1, is ", request.keep));
  }
  if (request.rank_multiple < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--rank-multiple must be at least 1, is ", request.rank_multiple));
  }
  const model::DecoderSpec& spec = request.spec;
  const int64_t rows = spec.num_kv_heads * spec.head_dim;
  if (request.rank_multiple > rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--rank-multiple is ", request.rank_multiple, ", but must be at most ",
        rows, ", the number of key dims in a layer"));
  }
  KVASIR_RETURN_IF_ERROR(plan::CheckTpSize(model::TpDealtOf(spec), request.tp));
  if (request.calibration != nullptr &&
      static_cast<int64_t>(request.calibration->layers.size()) !=
          spec.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the calibration has ", request.calibration->layers.size(),
                     " layers, but the model has ", spec.num_layers()));
  }
  return absl::OkStatus();
}

int64_t HeadShares(const PlanRequest& request) {
  return std::min(request.tp, request.spec.num_kv_heads);
}

absl::StatusOr<std::vector<HeadGroup>> HeadGroups(const PlanRequest& request,
                                                  int64_t group_heads) {
  const int64_t heads = request.spec.num_kv_heads;
  const int64_t rank_heads = heads / HeadShares(request);
  const int64_t size = group_heads == 0 ? rank_heads : group_heads;
  if (size < 1 || rank_heads % size != 0) {
    const std::string per_rank =
        request.tp == 1
            ? ""
            : absl::StrCat(", of which each of ", request.tp,
                           " tensor-parallel ranks has ", rank_heads);
    std::vector<int64_t> sizes;
    for (int64_t fits = 1; fits <= rank_heads; ++fits) {
      if (rank_heads % fits == 0) sizes.push_back(fits);
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "groups of ", size, " heads do not divide the ", heads, " KV heads",
        per_rank, "; possible group sizes: ", absl::StrJoin(sizes, ", ")));
  }
  std::vector<HeadGroup> groups;
  for (int64_t head = 0; head < heads; ++head) {
    if (head % size == 0) groups.emplace_back();
    groups.back().push_back(static_cast<uint32_t>(head));
  }
  return groups;
}

int64_t GroupRows(const HeadGroup& group, const Section& section) {
  return static_cast<int64_t>(group.size()) * section.num_dims;
}

int64_t MaxRank(const model::DecoderSpec& spec, const HeadGroup& group,
                const Section& section) {
  return std::min(GroupRows(group, section), spec.hidden_size);
}

bool FoldReadsLess(const model::DecoderSpec& spec, const Part& part,
                   int64_t head_dims) {
  const int64_t queries_per_head = spec.num_heads / spec.num_kv_heads;
  int64_t folded = 0;
  int64_t at_runtime = spec.num_heads * head_dims * spec.hidden_size;
  for (const auto& group : part.low_rank().groups()) {
    const int64_t channels = plan::StoredChannels(part.codec(), group.rank());
    folded +=
        group.heads_size() * queries_per_head * channels * spec.hidden_size;
    at_runtime += group.heads_size() * head_dims * channels;
  }
  return folded < at_runtime;
}

Part LowRankPart(const model::DecoderSpec& spec, const Section& section,
                 const std::vector<HeadGroup>& groups,
                 const std::vector<int64_t>& ranks, const Codec& codec) {
  Part part;
  for (size_t g = 0; g < groups.size(); ++g) {
    auto* group = part.mutable_low_rank()->add_groups();
    group->mutable_heads()->Add(groups[g].begin(), groups[g].end());
    group->set_rank(static_cast<uint32_t>(ranks[g]));
  }
  *part.mutable_codec() = codec;
  Part::Use* use = part.add_uses();
  part.set_stored(section.rotates ? kvasir::v1::PRE_ROPE : kvasir::v1::NO_ROPE);
  if (section.rotary_only) {
    for (uint32_t pair = 0; pair < section.num_dims / 2; ++pair) {
      use->add_pairs(pair);
    }
  }
  if (section.rotates) {
    use->mutable_reconstruct();
  } else if (FoldReadsLess(spec, part, section.num_dims)) {
    use->mutable_fold();
  } else {
    use->mutable_at_runtime();
  }
  return part;
}

Part FullPart(const model::DecoderSpec& spec, int64_t layer, plan::Side side,
              const Codec& codec) {
  Part part;
  part.mutable_full();
  const bool rotated = side == plan::Side::kKey && Rotates(spec, layer);
  part.set_stored(rotated ? kvasir::v1::POST_ROPE : kvasir::v1::NO_ROPE);
  *part.mutable_codec() = codec;
  return part;
}

int64_t KeptNumbers(double keep, int64_t numbers) {
  return static_cast<int64_t>(
      std::floor(keep * static_cast<double>(numbers) + 1e-6));
}

std::string NumberText(double number) {
  std::array<char, 32> text;
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return std::string(text.data(), end);
}

absl::Status NeedCalibration(const PlanRequest& request,
                             const std::string& what) {
  if (request.calibration != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " needs a calibration, and there is none"));
}

absl::Status NeedFisher(const PlanRequest& request, const std::string& what,
                        const std::string& instead) {
  if (request.calibration != nullptr && request.calibration->has_fisher()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(what, " needs a calibration with Fisher information; \"",
                   instead, "\" does not need it"));
}

absl::Status NeedWeights(const PlanRequest& request, const std::string& what) {
  if (request.weights != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " needs the model's weights, and there are none"));
}

absl::StatusOr<at::Tensor> FisherRows(const PlanRequest& request, int64_t layer,
                                      plan::Side side, bool root) {
  const LayerCalibration& calibration =
      request.calibration->layers[static_cast<size_t>(layer)];
  const at::Tensor& rows =
      side == plan::Side::kKey
          ? (root ? calibration.key_fisher_root : calibration.key_fisher)
          : (root ? calibration.value_fisher_root : calibration.value_fisher);
  const std::string place =
      absl::StrCat("layer ", layer, " ", plan::SideName(side));
  const int64_t want = request.spec.num_kv_heads * request.spec.head_dim;
  if (!rows.defined() || rows.numel() != want) {
    return absl::InvalidArgumentError(
        absl::StrCat(place, ": the calibration's Fisher information has ",
                     rows.defined() ? rows.numel() : 0,
                     " rows, but the projection has ", want));
  }
  at::Tensor scores = rows.to(at::kDouble).flatten().contiguous();
  const double* score = scores.data_ptr<double>();
  for (int64_t row = 0; row < want; ++row) {
    if (std::isfinite(score[row]) && score[row] >= 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        place, " head ", row / request.spec.head_dim, " dim ",
        row % request.spec.head_dim,
        ": the calibration's Fisher information must be finite and >= 0, is ",
        score[row]));
  }
  return scores;
}

int64_t DenseNumbers(const model::DecoderSpec& spec) {
  return 2 * spec.num_layers() * spec.num_kv_heads * spec.head_dim;
}

absl::StatusOr<KvPlan> FinishPlan(const PlanRequest& request,
                                  const PlanIdentity& identity, KvPlan plan) {
  StoreWholeSidesAsTheyAre(request.spec, plan);
  plan.set_schema_version(plan::kPlanSchemaVersion);
  plan.set_method(identity.method);
  plan.mutable_target()->set_tp(static_cast<uint32_t>(request.tp));
  auto* provenance = plan.mutable_provenance();
  provenance->set_options(identity.options);
  provenance->set_decomposition(DecompositionName(identity.decomposition));
  if (request.calibration != nullptr) {
    provenance->set_calibration_id(request.calibration->id);
  }
  double bytes = 0;
  const int64_t shares = HeadShares(request);
  for (int64_t rank = 0; rank < shares; ++rank) {
    KVASIR_ASSIGN_OR_RETURN(
        const cache::PageLayout layout,
        cache::PageLayout::Create(plan, model::AttentionShapeOf(request.spec),
                                  {}, {.rank = rank, .size = shares}));
    bytes += layout.marginal_payload_bytes_per_token();
  }
  plan.mutable_target()->set_kv_bytes_per_token(bytes);
  return plan;
}

}  // namespace kvasir::compress
