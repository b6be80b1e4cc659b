// Prepares a layer's attention: tables of its rotations, and the launches over
// its parts.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "worker/executor/attention/layer_attention.h"
#include "worker/program/attention_flops.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::worker {
namespace {

using kernels::HadamardPlace;

kernels::RopePairing PairingOf(model::RopePairing pairing) {
  return pairing == model::RopePairing::kHalfSplit
             ? kernels::RopePairing::kHalfSplit
             : kernels::RopePairing::kInterleaved;
}

// Returns the view of a part's latents in the pages, with the part's static
// ranges added, because pages do not contain them.
kernels::LatentPart Latents(const KvArenas::Part& arena,
                            const PartWeights& weights) {
  kernels::LatentPart latents = arena.latents;
  latents.static_minimum = weights.range_minimum;
  latents.static_scale = weights.range_scale;
  return latents;
}

// Checks that the attention program and the page layout have the latents in the
// same columns.
void CheckAlike(const PartProgram& part, const KvArenas::Part& arena) {
  KVASIR_CHECK(part.latents.size() == arena.groups.size());
  for (size_t g = 0; g < arena.groups.size(); ++g) {
    KVASIR_CHECK(part.latents[g].width == arena.groups[g].width);
    KVASIR_CHECK(part.latents[g].column == arena.groups[g].column);
  }
}

// Whether all heads rotate all of the model's pairs, each by the model's angle
// for that pair.
bool IsWhole(const Rotation& rotation, int64_t rotary_pairs) {
  if (rotation.per_head() || rotation.num_pairs != rotary_pairs) return false;
  for (size_t i = 0; i < rotation.pairs.size(); ++i) {
    if (rotation.pairs[i] != i) return false;
  }
  return true;
}

std::vector<HadamardPlace> PlacesOfLatents(const PartProgram& part) {
  std::vector<HadamardPlace> places;
  for (const LatentProgram& latent : part.latents) {
    places.push_back({latent.width, part.latent_column + latent.column});
  }
  return places;
}

std::vector<HadamardPlace> PlacesOfHeads(const HeadSpans& heads) {
  std::vector<HadamardPlace> places;
  for (size_t h = 0; h < heads.column.size(); ++h) {
    places.push_back({heads.width[h], heads.column[h]});
  }
  return places;
}

constexpr int64_t kFreshAlignmentBytes = 64;
// The space between latent groups in FreshRows::memory. The size of a group is
// often a power of two. Without this space, rows of different groups would then
// compete for the same sets of a CPU cache.
constexpr int64_t kFreshShiftBytes = 5 * kFreshAlignmentBytes;

// Lays out the exact rows of a step's tokens in one page, one latent group
// after the other, with kFreshShiftBytes between groups. Returns the page's
// size in bytes.
int64_t LayFresh(const std::vector<kernels::LatentGroup>& groups,
                 int64_t max_tokens, std::vector<kernels::LatentGroup>* fresh) {
  int64_t bytes = 0;
  for (kernels::LatentGroup group : groups) {
    group.codes.offset_bytes = bytes;
    bytes += max_tokens * group.codes.stride_bytes + kFreshShiftBytes;
    fresh->push_back(group);
  }
  return bytes;
}

int64_t Padded(int64_t bytes) {
  return (bytes + kFreshAlignmentBytes - 1) / kFreshAlignmentBytes *
         kFreshAlignmentBytes;
}

// Adds `flops`, which has one element per KV head, to `sum`. An empty `sum`
// counts as zeros.
void Add(const std::vector<double>& flops, std::vector<double>* sum) {
  sum->resize(flops.size());
  for (size_t j = 0; j < flops.size(); ++j) (*sum)[j] += flops[j];
}

}  // namespace

LayerAttention::LayerAttention(const Parts& parts)
    : parts_(parts),
      activations_{parts.device->activations()},
      pairing_(PairingOf(parts.spec->rope_of(parts.layer).pairing)),
      tables_(parts.device) {}

absl::StatusOr<LayerAttention> LayerAttention::Create(const Parts& parts) {
  LayerAttention attention(parts);
  KVASIR_RETURN_IF_ERROR(attention.PrepareAll());
  return attention;
}

absl::Status LayerAttention::PrepareAll() {
  KVASIR_RETURN_IF_ERROR(PrepareKeyBias());
  KVASIR_RETURN_IF_ERROR(PrepareTurns());
  keys_.resize(program().key.size());
  for (size_t p = 0; p < keys_.size(); ++p) {
    KVASIR_RETURN_IF_ERROR(MakeKey(p, &keys_[p]));
  }
  KVASIR_RETURN_IF_ERROR(MakeValue());
  PlaceExact();
  KVASIR_RETURN_IF_ERROR(PrepareAppends());
  KVASIR_RETURN_IF_ERROR(PrepareEviction());
  const bool apart = LiftsPrompts(program());
  KVASIR_ASSIGN_OR_RETURN(
      launch_, MakeLaunch(apart ? LaunchedRows::kOutput : LaunchedRows::kAll));
  if (apart) {
    KVASIR_ASSIGN_OR_RETURN(prompt_launch_, MakeLaunch(LaunchedRows::kPrompts));
  }
  parts_.rope_steps = {};  // the caller's array is valid only during Create
  parts_.eviction = nullptr;
  return absl::OkStatus();
}

std::vector<LayerAttention::Turn> LayerAttention::MakeTurns() {
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
    return {turn};
  }
  std::vector<Turn> turns;
  for (const Rotation* rotation : queries) AddTurn(*rotation, true, &turns);
  for (const Rotation* rotation : keys) AddTurn(*rotation, false, &turns);
  return turns;
}

void LayerAttention::AddTurn(const Rotation& rotation, bool query,
                             std::vector<Turn>* turns) {
  const kernels::RopePairing pairing = PairingOf(rotation.pairing);
  auto turn = std::find_if(
      turns->begin(), turns->end(),
      [pairing](const Turn& each) { return each.pairing == pairing; });
  if (turn == turns->end()) {
    turns->emplace_back().pairing = pairing;
    turn = turns->end() - 1;
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

absl::Status LayerAttention::PrepareTurns() {
  for (const Turn& turn : MakeTurns()) {
    kernels::RopeParams shape;
    shape.q = turn.whole_queries;
    shape.q.row_stride = row_columns_;
    shape.k = turn.whole_keys;
    shape.k.row_stride = row_columns_;
    shape.steps = parts_.device_rope_steps;
    shape.rotary_dim = parts_.spec->rope.rotary_dim;
    shape.pairing = turn.pairing;
    shape.dtype = activations_.dtype;
    shape.attention_factor =
        static_cast<float>(parts_.spec->rope_of(parts_.layer).attention_factor);
    KVASIR_ASSIGN_OR_RETURN(
        kernels::PreparedRope rope,
        kernels::Prepare(*parts_.device, shape, {turn.queries, turn.keys, {}}));
    turns_.push_back(
        {std::move(rope), turn.whole_query_column, turn.whole_key_column});
  }
  pair_tables_.clear();
  return absl::OkStatus();
}

absl::Status LayerAttention::MakeKey(size_t index, Key* key) {
  const KeyProgram& part = program().key[index];
  const PartWeights& weights = parts_.weights->key[index];
  const KvArenas::Part& arena = parts_.arena->key[index];
  CheckAlike(part, arena);
  key->latents = Latents(arena, weights);
  if (part.rebuild.has_value()) MakeRebuild(part, weights, key);
  if (part.prompt_lift.has_value()) {
    key->prompt_lift.dims = part.prompt_lift->dims;
    key->prompt_lift.up = weights.prompt_up.data();
  }
  if (part.lift == QueryLift::kMatrix) {
    kernels::LiftParams shape;
    shape.x_row_stride = row_columns_;
    shape.y_row_stride = row_columns_;
    shape.dtype = activations_.dtype;
    KVASIR_ASSIGN_OR_RETURN(
        key->lift,
        kernels::Prepare(*parts_.device, shape, weights.lift,
                         {part.projected.column, part.query.column}));
  } else if (part.lift == QueryLift::kComplex) {
    KVASIR_RETURN_IF_ERROR(PrepareComplexLifts(part, weights, key));
  }
  if (!part.hadamard) return absl::OkStatus();
  const int64_t stride = row_columns_;
  KVASIR_RETURN_IF_ERROR(PrepareHadamard(PlacesOfLatents(part), stride,
                                         /*transposed=*/false, &key->hadamard));
  return PrepareHadamard(PlacesOfHeads(part.query), stride,
                         /*transposed=*/false, &key->query_hadamard);
}

absl::Status LayerAttention::PrepareHadamard(
    const std::vector<HadamardPlace>& places, int64_t stride, bool transposed,
    std::optional<kernels::PreparedHadamard>* out) {
  kernels::HadamardParams shape;
  shape.x_row_stride = stride;
  shape.y_row_stride = stride;
  shape.transposed = transposed;
  shape.dtype = activations_.dtype;
  KVASIR_ASSIGN_OR_RETURN(
      *out, kernels::Prepare(*parts_.device, shape, places, parts_.hadamard));
  return absl::OkStatus();
}

absl::Status LayerAttention::PrepareComplexLifts(const KeyProgram& part,
                                                 const PartWeights& weights,
                                                 Key* key) {
  const auto num_heads = part.group_of_head.size();
  const auto share = static_cast<size_t>(program().heads.query.count /
                                         program().heads.kv.count);
  std::vector<std::vector<int32_t>> places;  // one list per latent
  for (const LatentProgram& latent : part.latents) {
    places.emplace_back(latent.channel_place.begin(),
                        latent.channel_place.end());
  }
  std::vector<kernels::ComplexChannels> channels;
  for (size_t head = 0; head < num_heads; ++head) {
    const auto group = static_cast<size_t>(part.group_of_head[head]);
    channels.push_back({part.latents[group].width / 2, places[group].data(),
                        weights.up[head]});
  }
  const auto width = [&](size_t head) {
    return part.projected.width[head * share];
  };
  // Prepares one launch for each run of consecutive heads with the same number
  // of pairs.
  for (size_t begin = 0, end = 0; begin < num_heads; begin = end) {
    while (end < num_heads && width(end) == width(begin)) ++end;
    const auto of_queries = [&](const std::vector<int64_t>& columns) {
      return absl::MakeConstSpan(columns).subspan(begin * share,
                                                  (end - begin) * share);
    };
    kernels::ComplexLiftParams shape;
    shape.x_row_stride = row_columns_;
    shape.y_row_stride = row_columns_;
    shape.num_pairs = width(begin) / 2;
    shape.pairing = pairing_;
    shape.dtype = activations_.dtype;
    KVASIR_ASSIGN_OR_RETURN(
        kernels::PreparedComplexLift lift,
        kernels::Prepare(
            *parts_.device, shape,
            absl::MakeConstSpan(channels).subspan(begin, end - begin),
            {of_queries(part.projected.column),
             of_queries(part.query.column)}));
    key->complex_lifts.push_back(std::move(lift));
  }
  return absl::OkStatus();
}

void LayerAttention::MakeRebuild(const KeyProgram& part,
                                 const PartWeights& weights, Key* key) {
  const RebuildProgram& from = *part.rebuild;
  kernels::KeyRebuild& rebuild = key->rebuild;
  rebuild.dims = from.dims;
  if (from.lifted) rebuild.up = weights.up.data();
  rebuild.bias = rebuilt_key_bias_ ? rebuilt_key_bias_ : weights.up_bias;
  rebuild.attention_factor =
      static_cast<float>(parts_.spec->rope_of(parts_.layer).attention_factor);
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

absl::Status LayerAttention::MakeValue() {
  const ValueProgram& value = program().value;
  const PartWeights& weights = parts_.weights->value;
  const KvArenas::Part& arena = parts_.arena->value.front();
  CheckAlike(value, arena);
  value_.latents = Latents(arena, weights);
  if (value.hadamard) {
    if (!program().joint) {  // a joint part is transformed with the keys
      KVASIR_RETURN_IF_ERROR(
          PrepareHadamard(PlacesOfLatents(value), row_columns_,
                          /*transposed=*/false, &value_.hadamard));
    }
    KVASIR_RETURN_IF_ERROR(
        PrepareHadamard(PlacesOfHeads(value.attended), value.attended_columns,
                        /*transposed=*/true, &value_.sum_hadamard));
  }
  if (!value.lifted) return absl::OkStatus();
  const int64_t num_heads = program().heads.query.count;
  for (int64_t h = 0; h < num_heads; ++h) {
    value_.lifted_column.push_back(h * program().head_dim);
  }
  kernels::LiftParams shape;
  shape.x_row_stride = value.attended_columns;
  shape.y_row_stride = num_heads * program().head_dim;
  shape.dtype = activations_.dtype;
  KVASIR_ASSIGN_OR_RETURN(
      value_.lift,
      kernels::Prepare(*parts_.device, shape, weights.lift,
                       {value.attended.column, value_.lifted_column}));
  return absl::OkStatus();
}

int64_t LayerAttention::FreshBytes(const KvArenas::Layer& arena,
                                   int64_t max_tokens) {
  int64_t bytes = 0;
  const auto add = [&](const std::vector<KvArenas::Part>& parts) {
    std::vector<kernels::LatentGroup> groups;
    for (const KvArenas::Part& part : parts) {
      if (part.of_keys) continue;
      bytes += Padded(LayFresh(part.exact_groups, max_tokens, &groups));
    }
  };
  if (arena.key_ring >= 0) add(arena.key);
  if (arena.value_ring >= 0) add(arena.value);
  return bytes;
}

void LayerAttention::PlaceExact() {
  exact_.resize(num_parts());
  kernels::DevicePtr<char> next = parts_.fresh.memory;
  for (size_t p = 0; p < num_parts(); ++p) {
    const KvArenas::Layer& arena = *parts_.arena;
    if ((is_key(p) ? arena.key_ring : arena.value_ring) < 0) continue;
    const KvArenas::Part& part = is_key(p) ? arena.key[p] : arena.value.front();
    if (part.of_keys) {
      exact_[p].rows = exact_[p - 1].rows;
      continue;
    }
    exact_[p].rows.ring = part.exact;
    kernels::LatentPart& fresh = exact_[p].rows.fresh;
    fresh = part.exact;
    fresh.page_bytes = LayFresh(part.exact_groups, parts_.fresh.max_tokens,
                                &exact_[p].fresh_groups);
    fresh.tile_bytes = fresh.page_bytes;
    fresh.tile_slots = parts_.fresh.max_tokens;
    fresh.groups = exact_[p].fresh_groups.data();
    fresh.arena = next;
    next = next + Padded(fresh.page_bytes);
  }
}

kernels::KvAppendPart LayerAttention::Appended(
    size_t part, const kernels::LatentPart& to) const {
  kernels::KvAppendPart appended;
  appended.column = is_key(part) ? program().key[part].latent_column
                                 : program().value.latent_column;
  appended.part = to;
  appended.clamped = parts_.clamped_codes;
  return appended;
}

absl::Status LayerAttention::PrepareAppends() {
  std::vector<kernels::KvAppendPart> all;
  std::vector<kernels::KvAppendPart> fresh;
  std::vector<kernels::KvAppendPart> key_ring;
  std::vector<kernels::KvAppendPart> value_ring;
  for (size_t p = 0; p < num_parts(); ++p) {
    if (!is_key(p) && program().joint) continue;
    kernels::KvAppendPart& appended = all.emplace_back(
        Appended(p, is_key(p) ? keys_[p].latents : value_.latents));
    if (evicts()) {
      appended.unit_of_group = UnitOfGroup(p).data();
      appended.errors_of[kernels::kKeyError] = is_key(p);
      appended.errors_of[kernels::kValueError] = !is_key(p) || program().joint;
    }
    if (exact_[p].fresh_groups.empty()) continue;
    fresh.push_back(Appended(p, exact_[p].rows.fresh));
    (is_key(p) ? key_ring : value_ring)
        .push_back(Appended(p, exact_[p].rows.ring));
  }
  const auto prepare =
      [this](const std::vector<kernels::KvAppendPart>& parts,
             kernels::KvAppendShape shape,
             std::optional<kernels::PreparedKvAppend>* out) -> absl::Status {
    if (parts.empty()) return absl::OkStatus();
    shape.row_stride = row_columns_;
    shape.dtype = activations_.dtype;
    KVASIR_ASSIGN_OR_RETURN(*out,
                            kernels::Prepare(*parts_.device, shape, parts));
    return absl::OkStatus();
  };
  KVASIR_RETURN_IF_ERROR(prepare(
      all,
      {.page_tokens = parts_.page_tokens, .metadata = parts_.arena->metadata},
      &append_));
  // The exact rows of a step's own tokens all lie in one page.
  KVASIR_RETURN_IF_ERROR(
      prepare(fresh, {.page_tokens = parts_.fresh.max_tokens}, &append_fresh_));
  const kernels::KvAppendShape rows = {.page_tokens = 1,
                                       .slots_are_bytes = true};
  KVASIR_RETURN_IF_ERROR(prepare(key_ring, rows, &keep_keys_));
  return prepare(value_ring, rows, &keep_values_);
}

absl::Status LayerAttention::PrepareEviction() {
  if (!evicts()) return absl::OkStatus();
  rolling_ = parts_.eviction->rolling;
  std::vector<kernels::EvictPart> parts;
  for (size_t p = 0; p < num_parts(); ++p) {
    if (!is_key(p) && program().joint) continue;
    parts.push_back(
        {is_key(p) ? keys_[p].latents : value_.latents, UnitOfGroup(p).data()});
  }
  KVASIR_ASSIGN_OR_RETURN(
      eviction_,
      kernels::Prepare(*parts_.device, parts_.arena->metadata, parts));
  return absl::OkStatus();
}

kernels::ExactSlots LayerAttention::ExactSlotsOf(int64_t ring) const {
  return ring < 0 ? kernels::ExactSlots()
                  : (*parts_.rings)[static_cast<size_t>(ring)].slots();
}

absl::StatusOr<std::unique_ptr<LayerAttention::Launch>>
LayerAttention::MakeLaunch(LaunchedRows rows) const {
  const bool prompts = rows == LaunchedRows::kPrompts;
  std::vector<double> rebuild_flops;
  std::vector<double> prompt_lift_flops;
  std::vector<kernels::AttentionKeyPart> keys(keys_.size());
  for (size_t p = 0; p < keys_.size(); ++p) {
    const KeyProgram& part = program().key[p];
    kernels::AttentionKeyPart& key = keys[p];
    key.latents = keys_[p].latents;
    key.group_of_head = part.group_of_head.data();
    key.query_column = part.query.column.data();
    key.exact = &exact_[p].rows;
    if (part.rebuild.has_value()) {
      key.rebuild = &keys_[p].rebuild;
      Add(RebuildFlops(part), &rebuild_flops);
    } else if (prompts && part.prompt_lift.has_value()) {
      // A prompt lift turns latents into keys. So attention uses the projected
      // queries, not the lifted ones.
      key.rebuild = &keys_[p].prompt_lift;
      key.query_column = part.projected.column.data();
      Add(LiftFlops(part, part.prompt_lift->dims), &prompt_lift_flops);
    }
  }
  const ValueProgram& from = program().value;
  kernels::ValueLift value_lift;
  kernels::AttentionValuePart value;
  value.latents = value_.latents;
  value.group_of_head = from.group_of_head.data();
  value.out_column = from.attended.column.data();
  value.exact = &exact_.back().rows;
  kernels::PagedAttentionParams shape;
  shape.out_row_stride = from.attended_columns;
  if (prompts && from.prompt_lift.has_value()) {
    value_lift.dims = from.prompt_lift->dims;
    value_lift.up = parts_.weights->value.prompt_up.data();
    value.lift = &value_lift;
    value.out_column = value_.lifted_column.data();
    shape.out_row_stride = program().heads.query.count * program().head_dim;
    Add(LiftFlops(from, from.prompt_lift->dims), &prompt_lift_flops);
  }
  shape.q_row_stride = row_columns_;
  shape.num_heads = program().heads.query.count;
  shape.num_kv_heads = program().heads.kv.count;
  shape.keys = keys.data();
  shape.num_key_parts = static_cast<int64_t>(keys.size());
  shape.values = &value;
  shape.num_value_parts = 1;
  shape.page_tokens = parts_.page_tokens;
  shape.prompts_as_rows = parts_.prompts_as_rows;
  shape.dtype = activations_.dtype;
  shape.scale = static_cast<float>(
      parts_.spec->score_scale != 0
          ? parts_.spec->score_scale
          : 1.0 / std::sqrt(static_cast<double>(program().head_dim)));
  shape.score_cap = static_cast<float>(parts_.spec->score_cap);
  shape.window =
      parts_.spec->layers[static_cast<size_t>(parts_.layer)].sliding_window;
  shape.key_exact = ExactSlotsOf(parts_.arena->key_ring);
  shape.value_exact = ExactSlotsOf(parts_.arena->value_ring);
  if (key_bias_ != nullptr) shape.key_bias = &key_bias_->read;
  if (evicts()) {
    shape.metadata = parts_.arena->metadata;
    shape.unit_of_head = parts_.arena->unit_of_head.data();
    shape.mass.stored_positions = !rolling_;
    if (parts_.eviction->scored) {
      shape.mass.most_rows = parts_.mass.most_rows;
      shape.mass.most_weights = parts_.mass.most_weights;
    }
  }
  KVASIR_ASSIGN_OR_RETURN(kernels::PreparedAttention attention,
                          kernels::Prepare(*parts_.device, shape));
  return std::make_unique<Launch>(
      Launch{.rows = rows,
             .attention = std::move(attention),
             .lifts_values = value.lift != nullptr,
             .rebuild_flops = std::move(rebuild_flops),
             .prompt_lift_flops = std::move(prompt_lift_flops)});
}

}  // namespace kvasir::worker
