// The executor of one rank: turns a step plan into batch tensors, runs these
// through the layers and the paged cache, and returns tokens. A step has three
// parts, each run by one class:
//
//   Stager     checks the plan, packs one blob, uploads it once
//   Launcher   enqueues the ops, or a captured graph of them
//   Collector  reads the results back once
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache/images/sequence_image.h"
#include "cache/layout/layout.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "model/shapes/decoder_spec.h"
#include "worker/collective/collective.h"
#include "worker/executor/attention/mass_room.h"
#include "worker/executor/collector.h"
#include "worker/executor/decoder.h"
#include "worker/executor/executor.h"
#include "worker/executor/executor_totals.h"
#include "worker/executor/launcher.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/stager.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_profile.h"
#include "worker/executor/step/step_state.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

struct ModelExecutorOptions {
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;
  int64_t max_logprobs = 20;
  // See PagedAttentionParams::prompts_as_rows. A Rank sets it from
  // RankOptions::deterministic.
  bool prompts_as_rows = false;
  // The limit for the buffer of logits in bytes. The buffer is larger if the
  // minimum that StepOutput needs is above this limit.
  int64_t logits_bytes = int64_t{64} << 20;
  // Captures GPU steps as graphs and replays them: steps that only decode, copy
  // no pages and evict nothing. A step is captured when its sizes occur for the
  // second time; later steps of these sizes are one graph launch, which gives
  // the same bits. After a failed capture or replay, the executor logs this and
  // uses no more graphs. It uses no graphs at all if `profile` or a tap is set,
  // or if the collective cannot be captured.
  bool graphs = false;
  // For tests and debugging: receives every token's logits. If set, Enqueue
  // runs the head for every row and waits for the device.
  std::function<void(const LogitsRow&)> logits_tap;
  // Receives the keys of every token and layer
  // (LayerAttention::Parts::key_tap). Each layer then waits for the device.
  KeyTap key_tap;
  // Measures the time of each part of a step. May be null; otherwise it must
  // outlive the executor.
  StepProfile* profile = nullptr;
};

// Runs step plans on one rank.
//
// Owns: weights, arenas, workspace, block tables, last sampled tokens. The
//   objects in Parts belong to the caller and must outlive the executor.
// Threads: one at a time.
// Errors: after a failed step every later step returns FAILED_PRECONDITION.
//   Collective::Abort passes the error on to the other ranks.
class ModelExecutor final : public Executor {
 public:
  struct Parts {
    const model::DecoderSpec* spec = nullptr;
    const plan::ResolvedPlan* plan = nullptr;
    const cache::PageLayout* layout = nullptr;
    cache::PageCounts pages;
    cache::PageCounts host_pages;  // empty if there is no host pool
    kernels::Device* device = nullptr;
    kernels::Stream* stream = nullptr;
    Collective* collective = nullptr;
  };

  // Allocates everything that steps will use. `weights` come from LoadWeights
  // for the same plan. RESOURCE_EXHAUSTED, with the sizes, if memory does not
  // suffice.
  static absl::StatusOr<std::unique_ptr<ModelExecutor>> Create(
      const Parts& parts, ModelWeights weights, ModelExecutorOptions options);
  ~ModelExecutor() override;

  // Moves the weights out, for another executor. After that this executor
  // cannot be used.
  ModelWeights TakeWeights() && { return std::move(weights_); }

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override;
  absl::StatusOr<kvasir::v1::StepResult> Await() override;
  bool is_asynchronous() const override {
    return parts_.device->kind() != kernels::DeviceKind::kCpu;
  }

  // `allowed` [ceil(V / 32)] has one bit for each token id, which is set if the
  // id may be sampled: bit id % 32 of word id / 32. Replaces a mask of the same
  // name. FAILED_PRECONDITION while a step is in flight, because the step may
  // be reading the mask.
  absl::Status RegisterTokenMask(std::string name,
                                 absl::Span<const uint32_t> allowed);

  const ModelExecutorOptions& options() const { return options_; }
  // Whether prompts lift latents in some layer (prompt_lift.h).
  bool lifts_prompts() const { return lifts_prompts_; }
  // Whether attention gives a token the same bits in a prompt chunk as in a
  // step with only this token.
  bool prompts_are_rows() const {
    return options_.prompts_as_rows ||
           parts_.device->kind() == kernels::DeviceKind::kCpu;
  }
  std::vector<Decoder::LayersKernels> attention_kernels() const {
    return decoder_->attention_kernels();
  }
  // Identifies the executor's arithmetic: executors with equal ids compute the
  // same bits. A request may move only between such executors.
  std::string numerics_id() const;
  // See ModelWeights::matrix_bytes and ModelWeights::rounded_bytes.
  int64_t matrix_bytes() const { return weights_.matrix_bytes; }
  int64_t rounded_bytes() const { return weights_.rounded_bytes; }
  // See KvArenas::bytes_per_token.
  double kv_bytes_per_token() const { return arenas_.bytes_per_token(); }
  const KvArenas& arenas() const { return arenas_; }
  const cache::PageLayout& layout() const { return *parts_.layout; }
  const kernels::DeviceAllocator& allocator() const {
    return parts_.device->allocator();
  }
  // The bytes per token of an uncompressed bf16 cache, divided by
  // kv_bytes_per_token().
  double kv_compression_ratio() const;
  // Calls KvArenas::ReadPositions. FAILED_PRECONDITION while a step is in
  // flight.
  absl::StatusOr<std::vector<uint32_t>> ReadPositions(
      int64_t layer, absl::Span<const int32_t> pages, int64_t num_slots) const;
  // ReadImage and WriteImage convert the host pages of a preempted sequence
  // (its image) to bytes (the payload in page_image.h) and back. Read an image
  // after awaiting the step that copies pages to the host pool. Write an image
  // before enqueuing the step that copies the pages back. FAILED_PRECONDITION
  // while a step is in flight.
  absl::StatusOr<std::string> ReadImage(
      const cache::SequenceImage& image) const;
  // INVALID_ARGUMENT for a payload of the wrong size.
  absl::Status WriteImage(const cache::SequenceImage& image,
                          absl::string_view payload);

  // Measures the speed of copies from the pool to the host pool; 0 if there
  // is no host pool. Call it before the first step, because it overwrites
  // host pages.
  absl::StatusOr<double> MeasureCopyBytesPerSecond();
  uint64_t last_step_id() const { return stager_->last_step_id(); }
  const ExecutorTotals& totals() const { return totals_; }
  // The bucket and the sizes of the last step.
  const StepBucket& bucket() const { return stager_->staged().bucket; }
  const StepSizes& sizes() const { return stager_->staged().sizes; }

 private:
  ModelExecutor(const Parts& parts, ModelWeights weights,
                ModelExecutorOptions options, KvArenas arenas, StepState state);

  absl::Status CreateDecoder();
  absl::Status CreateStepParts();
  // Limits for RoomForMass. most_slots is at most the pool's size, which may be
  // far below max_model_len.
  MassRoomLimits MassLimits() const;
  // Records the failure and aborts the collective with it.
  absl::Status Fail(const absl::Status& status);

  // Constant after construction.
  const Parts parts_;
  const ModelExecutorOptions options_;
  const StepLimits limits_;
  ModelWeights weights_;
  const KvArenas arenas_;
  const StepState state_;
  bool lifts_prompts_ = false;

  // Used only by the executing thread. `decoder_` is declared before the
  // members that point to it.
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Stager> stager_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<Collector> collector_;
  bool in_flight_ = false;
  ExecutorTotals totals_;
  absl::Status failure_;
};

}  // namespace kvasir::worker
