// A model with random prompts and no scheduler: what `bench decode` and `bench
// prefill` measure.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/executor/step/step_profile.h"
#include "worker/load/loaded_model.h"
#include "worker/load/model_options.h"
#include "worker/offline/direct_runner.h"

namespace kvasir::cli {

struct BenchEngineOptions {
  ModelOptions model;
  // In place of the model's own.
  std::optional<kvasir::v1::KvPlan> plan;
  // Beyond the positions of a shape, too: random weights know no text anyway.
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 1;
  int64_t max_batched_tokens = 512;
  // LoadRequest's.
  Membership* group = nullptr;
  bool quiet = false;  // no progress
};

// Owns: the model and the sequences.
// Threads: one.
class BenchEngine {
 public:
  // Loads, with progress on standard error. As a rank of a group: on a thread
  // of its own, while the others do, and so are all steps.
  static absl::StatusOr<std::unique_ptr<BenchEngine>> Create(
      const BenchEngineOptions& options);

  // Begins a sequence of random tokens, in chunks of a step's size. The last
  // one samples.
  absl::Status Prefill(uint64_t sequence_id, int64_t num_tokens);
  // Instead: random latents in every page, and sequences 1 .. count that begin
  // behind `num_tokens` of them. What a step costs does not depend on them.
  absl::Status FillWithRandomLatents(int64_t count, int64_t num_tokens);
  // The same sequences again, behind `num_tokens`; what is in the pages stays.
  absl::Status Restart(int64_t count, int64_t num_tokens);
  // One step: a random token for each of the sequences 1 .. count.
  absl::Status Decode(int64_t count);
  void Release(uint64_t sequence_id) { runner_->Release(sequence_id); }

  // Bytes that steps read: weights by the stream's counter; cached latents that
  // every sequence in a decode step sees by the layout, from lengths.
  int64_t weight_bytes_read() const {
    return model_->rank().stream().weight_bytes_read();
  }
  int64_t kv_bytes_read() const { return kv_bytes_read_; }
  // Of what all of Decode's steps have sampled: ranks of one group have the
  // same.
  uint64_t results_hash() const { return results_hash_; }

  // Takes the time of each part of the steps. What a mark costs (a look at the
  // clock) does not show in a step of milliseconds.
  worker::CpuStepProfile& profile() { return profile_; }

  bool quiet() const { return quiet_; }
  LoadedModel& model() { return *model_; }
  base::ThreadPool* pool() { return &model_->rank().pool(); }

 private:
  BenchEngine() = default;
  int32_t RandomToken();

  worker::CpuStepProfile profile_;  // outlives the model
  std::unique_ptr<LoadedModel> model_;
  std::unique_ptr<worker::DirectRunner> runner_;
  int64_t max_batched_tokens_ = 0;
  bool quiet_ = false;
  int64_t prompt_tokens_ = 0;  // of the latest sequences
  int64_t kv_bytes_read_ = 0;
  uint64_t results_hash_ = 0;
  uint64_t random_ = 1;
};

}  // namespace kvasir::cli
