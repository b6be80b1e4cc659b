#include "worker/testing/weights_test_util.h"

#include <cstddef>
#include <utility>

#include "base/status_matchers.h"
#include "model/checkpoint/weight_tiles.h"

namespace kvasir::worker {

float Element(const kernels::PackedMatrix& matrix, int64_t k, int64_t n) {
  const int64_t at = matrix.layout == kernels::WeightLayout::kRows
                         ? n * matrix.k + k
                         : (n / 32 * matrix.k + k) * 32 + n % 32;
  return kernels::VisitDType(matrix.dtype, [&](auto zero) {
    using T = decltype(zero);
    return kernels::ToFloat(
        static_cast<const T*>(matrix.data.device_address())[at]);
  });
}

std::vector<std::vector<float>> Rows(WeightSource& source,
                                     const std::string& name, int64_t columns) {
  std::vector<std::vector<float>> rows;
  const kernels::DType dtype = *source.TypeOf(name);
  std::vector<std::byte> buffer(1 << 20);
  const ReadRange all = ReadRange::All(*source.SizeOf(name));
  KVASIR_EXPECT_OK(
      source.Read(name, all, buffer, [&](const WeightBlock& block) {
        for (int64_t row = 0; row < block.num_rows; ++row) {
          rows.emplace_back();
          for (int64_t i = 0; i < columns; ++i) {
            kernels::VisitDType(dtype, [&](auto zero) {
              using T = decltype(zero);
              rows.back().push_back(kernels::ToFloat(
                  static_cast<const T*>(block.data)[row * columns + i]));
            });
          }
        }
        return absl::OkStatus();
      }));
  return rows;
}

ChangedSource::ChangedSource(WeightSource* source, Change change)
    : source_(source), change_(std::move(change)) {}

absl::StatusOr<kernels::DType> ChangedSource::TypeOf(
    const std::string& name) const {
  return source_->TypeOf(name);
}

std::string ChangedSource::WeightTiles() const {
  return model::WeightTilesText("changed");
}

absl::StatusOr<MatrixSize> ChangedSource::SizeOf(
    const std::string& name) const {
  return source_->SizeOf(name);
}

absl::Status ChangedSource::Read(const std::string& name,
                                 const ReadRange& range,
                                 std::span<std::byte> buffer,
                                 Consumer consume) {
  return source_->Read(name, range, buffer, [&](const WeightBlock& block) {
    return change_(name, block, consume);
  });
}

}  // namespace kvasir::worker
