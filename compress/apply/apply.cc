// Implements ApplyLayerPlan: applies the parts one by one, then changes the
// query and output projections as the parts require.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "compress/apply/apply_part.h"
#include "compress/methods/method.h"
#include "compress/runtime/torch_status.h"
#include "model/shapes/attention_shape.h"
#include "plan/artifact_tensors.h"

namespace kvasir::compress {
namespace {

using kvasir::v1::Part;
using kvasir::v1::SidePlan;
using plan::Side;

// A weight or bias tensor in the request, and the shape that it must have.
struct WantedTensor {
  const char* name;
  const at::Tensor& tensor;
  std::vector<int64_t> shape;
  bool wanted = true;
};

absl::Status CheckTensor(int64_t layer, const WantedTensor& want) {
  const std::string place = absl::StrCat("layer ", layer, ": ", want.name);
  if (want.tensor.defined() != want.wanted) {
    return absl::InvalidArgumentError(absl::StrCat(
        place, want.wanted ? " is missing"
                           : " is given, but the model has no such tensor"));
  }
  if (!want.wanted) return absl::OkStatus();
  if (want.tensor.sizes() != at::IntArrayRef(want.shape)) {
    return absl::InvalidArgumentError(absl::StrCat(
        place, " must have the shape [", absl::StrJoin(want.shape, ", "),
        "], has [", absl::StrJoin(want.tensor.sizes(), ", "), "]"));
  }
  if (!at::isfinite(want.tensor).all().item<bool>()) {
    return absl::InvalidArgumentError(
        absl::StrCat(place, " holds a number that is not finite"));
  }
  return absl::OkStatus();
}

absl::Status CheckWeights(const ApplyRequest& request) {
  const model::DecoderSpec& spec = *request.spec;
  const AttentionWeights& weights = request.weights;
  const int64_t hidden = spec.hidden_size;
  const int64_t queries = spec.num_heads * spec.head_dim;
  const int64_t keys = spec.num_kv_heads * spec.head_dim;
  const std::vector<WantedTensor> wanted = {
      {"q_proj.weight", weights.query, {queries, hidden}},
      {"k_proj.weight", weights.key, {keys, hidden}},
      {"v_proj.weight", weights.value, {keys, hidden}},
      {"o_proj.weight", weights.output, {hidden, queries}},
      {"q_proj.bias", weights.query_bias, {queries}, spec.qkv_bias},
      {"k_proj.bias", weights.key_bias, {keys}, spec.qkv_bias},
      {"v_proj.bias", weights.value_bias, {keys}, spec.qkv_bias},
      {"o_proj.bias", weights.output_bias, {hidden}, spec.o_bias}};
  for (const WantedTensor& want : wanted) {
    KVASIR_RETURN_IF_ERROR(CheckTensor(request.layer, want));
  }
  return absl::OkStatus();
}

absl::StatusOr<AppliedPart> ApplyPart(const PartInput& input) {
  switch (input.part->space_case()) {
    case Part::kFull:
      return ApplyFull(input);
    case Part::kLowRank:
      return ApplyLowRank(input);
    case Part::kRopePairs:
      return ApplyRopePairs(input);
    case Part::kRopeLowRank:
      return ApplyRopeLowRank(input);
    case Part::SPACE_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(input.Place(),
                   "the plan sets no space for this part; set "
                   "full, low_rank, rope_pairs or rope_low_rank"));
}

// Moves the part's tensors to `tensors`, under their full names.
void NameTensors(const plan::ResolvedPart& shape, AppliedPart& part,
                 TensorMap& tensors) {
  for (const auto& [name, tensor] : part.tensors) {
    tensors[absl::StrCat(shape.prefix, ".", name)] = tensor.contiguous();
  }
  part.tensors.clear();
}

// Applies the parts of one side (keys or values), except joint parts, which
// serve both sides.
absl::StatusOr<std::vector<AppliedPart>> ApplySide(
    const ApplyRequest& request, const std::vector<plan::ResolvedPart>& shapes,
    Side side, InputMoments* moments, const LayerMoments* fisher,
    TensorMap& tensors) {
  const SidePlan& plan =
      side == Side::kKey ? request.plan->key() : request.plan->value();
  std::vector<AppliedPart> parts;
  for (int p = 0; p < plan.parts_size(); ++p) {
    const plan::ResolvedPart& shape = shapes[static_cast<size_t>(p)];
    KVASIR_ASSIGN_OR_RETURN(
        AppliedPart part,
        ApplyPart({&request, side, &plan.parts(p), &shape, moments, fisher}));
    NameTensors(shape, part, tensors);
    parts.push_back(std::move(part));
  }
  return parts;
}

// Applies the joint parts. Each result is appended to the parts of keys and to
// the parts of values.
absl::Status ApplyJoint(const ApplyRequest& request,
                        const plan::ResolvedAttention& shapes,
                        InputMoments* moments, const LayerMoments* fisher,
                        std::vector<AppliedPart>& keys,
                        std::vector<AppliedPart>& values, TensorMap& tensors) {
  for (const Part& plan : request.plan->joint()) {
    const plan::ResolvedPart& key = shapes.key.parts[keys.size()];
    const plan::ResolvedPart& value = shapes.value.parts[values.size()];
    KVASIR_ASSIGN_OR_RETURN(
        AppliedJointPart part,
        ApplyJointLowRank({&request, Side::kKey, &plan, &key, moments, fisher},
                          value));
    NameTensors(key, part.key, tensors);
    NameTensors(value, part.value, tensors);
    keys.push_back(std::move(part.key));
    values.push_back(std::move(part.value));
  }
  return absl::OkStatus();
}

bool AnyFolds(const std::vector<plan::ResolvedPart>& shapes) {
  return std::any_of(
      shapes.begin(), shapes.end(),
      [](const plan::ResolvedPart& shape) { return shape.folded; });
}

// Returns the KV head that query head `head` uses.
size_t KvHeadOf(const model::DecoderSpec& spec, int64_t head) {
  return static_cast<size_t>(head / (spec.num_heads / spec.num_kv_heads));
}

void AddQueries(const ApplyRequest& request,
                const std::vector<AppliedPart>& parts, bool folds,
                TensorMap& tensors) {
  const AttentionWeights& weights = request.weights;
  const model::DecoderSpec& spec = *request.spec;
  tensors["self_attn.q_proj.weight"] = weights.query;
  if (weights.query_bias.defined()) {
    tensors["self_attn.q_proj.bias"] = weights.query_bias;
  }
  if (!folds) return;
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> bias;
  for (int64_t head = 0; head < spec.num_heads; ++head) {
    const auto query_rows = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, head * spec.head_dim, spec.head_dim)
          .to(at::kDouble);
    };
    for (const AppliedPart& part : parts) {
      const at::Tensor& map = part.head_maps[KvHeadOf(spec, head)];
      rows.push_back(map.t().mm(query_rows(weights.query)).to(at::kFloat));
      if (weights.query_bias.defined()) {
        bias.push_back(map.t().mv(query_rows(weights.query_bias)));
      }
    }
  }
  tensors["self_attn.q_proj.weight"] = at::cat(rows, 0);
  if (!bias.empty()) {
    tensors["self_attn.q_proj.bias"] = at::cat(bias, 0).to(at::kFloat);
  }
}

// Returns the columns of W_o for one query head, [M, D] float64.
at::Tensor OutputOfHead(const ApplyRequest& request, int64_t head) {
  const int64_t dim = request.spec->head_dim;
  return request.weights.output.narrow(1, head * dim, dim).to(at::kDouble);
}

// Returns W_o times a value [Hkv * D] that is the same for every token. The
// result is [M].
at::Tensor ConstantOutput(const ApplyRequest& request,
                          const at::Tensor& constant) {
  const model::DecoderSpec& spec = *request.spec;
  const at::Tensor head_values =
      constant.view({spec.num_kv_heads, 1, spec.head_dim})
          .expand({spec.num_kv_heads, spec.num_heads / spec.num_kv_heads,
                   spec.head_dim})
          .reshape({-1});
  return request.weights.output.to(at::kDouble).mv(head_values);
}

void AddOutputs(const ApplyRequest& request,
                const std::vector<AppliedPart>& parts, bool folds,
                TensorMap& tensors) {
  const AttentionWeights& weights = request.weights;
  const model::DecoderSpec& spec = *request.spec;
  tensors["self_attn.o_proj.weight"] = weights.output;
  if (folds) {
    std::vector<at::Tensor> columns;
    for (int64_t head = 0; head < spec.num_heads; ++head) {
      for (const AppliedPart& part : parts) {
        columns.push_back(OutputOfHead(request, head)
                              .mm(part.head_maps[KvHeadOf(spec, head)])
                              .to(at::kFloat));
      }
    }
    tensors["self_attn.o_proj.weight"] = at::cat(columns, 1);
  }
  at::Tensor bias;
  if (weights.output_bias.defined()) bias = weights.output_bias;
  for (const AppliedPart& part : parts) {
    if (!part.constant.defined()) continue;
    const at::Tensor add = ConstantOutput(request, part.constant);
    bias = bias.defined() ? bias.to(at::kDouble) + add : add;
  }
  if (bias.defined()) {
    tensors["self_attn.o_proj.bias"] = bias.to(at::kFloat);
  }
}

// Resolves the layer's plan. Returns UNIMPLEMENTED if the plan's tensors cannot
// be computed from the projection weights.
absl::StatusOr<plan::ResolvedAttention> ResolveForWeights(
    const kvasir::v1::LayerPlan& plan, const model::DecoderSpec& spec,
    int64_t layer) {
  const plan::AttentionShape shape = model::AttentionShapeOf(spec);
  KVASIR_ASSIGN_OR_RETURN(plan::ResolvedAttention attention,
                          plan::ResolveAttention(plan, shape, layer));
  KVASIR_RETURN_IF_ERROR(plan::TensorsOf(attention, shape, layer).status());
  return attention;
}

absl::StatusOr<TensorMap> Apply(const ApplyRequest& request) {
  KVASIR_RETURN_IF_ERROR(CheckWeights(request));
  std::optional<InputMoments> moments;
  if (request.calibration != nullptr) {
    KVASIR_ASSIGN_OR_RETURN(moments, InputMoments::Create(*request.calibration,
                                                          request.num_tokens));
  }
  InputMoments* shared = moments.has_value() ? &*moments : nullptr;
  std::optional<LayerMoments> fisher;
  if (request.decomposition == Decomposition::kFisher) {
    if (request.calibration == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", request.layer,
                       ": the decomposition 'fisher' needs a calibration, "
                       "but none was given"));
    }
    KVASIR_ASSIGN_OR_RETURN(
        fisher, MomentsOfLayer(*request.spec, request.weights,
                               *request.calibration, request.num_tokens));
  }
  const LayerMoments* metric = fisher.has_value() ? &*fisher : nullptr;
  KVASIR_ASSIGN_OR_RETURN(
      const plan::ResolvedAttention shapes,
      ResolveForWeights(*request.plan, *request.spec, request.layer));
  TensorMap tensors;
  KVASIR_ASSIGN_OR_RETURN(std::vector<AppliedPart> keys,
                          ApplySide(request, shapes.key.parts, Side::kKey,
                                    shared, metric, tensors));
  KVASIR_ASSIGN_OR_RETURN(std::vector<AppliedPart> values,
                          ApplySide(request, shapes.value.parts, Side::kValue,
                                    shared, metric, tensors));
  KVASIR_RETURN_IF_ERROR(
      ApplyJoint(request, shapes, shared, metric, keys, values, tensors));
  AddQueries(request, keys, AnyFolds(shapes.key.parts), tensors);
  AddOutputs(request, values, AnyFolds(shapes.value.parts), tensors);
  return tensors;
}

}  // namespace

absl::StatusOr<TensorMap> ApplyLayerPlan(const ApplyRequest& request) {
  const at::NoGradGuard no_gradients;
  absl::StatusOr<TensorMap> tensors =
      CatchTorch([&] { return Apply(request); });
  if (tensors.ok() || !absl::IsInternal(tensors.status())) return tensors;
  return absl::InternalError(
      absl::StrCat("layer ", request.layer, ": ", tensors.status().message()));
}

}  // namespace kvasir::compress
