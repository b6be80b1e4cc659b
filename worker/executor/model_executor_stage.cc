// Stage: a step plan checked and packed into what the device needs of it.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/executor/model_executor.h"

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

absl::Status ModelExecutor::Stage(const StepPlan& plan) {
  KVASIR_RETURN_IF_ERROR(ApplyPlan(plan));
  staged_.step_id = plan.step_id();
  staged_.sizes = batch_.sizes();
  staged_.bucket = BucketOfBatch();
  PlaceResults(&staged_);
  // A plan may do nothing but release sequences, or copy pages beside it.
  if (staged_.sizes.tokens == 0 && copies_.pairs.empty() &&
      evictions_->batches().empty()) {
    return absl::OkStatus();
  }
  blob_.StartCounting();
  Pack();
  KVASIR_RETURN_IF_ERROR(blob_.StartPacking());
  Pack();
  KVASIR_RETURN_IF_ERROR(decoder_->DivideSteps(batch_.rows(), staged_.groups));
  return blob_.Upload(*parts_.stream);
}

absl::Status ModelExecutor::ApplyPlan(const StepPlan& plan) {
  if (plan.step_id() != last_step_id_ + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step plan: step id ", plan.step_id(), ", want ", last_step_id_ + 1));
  }
  last_step_id_ = plan.step_id();
  for (const uint64_t id : plan.released_sequences()) {
    KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<PenaltyCounts> penalties,
                            table_->Release(id));
    if (penalties != nullptr) idle_penalties_.push_back(std::move(penalties));
  }
  KVASIR_RETURN_IF_ERROR(ListMoves(plan));
  KVASIR_RETURN_IF_ERROR(batch_.Build(
      plan, table_.get(),
      [this](const SequenceStep& step, SequenceTable::Sequence* sequence,
             kernels::SampleRow* row) {
        return PrepareSample(step, sequence, row);
      }));
  batch_.PlaceWeights(decoder_->mass_room().most_weights,
                      table_->limits().page_tokens);
  return absl::OkStatus();
}

// Evictions come between copies, which may read what they leave and write where
// they took from.
absl::Status ModelExecutor::ListMoves(const StepPlan& plan) {
  copies_.Clear();
  evictions_->Clear();
  const absl::Span<const kvasir::v1::PageCopy* const> copies(
      plan.page_copies().data(), static_cast<size_t>(plan.page_copies_size()));
  size_t done = 0;
  for (const kvasir::v1::SlotEviction& eviction : plan.evictions()) {
    const size_t before = eviction.after_page_copies();
    if (before < done || before > copies.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "step plan: sequence ", eviction.sequence_id(), ": evicts behind ",
          before, " page copies, want ", done, " to ", copies.size()));
    }
    KVASIR_RETURN_IF_ERROR(
        arenas_.AddCopies(copies.subspan(done, before - done), &copies_));
    done = before;
    KVASIR_RETURN_IF_ERROR(table_->Evict(eviction));
    KVASIR_RETURN_IF_ERROR(evictions_->Add(
        eviction, static_cast<int64_t>(copies_.batches.size())));
  }
  return arenas_.AddCopies(copies.subspan(done), &copies_);
}

absl::Status ModelExecutor::PrepareSample(const SequenceStep& step,
                                          SequenceTable::Sequence* sequence,
                                          kernels::SampleRow* row) {
  const std::string& name = step.sample().token_mask();
  if (!name.empty()) {
    const auto found = masks_.find(name);
    if (found == masks_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step plan: sequence ", step.sequence_id(),
                       ": token_mask: there is none of this name"));
    }
    row->allow_mask = found->second.as<uint32_t>();
  }
  return HasPenalty(step.sample()) ? PreparePenalties(step, sequence, row)
                                   : absl::OkStatus();
}

absl::Status ModelExecutor::PreparePenalties(const SequenceStep& step,
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
          static_cast<size_t>(limits_.vocab_size) * sizeof(int32_t);
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

StepBucket ModelExecutor::BucketOfBatch() const {
  StepBucket bucket;
  bucket.padded = PadSizes(batch_.sizes(), limits_, output_->logits_rows());
  bucket.copies.assign(copies_.batches.begin(), copies_.batches.end());
  bucket.evictions.assign(evictions_->batches().begin(),
                          evictions_->batches().end());
  if (lifts_prompts_) {
    bucket.has_prompts = batch_.has_prompts();
    bucket.output_runs = batch_.output_runs();
  }
  return bucket;
}

// What a launch takes by its address comes first, in places of the bucket's
// size; what is found through the rows of those comes behind them.
void ModelExecutor::Pack() {
  const StepSizes& padded = staged_.bucket.padded;
  const auto add = [this](const auto& list, int64_t count, auto padding) {
    return blob_.Add(absl::MakeConstSpan(list), count, padding);
  };
  constexpr int64_t kNoSlot = -1;
  staged_.copies = blob_.Add(absl::MakeConstSpan(copies_.pairs));
  evictions_->Pack(&blob_);
  staged_.ids = add(batch_.ids(), padded.tokens, int32_t{0});
  staged_.token_sources =
      add(batch_.token_sources(), padded.tokens, int32_t{0});
  staged_.positions = add(batch_.positions(), padded.tokens, int64_t{0});
  std::vector<SequencePlaces> sequences(staged_.groups.size());
  for (size_t group = 0; group < staged_.groups.size(); ++group) {
    staged_.groups[group].slots =
        add(batch_.groups()[group].slots, padded.tokens, kNoSlot);
    if (arenas_.evicts(static_cast<int64_t>(group))) {
      staged_.groups[group].slot_positions =
          add(batch_.groups()[group].slot_positions, padded.tokens, int64_t{0});
    }
    SequencePlaces& places = sequences[group];
    places.all = blob_.Take<kernels::AttentionSequence>(padded.sequences);
    places.output = blob_.Take<kernels::AttentionSequence>(
        lifts_prompts_ ? padded.sequences : 0);
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
  const auto carried =
      blob_.Take<int32_t>(padded.samples == 0 ? 0 : options_.max_num_seqs);
  staged_.carried = carried.device;
  const auto histories = blob_.Take<kernels::TokenHistory>(padded.histories);
  staged_.histories = histories.device;
  staged_.target_rows = add(batch_.target_rows(), padded.targets, int32_t{0});
  staged_.target_ids = add(batch_.target_ids(), padded.targets, int32_t{0});
  if (options_.logits_tap) {
    const auto rows = blob_.Take<int32_t>(padded.tokens);
    if (!blob_.counting()) std::iota(rows.host, rows.host + padded.tokens, 0);
    staged_.all_rows = rows.device;
  }
  staged_.zeros = blob_.Add(absl::Span<const int32_t>(), padded.tokens, 0);
  const kernels::DevicePtr<const int32_t> tables =
      blob_.Add(absl::MakeConstSpan(batch_.tables()));
  evictions_->PackTables(&blob_);
  if (!blob_.counting()) PackSequences(tables, sequences);
  PackHistories(histories);
  PackSamples(samples, carried);
}

void ModelExecutor::PackSequences(kernels::DevicePtr<const int32_t> tables,
                                  const std::vector<SequencePlaces>& places) {
  const int64_t padded = staged_.bucket.padded.sequences;
  const int64_t prompts =
      SequencesOf(LaunchedRows::kPrompts, batch_.rows()).count;
  for (size_t g = 0; g < places.size(); ++g) {
    const StepBatch::Group& group = batch_.groups()[g];
    kernels::AttentionSequence* const all = places[g].all.host;
    std::fill_n(all, padded, kernels::AttentionSequence());  // of no rows
    for (size_t i = 0; i < group.sequences.size(); ++i) {
      all[i] = group.sequences[i];
      const StepBatch::Group::Tables& of = group.tables[i];
      all[i].block_table = tables + of.pages;
      if (of.side_pages >= 0) all[i].side_pages = tables + of.side_pages;
    }
    if (!lifts_prompts_) continue;
    std::fill(std::copy(all + prompts, all + padded, places[g].output.host),
              places[g].output.host + padded, kernels::AttentionSequence());
  }
}

void ModelExecutor::PackHistories(
    const StepBlob::Place<kernels::TokenHistory>& rows) {
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

void ModelExecutor::PackSamples(const StepBlob::Place<kernels::SampleRow>& rows,
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
  // last[row] = sampled now, or what it was.
  std::iota(carried.host, carried.host + options_.max_num_seqs, 0);
  const int64_t sampled_now = staged_.results.token_ids.device_address() -
                              last_sampled().device_address();
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

void ModelExecutor::PlaceResults(StagedStep* step) const {
  step->layout = ResultLayout(step->bucket.padded);
  const auto at = [this]<typename T>(int64_t offset,
                                     kernels::DevicePtr<T>* place) {
    *place = (results() + offset).template as<T>();
  };
  at(step->layout.token_ids, &step->results.token_ids);
  at(step->layout.logprobs, &step->results.logprobs);
  at(step->layout.top_ids, &step->results.top_ids);
  at(step->layout.top_logprobs, &step->results.top_logprobs);
  at(step->layout.target_logprobs, &step->results.target_logprobs);
  at(step->layout.not_finite, &step->results.not_finite);
}

}  // namespace kvasir::worker
