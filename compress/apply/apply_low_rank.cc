// Applies low_rank parts: each group of heads has one latent, from which a real
// matrix (the lift) computes keys or values. In a joint part, the group's key
// rows and value rows are factored as one matrix.
#include <algorithm>
#include <vector>

#include "base/status_macros.h"
#include "compress/apply/apply_part.h"
#include "compress/methods/low_rank.h"

namespace kvasir::compress {
namespace {

// The factors of one group, float64, for its R' stored channels.
struct GroupFactors {
  at::Tensor down;       // [R', M]
  at::Tensor down_bias;  // [R']; undefined if there is no bias
  at::Tensor up;         // [heads * d, R']
  at::Tensor up_bias;    // [heads * d]; undefined if there is no bias

  // Returns the factors with only the rows [first, first + count) of the lift.
  GroupFactors LiftOf(int64_t first, int64_t count) const {
    GroupFactors part = *this;
    part.up = up.narrow(0, first, count);
    if (up_bias.defined()) part.up_bias = up_bias.narrow(0, first, count);
    return part;
  }
};

// The resolved part, once for each side (keys or values) that it serves. A
// joint part serves both.
using Shapes = std::vector<const plan::ResolvedPart*>;

// Returns the factors that the planner `auto` assumed when it predicted the
// loss. `rows` has the weight and bias of the group.
GroupFactors FisherFactors(const PartInput& input, const Shapes& sides,
                           const std::vector<int64_t>& heads, int64_t rank,
                           const FactorRequest& rows) {
  const auto serves = [&sides](plan::Side side) {
    return std::any_of(sides.begin(), sides.end(), [side](const auto* shape) {
      return shape->side == side;
    });
  };
  const FisherBasis basis =
      LowRankBasis(*input.fisher,
                   ColumnsOfHeads(input.spec(), heads, serves(plan::Side::kKey),
                                  serves(plan::Side::kValue)),
                   rank);
  GroupFactors group;
  group.down = basis.encode.mm(rows.weight.to(at::kDouble));
  group.up = basis.decode;
  if (rows.bias.defined()) group.up_bias = rows.bias.to(at::kDouble);
  return group;
}

// Factors the projection rows of a group's heads as one matrix: for a joint
// part the rows of keys and values, otherwise those of one side.
absl::StatusOr<GroupFactors> FactorGroup(const PartInput& input,
                                         const Shapes& sides,
                                         const std::vector<int64_t>& heads,
                                         int64_t rank) {
  const int64_t head_dim = input.spec().head_dim;
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
  for (const plan::ResolvedPart* side : sides) {
    weights.push_back(
        RowsOfHeads(input.weight(side->side), head_dim, heads, side->dims));
    if (!input.bias(side->side).defined()) continue;
    biases.push_back(
        RowsOfHeads(input.bias(side->side), head_dim, heads, side->dims));
  }
  FactorRequest factor;
  factor.weight = at::cat(weights, 0);
  if (!biases.empty()) factor.bias = at::cat(biases, 0);
  if (input.fisher != nullptr) {
    return FisherFactors(input, sides, heads, rank, factor);
  }
  factor.moments = input.moments;
  factor.rank = rank;
  factor.split_singular_values = input.request->split_singular_values;
  // BASIS_STATIC requires the principal basis, which kWhitened gives, even if
  // other parts are decomposed differently.
  factor.decomposition = input.part->codec().has_basis_static()
                             ? Decomposition::kWhitened
                             : input.request->decomposition;
  factor.centred = input.part->mean();
  factor.hadamard = input.part->codec().has_hadamard_fused();
  factor.profile = input.request->profile;
  const absl::StatusOr<Factors> factored = Factorize(factor);
  if (!factored.ok()) return ErrorOf(input, factored.status());
  const Factors& factors = *factored;

  const at::Tensor stored =
      at::tensor(StoredIndices(input.part->codec(), rank), at::kLong);
  GroupFactors group;
  group.down = factors.down.to(at::kDouble).index_select(0, stored);
  group.up = factors.up.to(at::kDouble).index_select(1, stored);
  if (factors.up_bias.defined()) {
    group.up_bias = factors.up_bias.to(at::kDouble);
  }
  if (!factors.down_bias.defined()) return group;
  const at::Tensor latent_bias =
      factors.down_bias.to(at::kDouble).index_select(0, stored);
  if (input.part->latent_bias()) {
    group.down_bias = latent_bias;
    return group;
  }
  // The plan stores no bias for the latents. Their bias, multiplied by the
  // lift, is added to the lift's own bias instead, which gives the same keys.
  const at::Tensor lifted = group.up.mv(latent_bias);
  group.up_bias = group.up_bias.defined() ? group.up_bias + lifted : lifted;
  return group;
}

// Gathers the factors of all groups into the tensors of a part, with the lifts
// for one side.
class Collector {
 public:
  Collector(const PartInput& input, const plan::ResolvedPart& shape)
      : input_(input),
        shape_(shape),
        dims_(shape.dims),
        place_(ChoiceOfDims(input.spec().head_dim, dims_)) {
    applied_.head_maps.resize(static_cast<size_t>(input.spec().num_kv_heads));
    up_bias_ = at::zeros(
        {input.spec().num_kv_heads, static_cast<int64_t>(dims_.size())},
        at::kDouble);
  }

  void Add(const std::vector<int64_t>& heads, const GroupFactors& group) {
    down_.push_back(group.down);
    down_bias_.push_back(group.down_bias.defined()
                             ? group.down_bias
                             : at::zeros({group.down.size(0)}, at::kDouble));
    if (!shape_.folded) {
      applied_.tensors[plan::LiftName(shape_.lift_prefix, num_groups_)] =
          group.up.to(at::kFloat).contiguous();
    }
    const auto per_head = static_cast<int64_t>(dims_.size());
    for (size_t i = 0; i < heads.size(); ++i) {
      const int64_t begin = static_cast<int64_t>(i) * per_head;
      applied_.head_maps[static_cast<size_t>(heads[i])] =
          shape_.folded ? place_.mm(group.up.narrow(0, begin, per_head))
                        : place_;
      if (group.up_bias.defined()) {
        any_up_bias_ = true;
        up_bias_[heads[i]].copy_(group.up_bias.narrow(0, begin, per_head));
      }
    }
    ++num_groups_;
  }

  AppliedPart Finish() {
    if (shape_.stores_latents()) {
      applied_.tensors["down.weight"] = at::cat(down_, 0).to(at::kFloat);
      if (input_.part->latent_bias()) {
        applied_.tensors["down.bias"] = at::cat(down_bias_, 0).to(at::kFloat);
      }
    }
    if (shape_.side == plan::Side::kValue) {
      if (any_up_bias_) applied_.constant = up_bias_.flatten();
    } else if (shape_.rebuilt &&
               (input_.bias().defined() || input_.part->mean())) {
      applied_.tensors[shape_.lift_prefix + ".bias"] =
          up_bias_.flatten().to(at::kFloat);
    }
    return std::move(applied_);
  }

 private:
  const PartInput& input_;
  const plan::ResolvedPart& shape_;
  const std::vector<int64_t>& dims_;
  const at::Tensor place_;  // [D, d]
  int64_t num_groups_ = 0;
  bool any_up_bias_ = false;
  at::Tensor up_bias_;  // [Hkv, d]
  std::vector<at::Tensor> down_;
  std::vector<at::Tensor> down_bias_;
  AppliedPart applied_;
};

// Applies the part and returns, for each side that it serves, its tensors with
// the lift for this side.
absl::StatusOr<std::vector<AppliedPart>> ApplySides(const PartInput& input,
                                                    const Shapes& sides) {
  std::vector<Collector> collectors;
  for (const plan::ResolvedPart* side : sides) {
    collectors.emplace_back(input, *side);
  }
  const auto& groups = input.part->low_rank().groups();
  for (int g = 0; g < groups.size(); ++g) {
    const std::vector<int64_t>& heads =
        input.shape->latents[static_cast<size_t>(g)].heads;
    KVASIR_ASSIGN_OR_RETURN(
        const GroupFactors factors,
        FactorGroup(input, sides, heads, groups.Get(g).rank()));
    int64_t row = 0;
    for (size_t s = 0; s < sides.size(); ++s) {
      const auto rows =
          static_cast<int64_t>(heads.size() * sides[s]->dims.size());
      collectors[s].Add(heads, factors.LiftOf(row, rows));
      row += rows;
    }
  }
  std::vector<AppliedPart> applied;
  for (Collector& collector : collectors) {
    applied.push_back(collector.Finish());
  }
  return applied;
}

}  // namespace

absl::StatusOr<AppliedPart> ApplyLowRank(const PartInput& input) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<AppliedPart> applied,
                          ApplySides(input, {input.shape}));
  return std::move(applied[0]);
}

absl::StatusOr<AppliedJointPart> ApplyJointLowRank(
    const PartInput& input, const plan::ResolvedPart& value) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<AppliedPart> applied,
                          ApplySides(input, {input.shape, &value}));
  return AppliedJointPart{std::move(applied[0]), std::move(applied[1])};
}

}  // namespace kvasir::compress
