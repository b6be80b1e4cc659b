#include "worker/load/end_tokens.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"

namespace kvasir::cli {
namespace {

std::string TextOf(const std::vector<int32_t>& ids) {
  return ids.empty() ? "none" : absl::StrJoin(ids, ", ");
}

}  // namespace

std::vector<int32_t> ChooseEndTokens(const model::DecoderSpec& spec,
                                     const model::Tokenizer* tokenizer) {
  std::vector<int32_t> chosen = spec.eos_token_ids;
  std::string of_tokenizer = "there is no tokenizer";
  if (tokenizer != nullptr) {
    of_tokenizer = TextOf(tokenizer->eos_ids());
    for (const int32_t id : tokenizer->eos_ids()) {
      if (id >= spec.vocab_size) {
        base::LogWarning(
            "the tokenizer's end token is beyond the model's vocabulary, so it "
            "ends no output",
            {{"id", id}, {"vocab_size", spec.vocab_size}});
      } else if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) {
        chosen.push_back(id);
      }
    }
  }
  const std::string of_model =
      absl::StrCat(TextOf(spec.eos_token_ids), " (", spec.eos_source, ")");
  if (chosen.empty()) {
    base::LogWarning(
        "the model has no end token: outputs end only at their maximum length "
        "or at a stop string; set eos_token_id in generation_config.json or "
        "config.json, or eos_token in tokenizer_config.json",
        {{"model", of_model}, {"tokenizer", of_tokenizer}});
  } else {
    base::LogInfo("end tokens", {{"ids", TextOf(chosen)},
                                 {"model", of_model},
                                 {"tokenizer", of_tokenizer}});
  }
  return chosen;
}

}  // namespace kvasir::cli
