#include "worker/offline/direct_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::worker {

using kvasir::v1::BlockTableDelta;
using kvasir::v1::SequenceStep;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;

namespace {

// The number of tokens that a step runs. A step without ids runs one token: the
// last sampled one.
int64_t NumTokens(const DirectStep& step) {
  return std::max<int64_t>(1, static_cast<int64_t>(step.token_ids.size()));
}

}  // namespace

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

int64_t DirectRunner::SlotsThatStay(const Sequence& sequence,
                                    const Table& table) {
  return table.eviction.IsPoint(sequence.length)
             ? std::min(table.slots, table.eviction.kept_slots())
             : table.slots;
}

int64_t DirectRunner::PagesOf(int64_t slots) const {
  const int64_t page_tokens = layout_->page_tokens();
  return (slots + page_tokens - 1) / page_tokens;
}

int64_t DirectRunner::MissingPages(const Table& table, size_t group,
                                   int64_t slots) const {
  return PagesOf(slots) - static_cast<int64_t>(table.pages.size()) +
         layout_->page_groups()[group].side_pages_per_sequence -
         static_cast<int64_t>(table.side_pages.size());
}

absl::Status DirectRunner::CheckSteps(
    absl::Span<const DirectStep> steps) const {
  std::vector<int64_t> free;
  for (const std::vector<int32_t>& pages : free_) {
    free.push_back(static_cast<int64_t>(pages.size()));
  }
  for (const DirectStep& step : steps) {
    const int64_t num_tokens = NumTokens(step);
    const auto found = sequences_.find(step.sequence_id);
    const bool started =
        found != sequences_.end() && !found->second.tables.empty();
    Sequence starting;
    if (!started) {
      if (found != sequences_.end()) starting = found->second;
      Start(num_tokens, &starting);
    }
    const Sequence& sequence = started ? found->second : starting;
    const auto point = NextEviction(sequence);
    if (point && sequence.length + num_tokens > *point) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", step.sequence_id, ": a step from token ",
                       sequence.length, " to token ",
                       sequence.length + num_tokens, " crosses token ", *point,
                       ", where the prompt ends or an eviction is due"));
    }
    for (size_t group = 0; group < free.size(); ++group) {
      const Table& table = sequence.tables[group];
      const int64_t stay = SlotsThatStay(sequence, table);
      // If an eviction frees pages, MissingPages is negative and adds to the
      // free pages.
      free[group] -= MissingPages(table, group, stay + num_tokens);
      if (free[group] < 0) {
        return absl::ResourceExhaustedError(
            absl::StrCat("a sequence of ", sequence.length + num_tokens,
                         " tokens does not fit: page group ", group,
                         " has too few free pages"));
      }
    }
  }
  return absl::OkStatus();
}

void DirectRunner::Evict(uint64_t sequence_id, Sequence* sequence,
                         StepPlan* plan) {
  for (size_t group = 0; group < free_.size(); ++group) {
    Table& table = sequence->tables[group];
    const int64_t kept = SlotsThatStay(*sequence, table);
    if (kept == table.slots) continue;
    kvasir::v1::SlotEviction* const eviction = plan->add_evictions();
    eviction->set_sequence_id(sequence_id);
    eviction->set_page_group(static_cast<uint32_t>(group));
    eviction->mutable_pages()->Add(table.pages.begin(), table.pages.end());
    eviction->set_num_slots(static_cast<uint64_t>(table.slots));
    eviction->set_kept_slots(static_cast<uint64_t>(kept));
    eviction->set_logical_tokens(static_cast<uint64_t>(sequence->length));
    table.slots = kept;
    table.evicted_at = sequence->length;
    while (static_cast<int64_t>(table.pages.size()) > PagesOf(kept)) {
      free_[group].push_back(table.pages.back());
      table.pages.pop_back();
    }
  }
}

void DirectRunner::AddPages(int64_t num_tokens, Sequence* sequence,
                            SequenceStep* out) {
  for (size_t group = 0; group < free_.size(); ++group) {
    Table& table = sequence->tables[group];
    out->add_physical_starts(static_cast<uint64_t>(table.slots));
    out->add_first_counted(static_cast<uint64_t>(table.eviction.FirstCounted(
        sequence->length, sequence->length + num_tokens)));
    BlockTableDelta* const delta = out->add_block_tables();
    delta->set_page_group(static_cast<uint32_t>(group));
    delta->set_reset(!sequence->known);
    delta->set_first_live_index(static_cast<uint32_t>(table.first_live));
    // The executor has to receive all pages of a rewound sequence again.
    if (delta->reset()) {
      delta->mutable_appended_pages()->Add(table.pages.begin(),
                                           table.pages.end());
      delta->mutable_side_pages()->Add(table.side_pages.begin(),
                                       table.side_pages.end());
    }
    const auto take = [&](std::vector<int32_t>* pages) {
      pages->push_back(free_[group].back());
      free_[group].pop_back();
      return pages->back();
    };
    const int64_t wanted = PagesOf(table.slots + num_tokens);
    while (static_cast<int64_t>(table.pages.size()) < wanted) {
      delta->add_appended_pages(take(&table.pages));
    }
    const int64_t side_pages =
        layout_->page_groups()[group].side_pages_per_sequence;
    while (static_cast<int64_t>(table.side_pages.size()) < side_pages) {
      delta->add_side_pages(take(&table.side_pages));
    }
  }
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
  KVASIR_RETURN_IF_ERROR(CheckSteps(steps));
  StepPlan plan;
  plan.set_step_id(last_step_id_ + 1);
  for (const DirectStep& step : steps) {
    Sequence& sequence = sequences_[step.sequence_id];
    const int64_t num_tokens = NumTokens(step);
    if (sequence.tables.empty()) Start(num_tokens, &sequence);
    Evict(step.sequence_id, &sequence, &plan);
    SequenceStep* const out = plan.add_sequences();
    out->set_sequence_id(step.sequence_id);
    AddPages(num_tokens, &sequence, out);
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
  // Counts the step for all sequences, also if one of them has a fault, because
  // the executor has run them all.
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
          absl::StrCat("sequence ", plan.sequences(i).sequence_id(),
                       ", which had ", plan.sequences(i).logical_start(),
                       " tokens before this step: ", fault.message()));
    }
  }
  return result;
}

void DirectRunner::StartAt(uint64_t sequence_id, int64_t length) {
  sequences_[sequence_id].length = length;
}

void DirectRunner::Rewind(uint64_t sequence_id, int64_t length,
                          int64_t prompt_tokens) {
  Sequence& sequence = sequences_.at(sequence_id);
  sequence.length = length;
  sequence.prompt = prompt_tokens;
  sequence.known = false;
  Start(0, &sequence);
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    Table& table = sequence.tables[group];
    KVASIR_CHECK(table.first_live == 0);
    table.evicted_at = 0;
    while (static_cast<int64_t>(table.pages.size()) > PagesOf(table.slots)) {
      free_[group].push_back(table.pages.back());
      table.pages.pop_back();
    }
  }
}

void DirectRunner::SetPrompt(uint64_t sequence_id, int64_t prompt_tokens) {
  sequences_[sequence_id].prompt = prompt_tokens;
}

std::optional<int64_t> DirectRunner::NextEviction(
    const Sequence& sequence) const {
  std::optional<int64_t> next;
  for (size_t group = 0; group < free_.size(); ++group) {
    std::optional<int64_t> point =
        ScheduleOf(sequence, group).NextPoint(sequence.length);
    // One step of a sequence must not contain both prompt and output tokens, so
    // a step also ends where the prompt ends.
    if (point && sequence.length < sequence.prompt) {
      point = std::min(*point, sequence.prompt);
    }
    if (point && (!next || *point < *next)) next = point;
  }
  return next;
}

std::optional<int64_t> DirectRunner::next_eviction(uint64_t sequence_id) const {
  const auto found = sequences_.find(sequence_id);
  return found == sequences_.end() ? std::nullopt : NextEviction(found->second);
}

DirectRunner::Slots DirectRunner::slots(uint64_t sequence_id,
                                        int64_t group) const {
  const Table& table =
      sequences_.at(sequence_id).tables[static_cast<size_t>(group)];
  return {.pages = table.pages,
          .evicted_at = table.evicted_at,
          .kept_slots = table.evicted_at > 0 ? table.eviction.kept_slots() : 0};
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
