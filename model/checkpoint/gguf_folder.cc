#include "model/checkpoint/gguf_folder.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/family_tensors.h"
#include "model/gguf/gguf_family.h"
#include "model/gguf/gguf_header.h"
#include "model/gguf/gguf_model.h"
#include "model/shapes/gguf_config.h"
#include "model/tokenizer/gguf_tokenizer.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBufferBytes = size_t{4} << 20;

// A file that is being written.
class NewTextFile {
 public:
  explicit NewTextFile(const fs::path& path)
      : path_(path), file_(path, std::ios::binary | std::ios::trunc) {}

  void Write(std::span<const std::byte> bytes) {
    file_.write(reinterpret_cast<const char*>(bytes.data()),
                static_cast<std::streamsize>(bytes.size()));
  }
  void Write(std::string_view text) {
    Write(std::as_bytes(std::span<const char>(text)));
  }
  bool ok() const { return file_.good(); }
  // Also returns errors of earlier writes.
  absl::Status Close() {
    file_.close();
    if (file_.good()) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("cannot write ", path_.string(),
                                               "; is there enough space?"));
  }

 private:
  const fs::path path_;
  std::ofstream file_;
};

absl::Status WriteText(const fs::path& path, std::string_view text) {
  NewTextFile file(path);
  file.Write(text);
  return file.Close();
}

// A tensor that is written to the folder. If the family stores a fused tensor,
// it consists of several tensors of the checkpoint.
struct WrittenTensor {
  struct Part {
    TensorStore::Entry entry;
    RowBlocks rows;  // of the written tensor
  };
  std::vector<Part> parts;

  const TensorInfo& info() const { return *parts[0].entry.info; }
  std::vector<int64_t> shape() const {
    std::vector<int64_t> shape = info().shape;
    for (size_t i = 1; i < parts.size(); ++i) {
      shape[0] += parts[i].entry.info->num_rows();
    }
    return shape;
  }
  uint64_t size_bytes() const {
    uint64_t bytes = 0;
    for (const Part& part : parts) bytes += part.entry.info->size_bytes;
    return bytes;
  }
};

// Returns the tensors to write, by their names in the folder.
absl::StatusOr<std::map<std::string, WrittenTensor>> WrittenTensors(
    const Checkpoint& checkpoint) {
  std::map<std::string, WrittenTensor> written;
  for (const auto& [name, entry] : checkpoint.tensors().entries()) {
    StoredTensor stored = StoredTensorOf(checkpoint.spec(), name);
    WrittenTensor& tensor = written[stored.name];
    tensor.parts.push_back({entry, stored.rows});
    if (tensor.info().type == entry.info->type) continue;
    return absl::UnimplementedError(absl::StrFormat(
        "%s: tensors %s and %s have the types %s and %s, but the folder must "
        "store both in one tensor; serve the file itself",
        checkpoint.folder(), tensor.info().name, entry.info->name,
        TensorTypeName(tensor.info().type), TensorTypeName(entry.info->type)));
  }
  for (auto& [name, tensor] : written) {
    std::sort(tensor.parts.begin(), tensor.parts.end(),
              [](const auto& a, const auto& b) {
                return a.rows.first < b.rows.first;
              });
  }
  return written;
}

// Calls `use` with the bytes of a tensor from front to back.
absl::Status ForEachBlock(
    const WrittenTensor& tensor, std::span<std::byte> buffer,
    absl::FunctionRef<void(std::span<const std::byte>)> use) {
  // All parts of a tensor have the same number of blocks of rows. The written
  // tensor has the first block of each part, then the second block of each
  // part, and so on.
  const WrittenTensor::Part& first = tensor.parts[0];
  const int64_t num_blocks =
      first.rows.all() ? 1
                       : first.entry.info->num_rows() / first.rows.block_rows;
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (const WrittenTensor::Part& part : tensor.parts) {
      TensorRange range = TensorRange::All(*part.entry.info);
      range.num_rows /= num_blocks;
      range.first_row = block * range.num_rows;
      TensorStream stream(part.entry, range, buffer);
      while (true) {
        KVASIR_ASSIGN_OR_RETURN(const TensorStream::Block read, stream.Next());
        if (read.num_rows == 0) break;
        use(read.bytes);
      }
    }
  }
  return absl::OkStatus();
}

// The low 16 bits of a float32 that is exact in BF16 are zero.
bool AreExactInBf16(std::span<const std::byte> floats) {
  for (size_t i = 0; i + 4 <= floats.size(); i += 4) {
    if (floats[i] != std::byte{0} || floats[i + 1] != std::byte{0}) {
      return false;
    }
  }
  return true;
}

absl::Status WriteTensors(const Checkpoint& checkpoint, const fs::path& path) {
  std::vector<std::byte> buffer(kBufferBytes);
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::vector<bool> shortened;
  uint64_t offset = 0;
  KVASIR_ASSIGN_OR_RETURN(const auto tensors, WrittenTensors(checkpoint));
  for (const auto& [name, tensor] : tensors) {
    bool exact = tensor.info().type == TensorType::kF32;
    if (exact) {
      KVASIR_RETURN_IF_ERROR(ForEachBlock(
          tensor, buffer, [&exact](std::span<const std::byte> bytes) {
            exact = exact && AreExactInBf16(bytes);
          }));
    }
    shortened.push_back(exact);
    const TensorType type = exact ? TensorType::kBF16 : tensor.info().type;
    const uint64_t size = exact ? tensor.size_bytes() / 2 : tensor.size_bytes();
    header[name] = {{"dtype", TensorTypeName(type)},
                    {"shape", tensor.shape()},
                    {"data_offsets", {offset, offset + size}}};
    offset += size;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length;
  for (int byte = 0; byte < 8; ++byte) {
    length.push_back(static_cast<char>(uint64_t{text.size()} >> (8 * byte)));
  }
  NewTextFile file(path);
  file.Write(length);
  file.Write(text);
  size_t index = 0;
  for (const auto& [name, tensor] : tensors) {
    const bool shorten = shortened[index++];
    std::vector<std::byte> halves;
    KVASIR_RETURN_IF_ERROR(
        ForEachBlock(tensor, buffer, [&](std::span<const std::byte> bytes) {
          if (!shorten) return file.Write(bytes);
          halves.clear();
          for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
            halves.push_back(bytes[i + 2]);
            halves.push_back(bytes[i + 3]);
          }
          file.Write(halves);
        }));
    if (!file.ok()) break;  // Close returns the error
  }
  return file.Close();
}

absl::Status WriteFiles(const std::string& path, const fs::path& folder) {
  KVASIR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(path));
  {
    KVASIR_ASSIGN_OR_RETURN(const GgufModel model, OpenGgufModel(path));
    const GgufHeader& header = model.header;
    KVASIR_ASSIGN_OR_RETURN(const GgufConfig config, ReadGgufConfig(model));
    if (!config.rope_factors.empty()) {
      return header.Unserved(
          kGgufRopeFactors,
          "config.json cannot express these factors, so the file cannot be "
          "converted; serve the file itself");
    }
    KVASIR_RETURN_IF_ERROR(
        WriteText(folder / "config.json", config.json + "\n"));
    const absl::StatusOr<GgufTokenizer> tokenizer = TokenizerOfGguf(header);
    if (tokenizer.ok()) {
      KVASIR_RETURN_IF_ERROR(
          WriteText(folder / "tokenizer.json", tokenizer->tokenizer_json));
      KVASIR_RETURN_IF_ERROR(
          WriteText(folder / "tokenizer_config.json", tokenizer->config_json));
    } else if (!absl::IsNotFound(tokenizer.status())) {
      return tokenizer.status();
    }
  }
  return WriteTensors(checkpoint, folder / "model.safetensors");
}

}  // namespace

absl::Status WriteFolderOfGguf(const std::string& path,
                               const std::string& out) {
  std::error_code error;
  fs::path name = fs::path(out).lexically_normal();
  if (!name.has_filename()) name = name.parent_path();  // "folder/"
  const std::string folder = name.string();
  if (!MayBeGguf(path)) {
    return absl::NotFoundError(absl::StrCat("there is no GGUF file ", path));
  }
  if (fs::exists(folder, error)) {
    return absl::AlreadyExistsError(
        absl::StrCat(out, " exists; give the name of a new folder"));
  }
  const std::string unfinished = absl::StrCat(folder, ".unfinished");
  if (fs::exists(unfinished, error)) {
    return absl::AlreadyExistsError(absl::StrCat(
        unfinished,
        " exists, from a conversion that was cut off or still runs;"
        " remove it, or give another name"));
  }
  fs::create_directories(unfinished, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat(
        "cannot create the folder ", unfinished, ": ", error.message()));
  }
  absl::Cleanup remove = [&] {
    std::error_code ignored;
    fs::remove_all(unfinished, ignored);
  };
  KVASIR_RETURN_IF_ERROR(WriteFiles(path, unfinished));
  fs::rename(unfinished, folder, error);
  if (!error) {
    std::move(remove).Cancel();
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(
      "cannot rename ", unfinished, " to ", folder, ": ", error.message()));
}

}  // namespace kvasir::model
