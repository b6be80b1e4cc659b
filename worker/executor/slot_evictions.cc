#include "worker/executor/slot_evictions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::worker {

SlotEvictions::SlotEvictions(const plan::ResolvedPlan& plan,
                             const KvArenas& arenas, int64_t most_slots)
    : most_slots_(most_slots),
      groups_(static_cast<size_t>(arenas.num_page_groups())) {
  for (int64_t layer = 0; layer < plan.num_layers(); ++layer) {
    const auto& eviction = plan.layer(layer).eviction;
    if (!eviction.has_value()) continue;
    const KvArenas::Layer& arena = arenas.layers()[static_cast<size_t>(layer)];
    Group& group = groups_[static_cast<size_t>(arena.page_group)];
    const Rule rule = {.sinks = eviction->sinks,
                       .recent = eviction->recent,
                       .scored = eviction->scored,
                       .lambda = eviction->lambda,
                       .friendliness = eviction->friendliness,
                       .decay = eviction->decay};
    const auto found = std::find(group.rules.begin(), group.rules.end(), rule);
    const auto index = static_cast<size_t>(found - group.rules.begin());
    if (found == group.rules.end()) group.rules.push_back(rule);
    group.layers.push_back({layer, index});
    group.most_units = std::max(group.most_units, arena.metadata.num_units);
    kept_capacity_ = std::max(kept_capacity_, group.most_units * most_slots_);
  }
}

void SlotEvictions::Clear() {
  batches_.clear();
  work_.clear();
  pages_.clear();
}

size_t SlotEvictions::BatchFor(const kvasir::v1::SlotEviction& eviction,
                               int64_t copy_batches, int64_t kept_numbers) {
  const auto page_group = static_cast<int64_t>(eviction.page_group());
  // Page groups share no pages, so batches of other groups do not matter.
  for (size_t b = batches_.size(); b-- > 0;) {
    if (batches_[b].copy_batches != copy_batches) break;
    if (batches_[b].page_group != page_group) continue;
    const Work& work = work_[b];
    const bool shares =
        std::any_of(eviction.pages().begin(), eviction.pages().end(),
                    [&](int32_t page) { return work.pages.contains(page); });
    if (shares || work.kept_numbers + kept_numbers > kept_capacity_) break;
    return b;
  }
  batches_.push_back(
      {.page_group = page_group, .copy_batches = copy_batches, .count = 0});
  work_.emplace_back();
  return batches_.size() - 1;
}

absl::Status SlotEvictions::Add(const kvasir::v1::SlotEviction& eviction,
                                int64_t copy_batches) {
  const Group& to = group(static_cast<int64_t>(eviction.page_group()));
  Entry entry = {.num_slots = static_cast<int64_t>(eviction.num_slots()),
                 .kept = static_cast<int64_t>(eviction.kept_slots()),
                 .first_page = static_cast<int64_t>(pages_.size())};
  KVASIR_CHECK(entry.num_slots <= most_slots_);
  for (const Rule& rule : to.rules) {
    const kernels::Eviction one = EvictionOf(entry, rule);
    const absl::Status status =
        kernels::CheckEvictions(to.most_units, {&one, 1}).status();
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("step plan: sequence ",
                                                     eviction.sequence_id(),
                                                     ": ", status.message()));
    }
  }
  const int64_t kept_numbers = to.most_units * entry.kept;
  const size_t batch = BatchFor(eviction, copy_batches, kept_numbers);
  Work& work = work_[batch];
  entry.first_kept = work.kept_numbers;
  work.kept_numbers += kept_numbers;
  work.entries.push_back(entry);
  work.pages.insert(eviction.pages().begin(), eviction.pages().end());
  ++batches_[batch].count;
  pages_.insert(pages_.end(), eviction.pages().begin(), eviction.pages().end());
  return absl::OkStatus();
}

kernels::Eviction SlotEvictions::EvictionOf(const Entry& entry,
                                            const Rule& rule) const {
  kernels::Eviction out;
  out.num_slots = entry.num_slots;
  out.kept = entry.kept;
  out.sinks = rule.sinks;
  // A rule without scores keeps the sinks and the latest slots.
  out.recent = rule.scored ? rule.recent : entry.kept - rule.sinks;
  out.lambda = rule.lambda;
  out.decay = rule.decay;
  out.halves_friendliness = rule.friendliness < 1;
  out.first_kept = entry.first_kept;
  return out;
}

std::vector<EvictionBatch> SlotEvictions::LargestBatches() const {
  std::vector<EvictionBatch> batches;
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].layers.empty()) continue;
    EvictionBatch& batch = batches.emplace_back();
    batch.page_group = static_cast<int64_t>(g);
    batch.count = 1;
  }
  return batches;
}

void SlotEvictions::Pack(StepBlob* blob) {
  for (size_t b = 0; b < batches_.size(); ++b) {
    work_[b].places.clear();
    for (size_t r = 0; r < group(batches_[b].page_group).rules.size(); ++r) {
      work_[b].places.push_back(
          blob->Take<kernels::Eviction>(batches_[b].count));
    }
  }
}

void SlotEvictions::PackTables(StepBlob* blob) {
  const kernels::DevicePtr<const int32_t> pages =
      blob->Add(absl::MakeConstSpan(pages_));
  if (blob->counting()) return;
  for (size_t b = 0; b < batches_.size(); ++b) {
    const std::vector<Rule>& rules = group(batches_[b].page_group).rules;
    for (size_t r = 0; r < rules.size(); ++r) {
      kernels::Eviction* out = work_[b].places[r].host;
      for (const Entry& entry : work_[b].entries) {
        *out = EvictionOf(entry, rules[r]);
        // The op works in place. Kept slots move only towards the front, so no
        // slot is overwritten before the op reads it.
        out->block_table = pages + entry.first_page;
        out->to_table = pages + entry.first_page;
        ++out;
      }
    }
  }
}

absl::Status SlotEvictions::Run(kernels::Stream& stream, const Decoder& decoder,
                                const EvictionBatch& batch, size_t index,
                                kernels::Workspace& workspace) const {
  kernels::Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<int32_t> kept =
      workspace.Take<int32_t>(kept_capacity_);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  // Use the largest counts, so that all steps need the same workspace.
  const kernels::EvictionStep step = {.most_slots = most_slots_,
                                      .kept_slots = kept_capacity_};
  for (const Group::Layer& layer : group(batch.page_group).layers) {
    kernels::EvictionRows rows;
    if (!workspace.counting()) {
      rows.evictions = work_[index].places[layer.rule].device;
    }
    rows.num_evictions = batch.count;
    rows.kept_slots = kept;
    KVASIR_RETURN_IF_ERROR(
        decoder.Evict(stream, layer.layer, rows, step, workspace));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
