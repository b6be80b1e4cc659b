#include "worker/executor/layer_attention.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "kernels/attention/planner/attention_tiles.h"
#include "kernels/linear/ops.h"
#include "kernels/rowwise/ops.h"
#include "worker/weights/advance.h"

namespace kvasir::worker {

using kernels::HadamardLatent;
using kernels::Stream;
using kernels::Workspace;

LayerAttention::Rows LayerAttention::Rows::Part(int64_t first,
                                                int64_t count) const {
  return {Advance(row, first * stride), stride, count};
}

LayerAttention::SlotWork LayerAttention::WorkOn(
    absl::Span<const kernels::AttentionSequence> sequences,
    absl::Span<const SequenceRows> rows) const {
  SlotWork work;
  if (prompt_launch_ == nullptr && launch_->rebuild_flops.empty()) return work;
  const auto count = [](const Launch& launch, const std::vector<double>& flops,
                        const kernels::AttentionSequence& sequence) {
    return flops.empty()
               ? 0.0
               : kernels::WorkOnTiles(*launch.plan, sequence, flops.data());
  };
  for (size_t i = 0; i < sequences.size(); ++i) {
    const bool prompt = rows[i].prompt && prompt_launch_ != nullptr;
    const Launch& launch = prompt ? *prompt_launch_ : *launch_;
    work.rebuild_flops += count(launch, launch.rebuild_flops, sequences[i]);
    work.prompt_lift_flops +=
        count(launch, launch.prompt_lift_flops, sequences[i]);
  }
  return work;
}

absl::Status LayerAttention::Run(Stream& stream, const AttentionInput& input,
                                 float* out, Workspace& workspace) const {
  const int64_t t = input.num_tokens;
  const AttentionProgram& plan = program();
  Workspace::Scope scope(&workspace);
  const Rows rows{workspace.Take<float>(t * plan.row_columns), plan.row_columns,
                  t};
  Sums sums;
  sums.latents = {workspace.Take<float>(t * plan.value.attended_columns),
                  plan.value.attended_columns, t};
  if (plan.value.lifted) {
    const int64_t columns = plan.heads.query.count * plan.head_dim;
    sums.values = {workspace.Take<float>(t * columns), columns, t};
  }
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Project(stream, input, rows, workspace));
  KVASIR_RETURN_IF_ERROR(Rotate(stream, input, rows, workspace));
  for (size_t p = 0; p < keys_.size(); ++p) {
    KVASIR_RETURN_IF_ERROR(MakeLatents(
        stream, plan.key[p], parts_.weights->key[p], rows, workspace));
    KVASIR_RETURN_IF_ERROR(
        Hadamard(stream, keys_[p].hadamard, false, rows, workspace));
    KVASIR_RETURN_IF_ERROR(ForAbsorbedRows(
        plan.key[p], input, workspace, [&](int64_t first, int64_t count) {
          return LiftQueries(stream, p, rows.Part(first, count), workspace);
        }));
    KVASIR_RETURN_IF_ERROR(
        Hadamard(stream, keys_[p].query_hadamard, false, rows, workspace));
  }
  KVASIR_RETURN_IF_ERROR(
      MakeLatents(stream, plan.value, parts_.weights->value, rows, workspace));
  KVASIR_RETURN_IF_ERROR(
      Hadamard(stream, value_.hadamard, false, rows, workspace));
  const std::vector<Exact> exact = [&] {
    const StepPartScope part_of_step(parts_.profile, stream, StepPart::kAppend);
    return PlaceExact(t, workspace);
  }();
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Append(stream, input, rows, workspace));
  KVASIR_RETURN_IF_ERROR(AppendFresh(stream, rows, exact, workspace));
  KVASIR_RETURN_IF_ERROR(Attend(stream, input, rows, exact, sums, workspace));
  KVASIR_RETURN_IF_ERROR(KeepExact(stream, input, rows, exact, workspace));
  KVASIR_RETURN_IF_ERROR(
      Hadamard(stream, value_.sum_hadamard, true, sums.latents, workspace));
  if (!plan.value.lifted) return Output(stream, sums.latents, out, workspace);
  KVASIR_RETURN_IF_ERROR(LiftSums(stream, input, sums, workspace));
  return Output(stream, sums.values, out, workspace);
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
  params.bias = parts_.weights->qkv_bias;
  params.y = rows.row;
  params.y_row_stride = rows.stride;
  return kernels::Matmul(stream, params, workspace);
}

absl::Status LayerAttention::Rotate(Stream& stream, const AttentionInput& input,
                                    const Rows& rows,
                                    Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kRotation);
  for (const Turn& turn : turns_) {
    kernels::RopeParams params;
    if (turn.whole_queries.num_heads > 0) {
      params.q = turn.whole_queries;
      params.k = turn.whole_keys;
    } else {
      params.q.num_heads = static_cast<int64_t>(turn.queries.size());
      params.q.heads = turn.queries.data();
      params.k.num_heads = static_cast<int64_t>(turn.keys.size());
      params.k.heads = turn.keys.data();
    }
    params.q.data = Advance(rows.row, turn.whole_query_column);
    params.q.row_stride = rows.stride;
    params.k.data = Advance(rows.row, turn.whole_key_column);
    params.k.row_stride = rows.stride;
    params.num_tokens = rows.num_tokens;
    params.positions = input.positions;
    params.steps = parts_.rope_steps;
    params.rotary_dim = parts_.spec->rope.rotary_dim;
    params.pairing = turn.pairing;
    params.attention_factor =
        static_cast<float>(parts_.spec->rope.attention_factor);
    KVASIR_RETURN_IF_ERROR(kernels::Rope(stream, params, workspace));
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
  params.x = Advance(rows.row, part.source_column);
  params.x_row_stride = rows.stride;
  params.num_rows = rows.num_tokens;
  params.weight = weights.basis;
  params.bias = weights.basis_bias;
  params.y = Advance(rows.row, part.latent_column);
  params.y_row_stride = rows.stride;
  return kernels::Matmul(stream, params, workspace);
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

absl::Status LayerAttention::LiftQueries(Stream& stream, size_t part,
                                         const Rows& rows,
                                         Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kLifts);
  const KeyProgram& key = program().key[part];
  if (key.lift == QueryLift::kNone) return absl::OkStatus();
  if (key.lift == QueryLift::kComplex) {
    return ComplexLiftQueries(stream, part, rows, workspace);
  }
  kernels::LiftParams params;
  params.x = rows.row;
  params.x_row_stride = rows.stride;
  params.y = rows.row;
  params.y_row_stride = rows.stride;
  params.num_rows = rows.num_tokens;
  params.num_heads = program().heads.query.count;
  params.num_kv_heads = program().heads.kv.count;
  params.matrices = parts_.weights->key[part].lift.data();
  params.column_in = key.projected.column.data();
  params.column_out = key.query.column.data();
  return kernels::Lift(stream, params, workspace);
}

absl::Status LayerAttention::ComplexLiftQueries(Stream& stream, size_t part,
                                                const Rows& rows,
                                                Workspace& workspace) const {
  const KeyProgram& key = program().key[part];
  const int64_t share = program().heads.query.count / program().heads.kv.count;
  const auto num_heads = static_cast<int64_t>(key.group_of_head.size());
  const auto width = [&](int64_t kv_head) {
    return key.projected.width[static_cast<size_t>(kv_head * share)];
  };
  // Heads that stand for as many pairs, together.
  for (int64_t begin = 0, end = 0; begin < num_heads; begin = end) {
    while (end < num_heads && width(end) == width(begin)) ++end;
    kernels::ComplexLiftParams params;
    params.x = rows.row;
    params.x_row_stride = rows.stride;
    params.y = rows.row;
    params.y_row_stride = rows.stride;
    params.num_rows = rows.num_tokens;
    params.num_heads = (end - begin) * share;
    params.num_kv_heads = end - begin;
    params.channels = keys_[part].channels.data() + begin;
    params.column_in = key.projected.column.data() + begin * share;
    params.column_out = key.query.column.data() + begin * share;
    params.num_pairs = width(begin) / 2;
    params.pairing = pairing_;
    KVASIR_RETURN_IF_ERROR(kernels::ComplexLift(stream, params, workspace));
  }
  return absl::OkStatus();
}

absl::Status LayerAttention::Hadamard(
    Stream& stream, const std::vector<HadamardLatent>& latents, bool transposed,
    const Rows& rows, Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kLifts);
  if (latents.empty()) return absl::OkStatus();
  kernels::HadamardParams params;
  params.x = rows.row;
  params.x_row_stride = rows.stride;
  params.y = rows.row;
  params.y_row_stride = rows.stride;
  params.num_rows = rows.num_tokens;
  params.latents = latents.data();
  params.num_latents = static_cast<int64_t>(latents.size());
  params.transposed = transposed;
  return kernels::Hadamard(stream, params, workspace);
}

absl::Status LayerAttention::Append(Stream& stream, const AttentionInput& input,
                                    const Rows& rows,
                                    Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kAppend);
  std::vector<kernels::KvAppendPart> appended;
  for (size_t p = 0; p < num_parts(); ++p) {
    appended.push_back(
        Appended(p, rows, is_key(p) ? keys_[p].latents : value_.latents));
  }
  kernels::KvAppendParams params;
  params.parts = appended.data();
  params.num_parts = static_cast<int64_t>(appended.size());
  params.slots = input.group.slots;
  params.num_tokens = rows.num_tokens;
  params.page_tokens = parts_.page_tokens;
  params.not_finite = input.not_finite;
  return kernels::KvAppend(stream, params, workspace);
}

kernels::KvAppendPart LayerAttention::Appended(
    size_t part, const Rows& rows, const kernels::LatentPart& to) const {
  kernels::KvAppendPart appended;
  appended.rows =
      Advance(rows.row, is_key(part) ? program().key[part].latent_column
                                     : program().value.latent_column);
  appended.row_stride = rows.stride;
  appended.part = to;
  appended.clamped = parts_.clamped_codes;
  return appended;
}

std::vector<LayerAttention::Exact> LayerAttention::PlaceExact(
    int64_t num_tokens, Workspace& workspace) const {
  std::vector<Exact> exact(num_parts());
  for (size_t p = 0; p < num_parts(); ++p) {
    const KvArenas::Layer& arena = *parts_.arena;
    if ((is_key(p) ? arena.key_ring : arena.value_ring) < 0) continue;
    const KvArenas::Part& part = is_key(p) ? arena.key[p] : arena.value.front();
    exact[p].rows.ring = part.exact;
    kernels::LatentPart& fresh = exact[p].rows.fresh;
    fresh = part.exact;
    fresh.page_bytes = 0;
    for (kernels::LatentGroup group : part.exact_groups) {
      group.codes_offset_bytes = fresh.page_bytes;
      fresh.page_bytes += num_tokens * group.codes_stride_bytes;
      exact[p].fresh_groups.push_back(group);
    }
    fresh.groups = exact[p].fresh_groups.data();
    fresh.arena = workspace.Take<char>(fresh.page_bytes);
  }
  return exact;
}

absl::Status LayerAttention::AppendFresh(Stream& stream, const Rows& rows,
                                         const std::vector<Exact>& exact,
                                         Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kAppend);
  std::vector<kernels::KvAppendPart> appended;
  for (size_t p = 0; p < num_parts(); ++p) {
    if (exact[p].fresh_groups.empty()) continue;
    appended.push_back(Appended(p, rows, exact[p].rows.fresh));
  }
  if (appended.empty()) return absl::OkStatus();
  kernels::KvAppendParams params;
  params.parts = appended.data();
  params.num_parts = static_cast<int64_t>(appended.size());
  params.num_tokens = rows.num_tokens;
  params.page_tokens = rows.num_tokens;  // all in one page
  return kernels::KvAppend(stream, params, workspace);
}

absl::Status LayerAttention::KeepExact(Stream& stream,
                                       const AttentionInput& input,
                                       const Rows& rows,
                                       const std::vector<Exact>& exact,
                                       Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kAppend);
  for (const bool keys : {true, false}) {
    std::vector<kernels::KvAppendPart> appended;
    for (size_t p = 0; p < num_parts(); ++p) {
      if (is_key(p) != keys || exact[p].fresh_groups.empty()) continue;
      appended.push_back(Appended(p, rows, exact[p].rows.ring));
    }
    if (appended.empty()) continue;
    kernels::KvAppendParams params;
    params.parts = appended.data();
    params.num_parts = static_cast<int64_t>(appended.size());
    params.slots = keys ? input.key_ring_slots : input.value_ring_slots;
    params.num_tokens = rows.num_tokens;
    params.page_tokens =
        WindowOf(keys ? parts_.arena->key_ring : parts_.arena->value_ring)
            .page_rows;
    KVASIR_RETURN_IF_ERROR(kernels::KvAppend(stream, params, workspace));
  }
  return absl::OkStatus();
}

kernels::ExactWindow LayerAttention::WindowOf(int64_t ring) const {
  kernels::ExactWindow window;
  if (ring < 0) return window;
  const cache::ExactRing& rows =
      (*parts_.rings)[static_cast<size_t>(ring)].rows;
  window.tokens = rows.window_tokens;
  window.page_rows = rows.rows_per_page;
  window.first_page = rows.first_page;
  window.num_pages = rows.num_pages;
  return window;
}

absl::Status LayerAttention::Attend(Stream& stream, const AttentionInput& input,
                                    const Rows& rows,
                                    const std::vector<Exact>& exact,
                                    const Sums& sums,
                                    Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream,
                                   StepPart::kAttention);
  const SequenceRange all = {0, input.num_sequences};
  if (prompt_launch_ == nullptr) {
    return Attend(stream, input, *launch_, all, rows, exact, sums, workspace);
  }
  if (workspace.counting()) {  // either may have all of them
    KVASIR_RETURN_IF_ERROR(Attend(stream, input, *prompt_launch_, all, rows,
                                  exact, sums, workspace));
    return Attend(stream, input, *launch_, all, rows, exact, sums, workspace);
  }
  const int64_t prompts =
      std::count_if(input.rows.begin(), input.rows.end(),
                    [](const SequenceRows& each) { return each.prompt; });
  KVASIR_RETURN_IF_ERROR(Attend(stream, input, *prompt_launch_, {0, prompts},
                                rows, exact, sums, workspace));
  return Attend(stream, input, *launch_,
                {prompts, input.num_sequences - prompts}, rows, exact, sums,
                workspace);
}

absl::Status LayerAttention::Attend(Stream& stream, const AttentionInput& input,
                                    const Launch& launch,
                                    SequenceRange sequences, const Rows& rows,
                                    const std::vector<Exact>& exact,
                                    const Sums& sums,
                                    Workspace& workspace) const {
  if (sequences.count == 0) return absl::OkStatus();
  std::vector<kernels::AttentionKeyPart> keys = launch.keys;
  for (size_t p = 0; p < keys.size(); ++p) keys[p].exact = &exact[p].rows;
  kernels::AttentionValuePart value = launch.value;
  value.exact = &exact.back().rows;
  const Rows& to = value.lift != nullptr ? sums.values : sums.latents;

  kernels::PagedAttentionParams params = launch.params;
  params.keys = keys.data();
  params.values = &value;
  params.q = rows.row;
  params.q_row_stride = rows.stride;
  params.out = to.row;
  params.out_row_stride = to.stride;
  params.sequences = Advance(input.group.sequences, sequences.first);
  params.num_sequences = sequences.count;
  return kernels::PagedAttention(stream, params, workspace);
}

absl::Status LayerAttention::LiftSums(Stream& stream,
                                      const AttentionInput& input,
                                      const Sums& sums,
                                      Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kLifts);
  const PartWeights& weights = parts_.weights->value;
  KVASIR_RETURN_IF_ERROR(ForAbsorbedRows(
      program().value, input, workspace, [&](int64_t first, int64_t count) {
        const Rows from = sums.latents.Part(first, count);
        const Rows to = sums.values.Part(first, count);
        kernels::LiftParams lift;
        lift.x = from.row;
        lift.x_row_stride = from.stride;
        lift.y = to.row;
        lift.y_row_stride = to.stride;
        lift.num_rows = count;
        lift.num_heads = program().heads.query.count;
        lift.num_kv_heads = program().heads.kv.count;
        lift.matrices = weights.lift.data();
        lift.column_in = program().value.attended.column.data();
        lift.column_out = value_.lifted_column.data();
        return kernels::Lift(stream, lift, workspace);
      }));
  if (weights.lift_bias == nullptr) return absl::OkStatus();
  kernels::AddRowsParams add;
  add.y = sums.values.row;
  add.y_row_stride = sums.values.stride;
  add.x = weights.lift_bias;
  add.num_rows = sums.values.num_tokens;
  add.columns = sums.values.stride;
  return kernels::AddRows(stream, add, workspace);
}

absl::Status LayerAttention::Output(Stream& stream, const Rows& rows,
                                    float* out, Workspace& workspace) const {
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
  return kernels::Matmul(stream, params, workspace);
}

}  // namespace kvasir::worker
