// Writes a compressed checkpoint (docs/artifact.md) as a new folder. The folder
// appears under its name only when it is complete.
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
  // If false, an existing folder is an error. If true, it is replaced, but only
  // if it is empty or holds a checkpoint.
  bool overwrite = false;
  // Type of the attention tensors; by default the type of the base model's
  // k_proj. The ranges of quantization codes are always float32. Tensors
  // outside the attention are copied bit by bit.
  std::optional<model::TensorType> dtype;
  // If true, tensors that equal those of the base model, and tokenizer files,
  // are linked instead of copied. The base folder must then keep its content
  // (the index has fingerprints of the files) and its place relative to `out`.
  bool link_base = false;
  // Weights that take more bytes than this in total are split into several
  // files with an index.
  int64_t max_shard_bytes = int64_t{4} << 30;
  // Folder whose tokenizer files are copied; by default the base model's
  // folder.
  std::optional<std::filesystem::path> tokenizer;
  // Content of the file kv_plan.prediction.json, which is not needed to run the
  // model. If not set, there is no such file.
  std::optional<std::string> prediction;
};

struct ArtifactProgress {
  int64_t layers = 0;  // layers written so far
  int64_t total_layers = 0;
};

// Checks, before the long work, for errors that WriteArtifact would return: an
// output that exists or cannot be written, a base model that is already
// compressed, and too little disk space for the copied tensors.
absl::Status CheckArtifactOutput(const model::Checkpoint& base,
                                 const ArtifactOptions& options);

// A function that returns all self_attn tensors of a layer in float32, by their
// names after "model.layers.{l}.". It is called once per layer, in order.
using LayerTensorSource =
    std::function<absl::StatusOr<TensorMap>(int64_t layer)>;

// Writes the checkpoint. Tensors of the base model whose type is not a weight
// type (such as integers) are left out, because no decoder reads them. Before
// the new folder gets its final name, it is opened as a checkpoint, and its
// tensors are checked against the plan.
// Memory: one layer's attention tensors and a copy buffer.
// Errors: Cancelled when `on_progress` returns false; Unavailable with the
//   path; InvalidArgument for a plan that was made for another model, and for a
//   tensor (new, copied or linked) that is not finite in its stored type;
//   errors of the LayerTensorSource. After an error nothing of the output is
//   left on the disk.
absl::Status WriteArtifact(
    const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
    const ArtifactOptions& options, const LayerTensorSource& source,
    const std::function<bool(const ArtifactProgress&)>& on_progress);

}  // namespace kvasir::compress
