// libFuzzer target: reads any bytes as a GGUF file, and checks the header, the
// configuration, the tokenizer and the blocks of tensors.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "model/gguf/gguf_blocks.h"
#include "model/gguf/gguf_family.h"
#include "model/gguf/gguf_header.h"
#include "model/shapes/config.h"
#include "model/shapes/gguf_config.h"
#include "model/tokenizer/gguf_tokenizer.h"
#include "model/tokenizer/tokenizer.h"

namespace {

constexpr uint64_t kWorkPerByte = 2000;

void ReadTokenizer(const kvasir::model::GgufHeader& header) {
  const auto made = kvasir::model::TokenizerOfGguf(header);
  if (!made.ok()) return;
  const auto tokenizer =
      kvasir::model::Tokenizer::FromFiles({.tokenizer = made->tokenizer_json,
                                           .config = made->config_json,
                                           .name = "fuzz"});
  if (!tokenizer.ok()) return;
  const auto ids = (*tokenizer)->Encode("Hello <s> 123  \xe4\xb8\xad\n");
  if (!ids.ok()) return;
  for (const int32_t id : *ids) {
    KVASIR_CHECK(id >= 0 && id < (*tokenizer)->vocab_size());
  }
  (void)(*tokenizer)->Decode(*ids, false);
}

void Unpack(std::string_view file, const kvasir::model::GgufHeader& header) {
  std::array<float, kvasir::model::kMaxBlockNumbers> numbers;
  uint64_t total = 0;
  for (const kvasir::model::GgufTensor& tensor : header.tensors()) {
    KVASIR_CHECK(tensor.begin_bytes <= file.size() &&
                 tensor.size_bytes <= file.size() - tensor.begin_bytes);
    total += tensor.size_bytes;
    const auto block = static_cast<uint64_t>(tensor.type->block_bytes);
    const auto* data =
        reinterpret_cast<const uint8_t*>(file.data()) + tensor.begin_bytes;
    KVASIR_CHECK(tensor.size_bytes % block == 0);
    for (uint64_t i = 0; i < tensor.size_bytes / block; ++i) {
      tensor.type->unpack(data + i * block, numbers.data());
    }
  }
  KVASIR_CHECK(total <= file.size());  // because tensors do not overlap
}

// Returns the numbers of a short F32 tensor.
std::vector<float> Numbers(std::string_view file,
                           const kvasir::model::GgufHeader& header,
                           std::string_view name) {
  const kvasir::model::GgufTensor* const tensor = header.FindTensor(name);
  if (tensor == nullptr || tensor->type->name != "F32") return {};
  std::vector<float> numbers(
      static_cast<size_t>(std::min<int64_t>(tensor->num_elements(), 64)));
  std::memcpy(numbers.data(), file.data() + tensor->begin_bytes,
              numbers.size() * sizeof(float));
  return numbers;
}

kvasir::model::GgufRopeFactors Factors(
    std::string_view file, const kvasir::model::GgufHeader& header) {
  return {
      .all = Numbers(file, header, kvasir::model::kGgufRopeFactors),
      .long_text = Numbers(file, header, kvasir::model::kGgufLongFactors),
      .short_text = Numbers(file, header, kvasir::model::kGgufShortFactors)};
}

void Parse(std::string_view file) {
  const auto header =
      kvasir::model::GgufHeader::Parse(file, file.size(), "fuzz");
  if (!header.ok()) {
    KVASIR_CHECK(!header.status().message().empty());
    return;
  }
  Unpack(file, *header);
  ReadTokenizer(*header);
  const auto config =
      kvasir::model::ConfigOfGguf(*header, Factors(file, *header));
  if (config.ok()) (void)kvasir::model::ParseConfig(config->json, "fuzz");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
