#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "compress/artifact/safetensors_writer.h"
#include "model/shapes/shapes.h"

namespace kvasir::compress {

struct RandomCheckpointOptions {
  model::ModelShape shape;
  uint64_t seed = 1;
  model::TensorType dtype = model::TensorType::kBF16;
  std::filesystem::path out;
  // Folder whose tokenizer files are copied; by default the checkpoint has no
  // tokenizer.
  std::optional<std::filesystem::path> tokenizer;
  // Weights that take more bytes than this in total are split into several
  // files with an index.
  int64_t max_shard_bytes = int64_t{4} << 30;
  int threads = 1;
  // If false, an existing folder that holds weights is an error.
  bool overwrite = false;
};

struct RandomCheckpointProgress {
  int64_t written_bytes = 0;
  int64_t total_bytes = 0;
};

// Writes a checkpoint of random weights piece by piece, so that a model of any
// size needs only a few MB of memory. The weights depend only on shape and
// seed; model/checkpoint/random_weights.h makes the same weights in memory. The
// file by which the folder is recognized as a checkpoint (model.safetensors, or
// the index of shards) is written last. `on_progress` stops the writing by
// returning false.
// Errors: InvalidArgument for an invalid shape; AlreadyExists if the folder
//   holds weights and may not be overwritten; NotFound if the tokenizer folder
//   has no tokenizer.json; Cancelled when stopped; Unavailable with the path.
absl::Status WriteRandomCheckpoint(
    const RandomCheckpointOptions& options,
    const std::function<bool(const RandomCheckpointProgress&)>& on_progress);

}  // namespace kvasir::compress
