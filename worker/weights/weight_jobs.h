// Reads tensors into packed matrices, tables and float32 arrays, on many
// threads. Each tensor is read once, whatever is made of it.
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

// The rows that are taken of a tensor [rows, columns], and their destinations.
struct TensorRows {
  std::string tensor;
  int64_t columns = 1;
  // RowTake::column counts columns of a packed matrix, or rows of an array.
  std::vector<RowTake> takes;
  // first of the tensor's columns that are taken, for a packed matrix
  int64_t first_column = 0;
};

// Device memory that one job fills. While the job runs, `host` is where it
// writes.
struct WeightMemory {
  kernels::DevicePtr<void> device;  // null while bytes are only counted
  int64_t bytes = 0;
  void* host = nullptr;
  bool zeroed = false;  // before the job writes

  kernels::DevicePtr<const float> floats(int64_t begin = 0) const {
    return device.as<const float>() + begin;
  }
  float* host_floats(int64_t begin = 0) const {
    return static_cast<float*>(host) + begin;
  }
};

// The destination of rows of a tensor.
struct WeightSink {
  enum class Kind {
    kPack,      // row i becomes column i of a packed matrix
    kPackRows,  // row i stays row i of a packed matrix
    kTable,     // copied unchanged
    kFloats,    // widened to float32, one row after the other
    kVisit,     // widened, passed to `visit` and not kept
  };
  // Receives rows [first, first + count) of the tensor, from front to back.
  using Visit =
      std::function<void(int64_t first, int64_t count, const float* numbers)>;
  Kind kind = Kind::kFloats;
  std::vector<RowTake> takes;
  // For packed matrices: the first column of the tensor that is taken. As many
  // as the matrix has are taken.
  int64_t first_column = 0;
  kernels::PackedMatrix shape;
  WeightMemory* memory = nullptr;  // null for kVisit
  Visit visit;
};

// One tensor to read. Without sinks it is read only for the fingerprint.
struct TensorRead {
  std::string tensor;
  int64_t columns = 1;
  std::vector<WeightSink> sinks;
};

// The work of one thread. Sinks of one matrix may share a panel, so a matrix is
// never split between threads.
struct WeightJob {
  std::vector<TensorRead> reads;  // in this order
  // Memory that it fills in addition to the sinks' memory.
  std::vector<WeightMemory*> memory;
  std::function<absl::Status()> finish;  // after all reads; or null
  int64_t bytes = 0;                     // that it writes
};

// A list of jobs and the memory they fill. A rank reads only the part of each
// tensor that it needs (weight_reads.h).
//
// Threads: one until Run.
// Errors: those of the source and the allocator. INVALID_ARGUMENT for a tensor
//   of an unexpected size, and for a number that is not finite or does not fit
//   the type it is rounded to. All name the tensor.
class WeightJobs {
 public:
  // Only counts the bytes that would be allocated: pointers are null, and the
  // jobs must not be run.
  WeightJobs(WeightSource* source, const MatrixFormat& format,
             plan::TpShard shard = {})
      : source_(source), format_(format), shard_(shard) {}
  // All pointers outlive the jobs. `buffers` gets the memory, under the tag
  // "weights". Matrices get the device's format.
  WeightJobs(WeightSource* source, kernels::Device* device,
             std::vector<kernels::DeviceBuffer>* buffers,
             plan::TpShard shard = {})
      : source_(source),
        format_(MatrixFormat::Of(*device)),
        shard_(shard),
        device_(device),
        buffers_(buffers) {}

  // A matrix [k, n] of several tensors side by side; n is the number of rows
  // taken. Its type is MatrixFormat::TypeFor of the stored type, or of float32
  // if the tensors are stored in different types.
  absl::Status Matrix(std::vector<TensorRows> parts, int64_t k,
                      kernels::PackedMatrix* out);
  // An array of `size` numbers; places without a row are zero.
  absl::Status Floats(std::vector<TensorRows> parts, int64_t size,
                      kernels::DevicePtr<const float>* out);
  // Rows of the tensor, unchanged.
  absl::Status Table(const std::string& tensor, int64_t first_row, int64_t rows,
                     int64_t columns, kernels::DType* dtype,
                     kernels::DevicePtr<const void>* out);
  // Reads the tensor only for the fingerprint.
  void ReadOnly(const std::string& tensor, int64_t columns);

  void Add(WeightJob job) { jobs_.push_back(std::move(job)); }
  // Memory for one job. The pointer is valid as long as this object.
  absl::StatusOr<WeightMemory*> Allocate(int64_t bytes);
  // Memory for a matrix [k, n] of the format's type for this tensor. Sets type,
  // layout and data.
  absl::StatusOr<WeightMemory*> AllocateMatrix(const std::string& tensor,
                                               kernels::PackedMatrix* matrix);

  // The bytes that all jobs together read from the source.
  absl::StatusOr<int64_t> ReadBytes() const;

  // Bytes of everything that was allocated, or would have been.
  int64_t bytes() const { return bytes_; }
  int64_t matrix_bytes() const { return matrix_bytes_; }
  // Bytes of matrices whose numbers are rounded to another type.
  int64_t rounded_bytes() const { return rounded_bytes_; }
  void CountAsMatrix(int64_t bytes) { matrix_bytes_ += bytes; }

  struct RunOptions {
    base::ThreadPool* pool = nullptr;
    size_t read_buffer_bytes = 0;
    int64_t max_staged_bytes = 0;  // LoadOptions::max_staged_bytes
    std::function<void(int64_t done_bytes, int64_t total_bytes)> progress;
  };
  // Runs all jobs, the largest first. The first error stops the rest.
  absl::Status Run(const RunOptions& options);

 private:
  // Sets type and layout of a matrix whose tensors are stored as `stored`, and
  // counts its bytes.
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
