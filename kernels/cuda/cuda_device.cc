#include "kernels/cuda/cuda_device.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/cuda/staging.h"

namespace kvasir::kernels {
namespace {

using cuda::CudaError;
using cuda::Result;
using cuda::StreamHandle;

// What cudaMalloc and cudaMallocHost promise.
constexpr size_t kAlignment = 256;
// What nvcc compiles for: sm_80, sm_90a, and PTX that drivers translate for
// newer ones.
constexpr int kLeastMajor = 8;
constexpr char kCodeOf[] = "sm_80, sm_90a and PTX of compute_80";

std::string Version(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status CheckDriver(cuda::Runtime& runtime) {
  // Drivers serve runtimes of their own major version, older and newer.
  const int want = runtime.RuntimeVersion() / 1000 * 1000;
  int have = 0;
  const Result result = runtime.DriverVersion(&have);
  if (result == Result::kOk && have >= want) return absl::OkStatus();
  if (result != Result::kOk && result != Result::kOldDriver) {
    return CudaError("version of the NVIDIA driver", runtime, result);
  }
  if (have == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no NVIDIA driver (libcuda.so.1) on this host; want one for CUDA ",
        Version(want), " or later"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the NVIDIA driver is for CUDA ", Version(have), ", want ",
                   Version(want), " or later: update it"));
}

absl::Status CheckOrdinal(cuda::Runtime& runtime, int ordinal) {
  int count = 0;
  const Result result = runtime.DeviceCount(&count);
  if (result != Result::kOk && result != Result::kNoDevice) {
    return CudaError("number of GPUs", runtime, result);
  }
  if (count == 0 || result == Result::kNoDevice) {
    return absl::FailedPreconditionError(
        "the NVIDIA driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)");
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda:", ordinal, ": no such GPU; there are ", count,
                     ", cuda:0 to cuda:", count - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckArchitecture(const cuda::DeviceProperties& properties,
                               int ordinal) {
  if (properties.major >= kLeastMajor) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "cuda:", ordinal, " (", properties.name, ") is sm_", properties.major,
      properties.minor, "; this build has code of ", kCodeOf,
      ": want compute capability ", kLeastMajor, ".0 or later"));
}

}  // namespace

// What device, allocator and streams share.
class CudaDevice::State {
 public:
  State(cuda::Runtime* runtime, int device, cuda::DeviceProperties what)
      : ordinal(device), properties(std::move(what)), runtime_(runtime) {}

  // For calls of this thread from here on.
  cuda::Runtime& runtime() const {
    // Where it fails the call that follows does too, and says why.
    runtime_->Use(ordinal);
    return *runtime_;
  }
  absl::Status Failed(const absl::string_view what, Result result) const {
    return CudaError(absl::StrCat("cuda:", ordinal, ": ", what), *runtime_,
                     result);
  }

  // Once for each kernel that wants more shared memory than kernels have.
  Result AllowShared(const KernelLaunch& launch) {
    base::MutexLock lock(&mutex_);
    uint32_t& allowed = allowed_[launch.function];
    if (launch.shared_bytes <= allowed) return Result::kOk;
    const Result result =
        runtime().AllowSharedBytes(launch.function, launch.shared_bytes);
    if (result == Result::kOk) allowed = launch.shared_bytes;
    return result;
  }

  const int ordinal;
  const cuda::DeviceProperties properties;

 private:
  cuda::Runtime* const runtime_;
  base::Mutex mutex_;
  std::map<const void*, uint32_t> allowed_ ABSL_GUARDED_BY(mutex_);
};

class CudaDevice::Allocator final : public DeviceAllocator {
 public:
  Allocator(std::shared_ptr<State> state, int64_t limit_bytes)
      : DeviceAllocator(limit_bytes, HostPool::kOnHost),
        state_(std::move(state)) {}

 private:
  void* Acquire(size_t bytes, const AllocationOptions& options) override {
    KVASIR_CHECK(options.alignment_bytes <= kAlignment);
    void* memory = nullptr;
    const Result result = state_->runtime().Allocate(&memory, bytes);
    return result == Result::kOk ? memory : nullptr;
  }
  void Release(void* data, size_t) override {
    cuda::Runtime& runtime = state_->runtime();
    // What is enqueued may still want it.
    runtime.SynchronizeDevice();
    runtime.Free(data);
  }
  void* AcquireOnHost(size_t bytes, const AllocationOptions& options) override {
    KVASIR_CHECK(options.alignment_bytes <= kAlignment);
    void* memory = nullptr;
    if (state_->runtime().AllocateHost(&memory, bytes) != Result::kOk) {
      return nullptr;
    }
    if (options.prefault) std::memset(memory, 0, bytes);
    return memory;
  }
  void ReleaseOnHost(void* data, size_t) override {
    cuda::Runtime& runtime = state_->runtime();
    runtime.SynchronizeDevice();
    runtime.FreeHost(data);
  }
  std::string Refusal(size_t bytes, MemoryTag tag) const override {
    if (tag == MemoryTag::kHostPool) {
      return absl::StrCat("the host: want ", bytes,
                          " bytes of pinned memory for ", MemoryTagName(tag));
    }
    size_t free = 0, total = 0;
    const Result result = state_->runtime().MemoryInfo(&free, &total);
    // After an error of the device no memory is what is missing.
    if (result != Result::kOk) {
      return std::string(
          state_
              ->Failed(absl::StrCat("want ", bytes, " bytes for ",
                                    MemoryTagName(tag)),
                       result)
              .message());
    }
    return absl::StrCat("cuda:", state_->ordinal, ": want ", bytes,
                        " bytes for ", MemoryTagName(tag), ", free ", free,
                        " of ", total, ", held already ", device_bytes());
  }
  std::string Advice(MemoryTag tag) const override {
    switch (tag) {
      case MemoryTag::kKvCache:
        return "; lower --kv-cache-bytes";
      case MemoryTag::kHostPool:
        return "; lower --host-pool-bytes";
      case MemoryTag::kWorkspace:
        return "; lower --max-batched-tokens or --kv-cache-bytes";
      case MemoryTag::kWeights:
      case MemoryTag::kOther:
        break;
    }
    return "; take a smaller model, or another --device";
  }

  const std::shared_ptr<State> state_;
};

class CudaDevice::CudaStream final : public LaunchStream, public Launcher {
 public:
  CudaStream(std::shared_ptr<State> state, const DeviceOps& ops)
      : LaunchStream(ops), state_(std::move(state)) {
    const Result result = state_->runtime().MakeStream(&stream_);
    if (result != Result::kOk) {
      broken_ = state_->Failed("a stream", result);
      return;
    }
    staging_.emplace(&state_->runtime(), stream_);
  }
  ~CudaStream() override {
    if (!broken_.ok()) return;
    cuda::Runtime& runtime = state_->runtime();
    runtime.SynchronizeStream(stream_);
    staging_.reset();
    runtime.DestroyStream(stream_);
  }

  Launcher& launcher() override { return *this; }
  absl::Status Synchronize() override {
    KVASIR_RETURN_IF_ERROR(broken_);
    const Result result = state_->runtime().SynchronizeStream(stream_);
    if (result == Result::kOk) return absl::OkStatus();
    return state_->Failed(
        absl::StrCat("work on a stream, up to the kernel ", last_kernel_,
                     " (CUDA_LAUNCH_BLOCKING=1 names the one that fails)"),
        result);
  }
  absl::Status CopyToDevice(DevicePtr<void> device, const void* host,
                            size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(broken_);
    (void)state_->runtime();
    return staging_->Upload(device.device_address(), host, bytes);
  }
  absl::Status CopyToHost(void* host, DevicePtr<const void> device,
                          size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(broken_);
    (void)state_->runtime();
    return staging_->ReadBack(host, device.device_address(), bytes);
  }
  absl::Status TakeLaunchError() override {
    KVASIR_RETURN_IF_ERROR(broken_);
    return std::exchange(launch_error_, absl::OkStatus());
  }

  void Enqueue(const KernelLaunch& launch) override {
    // One op may launch several: its first error is the one to tell.
    if (!broken_.ok() || !launch_error_.ok()) return;
    last_kernel_ = launch.name;
    launch_error_ = TryLaunch(launch);
  }
  int multiprocessors() const override {
    return state_->properties.multiprocessors;
  }
  int64_t shared_bytes() const override {
    return state_->properties.shared_bytes;
  }

 private:
  absl::Status TryLaunch(const KernelLaunch& launch) {
    if (launch.shared_bytes > state_->properties.shared_bytes) {
      return absl::InternalError(absl::StrCat(
          "cuda:", state_->ordinal, ": kernel ", launch.name, ": want ",
          launch.shared_bytes, " bytes of shared memory, a CTA has at most ",
          state_->properties.shared_bytes));
    }
    if (launch.shared_bytes > cuda::kPlainSharedBytes) {
      const Result result = state_->AllowShared(launch);
      if (result != Result::kOk) return Refused(launch, result);
    }
    const Result result = state_->runtime().Launch(launch, stream_);
    return result == Result::kOk ? absl::OkStatus() : Refused(launch, result);
  }
  absl::Status Refused(const KernelLaunch& launch, Result result) const {
    return state_->Failed(
        absl::StrCat("kernel ", launch.name, " (", launch.grid_x, " x ",
                     launch.grid_y, " CTAs of ", launch.threads,
                     " threads, shared memory of ", launch.shared_bytes,
                     " bytes", launch.ctas_together ? ", all together" : "",
                     result == Result::kNoImage
                         ? absl::StrCat("; this build has code of ", kCodeOf)
                         : "",
                     ")"),
        result);
  }

  const std::shared_ptr<State> state_;
  StreamHandle stream_ = nullptr;
  absl::Status broken_;  // the stream could not be made
  absl::Status launch_error_;
  const char* last_kernel_ = "(none)";
  std::optional<cuda::Staging> staging_;
};

// A stream for what the host writes between steps.
class CudaDevice::Writes {
 public:
  explicit Writes(std::shared_ptr<State> state) : state_(std::move(state)) {}
  ~Writes() {
    if (stream_ == nullptr) return;
    cuda::Runtime& runtime = state_->runtime();
    runtime.SynchronizeStream(stream_);
    staging_.reset();
    runtime.DestroyStream(stream_);
  }

  absl::Status Write(void* device, const void* host, size_t bytes) {
    base::MutexLock lock(&mutex_);
    cuda::Runtime& runtime = state_->runtime();
    if (stream_ == nullptr) {
      const Result result = runtime.MakeStream(&stream_);
      if (result != Result::kOk) return state_->Failed("a stream", result);
      staging_.emplace(&runtime, stream_);
    }
    KVASIR_RETURN_IF_ERROR(staging_->Upload(device, host, bytes));
    // Streams do not wait for each other: after this all of them see it.
    const Result result = runtime.SynchronizeStream(stream_);
    return result == Result::kOk ? absl::OkStatus()
                                 : state_->Failed("write", result);
  }

 private:
  const std::shared_ptr<State> state_;
  base::Mutex mutex_;
  StreamHandle stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<cuda::Staging> staging_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Make(
    const CudaDeviceOptions& options, cuda::Runtime* runtime,
    const DeviceOps& ops) {
  KVASIR_RETURN_IF_ERROR(CheckDriver(*runtime));
  KVASIR_RETURN_IF_ERROR(CheckOrdinal(*runtime, options.ordinal));
  cuda::DeviceProperties properties;
  Result result = runtime->Properties(options.ordinal, &properties);
  const std::string device = absl::StrCat("cuda:", options.ordinal);
  if (result != Result::kOk) {
    return CudaError(absl::StrCat(device, ": its properties"), *runtime,
                     result);
  }
  KVASIR_RETURN_IF_ERROR(CheckArchitecture(properties, options.ordinal));
  // Here CUDA makes its context, which takes memory of its own.
  result = runtime->Use(options.ordinal);
  size_t free = 0, total = 0;
  if (result == Result::kOk) result = runtime->MemoryInfo(&free, &total);
  if (result != Result::kOk) {
    return CudaError(absl::StrCat(device, " (", properties.name,
                                  ") cannot be used (does another process "
                                  "hold it?)"),
                     *runtime, result);
  }
  return std::unique_ptr<CudaDevice>(new CudaDevice(
      std::make_shared<State>(runtime, options.ordinal, std::move(properties)),
      options, ops));
}

CudaDevice::CudaDevice(std::shared_ptr<State> state,
                       const CudaDeviceOptions& options, const DeviceOps& ops)
    : Device(DeviceKind::kCuda,
             std::make_unique<Allocator>(state, options.memory_limit_bytes)),
      state_(state),
      ops_(ops),
      activations_(options.activations),
      writes_(std::make_unique<Writes>(std::move(state))) {}

CudaDevice::~CudaDevice() = default;

const cuda::DeviceProperties& CudaDevice::properties() const {
  return state_->properties;
}

absl::StatusOr<CudaMemory> CudaDevice::memory() const {
  size_t free = 0, total = 0;
  const Result result = state_->runtime().MemoryInfo(&free, &total);
  if (result != Result::kOk) return state_->Failed("its memory", result);
  CudaMemory memory;
  memory.total_bytes = static_cast<int64_t>(total);
  memory.free_bytes = static_cast<int64_t>(free);
  memory.allocated_bytes = allocator().device_bytes();
  memory.other_bytes =
      memory.total_bytes - memory.free_bytes - memory.allocated_bytes;
  return memory;
}

std::unique_ptr<Stream> CudaDevice::MakeStream() {
  return std::make_unique<CudaStream>(state_, ops_);
}

absl::StatusOr<void*> CudaDevice::BeginWrite(DevicePtr<void>, size_t bytes) {
  void* const host = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (host == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system refused ", bytes,
                     " bytes of the host to write device memory from"));
  }
  return host;
}

absl::Status CudaDevice::EndWrite(DevicePtr<void> memory, void* host,
                                  size_t bytes) {
  absl::Status status = writes_->Write(memory.device_address(), host, bytes);
  std::free(host);
  return status;
}

}  // namespace kvasir::kernels
