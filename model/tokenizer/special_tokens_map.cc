#include "model/tokenizer/special_tokens_map.h"

#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/tokenizer/tokenizer_json.h"

namespace kvasir::model {

using base::AbslView;

absl::StatusOr<std::string> MergeSpecialTokensMap(std::string_view config_json,
                                                  std::string_view map_json,
                                                  const std::string& folder) {
  const std::string config_name =
      absl::StrCat(folder, "/tokenizer_config.json");
  const std::string map_name = absl::StrCat(folder, "/special_tokens_map.json");
  KVASIR_ASSIGN_OR_RETURN(
      nlohmann::json config,
      ParseUntrustedJson(config_json.empty() ? "{}" : config_json,
                         config_name));
  KVASIR_ASSIGN_OR_RETURN(
      const std::optional<JsonRef> decoder,
      JsonRef(config, config_name).Find("added_tokens_decoder"));
  if (decoder) return std::string(config_json);
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json map,
                          ParseUntrustedJson(map_json, map_name));
  if (!map.is_object()) return JsonRef(map, map_name).Invalid("an object");
  config.update(map);
  return config.dump();
}

absl::StatusOr<std::string_view> DefaultEosToken(const JsonRef& config) {
  KVASIR_ASSIGN_OR_RETURN(const auto found, config.Find("tokenizer_class"));
  if (config.value().contains("eos_token") || !found) return std::string_view();
  KVASIR_ASSIGN_OR_RETURN(const std::string name, found->String());
  constexpr std::array<std::pair<std::string_view, std::string_view>, 7>
      kDefaults = {{
          {"LlamaTokenizer", "</s>"},
          {"CodeLlamaTokenizer", "</s>"},
          {"GPT2Tokenizer", "<|endoftext|>"},
          {"GPTNeoXTokenizer", "<|endoftext|>"},
          {"Qwen2Tokenizer", "<|endoftext|>"},
          {"CodeGenTokenizer", "<|endoftext|>"},
          {"CohereTokenizer", "<|END_OF_TURN_TOKEN|>"},
      }};
  for (const auto& [tokenizer, eos] : kDefaults) {
    if (absl::StripSuffix(name, "Fast") == AbslView(tokenizer)) return eos;
  }
  return std::string_view();
}

}  // namespace kvasir::model
