// Reading tensors into packed matrices, tables and float32 arrays, on many
// threads, each tensor once whatever is made of it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "kernels/device/device.h"
#include "kernels/linear/matmul.h"
#include "plan/tp_shard.h"
#include "worker/program/attention_program.h"
#include "worker/weights/matrix_format.h"
#include "worker/weights/weight_source.h"

namespace kvasir::worker {

// Rows of a tensor [rows, columns] and where they go.
struct TensorRows {
  std::string tensor;
  int64_t columns = 1;
  // `column` counts columns of a packed matrix, rows of an array.
  std::vector<RowTake> takes;
  int64_t first_column = 0;  // of those taken, into a packed matrix
};

// Memory of the device that one job fills. `host` is where, while it runs.
struct WeightMemory {
  kernels::DevicePtr<void> device;  // null while bytes are only counted
  int64_t bytes = 0;
  void* host = nullptr;
  bool zeroed = false;  // first

  kernels::DevicePtr<const float> floats(int64_t begin = 0) const {
    return device.as<const float>() + begin;
  }
  float* host_floats(int64_t begin = 0) const {
    return static_cast<float*>(host) + begin;
  }
};

// Where rows of a tensor go.
struct WeightSink {
  enum class Kind {
    kPack,      // row i becomes column i of a packed matrix
    kPackRows,  // row i stays row i of a packed matrix
    kTable,     // copied as it is
    kFloats,    // widened to float32, row behind row
    kVisit,     // widened, shown to `visit` and not kept
  };
  // Rows [first, first + count) of the tensor, front to back.
  using Visit =
      std::function<void(int64_t first, int64_t count, const float* numbers)>;
  Kind kind = Kind::kFloats;
  std::vector<RowTake> takes;
  // Of packed matrices: numbers of a row from here on, as many as fit.
  int64_t first_column = 0;
  kernels::PackedMatrix shape;
  WeightMemory* memory = nullptr;  // none to visit
  Visit visit;
};

// A tensor on its way; without sinks it is read for the fingerprint alone.
struct TensorRead {
  std::string tensor;
  int64_t columns = 1;
  std::vector<WeightSink> sinks;
};

// Work of one thread. Sinks of one matrix may share a panel, so a matrix is
// never split between threads.
struct WeightJob {
  std::vector<TensorRead> reads;  // in this order
  // What is filled, beside the memory of the sinks.
  std::vector<WeightMemory*> memory;
  std::function<absl::Status()> finish;  // after all reads; or null
  int64_t bytes = 0;                     // made
};

// A list of jobs and the memory they fill. Of each tensor is read what a rank
// needs of it (weight_reads.h).
// Threads: one until Run.
// Errors: the source's and the allocator's; INVALID_ARGUMENT for a tensor of
//   other rows than are asked for, or with a number that is not finite or does
//   not fit the type that it is rounded to. All name the tensor.
class WeightJobs {
 public:
  // Only counts the bytes that would be allocated: pointers are null, and the
  // jobs are not to be run.
  WeightJobs(WeightSource* source, const MatrixFormat& format,
             plan::TpShard shard = {})
      : source_(source), format_(format), shard_(shard) {}
  // All outlive it; `buffers` owns the memory, under the tag "weights".
  // Matrices get the device's format.
  WeightJobs(WeightSource* source, kernels::Device* device,
             std::vector<kernels::DeviceBuffer>* buffers,
             plan::TpShard shard = {})
      : source_(source),
        format_(MatrixFormat::Of(*device)),
        shard_(shard),
        device_(device),
        buffers_(buffers) {}

  // [k, n] of several tensors side by side, n the rows taken of all. In the
  // format's type for what they are stored in, which is float32 where that
  // differs.
  absl::Status Matrix(std::vector<TensorRows> parts, int64_t k,
                      kernels::PackedMatrix* out);
  // One array of `size` numbers, zero where nothing is taken.
  absl::Status Floats(std::vector<TensorRows> parts, int64_t size,
                      kernels::DevicePtr<const float>* out);
  // Rows of the tensor as they are.
  absl::Status Table(const std::string& tensor, int64_t first_row, int64_t rows,
                     int64_t columns, kernels::DType* dtype,
                     kernels::DevicePtr<const void>* out);
  // For the fingerprint.
  void ReadOnly(const std::string& tensor, int64_t columns);

  void Add(WeightJob job) { jobs_.push_back(std::move(job)); }
  // For one job; valid as long as the jobs are.
  absl::StatusOr<WeightMemory*> Allocate(int64_t bytes);
  // For a matrix [k, n] in the format's type for the tensor's: sets type,
  // layout and data.
  absl::StatusOr<WeightMemory*> AllocateMatrix(const std::string& tensor,
                                               kernels::PackedMatrix* matrix);

  // What the jobs ask of the source, together.
  absl::StatusOr<int64_t> ReadBytes() const;

  // Of all that was allocated, or would have been.
  int64_t bytes() const { return bytes_; }
  int64_t matrix_bytes() const { return matrix_bytes_; }
  // Of matrices, those whose numbers are rounded to another type.
  int64_t rounded_bytes() const { return rounded_bytes_; }
  void CountAsMatrix(int64_t bytes) { matrix_bytes_ += bytes; }

  struct RunOptions {
    base::ThreadPool* pool = nullptr;
    size_t read_buffer_bytes = 0;
    int64_t max_staged_bytes = 0;  // LoadOptions'
    std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
  };
  // All of them, largest first; the first error stops the rest.
  absl::Status Run(const RunOptions& options);

 private:
  // Of a matrix whose tensors are stored in `stored`; says the bytes of it.
  void SetFormat(kernels::DType stored, kernels::PackedMatrix* matrix);

  WeightSource* const source_;
  const MatrixFormat format_;
  const plan::TpShard shard_;
  kernels::Device* const device_ = nullptr;
  std::vector<kernels::DeviceBuffer>* const buffers_ = nullptr;
  std::deque<WeightMemory> memory_;
  std::vector<WeightJob> jobs_;
  int64_t bytes_ = 0;
  int64_t matrix_bytes_ = 0;
  int64_t rounded_bytes_ = 0;
};

}  // namespace kvasir::worker
