#include "worker/executor/launcher.h"

#include <chrono>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "kernels/rowwise/ops.h"
#include "kernels/sampling/ops.h"
#include "worker/executor/slot_evictions.h"

namespace kvasir::worker {
namespace {

using kernels::Workspace;

// Returns parameters with which the op for float32 rows gathers int32 numbers.
// The op copies the bits of each number unchanged, as a row with one column.
kernels::GatherRowsParams GatherNumbers(kernels::DevicePtr<const int32_t> from,
                                        kernels::DevicePtr<const int32_t> rows,
                                        kernels::DevicePtr<int32_t> to,
                                        int64_t count) {
  kernels::GatherRowsParams gather;
  gather.x = from.as<const float>();
  gather.x_row_stride = 1;
  gather.rows = rows;
  gather.out = to.as<float>();
  gather.out_row_stride = 1;
  gather.num_rows = count;
  gather.columns = 1;
  return gather;
}

// A step profile and a logits tap work between a step's ops, so a graph cannot
// replace the ops.
bool CanUseGraphs(const Launcher::Parts& parts) {
  return parts.graphs && parts.decoder->profile() == nullptr &&
         !parts.logits_tap &&
         parts.stream->device() != kernels::DeviceKind::kCpu &&
         parts.collective->can_be_captured();
}

}  // namespace

Launcher::Launcher(Parts parts)
    : parts_(std::move(parts)),
      output_(parts_.decoder, parts_.limits.max_batched_tokens,
              parts_.logits_bytes) {
  if (CanUseGraphs(parts_)) graphs_ = std::make_unique<StepGraphs>();
}

absl::Status Launcher::AllocateWorkspace(const StagedStep& largest,
                                         kernels::DeviceAllocator* allocator) {
  Workspace counter = Workspace::Counting();
  KVASIR_RETURN_IF_ERROR(LaunchOps(largest, counter));
  KVASIR_ASSIGN_OR_RETURN(
      workspace_memory_,
      allocator->Allocate(counter.peak_bytes() + Workspace::kAlignmentBytes,
                          kernels::MemoryTag::kWorkspace));
  return absl::OkStatus();
}

absl::Status Launcher::LaunchOps(const StagedStep& step, Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(MovePages(step, workspace));
  if (step.sizes.tokens == 0) return absl::OkStatus();
  TokenBatch tokens;
  tokens.num_tokens = step.sizes.tokens;
  tokens.padded_tokens = step.bucket.padded.tokens;
  tokens.num_sequences = step.sizes.sequences;
  tokens.rows = step.batch->rows();
  tokens.positions = step.positions;
  tokens.groups = step.groups;
  tokens.ring_slots = step.ring_slots;
  const kernels::DevicePtr<int32_t> ids =
      workspace.Take<int32_t>(step.bucket.padded.tokens);
  tokens.ids = ids;
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(GatherIds(step, ids, workspace));
  tokens.not_finite = step.results.not_finite;
  KVASIR_RETURN_IF_ERROR(kernels::GatherRows(
      *parts_.stream,
      GatherNumbers(step.zeros, nullptr, tokens.not_finite.as<int32_t>(),
                    tokens.num_tokens),
      workspace));
  HiddenStates hidden;
  KVASIR_RETURN_IF_ERROR(
      parts_.decoder->Run(*parts_.stream, tokens, &hidden, workspace));
  if (parts_.logits_tap) {
    KVASIR_RETURN_IF_ERROR(TapLogits(step, hidden, workspace));
  }
  KVASIR_RETURN_IF_ERROR(RunTargets(step, hidden, workspace));
  return RunSamples(step, hidden, workspace);
}

absl::Status Launcher::MovePages(const StagedStep& step, Workspace& workspace) {
  size_t evicted = 0;
  const auto evict = [&](size_t copied) {
    const auto& batches = step.bucket.evictions;
    for (; evicted < batches.size() &&
           batches[evicted].copy_batches == static_cast<int64_t>(copied);
         ++evicted) {
      KVASIR_RETURN_IF_ERROR(Evict(step, evicted, workspace));
    }
    return absl::OkStatus();
  };
  for (size_t i = 0; i < step.bucket.copies.size(); ++i) {
    KVASIR_RETURN_IF_ERROR(evict(i));
    KVASIR_RETURN_IF_ERROR(parts_.arenas->Copy(
        *parts_.stream, step.bucket.copies[i], step.copies, workspace));
  }
  return evict(step.bucket.copies.size());
}

absl::Status Launcher::Evict(const StagedStep& step, size_t index,
                             Workspace& workspace) {
  const auto start = std::chrono::steady_clock::now();
  KVASIR_RETURN_IF_ERROR(step.evictions->Run(*parts_.stream, *parts_.decoder,
                                             step.bucket.evictions[index],
                                             index, workspace));
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  if (!workspace.counting() &&
      parts_.stream->device() == kernels::DeviceKind::kCpu) {
    parts_.totals->eviction_seconds += took.count();
  }
  return absl::OkStatus();
}

// Gathers the step's token ids on the device. Each id comes from the plan, or
// from an earlier step that sampled it.
absl::Status Launcher::GatherIds(const StagedStep& step,
                                 kernels::DevicePtr<int32_t> ids,
                                 Workspace& workspace) {
  KVASIR_RETURN_IF_ERROR(kernels::GatherRows(
      *parts_.stream,
      GatherNumbers(step.ids, nullptr, parts_.state->source_ids(),
                    step.sizes.tokens),
      workspace));
  return kernels::GatherRows(
      *parts_.stream,
      GatherNumbers(parts_.state->source_ids(), step.token_sources, ids,
                    step.sizes.tokens),
      workspace);
}

absl::Status Launcher::TapLogits(const StagedStep& step,
                                 const HiddenStates& hidden,
                                 Workspace& workspace) {
  std::vector<uint64_t> sequence_ids;
  for (const StepBatch::Output& output : step.batch->outputs()) {
    sequence_ids.insert(sequence_ids.end(),
                        static_cast<size_t>(output.num_rows),
                        output.sequence_id);
  }
  const int64_t vocab = parts_.limits.vocab_size;
  return output_.ReadAllLogits(
      *parts_.stream, hidden, step.all_rows, step.sizes.tokens,
      [&](int64_t first_row, absl::Span<const float> logits) {
        for (size_t at = 0; at < logits.size();
             at += static_cast<size_t>(vocab)) {
          const auto row =
              static_cast<size_t>(first_row) + at / static_cast<size_t>(vocab);
          parts_.logits_tap({sequence_ids[row], step.batch->positions()[row],
                             logits.subspan(at, static_cast<size_t>(vocab))});
        }
        return absl::OkStatus();
      },
      workspace);
}

absl::Status Launcher::RunTargets(const StagedStep& step,
                                  const HiddenStates& hidden,
                                  Workspace& workspace) {
  if (step.sizes.targets == 0) return absl::OkStatus();
  TargetBatch batch;
  batch.num_rows = step.sizes.targets;
  batch.padded_rows = step.bucket.padded.targets;
  batch.token_rows = step.target_rows;
  batch.target_ids = step.target_ids;
  batch.logprobs = step.results.target_logprobs;
  return output_.ScoreTargets(*parts_.stream, hidden, batch, workspace);
}

// The launch has one row for each history of the bucket. Rows of padding count
// no tokens.
absl::Status Launcher::CountHistories(const StagedStep& step,
                                      Workspace& workspace) {
  const int64_t count = step.bucket.padded.histories;
  if (count == 0) return absl::OkStatus();
  return kernels::CountTokens(*parts_.stream,
                              {step.histories, count, parts_.limits.vocab_size},
                              workspace);
}

absl::Status Launcher::RunSamples(const StagedStep& step,
                                  const HiddenStates& hidden,
                                  Workspace& workspace) {
  if (step.sizes.samples == 0) return absl::OkStatus();
  KVASIR_RETURN_IF_ERROR(CountHistories(step, workspace));
  SampleBatch batch;
  batch.num_rows = step.sizes.samples;
  batch.padded_rows = step.bucket.padded.samples;
  batch.token_rows = step.sample_rows;
  batch.rows = step.samples;
  batch.max_top = step.bucket.padded.top;
  batch.token_ids = step.results.token_ids;
  batch.logprobs = step.results.logprobs;
  batch.top_ids = step.results.top_ids;
  batch.top_logprobs = step.results.top_logprobs;
  KVASIR_RETURN_IF_ERROR(
      output_.Sample(*parts_.stream, hidden, batch, workspace));
  return CarrySampled(step, workspace);
}

absl::Status Launcher::CarrySampled(const StagedStep& step,
                                    Workspace& workspace) {
  const int64_t count = parts_.limits.max_sequences;
  Workspace::Scope scope(&workspace);
  const kernels::DevicePtr<int32_t> merged = workspace.Take<int32_t>(count);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(kernels::GatherRows(
      *parts_.stream,
      GatherNumbers(parts_.state->last_sampled(), step.carried, merged, count),
      workspace));
  return kernels::GatherRows(
      *parts_.stream,
      GatherNumbers(merged, nullptr, parts_.state->last_sampled(), count),
      workspace);
}

}  // namespace kvasir::worker
