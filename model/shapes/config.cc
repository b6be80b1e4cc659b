#include "model/shapes/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "model/files/file.h"
#include "model/files/json.h"
#include "model/gguf/gguf_family.h"
#include "model/gguf/gguf_header.h"
#include "model/gguf/gguf_model.h"
#include "model/shapes/family.h"
#include "model/shapes/family_config.h"
#include "model/shapes/gguf_config.h"
#include "model/shapes/rope_config.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxConfigBytes = 4 << 20;

// Upper limits for the sizes in config.json. They are several times those of
// the largest published models, and small enough that no product of three of
// them overflows 64 bits.
constexpr int64_t kMaxHidden = int64_t{1} << 17;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxIntermediate = int64_t{1} << 20;
constexpr int64_t kMaxVocab = int64_t{1} << 23;

// Model families that resemble a supported one but compute something else, each
// with the reason for the refusal.
struct RefusedRow {
  std::string_view architecture_prefix;
  std::string_view reason;
};

constexpr std::array<RefusedRow, 6> kRefused = {{
    {"Qwen2Moe", "experts that all tokens share are not served"},
    {"Gemma3", "models with images are not served; want Gemma3ForCausalLM"},
    {"Gemma", "only Gemma 2 and the text models of Gemma 3 are served"},
    {"Phi3Small", "its block-sparse attention is not served"},
    {"GPTNeoXJapanese", "its biases are in other places than GPT-NeoX's"},
    {"DeepseekV", "multi-head latent attention is not served"},
}};

absl::StatusOr<Family> FindFamily(const JsonFields& fields) {
  std::string architecture;
  if (const json* list = fields.Find("architectures"); list != nullptr) {
    if (!list->is_array() || list->size() != 1 || !(*list)[0].is_string()) {
      return fields.Error("architectures",
                          absl::StrFormat("want a list of one name, have %s",
                                          JsonExcerpt(*list)));
    }
    architecture = (*list)[0].get<std::string>();
  }
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> model_type,
                          fields.String("model_type"));
  const std::string name =
      architecture.empty() ? model_type.value_or("") : architecture;
  for (size_t i = 0; i < kFamilies.size(); ++i) {
    if (name == (architecture.empty() ? kFamilies[i].model_type
                                      : kFamilies[i].architecture)) {
      for (const FamilyNames& other : kFamilies) {
        if (&other == &kFamilies[i] || model_type != other.model_type) continue;
        // Both must agree, because transformers uses model_type, and other
        // engines use architectures.
        return fields.Error(
            "model_type",
            absl::StrFormat("\"%s\" is the type of %s, but architectures "
                            "names %s; want \"%s\"",
                            *model_type, other.architecture,
                            kFamilies[i].architecture,
                            kFamilies[i].model_type));
      }
      return static_cast<Family>(i);
    }
  }
  if (name.empty()) {
    return fields.Error("architectures", "is missing, and so is model_type");
  }
  for (const RefusedRow& row : kRefused) {
    if (name.starts_with(row.architecture_prefix)) {
      return fields.Unserved("architectures",
                             absl::StrFormat("%s: %s", name, row.reason));
    }
  }
  std::vector<std::string> served;
  for (const FamilyNames& each : kFamilies) {
    served.emplace_back(each.architecture);
  }
  return fields.Unserved("architectures",
                         absl::StrCat(name, " is not served; served are ",
                                      absl::StrJoin(served, ", ")));
}

// Refuses quantized weights. An empty quantization_config is allowed.
absl::Status RefuseQuantization(const JsonFields& fields) {
  constexpr std::string_view kName = "quantization_config";
  const json* quantization = fields.Find(kName);
  if (quantization == nullptr) return absl::OkStatus();
  if (!quantization->is_object()) {
    return fields.Error(kName, absl::StrFormat("want an object, have %s",
                                               JsonExcerpt(*quantization)));
  }
  if (quantization->empty()) return absl::OkStatus();
  const JsonFields inner(*quantization,
                         absl::StrFormat("%s: %s", fields.where(), kName));
  const json* method = inner.Find("quant_method");
  if (method == nullptr) {
    return inner.Unserved(
        "quant_method",
        absl::StrCat("is missing in ", JsonExcerpt(*quantization),
                     ", so it is unclear how the weights are quantized; for "
                     "F32, F16 or BF16 weights, remove quantization_config"));
  }
  return fields.Unserved(
      kName,
      absl::StrCat("weights that are quantized by ", JsonExcerpt(*method),
                   " are not served; want F32, F16 or BF16 weights"));
}

// Refuses fields that change the mathematics in a way that the decoder
// description cannot express. Values that change nothing are allowed.
absl::Status RefuseWhatChangesTheModel(const JsonFields& fields, Family family,
                                       int64_t head_dim) {
  for (const std::string_view name :
       {"use_qk_norm", "qk_norm", "qk_layernorm"}) {
    KVASIR_ASSIGN_OR_RETURN(const bool on, fields.BoolOr(name, false));
    if (!on) continue;
    return fields.Unserved(
        name,
        "want false or no such field: QK-norm is served only in families that "
        "always have it");
  }
  struct Factor {
    std::string_view name;
    double neutral;
  };
  const std::array<Factor, 6> factors = {{
      {"attn_logit_softcapping", 0},  // 0: no cap
      {"final_logit_softcapping", 0},
      {"attention_multiplier", 1 / std::sqrt(static_cast<double>(head_dim))},
      {"residual_multiplier", 1},
      {"embedding_multiplier", 1},
      {"logits_scaling", 1},
  }};
  for (const Factor& factor : factors) {
    // ParseFamily reads the caps of Gemma 2.
    if (family == Family::kGemma2 && factor.neutral == 0) continue;
    KVASIR_ASSIGN_OR_RETURN(const std::optional<double> value,
                            fields.Number(factor.name));
    // The number in the file may be rounded.
    constexpr double kTolerance = 1e-6;
    if (std::abs(value.value_or(factor.neutral) - factor.neutral) <=
        kTolerance * factor.neutral) {
      continue;
    }
    return fields.Unserved(
        factor.name, absl::StrFormat("is not served: want %g or no such field, "
                                     "have %g",
                                     factor.neutral, *value));
  }
  return absl::OkStatus();
}

absl::Status ParseSizes(const JsonFields& fields, Family family,
                        DecoderSpec* spec) {
  KVASIR_ASSIGN_OR_RETURN(spec->hidden_size,
                          fields.IntIn("hidden_size", 1, kMaxHidden));
  KVASIR_ASSIGN_OR_RETURN(spec->num_heads,
                          fields.IntIn("num_attention_heads", 1, kMaxHeads));
  // If num_key_value_heads is null, the number of num_attention_heads is used.
  // If it is missing, some families have another default.
  const FamilyNames& names = kFamilies[static_cast<size_t>(family)];
  const int64_t own_default = names.default_kv_heads;
  const int64_t default_kv_heads =
      own_default == 0 || fields.IsNull("num_key_value_heads") ? spec->num_heads
                                                               : own_default;
  KVASIR_ASSIGN_OR_RETURN(
      spec->num_kv_heads,
      fields.IntIn("num_key_value_heads", 1, kMaxHeads, default_kv_heads));
  if (spec->num_heads % spec->num_kv_heads != 0) {
    return fields.Error(
        "num_key_value_heads",
        absl::StrFormat("want a divisor of num_attention_heads %d, have %d",
                        spec->num_heads, spec->num_kv_heads));
  }
  KVASIR_ASSIGN_OR_RETURN(std::optional<int64_t> head_dim,
                          fields.Int("head_dim"));
  if (!head_dim.has_value() && names.default_head_dim != 0) {
    head_dim = names.default_head_dim;
  }
  if (!head_dim.has_value() && spec->hidden_size % spec->num_heads != 0) {
    return fields.Error(
        "hidden_size",
        absl::StrFormat("want a multiple of num_attention_heads %d (there is "
                        "no head_dim), have %d",
                        spec->num_heads, spec->hidden_size));
  }
  spec->head_dim = head_dim.value_or(spec->hidden_size / spec->num_heads);
  if (spec->head_dim < 2 || spec->head_dim > kMaxHeadDim ||
      spec->head_dim % 2 != 0) {
    return fields.Error("head_dim",
                        absl::StrFormat("want an even number from 2 to %d "
                                        "(RoPE rotates pairs), have %d",
                                        kMaxHeadDim, spec->head_dim));
  }
  KVASIR_ASSIGN_OR_RETURN(
      spec->intermediate_size,
      fields.IntIn(family == Family::kOpt ? "ffn_dim" : "intermediate_size", 1,
                   kMaxIntermediate));
  KVASIR_ASSIGN_OR_RETURN(spec->vocab_size,
                          fields.IntIn("vocab_size", 1, kMaxVocab));
  KVASIR_ASSIGN_OR_RETURN(
      spec->max_position_embeddings,
      fields.IntIn("max_position_embeddings", 1, kMaxPositions));
  KVASIR_ASSIGN_OR_RETURN(const int64_t num_layers,
                          fields.IntIn("num_hidden_layers", 1, kMaxLayers));
  spec->layers.resize(static_cast<size_t>(num_layers));
  return absl::OkStatus();
}

// In config.json, this id means that the model has no such token.
constexpr int64_t kNoToken = -1;

absl::Status CheckTokenId(const JsonFields& fields, std::string_view name,
                          int64_t id, int64_t vocab_size) {
  if (id >= kNoToken && id < vocab_size) return absl::OkStatus();
  return fields.Error(name,
                      absl::StrFormat("want 0 to %d, or -1 for none, have %d",
                                      vocab_size - 1, id));
}

// Reads an id or a list of ids. Empty if the field is missing.
absl::StatusOr<std::vector<int32_t>> TokenIds(const JsonFields& fields,
                                              std::string_view name,
                                              int64_t vocab_size) {
  constexpr size_t kMaxIds = 256;
  std::vector<int32_t> ids;
  const json* value = fields.Find(name);
  if (value == nullptr) return ids;
  const json list = value->is_array() ? *value : json::array({*value});
  if (list.size() > kMaxIds) {
    return fields.Error(name, absl::StrFormat("want at most %d ids, have %d",
                                              kMaxIds, list.size()));
  }
  for (const json& entry : list) {
    if (!entry.is_number_integer()) {
      return fields.Error(name, absl::StrFormat("want token ids, have %s",
                                                JsonExcerpt(*value)));
    }
    const int64_t id = entry.get<int64_t>();
    KVASIR_RETURN_IF_ERROR(CheckTokenId(fields, name, id, vocab_size));
    if (id != kNoToken) ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

}  // namespace

absl::StatusOr<DecoderSpec> ParseConfig(std::string_view text,
                                        std::string_view where) {
  KVASIR_ASSIGN_OR_RETURN(const json root, ParseJson(text, where));
  if (!root.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s must contain a JSON object, but contains %s", where,
                        JsonExcerpt(root)));
  }
  const JsonFields fields(root, std::string(where));
  KVASIR_ASSIGN_OR_RETURN(const Family family, FindFamily(fields));
  DecoderSpec spec;
  const FamilyNames& names = kFamilies[static_cast<size_t>(family)];
  spec.architecture = names.architecture;
  spec.model_type = names.model_type;
  KVASIR_RETURN_IF_ERROR(RefuseQuantization(fields));
  KVASIR_RETURN_IF_ERROR(ParseSizes(fields, family, &spec));
  KVASIR_RETURN_IF_ERROR(
      RefuseWhatChangesTheModel(fields, family, spec.head_dim));
  KVASIR_RETURN_IF_ERROR(ParseFamily(fields, family, &spec));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> bos,
                          fields.Int("bos_token_id"));
  if (bos.has_value()) {
    KVASIR_RETURN_IF_ERROR(
        CheckTokenId(fields, "bos_token_id", *bos, spec.vocab_size));
    if (*bos != kNoToken) spec.bos_token_id = static_cast<int32_t>(*bos);
  }
  KVASIR_ASSIGN_OR_RETURN(spec.eos_token_ids,
                          TokenIds(fields, "eos_token_id", spec.vocab_size));
  spec.eos_source = where;
  // The default is used only if the field is missing; null means that there is
  // no such token.
  if (!root.contains("eos_token_id") && names.default_eos >= 0 &&
      names.default_eos < spec.vocab_size) {
    spec.eos_token_ids = {names.default_eos};
    spec.eos_source = absl::StrFormat("the default of %s", names.architecture);
  }
  return spec;
}

absl::Status ParseGenerationConfig(std::string_view text,
                                   std::string_view where, DecoderSpec* spec) {
  KVASIR_ASSIGN_OR_RETURN(const json root, ParseJson(text, where));
  if (!root.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s must contain a JSON object, but contains %s", where,
                        JsonExcerpt(root)));
  }
  const JsonFields fields(root, std::string(where));
  KVASIR_ASSIGN_OR_RETURN(std::vector<int32_t> eos,
                          TokenIds(fields, "eos_token_id", spec->vocab_size));
  if (const json* value = fields.Find("eos_token_id");
      value != nullptr && !(value->is_array() && value->empty())) {
    spec->eos_token_ids = std::move(eos);
    spec->eos_source = where;
  }
  // Sampling parameters have the same limits here as in a request.
  constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
  constexpr float kMaxFloat = std::numeric_limits<float>::max();
  KVASIR_RETURN_IF_ERROR(fields.Bool("do_sample").status());
  KVASIR_RETURN_IF_ERROR(
      fields.NumberWithin("temperature", 0, kMaxFloat).status());
  KVASIR_RETURN_IF_ERROR(fields.NumberWithin("top_p", 0, 1).status());
  KVASIR_RETURN_IF_ERROR(fields.IntWithin("top_k", -1, kMaxCount).status());
  KVASIR_RETURN_IF_ERROR(fields.NumberWithin("min_p", 0, 1).status());
  KVASIR_RETURN_IF_ERROR(
      fields.NumberWithin("repetition_penalty", 0.01, 100).status());
  return fields.IntWithin("max_new_tokens", 0, kMaxCount).status();
}

namespace {

absl::StatusOr<DecoderSpec> LoadGgufConfig(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const GgufModel model, OpenGgufModel(path));
  KVASIR_ASSIGN_OR_RETURN(const GgufConfig config, ReadGgufConfig(model));
  KVASIR_ASSIGN_OR_RETURN(DecoderSpec spec, ParseConfig(config.json, path));
  const std::vector<float>& factors = config.rope_factors;
  if (factors.empty()) return spec;
  if (factors.size() != spec.rope.frequencies.size()) {
    return model.header.Error(
        kGgufRopeFactors,
        absl::StrFormat("want a number for each of the %d pairs, have %d",
                        spec.rope.frequencies.size(), factors.size()));
  }
  for (size_t pair = 0; pair < factors.size(); ++pair) {
    spec.rope.frequencies[pair] /= factors[pair];
  }
  return spec;
}

}  // namespace

absl::StatusOr<DecoderSpec> LoadModelConfig(const std::string& path) {
  if (MayBeGguf(path)) return LoadGgufConfig(path);
  KVASIR_ASSIGN_OR_RETURN(const std::string text, LoadConfigText(path));
  KVASIR_ASSIGN_OR_RETURN(
      DecoderSpec spec, ParseConfig(text, absl::StrCat(path, "/config.json")));
  const std::string generation_path =
      absl::StrCat(path, "/generation_config.json");
  if (FileExists(generation_path)) {
    KVASIR_ASSIGN_OR_RETURN(const std::string generation,
                            ReadSmallFile(generation_path, kMaxConfigBytes));
    KVASIR_RETURN_IF_ERROR(
        ParseGenerationConfig(generation, generation_path, &spec));
  }
  return spec;
}

absl::StatusOr<std::string> LoadConfigText(const std::string& path) {
  if (!MayBeGguf(path)) {
    return ReadSmallFile(absl::StrCat(path, "/config.json"), kMaxConfigBytes);
  }
  KVASIR_ASSIGN_OR_RETURN(const GgufModel model, OpenGgufModel(path));
  KVASIR_ASSIGN_OR_RETURN(GgufConfig config, ReadGgufConfig(model));
  return std::move(config.json);
}

}  // namespace kvasir::model
