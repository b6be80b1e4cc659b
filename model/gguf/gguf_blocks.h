// The types of tensors in GGUF files, and how their blocks are unpacked. A
// block holds consecutive numbers of one row. The formats are those of ggml
// (ggml-common.h); every number equals that of dequantize() in the package
// `gguf`, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvasir::model {

struct GgmlType {
  uint32_t id = 0;  // the number of the type in GGUF files
  std::string_view name;
  int64_t block_numbers = 0;
  int64_t block_bytes = 0;
  // Reads one block (block_bytes bytes) and writes its block_numbers numbers.
  void (*unpack)(const uint8_t* block, float* numbers) = nullptr;
};

// The largest block_numbers of all types.
inline constexpr int64_t kMaxBlockNumbers = 256;

// Returns nullptr if the type is not supported.
const GgmlType* FindGgmlType(uint32_t id);
// Returns the name of a type that ggml defines but that is not supported, or an
// empty name if ggml does not define the id.
std::string_view UnservedGgmlTypeName(uint32_t id);
// The names of all served types, for error messages.
std::string ServedGgmlTypes();

}  // namespace kvasir::model
