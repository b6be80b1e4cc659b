#include "worker/load/model_source.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "model/checkpoint/plan_tensors.h"
#include "model/shapes/attention_shape.h"
#include "model/shapes/config.h"
#include "model/shapes/shape_config.h"
#include "model/shapes/tp_dealt.h"
#include "plan/presets.h"
#include "plan/tp_size.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {
namespace {

// The data type to assume for tensors that the plan needs and the
// checkpoint lacks.
kvasir::v1::DataType NumberType(const ModelSource& source) {
  if (!source.checkpoint.has_value()) return kvasir::v1::BF16;
  return model::TensorDataType(*source.checkpoint, model::kEmbeddingName)
      .value_or(kvasir::v1::BF16);
}

std::vector<std::string> PlansOfAnyCheckpoint() {
  std::vector<std::string> names;
  for (const plan::PlanPreset& preset : plan::PlanPresets()) {
    if (preset.any_checkpoint) names.push_back(preset.name);
  }
  return names;
}

absl::StatusOr<kvasir::v1::KvPlan> ChoosePlan(const ModelOptions& options,
                                              const ModelSource& source) {
  std::error_code error;
  if (options.kv_plan == kAutoPlan) {
    // This plan is served if no other plan can be chosen.
    ModelOptions own = options;
    own.kv_plan.clear();
    return ChoosePlan(own, source);
  }
  const auto preset = plan::FindPlanPreset(options.kv_plan);
  if (preset.ok() && !std::filesystem::exists(options.kv_plan, error)) {
    if (!preset->any_checkpoint && source.checkpoint.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--kv-plan ", options.kv_plan,
          " needs tensors that kvasir-compress apply adds to a model; "
          "an unchanged model can use ",
          absl::StrJoin(PlansOfAnyCheckpoint(), ", ")));
    }
    return plan::MakePresetPlan(options.kv_plan,
                                model::AttentionShapeOf(source.spec));
  }
  if (!options.kv_plan.empty()) {
    const auto text = ReadTextFile(options.kv_plan, plan::kMaxPlanJsonBytes);
    if (!text.ok()) {
      return absl::Status(
          text.status().code(),
          absl::StrCat("--kv-plan: ", text.status().message(),
                       ": must be a plan file, as kvasir-compress plan "
                       "writes it, or one of ",
                       absl::StrJoin(PlansOfAnyCheckpoint(), ", ")));
    }
    return plan::ParsePlanJson(*text,
                               absl::StrCat("--kv-plan ", options.kv_plan));
  }
  if (source.checkpoint.has_value() &&
      source.checkpoint->kv_plan_json().has_value()) {
    return plan::ParsePlanJson(
        *source.checkpoint->kv_plan_json(),
        absl::StrCat(source.checkpoint->folder(), "/kv_plan.json"));
  }
  kvasir::v1::DataType dtype = OwnCacheType(source);
  if (options.kv_dtype != "auto") {
    KVASIR_ASSIGN_OR_RETURN(dtype, plan::ParseDataType(options.kv_dtype));
  }
  return plan::FullRankPlan(model::AttentionShapeOf(source.spec), dtype);
}

// Cuts exact windows to the model's length, and adds the eviction flags.
absl::Status PreparePlan(const ModelOptions& options,
                         const model::DecoderSpec& spec,
                         kvasir::v1::KvPlan* plan) {
  plan::ClampExactRows(spec.max_position_embeddings, plan);
  return PutEviction(options.eviction, model::AttentionShapeOf(spec), plan);
}

}  // namespace

kvasir::v1::DataType OwnCacheType(const ModelSource& source) {
  return source.checkpoint.has_value() ? OwnCacheType(*source.checkpoint)
                                       : kvasir::v1::BF16;
}

absl::StatusOr<std::shared_ptr<const plan::ResolvedPlan>> ModelSource::Resolve(
    const kvasir::v1::KvPlan& source) const {
  KVASIR_ASSIGN_OR_RETURN(
      plan::ResolvedPlan resolved,
      plan::ResolvePlan(source, model::AttentionShapeOf(spec), shard));
  return std::make_shared<const plan::ResolvedPlan>(std::move(resolved));
}

absl::Status ModelSource::SetPlan(const kvasir::v1::KvPlan& source) {
  KVASIR_ASSIGN_OR_RETURN(plan, Resolve(source));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const worker::ServedPlan>> ServeNamedPlan(
    const ModelSource& source, const std::string& name,
    const ModelOptions& options, const worker::ServeOptions& serve) {
  const plan::AttentionShape shape = model::AttentionShapeOf(source.spec);
  KVASIR_ASSIGN_OR_RETURN(kvasir::v1::KvPlan plan,
                          plan::MakePresetPlan(name, shape));
  KVASIR_RETURN_IF_ERROR(PreparePlan(options, source.spec, &plan));
  KVASIR_ASSIGN_OR_RETURN(auto resolved, source.Resolve(plan));
  return worker::ServePlan(std::move(resolved), serve);
}

void WeightSizes::Add(const std::string& tensor, int64_t tensor_bytes) {
  bytes += tensor_bytes;
  if (absl::StrContains(tensor, ".self_attn.")) attention_bytes += tensor_bytes;
}

WeightSizes WeightBytes(const ModelSource& source) {
  WeightSizes sizes;
  const auto tensors = model::RequiredTensors(source.spec, *source.plan);
  if (!tensors.ok()) return sizes;
  const int64_t number_bytes = plan::DataTypeBytes(NumberType(source));
  for (const model::RequiredTensor& tensor : *tensors) {
    int64_t bytes = number_bytes;
    for (const int64_t length : tensor.shape) bytes *= length;
    if (source.checkpoint.has_value() && source.weights_fit) {
      const auto entry = source.checkpoint->Tensor(tensor.name);
      if (entry.ok()) bytes = static_cast<int64_t>(entry->info->size_bytes);
    }
    sizes.Add(tensor.name, bytes);
  }
  return sizes;
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         int64_t limit_bytes) {
  std::error_code error;
  if (std::filesystem::exists(path, error) &&
      !std::filesystem::is_regular_file(path, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": is not a regular file"));
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat(path, ": cannot open: ", std::strerror(errno)));
  }
  const int64_t size = file.tellg();
  if (size < 0 || size > limit_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": has ", size, " bytes, the limit is ", limit_bytes));
  }
  std::string text(static_cast<size_t>(size), '\0');
  file.seekg(0);
  file.read(text.data(), size);
  if (file.gcount() != size) {
    return absl::DataLossError(
        absl::StrCat(path, ": read ", file.gcount(), " of ", size, " bytes"));
  }
  return text;
}

worker::ServeOptions ServeOptionsOf(const ModelOptions& options,
                                    const kernels::Device* device) {
  return {.lift_prompts =
              !options.deterministic &&
              (device == nullptr || worker::PromptsMayLift(*device))};
}

namespace {

absl::Status RemoveBias(model::ModelShape* shape) {
  if (shape->family != model::Family::kQwen2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--shape ", shape->name,
        " has no biases of queries, keys and values that can be removed; use a "
        "shape of the Qwen2 family, such as qwen2.5-0.5b"));
  }
  // A Llama of the same sizes is this Qwen2 model without biases.
  shape->family = model::Family::kLlama;
  shape->qkv_bias = false;
  return absl::OkStatus();
}

}  // namespace

DeviceWish DeviceWishOf(const ModelSource& source,
                        const ModelOptions& options) {
  DeviceWish wish;
  wish.deterministic = options.deterministic;
  wish.host_limit_bytes = base::ReadMachineLimits().memory_bytes;
  if (source.checkpoint.has_value() &&
      model::TensorDataType(*source.checkpoint, model::kEmbeddingName) ==
          kvasir::v1::F16) {
    wish.gpu_activations = kernels::DType::kF16;
  }
  return wish;
}

absl::StatusOr<ModelSource> OpenModelSource(
    const ModelOptions& options, PlanUse use,
    std::optional<kvasir::v1::KvPlan> plan, plan::TpShard shard) {
  KVASIR_RETURN_IF_ERROR(CheckModelOptions(options));
  ModelSource source;
  source.shard = shard;
  if (options.random_weights) {
    KVASIR_ASSIGN_OR_RETURN(source.shape, model::FindShape(options.shape));
    if (options.without_bias) {
      KVASIR_RETURN_IF_ERROR(RemoveBias(&*source.shape));
    }
    KVASIR_ASSIGN_OR_RETURN(source.spec, model::SpecOfShape(*source.shape));
    source.name = source.shape->name;
  } else {
    auto checkpoint = model::Checkpoint::Open(options.model);
    if (!checkpoint.ok()) {
      return absl::Status(
          checkpoint.status().code(),
          absl::StrCat("--model: ", checkpoint.status().message()));
    }
    source.checkpoint = *std::move(checkpoint);
    source.spec = source.checkpoint->spec();
    source.name = source.checkpoint->name();
  }
  KVASIR_RETURN_IF_ERROR(
      plan::CheckTpSize(model::TpDealtOf(source.spec), shard.size));
  if (!plan.has_value()) {
    KVASIR_ASSIGN_OR_RETURN(plan, ChoosePlan(options, source));
  }
  KVASIR_RETURN_IF_ERROR(PreparePlan(options, source.spec, &*plan));
  KVASIR_RETURN_IF_ERROR(source.SetPlan(*plan));
  if (use == PlanUse::kRun) {
    KVASIR_ASSIGN_OR_RETURN(
        source.served,
        worker::ServePlan(source.plan, ServeOptionsOf(options, nullptr)));
  }
  if (!source.checkpoint.has_value()) return source;
  const absl::Status fits = source.checkpoint->CheckTensors(*source.plan);
  if (!fits.ok() && (use == PlanUse::kRun || options.kv_plan.empty())) {
    return absl::Status(fits.code(), absl::StrCat("--model: ", fits.message()));
  }
  source.weights_fit = fits.ok();
  return source;
}

}  // namespace kvasir::cli
