// libFuzzer target: parses any bytes as a page image, because images are
// untrusted. The result must be an error, or a shape whose pages have as many
// bytes as the payload.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "cache/images/page_image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using kvasir::cache::ImageFormat;
  const ImageFormat format = {.page_format_id = std::string(32, 'f'),
                              .cache_id = std::string(32, 'c'),
                              .numerics_id = "n",
                              .shard = {.rank = 1, .size = 4},
                              .page_tokens = 16,
                              .page_bytes = {100, 30}};
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto image = kvasir::cache::ParseImage(bytes, format);
  if (!image.ok()) return 0;
  KVASIR_CHECK(kvasir::cache::ImagePayloadBytes(format, image->shape) ==
               static_cast<int64_t>(image->payload.size()));
  // If the image is valid, writing it again must give the same bytes.
  const std::string header =
      kvasir::cache::ImageHeader(format, image->shape, image->payload);
  KVASIR_CHECK(header + std::string(image->payload) == bytes);
  return 0;
}
