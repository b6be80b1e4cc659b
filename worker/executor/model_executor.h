// The executor: a step plan becomes batch tensors, runs through the layers and
// the paged cache, and comes back as tokens.
//
//   plan -> SequenceTable (deltas, checks) -> StepBatch (host arrays)
//        -> Decoder (layers) -> StepOutput (head, sampler) -> StepResult
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/layout.h"
#include "kernels/device/allocator.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/executor/decoder.h"
#include "worker/executor/executor.h"
#include "worker/executor/kv_arenas.h"
#include "worker/executor/sequence_table.h"
#include "worker/executor/step_batch.h"
#include "worker/executor/step_output.h"
#include "worker/executor/step_profile.h"
#include "worker/ranks/collective.h"
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
};

struct ModelExecutorOptions {
  int64_t max_model_len = 0;
  int64_t max_num_seqs = 0;
  int64_t max_batched_tokens = 0;
  int64_t max_logprobs = 20;
  // Logits held at a time (StepOutput); one sample's at least.
  int64_t logits_bytes = int64_t{64} << 20;
  // For tests and debugging: hears every token's logits. Every row then meets
  // the head. Called from Execute.
  std::function<void(const LogitsRow&)> logits_tap;
  // Takes the time of each part of a step, or null; outlives the executor.
  StepProfile* profile = nullptr;
};

// Owns: weights, arenas, workspace, block tables, last sampled tokens. What
//   Parts points to is the caller's and outlives it.
// Threads: one at a time.
// Errors: after a failed Execute every other one is FAILED_PRECONDITION, and
//   the other ranks hear of it.
class ModelExecutor final : public Executor {
 public:
  struct Parts {
    const model::DecoderSpec* spec = nullptr;
    const kvasir::v1::KvPlan* plan = nullptr;
    const cache::PageLayout* layout = nullptr;
    cache::PageCounts pages;
    kernels::DeviceAllocator* allocator = nullptr;
    kernels::Stream* stream = nullptr;
    Collective* collective = nullptr;
  };

  // Allocates everything that steps will use. `weights` are of the parts' plan,
  // which is served (LoadWeights). RESOURCE_EXHAUSTED with the numbers when
  // memory does not suffice.
  static absl::StatusOr<std::unique_ptr<ModelExecutor>> Create(
      const Parts& parts, ModelWeights weights, ModelExecutorOptions options);

  absl::StatusOr<kvasir::v1::StepResult> Execute(
      const kvasir::v1::StepPlan& plan) override;

  // `allowed`: bit id % 32 of word id / 32 for ids that may be sampled,
  // [ceil(V / 32)]. Replaces a mask of the same name.
  absl::Status RegisterTokenMask(std::string name,
                                 absl::Span<const uint32_t> allowed);
  void UnregisterTokenMask(const std::string& name);

  const ModelExecutorOptions& options() const { return options_; }
  const std::string& weights_id() const { return weights_.weights_id; }
  // Whether prompts of some layer lift latents (prompt_lift.h).
  bool lifts_prompts() const;
  // Names the arithmetic: requests may move only between executors of one id.
  std::string numerics_id() const;
  // Bytes of weights that one step streams, whatever its batch.
  int64_t matrix_bytes() const { return weights_.matrix_bytes; }
  int64_t workspace_bytes() const {
    return static_cast<int64_t>(workspace_memory_.bytes());
  }
  // Of the arenas, as allocated.
  double kv_bytes_per_token() const { return arenas_.bytes_per_token(); }
  const KvArenas& arenas() const { return arenas_; }
  uint64_t last_step_id() const { return last_step_id_; }
  const ExecutorTotals& totals() const { return totals_; }

 private:
  // Results of a step on the device.
  struct Results;
  // Host copies of them.
  struct HostResults;

  ModelExecutor(const Parts& parts, ModelWeights weights,
                ModelExecutorOptions options, KvArenas arenas);

  absl::Status CreateDecoder();
  void FindLikeLayers();
  absl::Status CreateTables();
  absl::Status PlanWorkspace();

  absl::Status ApplyPlan(const kvasir::v1::StepPlan& plan);
  absl::Status PrepareSample(const kvasir::v1::SequenceStep& step,
                             SequenceTable::Sequence* sequence,
                             kernels::SampleRow* row);
  absl::Status PreparePenalties(const kvasir::v1::SequenceStep& step,
                                SequenceTable::Sequence* sequence,
                                kernels::SampleRow* row);
  absl::Status CountHistory(const google::protobuf::RepeatedField<int32_t>& ids,
                            bool clear, int32_t* counts,
                            kernels::Workspace& workspace);

  // Everything on the device; with a counting workspace only its size.
  absl::Status RunStep(const StepSizes& sizes, kernels::Workspace& workspace,
                       Results* results);
  absl::Status PlaceTokens(const StepSizes& sizes,
                           kernels::Workspace& workspace, TokenBatch* batch);
  absl::Status RunSamples(const StepSizes& sizes, const HiddenStates& hidden,
                          kernels::Workspace& workspace, Results* results);
  absl::Status RunTargets(const StepSizes& sizes, const HiddenStates& hidden,
                          kernels::Workspace& workspace, Results* results);
  absl::Status CarrySampled(kernels::Workspace& workspace);
  absl::Status TapLogits(const StepSizes& sizes, const HiddenStates& hidden,
                         kernels::Workspace& workspace);

  // Of a sequence whose tokens begin at `first_row` of the step.
  static kvasir::v1::SequenceFault FaultOf(const StepBatch::Output& output,
                                           int64_t first_row,
                                           const HostResults& host);
  absl::StatusOr<kvasir::v1::StepResult> ReadResults(uint64_t step_id,
                                                     const StepSizes& sizes,
                                                     const Results& results);

  // Adds a step that has run to the totals.
  absl::Status CountStep(int64_t num_tokens);

  // The table of token sources on the device, int32:
  //   | ids of the step [max tokens] | last sampled [max seqs, by table row] |
  //   | sampled in this step [max seqs] |
  int32_t* last_sampled() const;
  int32_t* sampled_now() const;

  // Constant after construction.
  const Parts parts_;
  const ModelExecutorOptions options_;
  const StepLimits limits_;
  ModelWeights weights_;
  KvArenas arenas_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<StepOutput> output_;
  kernels::DeviceBuffer workspace_memory_;
  kernels::DeviceBuffer token_sources_;
  kernels::DeviceBuffer clamped_codes_;  // one int64, counts up
  // Layers that make the same of the same slots: the first of them.
  struct LikeLayers {
    int64_t first = 0;
    int64_t count = 1;
  };
  std::vector<LikeLayers> like_layers_;
  int64_t static_codes_per_token_ = 0;

  // The executing thread's.
  std::unique_ptr<SequenceTable> table_;
  StepBatch batch_;
  std::vector<AttentionBatch> attention_;   // by page group
  std::vector<const int64_t*> ring_slots_;  // by ring
  std::vector<std::unique_ptr<PenaltyCounts>> idle_penalties_;
  uint64_t last_step_id_ = 0;
  ExecutorTotals totals_;
  absl::Status failure_;
  absl::flat_hash_map<std::string, kernels::DeviceBuffer> masks_;
};

}  // namespace kvasir::worker
