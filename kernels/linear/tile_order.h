// The order in which the tiles of a matrix product are computed on a GPU.
// C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvasir::kernels {

// CTAs start in the order of their index x, then y. CTAs that run at the same
// time should read the same columns of W and the same rows of the input. So all
// columns of kTogether tiles of rows are computed before the next kTogether
// tiles of rows begin. The input is then read from memory once, and W once per
// kTogether tiles.
struct TileOrder {
  static constexpr int32_t kTogether = 16;

  int32_t row_tiles = 0;
  int32_t column_tiles = 0;

  KVASIR_HOST_DEVICE int64_t grid_x() const {
    return int64_t{row_tiles < kTogether ? row_tiles : kTogether} *
           column_tiles;
  }
  KVASIR_HOST_DEVICE int64_t grid_y() const {
    return (int64_t{row_tiles} + kTogether - 1) / kTogether;
  }

  // Returns the tile of CTA [x, y]. The CTA has no tile if the returned column
  // is not below column_tiles.
  struct Tile {
    int32_t row;
    int32_t column;
  };
  KVASIR_HOST_DEVICE Tile At(uint32_t x, uint32_t y) const {
    const auto at = static_cast<int32_t>(x);
    const auto first = static_cast<int32_t>(y) * kTogether;
    const int32_t left = row_tiles - first;
    const int32_t together = left < kTogether ? left : kTogether;
    return {first + at % together, at / together};
  }
};

}  // namespace kvasir::kernels
