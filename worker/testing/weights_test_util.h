// Test support: reads elements of loaded weights, which must be in host memory,
// and of the tensors of a WeightSource.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/linear/matmul.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

float Element(const kernels::PackedMatrix& matrix, int64_t k, int64_t n);

// Returns the rows of a source's tensor as floats.
std::vector<std::vector<float>> Rows(WeightSource& source,
                                     const std::string& name, int64_t columns);

// A source that passes all blocks of another source through a function, which
// may change them.
class ChangedSource final : public WeightSource {
 public:
  using Change = std::function<absl::Status(
      const std::string& name, const WeightBlock& block, Consumer consume)>;
  ChangedSource(WeightSource* source, Change change);
  absl::StatusOr<kernels::DType> TypeOf(const std::string& name) const override;
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override;
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override;
  std::string WeightTiles() const override;

 private:
  WeightSource* const source_;
  const Change change_;
};

}  // namespace kvasir::worker
