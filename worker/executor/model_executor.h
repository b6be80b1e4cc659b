// The executor: a step plan becomes batch tensors, runs through the layers and
// the paged cache, and comes back as tokens. A step has three parts, each run
// by one class:
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
  // kernels::PagedAttentionParams'; of a rank, RankOptions::deterministic.
  bool prompts_as_rows = false;
  // Logits held at a time (StepOutput); one sample's at least.
  int64_t logits_bytes = int64_t{64} << 20;
  // A GPU's steps that only decode, copy no pages and evict nothing are
  // captured when one of their sizes comes for the second time, and replayed
  // from then on: the same bits by one call. A capture that fails is logged,
  // and none is tried again. Nothing is captured beside a profile or a tap, nor
  // with a collective that cannot be.
  bool graphs = false;
  // For tests and debugging: hears every token's logits. Every row then meets
  // the head and is read back: a tapped Launch waits for the device. Called
  // from Enqueue.
  std::function<void(const LogitsRow&)> logits_tap;
  // Takes the time of each part of a step, or null; outlives the executor.
  StepProfile* profile = nullptr;
};

// Owns: weights, arenas, workspace, block tables, last sampled tokens. What
//   Parts points to is the caller's and outlives it.
// Threads: one at a time.
// Errors: after a failed step every other one is FAILED_PRECONDITION, and the
//   other ranks hear of it.
class ModelExecutor final : public Executor {
 public:
  struct Parts {
    const model::DecoderSpec* spec = nullptr;
    const plan::ResolvedPlan* plan = nullptr;
    const cache::PageLayout* layout = nullptr;
    cache::PageCounts pages;
    cache::PageCounts host_pages;  // of the host pool; empty: none
    kernels::Device* device = nullptr;
    kernels::Stream* stream = nullptr;
    Collective* collective = nullptr;
  };

  // Allocates everything that steps will use. `weights` are of the parts' plan,
  // which is served (LoadWeights). RESOURCE_EXHAUSTED with the numbers when
  // memory does not suffice.
  static absl::StatusOr<std::unique_ptr<ModelExecutor>> Create(
      const Parts& parts, ModelWeights weights, ModelExecutorOptions options);
  ~ModelExecutor() override;

  // For another executor; this one is of no more use.
  ModelWeights TakeWeights() && { return std::move(weights_); }

  absl::Status Enqueue(const kvasir::v1::StepPlan& plan) override;
  absl::StatusOr<kvasir::v1::StepResult> Await() override;
  bool runs_behind() const override {
    return parts_.device->kind() != kernels::DeviceKind::kCpu;
  }

  // `allowed`: bit id % 32 of word id / 32 for ids that may be sampled,
  // [ceil(V / 32)]. Replaces a mask of the same name, which no step may be
  // reading: FAILED_PRECONDITION while one is in flight.
  absl::Status RegisterTokenMask(std::string name,
                                 absl::Span<const uint32_t> allowed);

  const ModelExecutorOptions& options() const { return options_; }
  // Whether prompts of some layer lift latents (prompt_lift.h).
  bool lifts_prompts() const { return lifts_prompts_; }
  // Whether attention has the same bits for a row in a prompt and alone.
  bool prompts_are_rows() const {
    return options_.prompts_as_rows ||
           parts_.device->kind() == kernels::DeviceKind::kCpu;
  }
  std::vector<Decoder::LayersKernels> attention_kernels() const {
    return decoder_->attention_kernels();
  }
  // Names the arithmetic: requests may move only between executors of one id.
  std::string numerics_id() const;
  // Bytes of weights that one step streams, whatever its batch.
  int64_t matrix_bytes() const { return weights_.matrix_bytes; }
  int64_t rounded_bytes() const { return weights_.rounded_bytes; }
  // KvArenas::bytes_per_token.
  double kv_bytes_per_token() const { return arenas_.bytes_per_token(); }
  const KvArenas& arenas() const { return arenas_; }
  const cache::PageLayout& layout() const { return *parts_.layout; }
  const kernels::DeviceAllocator& allocator() const {
    return parts_.device->allocator();
  }
  // Bytes of a token in a dense bf16 cache, divided by kv_bytes_per_token().
  double kv_compression_ratio() const;
  // KvArenas::ReadPositions; FAILED_PRECONDITION while a step is in flight.
  absl::StatusOr<std::vector<uint32_t>> ReadPositions(
      int64_t layer, absl::Span<const int32_t> pages, int64_t num_slots) const;
  // The pages of an image as the bytes behind its header (page_image.h), and
  // back. The step that copied them out has been awaited, the one that copies
  // them in has not been enqueued: FAILED_PRECONDITION while one is in flight.
  absl::StatusOr<std::string> ReadImage(
      const cache::SequenceImage& image) const;
  // INVALID_ARGUMENT for a payload of another size.
  absl::Status WriteImage(const cache::SequenceImage& image,
                          absl::string_view payload);

  // Of copies between the pool and the host pool, measured: before the first
  // step, for it writes to host pages. 0 where there is no host pool.
  absl::StatusOr<double> MeasureCopyBytesPerSecond();
  uint64_t last_step_id() const { return stager_->last_step_id(); }
  const ExecutorTotals& totals() const { return totals_; }
  // Of the last step.
  const StepBucket& bucket() const { return stager_->staged().bucket; }
  const StepSizes& sizes() const { return stager_->staged().sizes; }

 private:
  ModelExecutor(const Parts& parts, ModelWeights weights,
                ModelExecutorOptions options, KvArenas arenas, StepState state);

  absl::Status CreateDecoder();
  absl::Status CreateStepParts();
  // most_slots: far below a sequence's length if texts are endless.
  MassRoomLimits MassLimits() const;
  // Keeps what the executor failed with, and aborts the collective with it.
  absl::Status Fail(const absl::Status& status);

  // Constant after construction.
  const Parts parts_;
  const ModelExecutorOptions options_;
  const StepLimits limits_;
  ModelWeights weights_;
  const KvArenas arenas_;
  const StepState state_;
  bool lifts_prompts_ = false;

  // Used by the executing thread. Decoder before the parts that point to it.
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Stager> stager_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<Collector> collector_;
  bool in_flight_ = false;
  ExecutorTotals totals_;
  absl::Status failure_;
};

}  // namespace kvasir::worker
