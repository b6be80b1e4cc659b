#include "kernels/cuda/cublas_gemms.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace kvasir::kernels::cuda {
namespace {

GemmShape ShapeOf(const Gemm& gemm) {
  return {gemm.rows,         gemm.n,     gemm.k,       gemm.x_row_stride,
          gemm.y_row_stride, gemm.dtype, gemm.y_dtype, gemm.bias != nullptr};
}

std::string Name(const GemmShape& shape) {
  return absl::StrCat("a product of ", shape.rows, " rows, n ", shape.n, ", k ",
                      shape.k, ", ", DTypeName(shape.dtype), " to ",
                      DTypeName(shape.y_dtype), shape.bias ? " with bias" : "");
}

bool IsAligned(const void* memory, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(memory) %
             static_cast<uintptr_t>(alignment) ==
         0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CublasGemms>> CublasGemms::Make(
    CublasLt* library, int major) {
  CublasHandle handle = nullptr;
  const CublasResult result = library->MakeHandle(&handle);
  if (result != CublasResult::kOk) {
    return absl::InternalError(absl::StrCat(
        "cuBLASLt ", library->Version(), " cannot be started: ",
        library->Describe(result), "; with --deterministic it is not needed"));
  }
  const size_t mebibytes = major >= 9 ? 32 : 8;
  return std::unique_ptr<CublasGemms>(
      new CublasGemms(library, handle, mebibytes << 20));
}

CublasGemms::~CublasGemms() { library_->DestroyHandle(handle_); }

std::string CublasGemms::name() const {
  return absl::StrCat("lt", library_->Version());
}

absl::Status CublasGemms::Failed(absl::StatusCode code, const std::string& what,
                                 CublasResult result) const {
  return absl::Status(
      code, absl::StrCat("matmul: cuBLASLt ", library_->Version(), ": ", what,
                         ": ", library_->Describe(result)));
}

absl::StatusOr<GemmAlgorithm> CublasGemms::AlgorithmFor(
    const GemmShape& shape) {
  base::MutexLock lock(&mutex_);
  if (const auto found = algorithms_.find(shape); found != algorithms_.end()) {
    return found->second;
  }
  GemmAlgorithm algorithm;
  const CublasResult result =
      library_->Choose(handle_, shape, workspace_bytes_, &algorithm);
  if (result != CublasResult::kOk) {
    return Failed(
        absl::StatusCode::kUnimplemented,
        absl::StrCat("no algorithm for ", Name(shape),
                     " (with --deterministic, cuBLASLt is not needed)"),
        result);
  }
  KVASIR_CHECK(algorithm.workspace_bytes <= workspace_bytes_);
  // If the table is full, all algorithms are discarded. For a shape that is
  // still in use, an algorithm is chosen again at its next product.
  if (algorithms_.size() == kMostShapes) algorithms_.clear();
  algorithms_[shape] = algorithm;
  return algorithm;
}

absl::Status CublasGemms::Enqueue(const Gemm& gemm, StreamHandle stream) {
  for (const void* const memory :
       {gemm.x, gemm.weight, gemm.bias, static_cast<const void*>(gemm.y)}) {
    KVASIR_CHECK(IsAligned(memory, kGemmAlignment));
  }
  KVASIR_CHECK(IsAligned(gemm.workspace, kGemmWorkspaceAlignment));
  const GemmShape shape = ShapeOf(gemm);
  KVASIR_ASSIGN_OR_RETURN(const GemmAlgorithm algorithm, AlgorithmFor(shape));
  const CublasResult result =
      library_->Multiply(handle_, shape, gemm, algorithm, stream);
  if (result == CublasResult::kOk) return absl::OkStatus();
  return Failed(absl::StatusCode::kInternal, Name(shape), result);
}

size_t CublasGemms::known_shapes() const {
  base::MutexLock lock(&mutex_);
  return algorithms_.size();
}

}  // namespace kvasir::kernels::cuda
