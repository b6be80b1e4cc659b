// Writes a compressed checkpoint (docs/artifact.md) beside its base: a folder
// that appears when it is complete, and not before.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/artifact/safetensors_writer.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct ArtifactOptions {
  std::filesystem::path out;
  // Without it a folder that exists is refused; with it a checkpoint is
  // replaced, and nothing else.
  bool overwrite = false;
  // Of the attention tensors; none: that of the base model's k_proj. Ranges of
  // codes are float32 always. All else is copied bit by bit.
  std::optional<model::TensorType> dtype;
  // Instead of copies of tensors that are as in the base model, and of
  // tokenizer files: links to them. The folder then needs the base where it
  // was, as it was: the index has fingerprints of the linked files.
  bool link_base = false;
  // Weights above this go into several files with an index.
  int64_t max_shard_bytes = int64_t{4} << 30;
  // Folder whose tokenizer files are copied; none: the base model's, if any.
  std::optional<std::filesystem::path> tokenizer;
  // Text of kv_plan.prediction.json, which nobody needs to run the model.
  std::optional<std::string> prediction;
};

struct ArtifactProgress {
  int64_t layers = 0;  // written
  int64_t total_layers = 0;
};

// Everything that makes WriteArtifact fail and is known before the long work:
// an output that exists or cannot be written, a base that is compressed
// already, too little space for what is copied.
absl::Status CheckArtifactOutput(const model::Checkpoint& base,
                                 const ArtifactOptions& options);

// All self_attn tensors of a layer in float32, by their names after
// "model.layers.{l}."; asked for once per layer, in order.
using LayerTensorSource =
    std::function<absl::StatusOr<TensorMap>(int64_t layer)>;

// Memory: one layer's attention tensors and a copy buffer. Tensors of the base
// that are no weights by their type (integers) are left out: no decoder reads
// them. The result is opened, and its tensors checked against the plan, before
// it gets its name.
// Errors: Cancelled when `on_progress` returns false; Unavailable with the
//   path; InvalidArgument for a tensor that is not finite in its stored type,
//   copied and linked ones included, and for a plan of another model; what the
//   source says. None leaves a trace of the output.
absl::Status WriteArtifact(
    const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
    const ArtifactOptions& options, const LayerTensorSource& source,
    const std::function<bool(const ArtifactProgress&)>& on_progress);

}  // namespace kvasir::compress
