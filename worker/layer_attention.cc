#include "worker/layer_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/attention_tiles.h"
#include "worker/advance.h"

namespace kvasir::worker {
namespace {

using kernels::HadamardLatent;
using kernels::Stream;
using kernels::Workspace;

kernels::RopePairing PairingOf(model::RopePairing pairing) {
  return pairing == model::RopePairing::kHalfSplit
             ? kernels::RopePairing::kHalfSplit
             : kernels::RopePairing::kInterleaved;
}

// The pages of a part, and the ranges that do not lie in them.
kernels::LatentPart Latents(const KvArenas::Part& arena,
                            const PartWeights& weights) {
  kernels::LatentPart latents = arena.latents;
  latents.static_minimum = weights.range_minimum;
  latents.static_scale = weights.range_scale;
  return latents;
}

// The program and the pages are worked out apart: latents of both lie at the
// same columns.
void CheckAlike(const PartProgram& part, const KvArenas::Part& arena) {
  KVASIR_CHECK(part.latents.size() == arena.groups.size());
  for (size_t g = 0; g < arena.groups.size(); ++g) {
    KVASIR_CHECK(part.latents[g].width == arena.groups[g].width);
    KVASIR_CHECK(part.latents[g].column == arena.groups[g].column);
  }
}

// All heads turn every pair of the model by its own angle.
bool IsWhole(const Rotation& rotation, int64_t rotary_pairs) {
  if (rotation.per_head() || rotation.num_pairs != rotary_pairs) return false;
  for (size_t i = 0; i < rotation.pairs.size(); ++i) {
    if (rotation.pairs[i] != i) return false;
  }
  return true;
}

std::vector<HadamardLatent> HadamardOfLatents(const PartProgram& part,
                                              kernels::HadamardTables* tables) {
  std::vector<HadamardLatent> out;
  for (const LatentProgram& latent : part.latents) {
    out.push_back(tables->Of(latent.width, part.latent_column + latent.column));
  }
  return out;
}

std::vector<HadamardLatent> HadamardOfHeads(const HeadSpans& heads,
                                            kernels::HadamardTables* tables) {
  std::vector<HadamardLatent> out;
  for (size_t h = 0; h < heads.column.size(); ++h) {
    out.push_back(tables->Of(heads.width[h], heads.column[h]));
  }
  return out;
}

}  // namespace

LayerAttention::LayerAttention(const Parts& parts) : parts_(parts) {
  AddTurns();
  const LayerWeights& weights = *parts.weights;
  keys_.resize(program().key.size());
  for (size_t p = 0; p < keys_.size(); ++p) {
    MakeKey(program().key[p], weights.key[p], parts.arena->key[p], &keys_[p]);
  }
  MakeValue(weights.value, parts.arena->value.front());
  MakeLaunch();
  parts_.hadamard = nullptr;
}

void LayerAttention::AddTurns() {
  const int64_t rotary_pairs = parts_.spec->rope.rotary_dim / 2;
  std::vector<const Rotation*> queries;
  std::vector<const Rotation*> keys;
  for (const KeyProgram& part : program().key) {
    for (const Rotation& rotation : part.query_rotations) {
      queries.push_back(&rotation);
    }
    for (const Rotation& rotation : part.rotations) keys.push_back(&rotation);
  }
  const auto whole = [&](const std::vector<const Rotation*>& list) {
    return list.empty() ||
           (list.size() == 1 && IsWhole(*list[0], rotary_pairs));
  };
  if (!queries.empty() && whole(queries) && whole(keys) &&
      (keys.empty() || keys[0]->pairing == queries[0]->pairing)) {
    Turn turn;
    turn.pairing = PairingOf(queries[0]->pairing);
    turn.whole_queries.num_heads = queries[0]->num_heads;
    turn.whole_queries.head_dim = queries[0]->head_dim;
    turn.whole_query_column = queries[0]->column;
    if (!keys.empty()) {
      turn.whole_keys.num_heads = keys[0]->num_heads;
      turn.whole_keys.head_dim = keys[0]->head_dim;
      turn.whole_key_column = keys[0]->column;
    }
    turns_.push_back(std::move(turn));
    return;
  }
  for (const Rotation* rotation : queries) AddTurn(*rotation, true);
  for (const Rotation* rotation : keys) AddTurn(*rotation, false);
}

void LayerAttention::AddTurn(const Rotation& rotation, bool query) {
  const kernels::RopePairing pairing = PairingOf(rotation.pairing);
  auto turn = std::find_if(
      turns_.begin(), turns_.end(),
      [pairing](const Turn& each) { return each.pairing == pairing; });
  if (turn == turns_.end()) {
    turns_.emplace_back().pairing = pairing;
    turn = turns_.end() - 1;
  }
  pair_tables_.emplace_back(rotation.pairs.begin(), rotation.pairs.end());
  for (int64_t head = 0; head < rotation.num_heads; ++head) {
    kernels::RopeHead out;
    out.begin = rotation.column + head * rotation.head_dim;
    out.num_pairs = rotation.num_pairs;
    out.pairs = pair_tables_.back().data() +
                (rotation.per_head() ? head * rotation.num_pairs : 0);
    (query ? turn->queries : turn->keys).push_back(out);
  }
}

void LayerAttention::MakeKey(const KeyProgram& part, const PartWeights& weights,
                             const KvArenas::Part& arena, Key* key) {
  CheckAlike(part, arena);
  key->latents = Latents(arena, weights);
  if (part.rebuild.has_value()) MakeRebuild(part, weights, key);
  if (part.lift == QueryLift::kComplex) {
    for (const LatentProgram& latent : part.latents) {
      key->channel_place.emplace_back(latent.channel_place.begin(),
                                      latent.channel_place.end());
    }
    for (size_t head = 0; head < part.group_of_head.size(); ++head) {
      const auto group = static_cast<size_t>(part.group_of_head[head]);
      kernels::ComplexChannels& channels = key->channels.emplace_back();
      channels.num_channels = part.latents[group].width / 2;
      channels.pairs = key->channel_place[group].data();
      channels.up = weights.up[head];
    }
  }
  if (!part.hadamard) return;
  key->hadamard = HadamardOfLatents(part, parts_.hadamard);
  key->query_hadamard = HadamardOfHeads(part.query, parts_.hadamard);
}

void LayerAttention::MakeRebuild(const KeyProgram& part,
                                 const PartWeights& weights, Key* key) {
  const RebuildProgram& from = *part.rebuild;
  kernels::KeyRebuild& rebuild = key->rebuild;
  rebuild.dims = from.dims;
  if (from.lifted) rebuild.up = weights.up.data();
  rebuild.bias = weights.up_bias;
  rebuild.attention_factor =
      static_cast<float>(parts_.spec->rope.attention_factor);
  const Rotation& rotation = from.rotation;
  const bool halves = rotation.pairing == model::RopePairing::kHalfSplit;
  for (int64_t f = 0; f < rotation.num_pairs; ++f) {
    key->pair_dims.push_back(static_cast<int32_t>(halves ? f : 2 * f));
    key->pair_dims.push_back(
        static_cast<int32_t>(halves ? f + rotation.num_pairs : 2 * f + 1));
  }
  for (const uint32_t pair : rotation.pairs) {
    key->steps.push_back(parts_.rope_steps[pair]);
  }
  rebuild.num_pairs = rotation.num_pairs;
  rebuild.pair_dims = key->pair_dims.data();
  rebuild.steps = key->steps.data();
  rebuild.head_steps_stride = rotation.per_head() ? rotation.num_pairs : 0;
}

void LayerAttention::MakeValue(const PartWeights& weights,
                               const KvArenas::Part& arena) {
  const ValueProgram& value = program().value;
  CheckAlike(value, arena);
  value_.latents = Latents(arena, weights);
  if (value.hadamard) {
    value_.hadamard = HadamardOfLatents(value, parts_.hadamard);
    value_.sum_hadamard = HadamardOfHeads(value.attended, parts_.hadamard);
  }
  if (!value.lifted) return;
  for (int64_t h = 0; h < program().heads.query.count; ++h) {
    value_.lifted_column.push_back(h * program().head_dim);
  }
}

void LayerAttention::MakeLaunch() {
  launch_ = std::make_unique<Launch>();
  launch_->keys.resize(keys_.size());
  launch_->exact.resize(num_parts());
  for (size_t p = 0; p < num_parts(); ++p) {
    const kernels::LatentPart& rows =
        (is_key(p) ? parts_.arena->key[p] : parts_.arena->value.front()).exact;
    launch_->exact[p].ring = rows;
    launch_->exact[p].fresh = rows;
  }
  for (size_t p = 0; p < keys_.size(); ++p) {
    const KeyProgram& part = program().key[p];
    kernels::AttentionKeyPart& key = launch_->keys[p];
    key.latents = keys_[p].latents;
    key.group_of_head = part.group_of_head.data();
    key.query_column = part.query.column.data();
    key.exact = &launch_->exact[p];
    if (!part.rebuild.has_value()) continue;
    key.rebuild = &keys_[p].rebuild;
    launch_->rebuilds = true;
  }
  const ValueProgram& from = program().value;
  launch_->value.latents = value_.latents;
  launch_->value.group_of_head = from.group_of_head.data();
  launch_->value.out_column = from.attended.column.data();
  launch_->value.exact = &launch_->exact.back();

  kernels::PagedAttentionParams& params = launch_->params;
  params.num_heads = program().heads.query.count;
  params.num_kv_heads = program().heads.kv.count;
  params.keys = launch_->keys.data();
  params.num_key_parts = static_cast<int64_t>(launch_->keys.size());
  params.values = &launch_->value;
  params.num_value_parts = 1;
  params.page_tokens = parts_.page_tokens;
  params.scale = static_cast<float>(
      1.0 / std::sqrt(static_cast<double>(program().head_dim)));
  params.window =
      parts_.spec->layers[static_cast<size_t>(parts_.layer)].sliding_window;
  params.key_exact = WindowOf(parts_.arena->key_ring);
  params.value_exact = WindowOf(parts_.arena->value_ring);
  launch_->plan = std::make_unique<kernels::AttentionPlan>(params);
}

int64_t LayerAttention::SlotsRebuilt(
    absl::Span<const kernels::AttentionSequence> sequences) const {
  if (!launch_->rebuilds) return 0;
  int64_t slots = 0;
  for (const kernels::AttentionSequence& sequence : sequences) {
    slots += kernels::SlotsReadByTiles(*launch_->plan, sequence);
  }
  return slots;
}

absl::Status LayerAttention::Run(Stream& stream, const AttentionInput& input,
                                 float* out, Workspace& workspace) const {
  const int64_t t = input.num_tokens;
  const AttentionProgram& plan = program();
  Workspace::Scope scope(&workspace);
  const Rows rows{workspace.Take<float>(t * plan.row_columns), plan.row_columns,
                  t};
  const Rows attended{workspace.Take<float>(t * plan.value.attended_columns),
                      plan.value.attended_columns, t};
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Project(stream, input, rows, workspace));
  KVASIR_RETURN_IF_ERROR(Rotate(stream, input, rows, workspace));
  for (size_t p = 0; p < keys_.size(); ++p) {
    KVASIR_RETURN_IF_ERROR(MakeLatents(
        stream, plan.key[p], parts_.weights->key[p], rows, workspace));
    KVASIR_RETURN_IF_ERROR(
        Hadamard(stream, keys_[p].hadamard, false, rows, workspace));
    KVASIR_RETURN_IF_ERROR(LiftQueries(stream, p, rows, workspace));
    KVASIR_RETURN_IF_ERROR(
        Hadamard(stream, keys_[p].query_hadamard, false, rows, workspace));
  }
  KVASIR_RETURN_IF_ERROR(
      MakeLatents(stream, plan.value, parts_.weights->value, rows, workspace));
  KVASIR_RETURN_IF_ERROR(
      Hadamard(stream, value_.hadamard, false, rows, workspace));
  const std::vector<Exact> exact = PlaceExact(t, workspace);
  KVASIR_RETURN_IF_ERROR(workspace.status());
  KVASIR_RETURN_IF_ERROR(Append(stream, input, rows, workspace));
  KVASIR_RETURN_IF_ERROR(AppendFresh(stream, rows, exact, workspace));
  KVASIR_RETURN_IF_ERROR(
      Attend(stream, input, rows, exact, attended.row, workspace));
  KVASIR_RETURN_IF_ERROR(KeepExact(stream, input, rows, exact, workspace));
  KVASIR_RETURN_IF_ERROR(
      Hadamard(stream, value_.sum_hadamard, true, attended, workspace));
  return Output(stream, attended, out, workspace);
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
    params.pairing = PairingOf(parts_.spec->rope.pairing);
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
                                    float* attended,
                                    Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream,
                                   StepPart::kAttention);
  std::vector<kernels::AttentionKeyPart> keys = launch_->keys;
  for (size_t p = 0; p < keys.size(); ++p) keys[p].exact = &exact[p].rows;
  kernels::AttentionValuePart value = launch_->value;
  value.exact = &exact.back().rows;

  kernels::PagedAttentionParams params = launch_->params;
  params.keys = keys.data();
  params.values = &value;
  params.q = rows.row;
  params.q_row_stride = rows.stride;
  params.out = attended;
  params.out_row_stride = program().value.attended_columns;
  params.sequences = input.group.sequences;
  params.num_sequences = input.num_sequences;
  return kernels::PagedAttention(stream, params, workspace);
}

absl::Status LayerAttention::Output(Stream& stream, const Rows& attended,
                                    float* out, Workspace& workspace) const {
  const StepPartScope part_of_step(parts_.profile, stream, StepPart::kOutput);
  const LayerWeights& weights = *parts_.weights;
  const int64_t num_heads = program().heads.query.count;
  const int64_t t = attended.num_tokens;
  Workspace::Scope scope(&workspace);
  Rows rows = attended;
  if (program().value.lifted) {
    rows.stride = num_heads * program().head_dim;
    rows.row = workspace.Take<float>(t * rows.stride);
    KVASIR_RETURN_IF_ERROR(workspace.status());
    const StepPartScope lifting(parts_.profile, stream, StepPart::kLifts);
    kernels::LiftParams lift;
    lift.x = attended.row;
    lift.x_row_stride = attended.stride;
    lift.y = rows.row;
    lift.y_row_stride = rows.stride;
    lift.num_rows = t;
    lift.num_heads = num_heads;
    lift.num_kv_heads = program().heads.kv.count;
    lift.matrices = weights.value.lift.data();
    lift.column_in = program().value.attended.column.data();
    lift.column_out = value_.lifted_column.data();
    KVASIR_RETURN_IF_ERROR(kernels::Lift(stream, lift, workspace));
  }
  if (weights.value.lift_bias != nullptr) {
    kernels::AddRowsParams add;
    add.y = rows.row;
    add.y_row_stride = rows.stride;
    add.x = weights.value.lift_bias;
    add.num_rows = t;
    add.columns = rows.stride;
    KVASIR_RETURN_IF_ERROR(kernels::AddRows(stream, add, workspace));
  }
  kernels::MatmulParams params;
  params.x = rows.row;
  params.x_row_stride = rows.stride;
  params.num_rows = t;
  params.weight = weights.o;
  params.bias = weights.o_bias;
  params.y = out;
  params.y_row_stride = weights.o.n;
  return kernels::Matmul(stream, params, workspace);
}

}  // namespace kvasir::worker
