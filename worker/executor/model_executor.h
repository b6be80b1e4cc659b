// The executor: a step plan becomes batch tensors, runs through the layers and
// the paged cache, and comes back as tokens. In three parts, a file each:
//
//   Stage    plan -> SequenceTable (deltas, checks) -> StepBatch (host arrays)
//            -> StepBlob -> one upload
//   Launch   page copies and evictions -> Decoder (layers) -> StepOutput (head,
//   sampler);
//            enqueues only: it allocates nothing and reads nothing back, and
//            steps of one StepBucket launch the same ops at the same addresses
//            (until a step's blob outgrows its memory, which moves it)
//            (A GPU's decode steps are captured where options say so, and
//            replayed: model_executor_graphs.cc.)
//   Collect  one read-back -> StepResult, totals
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache/images/sequence_image.h"
#include "cache/layout/layout.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "model/shapes/decoder_spec.h"
#include "worker/collective/collective.h"
#include "worker/executor/attention/mass_room.h"
#include "worker/executor/decoder.h"
#include "worker/executor/executor.h"
#include "worker/executor/graphs/step_graphs.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/pages/sequence_table.h"
#include "worker/executor/slot_evictions.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_profile.h"
#include "worker/executor/step_batch.h"
#include "worker/executor/step_output.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// One row of logits that a step computed, on the host.
struct LogitsRow {
  uint64_t sequence_id = 0;
  int64_t position = 0;  // logical, of the token that the logits follow
  absl::Span<const float> logits;  // [V]
};

// What steps have done since the executor was made, on its rank.
struct ExecutorTotals {
  // Keys lifted and rotated where they are read, and what prompts lift.
  double reconstruction_flops = 0;
  double prompt_lift_flops = 0;  // of those
  // Codes written whose range is the channel's own; of those, the ones that it
  // clamped.
  int64_t static_codes = 0;
  int64_t clamped_codes = 0;
  // Tokens whose attention was added to the scores of slots, by ScoringKind;
  // once in each page group that evicts by scores.
  int64_t scored_by_weights = 0;
  int64_t scored_again = 0;
  int64_t scored_without_room = 0;
  // Choosing slots and moving them. Of streams that have done so when the call
  // returns; others' would have to be told by the device.
  double eviction_seconds = 0;
  // Captured as graphs, and enqueued by one.
  int64_t captured_steps = 0;
  int64_t replayed_steps = 0;
};

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
  uint64_t last_step_id() const { return last_step_id_; }
  const ExecutorTotals& totals() const { return totals_; }
  // Of the last step.
  const StepBucket& bucket() const { return staged_.bucket; }
  const StepSizes& sizes() const { return staged_.sizes; }

 private:
  // Where a step's results are on the device.
  struct Results {
    kernels::DevicePtr<int32_t> token_ids;      // [samples]
    kernels::DevicePtr<float> logprobs;         // [samples]
    kernels::DevicePtr<int32_t> top_ids;        // [samples, top]
    kernels::DevicePtr<float> top_logprobs;     // [samples, top]
    kernels::DevicePtr<float> target_logprobs;  // [targets]
    kernels::DevicePtr<float> not_finite;       // [T], TokenBatch's
  };
  // What Launch needs of a step: counts, and addresses in the uploaded blob
  // (device memory). Reused from step to step.
  struct StagedStep {
    uint64_t step_id = 0;
    StepSizes sizes;
    StepBucket bucket;
    kernels::DevicePtr<const kernels::PagePair> copies;  // of bucket.copies
    kernels::DevicePtr<const int32_t> ids;               // [T]
    kernels::DevicePtr<const int32_t> token_sources;     // [T]
    kernels::DevicePtr<const int64_t> positions;         // [T]
    std::vector<AttentionBatch> groups;                  // by page group
    std::vector<kernels::DevicePtr<const int64_t>> ring_slots;  // by ring
    kernels::DevicePtr<const int32_t> sample_rows;
    kernels::DevicePtr<const kernels::SampleRow> samples;
    // [max seqs], rows of last_sampled()
    kernels::DevicePtr<const int32_t> carried;
    kernels::DevicePtr<const int32_t> target_rows;
    kernels::DevicePtr<const int32_t> target_ids;
    kernels::DevicePtr<const kernels::TokenHistory> histories;
    kernels::DevicePtr<const int32_t> zeros;  // [T]
    // [T]: 0, 1, ..., for the logits tap
    kernels::DevicePtr<const int32_t> all_rows;
    ResultLayout layout;
    Results results;
  };

  ModelExecutor(const Parts& parts, ModelWeights weights,
                ModelExecutorOptions options, KvArenas arenas);

  absl::Status CreateState();
  absl::Status CreateDecoder();
  // most_slots: where texts are endless, far below a sequence's length.
  MassRoomLimits MassLimits() const;
  void FindLikeLayers();
  absl::Status CreateTable();
  absl::Status PlanWorkspace();
  absl::Status ReserveBlob();

  // Stage.
  absl::Status Stage(const kvasir::v1::StepPlan& plan);
  absl::Status ApplyPlan(const kvasir::v1::StepPlan& plan);
  absl::Status ListMoves(const kvasir::v1::StepPlan& plan);
  absl::Status PrepareSample(const kvasir::v1::SequenceStep& step,
                             SequenceTable::Sequence* sequence,
                             kernels::SampleRow* row);
  absl::Status PreparePenalties(const kvasir::v1::SequenceStep& step,
                                SequenceTable::Sequence* sequence,
                                kernels::SampleRow* row);
  StepBucket BucketOfBatch() const;
  void Pack();
  // Where a page group's sequences lie in the blob; output once more, where it
  // is launched apart.
  struct SequencePlaces {
    StepBlob::Place<kernels::AttentionSequence> all;
    StepBlob::Place<kernels::AttentionSequence> output;
  };
  void PackSequences(kernels::DevicePtr<const int32_t> tables,
                     const std::vector<SequencePlaces>& places);
  void PackHistories(const StepBlob::Place<kernels::TokenHistory>& rows);
  void PackSamples(const StepBlob::Place<kernels::SampleRow>& rows,
                   const StepBlob::Place<int32_t>& carried);
  void PlaceResults(StagedStep* step) const;

  // Launch. With a counting workspace only its size.
  absl::Status Launch(const StagedStep& step, kernels::Workspace& workspace);
  absl::Status MovePages(const StagedStep& step, kernels::Workspace& workspace);
  absl::Status Evict(const StagedStep& step, size_t index,
                     kernels::Workspace& workspace);
  absl::Status GatherIds(const StagedStep& step,
                         kernels::DevicePtr<int32_t> ids,
                         kernels::Workspace& workspace);
  absl::Status CountHistories(const StagedStep& step,
                              kernels::Workspace& workspace);
  absl::Status RunTargets(const StagedStep& step, const HiddenStates& hidden,
                          kernels::Workspace& workspace);
  absl::Status RunSamples(const StagedStep& step, const HiddenStates& hidden,
                          kernels::Workspace& workspace);
  absl::Status CarrySampled(const StagedStep& step,
                            kernels::Workspace& workspace);
  absl::Status TapLogits(const StagedStep& step, const HiddenStates& hidden,
                         kernels::Workspace& workspace);

  // Launches what is staged, op by op or by a graph.
  absl::Status LaunchStep();
  bool WantsGraphs() const;
  bool OnlyDecodes(const StagedStep& step) const;
  absl::Status Capture(StepGraphs::Step* step);
  // Whether all ranks have captured. It waits for the device. An error is the
  // step's: nobody knows then what the others do.
  absl::Status AgreeOnCapture(bool own, bool* all);

  // Collect.
  absl::StatusOr<kvasir::v1::StepResult> Collect();
  kvasir::v1::StepResult ResultOf(const StagedStep& step) const;
  // `index` counts numbers from the offset.
  template <typename T>
  T ResultAt(int64_t offset_bytes, int64_t index) const;
  // Of a sequence whose tokens begin at `first_row` of the step.
  kvasir::v1::SequenceFault FaultOf(const StagedStep& step,
                                    const StepBatch::Output& output,
                                    int64_t first_row) const;
  void CountStep(int64_t num_tokens);
  int64_t& ScoredTokens(ScoringKind kind);

  // Keeps what the executor failed with, for itself and the other ranks.
  absl::Status Fail(const absl::Status& status);

  // What stays on the device from step to step, int32 and then results:
  //   | ids of the step [max tokens] | last sampled [max seqs, by table row] |
  //   | ResultLayout |
  kernels::DevicePtr<int32_t> source_ids() const {
    return state_.as<int32_t>();
  }
  kernels::DevicePtr<int32_t> last_sampled() const {
    return source_ids() + options_.max_batched_tokens;
  }
  kernels::DevicePtr<std::byte> results() const {
    return state_.as<std::byte>() + results_offset_bytes_;
  }

  // Constant after construction.
  const Parts parts_;
  const ModelExecutorOptions options_;
  const StepLimits limits_;
  ModelWeights weights_;
  KvArenas arenas_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<StepOutput> output_;
  kernels::DeviceBuffer workspace_memory_;
  kernels::DeviceBuffer state_;
  int64_t results_offset_bytes_ = 0;
  // Layers that make the same of the same slots: the first of them.
  struct LikeLayers {
    int64_t first = 0;
    int64_t count = 1;
  };
  std::vector<LikeLayers> like_layers_;
  std::vector<bool> scores_;  // by page group: layers evict by scores
  int64_t static_codes_per_token_ = 0;
  bool lifts_prompts_ = false;

  // The executing thread's.
  std::unique_ptr<SequenceTable> table_;
  StepBatch batch_;
  KvArenas::CopyList copies_;
  std::unique_ptr<SlotEvictions> evictions_;
  StepBlob blob_;
  StagedStep staged_;
  std::unique_ptr<StepGraphs> graphs_;  // null: steps are launched op by op
  bool in_flight_ = false;
  std::vector<std::byte> host_results_;
  std::vector<std::unique_ptr<PenaltyCounts>> idle_penalties_;
  uint64_t last_step_id_ = 0;
  ExecutorTotals totals_;
  absl::Status failure_;
  absl::flat_hash_map<std::string, kernels::DeviceBuffer> masks_;
};

}  // namespace kvasir::worker
