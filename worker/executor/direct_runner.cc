#include "worker/executor/direct_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::worker {

using kvasir::v1::BlockTableDelta;
using kvasir::v1::SequenceStep;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;

DirectRunner::DirectRunner(Executor* executor, const cache::PageLayout* layout,
                           const cache::PageCounts& pages,
                           uint64_t last_step_id)
    : executor_(executor), layout_(layout), last_step_id_(last_step_id) {
  for (const int64_t count : pages) {
    std::vector<int32_t>& free = free_.emplace_back();
    for (int64_t page = count; page-- > 0;) {
      free.push_back(static_cast<int32_t>(page));
    }
  }
}

DirectRunner::~DirectRunner() = default;

cache::EvictionSchedule DirectRunner::ScheduleOf(const Sequence& sequence,
                                                 size_t group) const {
  const plan::EvictionCounts& counts = layout_->page_groups()[group].eviction;
  return counts.evicts() && sequence.prompt > 0
             ? cache::EvictionSchedule(counts, sequence.prompt)
             : cache::EvictionSchedule();
}

void DirectRunner::Start(int64_t num_tokens, Sequence* sequence) const {
  if (sequence->prompt == 0) {
    sequence->prompt = sequence->length > 0 ? sequence->length : num_tokens;
  }
  sequence->tables.resize(free_.size());
  for (size_t group = 0; group < free_.size(); ++group) {
    Table& table = sequence->tables[group];
    table.eviction = ScheduleOf(*sequence, group);
    table.slots = table.eviction.SlotsAfter(sequence->length);
  }
}

void DirectRunner::Evict(uint64_t sequence_id, Sequence* sequence,
                         StepPlan* plan) {
  const int64_t page_tokens = layout_->page_tokens();
  for (size_t group = 0; group < free_.size(); ++group) {
    Table& table = sequence->tables[group];
    const int64_t kept = table.eviction.kept_slots();
    if (!table.eviction.IsPoint(sequence->length) || table.slots <= kept) {
      continue;
    }
    kvasir::v1::SlotEviction* const eviction = plan->add_evictions();
    eviction->set_sequence_id(sequence_id);
    eviction->set_page_group(static_cast<uint32_t>(group));
    eviction->mutable_pages()->Add(table.pages.begin(), table.pages.end());
    eviction->set_num_slots(static_cast<uint64_t>(table.slots));
    eviction->set_kept_slots(static_cast<uint64_t>(kept));
    eviction->set_logical_tokens(static_cast<uint64_t>(sequence->length));
    table.slots = kept;
    while (static_cast<int64_t>(table.pages.size()) * page_tokens >=
           kept + page_tokens) {
      free_[group].push_back(table.pages.back());
      table.pages.pop_back();
    }
  }
}

absl::Status DirectRunner::AddPages(int64_t num_tokens, Sequence* sequence,
                                    SequenceStep* out) {
  const int64_t page_tokens = layout_->page_tokens();
  for (size_t group = 0; group < free_.size(); ++group) {
    Table& table = sequence->tables[group];
    const int64_t wanted =
        (table.slots + num_tokens + page_tokens - 1) / page_tokens;
    out->add_physical_starts(static_cast<uint64_t>(table.slots));
    out->add_first_counted(static_cast<uint64_t>(table.eviction.FirstCounted(
        sequence->length, sequence->length + num_tokens)));
    BlockTableDelta* const delta = out->add_block_tables();
    delta->set_page_group(static_cast<uint32_t>(group));
    delta->set_reset(!sequence->known);
    delta->set_first_live_index(static_cast<uint32_t>(table.first_live));
    const int64_t side_pages =
        layout_->page_groups()[group].side_pages_per_sequence;
    const int64_t missing = wanted - static_cast<int64_t>(table.pages.size()) +
                            side_pages -
                            static_cast<int64_t>(table.side_pages.size());
    if (missing > static_cast<int64_t>(free_[group].size())) {
      return absl::ResourceExhaustedError(
          absl::StrCat("sequence of ", sequence->length + num_tokens,
                       " tokens: page group ", group, " has no free page"));
    }
    const auto take = [&](std::vector<int32_t>* pages) {
      pages->push_back(free_[group].back());
      free_[group].pop_back();
      return pages->back();
    };
    while (static_cast<int64_t>(table.pages.size()) < wanted) {
      delta->add_appended_pages(take(&table.pages));
    }
    while (static_cast<int64_t>(table.side_pages.size()) < side_pages) {
      delta->add_side_pages(take(&table.side_pages));
    }
  }
  return absl::OkStatus();
}

void DirectRunner::GiveUpBehindWindow(Sequence* sequence) {
  for (size_t group = 0; group < free_.size(); ++group) {
    const int64_t window = layout_->page_groups()[group].sliding_window;
    if (window == 0) continue;
    Table& table = sequence->tables[group];
    const int64_t first_seen =
        std::max<int64_t>(0, sequence->length + 1 - window);
    while ((table.first_live + 1) * layout_->page_tokens() <= first_seen) {
      free_[group].push_back(
          table.pages[static_cast<size_t>(table.first_live)]);
      ++table.first_live;
    }
  }
}

absl::StatusOr<StepResult> DirectRunner::Run(
    absl::Span<const DirectStep> steps) {
  StepPlan plan;
  plan.set_step_id(last_step_id_ + 1);
  for (const DirectStep& step : steps) {
    Sequence& sequence = sequences_[step.sequence_id];
    const int64_t num_tokens =
        std::max<int64_t>(1, static_cast<int64_t>(step.token_ids.size()));
    if (sequence.tables.empty()) Start(num_tokens, &sequence);
    const auto point = next_eviction(step.sequence_id);
    if (point && sequence.length + num_tokens > *point) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", step.sequence_id, ": a step of ",
                       num_tokens, " tokens behind ", sequence.length,
                       ", slots are evicted at ", *point));
    }
    Evict(step.sequence_id, &sequence, &plan);
    SequenceStep* const out = plan.add_sequences();
    out->set_sequence_id(step.sequence_id);
    KVASIR_RETURN_IF_ERROR(AddPages(num_tokens, &sequence, out));
    out->mutable_token_ids()->Add(step.token_ids.begin(), step.token_ids.end());
    out->set_input_is_last_sampled(step.token_ids.empty());
    out->set_num_tokens(static_cast<uint32_t>(num_tokens));
    out->set_prompt(!step.token_ids.empty() && !step.output);
    out->set_logical_start(static_cast<uint64_t>(sequence.length));
    out->mutable_target_ids()->Add(step.target_ids.begin(),
                                   step.target_ids.end());
    if (step.sample.has_value()) *out->mutable_sample() = *step.sample;
  }
  plan.mutable_released_sequences()->Add(released_.begin(), released_.end());
  released_.clear();
  KVASIR_ASSIGN_OR_RETURN(StepResult result, executor_->Execute(plan));
  ++last_step_id_;
  // The executor has run all of them, whatever came of one.
  for (const SequenceStep& step : plan.sequences()) {
    Sequence& sequence = sequences_[step.sequence_id()];
    sequence.known = true;
    sequence.length += step.num_tokens();
    for (Table& table : sequence.tables) table.slots += step.num_tokens();
    GiveUpBehindWindow(&sequence);
  }
  for (int i = 0; i < result.sequences_size(); ++i) {
    if (const absl::Status fault = CheckFault(result.sequences(i));
        !fault.ok()) {
      return absl::Status(
          fault.code(),
          absl::StrCat("sequence ", plan.sequences(i).sequence_id(), ", ",
                       plan.sequences(i).logical_start(),
                       " tokens before this step: ", fault.message()));
    }
  }
  return result;
}

void DirectRunner::StartAt(uint64_t sequence_id, int64_t length) {
  sequences_[sequence_id].length = length;
}

void DirectRunner::SetPrompt(uint64_t sequence_id, int64_t prompt_tokens) {
  sequences_[sequence_id].prompt = prompt_tokens;
}

std::optional<int64_t> DirectRunner::next_eviction(uint64_t sequence_id) const {
  const auto found = sequences_.find(sequence_id);
  if (found == sequences_.end()) return std::nullopt;
  std::optional<int64_t> next;
  for (size_t group = 0; group < free_.size(); ++group) {
    const Sequence& sequence = found->second;
    std::optional<int64_t> point =
        ScheduleOf(sequence, group).NextPoint(sequence.length);
    // Tokens of a step are all of the prompt, or none is.
    if (point && sequence.length < sequence.prompt) {
      point = std::min(*point, sequence.prompt);
    }
    if (point && (!next || *point < *next)) next = point;
  }
  return next;
}

void DirectRunner::Release(uint64_t sequence_id) {
  const auto found = sequences_.find(sequence_id);
  if (found == sequences_.end()) return;
  for (size_t group = 0; group < found->second.tables.size(); ++group) {
    const Table& table = found->second.tables[group];
    free_[group].insert(free_[group].end(),
                        table.pages.begin() + table.first_live,
                        table.pages.end());
    free_[group].insert(free_[group].end(), table.side_pages.begin(),
                        table.side_pages.end());
  }
  if (found->second.known) released_.push_back(sequence_id);
  sequences_.erase(found);
}

int64_t DirectRunner::length(uint64_t sequence_id) const {
  const auto found = sequences_.find(sequence_id);
  return found == sequences_.end() ? 0 : found->second.length;
}

kvasir::v1::SampleRequest GreedySample() {
  kvasir::v1::SampleRequest sample;
  sample.set_top_p(1);
  sample.set_repetition_penalty(1);
  sample.set_num_logprobs(-1);
  return sample;
}

}  // namespace kvasir::worker
