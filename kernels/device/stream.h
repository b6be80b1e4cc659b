// Stream: a queue of ops for one device, which runs them in order.
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

// The implementation of ops that a CPU stream uses. Both implementations give
// the same bits.
enum class CpuBackend : uint8_t {
  kReference,  // scalar, one thread: the reference for tests
  kSimd,       // the best instruction set of this machine, all threads
};

// Ops run in the order in which they were enqueued. A call that enqueues an op
// may return before earlier ops are done.
//
// Threads: only one thread at a time may use a stream.
// Errors: an op with bad parameters is refused when it is enqueued; later
// failures are returned by Synchronize and ReadBack.
class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  DeviceKind device() const { return device_; }

  // Waits until all enqueued work is done.
  virtual absl::Status Synchronize() = 0;
  // CopyToDevice implements Upload, CopyToHost implements ReadBack
  // (read_back.h).
  virtual absl::Status CopyToDevice(DevicePtr<void> device, const void* host,
                                    size_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, DevicePtr<const void> device,
                                  size_t bytes) = 0;
  // Allocates now the host memory that copies of up to `bytes` need, so that no
  // later copy allocates memory.
  virtual absl::Status ReserveCopies(size_t) { return absl::OkStatus(); }

  // The bytes of packed weights that the matmuls of a CPU stream have read from
  // memory so far (0 for a GPU), including the padding of the last panel. The
  // number is computed, not measured. The SIMD matmul counts a weight once for
  // each part into which it divides the rows. There is only one part unless
  // there are fewer panels than threads. The reference matmul counts a weight
  // once per row. Biases and activations are not counted. May be called from
  // any thread.
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

// A stream of the CPU. It runs each op within the call that enqueues it, on a
// thread pool that several streams may share. Only the CPU's back end and its
// tests use this class directly; other code gets a stream from a Device.
class CpuStream final : public Stream {
 public:
  // `pool` and `guard` must outlive the stream; `guard` may be null.
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

// Marks a position in a stream's work, like a CUDA event. May outlive its
// stream and device.
//
// Threads: any thread may call `passed`.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  // True if the stream has executed everything that was enqueued before the
  // last LaunchStream::Record of this mark. If that work failed, returns its
  // error.
  virtual absl::StatusOr<bool> passed() const = 0;
};

// The work that a stream captured, like a CUDA graph. LaunchStream::Replay
// enqueues it again as a whole. May outlive its stream and device. The
// destructor waits for running replays; a thread whose stream is capturing must
// not call it.
//
// Threads: only one thread at a time may use this object or its stream.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
};

// A stream of a GPU or of a device that emulates one.
//
// While a stream captures, it stores launches, with their current parameters,
// and calls of libraries, but does not run them. During a capture, waiting for
// the stream, copying on it and recording a mark on it return
// FAILED_PRECONDITION. The capturing thread must not allocate or free memory of
// the device. If another thread frees memory, it waits for the end of the
// capture. If the GPU refuses any other call, that call or EndCapture returns
// the error.
class LaunchStream : public Stream {
 public:
  const DeviceOps& ops() const { return ops_; }
  virtual Launcher& launcher() = 0;
  // The handle with which other libraries enqueue work on this stream: a
  // cudaStream_t, or a HostWork (host_work.h) on an emulated device. The call
  // also makes the device current for the calling thread.
  virtual absl::StatusOr<void*> LibraryHandle() = 0;
  virtual absl::StatusOr<std::unique_ptr<StreamMark>> MakeMark() = 0;
  // Moves `mark` to the present end of this stream. `mark` must come from a
  // stream of this device.
  virtual absl::Status Record(StreamMark* mark) = 0;
  // Captures everything that this thread enqueues until EndCapture. Returns
  // UNIMPLEMENTED if the device cannot capture.
  virtual absl::Status BeginCapture() {
    return absl::UnimplementedError(
        "this device does not support stream capture");
  }
  // Ends the capture and returns the captured work. Must be called by the
  // thread that called BeginCapture. The capture ends even if an error is
  // returned.
  virtual absl::StatusOr<std::unique_ptr<CapturedWork>> EndCapture() {
    return absl::FailedPreconditionError(
        "the stream is not capturing, so no capture can end");
  }
  virtual bool capturing() const { return false; }
  // Enqueues the captured work once more. This stream must have captured it.
  virtual absl::Status Replay(CapturedWork&) {
    return absl::UnimplementedError(
        "this device does not support stream capture");
  }
  // Returns the error, if any, of the launches since the last call of this
  // function, and clears it.
  virtual absl::Status TakeLaunchError() { return absl::OkStatus(); }
  // Ends the process with a message if the device can tell that the address is
  // not in its memory.
  virtual void CheckMemory(const char*, const void*) const {}

 protected:
  explicit LaunchStream(const DeviceOps& ops)
      : Stream(DeviceKind::kCuda), ops_(ops) {}

 private:
  const DeviceOps ops_;
};

// The name of the instruction set that CpuBackend::kSimd uses on this machine
// ("AVX3_DL", "AVX2", "NEON", ...), for logs and build info.
std::string CpuTargetName();

}  // namespace kvasir::kernels
