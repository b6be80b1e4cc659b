// libFuzzer target: parses any bytes as a safetensors file (header length,
// header, data).
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "model/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint64_t header_bytes = 0;
  if (size < sizeof(header_bytes)) return 0;
  std::memcpy(&header_bytes, data, sizeof(header_bytes));
  const size_t rest = size - sizeof(header_bytes);
  // SafetensorsFile::Open refuses a header that is longer than the file before
  // it reads the header, so ParseSafetensorsHeader never gets one.
  if (header_bytes > rest) return 0;
  const std::string_view header(
      reinterpret_cast<const char*>(data) + sizeof(header_bytes), header_bytes);
  const uint64_t data_bytes = rest - header_bytes;
  const auto tensors =
      kvasir::model::ParseSafetensorsHeader(header, data_bytes, "fuzz");
  if (!tensors.ok()) return 0;
  uint64_t end = 0;
  for (const auto& tensor : *tensors) {
    KVASIR_CHECK(tensor.begin_bytes == end);
    end += tensor.size_bytes;
    KVASIR_CHECK(end <= data_bytes);
  }
  KVASIR_CHECK(end == data_bytes);
  return 0;
}
