// Where a command's model comes from: a checkpoint folder or a shape with
// random weights, and the compression plan that its cache follows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "cache/plan.h"
#include "cli/options.h"
#include "model/checkpoint.h"
#include "model/decoder_spec.h"
#include "model/shapes.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::cli {

struct ModelSource {
  // One of the two is set.
  std::optional<model::Checkpoint> checkpoint;
  std::optional<model::ModelShape> shape;
  std::string name;
  model::DecoderSpec spec;
  cache::CacheShape cache_shape;
  // Validated against cache_shape.
  kvasir::v1::KvPlan plan;
};

// Opens what the flags name; reads headers, no weights. The plan is --kv-plan,
// else the folder's kv_plan.json, else the full-rank plan in --kv-dtype.
absl::StatusOr<ModelSource> OpenModelSource(const ModelOptions& options);

// Bytes of the model's weights as the checkpoint stores them, or as random
// ones would take.
int64_t WeightBytes(const ModelSource& source);

// The whole file; NOT_FOUND names it. Refuses more than `limit_bytes`.
absl::StatusOr<std::string> ReadTextFile(const std::string& path,
                                         int64_t limit_bytes);

}  // namespace kvasir::cli
