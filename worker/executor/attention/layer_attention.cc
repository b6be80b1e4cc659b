#include "worker/executor/attention/layer_attention.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/linear/ops.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::worker {

using kernels::Stream;
using kernels::Workspace;

std::vector<LayerAttention::Launch*> LayerAttention::launches() const {
  if (prompt_launch_ == nullptr) return {launch_.get()};
  return {prompt_launch_.get(), launch_.get()};
}

SequenceRange SequencesOf(LaunchedRows launched,
                          absl::Span<const SequenceRows> rows) {
  const auto all = static_cast<int64_t>(rows.size());
  if (launched == LaunchedRows::kAll) return {0, all};
  const int64_t prompts =
      std::count_if(rows.begin(), rows.end(),
                    [](const SequenceRows& each) { return each.prompt; });
  return launched == LaunchedRows::kPrompts
             ? SequenceRange{0, prompts}
             : SequenceRange{prompts, all - prompts};
}

LayerAttention::SlotWork LayerAttention::WorkOn(
    absl::Span<const kernels::AttentionSequence> sequences,
    absl::Span<const SequenceRows> rows) const {
  SlotWork work;
  for (const Launch* const launch : {prompt_launch_.get(), launch_.get()}) {
    if (launch == nullptr) continue;
    const auto count = [launch](const std::vector<double>& flops,
                                const kernels::AttentionSequence& sequence) {
      return flops.empty() ? 0.0
                           : launch->attention.WorkOnSlots(sequence, flops);
    };
    const SequenceRange range = SequencesOf(launch->rows, rows);
    for (const kernels::AttentionSequence& sequence :
         sequences.subspan(static_cast<size_t>(range.first),
                           static_cast<size_t>(range.count))) {
      work.rebuild_flops += count(launch->rebuild_flops, sequence);
      work.prompt_lift_flops += count(launch->prompt_lift_flops, sequence);
    }
  }
  return work;
}

absl::Status LayerAttention::Run(Stream& stream, const AttentionInput& input,
                                 kernels::DevicePtr<float> out,
                                 Workspace& workspace) const {
  const int64_t t = input.num_tokens;
  const AttentionProgram& plan = program();
  Workspace::Scope scope(&workspace);
  const auto take = [&](int64_t columns) {
    return Rows{activations_.Take(workspace, input.padded_tokens * columns),
                columns, t};
  };
  const Rows rows = take(row_columns_);
  Sums sums;
  sums.latents = take(plan.value.attended_columns);
  if (plan.value.lifted) {
    sums.values = take(plan.heads.query.count * plan.head_dim);
  }
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Project(stream, input, rows, workspace));
  KVASIR_RETURN_IF_ERROR(NormalizeHeads(stream, rows, workspace));
  if (parts_.key_tap != nullptr && !workspace.counting()) {
    KVASIR_RETURN_IF_ERROR(TapKeys(stream, rows));
  }
  KVASIR_RETURN_IF_ERROR(RotateRows(stream, input, rows, workspace));
  if (key_bias_ != nullptr) {
    const StepPartScope part_of_step(parts_.profile, stream,
                                     StepPart::kRotation);
    KVASIR_RETURN_IF_ERROR(kernels::KeyBias(
        stream, *key_bias_->op, {rows.row, input.positions, t}, workspace));
  }
  for (size_t p = 0; p < keys_.size(); ++p) {
    KVASIR_RETURN_IF_ERROR(MakeLatents(
        stream, plan.key[p], parts_.weights->key[p], rows, workspace));
    KVASIR_RETURN_IF_ERROR(
        Hadamard(stream, keys_[p].hadamard, rows, workspace));
    KVASIR_RETURN_IF_ERROR(ForAbsorbedRows(
        plan.key[p], input, workspace, [&](int64_t first, int64_t count) {
          return LiftQueries(stream, keys_[p],
                             {rows.row, rows.row, first, count}, workspace);
        }));
    KVASIR_RETURN_IF_ERROR(
        Hadamard(stream, keys_[p].query_hadamard, rows, workspace));
  }
  KVASIR_RETURN_IF_ERROR(
      MakeLatents(stream, plan.value, parts_.weights->value, rows, workspace));
  KVASIR_RETURN_IF_ERROR(Hadamard(stream, value_.hadamard, rows, workspace));
  kernels::KvAppendRows appended = {rows.row, input.group.slots, t,
                                    input.not_finite, input.positions};
  KVASIR_RETURN_IF_ERROR(Append(stream, append_, appended, workspace));
  appended = {rows.row, nullptr, t};
  KVASIR_RETURN_IF_ERROR(Append(stream, append_fresh_, appended, workspace));
  KVASIR_RETURN_IF_ERROR(Attend(stream, input, rows, sums, workspace));
  appended.slots = input.key_ring_slots;
  KVASIR_RETURN_IF_ERROR(Append(stream, keep_keys_, appended, workspace));
  appended.slots = input.value_ring_slots;
  KVASIR_RETURN_IF_ERROR(Append(stream, keep_values_, appended, workspace));
  KVASIR_RETURN_IF_ERROR(
      Hadamard(stream, value_.sum_hadamard, sums.latents, workspace));
  if (!plan.value.lifted) return Output(stream, sums.latents, out, workspace);
  KVASIR_RETURN_IF_ERROR(LiftSums(stream, input, sums, workspace));
  return Output(stream, sums.values, out, workspace);
}

absl::Status LayerAttention::Matmul(Stream& stream,
                                    kernels::MatmulParams params,
                                    Workspace& workspace) const {
  params.dtype = activations_.dtype;
  params.y_dtype = activations_.dtype;
  return kernels::Matmul(stream, params, workspace);
}

absl::Status LayerAttention::Project(Stream& stream,
                                     const AttentionInput& input,
                                     const Rows& rows,
                                     Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream,
                                   StepPart::kProjections);
  kernels::MatmulParams params;
  params.x = input.normed;
  params.x_row_stride = parts_.weights->qkv.k;
  params.num_rows = rows.num_tokens;
  params.weight = parts_.weights->qkv;
  params.bias = qkv_bias_;
  params.y = rows.row;
  params.y_row_stride = rows.stride;
  return Matmul(stream, params, workspace);
}

absl::Status LayerAttention::NormalizeHeads(Stream& stream, const Rows& rows,
                                            Workspace& workspace) const {
  if (parts_.spec->qk_norm == model::QkNorm::kNone) return absl::OkStatus();
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kNorms);
  const AttentionProgram& plan = program();
  // For a model with QK-norm, every plan has one key part with all dimensions
  // (plan/space.cc). So the columns of all heads are contiguous.
  KVASIR_CHECK(plan.key.size() == 1);
  const KeyProgram& key = plan.key[0];
  const bool together = parts_.spec->qk_norm == model::QkNorm::kAllHeads;
  const auto normalize = [&](int64_t column, int64_t num_heads,
                             kernels::DevicePtr<const float> weight) {
    const int64_t count = together ? 1 : num_heads;
    kernels::NormParams norm;
    norm.x = activations_.At(rows.row, column);
    norm.out = norm.x;
    norm.weight = weight;
    norm.num_rows = rows.num_tokens * count;
    norm.columns = num_heads / count * plan.head_dim;
    norm.eps = static_cast<float>(parts_.spec->norm_eps);
    norm.dtype = activations_.dtype;
    norm.num_parts = count;
    norm.stride = rows.stride;
    return kernels::Norm(stream, norm, workspace);
  };
  KVASIR_RETURN_IF_ERROR(normalize(
      key.projected.column[0], plan.heads.query.count, parts_.weights->q_norm));
  return normalize(key.source_column, key.source_columns / plan.head_dim,
                   parts_.weights->k_norm);
}

absl::Status LayerAttention::RotateRows(Stream& stream,
                                        const AttentionInput& input,
                                        const Rows& rows,
                                        Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kRotation);
  for (const Rotate& turn : turns_) {
    KVASIR_RETURN_IF_ERROR(
        kernels::Rope(stream, turn.rope,
                      {activations_.At(rows.row, turn.query_column),
                       activations_.At(rows.row, turn.key_column),
                       rolling_ ? input.group.slot_positions : input.positions,
                       rows.num_tokens},
                      workspace));
  }
  return absl::OkStatus();
}

absl::Status LayerAttention::MakeLatents(Stream& stream,
                                         const PartProgram& part,
                                         const PartWeights& weights,
                                         const Rows& rows,
                                         Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream,
                                   StepPart::kProjections);
  if (!part.has_basis) return absl::OkStatus();
  kernels::MatmulParams params;
  params.x = activations_.At(rows.row, part.source_column);
  params.x_row_stride = rows.stride;
  params.num_rows = rows.num_tokens;
  params.weight = weights.basis;
  params.bias = weights.basis_bias;
  params.y = activations_.At(rows.row, part.latent_column);
  params.y_row_stride = rows.stride;
  return Matmul(stream, params, workspace);
}

absl::Status LayerAttention::ForAbsorbedRows(
    const PartProgram& part, const AttentionInput& input,
    const Workspace& workspace,
    absl::FunctionRef<absl::Status(int64_t first, int64_t count)> call) const {
  if (!part.prompt_lift.has_value() || workspace.counting()) {
    return call(0, input.num_tokens);
  }
  int64_t begin = 0;
  int64_t end = 0;
  for (const SequenceRows& rows : input.rows) {
    if (rows.prompt) continue;
    if (rows.first_row != end) {
      if (end > begin) KVASIR_RETURN_IF_ERROR(call(begin, end - begin));
      begin = rows.first_row;
    }
    end = rows.first_row + rows.num_rows;
  }
  return end > begin ? call(begin, end - begin) : absl::OkStatus();
}

absl::Status LayerAttention::LiftQueries(Stream& stream, const Key& key,
                                         const kernels::LiftRows& rows,
                                         Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kLifts);
  if (key.lift.has_value()) {
    return kernels::Lift(stream, *key.lift, rows, workspace);
  }
  for (const kernels::PreparedComplexLift& lift : key.complex_lifts) {
    KVASIR_RETURN_IF_ERROR(kernels::ComplexLift(stream, lift, rows, workspace));
  }
  return absl::OkStatus();
}

absl::Status LayerAttention::Hadamard(
    Stream& stream, const std::optional<kernels::PreparedHadamard>& hadamard,
    const Rows& rows, Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kLifts);
  if (!hadamard.has_value()) return absl::OkStatus();
  return kernels::Hadamard(stream, *hadamard,
                           {rows.row, rows.row, rows.num_tokens}, workspace);
}

absl::Status LayerAttention::Append(
    Stream& stream, const std::optional<kernels::PreparedKvAppend>& append,
    const kernels::KvAppendRows& rows, Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kAppend);
  if (!append.has_value()) return absl::OkStatus();
  return kernels::KvAppend(stream, *append, rows, workspace);
}

absl::Status LayerAttention::Attend(Stream& stream, const AttentionInput& input,
                                    const Rows& rows, const Sums& sums,
                                    Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream,
                                   StepPart::kAttention);
  const auto attend = [&](Launch* launch) -> absl::Status {
    // A counting workspace measures the memory for the largest launch, which
    // has all sequences.
    const SequenceRange range = workspace.counting()
                                    ? SequenceRange{0, input.num_sequences}
                                    : SequencesOf(launch->rows, input.rows);
    if (range.count == 0) return absl::OkStatus();
    const Rows& to = launch->lifts_values ? sums.values : sums.latents;
    const kernels::AttentionStep step = workspace.counting()
                                            ? kernels::AttentionStep{}
                                            : input.steps[launch->step];
    const bool output = launch->rows == LaunchedRows::kOutput;
    return kernels::PagedAttention(
        stream, launch->attention,
        {rows.row, to.row,
         output ? input.group.output_sequences : input.group.sequences,
         range.count},
        step, workspace);
  };
  if (prompt_launch_ != nullptr) {
    KVASIR_RETURN_IF_ERROR(attend(prompt_launch_.get()));
  }
  return attend(launch_.get());
}

absl::Status LayerAttention::Evict(Stream& stream,
                                   const kernels::EvictionRows& rows,
                                   const kernels::EvictionStep& step,
                                   Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kEviction);
  KVASIR_CHECK(eviction_.has_value());
  KVASIR_RETURN_IF_ERROR(
      kernels::EvictSelect(stream, *eviction_, rows, step, workspace));
  return kernels::EvictCompact(stream, *eviction_, rows, workspace);
}

absl::Status LayerAttention::LiftSums(Stream& stream,
                                      const AttentionInput& input,
                                      const Sums& sums,
                                      Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kLifts);
  KVASIR_RETURN_IF_ERROR(ForAbsorbedRows(
      program().value, input, workspace, [&](int64_t first, int64_t count) {
        return kernels::Lift(stream, *value_.lift,
                             {sums.latents.row, sums.values.row, first, count},
                             workspace);
      }));
  const PartWeights& weights = parts_.weights->value;
  if (!weights.lift_bias) return absl::OkStatus();
  kernels::AddRowsParams add;
  add.y = sums.values.row;
  add.y_row_stride = sums.values.stride;
  add.x = weights.lift_bias;
  add.num_rows = sums.values.num_tokens;
  add.columns = sums.values.stride;
  add.dtype = activations_.dtype;
  return kernels::AddRows(stream, add, workspace);
}

absl::Status LayerAttention::Output(Stream& stream, const Rows& rows,
                                    kernels::DevicePtr<float> out,
                                    Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kOutput);
  const LayerWeights& weights = *parts_.weights;
  kernels::MatmulParams params;
  params.x = rows.row;
  params.x_row_stride = rows.stride;
  params.num_rows = rows.num_tokens;
  params.weight = weights.o;
  params.bias = weights.o_bias;
  params.y = out;
  params.y_row_stride = weights.o.n;
  return Matmul(stream, params, workspace);
}

}  // namespace kvasir::worker
