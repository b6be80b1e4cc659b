// What a layer's attention prepares once: tables of its rotations and the
// launches over its parts.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "worker/executor/layer_attention.h"
#include "worker/program/attention_flops.h"
#include "worker/program/prompt_lift.h"

namespace kvasir::worker {
namespace {

using kernels::HadamardLatent;

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

// A sum by KV head; none yet: empty.
void Add(const std::vector<double>& flops, std::vector<double>* sum) {
  sum->resize(flops.size());
  for (size_t j = 0; j < flops.size(); ++j) (*sum)[j] += flops[j];
}

}  // namespace

LayerAttention::LayerAttention(const Parts& parts)
    : parts_(parts), pairing_(PairingOf(parts.spec->rope.pairing)) {
  AddTurns();
  const LayerWeights& weights = *parts.weights;
  keys_.resize(program().key.size());
  for (size_t p = 0; p < keys_.size(); ++p) {
    MakeKey(program().key[p], weights.key[p], parts.arena->key[p], &keys_[p]);
  }
  MakeValue(weights.value, parts.arena->value.front());
  launch_ = MakeLaunch(/*prompts=*/false);
  if (LiftsPrompts(program())) prompt_launch_ = MakeLaunch(/*prompts=*/true);
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
  if (part.prompt_lift.has_value()) {
    key->prompt_lift.dims = part.prompt_lift->dims;
    key->prompt_lift.up = weights.prompt_up.data();
  }
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

std::unique_ptr<LayerAttention::Launch> LayerAttention::MakeLaunch(
    bool prompts) const {
  auto launch = std::make_unique<Launch>();
  launch->keys.resize(keys_.size());
  launch->exact.resize(num_parts());
  for (size_t p = 0; p < num_parts(); ++p) {
    const kernels::LatentPart& rows =
        (is_key(p) ? parts_.arena->key[p] : parts_.arena->value.front()).exact;
    launch->exact[p].ring = rows;
    launch->exact[p].fresh = rows;
  }
  for (size_t p = 0; p < keys_.size(); ++p) {
    const KeyProgram& part = program().key[p];
    kernels::AttentionKeyPart& key = launch->keys[p];
    key.latents = keys_[p].latents;
    key.group_of_head = part.group_of_head.data();
    key.query_column = part.query.column.data();
    key.exact = &launch->exact[p];
    if (part.rebuild.has_value()) {
      key.rebuild = &keys_[p].rebuild;
      Add(RebuildFlops(part), &launch->rebuild_flops);
    } else if (prompts && part.prompt_lift.has_value()) {
      // Meets the queries of before the lift.
      key.rebuild = &keys_[p].prompt_lift;
      key.query_column = part.projected.column.data();
      Add(LiftFlops(part, part.prompt_lift->dims), &launch->prompt_lift_flops);
    }
  }
  const ValueProgram& from = program().value;
  launch->value.latents = value_.latents;
  launch->value.group_of_head = from.group_of_head.data();
  launch->value.out_column = from.attended.column.data();
  launch->value.exact = &launch->exact.back();
  if (prompts && from.prompt_lift.has_value()) {
    launch->value_lift.dims = from.prompt_lift->dims;
    launch->value_lift.up = parts_.weights->value.prompt_up.data();
    launch->value.lift = &launch->value_lift;
    launch->value.out_column = value_.lifted_column.data();
    Add(LiftFlops(from, from.prompt_lift->dims), &launch->prompt_lift_flops);
  }

  kernels::PagedAttentionParams& params = launch->params;
  params.num_heads = program().heads.query.count;
  params.num_kv_heads = program().heads.kv.count;
  params.keys = launch->keys.data();
  params.num_key_parts = static_cast<int64_t>(launch->keys.size());
  params.values = &launch->value;
  params.num_value_parts = 1;
  params.page_tokens = parts_.page_tokens;
  params.scale = static_cast<float>(
      1.0 / std::sqrt(static_cast<double>(program().head_dim)));
  params.window =
      parts_.spec->layers[static_cast<size_t>(parts_.layer)].sliding_window;
  params.key_exact = WindowOf(parts_.arena->key_ring);
  params.value_exact = WindowOf(parts_.arena->value_ring);
  launch->plan = std::make_unique<kernels::AttentionPlan>(params);
  return launch;
}

}  // namespace kvasir::worker
