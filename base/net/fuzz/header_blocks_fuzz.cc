// libFuzzer target: scans any bytes as if an HTTP/2 client had sent them. The
// result must not depend on how the bytes are divided into reads.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "base/net/header_blocks.h"

namespace {

constexpr uint64_t kWorkPerByte = 50;

void Parse(std::string_view text) {
  kvasir::base::HeaderBlockScanner whole;
  const bool accepted = whole.Scan({text.data(), text.size()});
  kvasir::base::HeaderBlockScanner in_pieces;
  bool still_accepted = true;
  for (size_t piece = 1; !text.empty(); piece = piece * 3 % 17) {
    const size_t bytes = std::min(piece, text.size());
    still_accepted = in_pieces.Scan({text.data(), bytes});
    text.remove_prefix(bytes);
  }
  KVASIR_CHECK(still_accepted == accepted);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
