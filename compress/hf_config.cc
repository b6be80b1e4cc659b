#include "compress/hf_config.h"

#include <array>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

using Json = nlohmann::ordered_json;

struct FamilyNames {
  const char* architecture;
  const char* model_type;
};

FamilyNames NamesOf(model::ShapeFamily family) {
  switch (family) {
    case model::ShapeFamily::kMistral:
      return {"MistralForCausalLM", "mistral"};
    case model::ShapeFamily::kQwen2:
      return {"Qwen2ForCausalLM", "qwen2"};
    case model::ShapeFamily::kLlama:
      break;
  }
  return {"LlamaForCausalLM", "llama"};
}

Json RopeScalingJson(const model::RopeScalingShape& scaling) {
  switch (scaling.kind) {
    case model::RopeScalingKind::kLlama3:
      return {
          {"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_freq_factor},
          {"high_freq_factor", scaling.high_freq_factor},
          {"original_max_position_embeddings", scaling.original_max_position}};
    case model::RopeScalingKind::kYarn:
      return {
          {"rope_type", "yarn"},
          {"factor", scaling.factor},
          {"original_max_position_embeddings", scaling.original_max_position}};
    case model::RopeScalingKind::kNone:
      break;
  }
  return nullptr;
}

const char* TorchDtypeName(StoredDtype dtype) {
  return dtype == StoredDtype::kF32 ? "float32" : "bfloat16";
}

}  // namespace

std::string HfConfigJson(const model::ModelShape& shape, StoredDtype dtype) {
  const FamilyNames names = NamesOf(shape.family);
  Json config;
  config["architectures"] = {names.architecture};
  config["model_type"] = names.model_type;
  config["attention_bias"] = shape.qkv_bias;
  config["attention_dropout"] = 0.0;
  config["bos_token_id"] = shape.bos_token_id;
  config["eos_token_id"] = shape.eos_token_id;
  config["head_dim"] = shape.head_dim;
  config["hidden_act"] = "silu";
  config["hidden_size"] = shape.hidden_size;
  config["initializer_range"] = 0.02;
  config["intermediate_size"] = shape.intermediate_size;
  config["max_position_embeddings"] = shape.max_position;
  config["mlp_bias"] = false;
  config["num_attention_heads"] = shape.num_query_heads;
  config["num_hidden_layers"] = shape.num_layers;
  config["num_key_value_heads"] = shape.num_kv_heads;
  config["rms_norm_eps"] = shape.rms_norm_eps;
  config["rope_scaling"] = RopeScalingJson(shape.rope_scaling);
  config["rope_theta"] = shape.rope_theta;
  if (shape.sliding_window > 0) {
    config["sliding_window"] = shape.sliding_window;
  }
  config["tie_word_embeddings"] = shape.tied_embedding;
  config["torch_dtype"] = TorchDtypeName(dtype);
  config["use_cache"] = true;
  config["vocab_size"] = shape.vocab_size;
  if (shape.family != model::ShapeFamily::kLlama) {
    // Llama's switches; in the other families the biases are given by the
    // architecture.
    config.erase("attention_bias");
    config.erase("mlp_bias");
  }
  return config.dump(2) + "\n";
}

absl::Status WriteHfConfig(const std::filesystem::path& folder,
                           const model::ModelShape& shape, StoredDtype dtype) {
  Json generation;
  generation["bos_token_id"] = shape.bos_token_id;
  generation["eos_token_id"] = shape.eos_token_id;
  KVASIR_RETURN_IF_ERROR(
      WriteFileAtomically(folder / "config.json", HfConfigJson(shape, dtype)));
  return WriteFileAtomically(folder / "generation_config.json",
                             generation.dump(2) + "\n");
}

absl::Status CopyTokenizer(const std::filesystem::path& from,
                           const std::filesystem::path& to) {
  constexpr std::array kFiles = {"tokenizer.json", "tokenizer_config.json",
                                 "special_tokens_map.json"};
  std::error_code error;
  if (!std::filesystem::exists(from / kFiles[0], error)) {
    return absl::NotFoundError(
        absl::StrCat("no tokenizer.json in ", from.string()));
  }
  std::filesystem::create_directories(to, error);
  if (std::filesystem::equivalent(from, to, error)) return absl::OkStatus();
  for (const char* file : kFiles) {
    if (!std::filesystem::exists(from / file, error)) continue;
    std::filesystem::copy_file(
        from / file, to / file,
        std::filesystem::copy_options::overwrite_existing, error);
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("cannot copy ", (from / file).string(), " to ",
                       to.string(), ": ", error.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::compress
