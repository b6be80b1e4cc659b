// A sequence's cache as bytes, to be stored or sent elsewhere. A header
// describes the bytes. The pages follow by page group, token pages before side
// pages; each page is the bytes of all layers of its group. Everything that
// such bytes state is checked before it is used.
//
//   | magic, version | format, cache id, numerics id, rank | lengths, page
//   counts | checksum | | pages of group 0 | side pages of group 0 | pages of
//   group 1 | ...
//
// Pure: it names no page of a pool and reads no page's content.
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

// The properties that an image must share with the reader. Two ranks with equal
// formats can read each other's images.
struct ImageFormat {
  std::string page_format_id;  // PageFormatId
  std::string cache_id;        // CacheId
  // Identifies the arithmetic that continues with the pages, in at most 32
  // bytes. Other arithmetic gives other bits.
  std::string numerics_id;
  plan::TpShard shard;
  int64_t page_tokens = 0;          // P
  std::vector<int64_t> page_bytes;  // bytes of one page id, by PageGroupId
};
ImageFormat ImageFormatOf(const PageLayout& layout, std::string cache_id,
                          std::string numerics_id);

// The total size in bytes of the pages in an image of this shape.
int64_t ImagePayloadBytes(const ImageFormat& format, const ImageShape& shape);

// The header of an image. The image is the header followed by `payload`. CHECKs
// that the payload has as many bytes as the shape says, and that the first two
// ids have 32 characters.
std::string ImageHeader(const ImageFormat& format, const ImageShape& shape,
                        absl::string_view payload);

struct ParsedImage {
  ImageShape shape;
  absl::string_view payload;  // points into the parsed bytes
};
// Checks and splits an image. Its result may be given to
// KvCache::TakeImagePages and to the executor. Errors name the field, its value
// and the value wanted:
//   INVALID_ARGUMENT     not an image, cut, longer than it says, or with
//                        sizes that contradict each other
//   FAILED_PRECONDITION  another version, page format, cache, arithmetic or
//                        rank
//   DATA_LOSS            the bytes are not those that were written
absl::StatusOr<ParsedImage> ParseImage(absl::string_view image,
                                       const ImageFormat& format);

}  // namespace kvasir::cache
