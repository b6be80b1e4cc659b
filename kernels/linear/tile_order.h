// The order in which a product's tiles are computed on a GPU. C++17.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvasir::kernels {

// CTAs start in the order of x, then y. Tiles next to each other share columns
// of W, and CTAs that run together are to share x as well: kTogether row tiles
// take all columns, then the next ones do. So x comes from memory once, and W
// once for every kTogether row tiles; with all rows in one line x would come
// anew for every few columns where it is larger than the second-level cache.
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

  // Of CTA [x, y]; there is none where the column is not below column_tiles.
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
