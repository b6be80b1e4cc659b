#include "model/shapes/family_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "model/shapes/rope_config.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

struct ActivationRow {
  std::string_view name;
  MlpKind kind;
};
constexpr std::array<ActivationRow, 5> kPlainActivations = {{
    {"gelu", MlpKind::kGelu},
    {"gelu_new", MlpKind::kGeluTanh},
    {"gelu_fast", MlpKind::kGeluTanh},
    {"gelu_pytorch_tanh", MlpKind::kGeluTanh},
    {"relu", MlpKind::kRelu},
}};

bool IsGemma(Family family) {
  return family == Family::kGemma2 || family == Family::kGemma3;
}

absl::Status ParseActivation(const JsonFields& fields, Family family,
                             DecoderSpec* spec) {
  const std::string_view field = family == Family::kOpt ? "activation_function"
                                 : IsGemma(family)      ? "hidden_activation"
                                                        : "hidden_act";
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> act,
                          fields.String(field));
  if (IsGemma(family)) {
    constexpr std::string_view kOnly = "gelu_pytorch_tanh";
    spec->mlp = MlpKind::kGatedGeluTanh;
    if (act.value_or(std::string(kOnly)) == kOnly) return absl::OkStatus();
    return fields.Unserved(
        field,
        absl::StrFormat("\"%s\" is not served; want \"%s\"", *act, kOnly));
  }
  if (!HasLayerNorm(family)) {
    if (!act.has_value() || *act == "silu" || *act == "swish") {
      return absl::OkStatus();
    }
    return fields.Unserved(
        field, absl::StrFormat("\"%s\" is not served; want \"silu\"", *act));
  }
  const std::string name =
      act.value_or(family == Family::kOpt ? "relu" : "gelu");
  for (const ActivationRow& row : kPlainActivations) {
    if (name != row.name) continue;
    spec->mlp = row.kind;
    return absl::OkStatus();
  }
  return fields.Unserved(
      field,
      absl::StrFormat("\"%s\" is not served; want gelu, gelu_new, gelu_fast, "
                      "gelu_pytorch_tanh or relu",
                      name));
}

absl::Status ParseBiases(const JsonFields& fields, Family family,
                         DecoderSpec* spec) {
  if (family == Family::kLlama || HasQkNorm(family) ||
      family == Family::kSmolLm3 || family == Family::kOlmo2 ||
      IsGemma(family)) {
    KVASIR_ASSIGN_OR_RETURN(spec->qkv_bias,
                            fields.BoolOr("attention_bias", false));
    spec->o_bias = spec->qkv_bias;
    KVASIR_ASSIGN_OR_RETURN(spec->mlp_bias, fields.BoolOr("mlp_bias", false));
    const bool may_have =
        family == Family::kLlama || family == Family::kSmolLm3;
    if (may_have || !spec->mlp_bias) return absl::OkStatus();
    return fields.Unserved(
        "mlp_bias", absl::StrCat(spec->architecture, " does not have it"));
  }
  if (HasLayerNorm(family)) {
    // OPT has one field for all biases. In GPT-NeoX the field is only for
    // attention, because its MLP always has biases.
    KVASIR_ASSIGN_OR_RETURN(
        spec->qkv_bias,
        fields.BoolOr(family == Family::kOpt ? "enable_bias" : "attention_bias",
                      true));
    spec->o_bias = spec->qkv_bias;
    spec->mlp_bias = family == Family::kNeox || spec->qkv_bias;
    return absl::OkStatus();
  }
  spec->qkv_bias = family == Family::kQwen2;
  // The reference implementations of Mistral, Mixtral, Qwen2 and Phi-3 ignore
  // these fields, because the family determines the biases. A file is refused
  // if a field claims a bias that the family does not have.
  for (const std::string_view name : {"attention_bias", "mlp_bias"}) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> on, fields.Bool(name));
    const bool expected = name == "attention_bias" && spec->qkv_bias;
    if (on.value_or(expected) && !expected) {
      return fields.Unserved(
          name, absl::StrCat(spec->architecture, " does not have it"));
    }
  }
  return absl::OkStatus();
}

// Gemma 2 caps scores and logits. A missing field means the default, and null
// means no cap.
absl::Status ParseCaps(const JsonFields& fields, DecoderSpec* spec) {
  struct Cap {
    std::string_view name;
    double fallback;
    double* cap;
  };
  for (const Cap& each :
       {Cap{"attn_logit_softcapping", 50, &spec->score_cap},
        Cap{"final_logit_softcapping", 30, &spec->logit_cap}}) {
    if (fields.IsNull(each.name)) continue;
    KVASIR_ASSIGN_OR_RETURN(
        *each.cap, fields.NumberIn(each.name, 1e-3, 1e6, each.fallback));
  }
  return absl::OkStatus();
}

// Reads the fields of Gemma 2 and of the text models of Gemma 3.
absl::Status ParseGemma(const JsonFields& fields, Family family,
                        DecoderSpec* spec) {
  KVASIR_ASSIGN_OR_RETURN(const bool both_ways,
                          fields.BoolOr("use_bidirectional_attention", false));
  if (both_ways) {
    return fields.Unserved("use_bidirectional_attention",
                           "attention to later tokens is not served");
  }
  KVASIR_ASSIGN_OR_RETURN(spec->norm_eps,
                          fields.NumberIn("rms_norm_eps", 1e-30, 1.0, 1e-6));
  spec->norm_outputs = true;
  spec->norm_weight_offset = 1;
  spec->embedding_scale = std::sqrt(static_cast<double>(spec->hidden_size));
  constexpr double kDefaultScalar = 256;
  KVASIR_ASSIGN_OR_RETURN(
      const double scalar,
      fields.NumberIn("query_pre_attn_scalar", 1e-6, 1e6, kDefaultScalar));
  spec->score_scale = 1 / std::sqrt(scalar);
  const bool two_bases = family == Family::kGemma3;
  RopeContext context = {
      .head_dim = spec->head_dim,
      .max_position_embeddings = spec->max_position_embeddings,
      .default_theta = kFamilies[static_cast<size_t>(family)].default_theta,
      .layer_type = two_bases ? "full_attention" : ""};
  KVASIR_ASSIGN_OR_RETURN(RopeConfig rope, ParseRope(fields, context));
  spec->rope = std::move(rope.rope);
  spec->max_position_embeddings = rope.max_positions;
  if (!two_bases) return ParseCaps(fields, spec);
  spec->qk_norm = QkNorm::kHeads;
  context.layer_type = "sliding_attention";
  context.default_theta = 10000;
  KVASIR_ASSIGN_OR_RETURN(rope, ParseRope(fields, context));
  spec->window_rope = std::move(rope.rope);
  return absl::OkStatus();
}

// Reads the fields of Llama and of similar families, which have RMSNorm and
// whose RoPE rotates all dimensions of a head.
absl::Status ParseRotaryFamily(const JsonFields& fields, Family family,
                               DecoderSpec* spec) {
  const FamilyNames& names = kFamilies[static_cast<size_t>(family)];
  KVASIR_ASSIGN_OR_RETURN(
      spec->norm_eps,
      fields.NumberIn("rms_norm_eps", 1e-30, 1.0, names.default_eps));
  KVASIR_ASSIGN_OR_RETURN(
      RopeConfig rope, ParseRope(fields, {.head_dim = spec->head_dim,
                                          .max_position_embeddings =
                                              spec->max_position_embeddings,
                                          .default_theta = names.default_theta,
                                          .phi3 = family == Family::kPhi3}));
  spec->rope = std::move(rope.rope);
  spec->max_position_embeddings = rope.max_positions;
  if (HasQkNorm(family)) spec->qk_norm = QkNorm::kHeads;
  if (family == Family::kOlmo2) {
    spec->qk_norm = QkNorm::kAllHeads;
    spec->norm_inputs = false;
    spec->norm_outputs = true;
  }
  return absl::OkStatus();
}

// Reads which layers of Qwen3-MoE have experts: every decoder_sparse_step-th,
// except mlp_only_layers.
absl::Status ParseExpertLayers(const JsonFields& fields, DecoderSpec* spec) {
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t step,
      fields.IntIn("decoder_sparse_step", 1, kMaxPositions, 1));
  for (int64_t layer = 0; layer < spec->num_layers(); ++layer) {
    spec->layers[static_cast<size_t>(layer)].experts = (layer + 1) % step == 0;
  }
  constexpr std::string_view kName = "mlp_only_layers";
  const json* list = fields.Find(kName);
  if (list == nullptr) return absl::OkStatus();
  const auto is_layer = [spec](const json& number) {
    return number.is_number_integer() && number >= 0 &&
           number < spec->num_layers();
  };
  if (!list->is_array() || !std::all_of(list->begin(), list->end(), is_layer)) {
    return fields.Error(
        kName, absl::StrFormat("want a list of layers, 0 to %d, have %s",
                               spec->num_layers() - 1, JsonExcerpt(*list)));
  }
  for (const json& layer : *list) {
    spec->layers[layer.get<size_t>()].experts = false;
  }
  return absl::OkStatus();
}

// Limits the number of experts in all layers, so that a small config.json
// cannot require a huge number of tensors.
absl::Status CheckNumExperts(const JsonFields& fields,
                             const DecoderSpec& spec) {
  constexpr int64_t kMaxInAllLayers = int64_t{1} << 16;
  const int64_t in_all = spec.experts.count * spec.num_expert_layers();
  if (in_all <= kMaxInAllLayers) return absl::OkStatus();
  return fields.Error("num_hidden_layers",
                      absl::StrFormat("all layers together may have %d "
                                      "experts, but %d layers have %d each",
                                      kMaxInAllLayers, spec.num_expert_layers(),
                                      spec.experts.count));
}

// Reads the number of experts. transformers 4 writes it as num_experts for
// Qwen3-MoE; transformers 5 writes it as num_local_experts, as for Mixtral.
absl::StatusOr<int64_t> NumExperts(const JsonFields& fields,
                                   int64_t default_count) {
  constexpr int64_t kMaxExperts = 1024;
  constexpr std::string_view kName = "num_local_experts";
  constexpr std::string_view kOther = "num_experts";
  KVASIR_ASSIGN_OR_RETURN(const int64_t count,
                          fields.IntIn(kName, 1, kMaxExperts, default_count));
  const bool has_name = fields.Find(kName) != nullptr;
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t other,
      fields.IntIn(kOther, 1, kMaxExperts, has_name ? count : default_count));
  if (has_name && other != count) {
    return fields.Error(
        kOther, absl::StrFormat("is %d, but %s is %d", other, kName, count));
  }
  return other;
}

absl::Status ParseExperts(const JsonFields& fields, Family family,
                          DecoderSpec* spec) {
  const bool mixtral = family == Family::kMixtral;
  ExpertsSpec& experts = spec->experts;
  KVASIR_ASSIGN_OR_RETURN(experts.count, NumExperts(fields, mixtral ? 8 : 128));
  KVASIR_ASSIGN_OR_RETURN(
      experts.top_k,
      fields.IntIn("num_experts_per_tok", 1, experts.count, mixtral ? 2 : 8));
  if (mixtral) {
    experts.intermediate_size = spec->intermediate_size;
    experts.normalize = true;
    for (LayerSpec& layer : spec->layers) layer.experts = true;
    return CheckNumExperts(fields, *spec);
  }
  constexpr int64_t kMaxExpertFeatures = int64_t{1} << 20;
  KVASIR_ASSIGN_OR_RETURN(
      experts.intermediate_size,
      fields.IntIn("moe_intermediate_size", 1, kMaxExpertFeatures, 768));
  KVASIR_ASSIGN_OR_RETURN(experts.normalize,
                          fields.BoolOr("norm_topk_prob", false));
  KVASIR_RETURN_IF_ERROR(ParseExpertLayers(fields, spec));
  return CheckNumExperts(fields, *spec);
}

// Reads which layers of SmolLM3 do not rotate. In no_rope_layers, despite its
// name, 1 stands for a layer that rotates.
absl::Status ParseNoRopeLayers(const JsonFields& fields, DecoderSpec* spec) {
  constexpr std::string_view kName = "no_rope_layers";
  const json* list = fields.Find(kName);
  if (list == nullptr) {
    constexpr int64_t kDefaultInterval = 4;
    KVASIR_ASSIGN_OR_RETURN(const int64_t interval,
                            fields.IntIn("no_rope_layer_interval", 1,
                                         kMaxPositions, kDefaultInterval));
    for (int64_t layer = 0; layer < spec->num_layers(); ++layer) {
      spec->layers[static_cast<size_t>(layer)].rope =
          (layer + 1) % interval != 0;
    }
    return absl::OkStatus();
  }
  const auto refuse = [&] {
    return fields.Error(
        kName, absl::StrFormat("want a list of %d numbers 0 or 1, have %s",
                               spec->num_layers(), JsonExcerpt(*list)));
  };
  if (!list->is_array() || list->size() != spec->layers.size()) return refuse();
  for (size_t layer = 0; layer < list->size(); ++layer) {
    const json& rotates = (*list)[layer];
    if (rotates != 0 && rotates != 1) return refuse();
    spec->layers[layer].rope = rotates == 1;
  }
  return absl::OkStatus();
}

// In GPT-NeoX and OPT every query head has its own KV head, and head_dim is
// hidden_size / num_attention_heads. Their reference implementations read
// neither num_key_value_heads nor head_dim, so other values are refused.
absl::Status RefuseGroupedHeads(const JsonFields& fields,
                                const DecoderSpec& spec) {
  if (spec.num_kv_heads != spec.num_heads) {
    return fields.Unserved(
        "num_key_value_heads",
        absl::StrFormat("in %s, it equals the number of query heads: want %d, "
                        "have %d",
                        spec.architecture, spec.num_heads, spec.num_kv_heads));
  }
  if (spec.num_heads * spec.head_dim != spec.hidden_size) {
    return fields.Unserved(
        "head_dim",
        absl::StrFormat("in %s, it is hidden_size / heads: want %d / %d, "
                        "have %d",
                        spec.architecture, spec.hidden_size, spec.num_heads,
                        spec.head_dim));
  }
  return absl::OkStatus();
}

absl::Status ParseNeox(const JsonFields& fields, DecoderSpec* spec) {
  KVASIR_RETURN_IF_ERROR(RefuseGroupedHeads(fields, *spec));
  spec->norm = NormKind::kLayerNorm;
  KVASIR_ASSIGN_OR_RETURN(spec->norm_eps,
                          fields.NumberIn("layer_norm_eps", 1e-30, 1.0, 1e-5));
  KVASIR_ASSIGN_OR_RETURN(spec->parallel_residual,
                          fields.BoolOr("use_parallel_residual", true));
  KVASIR_ASSIGN_OR_RETURN(
      RopeConfig rope,
      ParseRope(fields, RopeContext{.head_dim = spec->head_dim,
                                    .max_position_embeddings =
                                        spec->max_position_embeddings,
                                    .neox = true}));
  spec->rope = std::move(rope.rope);
  spec->max_position_embeddings = rope.max_positions;
  return absl::OkStatus();
}

// A boolean field of OPT that is supported only with the value `want`, which
// all published OPT models except OPT-350M have.
struct OptSwitch {
  std::string_view name;
  bool want;
  std::string_view reason;
};
constexpr std::array<OptSwitch, 3> kOptSwitches = {{
    {"do_layer_norm_before", true,
     "norms after attention and MLP (OPT-350M) are not served"},
    {"_remove_final_layer_norm", false,
     "a decoder without its last norm is not served"},
    {"layer_norm_elementwise_affine", true,
     "norms without weights are not served"},
}};

absl::Status ParseOpt(const JsonFields& fields, DecoderSpec* spec) {
  KVASIR_RETURN_IF_ERROR(RefuseGroupedHeads(fields, *spec));
  for (const OptSwitch& row : kOptSwitches) {
    KVASIR_ASSIGN_OR_RETURN(const bool have, fields.BoolOr(row.name, row.want));
    if (have == row.want) continue;
    return fields.Unserved(
        row.name,
        absl::StrFormat("%s: want %s, have %s", row.reason,
                        row.want ? "true" : "false", have ? "true" : "false"));
  }
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t projected,
      fields.IntIn("word_embed_proj_dim", 1, kMaxPositions, spec->hidden_size));
  if (projected != spec->hidden_size) {
    return fields.Unserved(
        "word_embed_proj_dim",
        absl::StrFormat("embeddings of another width than the layers are not "
                        "served: want hidden_size %d, have %d",
                        spec->hidden_size, projected));
  }
  spec->norm = NormKind::kLayerNorm;
  spec->norm_eps = 1e-5;  // config.json has no field for it
  spec->learned_positions = true;
  for (LayerSpec& layer : spec->layers) layer.rope = false;
  return absl::OkStatus();
}

// The attention windows of a model.
struct Windows {
  std::optional<int64_t> width;  // nullopt: no layer has a window
  std::vector<bool> layers;      // which layers have it by default
  // True if the reference implementation reads layer_types. If it does not,
  // layer_types must agree with `layers`.
  bool reads_types = false;
};

// Reads the width of the sliding window, and which layers have it by default. A
// missing sliding_window means the family's default; null (not allowed in
// Gemma) means no window.
absl::StatusOr<Windows> DefaultWindows(const JsonFields& fields, Family family,
                                       const DecoderSpec& spec) {
  constexpr std::string_view kName = "sliding_window";
  constexpr int64_t kDefaultWindow = 4096;
  Windows windows;
  windows.layers.assign(spec.layers.size(), true);
  bool use = true;
  switch (family) {
    case Family::kMistral:
      break;
    case Family::kMixtral:
      use = fields.Find(kName) != nullptr;
      break;
    case Family::kQwen3Moe: {
      KVASIR_ASSIGN_OR_RETURN(use, fields.BoolOr("use_sliding_window", false));
      break;
    }
    case Family::kQwen2:
    case Family::kQwen3: {
      KVASIR_ASSIGN_OR_RETURN(use, fields.BoolOr("use_sliding_window", false));
      windows.reads_types = true;
      if (!use) break;
      constexpr int64_t kDefaultFirst = 28;
      KVASIR_ASSIGN_OR_RETURN(
          const int64_t first,
          fields.IntIn("max_window_layers", 0, kMaxPositions, kDefaultFirst));
      for (int64_t layer = 0; layer < std::min(first, spec.num_layers());
           ++layer) {
        windows.layers[static_cast<size_t>(layer)] = false;
      }
      break;
    }
    case Family::kPhi3:
      use = fields.Find(kName) != nullptr;
      break;
    case Family::kGemma2:
    case Family::kGemma3: {
      if (fields.IsNull(kName)) {
        return fields.Error(kName, "want the width of the windows, have null");
      }
      windows.reads_types = true;
      // Older files call the field by the first of these names; transformers 4
      // writes the second.
      const int64_t default_pattern = family == Family::kGemma3 ? 6 : 2;
      std::optional<int64_t> pattern;
      for (const std::string_view each :
           {"sliding_window_pattern", "_sliding_window_pattern"}) {
        KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> given,
                                fields.IntWithin(each, 1, kMaxPositions));
        if (!pattern.has_value()) pattern = given;
      }
      for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
        windows.layers[static_cast<size_t>(layer)] =
            (layer + 1) % pattern.value_or(default_pattern) != 0;
      }
      break;
    }
    case Family::kSmolLm3: {
      KVASIR_ASSIGN_OR_RETURN(use, fields.BoolOr("use_sliding_window", false));
      use = use && fields.Find(kName) != nullptr;
      windows.reads_types = true;
      for (size_t layer = 0; layer < windows.layers.size(); ++layer) {
        windows.layers[layer] = !spec.layers[layer].rope;
      }
      break;
    }
    default: {
      if (fields.Find(kName) == nullptr) return windows;
      KVASIR_ASSIGN_OR_RETURN(use, fields.BoolOr("use_sliding_window", true));
      if (!use) return windows;
      return fields.Unserved(kName,
                             absl::StrCat(spec.architecture,
                                          " does not have it; want null, or "
                                          "use_sliding_window false"));
    }
  }
  if (!use || fields.IsNull(kName)) return windows;
  KVASIR_ASSIGN_OR_RETURN(
      windows.width, fields.IntIn(kName, 1, kMaxPositions, kDefaultWindow));
  return windows;
}

absl::Status ParseWindows(const JsonFields& fields, Family family,
                          DecoderSpec* spec) {
  KVASIR_ASSIGN_OR_RETURN(Windows windows,
                          DefaultWindows(fields, family, *spec));
  if (!windows.width.has_value()) {
    windows.layers.assign(windows.layers.size(), false);
  }
  if (const json* types = fields.Find("layer_types"); types != nullptr) {
    if (!types->is_array() || types->size() != windows.layers.size()) {
      return fields.Error(
          "layer_types",
          absl::StrFormat("want a list of %d names, have %s",
                          windows.layers.size(), JsonExcerpt(*types)));
    }
    for (size_t layer = 0; layer < windows.layers.size(); ++layer) {
      const json& type = (*types)[layer];
      const bool is_sliding = type == "sliding_attention";
      if (!is_sliding && type != "full_attention") {
        return fields.Unserved(
            "layer_types", absl::StrCat(JsonExcerpt(type), " is not served"));
      }
      const bool may_differ = windows.reads_types && windows.width.has_value();
      if (is_sliding != windows.layers[layer] && !may_differ) {
        return fields.Error(
            "layer_types",
            absl::StrFormat("layer %d: %s disagrees with sliding_window", layer,
                            JsonExcerpt(type)));
      }
      windows.layers[layer] = is_sliding;
    }
  }
  for (size_t layer = 0; layer < windows.layers.size(); ++layer) {
    spec->layers[layer].sliding_window =
        windows.layers[layer] ? *windows.width : 0;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseFamily(const JsonFields& fields, Family family,
                         DecoderSpec* spec) {
  const FamilyNames& names = kFamilies[static_cast<size_t>(family)];
  KVASIR_ASSIGN_OR_RETURN(spec->tied_head, fields.BoolOr("tie_word_embeddings",
                                                         names.default_tied));
  if (family == Family::kSmolLm3) {
    KVASIR_RETURN_IF_ERROR(ParseNoRopeLayers(fields, spec));
  }
  if (HasExperts(family)) {
    KVASIR_RETURN_IF_ERROR(ParseExperts(fields, family, spec));
  }
  KVASIR_RETURN_IF_ERROR(ParseBiases(fields, family, spec));
  KVASIR_RETURN_IF_ERROR(ParseWindows(fields, family, spec));
  KVASIR_RETURN_IF_ERROR(ParseActivation(fields, family, spec));
  switch (family) {
    case Family::kNeox:
      return ParseNeox(fields, spec);
    case Family::kOpt:
      return ParseOpt(fields, spec);
    case Family::kGemma2:
    case Family::kGemma3:
      return ParseGemma(fields, family, spec);
    default:
      return ParseRotaryFamily(fields, family, spec);
  }
}

}  // namespace kvasir::model
