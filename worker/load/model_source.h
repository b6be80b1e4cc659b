// The source of a command's model: a checkpoint folder, or a shape with random
// weights, and the plan of its cache.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "model/checkpoint/cache_type.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/decoder_spec.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"
#include "plan/tp_shard.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/load/device.h"
#include "worker/load/model_options.h"
#include "worker/program/served_plan.h"

namespace kvasir::cli {

struct ModelSource {
  // Exactly one of the two is set.
  std::optional<model::Checkpoint> checkpoint;
  std::optional<model::ModelShape> shape;
  std::string name;
  model::DecoderSpec spec;
  // The part of a rank; by default the whole model.
  plan::TpShard shard;
  // Resolved once for that rank and used by everything later. Exact windows are
  // cut to the model's length.
  std::shared_ptr<const plan::ResolvedPlan> plan;
  // The programs that the rank runs on a CPU; null if the plan is only shown.
  std::shared_ptr<const worker::ServedPlan> served;
  // True if the weights fit the plan. False for a --kv-plan that is shown
  // before it is applied.
  bool weights_fit = true;

  // Resolves the plan for `spec`. Errors: those of ResolvePlan.
  absl::Status SetPlan(const kvasir::v1::KvPlan& source);
};

// Prompts lift latents if worker::PromptsMayLift allows it. A null device is
// the CPU.
worker::ServeOptions ServeOptionsOf(const ModelOptions& options,
                                    const kernels::Device* device);
// The arguments for OpenDevice: the host's limit, and float16 activations on a
// GPU if the checkpoint is stored in float16.
DeviceWish DeviceWishOf(const ModelSource& source, const ModelOptions& options);

enum class PlanUse {
  kRun,   // an error unless this build serves the plan and the weights fit it
  kLook,  // any valid plan
};

// Opens the model that the flags name. Reads headers, no weights. The plan is
// `plan` if given, else --kv-plan, else the folder's kv_plan.json, else the
// full-rank plan in --kv-dtype. The flags' eviction, if any, is added.
absl::StatusOr<ModelSource> OpenModelSource(
    const ModelOptions& options, PlanUse use,
    std::optional<kvasir::v1::KvPlan> plan = std::nullopt,
    plan::TpShard shard = {});

// model::OwnCacheType of the checkpoint; bf16 if there is only a shape.
kvasir::v1::DataType OwnCacheType(const ModelSource& source);

// Bytes of the model's weights in a file, and those of attention among them
// (worker::CountWeightBytes counts bytes in memory). They are the checkpoint's
// bytes if it has the plan's tensors; otherwise estimates in bf16, or in the
// type of the embedding of the checkpoint that is to be compressed.
struct WeightSizes {
  int64_t bytes = 0;
  int64_t attention_bytes = 0;

  void Add(const std::string& tensor, int64_t tensor_bytes);
};
WeightSizes WeightBytes(const ModelSource& source);

// Reads the whole file. NOT_FOUND names it; a file of more than `limit_bytes`
// is an error.
absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         int64_t limit_bytes);

}  // namespace kvasir::cli
