// A model with random prompts and no scheduler: what `bench decode` and `bench
// prefill` measure.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/loaded_model.h"
#include "cli/options.h"
#include "worker/direct_runner.h"

namespace kvasir::cli {

struct BenchEngineOptions {
  ModelOptions model;
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 1;
  int64_t max_batched_tokens = 512;
};

// Owns: the model and the sequences.
// Threads: one.
class BenchEngine {
 public:
  // Loads, with progress on standard error.
  static absl::StatusOr<std::unique_ptr<BenchEngine>> Create(
      const BenchEngineOptions& options);

  // Begins a sequence of random tokens, in chunks of a step's size. The last
  // one samples.
  absl::Status Prefill(uint64_t sequence_id, int64_t num_tokens);
  // One step: a random token for each of the sequences 1 .. count.
  absl::Status Decode(int64_t count);
  void Release(uint64_t sequence_id) { runner_->Release(sequence_id); }

  // Bytes that steps read: weights by the stream's counter; cached latents of
  // every sequence in a decode step by the layout, from lengths.
  int64_t weight_bytes_read() const {
    return model_->rank().stream().weight_bytes_read();
  }
  int64_t kv_bytes_read() const { return kv_bytes_read_; }

  LoadedModel& model() { return *model_; }
  base::ThreadPool* pool() { return &model_->rank().stream().pool(); }

 private:
  BenchEngine() = default;
  int32_t RandomToken();

  std::unique_ptr<LoadedModel> model_;
  std::unique_ptr<worker::DirectRunner> runner_;
  int64_t max_batched_tokens_ = 0;
  int64_t kv_bytes_read_ = 0;
  uint64_t random_ = 1;
};

}  // namespace kvasir::cli
