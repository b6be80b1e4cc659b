// libFuzzer target: combines any bytes as the weight tiles of two ranks.
#include <cstdint>
#include <string>

#include "model/checkpoint/weight_tiles.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t first = data[0] % size;
  const std::string ranks[] = {text.substr(0, first), text.substr(first)};
  kvasir::model::CombineWeightTiles(ranks).IgnoreError();
  // Two equal texts pass the comparison of ranks, so the later code runs, too.
  const std::string twice[] = {text, text};
  kvasir::model::CombineWeightTiles(twice).IgnoreError();
  return 0;
}
