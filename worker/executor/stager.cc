#include "worker/executor/stager.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::SampleRequest;
using kvasir::v1::SequenceStep;
using kvasir::v1::StepPlan;

bool HasPenalty(const SampleRequest& sample) {
  return sample.repetition_penalty() != 1.0f ||
         sample.presence_penalty() != 0.0f ||
         sample.frequency_penalty() != 0.0f;
}

}  // namespace

Stager::Stager(const Parts& parts, SequenceTable table)
    : parts_(parts),
      table_(std::move(table)),
      batch_(parts.limits, *parts.arenas, parts.plan->query_heads.count),
      evictions_(*parts.plan, *parts.arenas, parts.most_slots),
      blob_(&parts.device->allocator()) {
  staged_.batch = &batch_;
  staged_.evictions = &evictions_;
  staged_.groups.resize(static_cast<size_t>(parts.arenas->num_page_groups()));
  staged_.ring_slots.resize(parts.arenas->rings().size());
}

absl::StatusOr<std::unique_ptr<Stager>> Stager::Create(const Parts& parts) {
  SequenceTableLimits limits;
  limits.max_sequences = parts.limits.max_sequences;
  limits.max_model_len = parts.max_model_len;
  limits.page_tokens = parts.layout->page_tokens();
  for (const cache::PageGroupLayout& group : parts.layout->page_groups()) {
    limits.windows.push_back(group.sliding_window);
    limits.side_pages.push_back(group.side_pages_per_sequence);
  }
  KVASIR_ASSIGN_OR_RETURN(
      SequenceTable table,
      SequenceTable::Create(std::move(limits), parts.arenas));
  return std::unique_ptr<Stager>(new Stager(parts, std::move(table)));
}

StagedStep Stager::LargestStepToCount() const {
  StagedStep largest = staged_;
  largest.sizes = LargestStep(parts_.limits);
  largest.bucket.padded = largest.sizes;
  const std::vector<EvictionBatch> evictions = evictions_.LargestBatches();
  largest.bucket.evictions.assign(evictions.begin(), evictions.end());
  // Page copies need no workspace. This one is listed so that a device without
  // the copy kernel is refused here.
  largest.bucket.copies.emplace_back();
  return largest;
}

absl::StatusOr<size_t> Stager::ReserveBlob() {
  staged_.bucket.padded = LargestStep(parts_.limits);
  blob_.StartCounting();
  Pack();
  const SequenceTableLimits& limits = table_.limits();
  const int64_t longest = limits.max_model_len / limits.page_tokens + 1;
  int64_t most_pages = 0;
  for (size_t group = 0; group < limits.side_pages.size(); ++group) {
    const int64_t pages = std::min(longest, parts_.arenas->num_pages()[group]);
    most_pages = std::max(most_pages, pages);
    // Padding to powers of two at most doubles the number of pairs.
    blob_.Take<kernels::PagePair>(2 * limits.max_sequences);
    blob_.Take<int32_t>(limits.max_sequences *
                        (pages + limits.side_pages[group]));
  }
  blob_.Take<int32_t>(
      std::min(limits.max_model_len, most_pages * limits.page_tokens));
  KVASIR_RETURN_IF_ERROR(blob_.StartPacking());
  return blob_.bytes();
}

absl::Status Stager::Stage(const StepPlan& plan) {
  KVASIR_RETURN_IF_ERROR(ApplyPlan(plan));
  staged_.step_id = plan.step_id();
  staged_.sizes = batch_.sizes();
  staged_.bucket = BucketOfBatch();
  PlaceResults();
  // A plan that only releases sequences needs no upload.
  if (staged_.sizes.tokens == 0 && copies_.pairs.empty() &&
      evictions_.batches().empty()) {
    return absl::OkStatus();
  }
  blob_.StartCounting();
  Pack();
  KVASIR_RETURN_IF_ERROR(blob_.StartPacking());
  Pack();
  staged_.blob_peaks = blob_.peaks();
  KVASIR_RETURN_IF_ERROR(
      parts_.decoder->DivideSteps(batch_.rows(), staged_.groups));
  return blob_.Upload(*parts_.stream);
}

absl::Status Stager::ApplyPlan(const StepPlan& plan) {
  if (plan.step_id() != last_step_id_ + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("step plan: the step id is ", plan.step_id(),
                     ", but must be ", last_step_id_ + 1));
  }
  last_step_id_ = plan.step_id();
  for (const uint64_t id : plan.released_sequences()) {
    KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<PenaltyCounts> penalties,
                            table_.Release(id));
    if (penalties != nullptr) idle_penalties_.push_back(std::move(penalties));
  }
  KVASIR_RETURN_IF_ERROR(ListMoves(plan));
  KVASIR_RETURN_IF_ERROR(batch_.Build(
      plan, &table_,
      [this](const SequenceStep& step, SequenceTable::Sequence* sequence,
             kernels::SampleRow* row) {
        return PrepareSample(step, sequence, row);
      }));
  batch_.PlaceWeights(parts_.decoder->mass_room().most_weights,
                      table_.limits().page_tokens);
  return absl::OkStatus();
}

// Lists page copies and evictions in the plan's order. The order matters,
// because a copy may read pages that an eviction compacted, or overwrite pages
// that an eviction reads.
absl::Status Stager::ListMoves(const StepPlan& plan) {
  copies_.Clear();
  evictions_.Clear();
  const absl::Span<const kvasir::v1::PageCopy* const> copies(
      plan.page_copies().data(), static_cast<size_t>(plan.page_copies_size()));
  size_t done = 0;
  for (const kvasir::v1::SlotEviction& eviction : plan.evictions()) {
    const size_t before = eviction.after_page_copies();
    if (before < done || before > copies.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step plan: sequence ", eviction.sequence_id(),
                       ": after_page_copies of its eviction is ", before,
                       ", but must be ", done, " to ", copies.size()));
    }
    KVASIR_RETURN_IF_ERROR(parts_.arenas->AddCopies(
        copies.subspan(done, before - done), &copies_));
    done = before;
    KVASIR_RETURN_IF_ERROR(table_.Evict(eviction));
    KVASIR_RETURN_IF_ERROR(
        evictions_.Add(eviction, static_cast<int64_t>(copies_.batches.size())));
  }
  return parts_.arenas->AddCopies(copies.subspan(done), &copies_);
}

absl::Status Stager::PrepareSample(const SequenceStep& step,
                                   SequenceTable::Sequence* sequence,
                                   kernels::SampleRow* row) {
  const std::string& name = step.sample().token_mask();
  if (!name.empty()) {
    const auto found = masks_.find(name);
    if (found == masks_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "step plan: sequence ", step.sequence_id(), ": token_mask is \"",
          name, "\", but no mask of this name is registered"));
    }
    row->allow_mask = found->second.as<uint32_t>();
  }
  return HasPenalty(step.sample()) ? PreparePenalties(step, sequence, row)
                                   : absl::OkStatus();
}

absl::Status Stager::PreparePenalties(const SequenceStep& step,
                                      SequenceTable::Sequence* sequence,
                                      kernels::SampleRow* row) {
  const SampleRequest& sample = step.sample();
  bool reset = sample.history_reset();
  if (sequence->penalties == nullptr) {
    reset = true;
    if (!idle_penalties_.empty()) {
      sequence->penalties = std::move(idle_penalties_.back());
      idle_penalties_.pop_back();
    } else {
      const size_t bytes =
          static_cast<size_t>(parts_.limits.vocab_size) * sizeof(int32_t);
      auto counts = std::make_unique<PenaltyCounts>();
      KVASIR_ASSIGN_OR_RETURN(counts->prompt,
                              parts_.device->allocator().Allocate(
                                  bytes, kernels::MemoryTag::kOther));
      KVASIR_ASSIGN_OR_RETURN(counts->output,
                              parts_.device->allocator().Allocate(
                                  bytes, kernels::MemoryTag::kOther));
      sequence->penalties = std::move(counts);
    }
  }
  const PenaltyCounts& counts = *sequence->penalties;
  batch_.AddHistory(sample.prompt_history(), reset,
                    counts.prompt.as<int32_t>());
  batch_.AddHistory(sample.output_history(), reset,
                    counts.output.as<int32_t>());
  row->prompt_counts = counts.prompt.as<int32_t>();
  row->output_counts = counts.output.as<int32_t>();
  return absl::OkStatus();
}

StepBucket Stager::BucketOfBatch() const {
  StepBucket bucket;
  bucket.padded = PadSizes(batch_.sizes(), parts_.limits, parts_.logits_rows);
  bucket.copies.assign(copies_.batches.begin(), copies_.batches.end());
  bucket.evictions.assign(evictions_.batches().begin(),
                          evictions_.batches().end());
  if (parts_.lifts_prompts) {
    bucket.has_prompts = batch_.has_prompts();
    bucket.output_runs = batch_.output_runs();
  }
  return bucket;
}

// Packs the step into the blob. The first arrays are those that launches
// receive by address. Their sizes depend only on the bucket, so all steps of a
// bucket have the same addresses. Then come arrays of any size, to which
// elements of the first arrays point.
void Stager::Pack() {
  const StepSizes& padded = staged_.bucket.padded;
  const auto add = [this](const auto& list, int64_t count, auto padding) {
    return blob_.Add(absl::MakeConstSpan(list), count, padding);
  };
  constexpr int64_t kNoSlot = -1;
  staged_.copies = blob_.Add(absl::MakeConstSpan(copies_.pairs));
  evictions_.Pack(&blob_);
  staged_.ids = add(batch_.ids(), padded.tokens, int32_t{0});
  staged_.token_sources =
      add(batch_.token_sources(), padded.tokens, int32_t{0});
  staged_.positions = add(batch_.positions(), padded.tokens, int64_t{0});
  std::vector<SequencePlaces> sequences(staged_.groups.size());
  for (size_t group = 0; group < staged_.groups.size(); ++group) {
    staged_.groups[group].slots =
        add(batch_.groups()[group].slots, padded.tokens, kNoSlot);
    if (parts_.arenas->evicts(static_cast<int64_t>(group))) {
      staged_.groups[group].slot_positions =
          add(batch_.groups()[group].slot_positions, padded.tokens, int64_t{0});
    }
    SequencePlaces& places = sequences[group];
    places.all = blob_.Take<kernels::AttentionSequence>(padded.sequences);
    places.output = blob_.Take<kernels::AttentionSequence>(
        parts_.lifts_prompts ? padded.sequences : 0);
    staged_.groups[group].sequences = places.all.device;
    staged_.groups[group].output_sequences = places.output.device;
    staged_.groups[group].on_host = batch_.groups()[group].sequences;
  }
  for (size_t ring = 0; ring < staged_.ring_slots.size(); ++ring) {
    staged_.ring_slots[ring] =
        add(batch_.ring_slots()[ring], padded.tokens, kNoSlot);
  }
  staged_.sample_rows = add(batch_.sample_rows(), padded.samples, int32_t{0});
  const auto samples = blob_.Take<kernels::SampleRow>(padded.samples);
  staged_.samples = samples.device;
  const auto carried = blob_.Take<int32_t>(
      padded.samples == 0 ? 0 : parts_.limits.max_sequences);
  staged_.carried = carried.device;
  const auto histories = blob_.Take<kernels::TokenHistory>(padded.histories);
  staged_.histories = histories.device;
  staged_.target_rows = add(batch_.target_rows(), padded.targets, int32_t{0});
  staged_.target_ids = add(batch_.target_ids(), padded.targets, int32_t{0});
  if (parts_.taps_logits) {
    const auto rows = blob_.Take<int32_t>(padded.tokens);
    if (!blob_.counting()) std::iota(rows.host, rows.host + padded.tokens, 0);
    staged_.all_rows = rows.device;
  }
  staged_.zeros = blob_.Add(absl::Span<const int32_t>(), padded.tokens, 0);
  const kernels::DevicePtr<const int32_t> tables =
      blob_.Add(absl::MakeConstSpan(batch_.tables()));
  evictions_.PackTables(&blob_);
  if (!blob_.counting()) PackSequences(tables, sequences);
  PackHistories(histories);
  PackSamples(samples, carried);
}

void Stager::PackSequences(kernels::DevicePtr<const int32_t> tables,
                           const std::vector<SequencePlaces>& places) {
  const int64_t padded = staged_.bucket.padded.sequences;
  const int64_t prompts =
      SequencesOf(LaunchedRows::kPrompts, batch_.rows()).count;
  for (size_t g = 0; g < places.size(); ++g) {
    const StepBatch::Group& group = batch_.groups()[g];
    kernels::AttentionSequence* const all = places[g].all.host;
    // Pads with sequences that have no rows.
    std::fill_n(all, padded, kernels::AttentionSequence());
    for (size_t i = 0; i < group.sequences.size(); ++i) {
      all[i] = group.sequences[i];
      const StepBatch::Group::Tables& begin = group.tables[i];
      all[i].block_table = tables + begin.pages;
      if (begin.side_pages >= 0) {
        all[i].side_pages = tables + begin.side_pages;
      }
    }
    if (!parts_.lifts_prompts) continue;
    std::fill(std::copy(all + prompts, all + padded, places[g].output.host),
              places[g].output.host + padded, kernels::AttentionSequence());
  }
}

void Stager::PackHistories(const StepBlob::Place<kernels::TokenHistory>& rows) {
  const kernels::DevicePtr<const int32_t> ids =
      blob_.Add(absl::MakeConstSpan(batch_.history_ids()));
  if (blob_.counting()) return;
  std::fill_n(rows.host, staged_.bucket.padded.histories,
              kernels::TokenHistory());
  kernels::TokenHistory* next = rows.host;
  for (const StepBatch::History& history : batch_.histories()) {
    *next++ = {ids + history.first_id, history.num_ids, history.counts,
               history.clear};
  }
}

void Stager::PackSamples(const StepBlob::Place<kernels::SampleRow>& rows,
                         const StepBlob::Place<int32_t>& carried) {
  const kernels::DevicePtr<const int32_t> bias_ids =
      blob_.Add(absl::MakeConstSpan(batch_.bias_ids()));
  const kernels::DevicePtr<const float> biases =
      blob_.Add(absl::MakeConstSpan(batch_.biases()));
  const kernels::DevicePtr<const int32_t> banned_ids =
      blob_.Add(absl::MakeConstSpan(batch_.banned_ids()));
  const std::vector<StepBatch::Sample>& samples = batch_.samples();
  if (blob_.counting() || samples.empty()) return;
  std::fill_n(rows.host, staged_.bucket.padded.samples, kernels::SampleRow());
  // The new value of each row of last_sampled() is the id that this step
  // samples for the row, or else the old value.
  std::iota(carried.host, carried.host + parts_.limits.max_sequences, 0);
  const int64_t sampled_now = staged_.results.token_ids.device_address() -
                              parts_.state->last_sampled().device_address();
  for (size_t i = 0; i < samples.size(); ++i) {
    kernels::SampleRow& row = rows.host[i];
    row = samples[i].row;
    row.bias_ids = bias_ids + samples[i].first_bias;
    row.biases = biases + samples[i].first_bias;
    row.banned_ids = banned_ids + samples[i].first_banned;
    carried.host[samples[i].table_row] =
        static_cast<int32_t>(sampled_now + static_cast<int64_t>(i));
  }
}

void Stager::PlaceResults() {
  staged_.layout = ResultLayout(staged_.bucket.padded);
  const auto at = [this]<typename T>(int64_t offset,
                                     kernels::DevicePtr<T>* place) {
    *place = (parts_.state->results() + offset).template as<T>();
  };
  at(staged_.layout.token_ids, &staged_.results.token_ids);
  at(staged_.layout.logprobs, &staged_.results.logprobs);
  at(staged_.layout.top_ids, &staged_.results.top_ids);
  at(staged_.layout.top_logprobs, &staged_.results.top_logprobs);
  at(staged_.layout.target_logprobs, &staged_.results.target_logprobs);
  at(staged_.layout.not_finite, &staged_.results.not_finite);
}

absl::Status Stager::RegisterTokenMask(std::string name,
                                       absl::Span<const uint32_t> allowed) {
  const size_t words =
      static_cast<size_t>((parts_.limits.vocab_size + 31) / 32);
  if (name.empty() || allowed.size() != words) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token mask: a mask needs a name and ", words,
        " words of 32 bits, but this one has ",
        name.empty() ? "no name and " : "", allowed.size(), " words"));
  }
  KVASIR_ASSIGN_OR_RETURN(
      kernels::DeviceBuffer buffer,
      parts_.device->allocator().Allocate(words * sizeof(uint32_t),
                                          kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(kernels::Upload(*parts_.stream, buffer.data(),
                                         allowed.data(), buffer.bytes()));
  masks_[std::move(name)] = std::move(buffer);
  return absl::OkStatus();
}

}  // namespace kvasir::worker
