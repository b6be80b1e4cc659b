#include "kernels/linear/tile_order.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace kvasir::kernels {
namespace {

using ::testing::Each;

std::vector<TileOrder::Tile> TilesOf(const TileOrder& order) {
  std::vector<TileOrder::Tile> tiles;
  for (int64_t y = 0; y < order.grid_y(); ++y) {
    for (int64_t x = 0; x < order.grid_x(); ++x) {
      const TileOrder::Tile tile =
          order.At(static_cast<uint32_t>(x), static_cast<uint32_t>(y));
      if (tile.column < order.column_tiles) tiles.push_back(tile);
    }
  }
  return tiles;
}

TEST(TileOrderTest, EveryOutputTileIsComputedExactlyOnce) {
  for (const int32_t rows : {1, 2, 15, 16, 17, 31, 32, 50}) {
    for (const int32_t columns : {1, 3, 40}) {
      const TileOrder order = {rows, columns};
      std::vector<int> count(static_cast<size_t>(rows * columns));
      for (const TileOrder::Tile& tile : TilesOf(order)) {
        ASSERT_GE(tile.row, 0);
        ASSERT_LT(tile.row, rows);
        ++count[static_cast<size_t>(tile.row * columns + tile.column)];
      }
      EXPECT_THAT(count, Each(1)) << rows << " x " << columns;
    }
  }
}

// The product has 8192 rows and 28672 columns, in tiles of 128 x 128. 264 CTAs
// run at the same time.
TEST(TileOrderTest, CtasThatRunAtTheSameTimeShareRowsAndColumns) {
  const TileOrder order = {64, 224};
  const auto tiles = TilesOf(order);
  ASSERT_EQ(tiles.size(), 64u * 224u);
  for (size_t first = 0; first < tiles.size(); first += 264) {
    std::set<int32_t> rows, columns;
    for (size_t i = first; i < std::min(first + 264, tiles.size()); ++i) {
      rows.insert(tiles[i].row);
      columns.insert(tiles[i].column);
    }
    // At the boundary between two groups, the CTAs read the rows of both
    // groups, 16 tiles each.
    EXPECT_LE(rows.size(), 32u);
    EXPECT_LE(columns.size(), 18u);
  }
  // Rows of x are not read again after another group has begun.
  int32_t group = 0;
  for (const TileOrder::Tile& tile : tiles) {
    EXPECT_GE(tile.row / TileOrder::kTogether, group);
    group = tile.row / TileOrder::kTogether;
  }
}

}  // namespace
}  // namespace kvasir::kernels
