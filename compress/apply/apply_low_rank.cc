// low_rank: one latent per group of heads, lifted by a real matrix.
#include "base/status_macros.h"
#include "compress/apply/apply_part.h"
#include "compress/methods/low_rank.h"

namespace kvasir::compress {
namespace {

// One group's part of the tensors, float64, without truncated channels.
struct GroupFactors {
  at::Tensor down;       // [R', M]
  at::Tensor down_bias;  // [R']; undefined: none
  at::Tensor up;         // [heads * d, R']
  at::Tensor up_bias;    // [heads * d]; undefined: none
};

absl::StatusOr<GroupFactors> FactorGroup(const PartInput& input,
                                         const std::vector<int64_t>& heads,
                                         int64_t rank) {
  const std::vector<int64_t>& dims = input.shape->dims;
  const int64_t head_dim = input.spec().head_dim;
  FactorRequest factor;
  factor.weight = RowsOfHeads(input.weight(), head_dim, heads, dims);
  if (input.bias().defined()) {
    factor.bias = RowsOfHeads(input.bias(), head_dim, heads, dims);
  }
  factor.moments = input.moments;
  factor.rank = rank;
  factor.split_singular_values = input.request->split_singular_values;
  // A basis is the principal one, whatever finds other factors.
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
  // The same keys from a latent without a bias.
  const at::Tensor lifted = group.up.mv(latent_bias);
  group.up_bias = group.up_bias.defined() ? group.up_bias + lifted : lifted;
  return group;
}

// Gathers the groups of a part.
class Collector {
 public:
  explicit Collector(const PartInput& input)
      : input_(input),
        dims_(input.shape->dims),
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
    if (!input_.shape->folded) {
      applied_.tensors[plan::LiftName(num_groups_)] =
          group.up.to(at::kFloat).contiguous();
    }
    const auto per_head = static_cast<int64_t>(dims_.size());
    for (size_t i = 0; i < heads.size(); ++i) {
      const int64_t begin = static_cast<int64_t>(i) * per_head;
      applied_.head_maps[static_cast<size_t>(heads[i])] =
          input_.shape->folded ? place_.mm(group.up.narrow(0, begin, per_head))
                               : place_;
      if (group.up_bias.defined()) {
        any_up_bias_ = true;
        up_bias_[heads[i]].copy_(group.up_bias.narrow(0, begin, per_head));
      }
    }
    ++num_groups_;
  }

  AppliedPart Finish() {
    applied_.tensors["down.weight"] = at::cat(down_, 0).to(at::kFloat);
    if (input_.part->latent_bias()) {
      applied_.tensors["down.bias"] = at::cat(down_bias_, 0).to(at::kFloat);
    }
    if (input_.side == plan::Side::kValue) {
      if (any_up_bias_) applied_.constant = up_bias_.flatten();
    } else if (input_.shape->rebuilt &&
               (input_.bias().defined() || input_.part->mean())) {
      applied_.tensors["up.bias"] = up_bias_.flatten().to(at::kFloat);
    }
    return std::move(applied_);
  }

 private:
  const PartInput& input_;
  const std::vector<int64_t>& dims_;
  const at::Tensor place_;  // [D, d]
  int64_t num_groups_ = 0;
  bool any_up_bias_ = false;
  at::Tensor up_bias_;  // [Hkv, d]
  std::vector<at::Tensor> down_;
  std::vector<at::Tensor> down_bias_;
  AppliedPart applied_;
};

}  // namespace

absl::StatusOr<AppliedPart> ApplyLowRank(const PartInput& input) {
  Collector collector(input);
  const auto& groups = input.part->low_rank().groups();
  for (int g = 0; g < groups.size(); ++g) {
    const std::vector<int64_t>& heads =
        input.shape->latents[static_cast<size_t>(g)].heads;
    KVASIR_ASSIGN_OR_RETURN(const GroupFactors factors,
                            FactorGroup(input, heads, groups.Get(g).rank()));
    collector.Add(heads, factors);
  }
  return collector.Finish();
}

}  // namespace kvasir::compress
