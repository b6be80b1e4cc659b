// A step plan turned into the arrays that ops take: checked, on the host, in
// the plan's order.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention/paged_attention.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sample.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/layer_attention.h"
#include "worker/executor/sequence_table.h"

namespace kvasir::worker {

struct StepLimits {
  int64_t max_batched_tokens = 0;
  int64_t max_sequences = 0;
  int64_t vocab_size = 0;
  int64_t max_logprobs = 0;
};
// Of one sequence's sample.
inline constexpr int64_t kMaxBiases = 1024;
inline constexpr int64_t kMaxBannedIds = 1024;

// How large a step is; what the workspace depends on.
struct StepSizes {
  int64_t tokens = 0;     // T
  int64_t sequences = 0;  // B
  int64_t samples = 0;
  int64_t targets = 0;
  int64_t top = 0;  // most likely ids reported per sample
  int64_t biases = 0;
  int64_t banned = 0;
};
StepSizes LargestStep(const StepLimits& limits);

// Threads: one at a time. Reused from step to step.
// Errors: INVALID_ARGUMENT naming sequence, field, value and limit.
class StepBatch {
 public:
  struct Group {
    std::vector<int64_t> slots;  // [T]
    // [B], in the order of rows().
    std::vector<kernels::AttentionSequence> sequences;
  };
  // A row that is sampled. Pointers into pools are set once the pools have
  // their place: until then the counts and offsets say where.
  struct Sample {
    kernels::SampleRow row;
    int64_t first_bias = 0;
    int64_t first_banned = 0;
    int32_t table_row = 0;  // SequenceTable::Sequence::row
  };
  struct Output {
    uint64_t sequence_id = 0;
    int64_t num_rows = 0;
    int64_t sample = -1;  // index of its sample, -1: none
    int64_t first_target = 0;
    int64_t num_targets = 0;
  };
  // What a sample needs beyond the plan: penalty counts, token masks. Fills
  // the pointers of the row.
  using PrepareSample = absl::FunctionRef<absl::Status(
      const kvasir::v1::SequenceStep& step, SequenceTable::Sequence* sequence,
      kernels::SampleRow* row)>;

  StepBatch(StepLimits limits, const KvArenas& arenas)
      : limits_(limits),
        rings_(arenas.rings()),
        groups_(static_cast<size_t>(arenas.num_page_groups())),
        ring_slots_(rings_.size()) {}

  // Applies the plan's sequences to the table and lays out their tokens.
  absl::Status Build(const kvasir::v1::StepPlan& plan, SequenceTable* table,
                     kernels::Stream& stream, PrepareSample prepare);

  StepSizes sizes() const;

  // A token's id is ids[t] where token_sources[t] == t; else it lies in the
  // table of last sampled tokens: row token_sources[t] - max_batched_tokens.
  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<int32_t>& token_sources() const { return token_sources_; }
  const std::vector<int64_t>& positions() const { return positions_; }
  const std::vector<Group>& groups() const { return groups_; }
  // Prompts first.
  const std::vector<SequenceRows>& rows() const { return rows_; }
  // By ring of the arenas: where each token's exact row is kept, side page *
  // rows of a page + row [T]; below 0: behind the window before the next step.
  const std::vector<std::vector<int64_t>>& ring_slots() const {
    return ring_slots_;
  }

  // Token rows that are sampled after, and those with a target.
  const std::vector<int32_t>& sample_rows() const { return sample_rows_; }
  std::vector<Sample>& samples() { return samples_; }
  const std::vector<int32_t>& bias_ids() const { return bias_ids_; }
  const std::vector<float>& biases() const { return biases_; }
  const std::vector<int32_t>& banned_ids() const { return banned_ids_; }
  const std::vector<int32_t>& target_rows() const { return target_rows_; }
  const std::vector<int32_t>& target_ids() const { return target_ids_; }
  // In the plan's order, as the tokens.
  const std::vector<Output>& outputs() const { return outputs_; }

 private:
  void Clear();
  absl::Status Add(const kvasir::v1::SequenceStep& step, SequenceTable* table,
                   kernels::Stream& stream, PrepareSample prepare);
  absl::Status AddTokens(const kvasir::v1::SequenceStep& step,
                         const SequenceTable::Sequence& sequence);
  void AddAttention(const SequenceTable& table,
                    const SequenceTable::Sequence& sequence, int64_t first_row,
                    int64_t start);
  void AddRings(const SequenceTable::Sequence& sequence, int64_t start,
                int64_t num_rows);
  void PutPromptsFirst();
  absl::Status AddTargets(const kvasir::v1::SequenceStep& step,
                          int64_t first_row, Output* output);
  absl::Status AddSample(const kvasir::v1::SequenceStep& step,
                         SequenceTable::Sequence* sequence,
                         PrepareSample prepare);

  const StepLimits limits_;
  const std::vector<KvArenas::Ring> rings_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> token_sources_;
  std::vector<int64_t> positions_;
  std::vector<Group> groups_;
  std::vector<SequenceRows> rows_;
  std::vector<std::vector<int64_t>> ring_slots_;
  std::vector<int32_t> sample_rows_;
  std::vector<Sample> samples_;
  std::vector<int32_t> bias_ids_;
  std::vector<float> biases_;
  std::vector<int32_t> banned_ids_;
  std::vector<int32_t> target_rows_;
  std::vector<int32_t> target_ids_;
  std::vector<Output> outputs_;
};

}  // namespace kvasir::worker
