// Test support: looking into loaded weights (of a CPU, whose memory is the
// host's) and at what a source gives.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/linear/matmul.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

inline float Element(const kernels::PackedMatrix& matrix, int64_t k,
                     int64_t n) {
  const int64_t at = (n / 32 * matrix.k + k) * 32 + n % 32;
  return kernels::VisitDType(matrix.dtype, [&](auto zero) {
    using T = decltype(zero);
    return kernels::ToFloat(
        static_cast<const T*>(matrix.data.device_address())[at]);
  });
}

// The tensor as rows of floats.
inline std::vector<std::vector<float>> Rows(WeightSource& source,
                                            const std::string& name,
                                            int64_t columns) {
  std::vector<std::vector<float>> rows;
  const kernels::DType dtype = *source.TypeOf(name);
  std::vector<std::byte> buffer(1 << 20);
  EXPECT_THAT(source.Read(name, buffer,
                          [&](const WeightBlock& block) {
                            for (int64_t row = 0; row < block.num_rows; ++row) {
                              rows.emplace_back();
                              for (int64_t i = 0; i < columns; ++i) {
                                kernels::VisitDType(dtype, [&](auto zero) {
                                  using T = decltype(zero);
                                  rows.back().push_back(
                                      kernels::ToFloat(static_cast<const T*>(
                                          block.data)[row * columns + i]));
                                });
                              }
                            }
                            return absl::OkStatus();
                          }),
              base::IsOk());
  return rows;
}

// Gives the rows of some tensors as another function says.
class ChangedSource final : public WeightSource {
 public:
  using Change = std::function<absl::Status(
      const std::string& name, const WeightBlock& block, Consumer consume)>;
  ChangedSource(WeightSource* source, Change change)
      : source_(source), change_(std::move(change)) {}
  absl::StatusOr<kernels::DType> TypeOf(
      const std::string& name) const override {
    return source_->TypeOf(name);
  }
  absl::Status Read(const std::string& name, std::span<std::byte> buffer,
                    Consumer consume) override {
    return source_->Read(name, buffer, [&](const WeightBlock& block) {
      return change_(name, block, consume);
    });
  }
  std::string WeightsId() const override { return "changed"; }

 private:
  WeightSource* const source_;
  const Change change_;
};

}  // namespace kvasir::worker
