#include "compress/methods/svdq.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "compress/methods/low_rank_plan.h"

namespace kvasir::compress {

using kvasir::v1::Codec;
using kvasir::v1::KvPlan;
using kvasir::v1::Part;

namespace {

constexpr std::array<uint32_t, 5> kWidths = {1, 2, 3, 4, 8};

Codec PerTokenCodec(uint32_t bits) {
  Codec codec;
  codec.mutable_bits()->add_schedule(bits);
  codec.mutable_per_token();
  codec.set_param_dtype(kvasir::v1::F16);
  return codec;
}

Part ValuePart(const PlanRequest& request, int64_t layer, uint32_t bits) {
  return FullPart(request.spec, layer, plan::Side::kValue,
                  bits == 0 ? request.value_codec : PerTokenCodec(bits));
}

Codec ChannelStaticCodec(const std::vector<uint32_t>& schedule) {
  Codec codec;
  codec.mutable_bits()->mutable_schedule()->Add(schedule.begin(),
                                                schedule.end());
  codec.mutable_channel_static();
  return codec;
}

Part BasisPart(const PlanRequest& request, const SvdqOptions& options,
               const std::vector<HeadGroup>& groups, int64_t layer) {
  const model::DecoderSpec& spec = request.spec;
  Codec codec = ChannelStaticCodec(options.schedule);
  codec.mutable_basis_static();
  const Section section =
      KeySections(spec, layer, PartialRotary::kOnePart).front();
  Part part;
  if (options.post_rope && section.rotates) {
    part = FullPart(spec, layer, plan::Side::kKey, codec);
  } else {
    std::vector<int64_t> ranks;
    for (const HeadGroup& group : groups) {
      ranks.push_back(MaxRank(spec, group, section));
    }
    part = LowRankPart(spec, section, groups, ranks, codec);
    part.set_latent_bias(true);
  }
  part.set_mean(true);
  return part;
}

std::string ValueBitsText(uint32_t bits) {
  return bits == 0 ? "" : absl::StrCat(" --value-bits ", bits);
}

// Returns the bit width of the key channels in each layer.
absl::StatusOr<std::vector<uint32_t>> LayerBits(double average,
                                                int64_t num_layers) {
  if (!(average >= kWidths.front() && average <= kWidths.back())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the average number of bits per key channel must be ",
                     kWidths.front(), "..", kWidths.back(), ", is ", average));
  }
  size_t lower = 0;
  while (lower + 1 < kWidths.size() && kWidths[lower + 1] <= average) ++lower;
  const uint32_t low = kWidths[lower];
  const uint32_t high = kWidths[std::min(lower + 1, kWidths.size() - 1)];
  int64_t raised = 0;
  if (high > low) {
    raised = static_cast<int64_t>(std::floor(
        (average - low) / (high - low) * static_cast<double>(num_layers) +
        1e-9));
  }
  std::vector<uint32_t> bits(static_cast<size_t>(num_layers), low);
  std::fill_n(bits.begin(), raised, high);
  return bits;
}

}  // namespace

absl::StatusOr<KvPlan> PlanSvdq(const PlanRequest& request,
                                const SvdqOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request));
  if (options.schedule.size() != 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("SVDq: the schedule must have 8 bit widths, has ",
                     options.schedule.size()));
  }
  if (options.post_rope && HeadShares(request) > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "SVDq of rotated keys (--post-rope) has one basis over all KV heads, "
        "which each of ",
        request.tp,
        " tensor-parallel ranks would have to store: plan for --tp 1 or "
        "without --post-rope"));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::vector<HeadGroup> groups,
                          HeadGroups(request, 0));
  KvPlan plan;
  for (int64_t l = 0; l < request.spec.num_layers(); ++l) {
    auto* layer = plan.add_layers();
    *layer->mutable_key()->add_parts() = BasisPart(request, options, groups, l);
    *layer->mutable_value()->add_parts() =
        ValuePart(request, l, options.value_bits);
  }
  return FinishPlan(
      request,
      {.method = "svdq",
       .options = absl::StrCat(
           "--schedule ", absl::StrJoin(options.schedule, ","), " --tp ",
           request.tp, options.post_rope ? " --post-rope" : "",
           ValueBitsText(options.value_bits))},
      std::move(plan));
}

absl::StatusOr<KvPlan> PlanChannelCodes(const PlanRequest& request,
                                        const ChannelCodesOptions& options) {
  KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request));
  KVASIR_ASSIGN_OR_RETURN(
      const std::vector<uint32_t> bits,
      LayerBits(options.average_bits, request.spec.num_layers()));
  KvPlan plan;
  for (int64_t l = 0; l < request.spec.num_layers(); ++l) {
    auto* layer = plan.add_layers();
    Part key = FullPart(request.spec, l, plan::Side::kKey,
                        ChannelStaticCodec({bits[static_cast<size_t>(l)]}));
    if (!options.post_rope && key.stored() == kvasir::v1::POST_ROPE) {
      key.set_stored(kvasir::v1::PRE_ROPE);
    }
    *layer->mutable_key()->add_parts() = std::move(key);
    *layer->mutable_value()->add_parts() =
        ValuePart(request, l, options.value_bits);
  }
  return FinishPlan(request,
                    {.method = "channel-codes",
                     .options = absl::StrCat(
                         "--bits ", NumberText(options.average_bits), " --tp ",
                         request.tp, options.post_rope ? " --post-rope" : "",
                         ValueBitsText(options.value_bits))},
                    std::move(plan));
}

}  // namespace kvasir::compress
