#include "compress/artifact/safetensors_writer.h"

#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

std::string HeaderText(const std::vector<TensorEntry>& entries) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  int64_t offset = 0;
  for (const TensorEntry& entry : entries) {
    const int64_t end = offset + TensorBytes(entry);
    header[entry.name] = {{"dtype", model::TensorTypeName(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  return header.dump();
}

// The format requires that the data begin at a multiple of 8 bytes.
void PadHeader(std::string& text) {
  text.append((8 - text.size() % 8) % 8, ' ');
}

// Returns the header with its length in front.
std::string WithLength(const std::string& text) {
  const auto length = static_cast<uint64_t>(text.size());
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) {
    bytes.push_back(static_cast<char>(length >> shift));
  }
  return bytes + text;
}

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

int64_t TensorBytes(const TensorEntry& entry) {
  int64_t bytes = model::TensorTypeBits(entry.dtype) / 8;
  for (const int64_t size : entry.shape) bytes *= size;
  return bytes;
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    std::filesystem::path path, const std::vector<TensorEntry>& entries) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<NewFile> file, NewFile::Create(path));
  SafetensorsWriter writer(std::move(path), std::move(file));
  for (const TensorEntry& entry : entries) {
    writer.declared_bytes_ += TensorBytes(entry);
  }
  std::string text = HeaderText(entries);
  PadHeader(text);
  KVASIR_RETURN_IF_ERROR(writer.file_->Append(BytesOf(WithLength(text))));
  return writer;
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::CreateOpen(
    std::filesystem::path path, int64_t header_bytes) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<NewFile> file, NewFile::Create(path));
  SafetensorsWriter writer(std::move(path), std::move(file));
  std::string room(static_cast<size_t>(header_bytes) + HeaderText({}).size(),
                   ' ');
  PadHeader(room);
  writer.header_room_bytes_ = static_cast<int64_t>(room.size());
  KVASIR_RETURN_IF_ERROR(writer.file_->Append(BytesOf(WithLength(room))));
  return writer;
}

int64_t SafetensorsWriter::HeaderBytes(const TensorEntry& entry) {
  // Besides its name, a header entry takes at most kFields characters for its
  // type, braces and keys. Each number takes at most kNumber characters: 20
  // digits and a comma.
  constexpr size_t kFields = 64;
  constexpr size_t kNumber = 21;
  return static_cast<int64_t>(nlohmann::json(entry.name).dump().size() +
                              kFields + kNumber * (2 + entry.shape.size()));
}

void SafetensorsWriter::Declare(TensorEntry entry) {
  KVASIR_CHECK(header_room_bytes_ > 0 && appended_bytes_ == declared_bytes_);
  declared_bytes_ += TensorBytes(entry);
  entries_.push_back(std::move(entry));
}

absl::Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  appended_bytes_ += static_cast<int64_t>(bytes.size());
  KVASIR_CHECK(appended_bytes_ <= declared_bytes_);
  return file_->Append(bytes);
}

absl::Status SafetensorsWriter::Finish() {
  if (appended_bytes_ != declared_bytes_) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_.string(), ": the header declares tensors of ", declared_bytes_,
        " bytes, but only ", appended_bytes_, " bytes were written"));
  }
  if (header_room_bytes_ > 0) {
    std::string text = HeaderText(entries_);
    if (static_cast<int64_t>(text.size()) > header_room_bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          path_.string(), ": the header has ", text.size(), " bytes, but only ",
          header_room_bytes_, " bytes were reserved for it"));
    }
    text.resize(static_cast<size_t>(header_room_bytes_), ' ');
    KVASIR_RETURN_IF_ERROR(file_->Rewrite(0, BytesOf(WithLength(text))));
  }
  return file_->Finish();
}

uint16_t ToBf16Bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace kvasir::compress
