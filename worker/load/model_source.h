// Where a command's model comes from: a checkpoint folder or a shape with
// random weights, and the compression plan that its cache follows.
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
  // One of the two is set.
  std::optional<model::Checkpoint> checkpoint;
  std::optional<model::ModelShape> shape;
  std::string name;
  model::DecoderSpec spec;
  // Which rank's part; the whole where nobody says.
  plan::TpShard shard;
  // Resolved once, for that rank: everything that follows takes it. Exact
  // windows end at the model's length.
  std::shared_ptr<const plan::ResolvedPlan> plan;
  // What the rank runs on a CPU; null where the plan is only looked at.
  std::shared_ptr<const worker::ServedPlan> served;
  // The weights are the plan's: not so for a --kv-plan that is looked at before
  // it is applied.
  bool weights_fit = true;

  // Resolves it for `spec`: ResolvePlan's errors.
  absl::Status SetPlan(const kvasir::v1::KvPlan& source);
};

// Prompts lift latents where no bit may depend on it, and kernels can
// (worker::PromptsMayLift). Null: the CPU.
worker::ServeOptions ServeOptionsOf(const ModelOptions& options,
                                    const kernels::Device* device);
// For OpenDevice: the host's limit, and float16 on a GPU where the checkpoint
// is stored so.
DeviceWish DeviceWishOf(const ModelSource& source, const ModelOptions& options);

enum class PlanUse {
  kRun,   // refused unless this build serves the plan and the weights fit it
  kLook,  // any plan that has a meaning
};

// Opens what the flags name; reads headers, no weights. The plan is --kv-plan,
// else the folder's kv_plan.json, else the full-rank plan in --kv-dtype.
// `plan` is used in place of any of these. The flags' eviction, if any, comes
// on top.
absl::StatusOr<ModelSource> OpenModelSource(
    const ModelOptions& options, PlanUse use,
    std::optional<kvasir::v1::KvPlan> plan = std::nullopt,
    plan::TpShard shard = {});

// model::OwnCacheType of the checkpoint; bf16 if there is only a shape.
kvasir::v1::DataType OwnCacheType(const ModelSource& source);

// Bytes of the model's weights in a file, and those of attention among them
// (worker::CountWeightBytes counts what memory holds): as the checkpoint stores
// them; else what the plan's would take, as bf16 or in the type of the
// embedding of the checkpoint that is to be compressed.
struct WeightSizes {
  int64_t bytes = 0;
  int64_t attention_bytes = 0;

  void Add(const std::string& tensor, int64_t tensor_bytes);
};
WeightSizes WeightBytes(const ModelSource& source);

// The whole file; NOT_FOUND names it. Refuses more than `limit_bytes`.
absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         int64_t limit_bytes);

}  // namespace kvasir::cli
