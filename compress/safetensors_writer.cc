#include "compress/safetensors_writer.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

const char* DtypeName(StoredDtype dtype) {
  switch (dtype) {
    case StoredDtype::kF32:
      return "F32";
    case StoredDtype::kBf16:
      return "BF16";
    case StoredDtype::kF16:
      return "F16";
    case StoredDtype::kF64:
      return "F64";
    case StoredDtype::kU8:
      return "U8";
  }
  return "";
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

std::string HeaderText(const std::vector<TensorEntry>& entries) {
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
  return header.dump();
}

// The format asks for data that begins at a multiple of 8 bytes.
void PadHeader(std::string& text) {
  text.append((8 - text.size() % 8) % 8, ' ');
}

// A stream does not say why it failed; the system call behind it has.
absl::Status WriteError(const std::filesystem::path& path,
                        const std::string& place) {
  const int reason = errno;
  return absl::UnavailableError(absl::StrCat(
      "cannot write ", path.string(), " (", place, ")",
      reason == 0 ? "" : absl::StrCat(": ", std::strerror(reason))));
}

}  // namespace

int64_t ElementBytes(StoredDtype dtype) {
  switch (dtype) {
    case StoredDtype::kF32:
      return 4;
    case StoredDtype::kBf16:
    case StoredDtype::kF16:
      return 2;
    case StoredDtype::kF64:
      return 8;
    case StoredDtype::kU8:
      return 1;
  }
  return 0;
}

int64_t TensorBytes(const TensorEntry& entry) {
  int64_t bytes = ElementBytes(entry.dtype);
  for (const int64_t size : entry.shape) bytes *= size;
  return bytes;
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path)
    : path_(std::move(path)), partial_path_(PartialPath(path_)) {}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    std::filesystem::path path, const std::vector<TensorEntry>& entries) {
  SafetensorsWriter writer(std::move(path));
  for (const TensorEntry& entry : entries) {
    writer.declared_bytes_ += TensorBytes(entry);
  }
  writer.out_.open(writer.partial_path_, std::ios::binary | std::ios::trunc);
  std::string text = HeaderText(entries);
  PadHeader(text);
  KVASIR_RETURN_IF_ERROR(writer.WriteHeader(text));
  return writer;
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::CreateOpen(
    std::filesystem::path path, int64_t header_bytes) {
  SafetensorsWriter writer(std::move(path));
  std::string room(static_cast<size_t>(header_bytes) + HeaderText({}).size(),
                   ' ');
  PadHeader(room);
  writer.header_room_bytes_ = static_cast<int64_t>(room.size());
  writer.out_.open(writer.partial_path_, std::ios::binary | std::ios::trunc);
  KVASIR_RETURN_IF_ERROR(writer.WriteHeader(room));
  return writer;
}

int64_t SafetensorsWriter::HeaderBytes(const TensorEntry& entry) {
  // Type, braces and keys; up to 20 digits and a comma for each number.
  constexpr size_t kFields = 64;
  constexpr size_t kNumber = 21;
  return static_cast<int64_t>(nlohmann::json(entry.name).dump().size() +
                              kFields + kNumber * (2 + entry.shape.size()));
}

absl::Status SafetensorsWriter::WriteHeader(const std::string& text) {
  const auto length = static_cast<uint64_t>(text.size());
  for (int shift = 0; shift < 64; shift += 8) {
    out_.put(static_cast<char>(length >> shift));
  }
  out_ << text;
  if (!out_) return WriteError(partial_path_, "the header");
  return absl::OkStatus();
}

void SafetensorsWriter::Declare(TensorEntry entry) {
  KVASIR_CHECK(header_room_bytes_ > 0 && appended_bytes_ == declared_bytes_);
  declared_bytes_ += TensorBytes(entry);
  entries_.push_back(std::move(entry));
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)),
      partial_path_(std::exchange(other.partial_path_, {})),
      out_(std::move(other.out_)),
      declared_bytes_(other.declared_bytes_),
      appended_bytes_(other.appended_bytes_),
      header_room_bytes_(other.header_room_bytes_),
      entries_(std::move(other.entries_)) {}

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
    return WriteError(partial_path_, absl::StrCat("byte ", appended_bytes_,
                                                  " of ", declared_bytes_));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (appended_bytes_ != declared_bytes_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_.string(), ": ", appended_bytes_, " bytes of ",
                     declared_bytes_, " were written"));
  }
  if (header_room_bytes_ > 0) {
    std::string text = HeaderText(entries_);
    if (static_cast<int64_t>(text.size()) > header_room_bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(path_.string(), ": a header of ", text.size(),
                       " bytes, room was left for ", header_room_bytes_));
    }
    text.resize(static_cast<size_t>(header_room_bytes_), ' ');
    out_.seekp(0);
    KVASIR_RETURN_IF_ERROR(WriteHeader(text));
  }
  out_.close();
  if (!out_) return WriteError(partial_path_, "the end");
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
    if (!out) return WriteError(partial, "the end");
  }
  return Rename(partial, path);
}

uint16_t ToBf16Bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace kvasir::compress
