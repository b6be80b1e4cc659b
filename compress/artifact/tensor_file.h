// A file of tensors and a text that can tell whether it is whole: what long
// calculations keep on disk.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/tensors/tensor_map.h"

namespace kvasir::compress {

struct TensorFile {
  // What the tensors are and how they were made; any UTF-8 text.
  std::string text;
  // Float64, float32 or bytes.
  TensorMap tensors;
};

// Writes a safetensors file which ends in a hash of all that is before it. It
// appears under `path` when it is complete. Unavailable with the path, also
// while another process writes the same file.
absl::Status WriteTensorFile(const std::filesystem::path& path,
                             const TensorFile& file);

// NotFound when there is none; DataLoss, with the path, for a file that is not
// what WriteTensorFile wrote; what the system says of one that it does not open
// or read.
absl::StatusOr<TensorFile> ReadTensorFile(const std::filesystem::path& path);

// 32 hexadecimal digits that change when any bit of the text does.
std::string TextHash(const std::string& text);

}  // namespace kvasir::compress
