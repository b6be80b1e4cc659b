#include "worker/executor/slot_evictions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
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
  entries_.clear();
  pages_.clear();
  batches_.clear();
}

absl::Status SlotEvictions::Add(const kvasir::v1::SlotEviction& eviction,
                                int64_t copy_batches) {
  const auto page_group = static_cast<int64_t>(eviction.page_group());
  const Group& to = group(page_group);
  Entry entry = {.num_slots = static_cast<int64_t>(eviction.num_slots()),
                 .kept = static_cast<int64_t>(eviction.kept_slots()),
                 .first_page = static_cast<int64_t>(pages_.size())};
  const int64_t kept_numbers = to.most_units * entry.kept;
  const auto shares_a_page = [&](const EvictionBatch& batch) {
    const Entry& first = entries_[static_cast<size_t>(batch.first)];
    return std::any_of(
        pages_.begin() + first.first_page, pages_.end(), [&](int32_t page) {
          return std::find(eviction.pages().begin(), eviction.pages().end(),
                           page) != eviction.pages().end();
        });
  };
  // Those of a batch are done side by side.
  const bool opens =
      batches_.empty() || batches_.back().page_group != page_group ||
      batches_.back().copy_batches != copy_batches ||
      batches_.back().kept_slots + kept_numbers > kept_capacity_ ||
      shares_a_page(batches_.back());
  if (opens) {
    batches_.push_back({.page_group = page_group,
                        .copy_batches = copy_batches,
                        .first = static_cast<int64_t>(entries_.size()),
                        .count = 0,
                        .kept_slots = 0});
  }
  EvictionBatch& batch = batches_.back();
  entry.first_kept = batch.kept_slots;
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
  batch.kept_slots += kept_numbers;
  ++batch.count;
  entries_.push_back(entry);
  pages_.insert(pages_.end(), eviction.pages().begin(), eviction.pages().end());
  return absl::OkStatus();
}

kernels::Eviction SlotEvictions::EvictionOf(const Entry& entry,
                                            const Rule& rule) const {
  kernels::Eviction out;
  out.num_slots = entry.num_slots;
  out.kept = entry.kept;
  out.sinks = rule.sinks;
  // Without scores all others that stay are the latest.
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
  packed_.resize(batches_.size());
  const kernels::DevicePtr<const int32_t> pages =
      blob->Add(absl::MakeConstSpan(pages_));
  for (size_t b = 0; b < batches_.size(); ++b) {
    const EvictionBatch& batch = batches_[b];
    packed_[b].clear();
    for (const Rule& rule : group(batch.page_group).rules) {
      const auto place = blob->Take<kernels::Eviction>(batch.count);
      packed_[b].push_back(place.device);
      if (blob->counting()) continue;
      for (int64_t i = 0; i < batch.count; ++i) {
        const Entry& entry = entries_[static_cast<size_t>(batch.first + i)];
        place.host[i] = EvictionOf(entry, rule);
        // In place: what is kept never overtakes what is read.
        place.host[i].block_table = pages + entry.first_page;
        place.host[i].to_table = pages + entry.first_page;
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
  // Places depend on no step's counts.
  const kernels::EvictionStep step = {.most_slots = most_slots_,
                                      .kept_slots = kept_capacity_};
  for (const Group::Layer& layer : group(batch.page_group).layers) {
    kernels::EvictionRows rows;
    if (!workspace.counting()) rows.evictions = packed_[index][layer.rule];
    rows.num_evictions = batch.count;
    rows.kept_slots = kept;
    KVASIR_RETURN_IF_ERROR(
        decoder.Evict(stream, layer.layer, rows, step, workspace));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::worker
