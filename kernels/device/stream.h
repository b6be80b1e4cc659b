// Where ops are enqueued: an in-order queue of one device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "kernels/device/device_ops.h"
#include "kernels/device/device_ptr.h"
#include "kernels/device/launcher.h"
#include "kernels/device/memory_guard.h"

namespace kvasir::kernels {

enum class DeviceKind : uint8_t { kCpu, kCuda };

// Which implementation a CPU stream runs. All give the same bits.
enum class CpuBackend : uint8_t {
  kReference,  // scalar, one thread: the truth for tests
  kSimd,       // the best instruction set of this machine, all threads
};

// Ops run in the order in which they were enqueued; the host may run ahead.
//
// Threads: one thread at a time.
// Errors: an op refuses bad parameters when it is enqueued; what fails later
//   is returned by Synchronize and by ReadBack.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  DeviceKind device() const { return device_; }

  // Returns when all enqueued work is done.
  virtual absl::Status Synchronize() = 0;
  // What `Upload` and `ReadBack` (read_back.h) do.
  virtual absl::Status CopyToDevice(DevicePtr<void> device, const void* host,
                                    size_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, DevicePtr<const void> device,
                                  size_t bytes) = 0;
  // Takes now what copies of up to `bytes` will need of the host, so that they
  // allocate nothing.
  virtual absl::Status ReserveCopies(size_t) { return absl::OkStatus(); }

  // Bytes of packed weights (the padding of the last panel included) that
  // matmuls have asked memory for so far: counted, not measured. The SIMD
  // matmul adds the weight's bytes once for each part that it cuts the rows
  // into (one, unless there are fewer panels than threads): inside a part every
  // panel block comes from memory once and serves all rows from cache. The
  // reference adds them once a row. Biases and activations are not in it. May
  // be read from any thread.
  int64_t weight_bytes_read() const {
    return weight_bytes_read_.load(std::memory_order_relaxed);
  }
  void AddWeightBytesRead(int64_t bytes) {
    weight_bytes_read_.fetch_add(bytes, std::memory_order_relaxed);
  }

 protected:
  explicit Stream(DeviceKind device) : device_(device) {}

 private:
  const DeviceKind device_;
  std::atomic<int64_t> weight_bytes_read_{0};
};

// Executes each op within its enqueueing call, on a thread pool that several
// streams may share. Code of the CPU's back end and of its tests names it;
// others ask a Device for a stream.
class CpuStream final : public Stream {
 public:
  // `pool` and `guard` (or null) outlive the stream.
  explicit CpuStream(base::ThreadPool* pool,
                     CpuBackend backend = CpuBackend::kSimd,
                     MemoryGuard* guard = nullptr)
      : Stream(DeviceKind::kCpu),
        pool_(pool),
        backend_(backend),
        guard_(guard) {}

  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::Status CopyToDevice(DevicePtr<void> device, const void* host,
                            size_t bytes) override;
  absl::Status CopyToHost(void* host, DevicePtr<const void> device,
                          size_t bytes) override;

  base::ThreadPool& pool() const { return *pool_; }
  CpuBackend backend() const { return backend_; }
  MemoryGuard* guard() const { return guard_; }

 private:
  base::ThreadPool* const pool_;
  const CpuBackend backend_;
  MemoryGuard* const guard_;
};

// A place in a stream's work. May outlive its stream and device.
//
// Threads: passed from any thread.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  // Whether the stream has come by the last Record. An error is that of work
  // before it.
  virtual absl::StatusOr<bool> passed() const = 0;
};

// What a stream enqueued while it captured, to be enqueued again as a whole
// (LaunchStream::Replay).
//
// Threads: as its stream. May outlive stream and device; what is under way of
//   it is waited for when it is destroyed, by a thread that captures nothing.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
};

// A GPU's stream, or that of a device which stands for one.
//
// A stream that captures keeps what is enqueued, launches with the parameters
// that they have then and calls of libraries, and runs none of it. It is not
// waited for meanwhile, nothing is copied or recorded on it
// (FAILED_PRECONDITION), and the thread neither allocates nor frees memory of
// the device; another thread that frees some waits for the end. What a GPU
// refuses all the same is an error of that call or of EndCapture.
class LaunchStream : public Stream {
 public:
  const DeviceOps& ops() const { return ops_; }
  virtual Launcher& launcher() = 0;
  // What libraries enqueue on: a cudaStream_t, or a HostWork (host_work.h) on a
  // device that stands for a GPU. Names the device for the calling thread.
  virtual absl::StatusOr<void*> LibraryHandle() = 0;
  virtual absl::StatusOr<std::unique_ptr<StreamMark>> MakeMark() = 0;
  // `mark` was made by a stream of this device.
  virtual absl::Status Record(StreamMark* mark) = 0;
  // Captures what this thread enqueues from here on, up to EndCapture.
  // UNIMPLEMENTED for a device that cannot.
  virtual absl::Status BeginCapture() {
    return absl::UnimplementedError("the device captures no work");
  }
  // By the thread that began. The stream captures no more, whatever is
  // returned.
  virtual absl::StatusOr<std::unique_ptr<CapturedWork>> EndCapture() {
    return absl::FailedPreconditionError("the stream captures nothing");
  }
  virtual bool capturing() const { return false; }
  // Enqueues all of it. `work` was captured by this stream.
  virtual absl::Status Replay(CapturedWork&) {
    return absl::UnimplementedError("the device captures no work");
  }
  // What launching itself failed with since the last call.
  virtual absl::Status TakeLaunchError() { return absl::OkStatus(); }
  // A device that can tells addresses which are not its own, by a message and
  // the end of the process.
  virtual void CheckMemory(const char*, const void*) const {}

 protected:
  explicit LaunchStream(const DeviceOps& ops)
      : Stream(DeviceKind::kCuda), ops_(ops) {}

 private:
  const DeviceOps ops_;
};

// Name of the instruction set that CpuBackend::kSimd runs on this machine
// ("AVX3_DL", "AVX2", "NEON", ...); for logs and build info.
std::string CpuTargetName();

}  // namespace kvasir::kernels
