#include "worker/weights/weight_jobs.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/linear/pack.h"
#include "worker/weights/weight_reads.h"

namespace kvasir::worker {
namespace {

using kernels::DType;
using kernels::PackedMatrix;

absl::Status WithName(const std::string& tensor, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("tensor ", tensor, ": ", status.message()));
}

// Converts values of type `dtype` to float32, which is exact.
void Widen(const void* data, DType dtype, int64_t count, float* out) {
  kernels::VisitDType(dtype, [&](auto zero) {
    using T = decltype(zero);
    const char* in = static_cast<const char*>(data);
    for (int64_t i = 0; i < count; ++i) {
      T stored;
      std::memcpy(&stored, in + static_cast<size_t>(i) * sizeof(T), sizeof(T));
      out[i] = kernels::ToFloat(stored);
    }
  });
}

// Refuses weights that are not finite. A single one makes every answer useless,
// and if a codec hides it, answers look plausible but are wrong.
absl::Status CheckFinite(const WeightBlock& block, DType dtype) {
  const int64_t found = kernels::FirstNotFinite(block.data, dtype,
                                                block.num_rows * block.columns);
  if (found < 0) return absl::OkStatus();
  float number = 0;
  Widen(
      static_cast<const char*>(block.data) + found * kernels::DTypeBytes(dtype),
      dtype, 1, &number);
  return absl::InvalidArgumentError(absl::StrCat(
      "row ", block.first_row + found / block.columns, ", column ",
      found % block.columns, ": must be a finite number, but is ", number));
}

// Rounds float32 values to a 16-bit type. OUT_OF_RANGE if a value
// becomes infinite.
absl::Status Narrow(const float* numbers, int64_t count, DType dtype,
                    uint16_t* out) {
  return kernels::VisitDType(dtype, [&](auto zero) -> absl::Status {
    using T = decltype(zero);
    for (int64_t i = 0; i < count; ++i) {
      const T narrow = kernels::FromFloat<T>(numbers[i]);
      if (!std::isfinite(kernels::ToFloat(narrow))) {
        return absl::OutOfRangeError(absl::StrCat(
            numbers[i], " does not fit ", kernels::DTypeName(dtype),
            ", the type of the device's activations"));
      }
      std::memcpy(out + i, &narrow, sizeof(narrow));
    }
    return absl::OkStatus();
  });
}

// Rows of a block that are about to be written to a sink.
struct Rows {
  const char* data = nullptr;
  DType dtype = DType::kF32;
  int64_t first_column = 0;  // counted from the tensor's first column
  int64_t columns = 0;
  int64_t first = 0;  // first row, counted from the tensor's first row
  int64_t count = 0;
  int64_t to = 0;  // destination; see RowTake::column
};

// Limits the host memory in which running jobs stage their writes.
class StagedBytes {
 public:
  explicit StagedBytes(int64_t most) : most_(most) {}

  // Waits until `bytes` and the bytes of the other running jobs together fit
  // into the limit. If no other job runs, they always fit.
  void Take(int64_t bytes) {
    base::MutexLock lock(&mutex_);
    while (taken_ > 0 && bytes > most_ - taken_) given_.Wait(&mutex_);
    taken_ += bytes;
  }
  void Give(int64_t bytes) {
    base::MutexLock lock(&mutex_);
    taken_ -= bytes;
    given_.SignalAll();
  }

 private:
  const int64_t most_;
  base::Mutex mutex_;
  base::CondVar given_;
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
};

class JobRunner {
 public:
  // `staged` is null if the device does not stage writes.
  JobRunner(WeightSource* source, plan::TpShard shard, kernels::Device* device,
            size_t buffer_bytes, StagedBytes* staged)
      : source_(source),
        shard_(shard),
        device_(device),
        staged_(staged),
        buffer_(buffer_bytes) {}

  absl::Status Run(const WeightJob& job) {
    if (staged_ == nullptr) return RunNow(job);
    int64_t bytes = 0;
    for (const WeightMemory* const memory : MemoryOf(job)) {
      bytes += memory->bytes;
    }
    staged_->Take(bytes);
    absl::Status status = RunNow(job);
    staged_->Give(bytes);
    return status;
  }

 private:
  // Maps the job's memory to host memory, runs the job, and hands the memory
  // back to the device.
  absl::Status RunNow(const WeightJob& job) {
    absl::Status status;
    for (WeightMemory* const memory : MemoryOf(job)) {
      if (memory->bytes == 0) continue;  // nothing to map
      absl::StatusOr<void*> host = device_->BeginWrite(
          memory->device, static_cast<size_t>(memory->bytes));
      status.Update(host.status());
      if (!host.ok()) break;
      memory->host = *host;
      if (memory->zeroed) {
        std::memset(memory->host, 0, static_cast<size_t>(memory->bytes));
      }
    }
    if (status.ok()) status = Fill(job);
    for (WeightMemory* const memory : MemoryOf(job)) {
      if (memory->host == nullptr) continue;
      status.Update(device_->EndWrite(memory->device, memory->host,
                                      static_cast<size_t>(memory->bytes)));
      memory->host = nullptr;
    }
    return status;
  }

  static std::set<WeightMemory*> MemoryOf(const WeightJob& job) {
    std::set<WeightMemory*> memory(job.memory.begin(), job.memory.end());
    for (const TensorRead& read : job.reads) {
      for (const WeightSink& sink : read.sinks) {
        if (sink.memory != nullptr) memory.insert(sink.memory);
      }
    }
    return memory;
  }

  static void ZeroPaddings(const WeightJob& job) {
    for (const TensorRead& read : job.reads) {
      for (const WeightSink& sink : read.sinks) {
        if (sink.kind == WeightSink::Kind::kPack ||
            sink.kind == WeightSink::Kind::kPackRows) {
          kernels::ZeroPadding(sink.shape, sink.memory->host);
        }
      }
    }
  }

  absl::Status Fill(const WeightJob& job) {
    ZeroPaddings(job);
    for (const TensorRead& read : job.reads) {
      KVASIR_ASSIGN_OR_RETURN(const DType dtype, source_->TypeOf(read.tensor));
      KVASIR_ASSIGN_OR_RETURN(const MatrixSize size,
                              source_->SizeOf(read.tensor));
      absl::Status status = CheckSize(read, size);
      if (status.ok()) status = FillFrom(read, size, dtype);
      if (!status.ok()) return WithName(read.tensor, status);
    }
    return job.finish ? job.finish() : absl::OkStatus();
  }

  absl::Status FillFrom(const TensorRead& read, const MatrixSize& size,
                        DType dtype) {
    for (const ReadRange& range : RangesOf(read, size, dtype, shard_)) {
      const auto row_bytes =
          static_cast<size_t>(range.num_columns * kernels::DTypeBytes(dtype));
      if (buffer_.size() < row_bytes) buffer_.resize(row_bytes);
      int64_t end = range.first_row;
      const absl::Status status = source_->Read(
          read.tensor, range, buffer_,
          [&](const WeightBlock& block) -> absl::Status {
            KVASIR_RETURN_IF_ERROR(
                CheckColumns(block.columns, range.num_columns));
            KVASIR_RETURN_IF_ERROR(CheckFinite(block, dtype));
            end = block.first_row + block.num_rows;
            for (const WeightSink& sink : read.sinks) {
              KVASIR_RETURN_IF_ERROR(TakeRows(sink, block, dtype));
            }
            return absl::OkStatus();
          });
      KVASIR_RETURN_IF_ERROR(status);
      KVASIR_RETURN_IF_ERROR(CheckRows(end, range.first_row + range.num_rows));
    }
    return absl::OkStatus();
  }

  static absl::Status CheckColumns(int64_t columns, int64_t want) {
    if (columns == want) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("rows of the tensor have ", columns,
                     " elements, but must have ", want));
  }
  static absl::Status CheckRows(int64_t rows, int64_t want) {
    if (rows >= want) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "the tensor has ", rows, " rows, but must have at least ", want));
  }

  // Checks that the tensor has all rows that the sinks take, because missing
  // rows would leave gaps in a matrix.
  static absl::Status CheckSize(const TensorRead& read,
                                const MatrixSize& size) {
    KVASIR_RETURN_IF_ERROR(CheckColumns(size.columns, read.columns));
    int64_t want = 0;
    for (const WeightSink& sink : read.sinks) {
      for (const RowTake& take : sink.takes) {
        want = std::max(want, take.row + take.count);
      }
    }
    return CheckRows(size.rows, want);
  }

  absl::Status TakeRows(const WeightSink& sink, const WeightBlock& block,
                        DType dtype) {
    for (const RowTake& take : sink.takes) {
      const int64_t begin = std::max(block.first_row, take.row);
      const int64_t end =
          std::min(block.first_row + block.num_rows, take.row + take.count);
      if (begin >= end) continue;
      Rows rows{static_cast<const char*>(block.data), dtype, block.first_column,
                block.columns};
      rows.data += (begin - block.first_row) * block.columns *
                   kernels::DTypeBytes(dtype);
      rows.first = begin;
      rows.count = end - begin;
      rows.to = take.column + begin - take.row;
      KVASIR_RETURN_IF_ERROR(Put(sink, rows));
    }
    return absl::OkStatus();
  }

  absl::Status Put(const WeightSink& sink, const Rows& rows) {
    const int64_t numbers = rows.count * rows.columns;
    const int64_t width = kernels::DTypeBytes(rows.dtype);
    switch (sink.kind) {
      case WeightSink::Kind::kFloats:
        Widen(rows.data, rows.dtype, numbers,
              sink.memory->host_floats(rows.to * rows.columns));
        return absl::OkStatus();
      case WeightSink::Kind::kVisit:
        sink.visit(rows.first, rows.count, Widened(rows));
        return absl::OkStatus();
      case WeightSink::Kind::kTable:
        std::memcpy(static_cast<char*>(sink.memory->host) +
                        rows.to * rows.columns * width,
                    rows.data, static_cast<size_t>(numbers * width));
        return absl::OkStatus();
      default:
        break;
    }
    const int64_t first_column = sink.first_column - rows.first_column;
    kernels::RowBlock block;
    block.num_rows = rows.count;
    block.row_stride = rows.columns;
    if (rows.dtype == sink.shape.dtype) {
      block.data = rows.data + first_column * width;
    } else if (sink.shape.dtype == DType::kF32) {
      block.data = Widened(rows) + first_column;
    } else {
      narrow_.resize(static_cast<size_t>(numbers));
      KVASIR_RETURN_IF_ERROR(
          Narrow(Widened(rows), numbers, sink.shape.dtype, narrow_.data()));
      block.data = narrow_.data() + first_column;
    }
    return sink.kind == WeightSink::Kind::kPackRows
               ? kernels::PackAsTheyLie(sink.shape, block, rows.to,
                                        sink.memory->host)
               : kernels::PackRows(sink.shape, block, rows.to,
                                   sink.memory->host);
  }

  // Returns the rows as float32. The result is valid until the next call.
  const float* Widened(const Rows& rows) {
    const int64_t numbers = rows.count * rows.columns;
    wide_.resize(static_cast<size_t>(numbers));
    Widen(rows.data, rows.dtype, numbers, wide_.data());
    return wide_.data();
  }

  WeightSource* const source_;
  const plan::TpShard shard_;
  kernels::Device* const device_;
  StagedBytes* const staged_;
  std::vector<std::byte> buffer_;
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
};

}  // namespace

absl::StatusOr<WeightMemory*> WeightJobs::Allocate(int64_t bytes) {
  bytes_ += bytes;
  WeightMemory& memory = memory_.emplace_back();
  memory.bytes = bytes;
  if (device_ == nullptr) return &memory;
  KVASIR_ASSIGN_OR_RETURN(
      kernels::DeviceBuffer buffer,
      device_->allocator().Allocate(static_cast<size_t>(bytes),
                                    kernels::MemoryTag::kWeights));
  memory.device = buffer.data();
  buffers_->push_back(std::move(buffer));
  return &memory;
}

void WeightJobs::SetFormat(DType stored, PackedMatrix* matrix) {
  matrix->layout = format_.layout;
  matrix->dtype = format_.TypeFor(stored);
  if (matrix->dtype != stored) rounded_bytes_ += matrix->bytes();
}

absl::StatusOr<WeightMemory*> WeightJobs::AllocateMatrix(
    const std::string& tensor, PackedMatrix* matrix) {
  KVASIR_ASSIGN_OR_RETURN(const DType stored, source_->TypeOf(tensor));
  SetFormat(stored, matrix);
  KVASIR_ASSIGN_OR_RETURN(WeightMemory* const memory,
                          Allocate(matrix->bytes()));
  matrix->data = memory->device;
  CountAsMatrix(matrix->bytes());
  return memory;
}

absl::Status WeightJobs::Matrix(std::vector<TensorRows> parts, int64_t k,
                                PackedMatrix* out) {
  std::vector<std::vector<TensorRows>> matrices;
  matrices.push_back(std::move(parts));
  return Matrices(std::move(matrices), k, out);
}

absl::Status WeightJobs::Matrices(std::vector<std::vector<TensorRows>> matrices,
                                  int64_t k, PackedMatrix* out) {
  PackedMatrix shape;
  shape.k = k;
  std::optional<DType> stored;
  for (const std::vector<TensorRows>& parts : matrices) {
    for (const TensorRows& part : parts) {
      KVASIR_ASSIGN_OR_RETURN(const DType dtype, source_->TypeOf(part.tensor));
      stored = stored.value_or(dtype) == dtype ? dtype : DType::kF32;
    }
  }
  for (const TensorRows& part : matrices.front()) {
    for (const RowTake& take : part.takes) shape.n += take.count;
  }
  const auto count = static_cast<int64_t>(matrices.size());
  for (int64_t i = 0; i < count; ++i) SetFormat(stored.value(), &shape);
  KVASIR_ASSIGN_OR_RETURN(WeightMemory* const memory,
                          Allocate(count * shape.bytes()));
  *out = shape;
  out->data = memory->device;
  CountAsMatrix(memory->bytes);
  for (int64_t i = 0; i < count; ++i) {
    // Each job maps and fills only its own part of the memory.
    WeightMemory& own = memory_.emplace_back();
    own.device =
        (memory->device.as<std::byte>() + i * shape.bytes()).as<void>();
    own.bytes = shape.bytes();
    WeightJob job;
    job.bytes = shape.bytes();
    for (TensorRows& part : matrices[static_cast<size_t>(i)]) {
      WeightSink sink;
      sink.kind = WeightSink::Kind::kPack;
      sink.takes = std::move(part.takes);
      sink.first_column = part.first_column;
      sink.shape = shape;
      sink.memory = &own;
      job.reads.push_back(
          {std::move(part.tensor), part.columns, {std::move(sink)}});
    }
    Add(std::move(job));
  }
  return absl::OkStatus();
}

absl::Status WeightJobs::Floats(std::vector<TensorRows> parts, int64_t size,
                                kernels::DevicePtr<const float>* out,
                                std::function<void(absl::Span<float>)> finish) {
  WeightJob job;
  job.bytes = size * static_cast<int64_t>(sizeof(float));
  KVASIR_ASSIGN_OR_RETURN(WeightMemory* const memory, Allocate(job.bytes));
  memory->zeroed = true;
  for (TensorRows& part : parts) {
    WeightSink sink;
    sink.takes = std::move(part.takes);
    sink.memory = memory;
    job.reads.push_back(
        {std::move(part.tensor), part.columns, {std::move(sink)}});
  }
  *out = memory->floats();
  if (finish) {
    job.finish = [memory, size, finish = std::move(finish)] {
      finish(absl::MakeSpan(memory->host_floats(), static_cast<size_t>(size)));
      return absl::OkStatus();
    };
  }
  Add(std::move(job));
  return absl::OkStatus();
}

absl::Status WeightJobs::Table(const std::string& tensor, int64_t first_row,
                               int64_t rows, int64_t columns, DType* dtype,
                               kernels::DevicePtr<const void>* out) {
  KVASIR_ASSIGN_OR_RETURN(*dtype, source_->TypeOf(tensor));
  WeightJob job;
  job.bytes = rows * columns * kernels::DTypeBytes(*dtype);
  WeightSink sink;
  sink.kind = WeightSink::Kind::kTable;
  sink.takes = {{first_row, rows, 0}};
  KVASIR_ASSIGN_OR_RETURN(sink.memory, Allocate(job.bytes));
  *out = sink.memory->device;
  job.reads.push_back({tensor, columns, {std::move(sink)}});
  Add(std::move(job));
  return absl::OkStatus();
}

void WeightJobs::ReadOnly(const std::string& tensor, int64_t columns) {
  WeightJob job;
  job.reads.push_back({tensor, columns, {}});
  Add(std::move(job));
}

absl::StatusOr<int64_t> WeightJobs::ReadBytes() const {
  int64_t bytes = 0;
  for (const WeightJob& job : jobs_) {
    for (const TensorRead& read : job.reads) {
      KVASIR_ASSIGN_OR_RETURN(const DType dtype, source_->TypeOf(read.tensor));
      KVASIR_ASSIGN_OR_RETURN(const MatrixSize size,
                              source_->SizeOf(read.tensor));
      for (const ReadRange& range : RangesOf(read, size, dtype, shard_)) {
        bytes +=
            range.num_rows * range.num_columns * kernels::DTypeBytes(dtype);
      }
    }
  }
  return bytes;
}

absl::Status WeightJobs::Run(const RunOptions& options) {
  // The largest jobs run first, so that all threads end at about the same time.
  std::stable_sort(
      jobs_.begin(), jobs_.end(),
      [](const WeightJob& a, const WeightJob& b) { return a.bytes > b.bytes; });
  int64_t total_bytes = 0;
  for (const WeightJob& job : jobs_) total_bytes += job.bytes;
  base::Mutex mutex;
  absl::Status status;
  int64_t done_bytes = 0;
  std::atomic<size_t> next = 0;
  StagedBytes staged(options.max_staged_bytes);
  options.pool->Run([&](int) {
    JobRunner runner(source_, shard_, device_, options.read_buffer_bytes,
                     device_->stages_writes() ? &staged : nullptr);
    while (true) {
      const size_t index = next.fetch_add(1);
      if (index >= jobs_.size()) return;
      const absl::Status result = runner.Run(jobs_[index]);
      base::MutexLock lock(&mutex);
      if (!result.ok()) {
        status.Update(result);
        next = jobs_.size();
        return;
      }
      done_bytes += jobs_[index].bytes;
      if (options.progress) options.progress(done_bytes, total_bytes);
    }
  });
  jobs_.clear();
  return status;
}

}  // namespace kvasir::worker
