#include "model/checkpoint/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "model/files/json.h"

namespace kvasir::model {
namespace {

// The limit that the safetensors format sets.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// The largest index file that is read. The indexes of the largest models are
// many times smaller.
constexpr uint64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kLengthBytes = 8;
constexpr char kSingleFile[] = "model.safetensors";
// The number of pieces of a file that its fingerprint hashes.
constexpr uint64_t kPieces = 256;
constexpr uint64_t kPieceBytes = 64 << 10;

uint64_t LittleEndian64(const std::array<std::byte, kLengthBytes>& bytes) {
  uint64_t value = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  }
  return value;
}

// A shard must be a plain file name, so that an index cannot lead out of
// its folder.
bool IsPlainShardName(std::string_view name) {
  return name.ends_with(".safetensors") && name.find('/') == name.npos &&
         name.find('\\') == name.npos && name.find('\0') == name.npos;
}

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(RandomAccessFile file, RandomAccessFile::Open(path));
  if (file.size_bytes() < kLengthBytes) {
    return absl::DataLossError(absl::StrFormat(
        "%s is truncated: it must begin with a header length of %d "
        "bytes, but its size is %d bytes",
        path, kLengthBytes, file.size_bytes()));
  }
  std::array<std::byte, kLengthBytes> length_bytes;
  KVASIR_RETURN_IF_ERROR(file.Read(0, length_bytes));
  const uint64_t header_bytes = LittleEndian64(length_bytes);
  if (header_bytes > kMaxHeaderBytes) {
    std::string text(std::min<uint64_t>(file.size_bytes(), 64), '\0');
    KVASIR_RETURN_IF_ERROR(
        file.Read(0, std::as_writable_bytes(std::span<char>(text))));
    KVASIR_RETURN_IF_ERROR(CheckNoLfsPointer(text, path));
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: the header has %d bytes, but the limit is %d bytes", path,
        header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > file.size_bytes() - kLengthBytes) {
    return absl::DataLossError(
        absl::StrFormat("%s is truncated: its header has %d bytes, but only %d "
                        "bytes follow the header length",
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

absl::Status SafetensorsFile::ReadWhole(const TensorInfo& tensor,
                                        uint64_t offset_bytes,
                                        std::span<std::byte> out) const {
  return file().Read(RangeOf(tensor, offset_bytes, out.size()).begin_bytes,
                     out);
}

TensorFile::FileRange SafetensorsFile::RangeOf(const TensorInfo& tensor,
                                               uint64_t offset_bytes,
                                               uint64_t size_bytes) const {
  return {data_start_bytes_ + tensor.begin_bytes + offset_bytes, size_bytes};
}

absl::Status TensorFile::Read(const TensorInfo& tensor, uint64_t offset_bytes,
                              std::span<std::byte> out) const {
  if (offset_bytes > tensor.size_bytes ||
      out.size() > tensor.size_bytes - offset_bytes) {
    return absl::OutOfRangeError(absl::StrFormat(
        "%s: tensor %s: cannot read %d bytes from byte %d on, because the "
        "tensor has only %d bytes",
        path(), tensor.name, out.size(), offset_bytes, tensor.size_bytes));
  }
  const absl::Status status =
      ForEachPiece(tensor, offset_bytes, out.size(),
                   [&](uint64_t place, uint64_t size, uint64_t offset) {
                     return ReadWhole(tensor, place,
                                      out.subspan(offset - offset_bytes, size));
                   });
  if (!status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrFormat("tensor %s: %s", tensor.name, status.message()));
  }
  return status;
}

absl::Status TensorFile::ForEachPiece(
    const TensorInfo& tensor, uint64_t offset_bytes, uint64_t size_bytes,
    absl::FunctionRef<absl::Status(uint64_t, uint64_t, uint64_t)> piece) {
  if (tensor.rows.all()) return piece(offset_bytes, size_bytes, offset_bytes);
  const uint64_t row_bytes = tensor.row_bytes();
  const uint64_t block_bytes =
      static_cast<uint64_t>(tensor.rows.block_rows) * row_bytes;
  const uint64_t end = offset_bytes + size_bytes;
  for (uint64_t at = offset_bytes; at < end;) {
    const uint64_t block = at / block_bytes;
    const uint64_t inside = at % block_bytes;
    const uint64_t size = std::min(block_bytes - inside, end - at);
    const uint64_t row = static_cast<uint64_t>(tensor.rows.first) +
                         block * static_cast<uint64_t>(tensor.rows.stride);
    KVASIR_RETURN_IF_ERROR(piece(row * row_bytes + inside, size, at));
    at += size;
  }
  return absl::OkStatus();
}

void TensorFile::WillNeed(const TensorInfo& tensor, uint64_t offset_bytes,
                          uint64_t size_bytes) const {
  ForEachPiece(tensor, offset_bytes, size_bytes,
               [&](uint64_t place, uint64_t size, uint64_t) {
                 const FileRange range = RangeOf(tensor, place, size);
                 file_.WillNeed(range.begin_bytes, range.size_bytes);
                 return absl::OkStatus();
               })
      .IgnoreError();  // a hint to the page cache
}

void TensorFile::Release(const TensorInfo& tensor, uint64_t offset_bytes,
                         uint64_t size_bytes) const {
  ForEachPiece(tensor, offset_bytes, size_bytes,
               [&](uint64_t place, uint64_t size, uint64_t) {
                 const FileRange range = RangeOf(tensor, place, size);
                 file_.Release(range.begin_bytes, range.size_bytes);
                 return absl::OkStatus();
               })
      .IgnoreError();  // a hint to the page cache
}

absl::StatusOr<std::string> TensorFile::Fingerprint() const {
  const uint64_t size = file_.size_bytes();
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_128bits_reset(state.get());
  XXH3_128bits_update(state.get(), &size, sizeof(size));
  std::vector<std::byte> buffer(kPieceBytes);
  // The offset of the last piece, which ends at the end of the file.
  const uint64_t last = size - std::min(size, kPieceBytes);
  uint64_t end = 0;
  for (uint64_t i = 0; i < kPieces && end < size; ++i) {
    // In a small file, each piece begins no earlier than the previous one ends,
    // so that every byte is read once.
    const uint64_t begin = std::max(last * i / (kPieces - 1), end);
    end = std::min(begin + kPieceBytes, size);
    const std::span<std::byte> piece = std::span(buffer).first(end - begin);
    KVASIR_RETURN_IF_ERROR(file_.Read(begin, piece));
    XXH3_128bits_update(state.get(), piece.data(), piece.size());
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

const TensorStore::Entry* TensorStore::Find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

namespace {

// Checks the files of the base model that an artifact uses.
// metadata.linked_files in the artifact's index has the fingerprint of each
// such file.
absl::Status CheckLinkedFiles(
    const JsonFields& index,
    const std::vector<std::unique_ptr<TensorFile>>& files) {
  const nlohmann::json* metadata = index.Find("metadata");
  if (metadata == nullptr || !metadata->is_object()) return absl::OkStatus();
  const JsonFields fields(*metadata, absl::StrCat(index.where(), ": metadata"));
  const nlohmann::json* linked = fields.Find("linked_files");
  if (linked == nullptr) return absl::OkStatus();
  if (!linked->is_object()) {
    return fields.Error("linked_files",
                        "must be an object of file names and fingerprints");
  }
  for (const auto& [name, want] : linked->items()) {
    const std::string ending = absl::StrCat("/", name);
    const auto file = std::find_if(
        files.begin(), files.end(),
        [&ending](const auto& one) { return one->path().ends_with(ending); });
    if (!want.is_string() || file == files.end()) {
      return fields.Error(
          "linked_files",
          absl::StrFormat("%s: want the fingerprint of a file of weight_map, "
                          "have %s",
                          name, JsonExcerpt(want)));
    }
    KVASIR_ASSIGN_OR_RETURN(const std::string have, (*file)->Fingerprint());
    if (have == want.get_ref<const std::string&>()) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: this is not the base model that the checkpoint was made from: "
        "its fingerprint must be %s, but is %s; make the checkpoint again",
        (*file)->path(), want.get_ref<const std::string&>(), have));
  }
  return absl::OkStatus();
}

}  // namespace

TensorStore TensorStore::Of(std::vector<std::unique_ptr<TensorFile>> files) {
  TensorStore store;
  for (const std::unique_ptr<TensorFile>& file : files) {
    for (const TensorInfo& info : file->tensors()) {
      store.entries_[info.name] = Entry{file.get(), &info};
    }
  }
  store.stored_ = store.entries_;
  store.files_ = std::move(files);
  return store;
}

namespace {

absl::StatusOr<TensorStore> OpenSingle(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  std::vector<std::unique_ptr<TensorFile>> files;
  files.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
  return TensorStore::Of(std::move(files));
}

}  // namespace

absl::StatusOr<TensorStore> TensorStore::Open(const std::string& folder) {
  const std::string single = absl::StrCat(folder, "/", kSingleFile);
  const std::string index =
      absl::StrCat(folder, "/model.safetensors.index.json");
  if (!FileExists(index)) {
    if (!FileExists(single)) {
      return absl::NotFoundError(
          absl::StrFormat("%s holds neither model.safetensors nor "
                          "model.safetensors.index.json; a folder with weights "
                          "in another format is not supported",
                          folder));
    }
    return OpenSingle(single);
  }

  KVASIR_ASSIGN_OR_RETURN(const std::string text,
                          ReadSmallFile(index, kMaxIndexBytes));
  KVASIR_ASSIGN_OR_RETURN(const nlohmann::json root, ParseJson(text, index));
  const JsonFields fields(root, index);
  const nlohmann::json* map = fields.Find("weight_map");
  if (map == nullptr || !map->is_object()) {
    return fields.Error("weight_map",
                        "must be an object of tensor names and file names");
  }
  // model.safetensors is preferred, as in Hugging Face, unless the index itself
  // lists it. The index of an artifact with links may do so.
  const bool lists_single = std::any_of(
      map->begin(), map->end(),
      [](const nlohmann::json& shard) { return shard == kSingleFile; });
  if (!lists_single && FileExists(single)) {
    base::LogWarning(
        "the folder has weights twice, and the shards of the index are not "
        "read; remove the files that are old",
        {{"read", single}, {"not_read", index}});
    return OpenSingle(single);
  }
  struct Shard {
    const TensorFile* file = nullptr;
    std::map<std::string_view, const TensorInfo*> tensors;
  };
  std::map<std::string, Shard> shards;
  TensorStore store;
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
      }
    }
    const auto found = shard.tensors.find(name);
    if (found == shard.tensors.end()) {
      return fields.Error(
          "weight_map",
          absl::StrFormat("tensor %s: the index says that it is in %s, which "
                          "does not have it",
                          name, shard_name));
    }
    store.entries_[name] = Entry{shard.file, found->second};
  }
  KVASIR_RETURN_IF_ERROR(CheckLinkedFiles(fields, store.files_));
  store.stored_ = store.entries_;
  return store;
}

absl::Status TensorStore::Rename(
    absl::FunctionRef<absl::StatusOr<std::vector<TensorView>>(const Entry&)>
        views_of) {
  Entries entries;
  for (const auto& [stored_name, entry] : stored_) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<TensorView> views,
                            views_of(entry));
    for (const TensorView& view : views) {
      Entry renamed = entry;
      if (!view.rows.all()) {
        auto choice = std::make_unique<TensorInfo>(*entry.info);
        choice->rows = view.rows;
        choice->shape[0] = view.num_rows;
        choice->size_bytes =
            static_cast<uint64_t>(view.num_rows) * entry.info->row_bytes();
        renamed.info = choice.get();
        choices_.push_back(std::move(choice));
      }
      const auto [place, is_new] = entries.try_emplace(view.name, renamed);
      if (is_new) continue;
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: tensor %s is stored twice: %s also has it, with the name %s "
          "(the canonical name of both is %s)",
          entry.file->path(), stored_name, place->second.file->path(),
          place->second.info->name, view.name));
    }
  }
  entries_ = std::move(entries);
  return absl::OkStatus();
}

}  // namespace kvasir::model
