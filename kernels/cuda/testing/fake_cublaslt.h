// FakeCublasLt: a fake of cuBLASLt for tests without a GPU. It checks its
// arguments, and multiplies when a stream of FakeRuntime runs the work.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/testing/fake_runtime.h"

namespace kvasir::kernels::cuda {

// The test fails if a caller passes an invalid handle, impossible sizes,
// strides or types, or an algorithm that was chosen for another shape. It also
// fails if matrices or the workspace are misaligned or not in device memory, or
// if a handle is never destroyed.
class FakeCublasLt final : public CublasLt {
 public:
  explicit FakeCublasLt(FakeRuntime* runtime) : runtime_(runtime) {}
  ~FakeCublasLt() override;

  // From now on, every chosen algorithm needs this many bytes of workspace.
  void NeedWorkspace(size_t bytes);
  // Makes the next call of the function of this name, such as "Choose", fail
  // with `result`.
  void FailNext(const std::string& call, CublasResult result);
  int64_t calls(const std::string& call) const;
  std::vector<GemmShape> multiplied() const;  // in the order of the calls
  std::vector<Gemm> gemms() const;  // the same products, with addresses

  std::string Describe(CublasResult result) override;
  int64_t Version() override { return 130101; }
  CublasResult MakeHandle(CublasHandle* handle) override;
  CublasResult DestroyHandle(CublasHandle handle) override;
  CublasResult Choose(CublasHandle handle, const GemmShape& shape,
                      size_t most_workspace_bytes,
                      GemmAlgorithm* algorithm) override;
  CublasResult Multiply(CublasHandle handle, const GemmShape& shape,
                        const Gemm& gemm, const GemmAlgorithm& algorithm,
                        StreamHandle stream) override;

 private:
  CublasResult Begin(const std::string& call)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  FakeRuntime* const runtime_;
  mutable base::Mutex mutex_;
  size_t workspace_bytes_ ABSL_GUARDED_BY(mutex_) = 1 << 20;
  std::map<std::string, CublasResult> failures_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> calls_ ABSL_GUARDED_BY(mutex_);
  std::set<CublasHandle> handles_ ABSL_GUARDED_BY(mutex_);
  std::deque<char> made_ ABSL_GUARDED_BY(mutex_);  // handles are addresses
  // The shapes for which algorithms were chosen. The first word of an algorithm
  // is its index here.
  std::vector<GemmShape> chosen_ ABSL_GUARDED_BY(mutex_);
  std::vector<GemmShape> multiplied_ ABSL_GUARDED_BY(mutex_);
  std::vector<Gemm> gemms_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::kernels::cuda
