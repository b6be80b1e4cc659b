// libFuzzer target: parses any bytes as a safetensors file and as the header
// of one.
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "model/checkpoint/safetensors.h"

namespace {

constexpr uint64_t kWorkPerByte = 200;

// Parses the text as a whole file: header length, header, data.
void ParseFile(std::string_view file) {
  uint64_t header_bytes = 0;
  if (file.size() < sizeof(header_bytes)) return;
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  file.remove_prefix(sizeof(header_bytes));
  // SafetensorsFile::Open refuses a header that is longer than the file before
  // it reads the header, so ParseSafetensorsHeader never gets one.
  if (header_bytes > file.size()) return;
  const std::string_view header = file.substr(0, header_bytes);
  const uint64_t data_bytes = file.size() - header_bytes;
  const auto tensors =
      kvasir::model::ParseSafetensorsHeader(header, data_bytes, "fuzz");
  if (!tensors.ok()) return;
  uint64_t end = 0;
  for (const auto& tensor : *tensors) {
    KVASIR_CHECK(tensor.begin_bytes == end);
    end += tensor.size_bytes;
    KVASIR_CHECK(end <= data_bytes);
  }
  KVASIR_CHECK(end == data_bytes);
}

void Parse(std::string_view text) {
  ParseFile(text);
  (void)kvasir::model::ParseSafetensorsHeader(text, 1 << 20, "fuzz");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
