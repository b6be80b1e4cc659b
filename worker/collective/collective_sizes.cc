#include "worker/collective/collective_sizes.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvasir::worker {

absl::StatusOr<int64_t> CollectiveBytes(const char* call, int64_t rows,
                                        int64_t columns) {
  int64_t bytes = 0;
  if (rows < 0 || columns < 0 ||
      __builtin_mul_overflow(rows, columns, &bytes) ||
      __builtin_mul_overflow(bytes, int64_t{sizeof(float)}, &bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(call,
                     ": the matrix must have 0 or more rows and columns, and "
                     "at most 2^63 - 1 bytes, but it has ",
                     rows, " rows and ", columns, " columns"));
  }
  return bytes;
}

absl::Status CheckFirstColumns(plan::TpShard shard,
                               absl::Span<const int64_t> first_columns) {
  bool rising = first_columns.size() == static_cast<size_t>(shard.size) + 1 &&
                first_columns[0] == 0;
  for (size_t i = 1; rising && i < first_columns.size(); ++i) {
    rising = first_columns[i - 1] <= first_columns[i];
  }
  if (rising) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "AllGather: first_columns must have the first column of each of the ",
      shard.size,
      " ranks, ascending from 0, and then the number of columns; it is [",
      absl::StrJoin(first_columns, ", "), "]"));
}

}  // namespace kvasir::worker
