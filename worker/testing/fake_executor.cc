#include "worker/testing/fake_executor.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/eviction/eviction_schedule.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::SampleRequest;
using kvasir::v1::SequenceResult;
using kvasir::v1::SequenceStep;
using kvasir::v1::StepPlan;
using kvasir::v1::StepResult;

constexpr uint64_t kEmptyPrefix = 0x9e3779b97f4a7c15u;

uint64_t Mix(uint64_t state, uint64_t value) {
  uint64_t x = state ^ (value + 0x9e3779b97f4a7c15u + (state << 6));
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t Extend(uint64_t prefix_hash, int32_t token, uint64_t position) {
  return Mix(Mix(prefix_hash, static_cast<uint64_t>(token)), position);
}

float LogprobOf(uint64_t prefix_hash, int32_t token) {
  const uint64_t x = Mix(prefix_hash, static_cast<uint64_t>(token) + 77);
  return -static_cast<float>(x % 997) / 100.0f;
}

bool HasPenalties(float repetition, float presence, float frequency) {
  return repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
}

// Adds one token to the hash of a penalty history. Tokens in any order give the
// same hash, because penalties depend only on how often each token occurs in
// prompt and output.
uint64_t CountOutput(uint64_t history_hash, int32_t token) {
  return history_hash + Mix(1, static_cast<uint64_t>(token));
}
uint64_t CountPrompt(uint64_t history_hash, int32_t token) {
  return history_hash + Mix(2, static_cast<uint64_t>(token));
}

struct Draw {
  bool greedy = true;
  uint64_t seed = 0;
  uint64_t sample_index = 0;
  uint64_t position = 0;
  uint64_t history_hash = 0;  // 0 if there are no penalties
};

template <typename Ids>
int32_t DrawToken(uint64_t prefix_hash, const Draw& draw, const Ids& banned,
                  int32_t vocab_size) {
  uint64_t x = Mix(prefix_hash, draw.history_hash);
  if (!draw.greedy) {
    x = Mix(Mix(Mix(x, draw.seed), draw.sample_index), draw.position);
  }
  auto token = static_cast<int32_t>(x % static_cast<uint64_t>(vocab_size));
  while (std::find(banned.begin(), banned.end(), token) != banned.end()) {
    token = (token + 1) % vocab_size;
  }
  return token;
}

// Chooses the slots that an eviction keeps: the last slot, and the slots whose
// prefixes have the largest hashes. Returns their indices in ascending order.
std::vector<size_t> KeptOf(const std::vector<uint64_t>& prefix_hashes,
                           size_t kept) {
  std::vector<size_t> slots(prefix_hashes.size());
  std::iota(slots.begin(), slots.end(), size_t{0});
  while (slots.size() > kept) {
    slots.erase(std::min_element(
        slots.begin(), slots.end() - 1, [&](size_t a, size_t b) {
          return Mix(3, prefix_hashes[a]) < Mix(3, prefix_hashes[b]);
        }));
  }
  return slots;
}

uint64_t AddHeld(uint64_t held_hash, uint64_t prefix_hash) {
  return Mix(held_hash, prefix_hash);
}

// Computes which prefixes a page group with eviction should hold. Uses only the
// sequence's tokens, not the step plans.
class HeldPrefixes {
 public:
  HeldPrefixes(const plan::EvictionCounts& counts, int64_t prompt_tokens)
      : schedule_(counts, prompt_tokens) {}

  void Add(uint64_t prefix_hash) {
    if (schedule_.IsPoint(length_)) {
      const std::vector<uint64_t> all = std::exchange(held_, {});
      for (const size_t slot :
           KeptOf(all, static_cast<size_t>(schedule_.kept_slots()))) {
        held_.push_back(all[slot]);
      }
    }
    held_.push_back(prefix_hash);
    ++length_;
  }
  uint64_t AddTo(uint64_t held_hash) const {
    for (const uint64_t hash : held_) held_hash = AddHeld(held_hash, hash);
    return held_hash;
  }

 private:
  const cache::EvictionSchedule schedule_;
  std::vector<uint64_t> held_;
  int64_t length_ = 0;
};

template <typename... Args>
absl::Status Broken(uint64_t sequence_id, const Args&... args) {
  return absl::InvalidArgumentError(
      absl::StrCat("sequence ", sequence_id, ": ", args...));
}

}  // namespace

FakeExecutor::FakeExecutor(FakeExecutorOptions options)
    : options_(std::move(options)) {
  for (const auto& group : options_.groups) {
    pages_.emplace_back(static_cast<size_t>(group.num_pages));
    for (Page& page : pages_.back()) page.slots.resize(options_.page_tokens);
    host_pages_.emplace_back(static_cast<size_t>(group.host_pages));
  }
}

absl::Status FakeExecutor::Enqueue(const StepPlan& plan) {
  if (in_flight_.has_value()) {
    return absl::FailedPreconditionError("a step is in flight");
  }
  if (plan.step_id() != last_step_ + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the step id is ", plan.step_id(), ", but must be ", last_step_ + 1));
  }
  if (announced_.has_value() && *announced_ != plan.SerializeAsString()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step ", plan.step_id(), " differs from the announced plan"));
  }
  announced_.reset();
  last_step_ = plan.step_id();
  in_flight_ = plan;
  return absl::OkStatus();
}

absl::Status FakeExecutor::Announce(const StepPlan& plan) {
  if (!in_flight_.has_value() || announced_.has_value()) {
    return absl::FailedPreconditionError(
        "a plan can be announced only while a step is in flight, and only "
        "once");
  }
  if (plan.step_id() != last_step_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the announced step id is ", plan.step_id(),
                     ", but must be ", last_step_ + 1));
  }
  announced_ = plan.SerializeAsString();
  ++announced_steps_;
  return absl::OkStatus();
}

absl::StatusOr<StepResult> FakeExecutor::Await() {
  if (!in_flight_.has_value()) {
    return absl::FailedPreconditionError("no step is in flight");
  }
  const StepPlan plan = *std::exchange(in_flight_, std::nullopt);
  if (options_.during_step) KVASIR_RETURN_IF_ERROR(options_.during_step(plan));
  return Run(plan);
}

absl::StatusOr<StepResult> FakeExecutor::Run(const StepPlan& plan) {
  for (uint64_t id : plan.released_sequences()) {
    KVASIR_RETURN_IF_ERROR(Release(id));
  }
  KVASIR_RETURN_IF_ERROR(CopyAndEvict(plan));
  if (plan.sequences_size() > static_cast<int>(options_.max_num_seqs)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the step has ", plan.sequences_size(), " sequences, at most ",
        options_.max_num_seqs, " are allowed"));
  }
  // Applies the table changes of all sequences before running any, so that a
  // page named by two tables counts as shared.
  absl::flat_hash_set<uint64_t> seen;
  uint32_t total_tokens = 0;
  for (const SequenceStep& step : plan.sequences()) {
    if (!seen.insert(step.sequence_id()).second) {
      return Broken(step.sequence_id(), "is in the step twice");
    }
    if (released_.contains(step.sequence_id())) {
      return Broken(step.sequence_id(), "runs again after its release");
    }
    total_tokens += step.num_tokens();
    KVASIR_RETURN_IF_ERROR(ApplyTables(step, &sequences_[step.sequence_id()]));
  }
  // Checks that no copy goes to a shared page. If several copies go to the same
  // page, the last one counts. Copies from the host pool are exempt, because
  // the same step may share the pages to which they go.
  absl::flat_hash_set<std::pair<uint32_t, int32_t>> written;
  for (int i = plan.page_copies_size() - 1; i >= 0; --i) {
    const auto& copy = plan.page_copies(i);
    if (copy.to_host() ||
        !written.insert({copy.page_group(), copy.to_page()}).second ||
        copy.from_host()) {
      continue;
    }
    const auto group = static_cast<int32_t>(copy.page_group());
    DropBehindWindows(0, group, copy.to_page());
    if (pages_[copy.page_group()][static_cast<size_t>(copy.to_page())]
            .held_by.size() > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("a copy goes to page ", copy.to_page(),
                       ", which several sequences hold"));
    }
  }
  if (total_tokens > options_.max_batched_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step has ", total_tokens, " tokens, at most ",
                     options_.max_batched_tokens, " are allowed"));
  }
  largest_batch_tokens_ = std::max(largest_batch_tokens_, total_tokens);
  largest_batch_seqs_ = std::max(largest_batch_seqs_,
                                 static_cast<uint32_t>(plan.sequences_size()));

  StepResult result;
  result.set_step_id(plan.step_id());
  for (const SequenceStep& step : plan.sequences()) {
    State& state = sequences_[step.sequence_id()];
    uint64_t prefix_hash = 0;
    SequenceResult* out = result.add_sequences();
    out->set_sequence_id(step.sequence_id());
    out->set_token_id(-1);
    for (int i = 0; i < step.target_ids_size(); ++i)
      out->add_target_logprobs(0);
    KVASIR_RETURN_IF_ERROR(RunTokens(step, &state, &prefix_hash));
    // A target's log probability depends on the prefix that ends with the input
    // token at the target's position.
    for (int i = 0; i < step.target_ids_size(); ++i) {
      const uint64_t position = step.logical_start() + static_cast<uint64_t>(i);
      KVASIR_ASSIGN_OR_RETURN(
          const Slot* slot,
          Read(step.sequence_id(), 0, state.tables[0], position));
      out->set_target_logprobs(
          i, LogprobOf(slot->prefix_hash, step.target_ids(i)));
    }
    KVASIR_RETURN_IF_ERROR(CheckVisible(step.sequence_id(), state));
    if (step.has_sample()) {
      KVASIR_RETURN_IF_ERROR(Sample(step, prefix_hash, &state, out));
    }
  }
  for (const auto& copy : plan.page_copies()) {
    if (copy.from_host() || copy.to_host()) continue;
    pages_[copy.page_group()][static_cast<size_t>(copy.to_page())].copied =
        false;
  }
  if (options_.after_step) options_.after_step(plan, &result);
  return result;
}

absl::Status FakeExecutor::Release(uint64_t sequence_id) {
  auto it = sequences_.find(sequence_id);
  if (it == sequences_.end())
    return Broken(sequence_id, "is released, but is not known");
  for (size_t g = 0; g < it->second.tables.size(); ++g) {
    const Table& table = it->second.tables[g];
    for (size_t i = table.first_live; i < table.pages.size(); ++i) {
      pages_[g][static_cast<size_t>(table.pages[i])].held_by.erase(sequence_id);
    }
    for (const int32_t page : table.side_pages) {
      pages_[g][static_cast<size_t>(page)].held_by.erase(sequence_id);
    }
  }
  sequences_.erase(it);
  released_.insert(sequence_id);
  return absl::OkStatus();
}

absl::Status FakeExecutor::CopyAndEvict(const StepPlan& plan) {
  int done = 0;
  for (const auto& eviction : plan.evictions()) {
    const auto copies = static_cast<int>(eviction.after_page_copies());
    if (copies < done || copies > plan.page_copies_size()) {
      return Broken(eviction.sequence_id(), "its eviction comes after ", copies,
                    " page copies, must come after ", done, " to ",
                    plan.page_copies_size());
    }
    for (; done < copies; ++done) {
      KVASIR_RETURN_IF_ERROR(Copy(plan.page_copies(done)));
    }
    KVASIR_RETURN_IF_ERROR(Evict(eviction));
  }
  for (; done < plan.page_copies_size(); ++done) {
    KVASIR_RETURN_IF_ERROR(Copy(plan.page_copies(done)));
  }
  return absl::OkStatus();
}

absl::Status FakeExecutor::CheckEviction(
    const kvasir::v1::SlotEviction& eviction) const {
  const uint64_t id = eviction.sequence_id();
  const uint32_t g = eviction.page_group();
  if (g >= pages_.size() || !Evicts(g)) {
    return Broken(id, "evicts from page group ", g,
                  ", which does not exist or does not evict");
  }
  const uint64_t slots = eviction.num_slots();
  if (eviction.kept_slots() < 1 || eviction.kept_slots() >= slots ||
      slots > eviction.logical_tokens()) {
    return Broken(id, "keeps ", eviction.kept_slots(), " of ", slots,
                  " slots after ", eviction.logical_tokens(),
                  " tokens; it must keep at least 1 slot, but not all, and "
                  "have no more slots than tokens");
  }
  const uint64_t pages =
      (slots + options_.page_tokens - 1) / options_.page_tokens;
  if (static_cast<uint64_t>(eviction.pages_size()) != pages) {
    return Broken(id, "evicts from ", eviction.pages_size(),
                  " pages, but its slots need ", pages);
  }
  for (const int32_t page : eviction.pages()) {
    if (page < 0 || page >= options_.groups[g].num_pages) {
      return Broken(id, "evicts from page ", page, " of page group ", g,
                    ", which does not exist");
    }
  }
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::OkStatus();
  const Table& table = it->second.tables[g];
  if (table.num_slots != slots ||
      it->second.length != eviction.logical_tokens() ||
      !std::equal(eviction.pages().begin(), eviction.pages().end(),
                  table.pages.begin())) {
    return Broken(id, "evicts from ", slots, " slots after ",
                  eviction.logical_tokens(), " tokens, but its table holds ",
                  table.num_slots, " slots after ", it->second.length,
                  " tokens, or other pages");
  }
  return absl::OkStatus();
}

absl::Status FakeExecutor::Evict(const kvasir::v1::SlotEviction& eviction) {
  KVASIR_RETURN_IF_ERROR(CheckEviction(eviction));
  const uint64_t id = eviction.sequence_id();
  const uint32_t g = eviction.page_group();
  std::vector<Slot*> slots;
  std::vector<uint64_t> hashes;
  for (uint64_t s = 0; s < eviction.num_slots(); ++s) {
    const int32_t page =
        eviction.pages(static_cast<int>(s / options_.page_tokens));
    Slot& slot =
        pages_[g][static_cast<size_t>(page)].slots[s % options_.page_tokens];
    if (!slot.written ||
        (!slots.empty() && slot.position <= slots.back()->position)) {
      return Broken(
          id, "evicts slot ", s, " in page ", page,
          ", which is not written or does not hold a later token than "
          "the slot before");
    }
    slots.push_back(&slot);
    hashes.push_back(slot.prefix_hash);
  }
  if (slots.back()->position + 1 != eviction.logical_tokens()) {
    return Broken(id, "evicts after ", eviction.logical_tokens(),
                  " tokens, but its last slot holds position ",
                  slots.back()->position);
  }
  const std::vector<size_t> kept =
      KeptOf(hashes, static_cast<size_t>(eviction.kept_slots()));
  for (size_t s = 0; s < slots.size(); ++s) {
    *slots[s] = s < kept.size() ? *slots[kept[s]] : Slot();
  }
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::OkStatus();
  Table& table = it->second.tables[g];
  table.num_slots = eviction.kept_slots();
  const uint64_t entries =
      (table.num_slots + options_.page_tokens - 1) / options_.page_tokens;
  while (table.pages.size() > entries) {
    pages_[g][static_cast<size_t>(table.pages.back())].held_by.erase(id);
    table.pages.pop_back();
  }
  return absl::OkStatus();
}

uint64_t FakeExecutor::HeldHash(const State& state) const {
  uint64_t hash = 0;
  for (size_t g = 0; g < state.tables.size(); ++g) {
    if (!Evicts(g)) continue;
    const Table& table = state.tables[g];
    for (uint64_t s = 0; s < table.num_slots; ++s) {
      const int32_t page = table.pages[s / options_.page_tokens];
      hash = AddHeld(hash, pages_[g][static_cast<size_t>(page)]
                               .slots[s % options_.page_tokens]
                               .prefix_hash);
    }
  }
  return hash;
}

absl::Status FakeExecutor::Copy(const kvasir::v1::PageCopy& copy) {
  if (copy.page_group() >= pages_.size()) {
    return absl::InvalidArgumentError(
        "a copy is in a page group that does not exist");
  }
  if (copy.from_host() || copy.to_host()) return CopyOverHost(copy);
  std::vector<Page>& pages = pages_[copy.page_group()];
  const auto count = static_cast<int32_t>(pages.size());
  if (copy.from_page() < 0 || copy.from_page() >= count || copy.to_page() < 0 ||
      copy.to_page() >= count || copy.from_page() == copy.to_page()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "copy of page ", copy.from_page(), " to page ", copy.to_page(),
        ": the pages must differ and be in the pool"));
  }
  Page& to = pages[static_cast<size_t>(copy.to_page())];
  to.slots = pages[static_cast<size_t>(copy.from_page())].slots;
  to.copied = true;
  to.writer = 0;
  return absl::OkStatus();
}

absl::Status FakeExecutor::CopyOverHost(const kvasir::v1::PageCopy& copy) {
  const uint32_t g = copy.page_group();
  const int32_t page_id = copy.to_host() ? copy.from_page() : copy.to_page();
  const int32_t host_id = copy.to_host() ? copy.to_page() : copy.from_page();
  const auto broken = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("copy of page ", page_id,
                                                   " and page ", host_id,
                                                   " of the host pool: ", why));
  };
  if (copy.to_host() && copy.from_host())
    return broken("a copy cannot stay within the host pool");
  if (page_id < 0 || page_id >= options_.groups[g].num_pages || host_id < 0 ||
      host_id >= options_.groups[g].host_pages) {
    return broken("a page is outside of its pool");
  }
  Page& page = pages_[g][static_cast<size_t>(page_id)];
  std::vector<Slot>& host = host_pages_[g][static_cast<size_t>(host_id)];
  if (copy.to_host()) {
    host = page.slots;
    ++pages_to_host_;
    return absl::OkStatus();
  }
  if (host.empty()) return broken("nothing was copied to the host page before");
  DropBehindWindows(0, static_cast<int32_t>(g), page_id);
  if (!page.held_by.empty())
    return broken("a sequence holds the page that is overwritten");
  page.slots = host;
  page.copied = true;
  page.writer = 0;
  ++pages_from_host_;
  return absl::OkStatus();
}

absl::Status FakeExecutor::ApplyTables(const SequenceStep& step, State* state) {
  const uint64_t id = step.sequence_id();
  const bool is_new = state->tables.empty();
  if (is_new) state->tables.resize(options_.groups.size());
  for (const auto& delta : step.block_tables()) {
    const uint32_t g = delta.page_group();
    if (g >= pages_.size())
      return Broken(id, "page group ", g, " does not exist");
    if (delta.reset() != is_new) {
      return Broken(id, delta.reset()
                            ? "a table is reset although the sequence is known"
                            : "a table of a new sequence is not reset");
    }
    KVASIR_RETURN_IF_ERROR(ApplyDelta(id, delta, &state->tables[g]));
  }
  if (is_new) {
    state->length = step.logical_start();
    for (int g = 0; g < step.physical_starts_size(); ++g) {
      if (static_cast<size_t>(g) >= state->tables.size()) break;
      state->tables[static_cast<size_t>(g)].num_slots = step.physical_starts(g);
    }
    return absl::OkStatus();
  }
  if (step.logical_start() != state->length) {
    return Broken(id, "starts at position ", step.logical_start(),
                  ", but must start at ", state->length);
  }
  return absl::OkStatus();
}

// Removes pages before it adds pages, because a step may give up a page and
// take it again.
absl::Status FakeExecutor::ApplyDelta(uint64_t id,
                                      const kvasir::v1::BlockTableDelta& delta,
                                      Table* table) {
  const uint32_t g = delta.page_group();
  const uint32_t first_live = delta.first_live_index();
  const auto old_size = static_cast<uint32_t>(table->pages.size());
  if (first_live < table->first_live ||
      first_live >
          old_size + static_cast<uint32_t>(delta.appended_pages_size())) {
    return Broken(
        id, "the first live index ", first_live, " is not in ",
        table->first_live, " to ",
        old_size + static_cast<uint32_t>(delta.appended_pages_size()));
  }
  for (uint32_t i = table->first_live; i < std::min(first_live, old_size);
       ++i) {
    pages_[g][static_cast<size_t>(table->pages[i])].held_by.erase(id);
  }
  table->first_live = first_live;
  KVASIR_RETURN_IF_ERROR(ApplySidePages(id, delta, table));
  for (int32_t page : delta.appended_pages()) {
    table->pages.push_back(page);
    // entries before first_live name no page
    if (table->pages.size() <= first_live) continue;
    if (page < 0 || page >= options_.groups[g].num_pages) {
      return Broken(id, "page ", page, " of page group ", g, " does not exist");
    }
    if (!pages_[g][static_cast<size_t>(page)].held_by.insert(id).second) {
      return Broken(id, "page ", page, " is in the table twice");
    }
  }
  return absl::OkStatus();
}

absl::Status FakeExecutor::ApplySidePages(
    uint64_t id, const kvasir::v1::BlockTableDelta& delta, Table* table) {
  const uint32_t g = delta.page_group();
  const int want = delta.reset() ? options_.groups[g].side_pages : 0;
  if (delta.side_pages_size() != want) {
    return Broken(id, "gets ", delta.side_pages_size(),
                  " side pages, must get ", want);
  }
  for (const int32_t page : delta.side_pages()) {
    if (page < 0 || page >= options_.groups[g].num_pages) {
      return Broken(id, "side page ", page, " of page group ", g,
                    " does not exist");
    }
    pages_[g][static_cast<size_t>(page)].held_by.insert(id);
    table->side_pages.push_back(page);
  }
  return absl::OkStatus();
}

FakeExecutor::Slot& FakeExecutor::RingSlot(size_t group, const Table& table,
                                           uint64_t position) {
  const uint64_t index = position / options_.page_tokens;
  const int32_t page = table.side_pages[index % table.side_pages.size()];
  return pages_[group][static_cast<size_t>(page)]
      .slots[position % options_.page_tokens];
}

absl::Status FakeExecutor::CheckRings(uint64_t sequence_id,
                                      const State& state) {
  for (size_t g = 0; g < state.tables.size(); ++g) {
    const Table& table = state.tables[g];
    for (const int32_t page : table.side_pages) {
      DropBehindWindows(sequence_id, static_cast<int32_t>(g), page);
      if (pages_[g][static_cast<size_t>(page)].held_by.size() != 1) {
        return Broken(sequence_id, "another sequence holds side page ", page,
                      ", too");
      }
    }
    const uint64_t rows = table.side_pages.size() * options_.page_tokens;
    for (uint64_t p = state.length - std::min(state.length, rows);
         p < state.length; ++p) {
      const Slot& row = RingSlot(g, table, p);
      const absl::StatusOr<const Slot*> slot =
          Read(sequence_id, static_cast<int32_t>(g), table, p);
      if (!row.written || row.position != p ||
          (slot.ok() && (*slot)->prefix_hash != row.prefix_hash)) {
        return Broken(sequence_id, "side pages of group ", g,
                      " do not hold position ", p);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FakeExecutor::RunTokens(const SequenceStep& step, State* state,
                                     uint64_t* prefix_hash) {
  const uint64_t id = step.sequence_id();
  if (step.num_tokens() == 0) return Broken(id, "has no tokens");
  for (size_t g = 0; g < state->tables.size(); ++g) {
    const auto group = static_cast<int>(g);
    const uint64_t start = group < step.physical_starts_size()
                               ? step.physical_starts(group)
                               : step.logical_start();
    const uint64_t want =
        Evicts(g) ? state->tables[g].num_slots : step.logical_start();
    if (start != want) {
      return Broken(id, "the physical start in page group ", g, " is ", start,
                    ", but must be ", want);
    }
  }
  std::vector<int32_t> tokens(step.token_ids().begin(), step.token_ids().end());
  if (step.input_is_last_sampled()) {
    if (!tokens.empty() || state->sampled_step + 1 != last_step_) {
      return Broken(id,
                    "uses the last sampled token, but has token ids or sampled "
                    "none in the step before");
    }
    tokens.push_back(state->last_sampled);
  }
  if (tokens.size() != step.num_tokens()) {
    return Broken(id, "has ", tokens.size(), " token ids, but must have ",
                  step.num_tokens());
  }
  if (step.target_ids_size() > static_cast<int>(tokens.size())) {
    return Broken(id, "has ", step.target_ids_size(),
                  " target ids, which is more than its tokens");
  }
  KVASIR_RETURN_IF_ERROR(CheckRings(id, *state));
  *prefix_hash = kEmptyPrefix;
  if (state->length > 0) {
    KVASIR_ASSIGN_OR_RETURN(const Slot* slot,
                            Read(id, 0, state->tables[0], state->length - 1));
    *prefix_hash = slot->prefix_hash;
  }
  for (int32_t token : tokens) {
    if (token < 0 || token >= options_.vocab_size) {
      return Broken(id, "token id ", token, " is not in the vocabulary");
    }
    *prefix_hash = Extend(*prefix_hash, token, state->length);
    for (size_t g = 0; g < state->tables.size(); ++g) {
      KVASIR_RETURN_IF_ERROR(Write(id, static_cast<int32_t>(g),
                                   &state->tables[g], state->length,
                                   *prefix_hash));
      if (state->tables[g].side_pages.empty()) continue;
      RingSlot(g, state->tables[g], state->length) = {true, state->length,
                                                      *prefix_hash};
    }
    ++state->length;
  }
  return absl::OkStatus();
}

absl::Status FakeExecutor::Write(uint64_t sequence_id, int32_t group,
                                 Table* table, uint64_t position,
                                 uint64_t prefix_hash) {
  const uint64_t place =
      Evicts(static_cast<size_t>(group)) ? table->num_slots++ : position;
  const uint64_t index = place / options_.page_tokens;
  const uint64_t slot = place % options_.page_tokens;
  if (index < table->first_live || index >= table->pages.size()) {
    return Broken(sequence_id, "position ", position,
                  " lies outside of the table's live pages ", table->first_live,
                  "..", table->pages.size());
  }
  const int32_t page_id = table->pages[index];
  Page& page = pages_[static_cast<size_t>(group)][static_cast<size_t>(page_id)];
  DropBehindWindows(sequence_id, group, page_id);
  if (page.held_by.size() != 1) {
    return Broken(sequence_id, "writes page ", page_id, ", which ",
                  page.held_by.size(), " sequences hold");
  }
  if (page.writer != sequence_id) {
    // In page groups with eviction, a fork's pages are copies, which have
    // writer 0. The fork may run long after the copies were made.
    const bool own_copy =
        page.copied || (page.writer == 0 && Evicts(static_cast<size_t>(group)));
    if (slot != 0 && !own_copy) {
      return Broken(sequence_id, "writes slot ", slot, " of page ", page_id,
                    ", which sequence ", page.writer, " filled");
    }
    if (slot == 0 || !own_copy) {
      page.slots.assign(options_.page_tokens, Slot());
    }
    page.writer = sequence_id;
    page.copied = false;
  }
  page.slots[slot] = {true, position, prefix_hash};
  return absl::OkStatus();
}

// Removes from the page's holders each sequence whose sliding window has moved
// past the page. This cannot wait for plans: a sequence gives up such a page
// only in the plan of its next step.
void FakeExecutor::DropBehindWindows(uint64_t writer, int32_t group,
                                     int32_t page_id) {
  const auto g = static_cast<size_t>(group);
  const uint64_t window = options_.groups[g].sliding_window;
  if (window == 0) return;
  auto& held_by = pages_[g][static_cast<size_t>(page_id)].held_by;
  if (held_by.size() == 1 && held_by.contains(writer)) return;
  const std::vector<uint64_t> holders(held_by.begin(), held_by.end());
  for (uint64_t holder : holders) {
    if (holder == writer) continue;
    const State& state = sequences_.at(holder);
    const std::vector<int32_t>& pages = state.tables[g].pages;
    uint64_t index = state.tables[g].first_live;
    while (index < pages.size() && pages[index] != page_id) ++index;
    // The holder's next token, at position state.length, sees positions from
    // state.length - window + 1 on.
    if ((index + 1) * options_.page_tokens + window <= state.length + 1) {
      held_by.erase(holder);
    }
  }
}

absl::StatusOr<const FakeExecutor::Slot*> FakeExecutor::Read(
    uint64_t sequence_id, int32_t group, const Table& table,
    uint64_t position) const {
  const auto g = static_cast<size_t>(group);
  if (Evicts(g)) {
    for (uint64_t s = table.num_slots; s-- > 0;) {
      const int32_t page = table.pages[s / options_.page_tokens];
      const Slot& slot =
          pages_[g][static_cast<size_t>(page)].slots[s % options_.page_tokens];
      if (slot.written && slot.position == position) return &slot;
    }
    return Broken(sequence_id, "group ", group, " does not hold position ",
                  position);
  }
  const uint64_t index = position / options_.page_tokens;
  if (index < table.first_live || index >= table.pages.size()) {
    return Broken(sequence_id, "reads position ", position,
                  " outside of the table's live pages ", table.first_live, "..",
                  table.pages.size(), " of group ", group);
  }
  const Page& page = pages_[static_cast<size_t>(group)]
                           [static_cast<size_t>(table.pages[index])];
  const Slot& slot = page.slots[position % options_.page_tokens];
  if (!slot.written || slot.position != position) {
    return Broken(sequence_id, "page ", table.pages[index], " of group ", group,
                  " does not hold position ", position);
  }
  return &slot;
}

// Checks that the pages hold every position that is visible to the last token,
// and that all page groups hold the same prefix there.
absl::Status FakeExecutor::CheckVisible(uint64_t sequence_id,
                                        const State& state) const {
  for (size_t g = 0; g < state.tables.size(); ++g) {
    // No check is needed here: a wrong slot of this group changes the sampled
    // token (HeldHash).
    if (Evicts(g)) continue;
    const uint64_t window = options_.groups[g].sliding_window;
    const uint64_t first =
        window == 0 || window >= state.length ? 0 : state.length - window;
    for (uint64_t p = first; p < state.length; ++p) {
      KVASIR_ASSIGN_OR_RETURN(
          const Slot* slot,
          Read(sequence_id, static_cast<int32_t>(g), state.tables[g], p));
      if (g == 0) continue;
      const absl::StatusOr<const Slot*> same =
          Read(sequence_id, 0, state.tables[0], p);
      if (same.ok() && (*same)->prefix_hash != slot->prefix_hash) {
        return Broken(sequence_id,
                      "page groups hold different prefixes at position ", p);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FakeExecutor::Sample(const SequenceStep& step,
                                  uint64_t prefix_hash, State* state,
                                  SequenceResult* result) {
  const SampleRequest& sample = step.sample();
  const uint64_t id = step.sequence_id();
  if (sample.position() != state->length) {
    return Broken(id, "samples at position ", sample.position(),
                  ", must sample at ", state->length);
  }
  const bool penalties =
      HasPenalties(sample.repetition_penalty(), sample.presence_penalty(),
                   sample.frequency_penalty());
  if (sample.history_reset()) {
    state->has_history = true;
    state->history_hash = 0;
  }
  const auto history = static_cast<uint64_t>(sample.prompt_history_size() +
                                             sample.output_history_size());
  const uint64_t want = penalties && sample.history_reset() ? state->length : 0;
  if (history != want) {
    return Broken(id, "sends ", history,
                  " tokens of penalty history at length ", state->length,
                  ", but must send ", want);
  }
  if (penalties && !state->has_history)
    return Broken(id, "has penalties, but never sent its history");
  for (int32_t token : sample.prompt_history()) {
    state->history_hash = CountPrompt(state->history_hash, token);
  }
  for (int32_t token : sample.output_history()) {
    state->history_hash = CountOutput(state->history_hash, token);
  }
  const Draw draw{.greedy = sample.temperature() == 0.0f,
                  .seed = sample.seed(),
                  .sample_index = sample.sample_index(),
                  .position = sample.position(),
                  .history_hash = penalties ? state->history_hash : 0};
  const int32_t token = DrawToken(Mix(prefix_hash, HeldHash(*state)), draw,
                                  sample.banned_ids(), options_.vocab_size);
  if (penalties) state->history_hash = CountOutput(state->history_hash, token);
  state->last_sampled = token;
  state->sampled_step = last_step_;
  result->set_token_id(token);
  if (sample.num_logprobs() >= 0) {
    result->set_logprob(LogprobOf(prefix_hash, token));
    for (int32_t i = 0; i < sample.num_logprobs(); ++i) {
      auto* top = result->add_top();
      top->set_token_id((token + i) % options_.vocab_size);
      top->set_logprob(LogprobOf(prefix_hash, top->token_id()));
    }
  }
  return absl::OkStatus();
}

std::vector<int32_t> FakeContinuation(const Request& request,
                                      uint32_t sample_index,
                                      const FakeModelLimits& limits) {
  const kvasir::v1::SamplingParams& p = request.sampling;
  const bool penalties = HasPenalties(
      p.repetition_penalty(), p.presence_penalty(), p.frequency_penalty());
  std::vector<int32_t> stop(p.stop_token_ids().begin(),
                            p.stop_token_ids().end());
  if (!p.ignore_eos()) {
    stop.insert(stop.end(), limits.eos_token_ids.begin(),
                limits.eos_token_ids.end());
  }
  uint64_t prefix_hash = kEmptyPrefix;
  uint64_t history_hash = 0;
  uint64_t length = 0;
  uint64_t num_output = 0;
  std::vector<HeldPrefixes> held;
  const auto own = request.eviction_budget.has_value()
                       ? EvictionsOf(*request.eviction_budget, limits.eviction)
                       : std::vector<plan::EvictionCounts>();
  for (size_t g = 0; g < limits.eviction.groups.size(); ++g) {
    const plan::EvictionCounts& plans =
        limits.eviction.groups[g].pages.eviction;
    if (!plans.evicts()) continue;
    held.emplace_back(own.empty() ? plans : own[g],
                      static_cast<int64_t>(request.prompt.size_tokens()));
  }
  const auto run = [&](int32_t token) {
    prefix_hash = Extend(prefix_hash, token, length++);
    for (HeldPrefixes& group : held) group.Add(prefix_hash);
  };
  for (int32_t token : request.prompt.ToIds()) {
    run(token);
    history_hash = CountPrompt(history_hash, token);
  }
  for (int32_t token : request.emitted.ToIds()) {
    run(token);
    history_hash = CountOutput(history_hash, token);
    ++num_output;
  }
  std::vector<int32_t> output;
  while (num_output < p.max_tokens() && length < limits.max_model_len) {
    const Draw draw{.greedy = p.temperature() == 0.0f,
                    .seed = p.seed(),
                    .sample_index = sample_index,
                    .position = length,
                    .history_hash = penalties ? history_hash : 0};
    const std::vector<int32_t> banned =
        num_output < p.min_tokens() ? stop : std::vector<int32_t>();
    uint64_t held_hash = 0;
    for (const HeldPrefixes& group : held) held_hash = group.AddTo(held_hash);
    const int32_t token =
        DrawToken(Mix(prefix_hash, held_hash), draw, banned, limits.vocab_size);
    output.push_back(token);
    run(token);
    history_hash = CountOutput(history_hash, token);
    ++num_output;
    if (std::find(stop.begin(), stop.end(), token) != stop.end()) break;
  }
  return output;
}

float FakeLogprob(absl::Span<const int32_t> prefix, int32_t token) {
  uint64_t prefix_hash = kEmptyPrefix;
  uint64_t length = 0;
  for (int32_t id : prefix) prefix_hash = Extend(prefix_hash, id, length++);
  return LogprobOf(prefix_hash, token);
}

}  // namespace kvasir::worker
