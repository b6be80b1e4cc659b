// Packs weights into the layouts of matmul.h. It packs one block of rows at a
// time, so that a loader never holds a second copy of a whole matrix. Also
// checks that weights are finite.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

// Rows of a matrix in a checkpoint, [num_rows, k]: row i is column i of W.
struct RowBlock {
  const void* data = nullptr;  // needs no alignment
  int64_t num_rows = 0;
  // In elements. It is larger than k if the block is a slice along K.
  int64_t row_stride = 0;
};

// Writes W's columns [first_column, first_column + block.num_rows) into
// `memory`, which has shape.bytes() bytes. `shape` gives k, n, dtype and
// layout; its data is not used. Returns OUT_OF_RANGE if the block does not fit
// or its row_stride is below k.
//
// Blocks may come in any order, and from several matrices: for example, W may
// have the columns of the q, k and v matrices side by side. For a slice along
// K, let `data` point to the slice's first element.
//
// Several threads may pack blocks at the same time if no two blocks share a
// panel (in the layout kRows: a column). Blocks of a multiple of 32 rows, at
// multiples of 32, are fastest.
absl::Status PackRows(const PackedMatrix& shape, const RowBlock& block,
                      int64_t first_column, void* memory);

// Like PackRows, but for a matrix that is stored as [K, N]: row i of `block` is
// W's row first_row + i, and only its first n numbers are used. Returns
// OUT_OF_RANGE if the block does not fit or its row_stride is below n.
absl::Status PackAsTheyLie(const PackedMatrix& shape, const RowBlock& block,
                           int64_t first_row, void* memory);

// Zeroes the unused columns of the last panel. Call it once, before or after
// the rows are packed. The layout kRows has no such columns.
void ZeroPadding(const PackedMatrix& shape, void* memory);

// Returns the index of the first of `count` numbers that is NaN or infinite; -1
// if all are finite. `data` needs no alignment.
int64_t FirstNotFinite(const void* data, DType dtype, int64_t count);

}  // namespace kvasir::kernels
