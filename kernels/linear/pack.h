// Packing of weights into the layouts of matmul.h, by blocks of rows, so that a
// loader packs what it has just read and keeps no second copy; and the check of
// what it has read.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear/matmul.h"

namespace kvasir::kernels {

// A matrix [num_rows, k] as checkpoints store it: row i is column i of W.
struct RowBlock {
  const void* data = nullptr;  // needs no alignment
  int64_t num_rows = 0;
  int64_t row_stride = 0;  // in elements; more than k takes a slice along K
};

// Writes W's columns [first_column, first_column + block.num_rows) into
// `memory`, shape.bytes() large. `shape` gives k, n, dtype and layout (its data
// is not used). Blocks may come in any order and from several matrices
// (q|k|v side by side: each at its own first_column); a slice along N is a part
// of the rows, a slice along K starts `data` at its first element. Blocks that
// share no panel (in rows: no column) may be packed at the same time from
// several threads; blocks of a multiple of 32 rows at multiples of 32 are
// fastest.
// OUT_OF_RANGE when the block does not fit.
absl::Status PackRows(const PackedMatrix& shape, const RowBlock& block,
                      int64_t first_column, void* memory);

// The same for a matrix that is stored as it is used: row i of `block` is W's
// row first_row + i, of which the first n numbers count. OUT_OF_RANGE when it
// does not fit.
absl::Status PackAsTheyLie(const PackedMatrix& shape, const RowBlock& block,
                           int64_t first_row, void* memory);

// Zeroes the columns behind the last one of the last panel. Needed once, before
// or after the rows. (Rows have none.)
void ZeroPadding(const PackedMatrix& shape, void* memory);

// Index of the first of `count` numbers that is NaN or infinite, -1 where all
// are finite. `data` needs no alignment.
int64_t FirstNotFinite(const void* data, DType dtype, int64_t count);

}  // namespace kvasir::kernels
