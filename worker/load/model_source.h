// Opens the model that a command's flags name: a checkpoint (a folder or a GGUF
// file), or a shape with random weights; and the plan of its cache.
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
  // Exactly one of `checkpoint` and `shape` is set.
  std::optional<model::Checkpoint> checkpoint;
  std::optional<model::ModelShape> shape;
  std::string name;
  model::DecoderSpec spec;
  // The part of the model that this rank has; by default the whole model.
  plan::TpShard shard;
  // The plan for this rank, resolved only once. Its exact windows (recent
  // tokens that are kept uncompressed) are cut to the model's length.
  std::shared_ptr<const plan::ResolvedPlan> plan;
  // The plan with the attention programs that the rank runs on a CPU; null for
  // PlanUse::kLook.
  std::shared_ptr<const worker::ServedPlan> served;
  // Whether the checkpoint has the tensors that the plan needs. False only for
  // PlanUse::kLook, if --kv-plan names a plan for which the checkpoint was not
  // converted.
  bool weights_fit = true;

  // Returns `source`, resolved for `spec` and `shard`. Errors: those of
  // ResolvePlan.
  absl::StatusOr<std::shared_ptr<const plan::ResolvedPlan>> Resolve(
      const kvasir::v1::KvPlan& source) const;
  // Sets `plan` to Resolve(source).
  absl::Status SetPlan(const kvasir::v1::KvPlan& source);
};

// The options for worker::ServePlan. Prompts may lift latents (prompt_lift.h)
// unless --deterministic was given or worker::PromptsMayLift is false for the
// device. A null device means the CPU.
worker::ServeOptions ServeOptionsOf(const ModelOptions& options,
                                    const kernels::Device* device);
// The settings for OpenDevice: the host's memory limit, and float16 activations
// on a GPU if the checkpoint is stored in float16.
DeviceWish DeviceWishOf(const ModelSource& source, const ModelOptions& options);

enum class PlanUse {
  // to run the model: this build must be able to serve the plan, and the
  // checkpoint must have the plan's tensors
  kRun,
  kLook,  // to show the plan, which need only be valid
};

// Opens the model that the flags name. Reads headers, but no weights. The plan
// is `plan` if set, else --kv-plan, else the folder's kv_plan.json, else a
// full-rank plan with the data type --kv-dtype. The eviction flags, if any, are
// added to the plan.
absl::StatusOr<ModelSource> OpenModelSource(
    const ModelOptions& options, PlanUse use,
    std::optional<kvasir::v1::KvPlan> plan = std::nullopt,
    plan::TpShard shard = {});

// Makes a named plan of the model for this rank, and adds the eviction flags,
// if any. UNIMPLEMENTED if this build cannot serve the plan.
absl::StatusOr<std::shared_ptr<const worker::ServedPlan>> ServeNamedPlan(
    const ModelSource& source, const std::string& name,
    const ModelOptions& options, const worker::ServeOptions& serve);

// Returns model::OwnCacheType of the checkpoint, or bf16 for random weights.
kvasir::v1::DataType OwnCacheType(const ModelSource& source);

// The size of the model's weights in files, not in memory: in total and for
// attention. If the checkpoint lacks some of the plan's tensors, sizes are
// estimated from the data type of its embedding. For random weights, bf16
// is assumed.
struct WeightSizes {
  int64_t bytes = 0;
  int64_t attention_bytes = 0;

  void Add(const std::string& tensor, int64_t tensor_bytes);
};
WeightSizes WeightBytes(const ModelSource& source);

// Reads the whole file. NOT_FOUND if it cannot be opened, INVALID_ARGUMENT if
// it is no regular file or has more than `limit_bytes` bytes, DATA_LOSS if it
// cannot be read to its end. Errors name the file.
absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         int64_t limit_bytes);

}  // namespace kvasir::cli
