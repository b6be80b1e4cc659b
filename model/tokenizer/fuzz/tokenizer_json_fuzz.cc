// libFuzzer target: loads any bytes as tokenizer.json and
// tokenizer_config.json. If the file loads, the tokenizer must encode and
// decode without a crash.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "model/tokenizer/detokenizer.h"
#include "model/tokenizer/tokenizer.h"
#include "model/tokenizer/utf8.h"

namespace {

// Each name of "additional_special_tokens", however short, is a new token.
constexpr uint64_t kWorkPerByte = 400;

void Parse(std::string_view file) {
  using kvasir::model::IsValidUtf8;
  using kvasir::model::Tokenizer;
  const auto tokenizer = Tokenizer::FromJson(file, file, "fuzz");
  if (!tokenizer.ok()) {
    KVASIR_CHECK(!tokenizer.status().message().empty());
    return;
  }
  // Encodes the file's own text, because it contains the added tokens that the
  // file defines.
  const std::string_view prompt = file.substr(0, 512);
  const auto ids = (*tokenizer)->Encode(prompt);
  if (!ids.ok()) return;
  kvasir::model::IncrementalDetokenizer stream(**tokenizer, false);
  std::string streamed;
  for (const int32_t id : *ids) {
    KVASIR_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
    const std::string delta = stream.Push(id);
    KVASIR_CHECK(IsValidUtf8(delta));
    streamed += delta;
  }
  streamed += stream.Finish();
  KVASIR_CHECK(streamed == (*tokenizer)->Decode(*ids, false));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
