// Applies rope_pairs and rope_low_rank parts, which store keys whose lift
// commutes with the rotation.
#include <numeric>
#include <span>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/apply/apply_part.h"
#include "compress/methods/rope_factors.h"
#include "compress/methods/rope_pairs.h"

namespace kvasir::compress {
namespace {

absl::StatusOr<PairStatistics> StatisticsOf(const PartInput& input) {
  const ApplyRequest& request = *input.request;
  absl::StatusOr<PairStatistics> statistics =
      MakePairStatistics({.spec = request.spec,
                          .key = request.weights.key,
                          .key_bias = request.weights.key_bias,
                          .calibration = request.calibration,
                          .num_tokens = request.num_tokens,
                          .decomposition = request.decomposition,
                          .weights = request.commuting});
  if (!statistics.ok()) return ErrorOf(input, statistics.status());
  return statistics;
}

// Concatenates real and imaginary parts along `dim`.
at::Tensor RealThenImaginary(const at::Tensor& values, int64_t dim) {
  return at::cat({at::real(values), at::imag(values)}, dim);
}

// Returns the real matrix [D, 2C] that lifts a head's key from its latent.
// For a RoPE pair with dims a and b, k[a] + i k[b] is the sum of u z over
// the pair's complex channels z. Here u is the channel's complex factor in
// the lift.
at::Tensor RealLift(const model::DecoderSpec& spec, const CommutingGroup& group,
                    const at::Tensor& up) {
  const int64_t channels = up.size(0);
  at::Tensor lift = at::zeros({spec.head_dim, 2 * channels}, at::kDouble);
  const at::Tensor real = at::real(up);
  const at::Tensor imaginary = at::imag(up);
  int64_t begin = 0;
  for (size_t i = 0; i < group.pairs.size(); ++i) {
    const int64_t rank = group.rank_per_pair[i];
    const PairDims dims = DimsOfPair(spec.rope, group.pairs[i]);
    const at::Tensor u_real = real.narrow(0, begin, rank);
    const at::Tensor u_imaginary = imaginary.narrow(0, begin, rank);
    lift[dims.first].narrow(0, begin, rank).copy_(u_real);
    lift[dims.first].narrow(0, channels + begin, rank).copy_(-u_imaginary);
    lift[dims.second].narrow(0, begin, rank).copy_(u_imaginary);
    lift[dims.second].narrow(0, channels + begin, rank).copy_(u_real);
    begin += rank;
  }
  return lift;
}

std::span<const uint32_t> SpanOf(
    const google::protobuf::RepeatedField<uint32_t>& values) {
  return {values.data(), static_cast<size_t>(values.size())};
}

// Returns the factors that the planner `auto` assumed when it predicted the
// loss. Each pair uses its channels in the order of falling variance. The plan
// may list pairs in any order.
absl::StatusOr<CommutingFactors> FisherFactors(const PartInput& input,
                                               const CommutingGroup& group) {
  const RopeBasis found =
      RopeLowRankBasis(*input.fisher, input.spec(), group.heads);
  const CommutingBasis& basis = found.basis;
  std::vector<bool> taken(basis.pairs.size(), false);
  std::vector<int64_t> channels;
  for (size_t i = 0; i < group.pairs.size(); ++i) {
    for (int64_t r = 0; r < group.rank_per_pair[i]; ++r) {
      size_t c = 0;
      while (c < taken.size() &&
             (taken[c] || basis.pairs[c] != group.pairs[i])) {
        ++c;
      }
      if (c == taken.size()) {
        return absl::InvalidArgumentError(absl::StrCat(
            input.Place(), "the rank of RoPE pair ", group.pairs[i], " is ",
            group.rank_per_pair[i], ", but must be at most ",
            group.heads.size(), ", the number of KV heads in its group"));
      }
      taken[c] = true;
      channels.push_back(static_cast<int64_t>(c));
    }
  }
  const at::Tensor index = at::tensor(channels, at::kLong);
  const at::Tensor real =
      at::cat({index, index + static_cast<int64_t>(basis.pairs.size())});
  std::vector<int64_t> dims(static_cast<size_t>(input.spec().head_dim));
  std::iota(dims.begin(), dims.end(), 0);
  const at::Tensor encode = found.encode.index_select(0, real);
  const auto project = [&](const at::Tensor& tensor) {
    const at::Tensor rows =
        RowsOfHeads(tensor, input.spec().head_dim, group.heads, dims)
            .to(at::kDouble);
    const at::Tensor parts = encode.matmul(rows).contiguous();
    const auto half = static_cast<int64_t>(channels.size());
    return at::complex(parts.narrow(0, 0, half).contiguous(),
                       parts.narrow(0, half, half).contiguous());
  };
  CommutingFactors factors;
  factors.down = project(input.weight());
  factors.up = basis.decode.index_select(1, index);
  if (input.bias().defined()) factors.down_bias = project(input.bias());
  return factors;
}

absl::Status CheckRopeLowRank(const PartInput& input) {
  if (input.bias().defined() && !input.part->latent_bias()) {
    return absl::InvalidArgumentError(absl::StrCat(
        input.Place(),
        "k_proj of this model has a bias, so the plan must set latent_bias "
        "for this part"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AppliedPart> ApplyRopePairs(const PartInput& input) {
  const model::DecoderSpec& spec = input.spec();
  AppliedPart applied;
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> bias;
  const auto& per_head = input.part->rope_pairs().per_head();
  for (int head = 0; head < per_head.size(); ++head) {
    const std::vector<int64_t> dims =
        model::PairDims(spec.rope, SpanOf(per_head.Get(head).pair_indices()));
    rows.push_back(RowsOfHeads(input.weight(), spec.head_dim, {head}, dims));
    if (input.bias().defined()) {
      bias.push_back(RowsOfHeads(input.bias(), spec.head_dim, {head}, dims));
    }
    applied.head_maps.push_back(ChoiceOfDims(spec.head_dim, dims));
  }
  applied.tensors["weight"] = at::cat(rows, 0);
  if (!bias.empty()) applied.tensors["bias"] = at::cat(bias, 0);
  return applied;
}

absl::StatusOr<AppliedPart> ApplyRopeLowRank(const PartInput& input) {
  const model::DecoderSpec& spec = input.spec();
  KVASIR_RETURN_IF_ERROR(CheckRopeLowRank(input));
  AppliedPart applied;
  PairStatistics statistics;
  if (input.fisher == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(statistics, StatisticsOf(input));
  }
  applied.head_maps.resize(static_cast<size_t>(spec.num_kv_heads));
  std::vector<at::Tensor> down;
  std::vector<at::Tensor> down_bias;
  const auto& groups = input.part->rope_low_rank().groups();
  for (int g = 0; g < groups.size(); ++g) {
    const auto& pairs = groups.Get(g).pairs();
    const auto& ranks = groups.Get(g).rank_per_pair();
    const CommutingGroup group = {
        input.shape->latents[static_cast<size_t>(g)].heads,
        {pairs.begin(), pairs.end()},
        {ranks.begin(), ranks.end()}};
    CommutingFactors factors;
    if (input.fisher != nullptr) {
      KVASIR_ASSIGN_OR_RETURN(factors, FisherFactors(input, group));
    } else {
      factors = FactorsOfGroup(spec, input.request->weights, statistics, group);
    }
    down.push_back(RealThenImaginary(factors.down, 0));
    down_bias.push_back(
        factors.down_bias.defined()
            ? RealThenImaginary(factors.down_bias, 0)
            : at::zeros({2 * factors.down.size(0)}, at::kDouble));
    if (!input.shape->folded) {
      applied.tensors[plan::LiftName(input.shape->lift_prefix, g)] =
          at::stack({at::real(factors.up), at::imag(factors.up)}, 1)
              .to(at::kFloat)
              .contiguous();
    }
    const at::Tensor plain = ChoiceOfDims(
        spec.head_dim,
        model::PairDims(spec.rope,
                        input.shape->latents[static_cast<size_t>(g)].pairs));
    for (size_t i = 0; i < group.heads.size(); ++i) {
      applied.head_maps[static_cast<size_t>(group.heads[i])] =
          input.shape->folded
              ? RealLift(spec, group, factors.up[static_cast<int64_t>(i)])
              : plain;
    }
  }
  applied.tensors["down.weight"] = at::cat(down, 0).to(at::kFloat);
  if (input.part->latent_bias()) {
    applied.tensors["down.bias"] = at::cat(down_bias, 0).to(at::kFloat);
  }
  return applied;
}

}  // namespace kvasir::compress
