#include "bench/gemm_share.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "bench/gemm_baseline.h"
#include "kernels/linear/ops.h"
#include "kernels/linear/pack.h"

namespace kvasir::bench {
namespace {

using kernels::DeviceBuffer;
using kernels::MatmulParams;
using kernels::MemoryTag;
using kernels::PackedMatrix;

// Generates numbers that are uniform in [-1, 1) and equal in every run.
class Numbers {
 public:
  float Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  uint64_t state_ = 1;
};

PackedMatrix ViewOf(const GemmShape& shape, kernels::DType dtype,
                    kernels::DevicePtr<const void> data) {
  PackedMatrix matrix;
  matrix.k = shape.k;
  matrix.n = shape.n;
  matrix.dtype = dtype;
  matrix.data = data;
  return matrix;
}

// The parameters of a product whose input and output rows are contiguous.
MatmulParams ParamsOf(const PackedMatrix& weight, int64_t num_rows) {
  MatmulParams params;
  params.num_rows = num_rows;
  params.weight = weight;
  params.x_row_stride = weight.k;
  params.y_row_stride = weight.n;
  return params;
}

void FillPacked(const PackedMatrix& matrix, Numbers* numbers, void* memory) {
  const int64_t count = matrix.bytes() / kernels::DTypeBytes(matrix.dtype);
  kernels::VisitDType(matrix.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* const out = static_cast<T*>(memory);
    for (int64_t i = 0; i < count; ++i) {
      out[i] = kernels::FromFloat<T>(numbers->Next());
    }
  });
}

}  // namespace

absl::StatusOr<GemmShare> GemmShare::Create(std::vector<GemmShape> shapes,
                                            const GemmShareOptions& options,
                                            base::ThreadPool* pool) {
  GemmShare share(options, pool);
  Numbers numbers;
  const auto allocate = [&](int64_t bytes) {
    return share.device_->allocator().Allocate(
        static_cast<size_t>(bytes), MemoryTag::kOther, {.prefault = true});
  };
  const auto floats =
      [&](int64_t count) -> absl::StatusOr<kernels::DeviceBuffer> {
    KVASIR_ASSIGN_OR_RETURN(DeviceBuffer buffer, allocate(count * 4));
    float* const out = buffer.as<float>().device_address();
    for (int64_t i = 0; i < count; ++i) out[i] = numbers.Next();
    return buffer;
  };
  int64_t longest_k = 0;
  int64_t longest_n = 0;
  size_t scratch = 0;
  for (GemmShape& shape : shapes) {
    Case one;
    PackedMatrix packed = ViewOf(shape, options.dtype, nullptr);
    KVASIR_ASSIGN_OR_RETURN(one.packed, allocate(packed.bytes()));
    FillPacked(packed, &numbers, one.packed.data().device_address());
    KVASIR_ASSIGN_OR_RETURN(one.dense, floats(shape.k * shape.n));
    longest_k = std::max(longest_k, shape.k);
    longest_n = std::max(longest_n, shape.n);
    MatmulParams params = ParamsOf(
        ViewOf(shape, options.dtype, one.packed.data()), options.num_rows);
    kernels::Workspace counter = kernels::Workspace::Counting();
    KVASIR_RETURN_IF_ERROR(kernels::Matmul(*share.stream_, params, counter));
    scratch = std::max(scratch, counter.peak_bytes());
    one.shape = std::move(shape);
    share.cases_.push_back(std::move(one));
  }
  KVASIR_ASSIGN_OR_RETURN(share.x_, floats(options.num_rows * longest_k));
  KVASIR_ASSIGN_OR_RETURN(share.y_, floats(options.num_rows * longest_n));
  KVASIR_ASSIGN_OR_RETURN(share.workspace_,
                          allocate(static_cast<int64_t>(scratch) + 64));
  return share;
}

absl::Status GemmShare::Multiply(const Case& one) {
  MatmulParams params = ParamsOf(
      ViewOf(one.shape, options_.dtype, one.packed.data()), options_.num_rows);
  params.x = x_.as<float>();
  params.y = y_.as<float>();
  kernels::Workspace workspace(workspace_.data(), workspace_.bytes());
  return kernels::Matmul(*stream_, params, workspace);
}

absl::Status GemmShare::MultiplyByBaseline(const Case& one) {
  return BaselineGemm({.m = options_.num_rows,
                       .n = one.shape.n,
                       .k = one.shape.k,
                       .a = x_.as<float>().device_address(),
                       .b = one.dense.as<float>().device_address(),
                       .c = y_.as<float>().device_address()},
                      pool_->num_threads());
}

absl::Status GemmShare::MeasurePair() {
  double ours = 0.0;
  double baseline = 0.0;
  for (Case& one : cases_) {
    // The order alternates, because the GEMM that runs second finds inputs in
    // the caches, and a CPU frequency that the first one has changed.
    for (size_t turn = 0; turn < 2; ++turn) {
      const bool is_ours = (seconds_.size() + turn) % 2 == 0;
      absl::Status status;
      const double took = SecondsOf(
          [&] { status = is_ours ? Multiply(one) : MultiplyByBaseline(one); });
      KVASIR_RETURN_IF_ERROR(status);
      (is_ours ? one.seconds : one.baseline_seconds).push_back(took);
    }
    ours += one.seconds.back();
    baseline += one.baseline_seconds.back();
  }
  seconds_.push_back(ours);
  baseline_seconds_.push_back(baseline);
  return absl::OkStatus();
}

double GemmShare::OperationsOf(const GemmShape& shape) const {
  return 2.0 * static_cast<double>(options_.num_rows) *
         static_cast<double>(shape.k) * static_cast<double>(shape.n);
}

double GemmShare::operations() const {
  double total = 0.0;
  for (const Case& one : cases_) total += OperationsOf(one.shape);
  return total;
}

std::vector<GemmShareRow> GemmShare::Rows() const {
  std::vector<GemmShareRow> rows;
  for (const Case& one : cases_) {
    const double operations = OperationsOf(one.shape);
    rows.push_back(
        {.shape = one.shape,
         .flops = operations / Quantile(one.seconds, 0.5),
         .baseline_flops = operations / Quantile(one.baseline_seconds, 0.5),
         .share = RatioOf(one.baseline_seconds, one.seconds)});
  }
  return rows;
}

}  // namespace kvasir::bench
