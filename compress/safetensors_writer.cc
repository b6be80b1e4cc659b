#include "compress/safetensors_writer.h"

#include <bit>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

const char* DtypeName(StoredDtype dtype) {
  return dtype == StoredDtype::kF32 ? "F32" : "BF16";
}

absl::Status Rename(const std::filesystem::path& from,
                    const std::filesystem::path& to) {
  std::error_code error;
  std::filesystem::rename(from, to, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("cannot rename ", from.string(),
                                               " to ", to.string(), ": ",
                                               error.message()));
  }
  return absl::OkStatus();
}

std::filesystem::path PartialPath(const std::filesystem::path& path) {
  return path.string() + ".partial";
}

}  // namespace

int64_t ElementBytes(StoredDtype dtype) {
  return dtype == StoredDtype::kF32 ? 4 : 2;
}

int64_t TensorBytes(const TensorEntry& entry) {
  int64_t bytes = ElementBytes(entry.dtype);
  for (const int64_t size : entry.shape) bytes *= size;
  return bytes;
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path,
                                     int64_t declared_bytes)
    : path_(std::move(path)),
      partial_path_(PartialPath(path_)),
      declared_bytes_(declared_bytes) {}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    std::filesystem::path path, const std::vector<TensorEntry>& entries) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (const TensorEntry& entry : entries) {
    const int64_t end = offset + TensorBytes(entry);
    header[entry.name] = {{"dtype", DtypeName(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  // The format asks for data that begins at a multiple of 8 bytes.
  text.append((8 - text.size() % 8) % 8, ' ');

  SafetensorsWriter writer(std::move(path), offset);
  writer.out_.open(writer.partial_path_, std::ios::binary | std::ios::trunc);
  const auto length = static_cast<uint64_t>(text.size());
  for (int shift = 0; shift < 64; shift += 8) {
    writer.out_.put(static_cast<char>(length >> shift));
  }
  writer.out_ << text;
  if (!writer.out_) {
    return absl::UnavailableError(
        absl::StrCat("cannot write ", writer.partial_path_.string()));
  }
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)),
      partial_path_(std::exchange(other.partial_path_, {})),
      out_(std::move(other.out_)),
      declared_bytes_(other.declared_bytes_),
      appended_bytes_(other.appended_bytes_) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (partial_path_.empty()) return;
  out_.close();
  std::error_code ignored;
  std::filesystem::remove(partial_path_, ignored);
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  appended_bytes_ += static_cast<int64_t>(bytes.size());
  KVASIR_CHECK(appended_bytes_ <= declared_bytes_);
  out_.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (!out_) {
    return absl::UnavailableError(
        absl::StrCat("cannot write ", partial_path_.string(), " at byte ",
                     appended_bytes_, " of ", declared_bytes_));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (appended_bytes_ != declared_bytes_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_.string(), ": ", appended_bytes_, " bytes of ",
                     declared_bytes_, " were written"));
  }
  out_.close();
  if (!out_) {
    return absl::UnavailableError(
        absl::StrCat("cannot write ", partial_path_.string()));
  }
  KVASIR_RETURN_IF_ERROR(Rename(partial_path_, path_));
  partial_path_.clear();
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const std::filesystem::path& path,
                                 const std::string& content) {
  const std::filesystem::path partial = PartialPath(path);
  {
    std::ofstream out(partial, std::ios::binary | std::ios::trunc);
    out << content;
    out.close();
    if (!out) {
      return absl::UnavailableError(
          absl::StrCat("cannot write ", partial.string()));
    }
  }
  return Rename(partial, path);
}

uint16_t ToBf16Bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace kvasir::compress
