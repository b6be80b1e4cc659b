// Converts a sequence's cache to and from bytes that can be stored or sent. A
// header describes the bytes. The pages follow by page group, token pages
// before side pages; each page is the bytes of all layers of its group. Parsing
// checks every field before it is used.
//
//   | magic, version | format, cache id, numerics id, rank | lengths, page
//     counts | checksum |
//   | pages of group 0 | side pages of group 0 | pages of group 1 | ...
//
// Pure functions without a page pool. The checksum covers the pages' bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/images/sequence_image.h"
#include "cache/layout/layout.h"
#include "plan/tp_shard.h"

namespace kvasir::cache {

// The properties of an image that must equal those of the rank that reads it.
// Ranks with equal formats can read each other's images.
struct ImageFormat {
  std::string page_format_id;  // as PageFormatId returns it
  std::string cache_id;        // as CacheId returns it
  // Identifies, in at most 32 bytes, the arithmetic that computes the pages.
  // Another arithmetic would give the sequence's next tokens latents with
  // other bits.
  std::string numerics_id;
  plan::TpShard shard;
  int64_t page_tokens = 0;
  // the size of a page, summed over the layers of its group; indexed
  // by PageGroupId
  std::vector<int64_t> page_bytes;
};
ImageFormat ImageFormatOf(const PageLayout& layout, std::string cache_id,
                          std::string numerics_id);

// The total size in bytes of the pages in an image of this shape.
int64_t ImagePayloadBytes(const ImageFormat& format, const ImageShape& shape);

// Returns the header of an image; the complete image is this header followed by
// `payload`. CHECKs that the payload has the size that the shape requires, and
// that page_format_id and cache_id have 32 characters.
std::string ImageHeader(const ImageFormat& format, const ImageShape& shape,
                        absl::string_view payload);

struct ParsedImage {
  ImageShape shape;
  absl::string_view payload;  // points into the parsed bytes
};
// Checks and splits an image. Its result may be given to
// KvCache::TakeImagePages and to the executor. An error about a field names it,
// its value and the value wanted:
//   INVALID_ARGUMENT     not an image, cut off, longer than its header
//                        says, or with sizes that contradict each other
//   FAILED_PRECONDITION  another version, page format, cache, arithmetic or
//                        rank
//   DATA_LOSS            the checksum shows that bytes have changed
absl::StatusOr<ParsedImage> ParseImage(absl::string_view image,
                                       const ImageFormat& format);

}  // namespace kvasir::cache
