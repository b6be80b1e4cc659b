#include "cache/images/page_image.h"

#include <zlib.h>

#include <cstring>
#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"

namespace kvasir::cache {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

ImageFormat Format() {
  return {.page_format_id = std::string(32, 'f'),
          .cache_id = std::string(32, 'c'),
          .numerics_id = "n",
          .shard = {.rank = 1, .size = 4},
          .page_tokens = 16,
          .page_bytes = {100, 30}};
}

ImageShape Shape() {
  return {.logical_tokens = 50,
          .prompt_tokens = 33,
          .groups = {{50, 0, 4, 1, 60}, {18, 2, 2, 0}}};
}

std::string Image(const ImageFormat& format = Format(),
                  const ImageShape& shape = Shape()) {
  std::string payload(static_cast<size_t>(ImagePayloadBytes(format, shape)),
                      '.');
  for (size_t i = 0; i < payload.size(); ++i) {
    payload[i] = static_cast<char>(i * 31);
  }
  return ImageHeader(format, shape, payload) + payload;
}

// The byte offsets of some fields in the header.
constexpr size_t kVersion = 8;
constexpr size_t kRank = 108;
constexpr size_t kGroups = 120;
constexpr size_t kLogical = 124;
constexpr size_t kPrompt = 132;
constexpr size_t kFirstGroup = 140;  // 36 bytes for each group
constexpr size_t kPayloadBytes = kFirstGroup + 2 * 36;
constexpr size_t kChecksum = kPayloadBytes + 8;

// Returns the image with one number changed and with a valid checksum.
std::string With(size_t offset, uint64_t value, size_t bytes) {
  std::string image = Image();
  std::memcpy(image.data() + offset, &value, bytes);
  uLong crc = crc32(0, reinterpret_cast<const Bytef*>(image.data()), kChecksum);
  const size_t payload = kChecksum + 4;
  crc = crc32(crc, reinterpret_cast<const Bytef*>(image.data()) + payload,
              static_cast<uInt>(image.size() - payload));
  std::memcpy(image.data() + kChecksum, &crc, 4);
  return image;
}

void ExpectRefused(const std::string& image, absl::StatusCode code,
                   const std::string& why) {
  EXPECT_THAT(ParseImage(image, Format()), StatusIs(code, HasSubstr(why)));
}

TEST(PageImageTest, ReadsBackTheImageThatWasWritten) {
  const std::string image = Image();
  KVASIR_ASSERT_OK_AND_ASSIGN(const ParsedImage parsed,
                              ParseImage(image, Format()));
  EXPECT_EQ(parsed.shape, Shape());
  EXPECT_EQ(parsed.payload.size(), 560u);
  EXPECT_EQ(parsed.payload, absl::string_view(image).substr(kChecksum + 4));
}

TEST(PageImageTest, AnImageOfASequenceWithoutTokensHasNoPages) {
  const ImageShape empty = {.groups = {{}, {}}};
  const std::string image = Image(Format(), empty);
  KVASIR_ASSERT_OK_AND_ASSIGN(const ParsedImage parsed,
                              ParseImage(image, Format()));
  EXPECT_EQ(parsed.shape, empty);
  EXPECT_TRUE(parsed.payload.empty());
}

TEST(PageImageTest, RefusesAnImageThatIsTruncatedAtAnyByte) {
  const std::string image = Image();
  for (size_t bytes = 0; bytes < image.size(); ++bytes) {
    EXPECT_THAT(
        ParseImage(absl::string_view(image).substr(0, bytes), Format()),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("image: ")))
        << bytes;
  }
  ExpectRefused(image + "x", absl::StatusCode::kInvalidArgument,
                "561 bytes of pages, but must have 560");
}

TEST(PageImageTest, RefusesAnImageWithAnyBitFlipped) {
  const std::string image = Image();
  for (size_t at = 0; at < image.size(); ++at) {
    for (const int bit : {1, 64}) {
      std::string other = image;
      other[at] = static_cast<char>(other[at] ^ bit);
      EXPECT_FALSE(ParseImage(other, Format()).ok()) << at;
    }
  }
  std::string other = image;
  other.back() ^= 1;
  ExpectRefused(other, absl::StatusCode::kDataLoss, "checksum");
}

TEST(PageImageTest, TheErrorNamesTheFieldInWhichAnImageDiffersFromThisRank) {
  const auto refused = [](const ImageFormat& format, const std::string& why) {
    ImageShape shape = Shape();
    shape.groups.resize(format.page_bytes.size());
    ExpectRefused(Image(format, shape), absl::StatusCode::kFailedPrecondition,
                  why);
  };
  ImageFormat format = Format();
  format.page_format_id = std::string(32, 'e');
  refused(format, "page format is eeee");
  format = Format();
  format.numerics_id = "m";
  refused(format, "numerics_id is m, but this process needs n");
  format = Format();
  format.cache_id[31] = 'd';
  refused(format,
          "cache_id is cccccccccccccccccccccccccccccccd, but this process "
          "needs ccc");
  format = Format();
  format.shard = {.rank = 0, .size = 4};
  refused(format, "rank is 0, but this process needs 1");
  format.shard = {.rank = 1, .size = 2};
  refused(format, "number of ranks is 2, but this process needs 4");
  format = Format();
  format.page_bytes.pop_back();
  refused(format, "number of page groups is 1, but this process needs 2");
  format = Format();
  format.page_bytes[1] = 31;
  refused(
      format,
      "size in bytes of a page of group 1 is 31, but this process needs 30");
  format = Format();
  format.page_tokens = 32;
  refused(format,
          "number of tokens of a page is 32, but this process needs 16");
  ExpectRefused(With(kVersion, 2, 4), absl::StatusCode::kFailedPrecondition,
                "version is 2, but this process needs 3");
  ExpectRefused(With(0, 'x', 1), absl::StatusCode::kInvalidArgument,
                "its first bytes are not those of a KV cache image");
  ExpectRefused(With(kRank, ~0u, 4), absl::StatusCode::kFailedPrecondition,
                "rank is 4294967295, but this process needs 1");
  ExpectRefused(With(kGroups, 1u << 31, 4),
                absl::StatusCode::kFailedPrecondition,
                "number of page groups is 2147483648");
}

TEST(PageImageTest, TheErrorNamesTheFieldOfAnImageWithInconsistentSizes) {
  const auto refused = [](const std::string& image, const std::string& why) {
    ExpectRefused(image, absl::StatusCode::kInvalidArgument, why);
  };
  refused(With(kLogical, ~0ull, 8), "number of logical tokens is -1");
  refused(With(kLogical, 1ull << 40, 8), "logical tokens is 1099511627776");
  refused(With(kPrompt, 1ull << 63, 8),
          "number of prompt tokens is -922337203");
  refused(With(kFirstGroup + 28, ~0ull, 8),
          "group 0: the number of slots that stay is -1");
  refused(With(kLogical, 49, 8),
          "group 0: the number of physical tokens is 50, but must be 0 to 49");
  refused(With(kFirstGroup + 8, 1ull << 63, 8),
          "group 0: the number of physical tokens is -9223372036854775808");
  refused(With(kFirstGroup + 16, 1, 4),
          "group 0: the index of the first page is 1, but must be 0 to 0");
  refused(With(kFirstGroup + 20, 5, 4),
          "group 0: the number of pages for 50 slots is 5, but must be 4");
  refused(With(kFirstGroup + 24, ~0u, 4),
          "group 0: the number of side pages is 4294967295");
  refused(With(kFirstGroup + 24, 1u << 29, 4),
          "group 0: it has 536870916 pages of 100 bytes, but the image has "
          "only");
  refused(With(kFirstGroup + 24, 2, 4),
          "its header states 560 bytes of pages, but its page counts give 660");
  refused(With(kPayloadBytes, 561, 8),
          "its header states 561 bytes of pages, but its page counts give 560");
}

}  // namespace
}  // namespace kvasir::cache
