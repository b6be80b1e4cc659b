#include "compress/oracle/layer_program.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "plan/plan.h"

namespace kvasir::compress {

using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::SidePlan;

namespace {

using Indices = std::vector<int64_t>;

// What the compilation of one side needs.
struct SideContext {
  const model::DecoderSpec* spec = nullptr;
  int64_t layer = 0;
  cache::Side side = cache::Side::kKey;
  bool rotates = false;  // this side of this layer
  at::Device device = at::kCPU;

  int64_t num_pairs() const { return rotates ? spec->rope.rotary_dim / 2 : 0; }

  absl::Status Refuse(absl::StatusCode code, int part,
                      absl::string_view why) const {
    return absl::Status(
        code, absl::StrCat("layer ", layer, " ", cache::SideName(side),
                           " part ", part, ": ", why));
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

template <typename Repeated>
Indices Sorted(const Repeated& heads) {
  Indices sorted(heads.begin(), heads.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

// The dims of some pairs of a head, ascending.
template <typename Repeated>
Indices AscendingPairDims(const SideContext& c, const Repeated& pairs) {
  return Sorted(model::PairDims(
      c.spec->rope, {pairs.data(), static_cast<size_t>(pairs.size())}));
}

absl::Status AddLatent(ProgramPart& part, const SideContext& c,
                       const kvasir::v1::Codec& codec, Indices heads,
                       int64_t rank) {
  ProgramLatent latent;
  latent.heads = std::move(heads);
  latent.offset = part.stored_width;
  absl::StatusOr<LatentCodec> made = MakeLatentCodec(codec, rank);
  if (!made.ok()) {
    return c.Refuse(made.status().code(), part.index, made.status().message());
  }
  latent.codec = *std::move(made);
  part.stored_width += latent.width();
  part.widest_latent = std::max(part.widest_latent, latent.width());
  part.latents.push_back(std::move(latent));
  return absl::OkStatus();
}

absl::Status CompileFull(const SideContext& c, const Part& plan,
                         ProgramPart& part) {
  const int64_t heads = c.spec->num_kv_heads;
  const int64_t dim = c.spec->head_dim;
  part.has_bias = c.spec->qkv_bias;
  part.basis = plan.codec().has_basis_static();
  part.mean = plan.mean();
  if (part.mean && !part.basis) {
    return c.Refuse(absl::StatusCode::kInvalidArgument, part.index,
                    "a mean of a full space belongs to a basis");
  }
  part.lifted_dims.assign(static_cast<size_t>(heads), Iota(dim));
  if (part.basis) {
    return AddLatent(part, c, plan.codec(), Iota(heads), heads * dim);
  }
  for (int64_t head = 0; head < heads; ++head) {
    KVASIR_RETURN_IF_ERROR(AddLatent(part, c, plan.codec(), {head}, dim));
  }
  return absl::OkStatus();
}

absl::Status CompileLowRank(const SideContext& c, const Part& plan,
                            const model::PartTensors& tensors,
                            ProgramPart& part) {
  for (const Part::Use& use : plan.uses()) {
    if (use.has_anchored()) {
      return c.Refuse(absl::StatusCode::kUnimplemented, part.index,
                      "ANCHORED is not applied by the reference decoder");
    }
  }
  part.folds = tensors.folded;
  part.has_up_bias = tensors.rebuilt && (c.spec->qkv_bias || plan.mean());
  part.has_bias = plan.latent_bias();
  part.lifted_dims.assign(static_cast<size_t>(c.spec->num_kv_heads),
                          tensors.dims);
  for (const auto& group : plan.low_rank().groups()) {
    KVASIR_RETURN_IF_ERROR(
        AddLatent(part, c, plan.codec(), Sorted(group.heads()), group.rank()));
  }
  return absl::OkStatus();
}

absl::Status CheckOneUse(const SideContext& c, const Part& plan, int index) {
  if (plan.uses_size() != 1 || plan.uses(0).has_anchored()) {
    return c.Refuse(absl::StatusCode::kUnimplemented, index,
                    "the reference decoder applies one use of a space of RoPE "
                    "pairs, and not ANCHORED");
  }
  return absl::OkStatus();
}

absl::Status CompileRopePairs(const SideContext& c, const Part& plan,
                              ProgramPart& part) {
  KVASIR_RETURN_IF_ERROR(CheckOneUse(c, plan, part.index));
  part.has_bias = c.spec->qkv_bias;
  Indices kept;
  for (int h = 0; h < plan.rope_pairs().per_head_size(); ++h) {
    const auto& list = plan.rope_pairs().per_head(h).pair_indices();
    kept.insert(kept.end(), list.begin(), list.end());
    part.lifted_dims.push_back(AscendingPairDims(c, list));
    KVASIR_RETURN_IF_ERROR(
        AddLatent(part, c, plan.codec(), {h}, 2 * int64_t{list.size()}));
  }
  part.kept_pairs = IndexTensor(kept, c.device);
  return absl::OkStatus();
}

// [rotary pairs, C]: 1 where the channel belongs to the pair.
at::Tensor PairSelector(const SideContext& c, const Indices& channel_pairs) {
  const at::Tensor selector =
      at::zeros({c.num_pairs(), static_cast<int64_t>(channel_pairs.size())});
  for (size_t i = 0; i < channel_pairs.size(); ++i) {
    selector[channel_pairs[i]][static_cast<int64_t>(i)].fill_(1.0f);
  }
  return selector.to(c.device);
}

absl::Status CompileRopeLowRank(const SideContext& c, const Part& plan,
                                const model::PartTensors& tensors,
                                ProgramPart& part) {
  KVASIR_RETURN_IF_ERROR(CheckOneUse(c, plan, part.index));
  const auto heads = static_cast<size_t>(c.spec->num_kv_heads);
  part.folds = tensors.folded;
  part.has_bias = plan.latent_bias();
  part.lifted_dims.assign(heads, Iota(2 * c.num_pairs()));
  part.held_dims.resize(heads);
  Indices real;
  Indices imaginary;
  Indices all_pairs;
  for (const auto& group : plan.rope_low_rank().groups()) {
    Indices channel_pairs;
    for (int i = 0; i < group.pairs_size(); ++i) {
      channel_pairs.insert(channel_pairs.end(), group.rank_per_pair(i),
                           group.pairs(i));
    }
    const auto complex = static_cast<int64_t>(channel_pairs.size());
    KVASIR_RETURN_IF_ERROR(
        AddLatent(part, c, plan.codec(), Sorted(group.heads()), 2 * complex));
    ProgramLatent& latent = part.latents.back();
    for (int64_t i = 0; i < complex; ++i) {
      real.push_back(latent.offset + i);
      imaginary.push_back(latent.offset + complex + i);
    }
    all_pairs.insert(all_pairs.end(), channel_pairs.begin(),
                     channel_pairs.end());
    const Indices held = AscendingPairDims(c, group.pairs());
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

// Where channel `channel` of `latent` lies among the `widest` of a head; -1 for
// the filling.
int64_t ChannelAt(const ProgramPart& part, const ProgramLatent& latent,
                  int64_t place) {
  if (part.space != Part::kRopeLowRank) {
    return place < latent.width() ? place : -1;
  }
  const int64_t complex = latent.width() / 2;
  const int64_t half = part.widest_complex();
  const int64_t in_half = place % half;
  if (in_half >= complex) return -1;
  return (place < half ? 0 : complex) + in_half;
}

// The latent that serves each KV head.
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
      if (part.space != Part::kRopeLowRank || place >= part.widest_complex()) {
        continue;
      }
      // Filling is 0 however it turns.
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
                                        const SidePlan& side, int index,
                                        const model::PartTensors& tensors) {
  const Part& plan = side.parts(index);
  ProgramPart part;
  part.space = plan.space_case();
  part.index = index;
  part.prefix = tensors.prefix;
  part.post_rope = plan.stored() == kvasir::v1::POST_ROPE;
  switch (plan.space_case()) {
    case Part::kFull:
      KVASIR_RETURN_IF_ERROR(CompileFull(c, plan, part));
      break;
    case Part::kLowRank:
      KVASIR_RETURN_IF_ERROR(CompileLowRank(c, plan, tensors, part));
      break;
    case Part::kRopePairs:
      KVASIR_RETURN_IF_ERROR(CompileRopePairs(c, plan, part));
      break;
    case Part::kRopeLowRank:
      KVASIR_RETURN_IF_ERROR(CompileRopeLowRank(c, plan, tensors, part));
      break;
    case Part::SPACE_NOT_SET:
      return c.Refuse(absl::StatusCode::kInvalidArgument, index, "no space");
  }
  if (part.held_dims.empty()) part.held_dims = part.lifted_dims;
  MakeLiftedIndices(c, part);
  if (part.folds) MakeFoldedIndices(c, part);
  return part;
}

// Where q_proj's rows go when some key part folds: head after head, part after
// part.
void MapFoldedQuery(const SideContext& c, LayerProgram& program) {
  const int64_t heads = c.spec->num_heads;
  const int64_t share = heads / c.spec->num_kv_heads;
  const int64_t dim = c.spec->head_dim;
  // -1: a zero row.
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

// Whole keys and values, nothing coded.
LayerPlan UncompressedPlan(bool rotates) {
  LayerPlan plan;
  for (SidePlan* side : {plan.mutable_key(), plan.mutable_value()}) {
    Part* part = side->add_parts();
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
  if (plan.has_eviction() || plan.has_selection()) {
    return absl::UnimplementedError(
        absl::StrCat("layer ", layer,
                     ": eviction and selection depend on a whole sequence: "
                     "the reference decoder does not apply them"));
  }
  KVASIR_ASSIGN_OR_RETURN(model::AttentionTensors attention,
                          model::DescribeAttention(spec, layer, plan));
  program.has_o_bias = attention.output_bias;
  const size_t prefix = model::LayerTensorName(layer, "").size();
  for (model::RequiredTensor& tensor : attention.tensors) {
    tensor.name.erase(0, prefix);
    program.attention_tensors.push_back(std::move(tensor));
  }
  SideContext key{&spec, layer, cache::Side::kKey, program.rotates, device};
  for (int p = 0; p < plan.key().parts_size(); ++p) {
    KVASIR_ASSIGN_OR_RETURN(
        ProgramPart part,
        CompilePart(key, plan.key(), p, attention.key[static_cast<size_t>(p)]));
    program.key.push_back(std::move(part));
  }
  SideContext value{&spec, layer, cache::Side::kValue, false, device};
  if (plan.value().parts_size() != 1) {
    return value.Refuse(absl::StatusCode::kInvalidArgument, 0,
                        "want one part of values");
  }
  KVASIR_ASSIGN_OR_RETURN(
      program.value, CompilePart(value, plan.value(), 0, attention.value[0]));
  program.key_exact_window = plan.key().exact_window();
  program.value_exact_window = plan.value().exact_window();

  program.has_plain_key =
      std::any_of(program.key.begin(), program.key.end(),
                  [](const ProgramPart& part) { return !part.folds; });
  program.query_is_folded =
      std::any_of(attention.key.begin(), attention.key.end(),
                  [](const model::PartTensors& part) { return part.folded; });
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
      model::NormAndMlpTensors(program.spec);
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
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", program.layer, ": no tensor ", want.name,
                       ", want it as ", text(want.shape)));
    }
    if (it->second.sizes() != c10::IntArrayRef(want.shape)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", program.layer, ": tensor ", want.name, ": want ",
          text(want.shape), ", have ", text(it->second.sizes())));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::compress
