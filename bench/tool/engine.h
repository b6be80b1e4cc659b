// A model that runs random prompts without a scheduler, for `bench decode` and
// `bench prefill`.
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
  // If set, this plan is used instead of the model's own.
  std::optional<kvasir::v1::KvPlan> plan;
  // May exceed the model's own maximum length, because with random weights
  // positions do not matter.
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 1;
  int64_t max_batched_tokens = 512;
  // See LoadRequest::group.
  Membership* group = nullptr;
  bool quiet = false;
};

// Owns: the model and the sequences.
// Threads: used by one thread only.
class BenchEngine {
 public:
  // Loads the model and shows progress on standard error. In a tensor-parallel
  // group, each rank must load and run its steps on a thread of its own, at the
  // same time as the others.
  static absl::StatusOr<std::unique_ptr<BenchEngine>> Create(
      const BenchEngineOptions& options);

  // Starts a sequence of random tokens and computes it in chunks of a step's
  // size. The last chunk samples a token.
  absl::Status Prefill(uint64_t sequence_id, int64_t num_tokens);
  // Faster than Prefill: fills every page with random latents and starts
  // sequences 1 .. count as if each had computed `num_tokens`. The time of a
  // step does not depend on the values.
  absl::Status FillWithRandomLatents(int64_t count, int64_t num_tokens);
  // Sets the sequences back to `num_tokens` tokens; the pages keep their
  // content.
  absl::Status Restart(int64_t count, int64_t num_tokens);
  // Runs one step with a random token for each of the sequences 1 .. count.
  absl::Status Decode(int64_t count);
  void Release(uint64_t sequence_id) { runner_->Release(sequence_id); }

  // The bytes that the steps have read: weights by the stream's counter, cached
  // latents by the layout and the lengths of the sequences.
  int64_t weight_bytes_read() const {
    return model_->rank().stream().weight_bytes_read();
  }
  int64_t kv_bytes_read() const { return kv_bytes_read_; }
  // A hash of all tokens that Decode has sampled. It must be equal on all ranks
  // of a group.
  uint64_t results_hash() const { return results_hash_; }

  // The measured time of each part of the steps. Reading the clock takes no
  // noticeable time in steps of milliseconds.
  worker::CpuStepProfile& profile() { return profile_; }

  bool quiet() const { return quiet_; }
  LoadedModel& model() { return *model_; }
  base::ThreadPool* pool() { return &model_->rank().pool(); }

 private:
  BenchEngine() = default;
  int32_t RandomToken();

  worker::CpuStepProfile profile_;  // must outlive the model
  std::unique_ptr<LoadedModel> model_;
  std::unique_ptr<worker::DirectRunner> runner_;
  int64_t max_batched_tokens_ = 0;
  bool quiet_ = false;
  // the number of tokens with which the present sequences were started
  int64_t prompt_tokens_ = 0;
  int64_t kv_bytes_read_ = 0;
  uint64_t results_hash_ = 0;
  uint64_t random_ = 1;
};

}  // namespace kvasir::cli
