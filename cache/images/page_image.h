// A sequence's cache as bytes, to be kept or sent elsewhere: a header that says
// what they are, then its pages, by page group, tokens' before side pages, each
// over the group's layers. Whatever such bytes say is checked before it is
// used.
//
//   | magic, version | format, cache id, numerics id, rank | lengths, page
//   counts | checksum | | pages of group 0 | side pages of group 0 | pages of
//   group 1 | ...
//
// Pure: names no page of a pool and reads no page's content.
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

// Whose images may be taken: two ranks of equal formats read each other's.
struct ImageFormat {
  std::string page_format_id;  // PageFormatId
  std::string cache_id;        // CacheId
  // Of the arithmetic that goes on with it, at most 32 bytes: another one gives
  // other bits.
  std::string numerics_id;
  plan::TpShard shard;
  int64_t page_tokens = 0;          // P
  std::vector<int64_t> page_bytes;  // of one page id, by PageGroupId
};
ImageFormat ImageFormatOf(const PageLayout& layout, std::string cache_id,
                          std::string numerics_id);

// Bytes of the pages of such an image.
int64_t ImagePayloadBytes(const ImageFormat& format, const ImageShape& shape);

// The header of an image: the image is it and `payload` behind it. CHECKs that
// the payload has as many bytes as the shape says, and the first two ids 32
// characters.
std::string ImageHeader(const ImageFormat& format, const ImageShape& shape,
                        absl::string_view payload);

struct ParsedImage {
  ImageShape shape;
  absl::string_view payload;  // into what was parsed
};
// What KvCache::TakeImagePages and the executor may be given. Errors name the
// field, its value and what is wanted:
//   INVALID_ARGUMENT     no image, cut, longer than it says, sizes that lie
//   FAILED_PRECONDITION  of another version, page format, cache,
//                        arithmetic or rank
//   DATA_LOSS            the bytes are not those that were written
absl::StatusOr<ParsedImage> ParseImage(absl::string_view image,
                                       const ImageFormat& format);

}  // namespace kvasir::cache
