// Opens the file or the files of a GGUF model. Large models are often split:
// NAME-00001-of-00003.gguf has the metadata, and all files have tensors
// (https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/files/file.h"
#include "model/gguf/gguf_header.h"

namespace kvasir::model {

struct GgufModel {
  GgufHeader header;  // the first file's keys, and the tensors of all files
  std::vector<RandomAccessFile> files;  // indexed by GgufTensor::file
};

// `path` is the only file or the first one; the others lie beside it. Errors:
// - those of GgufHeader;
// - NOT_FOUND if a file is missing;
// - INVALID_ARGUMENT if there are several files, and `path` is not the first,
//   its name lacks the file's number, or the files do not belong together.
absl::StatusOr<GgufModel> OpenGgufModel(const std::string& path);

// Removes the number from the name of a split file: "NAME-00001-of-00003"
// becomes "NAME". `stem` must not end with ".gguf". Other names are
// returned unchanged.
std::string_view WithoutSplitNumber(std::string_view stem);

}  // namespace kvasir::model
