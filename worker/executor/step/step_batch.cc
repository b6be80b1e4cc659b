#include "worker/executor/step/step_batch.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention/ops.h"
#include "worker/executor/step/sampling_limits.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::SampleRequest;
using kvasir::v1::SequenceStep;

absl::Status Wrong(uint64_t sequence_id, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("step plan: sequence ", sequence_id, ": ", what));
}

absl::Status CheckIds(const SequenceStep& step, const char* field,
                      const google::protobuf::RepeatedField<int32_t>& ids,
                      int64_t vocab_size) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      return Wrong(step.sequence_id(),
                   absl::StrCat(field, ": an id must be 0 to ", vocab_size - 1,
                                ", but is ", id));
    }
  }
  return absl::OkStatus();
}

// Each check states the allowed values instead of the wrong ones. So NaN is
// refused, because comparisons with NaN are false.
absl::Status CheckNumbers(const SequenceStep& step) {
  const SampleRequest& sample = step.sample();
  struct Row {
    const char* field;
    double value;
    bool ok;
    const char* want;
  };
  const auto finite = [](float value) { return std::isfinite(value); };
  const Row rows[] = {
      {"temperature", sample.temperature(),
       finite(sample.temperature()) && sample.temperature() >= 0,
       "0 or more and finite"},
      {"top_k", static_cast<double>(sample.top_k()), sample.top_k() >= 0,
       "0 or more"},
      {"top_p", sample.top_p(), sample.top_p() > 0 && sample.top_p() <= 1,
       "above 0, at most 1"},
      {"min_p", sample.min_p(), sample.min_p() >= 0 && sample.min_p() <= 1,
       "0 to 1"},
      {"repetition_penalty", sample.repetition_penalty(),
       sample.repetition_penalty() >= kMinRepetitionPenalty &&
           sample.repetition_penalty() <= kMaxRepetitionPenalty,
       "0.01 to 100"},
      {"presence_penalty", sample.presence_penalty(),
       finite(sample.presence_penalty()), "a finite number"},
      {"frequency_penalty", sample.frequency_penalty(),
       finite(sample.frequency_penalty()), "a finite number"},
  };
  for (const Row& row : rows) {
    if (!row.ok) {
      return Wrong(step.sequence_id(),
                   absl::StrCat(row.field, ": must be ", row.want, ", but is ",
                                row.value));
    }
  }
  return absl::OkStatus();
}

kernels::SampleRow RowOf(const SampleRequest& sample) {
  kernels::SampleRow row;
  row.temperature = sample.temperature();
  row.top_k = sample.top_k();
  row.top_p = sample.top_p();
  row.min_p = sample.min_p();
  row.repetition_penalty = sample.repetition_penalty();
  row.presence_penalty = sample.presence_penalty();
  row.frequency_penalty = sample.frequency_penalty();
  row.num_biases = sample.logit_bias_size();
  row.num_banned = sample.banned_ids_size();
  row.seed = sample.seed();
  row.sample_index = sample.sample_index();
  row.position = sample.position();
  row.num_logprobs = sample.num_logprobs();
  return row;
}

}  // namespace

StepSizes StepBatch::sizes() const {
  StepSizes sizes;
  sizes.tokens = static_cast<int64_t>(ids_.size());
  sizes.sequences = static_cast<int64_t>(outputs_.size());
  sizes.samples = static_cast<int64_t>(samples_.size());
  sizes.targets = static_cast<int64_t>(target_ids_.size());
  sizes.histories = static_cast<int64_t>(histories_.size());
  for (const Sample& sample : samples_) {
    sizes.top = std::max<int64_t>(sizes.top, sample.row.num_logprobs);
  }
  return sizes;
}

void StepBatch::Clear() {
  ids_.clear();
  token_sources_.clear();
  positions_.clear();
  tables_.clear();
  rows_.clear();
  output_runs_ = 0;
  for (Group& group : groups_) {
    group.slots.clear();
    group.slot_positions.clear();
    group.sequences.clear();
    group.tables.clear();
  }
  for (std::vector<int64_t>& slots : ring_slots_) slots.clear();
  sample_rows_.clear();
  samples_.clear();
  bias_ids_.clear();
  biases_.clear();
  banned_ids_.clear();
  history_ids_.clear();
  histories_.clear();
  target_rows_.clear();
  target_ids_.clear();
  outputs_.clear();
}

absl::Status StepBatch::Build(const kvasir::v1::StepPlan& plan,
                              SequenceTable* table, PrepareSample prepare) {
  Clear();
  if (plan.sequences_size() > limits_.max_sequences) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step plan has ", plan.sequences_size(),
                     " sequences, the limit is ", limits_.max_sequences));
  }
  int64_t num_tokens = 0;
  for (const SequenceStep& step : plan.sequences()) {
    num_tokens += step.num_tokens();
  }
  if (num_tokens > limits_.max_batched_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step plan has ", num_tokens, " tokens, the limit is ",
                     limits_.max_batched_tokens));
  }
  table->BeginStep();
  for (const SequenceStep& step : plan.sequences()) {
    KVASIR_RETURN_IF_ERROR(Add(step, table, prepare));
  }
  return absl::OkStatus();
}

absl::Status StepBatch::Add(const SequenceStep& step, SequenceTable* table,
                            PrepareSample prepare) {
  for (const Output& output : outputs_) {
    if (output.sequence_id == step.sequence_id()) {
      return Wrong(step.sequence_id(), "is in the step twice");
    }
  }
  if (step.prompt() && !rows_.empty() && !rows_.back().prompt) {
    return Wrong(step.sequence_id(),
                 "is a prompt after output; prompts must come first");
  }
  KVASIR_ASSIGN_OR_RETURN(SequenceTable::Sequence* const sequence,
                          table->Apply(step));
  const int64_t first_row = static_cast<int64_t>(ids_.size());
  KVASIR_RETURN_IF_ERROR(AddTokens(step, *sequence));
  AddAttention(step, *table, *sequence, first_row);
  Output output;
  output.sequence_id = step.sequence_id();
  output.num_rows = static_cast<int64_t>(ids_.size()) - first_row;
  if (!step.prompt() && (rows_.empty() || rows_.back().prompt)) ++output_runs_;
  rows_.push_back({first_row, output.num_rows, step.prompt()});
  KVASIR_RETURN_IF_ERROR(AddTargets(step, first_row, &output));
  if (step.has_sample()) {
    output.sample = static_cast<int64_t>(samples_.size());
    KVASIR_RETURN_IF_ERROR(AddSample(step, sequence, prepare));
  }
  outputs_.push_back(output);
  return absl::OkStatus();
}

absl::Status StepBatch::AddTokens(const SequenceStep& step,
                                  const SequenceTable::Sequence& sequence) {
  const int64_t start = static_cast<int64_t>(step.logical_start());
  const bool last_sampled = step.input_is_last_sampled();
  if (last_sampled) {
    if (step.num_tokens() != 1 || step.token_ids_size() != 0 ||
        !sequence.has_sampled) {
      return Wrong(step.sequence_id(),
                   absl::StrCat("input_is_last_sampled requires 1 token "
                                "without an id, and a sequence "
                                "that has been sampled from; the step has ",
                                step.num_tokens(), " tokens and ",
                                step.token_ids_size(), " ids",
                                sequence.has_sampled
                                    ? ""
                                    : ", and the sequence has no sample yet"));
    }
  } else if (static_cast<uint32_t>(step.token_ids_size()) !=
             step.num_tokens()) {
    return Wrong(step.sequence_id(),
                 absl::StrCat("num_tokens is ", step.num_tokens(),
                              ", but the number of token_ids is ",
                              step.token_ids_size()));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckIds(step, "token_ids", step.token_ids(), limits_.vocab_size));
  for (int64_t i = 0; i < step.num_tokens(); ++i) {
    const int64_t row = static_cast<int64_t>(ids_.size());
    ids_.push_back(last_sampled ? 0 : step.token_ids(static_cast<int>(i)));
    token_sources_.push_back(static_cast<int32_t>(
        last_sampled ? limits_.max_batched_tokens + sequence.row : row));
    positions_.push_back(start + i);
  }
  return absl::OkStatus();
}

int64_t StepBatch::AddTable(absl::Span<const int32_t> pages) {
  const auto first = static_cast<int64_t>(tables_.size());
  tables_.insert(tables_.end(), pages.begin(), pages.end());
  return first;
}

void StepBatch::AddHistory(absl::Span<const int32_t> ids, bool clear,
                           kernels::DevicePtr<int32_t> counts) {
  if (ids.empty() && !clear) return;
  histories_.push_back({static_cast<int64_t>(history_ids_.size()),
                        static_cast<int64_t>(ids.size()), counts, clear});
  history_ids_.insert(history_ids_.end(), ids.begin(), ids.end());
}

void StepBatch::AddAttention(const SequenceStep& step,
                             const SequenceTable& table,
                             const SequenceTable::Sequence& sequence,
                             int64_t first_row) {
  const int64_t num_rows = static_cast<int64_t>(ids_.size()) - first_row;
  const auto start = static_cast<int64_t>(step.logical_start());
  for (size_t group = 0; group < groups_.size(); ++group) {
    kernels::AttentionSequence attention;
    attention.first_row = first_row;
    attention.num_rows = num_rows;
    const SequenceTable::Table& pages = sequence.tables[group];
    attention.first_slot = pages.slots - num_rows;
    attention.evicted = start - attention.first_slot;
    if (step.first_counted_size() > 0) {
      const auto counted =
          static_cast<int64_t>(step.first_counted(static_cast<int>(group)));
      attention.first_counted_row = std::max<int64_t>(0, counted - start);
    }
    attention.first_live_index = pages.first_live;
    groups_[group].sequences.push_back(attention);
    Group::Tables& tables = groups_[group].tables.emplace_back();
    tables.pages = AddTable(pages.pages);
    if (!pages.side_pages.empty()) {
      tables.side_pages = AddTable(pages.side_pages);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      groups_[group].slots.push_back(table.SlotOf(
          sequence, static_cast<int64_t>(group), attention.first_slot + i));
    }
    if (!arenas_.evicts(static_cast<int64_t>(group))) continue;
    for (int64_t i = 0; i < num_rows; ++i) {
      groups_[group].slot_positions.push_back(attention.first_slot + i);
    }
  }
  AddRings(sequence, start, num_rows);
}

void StepBatch::PlaceWeights(int64_t most_weights, int64_t page_tokens) {
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (!arenas_.evicts(static_cast<int64_t>(group))) continue;
    kernels::PlaceWeights(num_heads_, most_weights, page_tokens,
                          absl::MakeSpan(groups_[group].sequences));
  }
}

// A ring stores the rows of the sinks and of the latest `window` tokens. Other
// tokens of this step get no place (-1), because later tokens of the step would
// overwrite them.
void StepBatch::AddRings(const SequenceTable::Sequence& sequence, int64_t start,
                         int64_t num_rows) {
  for (size_t r = 0; r < rings_.size(); ++r) {
    const kernels::ExactSlots ring = rings_[r].slots();
    const std::vector<int32_t>& pages =
        sequence.tables[static_cast<size_t>(rings_[r].page_group)].side_pages;
    const int64_t first_kept = start + num_rows - ring.window;
    for (int64_t p = start; p < start + num_rows; ++p) {
      if (p >= ring.sinks && p < first_kept) {
        ring_slots_[r].push_back(-1);
        continue;
      }
      ring_slots_[r].push_back(
          ring.PlaceOfRow(ring.RowOf(p, /*evicted=*/0), pages.data())
              .offset_bytes);
    }
  }
}

absl::Status StepBatch::AddTargets(const SequenceStep& step, int64_t first_row,
                                   Output* output) {
  if (static_cast<uint32_t>(step.target_ids_size()) > step.num_tokens()) {
    return Wrong(step.sequence_id(),
                 absl::StrCat("has ", step.target_ids_size(),
                              " target_ids, at most num_tokens = ",
                              step.num_tokens(), " are allowed"));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckIds(step, "target_ids", step.target_ids(), limits_.vocab_size));
  output->first_target = static_cast<int64_t>(target_ids_.size());
  output->num_targets = step.target_ids_size();
  for (int i = 0; i < step.target_ids_size(); ++i) {
    target_rows_.push_back(static_cast<int32_t>(first_row + i));
    target_ids_.push_back(step.target_ids(i));
  }
  return absl::OkStatus();
}

absl::Status StepBatch::AddSample(const SequenceStep& step,
                                  SequenceTable::Sequence* sequence,
                                  PrepareSample prepare) {
  const SampleRequest& request = step.sample();
  const uint64_t id = step.sequence_id();
  KVASIR_RETURN_IF_ERROR(CheckNumbers(step));
  if (request.logit_bias_size() > kMaxBiases ||
      request.banned_ids_size() > kMaxBannedIds) {
    return Wrong(id, absl::StrCat("has ", request.logit_bias_size(),
                                  " biases and ", request.banned_ids_size(),
                                  " banned ids, the limits are ", kMaxBiases,
                                  " and ", kMaxBannedIds));
  }
  if (request.num_logprobs() < -1 ||
      request.num_logprobs() > limits_.max_logprobs) {
    return Wrong(
        id, absl::StrCat("num_logprobs: must be -1 to ", limits_.max_logprobs,
                         ", but is ", request.num_logprobs()));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckIds(step, "banned_ids", request.banned_ids(), limits_.vocab_size));
  Sample sample;
  sample.row = RowOf(request);
  sample.first_bias = static_cast<int64_t>(biases_.size());
  sample.first_banned = static_cast<int64_t>(banned_ids_.size());
  sample.table_row = sequence->row;
  for (const kvasir::v1::LogitBias& bias : request.logit_bias()) {
    if (bias.token_id() < 0 || bias.token_id() >= limits_.vocab_size ||
        !std::isfinite(bias.bias())) {
      return Wrong(id,
                   absl::StrCat("logit_bias of id ", bias.token_id(), " is ",
                                bias.bias(), ": the id must be 0 to ",
                                limits_.vocab_size - 1,
                                " and the bias a finite number"));
    }
    bias_ids_.push_back(bias.token_id());
    biases_.push_back(bias.bias());
  }
  banned_ids_.insert(banned_ids_.end(), request.banned_ids().begin(),
                     request.banned_ids().end());
  KVASIR_RETURN_IF_ERROR(prepare(step, sequence, &sample.row));
  sample_rows_.push_back(static_cast<int32_t>(ids_.size()) - 1);
  samples_.push_back(sample);
  sequence->has_sampled = true;
  return absl::OkStatus();
}

}  // namespace kvasir::worker
