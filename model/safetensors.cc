#include "model/safetensors.h"

#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "model/json.h"

namespace kvasir::model {
namespace {

// The format's own limit.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// Names of every tensor of the largest models fit many times over.
constexpr uint64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kLengthBytes = 8;

uint64_t LittleEndian64(const std::array<std::byte, kLengthBytes>& bytes) {
  uint64_t value = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  }
  return value;
}

// A shard is a plain name beside its index: no way out of the folder.
bool IsPlainShardName(std::string_view name) {
  return name.ends_with(".safetensors") && name.find('/') == name.npos &&
         name.find('\\') == name.npos && name.find('\0') == name.npos;
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(RandomAccessFile file, RandomAccessFile::Open(path));
  if (file.size_bytes() < kLengthBytes) {
    return absl::DataLossError(absl::StrFormat(
        "%s: truncated: a header length wants %d bytes, the file has %d", path,
        kLengthBytes, file.size_bytes()));
  }
  std::array<std::byte, kLengthBytes> length_bytes;
  KVASIR_RETURN_IF_ERROR(file.Read(0, length_bytes));
  const uint64_t header_bytes = LittleEndian64(length_bytes);
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: header of %d bytes, the limit is %d", path,
                        header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > file.size_bytes() - kLengthBytes) {
    return absl::DataLossError(absl::StrFormat(
        "%s: truncated: header wants %d bytes, the file has %d after the "
        "length",
        path, header_bytes, file.size_bytes() - kLengthBytes));
  }
  std::string header(header_bytes, '\0');
  KVASIR_RETURN_IF_ERROR(
      file.Read(kLengthBytes, std::as_writable_bytes(std::span<char>(header))));
  const uint64_t data_start_bytes = kLengthBytes + header_bytes;
  KVASIR_ASSIGN_OR_RETURN(
      std::vector<TensorInfo> tensors,
      ParseSafetensorsHeader(header, file.size_bytes() - data_start_bytes,
                             path));
  return SafetensorsFile(std::move(file), data_start_bytes, std::move(tensors));
}

absl::Status SafetensorsFile::Read(const TensorInfo& tensor,
                                   uint64_t offset_bytes,
                                   std::span<std::byte> out) const {
  if (offset_bytes > tensor.size_bytes ||
      out.size() > tensor.size_bytes - offset_bytes) {
    return absl::OutOfRangeError(absl::StrFormat(
        "%s: tensor %s: want %d bytes from %d, the tensor has %d", path(),
        tensor.name, out.size(), offset_bytes, tensor.size_bytes));
  }
  absl::Status status =
      file_.Read(data_start_bytes_ + tensor.begin_bytes + offset_bytes, out);
  if (!status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrFormat("tensor %s: %s", tensor.name, status.message()));
  }
  return status;
}

void SafetensorsFile::WillNeed(const TensorInfo& tensor, uint64_t offset_bytes,
                               uint64_t size_bytes) const {
  file_.WillNeed(data_start_bytes_ + tensor.begin_bytes + offset_bytes,
                 size_bytes);
}

void SafetensorsFile::Release(const TensorInfo& tensor, uint64_t offset_bytes,
                              uint64_t size_bytes) const {
  file_.Release(data_start_bytes_ + tensor.begin_bytes + offset_bytes,
                size_bytes);
}

const TensorStore::Entry* TensorStore::Find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

absl::StatusOr<TensorStore> TensorStore::Open(const std::string& folder) {
  const std::string single = absl::StrCat(folder, "/model.safetensors");
  const std::string index =
      absl::StrCat(folder, "/model.safetensors.index.json");
  TensorStore store;
  if (!FileExists(index)) {
    if (!FileExists(single)) {
      return absl::NotFoundError(absl::StrFormat(
          "%s holds neither model.safetensors nor "
          "model.safetensors.index.json; other formats are not read",
          folder));
    }
    KVASIR_ASSIGN_OR_RETURN(SafetensorsFile file,
                            SafetensorsFile::Open(single));
    store.files_.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
    for (const TensorInfo& info : store.files_[0]->tensors()) {
      store.entries_[info.name] = Entry{store.files_[0].get(), &info};
    }
    return store;
  }

  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadSmallFile(index, kMaxIndexBytes));
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json root, ParseJson(text, index));
  const JsonFields fields(root, index);
  const nlohmann::json* map = fields.Find("weight_map");
  if (map == nullptr || !map->is_object()) {
    return fields.Error("weight_map", "want an object of names to files");
  }
  struct Shard {
    const SafetensorsFile* file = nullptr;
    std::map<std::string_view, const TensorInfo*> tensors;
  };
  std::map<std::string, Shard> shards;
  for (const auto& [name, shard_json] : map->items()) {
    if (!shard_json.is_string() ||
        !IsPlainShardName(shard_json.get_ref<const std::string&>())) {
      return fields.Error(
          "weight_map",
          absl::StrFormat("tensor %s: want the plain name of a .safetensors "
                          "file in this folder, have %s",
                          name, JsonExcerpt(shard_json)));
    }
    const auto& shard_name = shard_json.get_ref<const std::string&>();
    auto [entry, is_new] = shards.try_emplace(shard_name);
    Shard& shard = entry->second;
    if (is_new) {
      KVASIR_ASSIGN_OR_RETURN(
          SafetensorsFile file,
          SafetensorsFile::Open(absl::StrCat(folder, "/", shard_name)));
      store.files_.push_back(
          std::make_unique<SafetensorsFile>(std::move(file)));
      shard.file = store.files_.back().get();
      for (const TensorInfo& info : shard.file->tensors()) {
        shard.tensors[info.name] = &info;
        // Tensors that the index does not list are found too.
        store.entries_.try_emplace(info.name, Entry{shard.file, &info});
      }
    }
    const auto found = shard.tensors.find(name);
    if (found == shard.tensors.end()) {
      return fields.Error(
          "weight_map", absl::StrFormat("tensor %s: want it in %s, which does "
                                        "not have it",
                                        name, shard_name));
    }
    // Where a tensor lies in two shards, the index decides.
    store.entries_[name] = Entry{shard.file, found->second};
  }
  return store;
}

}  // namespace kvasir::model
