#include "model/shapes/gguf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "model/gguf/gguf_family.h"
#include "model/shapes/config.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using nlohmann::json;

// The tokens that end a turn of a chat. They are added to the end tokens,
// because many files name only the end token of the base model, which a chat
// model never generates.
constexpr std::array<std::string_view, 9> kEndOfTurn = {
    "<|eot_id|>",    "<|eom_id|>",      "<|im_end|>",
    "<|end|>",       "<|endoftext|>",   "<|end_of_text|>",
    "<end_of_turn>", "<|end_of_turn|>", "<EOT>"};
// The value of rope.freq_base if the file does not have it.
constexpr double kDefaultBase = 10000;
constexpr int64_t kControlToken = 3;
constexpr int64_t kUserToken = 4;

// Writes the fields of config.json. It also records which keys of the GGUF file
// it has read, so that all other keys can be refused.
class ConfigWriter {
 public:
  ConfigWriter(const GgufHeader& header, const GgufFamily& family,
               GgufRopeFactors rope_factors)
      : header_(header),
        family_(family),
        rope_factors_(std::move(rope_factors)) {}

  absl::StatusOr<GgufConfig> Run() {
    config_["architectures"] = json::array({family_.hf_architecture});
    config_["model_type"] = family_.model_type;
    KVASIR_RETURN_IF_ERROR(Sizes());
    KVASIR_RETURN_IF_ERROR(Rope());
    KVASIR_RETURN_IF_ERROR(Experts());
    KVASIR_RETURN_IF_ERROR(Window());
    KVASIR_RETURN_IF_ERROR(Scores());
    KVASIR_RETURN_IF_ERROR(Residual());
    KVASIR_RETURN_IF_ERROR(RefuseOtherKeys());
    Biases();
    KVASIR_RETURN_IF_ERROR(Tokens());
    return GgufConfig{
        config_.dump(2, ' ', false, json::error_handler_t::replace),
        std::move(rope_factors_.all)};
  }

 private:
  std::string Key(std::string_view name) {
    std::string key = absl::StrFormat("%s.%s", family_.architecture, name);
    known_.insert(key);
    return key;
  }

  // Reads an integer, or an array that has the same integer for each layer.
  absl::StatusOr<std::optional<int64_t>> Count(std::string_view name) {
    const std::string key = Key(name);
    const GgufValue* const value = header_.Find(key);
    if (value == nullptr || !value->is_array) return header_.Int(key);
    KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> layers,
                            header_.Ints(key));
    if (layers.empty()) return header_.Error(key, "is an empty array");
    for (const int64_t other : layers) {
      if (other == layers[0]) continue;
      return header_.Unserved(
          key, absl::StrFormat("differs between layers (%d and %d), which is "
                               "not served",
                               layers[0], other));
    }
    return std::optional<int64_t>(layers[0]);
  }

  absl::Status Put(std::string_view name, const char* field) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> value, Count(name));
    if (!value.has_value()) {
      return header_.Error(Key(name), "is missing");
    }
    config_[field] = *value;
    return absl::OkStatus();
  }

  absl::Status Sizes() {
    KVASIR_RETURN_IF_ERROR(Put("embedding_length", "hidden_size"));
    KVASIR_RETURN_IF_ERROR(Put("block_count", "num_hidden_layers"));
    KVASIR_RETURN_IF_ERROR(Put("feed_forward_length", "intermediate_size"));
    KVASIR_RETURN_IF_ERROR(Put("context_length", "max_position_embeddings"));
    KVASIR_RETURN_IF_ERROR(Put("attention.head_count", "num_attention_heads"));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> kv_heads,
                            Count("attention.head_count_kv"));
    config_["num_key_value_heads"] =
        kv_heads.has_value() ? json(*kv_heads) : config_["num_attention_heads"];
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> key_dim,
                            Count("attention.key_length"));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> value_dim,
                            Count("attention.value_length"));
    const int64_t heads = config_["num_attention_heads"].get<int64_t>();
    const int64_t hidden = config_["hidden_size"].get<int64_t>();
    if (key_dim.has_value()) {
      head_dim_ = *key_dim;
    } else if (heads > 0) {
      head_dim_ = hidden / heads;
    }
    if (value_dim.value_or(head_dim_) != head_dim_) {
      return header_.Unserved(
          Key("attention.value_length"),
          absl::StrFormat("want the length of keys, %d, have %d", head_dim_,
                          *value_dim));
    }
    // The head_dim is written because the families' defaults differ from that
    // of GGUF. If the heads do not divide the hidden size, it is left out, and
    // ParseConfig reports the error.
    if (key_dim.has_value() || (heads > 0 && hidden % heads == 0)) {
      config_["head_dim"] = head_dim_;
    }
    const std::string epsilon =
        Key(family_.layer_norm ? "attention.layer_norm_epsilon"
                               : "attention.layer_norm_rms_epsilon");
    KVASIR_ASSIGN_OR_RETURN(const std::optional<double> eps,
                            header_.Number(epsilon));
    if (!eps.has_value()) return header_.Error(epsilon, "is missing");
    config_[family_.layer_norm ? "layer_norm_eps" : "rms_norm_eps"] = *eps;

    // Only marks the key as known: the size of the embedding is used.
    Key("vocab_size");
    const GgufTensor* const embedding = header_.FindTensor(kGgufEmbedding);
    if (embedding == nullptr) {
      return header_.Error(kGgufEmbedding, "the tensor is missing");
    }
    config_["vocab_size"] = embedding->shape[0];
    config_["tie_word_embeddings"] = header_.FindTensor(kGgufHead) == nullptr;
    return absl::OkStatus();
  }

  absl::Status Rope() {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<double> base,
                            header_.Number(Key("rope.freq_base")));
    // The config.json of GPT-NeoX has an older name for this field.
    config_[family_.layer_norm ? "rotary_emb_base" : "rope_theta"] =
        base.value_or(kDefaultBase);
    if (family_.window_base > 0) {
      KVASIR_ASSIGN_OR_RETURN(const std::optional<double> window_base,
                              header_.Number(Key("rope.freq_base_swa")));
      config_["rope_local_base_freq"] =
          window_base.value_or(family_.window_base);
    }
    KVASIR_RETURN_IF_ERROR(RotatedPart());
    const std::string type_key = Key("rope.scaling.type");
    KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string_view> type,
                            header_.String(type_key));
    const std::string factor_key = Key("rope.scaling.factor");
    KVASIR_ASSIGN_OR_RETURN(std::optional<double> factor,
                            header_.Number(factor_key));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<double> older,
                            header_.Number(Key("rope.scale_linear")));
    KVASIR_ASSIGN_OR_RETURN(
        const std::optional<int64_t> original,
        header_.Int(Key("rope.scaling.original_context_length")));
    // Only marks the key as known: it does not affect results.
    Key("rope.scaling.finetuned");
    KVASIR_ASSIGN_OR_RETURN(const std::optional<double> attention,
                            header_.Number(Key("rope.scaling.attn_factor")));
    std::string scaling(type.value_or(""));
    // A file without a type has linear scaling if the older or the newer key of
    // the factor is not 1.
    if (!type.has_value() && older.value_or(1) != 1) {
      scaling = "linear";
      factor = older;
    } else if (!type.has_value() && factor.value_or(1) != 1) {
      scaling = "linear";
    }
    json yarn = json::object();
    for (const auto& [key, field] :
         {std::pair("rope.scaling.yarn_beta_fast", "beta_fast"),
          std::pair("rope.scaling.yarn_beta_slow", "beta_slow")}) {
      KVASIR_ASSIGN_OR_RETURN(const std::optional<double> value,
                              header_.Number(Key(key)));
      if (value.has_value()) yarn[field] = *value;
    }
    const bool has_long_rope =
        !rope_factors_.long_text.empty() || !rope_factors_.short_text.empty();
    if (!rope_factors_.all.empty() &&
        (has_long_rope || family_.window_base > 0)) {
      return header_.Unserved(
          kGgufRopeFactors,
          "is not served together with LongRoPE or a RoPE base for windows");
    }
    if (has_long_rope || (family_.long_rope && scaling == "longrope")) {
      return LongRope(scaling, original, attention);
    }
    if (family_.long_rope && original.has_value()) {
      config_["original_max_position_embeddings"] = *original;
    }
    if (attention.value_or(1) != 1) {
      return header_.Unserved(
          Key("rope.scaling.attn_factor"),
          absl::StrFormat("want 1 or no such key, have %g", *attention));
    }
    if (scaling.empty() || scaling == "none") {
      PutLlama3Scaling(base.value_or(kDefaultBase));
      return absl::OkStatus();
    }
    if (header_.FindTensor(kGgufRopeFactors) != nullptr) {
      return header_.Unserved(
          type_key, absl::StrFormat("\"%s\" together with the tensor %s is not "
                                    "served",
                                    scaling, kGgufRopeFactors));
    }
    json& rope = config_["rope_scaling"];
    if (scaling == "yarn") rope = std::move(yarn);
    rope["rope_type"] = scaling;
    if (factor.has_value()) rope["factor"] = *factor;
    if (original.has_value() && scaling != "linear") {
      rope["original_max_position_embeddings"] = *original;
    }
    return absl::OkStatus();
  }

  absl::Status RotatedPart() {
    const std::string key = Key("rope.dimension_count");
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> dims,
                            Count("rope.dimension_count"));
    const int64_t have = dims.value_or(head_dim_);
    if (!family_.part_rotates) {
      if (have == head_dim_) return absl::OkStatus();
      return header_.Unserved(
          key, absl::StrFormat("RoPE must rotate whole heads: want %d, have %d",
                               head_dim_, have));
    }
    if (have < 1 || have > head_dim_) {
      return header_.Error(
          key, absl::StrFormat("want 1 to %d, have %d", head_dim_, have));
    }
    double part = static_cast<double>(have) / static_cast<double>(head_dim_);
    // Readers of config.json truncate part * head_dim to an integer. If the
    // product is just below `have`, the next larger part is written.
    if (part * static_cast<double>(head_dim_) < static_cast<double>(have)) {
      part = std::nextafter(part, 1.0);
    }
    config_[family_.layer_norm ? "rotary_pct" : "partial_rotary_factor"] = part;
    return absl::OkStatus();
  }

  // Writes LongRoPE, which only Phi-3 has. Most of its files lack the type key.
  absl::Status LongRope(std::string_view scaling,
                        std::optional<int64_t> original,
                        std::optional<double> attention) {
    if (!family_.long_rope) {
      return header_.Unserved(kGgufLongFactors,
                              absl::StrFormat("the architecture %s has no "
                                              "LongRoPE",
                                              family_.architecture));
    }
    if (!scaling.empty() && scaling != "longrope" && scaling != "none") {
      return header_.Unserved(
          Key("rope.scaling.type"),
          absl::StrFormat("\"%s\" together with the tensor %s is not served",
                          scaling.substr(0, 80), kGgufLongFactors));
    }
    if (!original.has_value() || *original < 2) {
      return header_.Error(
          Key("rope.scaling.original_context_length"),
          original.has_value()
              ? absl::StrFormat("want at least 2, have %d", *original)
              : "is missing");
    }
    config_["original_max_position_embeddings"] = *original;
    json& rope = config_["rope_scaling"];
    rope["rope_type"] = "longrope";
    for (const auto& [field, factors] :
         {std::pair("long_factor", &rope_factors_.long_text),
          std::pair("short_factor", &rope_factors_.short_text)}) {
      json& list = rope[field] = json::array();
      for (const float factor : *factors) {
        list.push_back(ShortestDecimal(factor));
      }
    }
    // The file has the attention factor, rounded to float32. It usually
    // equals the factor that follows from the original and the extended
    // context length.
    const double factor = config_["max_position_embeddings"].get<double>() /
                          static_cast<double>(*original);
    const double usual =
        factor <= 1
            ? 1.0
            : std::sqrt(1 + std::log(factor) /
                                std::log(static_cast<double>(*original)));
    constexpr double kTolerance = 1e-6;
    if (std::abs(attention.value_or(usual) - usual) > kTolerance * usual) {
      rope["attention_factor"] = *attention;
    }
    return absl::OkStatus();
  }

  // Writes a rope_scaling of the type llama3 if the factors of the file are
  // those of this scaling (ApplyLlama3 in rope_config.cc). All published models
  // with this scaling have the same original context and frequency factors, and
  // differ only in `factor`.
  void PutLlama3Scaling(double base) {
    if (rope_factors_.all.empty() || head_dim_ <= 0 ||
        static_cast<int64_t>(rope_factors_.all.size()) != head_dim_ / 2) {
      return;
    }
    constexpr double kLow = 1;
    constexpr double kHigh = 4;
    constexpr int64_t kContext = 8192;
    const double factor =
        *std::max_element(rope_factors_.all.begin(), rope_factors_.all.end());
    for (size_t pair = 0; pair < rope_factors_.all.size(); ++pair) {
      const double frequency =
          std::pow(base, -2.0 * static_cast<double>(pair) /
                             static_cast<double>(head_dim_));
      const double turns =
          static_cast<double>(kContext) * frequency / (2 * std::numbers::pi);
      const double keep = std::clamp((turns - kLow) / (kHigh - kLow), 0.0, 1.0);
      const double want = 1 / ((1 - keep) / factor + keep);
      // The file's factors were computed with float32.
      constexpr double kTolerance = 1e-5;
      if (std::abs(rope_factors_.all[pair] - want) > kTolerance * want) return;
    }
    config_["rope_scaling"] = {{"rope_type", "llama3"},
                               {"factor", factor},
                               {"low_freq_factor", kLow},
                               {"high_freq_factor", kHigh},
                               {"original_max_position_embeddings", kContext}};
    rope_factors_.all.clear();
  }

  absl::Status Window() {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> window,
                            Count("attention.sliding_window"));
    if (family_.windows == GgufWindows::kSome) return SomeWindows(window);
    // In some files the window is as long as the context, so it
    // changes nothing.
    if (!window.has_value() || *window == 0 ||
        *window >= config_["max_position_embeddings"].get<int64_t>()) {
      return absl::OkStatus();
    }
    if (family_.windows == GgufWindows::kUnknown) {
      return header_.Unserved(
          Key("attention.sliding_window"),
          absl::StrFormat("the file does not say which layers have it: want "
                          "none, have %d",
                          *window));
    }
    if (config_["model_type"] == "llama") {
      config_["architectures"] = json::array({"MistralForCausalLM"});
      config_["model_type"] = "mistral";
    }
    config_["sliding_window"] = *window;
    return absl::OkStatus();
  }

  absl::Status SomeWindows(std::optional<int64_t> window) {
    const auto count = config_["num_hidden_layers"].get<int64_t>();
    if (count < 1 || count > kMaxLayers) {
      return header_.Error(
          Key("block_count"),
          absl::StrFormat("want 1 to %d, have %d", kMaxLayers, count));
    }
    KVASIR_ASSIGN_OR_RETURN(
        const std::optional<std::vector<bool>> layers,
        WindowLayers(Key("attention.sliding_window_pattern"), count));
    if (window.value_or(0) != 0) config_["sliding_window"] = *window;
    // Gemma 3 files without attention.sliding_window have no windows. Gemma 2
    // files without it have windows of 4096, the default in config.json.
    const bool has_windows =
        window.has_value() ? *window != 0 : family_.window_base == 0;
    if (has_windows && !layers.has_value()) return absl::OkStatus();
    json& types = config_["layer_types"] = json::array();
    for (int64_t layer = 0; layer < count; ++layer) {
      const bool has_window =
          has_windows && (*layers)[static_cast<size_t>(layer)];
      types.push_back(has_window ? "sliding_attention" : "full_attention");
    }
    return absl::OkStatus();
  }

  // Returns for each layer whether it has a window. The key's value is an array
  // of bools, or a number n if every n-th layer has no window.
  absl::StatusOr<std::optional<std::vector<bool>>> WindowLayers(
      const std::string& key, int64_t count) {
    const GgufValue* const value = header_.Find(key);
    if (value == nullptr) return std::optional<std::vector<bool>>();
    std::vector<bool> layers;
    if (value->is_array && value->type == GgufType::kBool) {
      if (value->count != static_cast<uint64_t>(count)) {
        return header_.Error(
            key, absl::StrFormat("want an element for each of the %d layers, "
                                 "have %d",
                                 count, value->count));
      }
      for (const char on : value->bytes) layers.push_back(on != 0);
      return std::optional(std::move(layers));
    }
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> period,
                            header_.Int(key));
    if (*period < 1) {
      return header_.Error(
          key, absl::StrFormat("want at least 1, have %d", *period));
    }
    for (int64_t layer = 0; layer < count; ++layer) {
      layers.push_back((layer + 1) % *period != 0);
    }
    return std::optional(std::move(layers));
  }

  // Writes the scale and the cap of Gemma's attention scores, and the cap of
  // its logits.
  absl::Status Scores() {
    if (family_.wide_scores_layers == 0) return absl::OkStatus();
    const auto heads = config_["num_attention_heads"].get<int64_t>();
    const bool is_wide =
        config_["num_hidden_layers"] == family_.wide_scores_layers && heads > 0;
    config_["query_pre_attn_scalar"] =
        is_wide ? config_["hidden_size"].get<int64_t>() / heads : head_dim_;
    for (const char* field :
         {"attn_logit_softcapping", "final_logit_softcapping"}) {
      KVASIR_ASSIGN_OR_RETURN(const std::optional<double> cap,
                              header_.Number(Key(field)));
      if (!cap.has_value()) continue;
      config_[field] = *cap == 0 ? json() : json(*cap);
    }
    return absl::OkStatus();
  }

  absl::Status Residual() {
    if (!family_.layer_norm) return absl::OkStatus();
    KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> parallel,
                            header_.Bool(Key("use_parallel_residual")));
    config_["use_parallel_residual"] = parallel.value_or(true);
    return absl::OkStatus();
  }

  absl::Status Experts() {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> count,
                            Count("expert_count"));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> used,
                            Count("expert_used_count"));
    const bool needs_experts = family_.experts == GgufExperts::kWithARouter;
    if (count.value_or(0) == 0 && used.value_or(0) == 0 && !needs_experts) {
      return absl::OkStatus();
    }
    if (family_.experts == GgufExperts::kNone) {
      return header_.Unserved(
          Key("expert_count"),
          absl::StrFormat("the architecture %s has no experts: want 0, have %d",
                          family_.architecture, count.value_or(0)));
    }
    KVASIR_RETURN_IF_ERROR(Put("expert_used_count", "num_experts_per_tok"));
    KVASIR_RETURN_IF_ERROR(RefuseOtherExperts());
    KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> normalized,
                            header_.Bool(Key("expert_weights_norm")));
    if (needs_experts) {
      KVASIR_RETURN_IF_ERROR(Put("expert_count", "num_experts"));
      KVASIR_RETURN_IF_ERROR(
          Put("expert_feed_forward_length", "moe_intermediate_size"));
      config_["norm_topk_prob"] = normalized.value_or(true);
      return PutDenseLayers();
    }
    config_["architectures"] = json::array({"MixtralForCausalLM"});
    config_["model_type"] = "mixtral";
    if (!normalized.value_or(true)) {
      return header_.Unserved(Key("expert_weights_norm"),
                              "weights of experts that are not normalized are "
                              "not served");
    }
    return Put("expert_count", "num_local_experts");
  }

  // Refuses shared, grouped or scaled experts, and weights without a softmax.
  absl::Status RefuseOtherExperts() {
    struct Neutral {
      std::string_view name;
      double value;
    };
    constexpr double kSoftmax = 1;
    for (const Neutral& each :
         {Neutral{"expert_gating_func", kSoftmax},
          Neutral{"expert_weights_scale", 1}, Neutral{"expert_shared_count", 0},
          Neutral{"expert_group_count", 1},
          Neutral{"expert_group_used_count", 1}}) {
      const std::string key = Key(each.name);
      KVASIR_ASSIGN_OR_RETURN(const std::optional<double> have,
                              header_.Number(key));
      // Some files have the key with 0 although it is not used.
      if (have.value_or(0) == 0 || *have == each.value) continue;
      return header_.Unserved(
          key, absl::StrFormat("want %g or no such key, have %g", each.value,
                               *have));
    }
    return absl::OkStatus();
  }

  // Lists the layers without experts: those for which the file has no
  // router tensor.
  absl::Status PutDenseLayers() {
    const auto count = config_["num_hidden_layers"].get<int64_t>();
    json& dense = config_["mlp_only_layers"] = json::array();
    for (int64_t layer = 0; layer < std::min(count, kMaxLayers); ++layer) {
      if (header_.FindTensor(absl::StrFormat("blk.%d.ffn_gate_inp.weight",
                                             layer)) == nullptr) {
        dense.push_back(layer);
      }
    }
    return absl::OkStatus();
  }

  // Refuses files with unknown keys of the architecture, because they may
  // change what the model computes.
  absl::Status RefuseOtherKeys() {
    const std::string prefix = absl::StrFormat("%s.", family_.architecture);
    for (const auto& [key, value] : header_.values()) {
      if (!key.starts_with(prefix) || known_.contains(key)) continue;
      return header_.Unserved(
          key,
          "the key is not known, and the model may need a computation "
          "that this engine does not support");
    }
    return absl::OkStatus();
  }

  // The tensors of the first layer show which biases the model has. Fields for
  // biases are written only if necessary: Qwen2 has no such fields, and other
  // families without biases refuse them.
  void Biases() {
    if (family_.model_type == "qwen2") return;
    const bool attention = header_.FindTensor("blk.0.attn_q.bias") != nullptr ||
                           header_.FindTensor("blk.0.attn_qkv.bias") != nullptr;
    if (attention || family_.layer_norm) config_["attention_bias"] = attention;
    if (header_.FindTensor("blk.0.ffn_up.bias") != nullptr &&
        !family_.layer_norm) {
      config_["mlp_bias"] = true;
    }
  }

  absl::StatusOr<std::optional<int64_t>> TokenId(std::string_view name) {
    return header_.Int(absl::StrFormat("tokenizer.ggml.%s_token_id", name));
  }

  absl::Status Tokens() {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> bos, TokenId("bos"));
    if (bos.has_value()) config_["bos_token_id"] = *bos;
    std::vector<int64_t> ends;
    const auto add = [&ends](int64_t id) {
      if (std::find(ends.begin(), ends.end(), id) == ends.end()) {
        ends.push_back(id);
      }
    };
    for (const std::string_view name : {"eos", "eot", "eom"}) {
      KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> id, TokenId(name));
      if (id.has_value()) add(*id);
    }
    KVASIR_ASSIGN_OR_RETURN(const std::vector<std::string_view> tokens,
                            header_.Strings("tokenizer.ggml.tokens"));
    KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> types,
                            header_.Ints("tokenizer.ggml.token_type"));
    for (size_t id = 0; id < std::min(tokens.size(), types.size()); ++id) {
      if (types[id] != kControlToken && types[id] != kUserToken) continue;
      if (std::find(kEndOfTurn.begin(), kEndOfTurn.end(), tokens[id]) !=
          kEndOfTurn.end()) {
        add(static_cast<int64_t>(id));
      }
    }
    config_["eos_token_id"] = ends.empty() ? json() : json(ends);
    return absl::OkStatus();
  }

  const GgufHeader& header_;
  const GgufFamily& family_;
  GgufRopeFactors rope_factors_;
  json config_ = json::object();
  std::set<std::string, std::less<>> known_;
  int64_t head_dim_ = 0;
};

absl::StatusOr<std::vector<float>> ReadFactors(const GgufModel& model,
                                               std::string_view name) {
  const GgufHeader& header = model.header;
  std::vector<float> factors;
  const GgufTensor* const tensor = header.FindTensor(name);
  if (tensor == nullptr) return factors;
  constexpr int64_t kMostPairs = 1 << 12;
  if (tensor->type->name != "F32" || tensor->num_elements() > kMostPairs) {
    return header.Error(
        name, absl::StrFormat(
                  "want at most %d numbers of type F32, have %d of %s",
                  kMostPairs, tensor->num_elements(), tensor->type->name));
  }
  std::vector<uint8_t> bytes(tensor->size_bytes);
  KVASIR_RETURN_IF_ERROR(model.files[tensor->file].Read(
      tensor->begin_bytes, std::as_writable_bytes(std::span<uint8_t>(bytes))));
  factors.resize(bytes.size() / sizeof(float));
  for (size_t i = 0; i < factors.size(); ++i) {
    tensor->type->unpack(bytes.data() + i * sizeof(float), &factors[i]);
    if (std::isfinite(factors[i]) && factors[i] > 0) continue;
    return header.Error(
        name, absl::StrFormat("number %d is %g; want finite numbers above 0", i,
                              factors[i]));
  }
  return factors;
}

}  // namespace

absl::StatusOr<GgufConfig> ConfigOfGguf(const GgufHeader& header,
                                        GgufRopeFactors rope_factors) {
  constexpr std::string_view kKey = "general.architecture";
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string_view> architecture,
                          header.String(kKey));
  if (!architecture.has_value()) return header.Error(kKey, "is missing");
  const GgufFamily* const family = FindGgufFamily(*architecture);
  if (family == nullptr) {
    return header.Unserved(
        kKey,
        absl::StrFormat(
            "\"%s\" is not served; served are %s", architecture->substr(0, 80),
            absl::StrJoin(kGgufFamilies, ", ",
                          [](std::string* out, const GgufFamily& row) {
                            out->append(row.architecture);
                          })));
  }
  return ConfigWriter(header, *family, std::move(rope_factors)).Run();
}

absl::StatusOr<GgufConfig> ReadGgufConfig(const GgufModel& model) {
  GgufRopeFactors factors;
  KVASIR_ASSIGN_OR_RETURN(factors.all, ReadFactors(model, kGgufRopeFactors));
  KVASIR_ASSIGN_OR_RETURN(factors.long_text,
                          ReadFactors(model, kGgufLongFactors));
  KVASIR_ASSIGN_OR_RETURN(factors.short_text,
                          ReadFactors(model, kGgufShortFactors));
  return ConfigOfGguf(model.header, std::move(factors));
}

}  // namespace kvasir::model
