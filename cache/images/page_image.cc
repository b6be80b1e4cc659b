#include "cache/images/page_image.h"

#include <zlib.h>

#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "cache/layout/cache_id.h"

namespace kvasir::cache {
namespace {

// The header's numbers are little-endian on every machine. Images are stored
// and sent to other processes, so adding or removing a field needs a new
// version.
constexpr absl::string_view kMagic = "KVASIRPG";
constexpr int64_t kVersion = 3;
constexpr size_t kIdBytes = 32;
constexpr size_t kChecksumBytes = 4;

class Writer {
 public:
  void Add(int64_t number, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      out_.push_back(
          static_cast<char>(static_cast<uint64_t>(number) >> (8 * i)));
    }
  }
  void AddText(absl::string_view text) { absl::StrAppend(&out_, text); }
  std::string& out() { return out_; }

 private:
  std::string out_;
};

// Reads the header's fields in order. After the first missing field, all
// further fields are 0 and `status` is an error.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : all_(bytes), left_(bytes) {}

  absl::string_view Text(size_t bytes) {
    if (!Has(bytes)) return {};
    const absl::string_view text = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return text;
  }
  // A number that does not fit into int64 becomes negative, and no field allows
  // negative numbers.
  int64_t Number(size_t bytes) {
    uint64_t number = 0;
    const absl::string_view text = Text(bytes);
    for (size_t i = 0; i < text.size(); ++i) {
      number |= uint64_t{static_cast<uint8_t>(text[i])} << (8 * i);
    }
    return static_cast<int64_t>(number);
  }
  absl::Status status() const {
    if (sound_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "KV cache image: the data ends inside its header, at byte ",
        all_.size()));
  }
  absl::string_view left() const { return left_; }
  // All bytes that have been read so far.
  absl::string_view read() const {
    return all_.substr(0, all_.size() - left_.size());
  }

 private:
  bool Has(size_t bytes) {
    sound_ = sound_ && left_.size() >= bytes;
    return sound_;
  }

  const absl::string_view all_;
  absl::string_view left_;
  bool sound_ = true;
};

uint32_t Checksum(absl::string_view header, absl::string_view payload) {
  uLong crc = crc32_z(0, nullptr, 0);
  for (const absl::string_view part : {header, payload}) {
    crc =
        crc32_z(crc, reinterpret_cast<const Bytef*>(part.data()), part.size());
  }
  return static_cast<uint32_t>(crc);
}

template <typename... What>
absl::Status InvalidImage(const What&... what) {
  return absl::InvalidArgumentError(absl::StrCat("KV cache image: ", what...));
}

// Returns FAILED_PRECONDITION if the image's value `have` differs from this
// process's value `want`.
absl::Status CheckSame(absl::string_view field, int64_t have, int64_t want) {
  if (have == want) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("KV cache image: ", field, " is ", have,
                   ", but this process needs ", want));
}
absl::Status CheckSame(absl::string_view field, absl::string_view have,
                       absl::string_view want) {
  if (have == want) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("KV cache image: ", field, " is ", absl::CHexEscape(have),
                   ", but this process needs ", absl::CHexEscape(want)));
}

// Pads an id of at most kIdBytes bytes with zeros.
std::string Padded(std::string id) {
  id.resize(kIdBytes);
  return id;
}
absl::string_view WithoutPadding(absl::string_view id) {
  return id.substr(0, id.find_last_not_of('\0') + 1);
}

absl::Status CheckIdentity(const ImageFormat& format, Reader* reader) {
  const std::string format_id(reader->Text(kIdBytes));
  const std::string cache_id(reader->Text(kIdBytes));
  const absl::string_view numerics_id = WithoutPadding(reader->Text(kIdBytes));
  const int64_t rank = reader->Number(4);
  const int64_t size = reader->Number(4);
  const int64_t page_tokens = reader->Number(4);
  const int64_t num_groups = reader->Number(4);
  KVASIR_RETURN_IF_ERROR(reader->status());
  // Compares the rank before the page format: the pages of another rank also
  // differ in format, but the error should name the rank.
  KVASIR_RETURN_IF_ERROR(CheckSame("number of ranks", size, format.shard.size));
  KVASIR_RETURN_IF_ERROR(CheckSame("rank", rank, format.shard.rank));
  KVASIR_RETURN_IF_ERROR(CheckSame("cache_id", cache_id, format.cache_id));
  KVASIR_RETURN_IF_ERROR(
      CheckSame("numerics_id", numerics_id, format.numerics_id));
  KVASIR_RETURN_IF_ERROR(
      CheckSame("number of tokens of a page", page_tokens, format.page_tokens));
  KVASIR_RETURN_IF_ERROR(
      CheckSame("page format", format_id, format.page_format_id));
  return CheckSame("number of page groups", num_groups,
                   static_cast<int64_t>(format.page_bytes.size()));
}

// Checks the numbers of one page group. If it succeeds, tokens and pages are at
// most kMaxSequenceTokens.
absl::Status CheckGroup(size_t index, int64_t logical_tokens,
                        int64_t page_tokens, const ImageGroupShape& group) {
  const auto check = [&](absl::string_view field, int64_t value, int64_t most) {
    if (value >= 0 && value <= most) return absl::OkStatus();
    return InvalidImage("page group ", index, ": ", field, " is ", value,
                        ", but must be 0 to ", most);
  };
  KVASIR_RETURN_IF_ERROR(check("the number of physical tokens",
                               group.physical_tokens, logical_tokens));
  KVASIR_RETURN_IF_ERROR(
      check("the index of the first page", group.first_page,
            (logical_tokens - group.physical_tokens) / page_tokens));
  KVASIR_RETURN_IF_ERROR(check("the number of side pages", group.num_side_pages,
                               kMaxSequenceTokens));
  KVASIR_RETURN_IF_ERROR(check("the number of slots that stay",
                               group.kept_slots,
                               std::numeric_limits<int64_t>::max()));
  const int64_t pages = (group.physical_tokens + page_tokens - 1) / page_tokens;
  if (group.num_pages == pages) return absl::OkStatus();
  return InvalidImage("page group ", index, ": the number of pages for ",
                      group.physical_tokens, " slots is ", group.num_pages,
                      ", but must be ", pages);
}

}  // namespace

ImageFormat ImageFormatOf(const PageLayout& layout, std::string cache_id,
                          std::string numerics_id) {
  ImageFormat format = {.page_format_id = PageFormatId(layout),
                        .cache_id = std::move(cache_id),
                        .numerics_id = std::move(numerics_id),
                        .shard = layout.shard(),
                        .page_tokens = layout.page_tokens()};
  for (const PageGroupLayout& group : layout.page_groups()) {
    format.page_bytes.push_back(group.page_bytes);
  }
  return format;
}

int64_t ImagePayloadBytes(const ImageFormat& format, const ImageShape& shape) {
  KVASIR_CHECK(shape.groups.size() == format.page_bytes.size());
  int64_t bytes = 0;
  for (size_t g = 0; g < shape.groups.size(); ++g) {
    bytes += (shape.groups[g].num_pages + shape.groups[g].num_side_pages) *
             format.page_bytes[g];
  }
  return bytes;
}

std::string ImageHeader(const ImageFormat& format, const ImageShape& shape,
                        absl::string_view payload) {
  KVASIR_CHECK(format.page_format_id.size() == kIdBytes &&
               format.cache_id.size() == kIdBytes &&
               format.numerics_id.size() <= kIdBytes);
  KVASIR_CHECK(ImagePayloadBytes(format, shape) ==
               static_cast<int64_t>(payload.size()));
  Writer header;
  header.AddText(kMagic);
  header.Add(kVersion, 4);
  header.AddText(format.page_format_id);
  header.AddText(format.cache_id);
  header.AddText(Padded(format.numerics_id));
  header.Add(format.shard.rank, 4);
  header.Add(format.shard.size, 4);
  header.Add(format.page_tokens, 4);
  header.Add(static_cast<int64_t>(shape.groups.size()), 4);
  header.Add(shape.logical_tokens, 8);
  header.Add(shape.prompt_tokens, 8);
  for (size_t g = 0; g < shape.groups.size(); ++g) {
    header.Add(format.page_bytes[g], 8);
    header.Add(shape.groups[g].physical_tokens, 8);
    header.Add(shape.groups[g].first_page, 4);
    header.Add(shape.groups[g].num_pages, 4);
    header.Add(shape.groups[g].num_side_pages, 4);
    header.Add(shape.groups[g].kept_slots, 8);
  }
  header.Add(static_cast<int64_t>(payload.size()), 8);
  header.Add(Checksum(header.out(), payload), kChecksumBytes);
  return std::move(header.out());
}

absl::StatusOr<ParsedImage> ParseImage(absl::string_view image,
                                       const ImageFormat& format) {
  Reader reader(image);
  const absl::string_view magic = reader.Text(kMagic.size());
  KVASIR_RETURN_IF_ERROR(reader.status());
  if (magic != kMagic)
    return InvalidImage("its first bytes are not those of a KV cache image");
  const int64_t version = reader.Number(4);
  KVASIR_RETURN_IF_ERROR(reader.status());
  KVASIR_RETURN_IF_ERROR(CheckSame("version", version, kVersion));
  KVASIR_RETURN_IF_ERROR(CheckIdentity(format, &reader));
  ParsedImage parsed;
  parsed.shape.logical_tokens = reader.Number(8);
  parsed.shape.prompt_tokens = reader.Number(8);
  KVASIR_RETURN_IF_ERROR(reader.status());
  for (const auto& [field, tokens] :
       {std::pair("logical tokens", parsed.shape.logical_tokens),
        std::pair("prompt tokens", parsed.shape.prompt_tokens)}) {
    if (tokens >= 0 && tokens <= kMaxSequenceTokens) continue;
    return InvalidImage("the number of ", field, " is ", tokens,
                        ", but must be 0 to ", kMaxSequenceTokens);
  }
  int64_t payload_bytes = 0;
  const auto most = static_cast<int64_t>(image.size());
  for (size_t g = 0; g < format.page_bytes.size(); ++g) {
    const int64_t page_bytes = reader.Number(8);
    ImageGroupShape& group = parsed.shape.groups.emplace_back();
    group.physical_tokens = reader.Number(8);
    group.first_page = reader.Number(4);
    group.num_pages = reader.Number(4);
    group.num_side_pages = reader.Number(4);
    group.kept_slots = reader.Number(8);
    KVASIR_RETURN_IF_ERROR(reader.status());
    KVASIR_RETURN_IF_ERROR(
        CheckSame(absl::StrCat("size in bytes of a page of group ", g),
                  page_bytes, format.page_bytes[g]));
    KVASIR_RETURN_IF_ERROR(
        CheckGroup(g, parsed.shape.logical_tokens, format.page_tokens, group));
    // Divides instead of multiplying, because the product might not fit into 64
    // bits.
    const int64_t pages = group.num_pages + group.num_side_pages;
    if (pages > (most - payload_bytes) / page_bytes) {
      return InvalidImage("page group ", g, ": it has ", pages, " pages of ",
                          page_bytes, " bytes, but the image has only ",
                          most - payload_bytes, " bytes for them");
    }
    payload_bytes += pages * page_bytes;
  }
  const int64_t stated = reader.Number(8);
  const absl::string_view header = reader.read();
  const auto checksum = static_cast<uint32_t>(reader.Number(kChecksumBytes));
  KVASIR_RETURN_IF_ERROR(reader.status());
  if (stated != payload_bytes) {
    return InvalidImage("its header states ", stated,
                        " bytes of pages, but its page counts give ",
                        payload_bytes);
  }
  parsed.payload = reader.left();
  if (static_cast<int64_t>(parsed.payload.size()) != payload_bytes) {
    return InvalidImage("it has ", parsed.payload.size(),
                        " bytes of pages, but must have ", payload_bytes);
  }
  if (const uint32_t have = Checksum(header, parsed.payload);
      have != checksum) {
    return absl::DataLossError(
        absl::StrCat("KV cache image: the checksum of its data is ", have,
                     ", but its header states ", checksum));
  }
  return parsed;
}

}  // namespace kvasir::cache
