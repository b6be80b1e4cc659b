#include "kernels/pack.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace kvasir::kernels {
namespace {

// Columns are packed `kBlockK` numbers deep at a time, so that the source lines
// of all columns of a panel stay in the first-level cache until used up.
constexpr int64_t kBlockK = 64;

template <typename T>
void PackPanelPart(const char* rows, int64_t row_stride_bytes, int64_t k,
                   int64_t count, T* panel) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlockK) {
    const int64_t k1 = std::min(k, k0 + kBlockK);
    T staged[kPanelColumns][kBlockK];
    for (int64_t c = 0; c < count; ++c) {
      std::memcpy(
          staged[c],
          rows + c * row_stride_bytes + k0 * static_cast<int64_t>(sizeof(T)),
          static_cast<size_t>(k1 - k0) * sizeof(T));
    }
    for (int64_t i = 0; i < k1 - k0; ++i) {
      T* line = panel + (k0 + i) * kPanelColumns;
      for (int64_t c = 0; c < count; ++c) line[c] = staged[c][i];
    }
  }
}

template <typename T>
void Pack(const PackedMatrix& shape, const RowBlock& block, int64_t first,
          T* memory) {
  const int64_t row_bytes = block.row_stride * static_cast<int64_t>(sizeof(T));
  int64_t row = 0;
  while (row < block.num_rows) {
    const int64_t column = first + row;
    const int64_t in_panel = column % kPanelColumns;
    const int64_t count =
        std::min(block.num_rows - row, kPanelColumns - in_panel);
    T* panel =
        memory + column / kPanelColumns * shape.k * kPanelColumns + in_panel;
    PackPanelPart(static_cast<const char*>(block.data) + row * row_bytes,
                  row_bytes, shape.k, count, panel);
    row += count;
  }
}

}  // namespace

int64_t PackedBytes(int64_t k, int64_t n, DType dtype) {
  PackedMatrix shape;
  shape.k = k;
  shape.n = n;
  shape.dtype = dtype;
  return shape.bytes();
}

absl::Status PackRows(const PackedMatrix& shape, const RowBlock& block,
                      int64_t first_column, void* memory) {
  if (block.num_rows < 0 || first_column < 0 ||
      first_column > shape.n - block.num_rows) {
    return absl::OutOfRangeError(
        absl::StrCat("pack: rows [", first_column, ", ",
                     first_column + block.num_rows, ") of ", shape.n));
  }
  if (block.row_stride < shape.k) {
    return absl::OutOfRangeError(absl::StrCat(
        "pack: row stride ", block.row_stride, " below k ", shape.k));
  }
  // Formats of two bytes are moved as they are.
  if (DTypeBytes(shape.dtype) == 2) {
    Pack(shape, block, first_column, static_cast<uint16_t*>(memory));
  } else {
    Pack(shape, block, first_column, static_cast<uint32_t*>(memory));
  }
  return absl::OkStatus();
}

void ZeroPadding(const PackedMatrix& shape, void* memory) {
  const int64_t used = shape.n % kPanelColumns;
  if (used == 0) return;
  const int64_t width = DTypeBytes(shape.dtype);
  char* panel = static_cast<char*>(memory) +
                (shape.num_panels() - 1) * shape.k * kPanelColumns * width;
  for (int64_t k = 0; k < shape.k; ++k) {
    std::memset(panel + (k * kPanelColumns + used) * width, 0,
                static_cast<size_t>((kPanelColumns - used) * width));
  }
}

}  // namespace kvasir::kernels
