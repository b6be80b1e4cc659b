#include "compress/oracle/layer_program.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "model/shapes/attention_shape.h"
#include "plan/artifact_tensors.h"
#include "plan/plan.h"

namespace kvasir::compress {

using kvasir::v1::LayerPlan;
using plan::ResolvedLatent;
using plan::ResolvedPart;
using plan::Space;

namespace {

using Indices = std::vector<int64_t>;

// Data shared by the functions that compile a layer's keys or values.
struct SideContext {
  const model::DecoderSpec* spec = nullptr;
  int64_t layer = 0;
  plan::Side side = plan::Side::kKey;
  bool rotates = false;  // true for keys in a layer with RoPE
  at::Device device = at::kCPU;

  int64_t num_pairs() const { return rotates ? spec->rope.rotary_dim / 2 : 0; }

  absl::Status Refuse(absl::StatusCode code, int part,
                      absl::string_view why) const {
    return absl::Status(
        code, absl::StrCat("layer ", layer, " ", plan::SideName(side), " part ",
                           part, ": ", why));
  }
};

at::Tensor IndexTensor(const Indices& values, at::Device device) {
  return at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(device);
}

Indices Iota(int64_t count, int64_t first = 0) {
  Indices values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), first);
  return values;
}

bool IsIota(const Indices& values) {
  return values == Iota(static_cast<int64_t>(values.size()));
}

// Returns the dims of some RoPE pairs of a head, ascending.
Indices AscendingPairDims(const SideContext& c,
                          const std::vector<uint32_t>& pairs) {
  Indices dims = model::PairDims(c.spec->rope, pairs);
  std::sort(dims.begin(), dims.end());
  return dims;
}

absl::Status AddLatent(ProgramPart& part, const SideContext& c,
                       const ResolvedPart& from, const ResolvedLatent& latent) {
  ProgramLatent added;
  added.heads = latent.heads;
  added.offset = part.stored_width;
  absl::StatusOr<LatentCodec> made = MakeLatentCodec(from, latent);
  if (!made.ok()) {
    return c.Refuse(made.status().code(), part.index, made.status().message());
  }
  added.codec = *std::move(made);
  part.stored_width += added.width();
  part.widest_latent = std::max(part.widest_latent, added.width());
  part.latents.push_back(std::move(added));
  return absl::OkStatus();
}

absl::Status CompileFull(const SideContext& c, const ResolvedPart& from,
                         ProgramPart& part) {
  const int64_t heads = c.spec->num_kv_heads;
  part.has_bias = c.spec->qkv_bias;
  // Codes leave the bias out only if each token has its own range. Static
  // ranges were measured with the bias, so codes in them include it.
  part.leaves_bias_out = c.side == plan::Side::kKey && part.has_bias &&
                         c.spec->qk_norm == model::QkNorm::kNone &&
                         !from.joint && !from.has_basis() &&
                         (from.range == plan::RangeKind::kToken ||
                          from.range == plan::RangeKind::kTokenNorm);
  part.basis = from.transform == plan::Transform::kBasisStatic;
  part.mean = from.mean;
  if (part.mean && !part.basis) {
    return c.Refuse(absl::StatusCode::kInvalidArgument, part.index,
                    "a full space with a mean must also have a basis");
  }
  part.lifted_dims.assign(static_cast<size_t>(heads), Iota(c.spec->head_dim));
  for (const ResolvedLatent& latent : from.latents) {
    KVASIR_RETURN_IF_ERROR(AddLatent(part, c, from, latent));
  }
  return absl::OkStatus();
}

absl::Status CompileLowRank(const SideContext& c, const ResolvedPart& from,
                            ProgramPart& part) {
  if (from.has_lift(plan::Lift::kAnchored)) {
    return c.Refuse(absl::StatusCode::kUnimplemented, part.index,
                    "the reference decoder does not support ANCHORED lifts");
  }
  part.folds = from.folded;
  part.has_up_bias = from.rebuilt && (c.spec->qkv_bias || from.mean);
  part.has_bias = from.latent_bias;
  part.lifted_dims.assign(static_cast<size_t>(c.spec->num_kv_heads), from.dims);
  for (const ResolvedLatent& latent : from.latents) {
    KVASIR_RETURN_IF_ERROR(AddLatent(part, c, from, latent));
  }
  return absl::OkStatus();
}

absl::Status CheckOneUse(const SideContext& c, const ResolvedPart& from) {
  if (from.uses.size() != 1 || from.has_lift(plan::Lift::kAnchored)) {
    return c.Refuse(absl::StatusCode::kUnimplemented, from.index,
                    "the reference decoder supports a space of RoPE pairs only "
                    "with exactly one use and without an ANCHORED lift");
  }
  return absl::OkStatus();
}

absl::Status CompileRopePairs(const SideContext& c, const ResolvedPart& from,
                              ProgramPart& part) {
  KVASIR_RETURN_IF_ERROR(CheckOneUse(c, from));
  part.has_bias = c.spec->qkv_bias;
  Indices kept;
  for (const ResolvedLatent& latent : from.latents) {
    kept.insert(kept.end(), latent.pairs.begin(), latent.pairs.end());
    part.lifted_dims.push_back(AscendingPairDims(c, latent.pairs));
    KVASIR_RETURN_IF_ERROR(AddLatent(part, c, from, latent));
  }
  part.kept_pairs = IndexTensor(kept, c.device);
  return absl::OkStatus();
}

// Returns a matrix [rotary pairs, C] with 1 where the channel belongs to the
// pair.
at::Tensor PairSelector(const SideContext& c, const Indices& channel_pairs) {
  const at::Tensor selector =
      at::zeros({c.num_pairs(), static_cast<int64_t>(channel_pairs.size())});
  for (size_t i = 0; i < channel_pairs.size(); ++i) {
    selector[channel_pairs[i]][static_cast<int64_t>(i)].fill_(1.0f);
  }
  return selector.to(c.device);
}

absl::Status CompileRopeLowRank(const SideContext& c, const ResolvedPart& from,
                                ProgramPart& part) {
  KVASIR_RETURN_IF_ERROR(CheckOneUse(c, from));
  const auto heads = static_cast<size_t>(c.spec->num_kv_heads);
  part.folds = from.folded;
  part.has_bias = from.latent_bias;
  part.lifted_dims.assign(heads, Iota(2 * c.num_pairs()));
  part.held_dims.resize(heads);
  Indices real;
  Indices imaginary;
  Indices all_pairs;
  for (const ResolvedLatent& group : from.latents) {
    Indices channel_pairs(group.channel_pairs.begin(),
                          group.channel_pairs.end());
    const auto complex = static_cast<int64_t>(channel_pairs.size());
    KVASIR_RETURN_IF_ERROR(AddLatent(part, c, from, group));
    ProgramLatent& latent = part.latents.back();
    for (int64_t i = 0; i < complex; ++i) {
      real.push_back(latent.offset + i);
      imaginary.push_back(latent.offset + complex + i);
    }
    all_pairs.insert(all_pairs.end(), channel_pairs.begin(),
                     channel_pairs.end());
    const Indices held = AscendingPairDims(c, group.pairs);
    for (const int64_t head : latent.heads) {
      part.held_dims[static_cast<size_t>(head)] = held;
    }
    latent.pair_selector = PairSelector(c, channel_pairs);
    latent.channel_pairs = std::move(channel_pairs);
  }
  Indices split = std::move(real);
  split.insert(split.end(), imaginary.begin(), imaginary.end());
  Indices join(split.size());
  for (size_t i = 0; i < split.size(); ++i) {
    join[static_cast<size_t>(split[i])] = static_cast<int64_t>(i);
  }
  part.complex_split = IndexTensor(split, c.device);
  part.complex_join = IndexTensor(join, c.device);
  part.channel_pairs = IndexTensor(all_pairs, c.device);
  return absl::OkStatus();
}

// Every head has part.widest_latent places, some of which are padding if its
// latent is narrower. Returns the channel of `latent` that is at `place`, or -1
// for padding.
int64_t ChannelAt(const ProgramPart& part, const ProgramLatent& latent,
                  int64_t place) {
  if (part.space != Space::kRopeLowRank) {
    return place < latent.width() ? place : -1;
  }
  const int64_t complex = latent.width() / 2;
  const int64_t half = part.widest_complex();
  const int64_t in_half = place % half;
  if (in_half >= complex) return -1;
  return (place < half ? 0 : complex) + in_half;
}

// Returns for each KV head the latent that it shares with the heads of its
// group.
std::vector<const ProgramLatent*> LatentOfHead(const ProgramPart& part,
                                               int64_t num_heads) {
  std::vector<const ProgramLatent*> latents(static_cast<size_t>(num_heads));
  for (const ProgramLatent& latent : part.latents) {
    for (const int64_t head : latent.heads) {
      latents[static_cast<size_t>(head)] = &latent;
    }
  }
  return latents;
}

void MakeFoldedIndices(const SideContext& c, ProgramPart& part) {
  Indices channels;
  Indices pairs;
  for (const ProgramLatent* latent : LatentOfHead(part, c.spec->num_kv_heads)) {
    for (int64_t place = 0; place < part.widest_latent; ++place) {
      const int64_t channel = ChannelAt(part, *latent, place);
      channels.push_back(channel < 0 ? part.stored_width
                                     : latent->offset + channel);
      if (part.space != Space::kRopeLowRank || place >= part.widest_complex()) {
        continue;
      }
      // A padding channel is 0 and stays 0 under any rotation, so any pair will
      // do.
      pairs.push_back(
          channel < 0 ? 0
                      : latent->channel_pairs[static_cast<size_t>(channel)]);
    }
  }
  part.folded_channels = IndexTensor(channels, c.device);
  if (!pairs.empty()) part.head_channel_pairs = IndexTensor(pairs, c.device);
}

void MakeLiftedIndices(const SideContext& c, ProgramPart& part) {
  Indices heads;
  for (const ProgramLatent& latent : part.latents) {
    heads.insert(heads.end(), latent.heads.begin(), latent.heads.end());
  }
  if (!IsIota(heads)) {
    Indices order(heads.size());
    for (size_t i = 0; i < heads.size(); ++i) {
      order[static_cast<size_t>(heads[i])] = static_cast<int64_t>(i);
    }
    part.head_order = IndexTensor(order, c.device);
  }
  if (static_cast<int64_t>(part.lifted_dims[0].size()) == c.spec->head_dim) {
    return;
  }
  Indices flat;
  for (const Indices& dims : part.lifted_dims) {
    flat.insert(flat.end(), dims.begin(), dims.end());
  }
  part.lifted_index =
      IndexTensor(flat, c.device).view({c.spec->num_kv_heads, -1});
}

absl::StatusOr<ProgramPart> CompilePart(const SideContext& c,
                                        const ResolvedPart& from) {
  ProgramPart part;
  part.space = from.space;
  part.index = from.index;
  part.prefix = from.prefix;
  part.lift_prefix = from.lift_prefix;
  part.post_rope = from.stored == plan::RopeSide::kAfter;
  switch (from.space) {
    case Space::kFull:
      KVASIR_RETURN_IF_ERROR(CompileFull(c, from, part));
      break;
    case Space::kLowRank:
      KVASIR_RETURN_IF_ERROR(CompileLowRank(c, from, part));
      break;
    case Space::kRopePairs:
      KVASIR_RETURN_IF_ERROR(CompileRopePairs(c, from, part));
      break;
    case Space::kRopeLowRank:
      KVASIR_RETURN_IF_ERROR(CompileRopeLowRank(c, from, part));
      break;
  }
  if (part.held_dims.empty()) part.held_dims = part.lifted_dims;
  MakeLiftedIndices(c, part);
  if (part.folds) MakeFoldedIndices(c, part);
  return part;
}

// Finds which row of q_proj computes which dim or channel, for a layer in which
// the lift of a key part is folded into q_proj. The rows are ordered by head,
// and within a head by part.
void MapFoldedQuery(const SideContext& c, LayerProgram& program) {
  const int64_t heads = c.spec->num_heads;
  const int64_t share = heads / c.spec->num_kv_heads;
  const int64_t dim = c.spec->head_dim;
  // -1 stands for a zero row.
  Indices plain(static_cast<size_t>(heads * dim), -1);
  std::vector<Indices> folded(program.key.size());
  int64_t row = 0;
  for (int64_t head = 0; head < heads; ++head) {
    const auto kv_head = static_cast<size_t>(head / share);
    for (size_t p = 0; p < program.key.size(); ++p) {
      const ProgramPart& part = program.key[p];
      if (!part.folds) {
        for (const int64_t d : part.held_dims[kv_head]) {
          plain[static_cast<size_t>(head * dim + d)] = row++;
        }
        continue;
      }
      const ProgramLatent& latent =
          *LatentOfHead(part, c.spec->num_kv_heads)[kv_head];
      for (int64_t place = 0; place < part.widest_latent; ++place) {
        const int64_t channel = ChannelAt(part, latent, place);
        folded[p].push_back(channel < 0 ? -1 : row + channel);
      }
      row += latent.width();
    }
  }
  const auto rows_index = [&](Indices& rows) {
    std::replace(rows.begin(), rows.end(), int64_t{-1}, row);
    return IndexTensor(rows, c.device);
  };
  if (program.has_plain_key) program.plain_query_rows = rows_index(plain);
  for (Indices& rows : folded) {
    program.folded_query_rows.push_back(rows.empty() ? at::Tensor()
                                                     : rows_index(rows));
  }
}

void MapFoldedOutput(const SideContext& c, LayerProgram& program) {
  const ProgramPart& value = program.value;
  const int64_t share = c.spec->num_heads / c.spec->num_kv_heads;
  Indices columns;
  const auto latents = LatentOfHead(value, c.spec->num_kv_heads);
  for (int64_t head = 0; head < c.spec->num_heads; ++head) {
    const ProgramLatent& latent = *latents[static_cast<size_t>(head / share)];
    for (int64_t i = 0; i < latent.width(); ++i) {
      columns.push_back(head * value.widest_latent + i);
    }
  }
  if (!IsIota(columns) || static_cast<int64_t>(columns.size()) !=
                              c.spec->num_heads * value.widest_latent) {
    program.output_columns = IndexTensor(columns, c.device);
  }
}

// Returns the plan that stores whole keys and values without codes.
LayerPlan UncompressedPlan(bool rotates) {
  LayerPlan plan;
  for (kvasir::v1::SidePlan* side :
       {plan.mutable_key(), plan.mutable_value()}) {
    kvasir::v1::Part* part = side->add_parts();
    part->mutable_full();
    part->mutable_codec()->set_dtype(kvasir::v1::F32);
    part->set_stored(side == plan.mutable_key() && rotates
                         ? kvasir::v1::PRE_ROPE
                         : kvasir::v1::NO_ROPE);
  }
  return plan;
}

absl::StatusOr<LayerProgram> Compile(const model::DecoderSpec& spec,
                                     const LayerPlan& plan, int64_t layer,
                                     at::Device device) {
  LayerProgram program;
  program.spec = spec;
  program.layer = layer;
  const model::LayerSpec& layer_spec = spec.layers[static_cast<size_t>(layer)];
  program.rotates = layer_spec.rope && spec.rope.rotary_dim > 0;
  program.sliding_window = layer_spec.sliding_window;
  const auto unserved = [layer](const char* what) {
    return absl::UnimplementedError(absl::StrCat(
        "layer ", layer, ": the reference decoder does not support ", what));
  };
  if (plan.has_selection()) return unserved("selection");
  const plan::AttentionShape shape = model::AttentionShapeOf(spec);
  KVASIR_ASSIGN_OR_RETURN(program.eviction,
                          plan::ResolveLayerEviction(plan, shape, layer));
  KVASIR_ASSIGN_OR_RETURN(const plan::ResolvedAttention attention,
                          plan::ResolveAttention(plan, shape, layer));
  KVASIR_ASSIGN_OR_RETURN(plan::AttentionTensors tensors,
                          plan::TensorsOf(attention, shape, layer));
  program.has_o_bias = tensors.output_bias;
  program.attention_tensors = std::move(tensors.tensors);
  SideContext key{&spec, layer, plan::Side::kKey, program.rotates, device};
  for (const ResolvedPart& from : attention.key.parts) {
    KVASIR_ASSIGN_OR_RETURN(ProgramPart part, CompilePart(key, from));
    program.key.push_back(std::move(part));
  }
  SideContext value{&spec, layer, plan::Side::kValue, false, device};
  if (attention.value.parts.size() != 1) {
    return value.Refuse(
        absl::StatusCode::kInvalidArgument, 0,
        absl::StrCat("values must have exactly one part, but have ",
                     attention.value.parts.size()));
  }
  if (program.key.size() > 1) {
    for (ProgramPart& part : program.key) part.leaves_bias_out = false;
  }
  KVASIR_ASSIGN_OR_RETURN(program.value,
                          CompilePart(value, attention.value.parts[0]));
  program.joint = attention.value.parts[0].joint;
  program.key_exact = {attention.key.exact_sinks, attention.key.exact_window};
  program.value_exact = {attention.value.exact_sinks,
                         attention.value.exact_window};

  const auto folded = [](const ProgramPart& part) { return part.folds; };
  program.has_plain_key =
      !std::all_of(program.key.begin(), program.key.end(), folded);
  program.query_is_folded =
      std::any_of(attention.key.parts.begin(), attention.key.parts.end(),
                  [](const ResolvedPart& part) { return part.folded; });
  if (program.query_is_folded) MapFoldedQuery(key, program);
  if (program.value.folds) MapFoldedOutput(value, program);
  return program;
}

}  // namespace

absl::StatusOr<LayerProgram> MakeLayerProgram(const model::DecoderSpec& spec,
                                              const LayerPlan* plan,
                                              int64_t layer,
                                              at::Device device) {
  if (plan != nullptr) return Compile(spec, *plan, layer, device);
  const bool rotates =
      spec.layers[static_cast<size_t>(layer)].rope && spec.rope.rotary_dim > 0;
  KVASIR_ASSIGN_OR_RETURN(
      LayerProgram program,
      Compile(spec, UncompressedPlan(rotates), layer, device));
  program.key[0].coded = false;
  program.value.coded = false;
  return program;
}

std::vector<model::RequiredTensor> LayerTensors(const LayerProgram& program,
                                                Ranges ranges) {
  std::vector<model::RequiredTensor> tensors =
      model::NormAndMlpTensors(program.spec, program.layer);
  for (const model::RequiredTensor& tensor : program.attention_tensors) {
    if (ranges == Ranges::kRequired || !tensor.f32_only) {
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

absl::Status CheckLayerTensors(const LayerProgram& program,
                               const TensorMap& tensors, Ranges ranges) {
  for (const model::RequiredTensor& want : LayerTensors(program, ranges)) {
    const auto text = [](c10::IntArrayRef shape) {
      return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
    };
    const auto it = tensors.find(want.name);
    if (it == tensors.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", program.layer, ": there is no tensor ", want.name,
          "; it must have the shape ", text(want.shape)));
    }
    if (it->second.sizes() != c10::IntArrayRef(want.shape)) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", program.layer, ": tensor ", want.name,
                       " must have the shape ", text(want.shape), ", has ",
                       text(it->second.sizes())));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::compress
