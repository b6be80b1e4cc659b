#include "worker/executor/pages/sequence_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::BlockTableDelta;
using kvasir::v1::SequenceStep;
using kvasir::v1::SlotEviction;

absl::Status Wrong(uint64_t sequence_id, const std::string& what) {
  return absl::InvalidArgumentError(
      absl::StrCat("step plan: sequence ", sequence_id, ": ", what));
}

// Returns the slot number that the step's first token gets in this page group.
uint64_t PhysicalStart(const SequenceStep& step, int group) {
  return step.physical_starts().empty() ? step.logical_start()
                                        : step.physical_starts(group);
}

absl::Status WrittenTwice(size_t group, int32_t page) {
  return absl::InvalidArgumentError(absl::StrCat(
      "page ", page, " of group ", group, " is written twice in one step"));
}

}  // namespace

absl::StatusOr<SequenceTable> SequenceTable::Create(SequenceTableLimits limits,
                                                    const KvArenas* arenas) {
  if (limits.max_sequences < 1 || limits.max_model_len < 1 ||
      limits.page_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("executor: the limits of sequences, tokens per sequence "
                     "and tokens per page must be at least 1, but are ",
                     limits.max_sequences, ", ", limits.max_model_len, " and ",
                     limits.page_tokens));
  }
  SequenceTable table;
  table.limits_ = std::move(limits);
  table.arenas_ = arenas;
  table.max_pages_ =
      (table.limits_.max_model_len + table.limits_.page_tokens - 1) /
      table.limits_.page_tokens;
  for (int64_t group = 0; group < arenas->num_page_groups(); ++group) {
    SidePages& owners = table.side_pages_.emplace_back();
    const auto index = static_cast<size_t>(group);
    if (table.limits_.side_pages[index] == 0) continue;
    owners.owner.assign(static_cast<size_t>(arenas->num_pages()[index]), -1);
    owners.lost.assign(static_cast<size_t>(table.limits_.max_sequences), false);
  }
  for (int64_t row = table.limits_.max_sequences; row-- > 0;) {
    table.free_rows_.push_back(static_cast<int32_t>(row));
  }
  table.last_step_.resize(table.free_rows_.size());
  return table;
}

absl::StatusOr<std::unique_ptr<PenaltyCounts>> SequenceTable::Release(
    uint64_t id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) {
    return Wrong(id, "the plan releases it, but the executor does not know it");
  }
  for (size_t group = 0; group < found->second.tables.size(); ++group) {
    DropSidePages(found->second, group);
  }
  std::unique_ptr<PenaltyCounts> penalties = std::move(found->second.penalties);
  free_rows_.push_back(found->second.row);
  sequences_.erase(found);
  return penalties;
}

absl::StatusOr<SequenceTable::Sequence*> SequenceTable::FindOrStart(
    const SequenceStep& step) {
  const uint64_t id = step.sequence_id();
  const auto found = sequences_.find(id);
  if (found != sequences_.end()) return &found->second;
  const bool starts =
      step.block_tables_size() > 0 &&
      std::all_of(step.block_tables().begin(), step.block_tables().end(),
                  [](const BlockTableDelta& delta) { return delta.reset(); });
  if (!starts)
    return Wrong(id,
                 "the executor does not know it, so the plan must reset its "
                 "page tables in all page groups");
  if (free_rows_.empty()) {
    return Wrong(id,
                 absl::StrCat("too many sequences: the executor has room for ",
                              limits_.max_sequences));
  }
  Sequence sequence;
  sequence.row = free_rows_.back();
  sequence.tables.resize(side_pages_.size());
  free_rows_.pop_back();
  return &sequences_.emplace(id, std::move(sequence)).first->second;
}

// Checks that a sequence is reset in all page groups or in none. A reset allows
// any start position, which would be wrong for groups that are not reset.
absl::Status SequenceTable::CheckResets(const SequenceStep& step,
                                        const Sequence& sequence) const {
  const auto groups = static_cast<int64_t>(sequence.tables.size());
  int64_t resets = 0;
  for (int64_t group = 0; group < groups; ++group) {
    resets +=
        std::any_of(step.block_tables().begin(), step.block_tables().end(),
                    [group](const BlockTableDelta& delta) {
                      return delta.reset() && delta.page_group() == group;
                    })
            ? 1
            : 0;
  }
  if (resets == 0 || resets == groups) return absl::OkStatus();
  return Wrong(step.sequence_id(),
               absl::StrCat("the plan resets its page tables in ", resets,
                            " page groups, but must reset them in all ", groups,
                            " or in none"));
}

absl::Status SequenceTable::ApplyDelta(const BlockTableDelta& delta,
                                       Sequence* sequence) {
  const uint32_t group = delta.page_group();
  if (group >= sequence->tables.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "page group ", group, " does not exist: the number of page groups is ",
        sequence->tables.size()));
  }
  Table& table = sequence->tables[group];
  if (delta.reset()) {
    DropSidePages(*sequence, group);
    table = Table{};
    sequence->is_fresh = true;
  }
  KVASIR_RETURN_IF_ERROR(ApplySidePages(delta, sequence));
  const int64_t old_size = static_cast<int64_t>(table.pages.size());
  const int64_t new_size = old_size + delta.appended_pages_size();
  if (new_size > max_pages_) {
    return absl::InvalidArgumentError(
        absl::StrCat("its page table in page group ", group, " has ", new_size,
                     " pages, the limit is ", max_pages_));
  }
  // A sliding window may give up pages before any plan sends them. Table
  // entries of such pages, before `first_live`, name no page.
  const int64_t first_live = delta.first_live_index();
  if (first_live < table.first_live || first_live > new_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first_live_index of its page table in page group ", group, " is ",
        first_live, ", but must be ", table.first_live, " to ", new_size));
  }
  for (int i = 0; i < delta.appended_pages_size(); ++i) {
    if (old_size + i >= first_live) {
      KVASIR_RETURN_IF_ERROR(
          arenas_->CheckPage(group, delta.appended_pages(i)));
    }
    table.pages.push_back(delta.appended_pages(i));
  }
  table.first_live = first_live;
  return absl::OkStatus();
}

absl::Status SequenceTable::ApplySidePages(const BlockTableDelta& delta,
                                           Sequence* sequence) {
  const uint32_t group = delta.page_group();
  const int64_t want = delta.reset() ? limits_.side_pages[group] : 0;
  if (delta.side_pages_size() != want) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the plan gives it ", delta.side_pages_size(),
        " side pages in page group ", group, ", but must give ", want));
  }
  if (want == 0) return absl::OkStatus();
  for (const int32_t page : delta.side_pages()) {
    KVASIR_RETURN_IF_ERROR(arenas_->CheckPage(group, page));
    if (written_pages_.contains({static_cast<int64_t>(group), page})) {
      return WrittenTwice(group, page);
    }
    KVASIR_RETURN_IF_ERROR(TakeSidePage(group, page));
    side_pages_[group].owner[static_cast<size_t>(page)] = sequence->row;
  }
  sequence->tables[group].side_pages.assign(delta.side_pages().begin(),
                                            delta.side_pages().end());
  return absl::OkStatus();
}

void SequenceTable::DropSidePages(const Sequence& sequence, size_t group) {
  SidePages& side = side_pages_[group];
  if (side.owner.empty()) return;
  for (const int32_t page : sequence.tables[group].side_pages) {
    int32_t& owner = side.owner[static_cast<size_t>(page)];
    if (owner == sequence.row) owner = -1;
  }
  side.lost[static_cast<size_t>(sequence.row)] = false;
}

absl::Status SequenceTable::TakeSidePage(size_t group, int32_t page) {
  SidePages& side = side_pages_[group];
  if (side.owner.empty()) return absl::OkStatus();
  int32_t& owner = side.owner[static_cast<size_t>(page)];
  if (owner < 0) return absl::OkStatus();
  const auto row = static_cast<size_t>(owner);
  if (last_step_[row] == step_) return WrittenTwice(group, page);
  // The page's previous owner was preempted, and must start again with other
  // side pages.
  side.lost[row] = true;
  owner = -1;
  return absl::OkStatus();
}

absl::Status SequenceTable::CheckPositions(const SequenceStep& step,
                                           const Sequence& sequence) const {
  const uint64_t id = step.sequence_id();
  const uint64_t limit = static_cast<uint64_t>(limits_.max_model_len);
  if (step.num_tokens() == 0) return Wrong(id, "has no tokens");
  if (step.logical_start() > limit ||
      step.num_tokens() > limit - step.logical_start()) {
    return Wrong(id, absl::StrCat(step.num_tokens(), " tokens from position ",
                                  step.logical_start(),
                                  " on end past the maximum length ", limit));
  }
  if (!sequence.is_fresh &&
      static_cast<int64_t>(step.logical_start()) != sequence.length) {
    return Wrong(id, absl::StrCat("starts at position ", step.logical_start(),
                                  ", but must start at ", sequence.length));
  }
  return CheckStarts(step, sequence);
}

// Without evictions, a token's slot number is its position, even if a sliding
// window has given up pages. Evictions remove slots, so the slot numbers of
// later tokens are lower than their positions.
absl::Status SequenceTable::CheckStarts(const SequenceStep& step,
                                        const Sequence& sequence) const {
  const uint64_t id = step.sequence_id();
  const auto groups = static_cast<int>(sequence.tables.size());
  const auto check_count = [&](int have, const char* what) {
    return have == 0 || have == groups
               ? absl::OkStatus()
               : Wrong(id, absl::StrCat("has ", have, " ", what,
                                        ", but must have none or ", groups,
                                        " (one per page group)"));
  };
  KVASIR_RETURN_IF_ERROR(
      check_count(step.physical_starts_size(), "physical starts"));
  KVASIR_RETURN_IF_ERROR(
      check_count(step.first_counted_size(), "first counted tokens"));
  for (int group = 0; group < groups; ++group) {
    const bool evicts = arenas_->evicts(group);
    const uint64_t start = PhysicalStart(step, group);
    const uint64_t most = step.logical_start();
    const uint64_t least =
        !evicts ? most
        : sequence.is_fresh
            ? std::min<uint64_t>(most, 1)
            : static_cast<uint64_t>(
                  sequence.tables[static_cast<size_t>(group)].slots);
    const uint64_t greatest = evicts && !sequence.is_fresh ? least : most;
    if (start < least || start > greatest) {
      return Wrong(
          id, absl::StrCat("the physical start in page group ", group, " is ",
                           start, ", but must be ", least, " to ", greatest));
    }
    if (step.first_counted_size() > 0 &&
        step.first_counted(group) > most + step.num_tokens()) {
      return Wrong(
          id, absl::StrCat("the first counted token in page group ", group,
                           " is ", step.first_counted(group),
                           ", but must be at most ", most + step.num_tokens()));
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceTable::Evict(const SlotEviction& eviction) {
  const uint64_t id = eviction.sequence_id();
  const uint32_t group = eviction.page_group();
  const auto wrong = [&](const auto&... what) {
    return Wrong(id,
                 absl::StrCat("eviction in page group ", group, ": ", what...));
  };
  if (group >= side_pages_.size()) {
    return wrong("the page group does not exist: the number of page groups is ",
                 side_pages_.size());
  }
  if (!arenas_->evicts(group)) {
    return wrong("no layer of the page group evicts slots");
  }
  const uint64_t slots = eviction.num_slots();
  const uint64_t kept = eviction.kept_slots();
  const auto page_tokens = static_cast<uint64_t>(limits_.page_tokens);
  // These limits also hold for a sequence that this table does not know.
  const std::pair<const char*, uint64_t> most_slots[] = {
      {"the number of tokens of the sequence", eviction.logical_tokens()},
      {"the number of slots in the pool",
       static_cast<uint64_t>(arenas_->num_pages()[group]) * page_tokens},
      {"the maximum length of a sequence",
       static_cast<uint64_t>(limits_.max_model_len)}};
  for (const auto& [name, most] : most_slots) {
    if (slots <= most) continue;
    return wrong("has ", slots, " slots, but must have at most ", most, ", ",
                 name);
  }
  if (kept < 1) {
    return wrong("keeps ", kept, " of ", slots,
                 " slots, but must keep at least 1");
  }
  if (kept >= slots) {
    return wrong("keeps ", kept, " of ", slots,
                 " slots, but must evict at least 1");
  }
  const auto entries = [page_tokens](uint64_t count) {
    return (count + page_tokens - 1) / page_tokens;
  };
  if (static_cast<uint64_t>(eviction.pages_size()) != entries(slots)) {
    return wrong("has ", eviction.pages_size(), " pages, but must have ",
                 entries(slots));
  }
  absl::flat_hash_set<int32_t> pages;
  for (const int32_t page : eviction.pages()) {
    const absl::Status status = arenas_->CheckPage(group, page);
    if (!status.ok()) return wrong(status.message());
    if (!pages.insert(page).second) return wrong("names page ", page, " twice");
  }
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return absl::OkStatus();
  Table& table = found->second.tables[group];
  if (static_cast<uint64_t>(table.slots) != slots) {
    return wrong("has ", slots, " slots, but the sequence has ", table.slots);
  }
  const int64_t length = found->second.length;
  if (static_cast<uint64_t>(length) != eviction.logical_tokens()) {
    return wrong("comes after ", eviction.logical_tokens(),
                 " tokens, but the sequence has ", length);
  }
  if (table.pages.size() < entries(slots)) {
    return wrong("has ", entries(slots),
                 " pages, but the sequence's page table has only ",
                 table.pages.size());
  }
  for (size_t i = 0; i < entries(slots); ++i) {
    const int32_t page = eviction.pages(static_cast<int>(i));
    if (page == table.pages[i]) continue;
    return wrong("names page ", page, " at index ", i,
                 ", but the sequence's page table has page ", table.pages[i],
                 " there");
  }
  table.slots = static_cast<int64_t>(kept);
  table.pages.resize(entries(kept));
  return absl::OkStatus();
}

absl::Status SequenceTable::CheckSlots(const SequenceStep& step,
                                       const Sequence& sequence) {
  const uint64_t id = step.sequence_id();
  for (size_t group = 0; group < sequence.tables.size(); ++group) {
    const Table& table = sequence.tables[group];
    const auto start =
        static_cast<int64_t>(PhysicalStart(step, static_cast<int>(group)));
    const int64_t end = start + step.num_tokens();
    const int64_t covered =
        static_cast<int64_t>(table.pages.size()) * limits_.page_tokens;
    if (end > covered) {
      return Wrong(
          id, absl::StrCat("its page table in page group ", group, " covers ",
                           covered, " slots, but the step needs ", end));
    }
    const int64_t window = limits_.windows[group];
    const int64_t first_seen =
        window == 0 ? 0 : std::max<int64_t>(0, start + 1 - window);
    if (table.first_live * limits_.page_tokens > first_seen) {
      return Wrong(
          id, absl::StrCat("page group ", group, " gave up slots below ",
                           table.first_live * limits_.page_tokens,
                           ", but the step's tokens see slot ", first_seen));
    }
    for (int64_t index = start / limits_.page_tokens;
         index <= (end - 1) / limits_.page_tokens; ++index) {
      const absl::Status status =
          AddWrittenPage(group, table.pages[static_cast<size_t>(index)]);
      if (!status.ok()) return Wrong(id, std::string(status.message()));
    }
    if (!table.side_pages.empty() &&
        side_pages_[group].lost[static_cast<size_t>(sequence.row)]) {
      return Wrong(
          id,
          absl::StrCat(
              "another sequence has taken one of its side pages in page group ",
              group));
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceTable::AddWrittenPage(size_t group, int32_t page) {
  if (!written_pages_.insert({static_cast<int64_t>(group), page}).second) {
    return WrittenTwice(group, page);
  }
  return TakeSidePage(group, page);
}

absl::StatusOr<SequenceTable::Sequence*> SequenceTable::Apply(
    const SequenceStep& step) {
  KVASIR_ASSIGN_OR_RETURN(Sequence* const sequence, FindOrStart(step));
  last_step_[static_cast<size_t>(sequence->row)] = step_;
  KVASIR_RETURN_IF_ERROR(CheckResets(step, *sequence));
  for (const BlockTableDelta& delta : step.block_tables()) {
    const absl::Status status = ApplyDelta(delta, sequence);
    if (!status.ok()) {
      return Wrong(step.sequence_id(), std::string(status.message()));
    }
  }
  KVASIR_RETURN_IF_ERROR(CheckPositions(step, *sequence));
  KVASIR_RETURN_IF_ERROR(CheckSlots(step, *sequence));
  sequence->is_fresh = false;
  for (size_t group = 0; group < sequence->tables.size(); ++group) {
    sequence->tables[group].slots =
        static_cast<int64_t>(PhysicalStart(step, static_cast<int>(group))) +
        step.num_tokens();
  }
  sequence->length =
      static_cast<int64_t>(step.logical_start()) + step.num_tokens();
  return sequence;
}

int64_t SequenceTable::SlotOf(const Sequence& sequence, int64_t group,
                              int64_t slot) const {
  const Table& table = sequence.tables[static_cast<size_t>(group)];
  const int64_t index = slot / limits_.page_tokens;
  return table.pages[static_cast<size_t>(index)] * limits_.page_tokens +
         slot % limits_.page_tokens;
}

}  // namespace kvasir::worker
