#include "worker/weights/weight_reads.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "model/checkpoint/fingerprint.h"

namespace kvasir::worker {
namespace {

struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

// The rank's share of `count` rows or columns, as a range of tiles. A tile has
// `tile` rows or columns.
Span ShareOf(int64_t count, int64_t tile, plan::TpShard shard) {
  const int64_t tiles = (count + tile - 1) / tile;
  return {tiles * shard.rank / shard.size,
          tiles * (shard.rank + 1) / shard.size};
}

// The range of columns that the sinks of `read` take.
Span ColumnsOf(const TensorRead& read, int64_t columns) {
  Span taken = {columns, 0};
  for (const WeightSink& sink : read.sinks) {
    const bool packed = sink.kind == WeightSink::Kind::kPack ||
                        sink.kind == WeightSink::Kind::kPackRows;
    if (!packed) return {0, columns};
    const int64_t count =
        sink.kind == WeightSink::Kind::kPack ? sink.shape.k : sink.shape.n;
    taken.begin = std::min(taken.begin, sink.first_column);
    taken.end = std::max(taken.end, sink.first_column + count);
  }
  return taken.begin < taken.end ? taken : Span{0, columns};
}

}  // namespace

std::vector<ReadRange> RangesOf(const TensorRead& read, const MatrixSize& size,
                                kernels::DType dtype, plan::TpShard shard) {
  if (shard.size == 1 || size.rows == 0 || size.columns == 0) {
    return {ReadRange::All(size)};
  }
  const int64_t tile_columns =
      model::kTileRowBytes / kernels::DTypeBytes(dtype);
  const Span columns = ColumnsOf(read, size.columns);
  if (columns.begin > 0 || columns.end < size.columns) {
    const Span share = ShareOf(size.columns, tile_columns, shard);
    int64_t begin = columns.begin / tile_columns;
    int64_t end = (columns.end + tile_columns - 1) / tile_columns;
    if (share.begin < share.end) {
      begin = std::min(begin, share.begin);
      end = std::max(end, share.end);
    }
    ReadRange range = ReadRange::All(size);
    range.first_column = begin * tile_columns;
    range.num_columns =
        std::min(end * tile_columns, size.columns) - range.first_column;
    return {range};
  }
  const Span share = ShareOf(size.rows, model::kTileRows, shard);
  std::vector<bool> tiles(static_cast<size_t>(
      (size.rows + model::kTileRows - 1) / model::kTileRows));
  const auto mark = [&tiles](int64_t begin, int64_t end) {
    const auto all = static_cast<int64_t>(tiles.size());
    for (int64_t i = begin; i < std::min(end, all); ++i) {
      tiles[static_cast<size_t>(i)] = true;
    }
  };
  mark(share.begin, share.end);
  for (const WeightSink& sink : read.sinks) {
    for (const RowTake& take : sink.takes) {
      mark(take.row / model::kTileRows,
           (take.row + take.count + model::kTileRows - 1) / model::kTileRows);
    }
  }
  std::vector<ReadRange> ranges;
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (!tiles[i]) continue;
    const int64_t first = static_cast<int64_t>(i) * model::kTileRows;
    const int64_t count = std::min(model::kTileRows, size.rows - first);
    if (i > 0 && tiles[i - 1]) {
      ranges.back().num_rows += count;
      continue;
    }
    ReadRange& range = ranges.emplace_back(ReadRange::All(size));
    range.first_row = first;
    range.num_rows = count;
  }
  if (ranges.empty()) ranges.push_back({.num_columns = size.columns});
  return ranges;
}

}  // namespace kvasir::worker
