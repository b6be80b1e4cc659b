// A file that holds tensors, a text and a checksum. Long calculations keep
// their results and intermediate states in such files.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/tensors/tensor_map.h"

namespace kvasir::compress {

struct TensorFile {
  // Describes the tensors and how they were made; any UTF-8 text.
  std::string text;
  // Tensors of type float64, float32 or uint8.
  TensorMap tensors;
};

// Writes a safetensors file that ends in a hash of everything before it. The
// file appears under `path` when it is complete. Errors: Unavailable with the
// path, also while another process writes the same file.
absl::Status WriteTensorFile(const std::filesystem::path& path,
                             const TensorFile& file);

// Reads a file that WriteTensorFile wrote. Errors: NotFound if there is no
// file; DataLoss, with the path, if the content differs from what
// WriteTensorFile wrote; the system's error if the file cannot be opened or
// read.
absl::StatusOr<TensorFile> ReadTensorFile(const std::filesystem::path& path);

// Returns a hash of the text as 32 hexadecimal digits.
std::string TextHash(const std::string& text);

}  // namespace kvasir::compress
