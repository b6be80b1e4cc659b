// libFuzzer: any bytes as a safetensors header. The first eight bytes choose
// how many data bytes follow it.
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint64_t data_bytes = 0;
  if (size < sizeof(data_bytes)) return 0;
  std::memcpy(&data_bytes, data, sizeof(data_bytes));
  const std::string_view header(
      reinterpret_cast<const char*>(data) + sizeof(data_bytes),
      size - sizeof(data_bytes));
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
