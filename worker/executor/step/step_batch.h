// Checks a step plan and turns it into host arrays for the ops, in the plan's
// order.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/sampling/sample.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/executor/pages/sequence_table.h"
#include "worker/executor/step/step_layout.h"
#include "worker/executor/step/step_rows.h"

namespace kvasir::worker {

// The most entries in one sample's lists of biases and banned ids.
inline constexpr int64_t kMaxBiases = 1024;
inline constexpr int64_t kMaxBannedIds = 1024;

// The arrays of one step. The object is reused for each step.
//
// Threads: one at a time.
// Errors: INVALID_ARGUMENT naming sequence, field, value and limit.
class StepBatch {
 public:
  struct Group {
    std::vector<int64_t> slots;  // [T]
    // Each token's slot number within its sequence. Only in groups that evict.
    // [T]
    std::vector<int64_t> slot_positions;
    // The sequences, in the order of rows(). Their table pointers are null;
    // `tables` says where in StepBatch::tables() each sequence's tables begin.
    // [B]
    std::vector<kernels::AttentionSequence> sequences;
    struct Tables {
      int64_t pages = 0;
      int64_t side_pages = -1;  // negative: no side pages
    };
    std::vector<Tables> tables;
  };
  // A row to sample from. `row` has no pointers to biases and banned ids;
  // instead, `first_bias` and `first_banned` are indices in biases() and
  // banned_ids().
  struct Sample {
    kernels::SampleRow row;
    int64_t first_bias = 0;
    int64_t first_banned = 0;
    int32_t table_row = 0;  // see SequenceTable::Sequence::row
  };
  // Token ids to count for a sequence's penalties.
  struct History {
    int64_t first_id = 0;  // index in history_ids()
    int64_t num_ids = 0;
    kernels::DevicePtr<int32_t> counts;  // [V]
    bool clear = false;                  // whether to set `counts` to 0 first
  };
  struct Output {
    uint64_t sequence_id = 0;
    int64_t num_rows = 0;
    int64_t sample = -1;  // index in samples(); -1: no sample
    int64_t first_target = 0;
    int64_t num_targets = 0;
  };
  // Prepares a sample's penalty counts and token mask, which are not in the
  // plan, and sets the pointers in `row`.
  using PrepareSample = absl::FunctionRef<absl::Status(
      const kvasir::v1::SequenceStep& step, SequenceTable::Sequence* sequence,
      kernels::SampleRow* row)>;

  // `num_heads` is this rank's number of query heads. The arenas must outlive
  // the batch.
  StepBatch(StepLimits limits, const KvArenas& arenas, int64_t num_heads)
      : limits_(limits),
        arenas_(arenas),
        num_heads_(num_heads),
        rings_(arenas.rings()),
        groups_(static_cast<size_t>(arenas.num_page_groups())),
        ring_slots_(rings_.size()) {}

  // Applies the plan's sequences to `table` and fills the arrays with their
  // tokens.
  absl::Status Build(const kvasir::v1::StepPlan& plan, SequenceTable* table,
                     PrepareSample prepare);
  // Decides for which sequences attention keeps its weights
  // (kernels::PlaceWeights), in the page groups that evict. Call it
  // after Build.
  void PlaceWeights(int64_t most_weights, int64_t page_tokens);
  // Called by PrepareSample. Does nothing if `ids` is empty and `clear` is
  // false.
  void AddHistory(absl::Span<const int32_t> ids, bool clear,
                  kernels::DevicePtr<int32_t> counts);

  StepSizes sizes() const;

  // If token_sources()[t] is t, the id of token t is ids()[t]. Otherwise the id
  // is in StepState::last_sampled(), in row token_sources()[t] -
  // max_batched_tokens.
  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<int32_t>& token_sources() const { return token_sources_; }
  const std::vector<int64_t>& positions() const { return positions_; }
  const std::vector<Group>& groups() const { return groups_; }
  // Block tables and side pages of all sequences, one after the other.
  const std::vector<int32_t>& tables() const { return tables_; }
  // The rows of each sequence, in the plan's order, which puts prompts first.
  const std::vector<SequenceRows>& rows() const { return rows_; }
  bool has_prompts() const { return !rows_.empty() && rows_.front().prompt; }
  // The number of runs of consecutive output rows.
  int64_t output_runs() const { return output_runs_; }
  // For each of KvArenas::rings(): where each token's exact (uncompressed) row
  // is stored, in bytes from the start of the ring's arena. Negative if the row
  // is not stored, because no later step reads it. [T] each.
  const std::vector<std::vector<int64_t>>& ring_slots() const {
    return ring_slots_;
  }

  // For each sample, the token row to sample from.
  const std::vector<int32_t>& sample_rows() const { return sample_rows_; }
  const std::vector<Sample>& samples() const { return samples_; }
  const std::vector<int32_t>& bias_ids() const { return bias_ids_; }
  const std::vector<float>& biases() const { return biases_; }
  const std::vector<int32_t>& banned_ids() const { return banned_ids_; }
  const std::vector<int32_t>& history_ids() const { return history_ids_; }
  const std::vector<History>& histories() const { return histories_; }
  const std::vector<int32_t>& target_rows() const { return target_rows_; }
  const std::vector<int32_t>& target_ids() const { return target_ids_; }
  // The results that each sequence needs, in the plan's order.
  const std::vector<Output>& outputs() const { return outputs_; }

 private:
  void Clear();
  absl::Status Add(const kvasir::v1::SequenceStep& step, SequenceTable* table,
                   PrepareSample prepare);
  absl::Status AddTokens(const kvasir::v1::SequenceStep& step,
                         const SequenceTable::Sequence& sequence);
  int64_t AddTable(absl::Span<const int32_t> pages);
  void AddAttention(const kvasir::v1::SequenceStep& step,
                    const SequenceTable& table,
                    const SequenceTable::Sequence& sequence, int64_t first_row);
  void AddRings(const SequenceTable::Sequence& sequence, int64_t start,
                int64_t num_rows);
  absl::Status AddTargets(const kvasir::v1::SequenceStep& step,
                          int64_t first_row, Output* output);
  absl::Status AddSample(const kvasir::v1::SequenceStep& step,
                         SequenceTable::Sequence* sequence,
                         PrepareSample prepare);

  const StepLimits limits_;
  const KvArenas& arenas_;
  const int64_t num_heads_;
  const std::vector<KvArenas::Ring> rings_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> token_sources_;
  std::vector<int64_t> positions_;
  std::vector<Group> groups_;
  std::vector<int32_t> tables_;
  std::vector<SequenceRows> rows_;
  int64_t output_runs_ = 0;
  std::vector<std::vector<int64_t>> ring_slots_;
  std::vector<int32_t> sample_rows_;
  std::vector<Sample> samples_;
  std::vector<int32_t> bias_ids_;
  std::vector<float> biases_;
  std::vector<int32_t> banned_ids_;
  std::vector<int32_t> history_ids_;
  std::vector<History> histories_;
  std::vector<int32_t> target_rows_;
  std::vector<int32_t> target_ids_;
  std::vector<Output> outputs_;
};

}  // namespace kvasir::worker
