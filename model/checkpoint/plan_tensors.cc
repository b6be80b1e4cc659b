#include "model/checkpoint/plan_tensors.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;
using kvasir::v1::SidePlan;

bool Rotates(const DecoderSpec& spec, int64_t layer, KvSide side) {
  return side == KvSide::kKey && spec.rope.rotary_dim > 0 &&
         spec.layers[static_cast<size_t>(layer)].rope;
}

template <typename Repeated>
std::vector<int64_t> Ascending(const Repeated& heads) {
  std::vector<int64_t> sorted(heads.begin(), heads.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

std::vector<int64_t> AllHeads(const DecoderSpec& spec) {
  std::vector<int64_t> heads(static_cast<size_t>(spec.num_kv_heads));
  std::iota(heads.begin(), heads.end(), int64_t{0});
  return heads;
}

// Rows in tensors of a latent of `width` numbers. A basis of the sequence is
// found while it runs, of the whole latent: only then is anything left out.
int64_t TensorChannels(const Codec& codec, int64_t width) {
  return codec.has_basis_sequence() ? width : StoredChannels(codec, width);
}

std::vector<LatentTensors> FullLatents(const DecoderSpec& spec,
                                       const Codec& codec) {
  const int64_t d = spec.head_dim;
  if (codec.has_basis_static() || codec.has_basis_sequence()) {
    return {{AllHeads(spec), TensorChannels(codec, spec.num_kv_heads * d), d}};
  }
  std::vector<LatentTensors> latents;
  for (const int64_t head : AllHeads(spec)) latents.push_back({{head}, d, d});
  return latents;
}

std::vector<LatentTensors> LatentsOf(const DecoderSpec& spec, const Part& part,
                                     int64_t low_rank_dims) {
  std::vector<LatentTensors> latents;
  if (part.has_full()) return FullLatents(spec, part.codec());
  for (const auto& group : part.low_rank().groups()) {
    latents.push_back({Ascending(group.heads()),
                       TensorChannels(part.codec(), group.rank()),
                       low_rank_dims});
  }
  for (int h = 0; h < part.rope_pairs().per_head_size(); ++h) {
    const int64_t dims = 2 * part.rope_pairs().per_head(h).pair_indices_size();
    latents.push_back({{h}, dims, dims});
  }
  for (const auto& group : part.rope_low_rank().groups()) {
    int64_t terms = 0;
    for (const uint32_t rank : group.rank_per_pair()) terms += rank;
    latents.push_back(
        {Ascending(group.heads()), 2 * terms, 2 * group.pairs_size()});
  }
  return latents;
}

absl::Status CheckHeads(const DecoderSpec& spec, int64_t layer,
                        const PartTensors& part) {
  std::vector<int> latents_of(static_cast<size_t>(spec.num_kv_heads), 0);
  for (const LatentTensors& latent : part.latents) {
    for (const int64_t head : latent.heads) {
      if (head < spec.num_kv_heads) ++latents_of[static_cast<size_t>(head)];
    }
  }
  for (size_t head = 0; head < latents_of.size(); ++head) {
    if (latents_of[head] == 1) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "layer %d: %s: KV head %d of %d is in %d groups of the "
        "plan: a plan for another model",
        layer, part.prefix, head, spec.num_kv_heads, latents_of[head]));
  }
  return absl::OkStatus();
}

// Lists the tensors of one layer.
class Lister {
 public:
  Lister(const DecoderSpec& spec, int64_t layer, AttentionTensors* out)
      : spec_(spec), layer_(layer), out_(out) {}

  absl::Status Side(KvSide side, const SidePlan& plan,
                    std::vector<PartTensors>* parts) {
    for (int p = 0; p < plan.parts_size(); ++p) {
      const Part& part = plan.parts(p);
      PartTensors shape;
      shape.side = side;
      shape.prefix = PartPrefix(side, p, plan.parts_size());
      if (part.has_low_rank()) {
        if (part.stored() == kvasir::v1::POST_ROPE) {
          return absl::UnimplementedError(absl::StrFormat(
              "layer %d: %s: a low_rank space of keys stored POST_ROPE has no "
              "tensors; a full space with basis_static says the same",
              layer_, shape.prefix));
        }
        shape.dims = CoveredDims(spec_, layer_, side, part);
      }
      shape.latents =
          LatentsOf(spec_, part, static_cast<int64_t>(shape.dims.size()));
      shape.folded = part.uses_size() > 0;
      for (const Part::Use& use : part.uses()) {
        shape.folded = shape.folded && use.has_fold();
        shape.rebuilt =
            shape.rebuilt || (side == KvSide::kKey &&
                              (use.has_reconstruct() || use.has_anchored()));
      }
      KVASIR_RETURN_IF_ERROR(CheckHeads(spec_, layer_, shape));
      AddPart(part, shape);
      parts->push_back(std::move(shape));
    }
    return absl::OkStatus();
  }

  void Query() {
    bool any_folded = false;
    for (const PartTensors& part : out_->key) {
      any_folded = any_folded || part.folded;
    }
    int64_t rows = 0;
    for (int64_t head = 0; head < spec_.num_heads; ++head) {
      int64_t own = any_folded ? 0 : spec_.head_dim;
      for (const PartTensors& part : out_->key) {
        if (!any_folded) break;
        const LatentTensors& latent = part.LatentOf(KvHeadOf(head));
        own += part.folded ? latent.channels : latent.head_dims;
      }
      out_->query_rows.push_back(own);
      rows += own;
    }
    Add("self_attn.q_proj.weight", {rows, spec_.hidden_size});
    if (spec_.qkv_bias) Add("self_attn.q_proj.bias", {rows});
  }

  void Output(const SidePlan& plan) {
    int64_t columns = 0;
    for (int64_t head = 0; head < spec_.num_heads; ++head) {
      int64_t own = 0;
      for (const PartTensors& part : out_->value) {
        own += part.folded ? part.LatentOf(KvHeadOf(head)).channels
                           : spec_.head_dim;
      }
      out_->output_columns.push_back(own);
      columns += own;
    }
    out_->output_bias = spec_.o_bias;
    for (const Part& part : plan.parts()) {
      const bool constant = spec_.qkv_bias || part.mean();
      out_->output_bias =
          out_->output_bias || (part.has_low_rank() && constant);
    }
    Add("self_attn.o_proj.weight", {spec_.hidden_size, columns});
    if (out_->output_bias) Add("self_attn.o_proj.bias", {spec_.hidden_size});
  }

 private:
  int64_t KvHeadOf(int64_t query_head) const {
    return query_head / (spec_.num_heads / spec_.num_kv_heads);
  }

  void Add(std::string_view name, std::vector<int64_t> shape,
           bool f32_only = false) {
    out_->tensors.push_back(
        {LayerTensorName(layer_, name), std::move(shape), f32_only});
  }

  void AddPart(const Part& part, const PartTensors& shape) {
    const auto add = [&](std::string_view name, std::vector<int64_t> dims,
                         bool f32_only = false) {
      Add(absl::StrFormat("%s.%s", shape.prefix, name), std::move(dims),
          f32_only);
    };
    const int64_t m = spec_.hidden_size;
    const int64_t all_dims = spec_.num_kv_heads * spec_.head_dim;
    if (part.has_full()) {
      add("weight", {all_dims, m});
      if (spec_.qkv_bias) add("bias", {all_dims});
      if (part.codec().has_basis_static()) {
        add("basis.weight", {shape.channels(), all_dims});
        if (part.mean()) add("basis.mean", {all_dims});
      }
    } else if (part.has_rope_pairs()) {
      add("weight", {shape.channels(), m});
      if (spec_.qkv_bias) add("bias", {shape.channels()});
    } else {
      add("down.weight", {shape.channels(), m});
      if (part.latent_bias()) add("down.bias", {shape.channels()});
      if (!shape.folded) AddLifts(part, shape);
    }
    if (part.codec().has_channel_static()) {
      add("range.min", {shape.channels()}, /*f32_only=*/true);
      add("range.scale", {shape.channels()}, /*f32_only=*/true);
    }
  }

  void AddLifts(const Part& part, const PartTensors& shape) {
    const auto name = [&shape](std::string_view rest) {
      return absl::StrFormat("%s.%s", shape.prefix, rest);
    };
    for (size_t g = 0; g < shape.latents.size(); ++g) {
      const LatentTensors& latent = shape.latents[g];
      const auto heads = static_cast<int64_t>(latent.heads.size());
      const std::string lift = name(LiftName(static_cast<int64_t>(g)));
      if (part.has_low_rank()) {
        Add(lift, {heads * latent.head_dims, latent.channels});
      } else {
        Add(lift, {heads, 2, latent.channels / 2});
      }
    }
    if (part.has_low_rank() && shape.rebuilt &&
        (spec_.qkv_bias || part.mean())) {
      Add(name("up.bias"),
          {spec_.num_kv_heads * static_cast<int64_t>(shape.dims.size())});
    }
  }

  const DecoderSpec& spec_;
  const int64_t layer_;
  AttentionTensors* const out_;
};

std::vector<RequiredTensor> PlainAttention(const DecoderSpec& spec,
                                           int64_t layer) {
  const int64_t m = spec.hidden_size;
  const int64_t q = spec.num_heads * spec.head_dim;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  std::vector<RequiredTensor> tensors;
  const auto add = [&](std::string_view part, std::vector<int64_t> shape) {
    tensors.push_back({LayerTensorName(layer, part), std::move(shape)});
  };
  add("self_attn.q_proj.weight", {q, m});
  if (spec.qkv_bias) add("self_attn.q_proj.bias", {q});
  add("self_attn.k_proj.weight", {kv, m});
  if (spec.qkv_bias) add("self_attn.k_proj.bias", {kv});
  add("self_attn.v_proj.weight", {kv, m});
  if (spec.qkv_bias) add("self_attn.v_proj.bias", {kv});
  add("self_attn.o_proj.weight", {m, q});
  if (spec.o_bias) add("self_attn.o_proj.bias", {m});
  return tensors;
}

// `attention` gives the attention tensors of a layer, or an error.
template <typename Attention>
absl::StatusOr<std::vector<RequiredTensor>> ModelTensors(
    const DecoderSpec& spec, const Attention& attention) {
  const int64_t m = spec.hidden_size;
  std::vector<RequiredTensor> tensors;
  tensors.push_back({std::string(kEmbeddingName), {spec.vocab_size, m}});
  if (spec.learned_positions) {
    tensors.push_back(
        {std::string(kPositionsName), {spec.max_position_embeddings, m}});
  }
  const std::vector<RequiredTensor> beside = NormAndMlpTensors(spec);
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    KVASIR_ASSIGN_OR_RETURN(std::vector<RequiredTensor> own, attention(layer));
    std::move(own.begin(), own.end(), std::back_inserter(tensors));
    for (const RequiredTensor& tensor : beside) {
      tensors.push_back({LayerTensorName(layer, tensor.name), tensor.shape});
    }
  }
  tensors.push_back({std::string(kFinalNormName), {m}});
  if (spec.norm == NormKind::kLayerNorm) {
    tensors.push_back({std::string(kFinalNormBiasName), {m}});
  }
  if (!spec.tied_head) {
    tensors.push_back({std::string(kHeadName), {spec.vocab_size, m}});
  }
  return tensors;
}

}  // namespace

std::string LayerTensorName(int64_t layer, std::string_view part) {
  return absl::StrFormat("model.layers.%d.%s", layer, part);
}

std::string PartPrefix(KvSide side, int part, int num_parts) {
  std::string prefix =
      side == KvSide::kKey ? "self_attn.k_proj" : "self_attn.v_proj";
  if (num_parts > 1) absl::StrAppend(&prefix, ".part", part);
  return prefix;
}

std::string LiftName(int64_t group) {
  return absl::StrCat("up.", group, ".weight");
}

int64_t PartTensors::channels() const {
  int64_t sum = 0;
  for (const LatentTensors& latent : latents) sum += latent.channels;
  return sum;
}

const LatentTensors& PartTensors::LatentOf(int64_t kv_head) const {
  const auto found = std::find_if(
      latents.begin(), latents.end(), [kv_head](const LatentTensors& latent) {
        return std::binary_search(latent.heads.begin(), latent.heads.end(),
                                  kv_head);
      });
  KVASIR_CHECK(found != latents.end());
  return *found;
}

int64_t StoredChannels(const Codec& codec, int64_t width) {
  if (!codec.has_bits() || codec.bits().schedule_size() == 0) return width;
  const auto& schedule = codec.bits().schedule();
  return width / schedule.size() *
         (schedule.size() - std::count(schedule.begin(), schedule.end(), 0u));
}

std::vector<int64_t> PairDims(const RopeSpec& rope,
                              std::span<const uint32_t> pairs) {
  std::vector<int64_t> dims;
  if (rope.pairing == RopePairing::kInterleaved) {
    for (const int64_t pair : pairs) {
      dims.push_back(2 * pair);
      dims.push_back(2 * pair + 1);
    }
    return dims;
  }
  for (const int64_t pair : pairs) dims.push_back(pair);
  for (const int64_t pair : pairs) dims.push_back(pair + rope.rotary_dim / 2);
  return dims;
}

std::vector<int64_t> CoveredDims(const DecoderSpec& spec, int64_t layer,
                                 KvSide side, const Part& part) {
  const int64_t rotary = Rotates(spec, layer, side) ? spec.rope.rotary_dim : 0;
  std::vector<int64_t> dims;
  for (const Part::Use& use : part.uses()) {
    const std::vector<int64_t> own = PairDims(
        spec.rope, {use.pairs().data(), static_cast<size_t>(use.pairs_size())});
    dims.insert(dims.end(), own.begin(), own.end());
    if (use.pairs_size() > 0) continue;
    // One use without pairs is of all that the part stores; beside others it is
    // of the dims that do not rotate.
    const bool all =
        part.uses_size() == 1 && part.stored() != kvasir::v1::NO_ROPE;
    for (int64_t d = all ? 0 : rotary; d < spec.head_dim; ++d) {
      dims.push_back(d);
    }
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

absl::StatusOr<AttentionTensors> DescribeAttention(const DecoderSpec& spec,
                                                   int64_t layer,
                                                   const LayerPlan& plan) {
  AttentionTensors attention;
  Lister lister(spec, layer, &attention);
  // The projections of x first; q_proj's rows need the key's parts.
  KVASIR_RETURN_IF_ERROR(lister.Side(KvSide::kKey, plan.key(), &attention.key));
  std::vector<RequiredTensor> key = std::exchange(attention.tensors, {});
  lister.Query();
  std::move(key.begin(), key.end(), std::back_inserter(attention.tensors));
  KVASIR_RETURN_IF_ERROR(
      lister.Side(KvSide::kValue, plan.value(), &attention.value));
  lister.Output(plan.value());
  return attention;
}

std::vector<RequiredTensor> NormAndMlpTensors(const DecoderSpec& spec) {
  const int64_t m = spec.hidden_size;
  const int64_t f = spec.intermediate_size;
  std::vector<RequiredTensor> tensors;
  const auto add = [&](const char* module, std::vector<int64_t> shape,
                       bool bias) {
    if (bias) tensors.push_back({absl::StrCat(module, ".bias"), {shape[0]}});
    tensors.push_back({absl::StrCat(module, ".weight"), std::move(shape)});
  };
  const bool norm_bias = spec.norm == NormKind::kLayerNorm;
  add("input_layernorm", {m}, norm_bias);
  add("post_attention_layernorm", {m}, norm_bias);
  if (IsGated(spec.mlp)) add("mlp.gate_proj", {f, m}, spec.mlp_bias);
  add("mlp.up_proj", {f, m}, spec.mlp_bias);
  add("mlp.down_proj", {m, f}, spec.mlp_bias);
  return tensors;
}

std::vector<RequiredTensor> RequiredTensors(const DecoderSpec& spec) {
  auto tensors = ModelTensors(
      spec,
      [&spec](int64_t layer) -> absl::StatusOr<std::vector<RequiredTensor>> {
        return PlainAttention(spec, layer);
      });
  KVASIR_CHECK(tensors.ok());
  return *std::move(tensors);
}

absl::StatusOr<std::vector<RequiredTensor>> RequiredTensors(
    const DecoderSpec& spec, const kvasir::v1::KvPlan& plan) {
  if (plan.layers_size() != spec.num_layers()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan has ", plan.layers_size(),
                     " layers, the model has ", spec.num_layers()));
  }
  return ModelTensors(
      spec, [&](int64_t layer) -> absl::StatusOr<std::vector<RequiredTensor>> {
        KVASIR_ASSIGN_OR_RETURN(
            AttentionTensors attention,
            DescribeAttention(spec, layer,
                              plan.layers(static_cast<int>(layer))));
        return std::move(attention.tensors);
      });
}

}  // namespace kvasir::model
