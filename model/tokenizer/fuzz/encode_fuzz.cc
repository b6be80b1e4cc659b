// libFuzzer target: encodes any bytes as a prompt, with a tokenizer of each
// kind. Prompts come from clients, so long ones must not take quadratic time.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "model/tokenizer/tokenizer.h"

namespace {

using kvasir::model::Tokenizer;

constexpr uint64_t kWorkPerByte = 8000;

const std::vector<std::shared_ptr<const Tokenizer>>& Tokenizers() {
  static const auto* const tokenizers = [] {
    auto* all = new std::vector<std::shared_ptr<const Tokenizer>>();
    for (const char* name : {"gpt2", "llama2", "llama3"}) {
      auto tokenizer =
          Tokenizer::Load(std::string(KVASIR_TOKENIZERS "/") + name);
      KVASIR_CHECK(tokenizer.ok());
      (void)(*tokenizer)->Encode("a b");  // fills tables that tokenizers share
      all->push_back(*std::move(tokenizer));
    }
    return all;
  }();
  return *tokenizers;
}

void Parse(std::string_view text) {
  for (const auto& tokenizer : Tokenizers()) (void)tokenizer->Encode(text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Tokenizers();  // loads the tokenizers now, so that this work is not counted
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
