#include "compress/apply/plan_probe.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/apply/layer_applier.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {
namespace {

// The number of held-out tokens on which a plan is measured, and the number of
// tokens to which its ranges are fitted.
constexpr int64_t kMeasuredTokens = 4096;
constexpr int64_t kRangeTokens = 8192;
// The smallest number of sequences for which the Evaluator computes a mean.
constexpr int64_t kFewestSequences = 2;

// Makes a text from held-out sequences that are spread evenly over all held-out
// sequences.
EvaluationText HeldOutText(const CalibrationSample& sample) {
  EvaluationText text;
  text.name = "held-out sequences";
  const int64_t windows = PlanProbe::WindowsOf(sample);
  for (int64_t w = 0; w < windows; ++w) {
    const int64_t sequence =
        sample.counted_sequences() + w * sample.held_out_sequences / windows;
    const std::vector<int32_t>& ids =
        sample.sequences[static_cast<size_t>(sequence)];
    text.ids.insert(text.ids.end(), ids.begin(), ids.end());
  }
  // not read, because losses per byte are not used
  text.bytes.assign(text.ids.size(), 1);
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PlanProbe>> PlanProbe::Create(
    const model::Checkpoint& base, const Calibration& calibration,
    const CalibrationSample& sample, const Options& options) {
  if (sample.held_out_sequences < kFewestSequences) {
    return absl::FailedPreconditionError(absl::StrCat(
        "plans are measured on held-out sequences, of which the calibration "
        "must have at least ",
        kFewestSequences, ", but has ", sample.held_out_sequences,
        ": give more calibration tokens or shorter sequences"));
  }
  std::unique_ptr<PlanProbe> probe(
      new PlanProbe(base, calibration, sample, options));
  KVASIR_ASSIGN_OR_RETURN(ReferenceDecoder teacher,
                          ReferenceDecoder::Load(base, std::nullopt));
  probe->teacher_ = std::make_unique<ReferenceDecoder>(std::move(teacher));
  KVASIR_ASSIGN_OR_RETURN(const Candidate candidate,
                          MakeCandidate(base.name(), *probe->teacher_));
  SetBlasThreads(1);
  KVASIR_ASSIGN_OR_RETURN(
      probe->evaluator_,
      Evaluator::Create(
          candidate, HeldOutText(sample),
          {.window_tokens = sample.sequence_tokens,
           .min_windows = WindowsOf(sample),
           .repeat = {.tests = 0},
           .threads = options.threads,
           .progress = [progress = options.progress](int64_t, int64_t) {
             return progress();
           }}));
  return probe;
}

int64_t PlanProbe::WindowsOf(const CalibrationSample& sample) {
  return std::min(
      sample.held_out_sequences,
      std::max(kFewestSequences, kMeasuredTokens / sample.sequence_tokens));
}

int64_t PlanProbe::BytesOf(const model::Checkpoint& base) {
  const model::DecoderSpec& spec = base.spec();
  constexpr int64_t kFloatBytes = 4;
  int64_t numbers = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim *
                    spec.hidden_size * spec.num_layers();
  for (const auto& [name, entry] : base.tensors().entries()) {
    if (!model::IsWeightType(entry.info->type)) continue;
    numbers +=
        static_cast<int64_t>(entry.info->size_bytes) /
        static_cast<int64_t>(at::elementSize(ScalarTypeOf(entry.info->type)));
  }
  return numbers * kFloatBytes;
}

absl::StatusOr<double> PlanProbe::Measure(
    const kvasir::v1::KvPlan& plan) const {
  KVASIR_ASSIGN_OR_RETURN(const at::ScalarType stored, StoredTypeOf(base_));
  KVASIR_ASSIGN_OR_RETURN(
      LayerApplier applier,
      LayerApplier::Create(base_, plan, &calibration_, &sample_,
                           {.ranges = {.stored = stored,
                                       .threads = options_.threads,
                                       .fitted_tokens = kRangeTokens}}));
  ReferenceDecoder::Parts parts;
  parts.spec = base_.spec();
  parts.plan = plan;
  parts.outer = teacher_->outer();
  for (int64_t l = 0; l < base_.spec().num_layers(); ++l) {
    KVASIR_ASSIGN_OR_RETURN(const TensorMap attention, applier.Apply(l));
    TensorMap& layer = parts.layers.emplace_back(teacher_->layer(l));
    std::erase_if(layer, [](const auto& tensor) {
      return tensor.first.rfind("self_attn.", 0) == 0;
    });
    for (const auto& [name, tensor] : attention) {
      const bool is_range = name.find(".range.") != std::string::npos;
      layer[name] = is_range ? tensor : tensor.to(stored).to(at::kFloat);
    }
    if (!options_.progress()) {
      return absl::CancelledError("the measurement was stopped");
    }
  }
  KVASIR_ASSIGN_OR_RETURN(const ReferenceDecoder decoder,
                          ReferenceDecoder::FromTensors(std::move(parts)));
  KVASIR_ASSIGN_OR_RETURN(const Candidate candidate,
                          MakeCandidate("probe", decoder));
  KVASIR_ASSIGN_OR_RETURN(const EvaluationRow row,
                          evaluator_->Evaluate(candidate));
  return row.kl_nats;
}

absl::Duration PlanProbe::TimeOf(const model::DecoderSpec& spec,
                                 const CalibrationSample& sample, int64_t plans,
                                 double operations_per_second) {
  const auto hidden = static_cast<double>(spec.hidden_size);
  const double numbers =
      hidden *
      static_cast<double>(
          2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim +
          model::MlpMatrices(spec.mlp) * spec.used_mlp_features()) *
      static_cast<double>(spec.num_layers());
  const auto measured =
      static_cast<double>(WindowsOf(sample) * sample.sequence_tokens);
  const double head = 2 * hidden * static_cast<double>(spec.vocab_size);
  // The operations of the matrix products are doubled, because attention, codes
  // and factors take about as long as these products.
  const double tokens =
      static_cast<double>(plans) * (measured + kRangeTokens) + measured;
  const double operations =
      4 * numbers * tokens + 2 * head * measured * static_cast<double>(plans);
  return absl::Seconds(operations / operations_per_second);
}

}  // namespace kvasir::compress
