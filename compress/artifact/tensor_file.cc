#include "compress/artifact/tensor_file.h"

// On x86, this header of xxHash chooses the widest instruction set that the CPU
// supports at run time.
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "compress/artifact/safetensors_writer.h"
#include "model/checkpoint/safetensors.h"

namespace kvasir::compress {
namespace {

// Names of the tensors that the file adds itself. They begin with a dot, so
// they never equal the name of a caller's tensor.
constexpr char kTextName[] = ".text";
constexpr char kHashName[] = ".hash";
constexpr size_t kHashBytes = 16;

class ContentHash {
 public:
  ContentHash() : state_(XXH3_createState()) { XXH3_128bits_reset(state_); }
  ~ContentHash() { XXH3_freeState(state_); }
  ContentHash(const ContentHash&) = delete;
  ContentHash& operator=(const ContentHash&) = delete;

  void Add(const std::string& name, const std::vector<int64_t>& shape,
           std::span<const std::byte> bytes) {
    const std::string head =
        absl::StrCat(name, model::ShapeText(shape), bytes.size(), "\n");
    XXH3_128bits_update(state_, head.data(), head.size());
    XXH3_128bits_update(state_, bytes.data(), bytes.size());
  }

  std::array<std::byte, kHashBytes> Finish() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_));
    std::array<std::byte, kHashBytes> bytes;
    std::memcpy(bytes.data(), canonical.digest, kHashBytes);
    return bytes;
  }

 private:
  XXH3_state_t* state_;
};

std::span<const std::byte> BytesOf(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

model::TensorType DtypeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return model::TensorType::kF64;
    case at::kFloat:
      return model::TensorType::kF32;
    default:
      KVASIR_CHECK(tensor.scalar_type() == at::kByte);
      return model::TensorType::kU8;
  }
}

absl::StatusOr<at::ScalarType> ScalarTypeOf(model::TensorType type) {
  switch (type) {
    case model::TensorType::kF64:
      return at::kDouble;
    case model::TensorType::kF32:
      return at::kFloat;
    case model::TensorType::kU8:
      return at::kByte;
    default:
      return absl::DataLossError(
          absl::StrCat("the type of each tensor must be F64, F32 or U8, but "
                       "one has the type ",
                       std::string(model::TensorTypeName(type))));
  }
}

absl::StatusOr<TensorFile> ReadChecked(const std::filesystem::path& path) {
  KVASIR_ASSIGN_OR_RETURN(const model::SafetensorsFile file,
                          model::SafetensorsFile::Open(path.string()));
  TensorFile result;
  ContentHash hash;
  std::array<std::byte, kHashBytes> stored_hash{};
  bool has_hash = false;
  for (const model::TensorInfo& info : file.tensors()) {
    if (info.name == kHashName && info.size_bytes == kHashBytes) {
      KVASIR_RETURN_IF_ERROR(file.Read(info, 0, stored_hash));
      has_hash = true;
      continue;
    }
    KVASIR_ASSIGN_OR_RETURN(const at::ScalarType type, ScalarTypeOf(info.type));
    const at::Tensor tensor =
        at::empty(info.shape, at::TensorOptions().dtype(type));
    KVASIR_RETURN_IF_ERROR(file.Read(
        info, 0,
        {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()}));
    hash.Add(info.name, info.shape, BytesOf(tensor));
    if (info.name == kTextName) {
      result.text.assign(static_cast<const char*>(tensor.data_ptr()),
                         tensor.nbytes());
    } else {
      result.tensors.emplace(info.name, tensor);
    }
  }
  if (!has_hash) {
    return absl::DataLossError(
        "the tensor that holds the hash of the content is missing");
  }
  if (hash.Finish() != stored_hash) {
    return absl::DataLossError(
        "the content does not match the hash stored in the file");
  }
  return result;
}

}  // namespace

absl::Status WriteTensorFile(const std::filesystem::path& path,
                             const TensorFile& file) {
  std::vector<TensorEntry> entries;
  std::vector<at::Tensor> tensors;
  auto add = [&](const std::string& name, const at::Tensor& tensor) {
    tensors.push_back(tensor.contiguous());
    entries.push_back({name, DtypeOf(tensor), tensor.sizes().vec()});
  };
  // A space stands for an empty text, because not every reader of safetensors
  // supports empty tensors.
  const std::string text = file.text.empty() ? " " : file.text;
  for (const auto& [name, tensor] : file.tensors) add(name, tensor);
  add(kTextName, at::from_blob(const_cast<char*>(text.data()),
                               {static_cast<int64_t>(text.size())}, at::kByte));
  ContentHash hash;
  for (size_t i = 0; i < tensors.size(); ++i) {
    hash.Add(entries[i].name, entries[i].shape, BytesOf(tensors[i]));
  }
  const std::array<std::byte, kHashBytes> digest = hash.Finish();
  entries.push_back({kHashName, model::TensorType::kU8, {kHashBytes}});

  KVASIR_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                          SafetensorsWriter::Create(path, entries));
  for (const at::Tensor& tensor : tensors) {
    KVASIR_RETURN_IF_ERROR(writer.Append(BytesOf(tensor)));
  }
  KVASIR_RETURN_IF_ERROR(writer.Append(digest));
  return writer.Finish();
}

absl::StatusOr<TensorFile> ReadTensorFile(const std::filesystem::path& path) {
  absl::StatusOr<TensorFile> file = ReadChecked(path);
  const absl::Status& status = file.status();
  // Only errors in the content mean that the file is damaged; a failed read,
  // for example, does not.
  if (absl::IsDataLoss(status) || absl::IsInvalidArgument(status) ||
      absl::IsOutOfRange(status)) {
    return absl::DataLossError(
        absl::StrCat(path.string(), " is damaged: ", status.message()));
  }
  return file;
}

std::string TextHash(const std::string& text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

}  // namespace kvasir::compress
