// Loads tensors as packed matrices, tables and float32 arrays, on many threads.
// Each tensor is read only once, even if several matrices or arrays are made
// from it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
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

// Names rows of a tensor [rows, columns] to load, and their destinations.
struct TensorRows {
  std::string tensor;
  int64_t columns = 1;
  // RowTake::column is a column of the packed matrix, or a row of the array.
  std::vector<RowTake> takes;
  // For a packed matrix: the first of the tensor's columns to load.
  int64_t first_column = 0;
};

// Device memory that one job fills. While the job runs, it writes to `host`.
struct WeightMemory {
  kernels::DevicePtr<void> device;  // null if bytes are only counted
  int64_t bytes = 0;
  void* host = nullptr;
  bool zeroed = false;  // filled with zeros before the job writes

  kernels::DevicePtr<const float> floats(int64_t begin = 0) const {
    return device.as<const float>() + begin;
  }
  float* host_floats(int64_t begin = 0) const {
    return static_cast<float*>(host) + begin;
  }
};

// A destination of a tensor's rows, and how the rows are converted for it.
struct WeightSink {
  enum class Kind {
    kPack,      // row i becomes column i of a packed matrix
    kPackRows,  // row i stays row i of a packed matrix
    kTable,     // copied unchanged
    kFloats,    // widened to float32, row after row
    kVisit,     // widened to float32 and passed to `visit`
  };
  // Receives rows [first, first + count) of the tensor, from front to back.
  using Visit =
      std::function<void(int64_t first, int64_t count, const float* numbers)>;
  Kind kind = Kind::kFloats;
  std::vector<RowTake> takes;
  // For packed matrices: the first column of the tensor to load. `shape` says
  // how many columns.
  int64_t first_column = 0;
  kernels::PackedMatrix shape;
  WeightMemory* memory = nullptr;  // null for kVisit
  Visit visit;
};

// One tensor to read. Without sinks it is read only for the fingerprint of the
// weights.
struct TensorRead {
  std::string tensor;
  int64_t columns = 1;
  std::vector<WeightSink> sinks;
};

// Work that one thread does. A matrix is never split between jobs, because its
// sinks may write to the same panel.
struct WeightJob {
  std::vector<TensorRead> reads;  // done in this order
  // Memory that the job fills besides the sinks' memory.
  std::vector<WeightMemory*> memory;
  std::function<absl::Status()> finish;  // called after all reads; may be null
  int64_t bytes = 0;                     // bytes that the job writes
};

// A list of jobs and the memory that they fill. A rank reads only the part of
// each tensor that it needs (weight_reads.h).
//
// Threads: one at a time. Run also uses the threads of its pool.
// Errors: those of the source and the allocator. INVALID_ARGUMENT for a tensor
//   of an unexpected size and for a number that is not finite. OUT_OF_RANGE for
//   a number too large for the type it is rounded to. Both name the tensor.
class WeightJobs {
 public:
  // An object that only counts memory: nothing is allocated, all device
  // pointers are null, and the jobs must not be run.
  WeightJobs(WeightSource* source, const MatrixFormat& format,
             plan::TpShard shard = {})
      : source_(source), format_(format), shard_(shard) {}
  // An object that loads. All pointers must outlive it. `buffers` receives
  // the allocated memory, under the tag "weights". Matrices get the
  // device's format.
  WeightJobs(WeightSource* source, kernels::Device* device,
             std::vector<kernels::DeviceBuffer>* buffers,
             plan::TpShard shard = {})
      : source_(source),
        format_(MatrixFormat::Of(*device)),
        shard_(shard),
        device_(device),
        buffers_(buffers) {}

  // Adds a job for a matrix [k, n] in which rows of several tensors become
  // columns; n is the number of these rows. Its type is MatrixFormat::TypeFor
  // of the stored type, or of float32 if the tensors are stored in different
  // types.
  absl::Status Matrix(std::vector<TensorRows> parts, int64_t k,
                      kernels::PackedMatrix* out);
  // Adds a job for each of several matrices of one size and type. They follow
  // each other in memory: matrix i begins i * bytes() bytes after out->data.
  absl::Status Matrices(std::vector<std::vector<TensorRows>> matrices,
                        int64_t k, kernels::PackedMatrix* out);
  // Adds a job for an array of `size` floats. Elements that no row fills are
  // zero. `finish` is called with the whole array once it is filled.
  absl::Status Floats(std::vector<TensorRows> parts, int64_t size,
                      kernels::DevicePtr<const float>* out,
                      std::function<void(absl::Span<float>)> finish = nullptr);
  // Adds a job for a table: rows of the tensor, unchanged.
  absl::Status Table(const std::string& tensor, int64_t first_row, int64_t rows,
                     int64_t columns, kernels::DType* dtype,
                     kernels::DevicePtr<const void>* out);
  // Adds a job that reads the tensor only for the fingerprint of the weights.
  void ReadOnly(const std::string& tensor, int64_t columns);

  void Add(WeightJob job) { jobs_.push_back(std::move(job)); }
  // Allocates memory for one job. The result is valid as long as this object.
  absl::StatusOr<WeightMemory*> Allocate(int64_t bytes);
  // Allocates memory for `matrix`, whose k and n are set, in the format for
  // this tensor. Sets the matrix's type, layout and data.
  absl::StatusOr<WeightMemory*> AllocateMatrix(const std::string& tensor,
                                               kernels::PackedMatrix* matrix);

  // The bytes that all jobs together read from the source.
  absl::StatusOr<int64_t> ReadBytes() const;

  // The bytes that were allocated or, if memory is only counted, that would
  // have been allocated.
  int64_t bytes() const { return bytes_; }
  int64_t matrix_bytes() const { return matrix_bytes_; }
  // Bytes of the matrices that are converted to another type when they are
  // loaded.
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
