#include "kernels/cuda/cuda_device.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/cuda/cublas_gemms.h"
#include "kernels/cuda/staging.h"
#include "kernels/device/gemm.h"

namespace kvasir::kernels {
namespace {

using cuda::CudaError;
using cuda::Result;
using cuda::StreamHandle;

// The alignment in bytes that cudaMalloc and cudaMallocHost guarantee.
constexpr size_t kAlignment = 256;
// Kernels are compiled for sm_80 and sm_90a, and to PTX, which the driver
// compiles for newer GPUs.
constexpr int kLeastMajor = 8;
constexpr char kCodeOf[] = "sm_80, sm_90a and PTX of compute_80";

std::string Version(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status CheckDriver(cuda::Runtime& runtime) {
  // A driver supports every CUDA runtime of the same major version, so only
  // major versions are compared.
  const int want = runtime.RuntimeVersion() / 1000 * 1000;
  int have = 0;
  const Result result = runtime.DriverVersion(&have);
  if (result == Result::kOk && have >= want) return absl::OkStatus();
  if (result != Result::kOk && result != Result::kOldDriver) {
    return CudaError("reading the version of the NVIDIA driver", runtime,
                     result);
  }
  if (have == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no NVIDIA driver (libcuda.so.1) on this host; install one for CUDA ",
        Version(want), " or later"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the NVIDIA driver supports only CUDA ", Version(have),
                   ", but this program needs CUDA ", Version(want),
                   " or later: update the driver"));
}

absl::Status CheckOrdinal(cuda::Runtime& runtime, int ordinal) {
  int count = 0;
  const Result result = runtime.DeviceCount(&count);
  if (result != Result::kOk && result != Result::kNoDevice) {
    return CudaError("reading the number of GPUs", runtime, result);
  }
  if (count == 0 || result == Result::kNoDevice) {
    return absl::FailedPreconditionError(
        "the NVIDIA driver sees no GPU; check CUDA_VISIBLE_DEVICES and the "
        "output of nvidia-smi");
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cuda:", ordinal,
        ": no such GPU; the last GPU of this host is cuda:", count - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckArchitecture(const cuda::DeviceProperties& properties,
                               int ordinal) {
  if (properties.major >= kLeastMajor) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "cuda:", ordinal, " (", properties.name, ") is sm_", properties.major,
      properties.minor, ", but this build has code only for ", kCodeOf,
      ": want compute capability ", kLeastMajor, ".0 or later"));
}

// True if this error of a launch was caused by an earlier kernel that ran
// asynchronously, not by the launch itself.
bool IsOfARunningKernel(Result result) {
  switch (static_cast<int>(result)) {
    case 214:  // an ECC error
    case 700:  // illegal address
    case 702:  // a kernel that took too long
    case 710:  // assert
    case 714:  // an error in the hardware stack
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // an address in the wrong address space
    case 718:  // an invalid program counter
    case 719:  // any other failure of a launch
      return true;
    default:
      return false;
  }
}

}  // namespace

// State that the device, its allocator and its streams share. It lives as long
// as any of them.
class CudaDevice::State {
 public:
  State(cuda::Runtime* runtime, int device, cuda::DeviceProperties what)
      : ordinal(device), properties(std::move(what)), runtime_(runtime) {}
  ~State() {
    // Selects the device, because the handle in `gemms` must be destroyed on
    // it.
    if (gemms != nullptr) (void)runtime();
  }

  // Selects the device for the calling thread and returns the runtime. If the
  // device cannot be selected, returns an error, because CUDA calls would use
  // another GPU: the one that the thread selected before, or the first one.
  absl::StatusOr<cuda::Runtime*> runtime() const {
    if (failed_.load()) {
      base::MutexLock lock(&mutex_);
      return failure_;
    }
    const Result result = runtime_->Use(ordinal);
    if (result != Result::kOk) return Failed("selecting the device", result);
    return runtime_;
  }
  // Returns the runtime for calls for which it does not matter which device the
  // thread has selected.
  cuda::Runtime& any() const { return *runtime_; }

  absl::Status Failed(const absl::string_view what, Result result) const {
    return CudaError(absl::StrCat("cuda:", ordinal, ": ", what), *runtime_,
                     result);
  }
  absl::Status OkOr(const absl::string_view what, Result result) const {
    return result == Result::kOk ? absl::OkStatus() : Failed(what, result);
  }
  // Stores an error that cannot be returned to a caller, for example from a
  // destructor. Every later call of runtime() returns it.
  void Keep(const absl::Status& status) {
    if (status.ok()) return;
    base::MutexLock lock(&mutex_);
    failure_.Update(status);
    failed_ = true;
  }

  // Allows a kernel to use its shared memory if it needs more than
  // kPlainSharedBytes. CUDA is called only if the kernel has not been allowed
  // as much before.
  Result AllowShared(cuda::Runtime& runtime, const KernelLaunch& launch) {
    base::MutexLock lock(&mutex_);
    uint32_t& allowed = allowed_[launch.function];
    if (launch.shared_bytes <= allowed) return Result::kOk;
    const Result result =
        runtime.AllowSharedBytes(launch.function, launch.shared_bytes);
    if (result == Result::kOk) allowed = launch.shared_bytes;
    return result;
  }

  // In CUDA, waiting for the device while one of its streams captures makes
  // both the wait and the capture fail. Therefore WaitForDevice first waits
  // until no other thread captures, and StartCapture first waits until no
  // thread is in WaitForDevice.
  void StartCapture() {
    base::MutexLock lock(&captures_mutex_);
    while (device_waits_ > 0) captures_change_.Wait(&captures_mutex_);
    captures_.push_back(std::this_thread::get_id());
  }
  void StopCapture(std::thread::id thread) {
    base::MutexLock lock(&captures_mutex_);
    captures_.erase(std::find(captures_.begin(), captures_.end(), thread));
    captures_change_.SignalAll();
  }
  Result WaitForDevice() {
    const auto of_another = [](std::thread::id thread) {
      return thread != std::this_thread::get_id();
    };
    {
      base::MutexLock lock(&captures_mutex_);
      while (std::any_of(captures_.begin(), captures_.end(), of_another)) {
        captures_change_.Wait(&captures_mutex_);
      }
      ++device_waits_;
    }
    const Result waited = runtime_->SynchronizeDevice();
    base::MutexLock lock(&captures_mutex_);
    --device_waits_;
    captures_change_.SignalAll();
    return waited;
  }

  const int ordinal;
  const cuda::DeviceProperties properties;
  // The bytes of host memory that copies use, for all streams and for writes
  // (BeginWrite).
  std::atomic<int64_t> staging_bytes = 0;
  // Null if our own kernels multiply matrices. Set before other threads use the
  // device.
  std::unique_ptr<cuda::CublasGemms> gemms;

 private:
  cuda::Runtime* const runtime_;
  std::atomic<bool> failed_ = false;
  mutable base::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::map<const void*, uint32_t> allowed_ ABSL_GUARDED_BY(mutex_);
  base::Mutex captures_mutex_;
  base::CondVar captures_change_;
  std::vector<std::thread::id> captures_ ABSL_GUARDED_BY(captures_mutex_);
  int device_waits_ ABSL_GUARDED_BY(captures_mutex_) = 0;
};

class CudaDevice::Allocator final : public DeviceAllocator {
 public:
  Allocator(std::shared_ptr<State> state, const CudaDeviceOptions& options)
      : DeviceAllocator(options.memory_limit_bytes, HostPool::kOnHost,
                        options.host_limit_bytes),
        state_(std::move(state)) {}

 private:
  absl::StatusOr<void*> Acquire(size_t bytes,
                                const AllocationOptions& options) override {
    KVASIR_CHECK(options.alignment_bytes <= kAlignment);
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    void* memory = nullptr;
    const Result result = runtime->Allocate(&memory, bytes);
    return Given(memory, result);
  }
  void Release(void* data, size_t) override {
    state_->Keep(ReleaseBy(&cuda::Runtime::Free, data));
  }
  absl::StatusOr<void*> AcquireOnHost(
      size_t bytes, const AllocationOptions& options) override {
    KVASIR_CHECK(options.alignment_bytes <= kAlignment);
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    void* memory = nullptr;
    const Result result = runtime->AllocateHost(&memory, bytes);
    if (result == Result::kOk && options.prefault) {
      std::memset(memory, 0, bytes);
    }
    return Given(memory, result);
  }
  void ReleaseOnHost(void* data, size_t) override {
    state_->Keep(ReleaseBy(&cuda::Runtime::FreeHost, data));
  }
  std::string Refusal(size_t bytes, MemoryTag tag) const override {
    if (tag == MemoryTag::kHostPool) {
      return absl::StrCat("not enough host memory: ", bytes,
                          " bytes of pinned memory are needed for ",
                          MemoryTagName(tag));
    }
    const std::string want =
        absl::StrCat("cuda:", state_->ordinal, ": not enough memory: ", bytes,
                     " bytes are needed for ", MemoryTagName(tag));
    size_t free = 0, total = 0;
    const auto runtime = state_->runtime();
    if (!runtime.ok() || (*runtime)->MemoryInfo(&free, &total) != Result::kOk) {
      return absl::StrCat(want, ", and this process already uses ",
                          device_bytes(), " bytes");
    }
    return absl::StrCat(want, ", but only ", free, " of ", total,
                        " bytes are free; this process already uses ",
                        device_bytes(), " bytes");
  }
  std::string Advice(MemoryTag tag) const override {
    switch (tag) {
      case MemoryTag::kKvCache:
        return "; lower --kv-cache-bytes or --gpu-memory-utilization";
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

  // Converts the result of an allocation. Returns null if memory ran out;
  // Allocate then makes the error text.
  absl::StatusOr<void*> Given(void* memory, Result result) const {
    if (result == Result::kOk) return memory;
    if (result == Result::kOutOfMemory) return nullptr;
    return state_->Failed("allocating memory", result);
  }
  // Frees memory after waiting for the device, because enqueued work may still
  // use the memory. If the device cannot be selected, the memory is not freed.
  absl::Status ReleaseBy(Result (cuda::Runtime::*free)(void*),
                         void* data) const {
    const Result named = state_->any().Use(state_->ordinal);
    KVASIR_RETURN_IF_ERROR(state_->OkOr("selecting the device", named));
    const Result waited = state_->WaitForDevice();
    const Result freed = (state_->any().*free)(data);
    KVASIR_RETURN_IF_ERROR(
        state_->OkOr("waiting for work before memory is freed "
                     "(CUDA_LAUNCH_BLOCKING=1 names the kernel that fails)",
                     waited));
    return state_->OkOr("freeing memory", freed);
  }

  const std::shared_ptr<State> state_;
};

class CudaDevice::CudaStream final : public LaunchStream,
                                     public Launcher,
                                     public GemmLibrary {
 public:
  CudaStream(std::shared_ptr<State> state, const DeviceOps& ops)
      : LaunchStream(ops), state_(std::move(state)) {
    broken_ = Make();
  }
  ~CudaStream() override {
    if (stream_ == nullptr) return;
    if (capturing()) (void)EndCapture();
    // These calls act on the stream's own device, whichever device the thread
    // has selected.
    const Result waited = state_->any().SynchronizeStream(stream_);
    state_->Keep(state_->OkOr(Work(), waited));
    staging_.reset();
    state_->any().DestroyStream(stream_);
  }

  cuda::StreamHandle handle() const { return stream_; }
  Launcher& launcher() override { return *this; }
  absl::Status Synchronize() override {
    KVASIR_RETURN_IF_ERROR(Usable("waited for"));
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    return state_->OkOr(Work(), runtime->SynchronizeStream(stream_));
  }
  absl::Status CopyToDevice(DevicePtr<void> device, const void* host,
                            size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(Usable("copied to"));
    KVASIR_RETURN_IF_ERROR(state_->runtime().status());
    return OfCopy(staging_->Upload(device.device_address(), host, bytes));
  }
  absl::Status CopyToHost(void* host, DevicePtr<const void> device,
                          size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(Usable("read back from"));
    KVASIR_RETURN_IF_ERROR(state_->runtime().status());
    return OfCopy(staging_->ReadBack(host, device.device_address(), bytes));
  }
  absl::Status ReserveCopies(size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(Usable("waited for"));
    KVASIR_RETURN_IF_ERROR(state_->runtime().status());
    return OfCopy(staging_->Reserve(bytes));
  }
  absl::StatusOr<void*> LibraryHandle() override {
    KVASIR_RETURN_IF_ERROR(broken_);
    KVASIR_RETURN_IF_ERROR(state_->runtime().status());
    return stream_;
  }
  absl::StatusOr<std::unique_ptr<StreamMark>> MakeMark() override {
    KVASIR_RETURN_IF_ERROR(broken_);
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    cuda::EventHandle event = nullptr;
    KVASIR_RETURN_IF_ERROR(
        state_->OkOr("making an event", runtime->MakeEvent(&event)));
    return std::make_unique<Mark>(state_, event);
  }
  absl::Status Record(StreamMark* mark) override {
    // A mark cannot be recorded during a capture, because CUDA does not allow
    // an event of a graph to be queried.
    KVASIR_RETURN_IF_ERROR(Usable("marked"));
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    return state_->OkOr(
        Work(),
        runtime->RecordEvent(static_cast<Mark*>(mark)->event(), stream_));
  }
  absl::Status BeginCapture() override {
    KVASIR_RETURN_IF_ERROR(Usable("captured again"));
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    state_->StartCapture();
    const Result begun = runtime->BeginCapture(stream_);
    if (begun == Result::kOk) {
      capturing_ = std::this_thread::get_id();
    } else {
      state_->StopCapture(std::this_thread::get_id());
    }
    return state_->OkOr("beginning a capture", begun);
  }
  absl::StatusOr<std::unique_ptr<CapturedWork>> EndCapture() override {
    if (!capturing()) return LaunchStream::EndCapture();
    // The capture must be ended even if the device has failed meanwhile, so
    // errors are returned only afterwards.
    const Result named = state_->any().Use(state_->ordinal);
    cuda::GraphHandle graph = nullptr;
    const Result ended = state_->any().EndCapture(stream_, &graph);
    state_->StopCapture(*std::exchange(capturing_, std::nullopt));
    cuda::ExecHandle exec = nullptr;
    Result made = Result::kOk;
    if (ended == Result::kOk) {
      made = state_->any().InstantiateGraph(graph, stream_, &exec);
      state_->any().DestroyGraph(graph);
    }
    std::unique_ptr<CapturedWork> work;
    if (exec != nullptr) work = std::make_unique<Captured>(state_, exec);
    // If a launch was refused during the capture, the graph does not have it.
    // Therefore the launch's error is returned.
    KVASIR_RETURN_IF_ERROR(TakeLaunchError());
    KVASIR_RETURN_IF_ERROR(state_->OkOr("selecting the device", named));
    KVASIR_RETURN_IF_ERROR(state_->OkOr("ending a capture", ended));
    KVASIR_RETURN_IF_ERROR(state_->OkOr("making the graph of a capture", made));
    return work;
  }
  bool capturing() const override { return capturing_.has_value(); }
  absl::Status Replay(CapturedWork& work) override {
    KVASIR_RETURN_IF_ERROR(Usable("replayed to"));
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    last_kernel_ = "(of a graph)";
    return state_->OkOr(
        Work(),
        runtime->LaunchGraph(static_cast<Captured&>(work).exec(), stream_));
  }
  absl::Status TakeLaunchError() override {
    KVASIR_RETURN_IF_ERROR(broken_);
    return std::exchange(launch_error_, absl::OkStatus());
  }

  void Enqueue(const KernelLaunch& launch) override {
    // After the first error of an op, its other kernels are not launched, so
    // that this error is the one reported.
    if (!broken_.ok() || !launch_error_.ok()) return;
    launch_error_ = TryLaunch(launch);
    last_kernel_ = launch.name;
  }
  int multiprocessors() const override {
    return state_->properties.multiprocessors;
  }
  GemmLibrary* gemms() override {
    return state_->gemms == nullptr ? nullptr : this;
  }
  int64_t workspace_bytes() const override {
    return static_cast<int64_t>(state_->gemms->workspace_bytes());
  }
  void Enqueue(const Gemm& gemm) override {
    if (!broken_.ok() || !launch_error_.ok()) return;
    last_kernel_ = "cublasLtMatmul";
    launch_error_ = state_->runtime().status();
    if (!launch_error_.ok()) return;
    launch_error_ = state_->gemms->Enqueue(gemm, stream_);
  }

 private:
  // A mark's event does not need its stream, so a mark may outlive it. The
  // runtime must outlive the mark.
  class Mark final : public StreamMark {
   public:
    Mark(std::shared_ptr<State> state, cuda::EventHandle event)
        : state_(std::move(state)), event_(event) {}
    ~Mark() override { state_->any().DestroyEvent(event_); }
    cuda::EventHandle event() const { return event_; }
    absl::StatusOr<bool> passed() const override {
      bool over = false;
      const Result result = state_->any().QueryEvent(event_, &over);
      KVASIR_RETURN_IF_ERROR(state_->OkOr("work on a stream", result));
      return over;
    }

   private:
    const std::shared_ptr<State> state_;
    const cuda::EventHandle event_;
  };

  class Captured final : public CapturedWork {
   public:
    Captured(std::shared_ptr<State> state, cuda::ExecHandle exec)
        : state_(std::move(state)), exec_(exec) {}
    ~Captured() override {
      // The graph must be destroyed even if the device has failed, because a
      // library that has work in the graph waits for its destruction.
      const Result named = state_->any().Use(state_->ordinal);
      state_->Keep(state_->OkOr("selecting the device", named));
      state_->Keep(state_->OkOr("waiting for work before a graph is destroyed",
                                state_->WaitForDevice()));
      state_->any().DestroyExec(exec_);
    }
    cuda::ExecHandle exec() const { return exec_; }

   private:
    const std::shared_ptr<State> state_;
    const cuda::ExecHandle exec_;
  };

  absl::Status Make() {
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    KVASIR_RETURN_IF_ERROR(
        state_->OkOr("making a stream", runtime->MakeStream(&stream_)));
    staging_.emplace(runtime, stream_, &state_->staging_bytes);
    return absl::OkStatus();
  }

  // Returns an error while the stream captures, such as "cuda:0: a stream
  // cannot be waited for while it is capturing".
  absl::Status Usable(absl::string_view as) const {
    KVASIR_RETURN_IF_ERROR(broken_);
    if (!capturing()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cuda:", state_->ordinal, ": a stream cannot be ", as,
                     " while it is capturing"));
  }
  // Returns the text for an error of asynchronous work. Any kernel up to the
  // last one that was launched may have caused the error.
  std::string Work() const {
    return absl::StrCat("work on a stream, up to the kernel ", last_kernel_,
                        " (CUDA_LAUNCH_BLOCKING=1 names the one that fails)");
  }
  // Adds the last kernel's name to the error of a copy, because a copy may
  // report the errors of earlier kernels.
  absl::Status OfCopy(const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(
        status.code(),
        absl::StrCat("cuda:", state_->ordinal, ": ",
                     absl::IsResourceExhausted(status) ? "" : Work() + ": ",
                     status.message()));
  }

  absl::Status TryLaunch(const KernelLaunch& launch) {
    if (launch.shared_bytes > state_->properties.shared_bytes) {
      return absl::InternalError(
          absl::StrCat("cuda:", state_->ordinal, ": kernel ", launch.name,
                       " needs ", launch.shared_bytes,
                       " bytes of shared memory, but a CTA can have at most ",
                       state_->properties.shared_bytes));
    }
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    if (launch.shared_bytes > cuda::kPlainSharedBytes) {
      const Result result = state_->AllowShared(*runtime, launch);
      if (result != Result::kOk) return Refused(launch, result);
    }
    const Result result = runtime->Launch(launch, stream_);
    return result == Result::kOk ? absl::OkStatus() : Refused(launch, result);
  }
  absl::Status Refused(const KernelLaunch& launch, Result result) const {
    if (IsOfARunningKernel(result)) return state_->Failed(Work(), result);
    return state_->Failed(
        absl::StrCat("kernel ", launch.name, " (", launch.grid_x, " x ",
                     launch.grid_y, " CTAs of ", launch.threads,
                     " threads, shared memory of ", launch.shared_bytes,
                     " bytes", launch.ctas_together ? ", all together" : "",
                     result == Result::kNoImage
                         ? absl::StrCat("; this build has code for ", kCodeOf)
                         : "",
                     ")"),
        result);
  }

  const std::shared_ptr<State> state_;
  StreamHandle stream_ = nullptr;
  // The error if the stream could not be made. Then each call returns it.
  absl::Status broken_;
  absl::Status launch_error_;
  std::optional<std::thread::id> capturing_;  // the thread that captures
  const char* last_kernel_ = "(none)";
  std::optional<cuda::Staging> staging_;
};

// Copies the data of EndWrite to the device on a stream of its own. Any thread
// may call it.
class CudaDevice::Writes {
 public:
  explicit Writes(std::shared_ptr<State> state) : state_(std::move(state)) {}
  ~Writes() { Free(); }

  absl::Status Write(void* device, const void* host, size_t bytes) {
    base::MutexLock lock(&mutex_);
    KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
    if (stream_ == nullptr) {
      KVASIR_RETURN_IF_ERROR(
          state_->OkOr("making a stream", runtime->MakeStream(&stream_)));
      staging_.emplace(runtime, stream_, &state_->staging_bytes);
    }
    const absl::Status sent = staging_->Upload(device, host, bytes);
    if (!sent.ok()) {
      return absl::Status(
          sent.code(),
          absl::StrCat("cuda:", state_->ordinal, ": write: ", sent.message()));
    }
    // Streams do not wait for each other, so the host waits here until the
    // bytes have arrived. All streams see them afterwards.
    return state_->OkOr("write", runtime->SynchronizeStream(stream_));
  }
  void Free() {
    base::MutexLock lock(&mutex_);
    if (stream_ == nullptr) return;
    const Result waited = state_->any().SynchronizeStream(stream_);
    state_->Keep(state_->OkOr("write", waited));
    staging_.reset();
    state_->any().DestroyStream(std::exchange(stream_, nullptr));
  }

 private:
  const std::shared_ptr<State> state_;
  base::Mutex mutex_;
  StreamHandle stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<cuda::Staging> staging_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Make(
    const CudaDeviceOptions& options, cuda::Runtime* runtime,
    const DeviceOps& ops,
    const std::function<absl::StatusOr<cuda::CublasLt*>()>& open_cublas) {
  KVASIR_RETURN_IF_ERROR(CheckDriver(*runtime));
  KVASIR_RETURN_IF_ERROR(CheckOrdinal(*runtime, options.ordinal));
  cuda::DeviceProperties properties;
  Result result = runtime->Properties(options.ordinal, &properties);
  const std::string device = absl::StrCat("cuda:", options.ordinal);
  if (result != Result::kOk) {
    return CudaError(absl::StrCat(device, ": reading its properties"), *runtime,
                     result);
  }
  KVASIR_RETURN_IF_ERROR(CheckArchitecture(properties, options.ordinal));
  // The first selection of a device creates the CUDA context, which takes some
  // memory.
  result = runtime->Use(options.ordinal);
  size_t free = 0, total = 0;
  if (result == Result::kOk) result = runtime->MemoryInfo(&free, &total);
  if (result != Result::kOk) {
    return CudaError(absl::StrCat(device, " (", properties.name,
                                  ") cannot be used (does another process "
                                  "hold it?)"),
                     *runtime, result);
  }
  auto state = std::make_shared<State>(runtime, options.ordinal, properties);
  if (open_cublas && !options.deterministic) {
    KVASIR_ASSIGN_OR_RETURN(cuda::CublasLt* const library, open_cublas());
    KVASIR_ASSIGN_OR_RETURN(state->gemms,
                            cuda::CublasGemms::Make(library, properties.major));
  }
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(std::move(state), options, ops));
}

CudaDevice::CudaDevice(std::shared_ptr<State> state,
                       const CudaDeviceOptions& options, const DeviceOps& ops)
    : Device(DeviceKind::kCuda, std::make_unique<Allocator>(state, options)),
      state_(state),
      ops_(ops),
      activations_(options.activations),
      writes_(std::make_unique<Writes>(std::move(state))) {}

CudaDevice::~CudaDevice() = default;

const cuda::DeviceProperties& CudaDevice::properties() const {
  return state_->properties;
}

std::string CudaDevice::numerics() const {
  std::string name = absl::StrCat("cuda-sm", state_->properties.major,
                                  state_->properties.minor);
  if (state_->gemms != nullptr) {
    absl::StrAppend(&name, "-", state_->gemms->name());
  }
  return name;
}

bool CudaDevice::rows_are_invariant() const { return state_->gemms == nullptr; }

absl::Status CudaDevice::UseOnThisThread() const {
  return state_->runtime().status();
}

absl::StatusOr<DeviceMemory> CudaDevice::memory() const {
  KVASIR_ASSIGN_OR_RETURN(cuda::Runtime* const runtime, state_->runtime());
  size_t free = 0, total = 0;
  KVASIR_RETURN_IF_ERROR(state_->OkOr("reading the free memory",
                                      runtime->MemoryInfo(&free, &total)));
  DeviceMemory memory;
  memory.total_bytes = static_cast<int64_t>(total);
  memory.free_bytes = static_cast<int64_t>(free);
  memory.allocated_bytes = allocator().device_bytes();
  memory.other_bytes =
      memory.total_bytes - memory.free_bytes - memory.allocated_bytes;
  return memory;
}

int64_t CudaDevice::staging_bytes() const { return state_->staging_bytes; }

void CudaDevice::FreeWriteBuffers() { writes_->Free(); }

std::unique_ptr<Stream> CudaDevice::MakeStream() {
  return std::make_unique<CudaStream>(state_, ops_);
}

absl::StatusOr<void*> CudaDevice::BeginWrite(DevicePtr<void>, size_t bytes) {
  void* const host = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (host == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the system refused ", bytes,
        " bytes of host memory for the copy of data to the device"));
  }
  state_->staging_bytes += static_cast<int64_t>(bytes);
  return host;
}

absl::Status CudaDevice::EndWrite(DevicePtr<void> memory, void* host,
                                  size_t bytes) {
  absl::Status status = writes_->Write(memory.device_address(), host, bytes);
  std::free(host);
  state_->staging_bytes -= static_cast<int64_t>(bytes);
  return status;
}

cuda::StreamHandle CudaDevice::HandleOf(const Stream& stream) {
  return static_cast<const CudaStream&>(stream).handle();
}

}  // namespace kvasir::kernels
