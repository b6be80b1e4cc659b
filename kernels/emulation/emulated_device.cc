#include "kernels/emulation/emulated_device.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/device/host_work.h"

namespace kvasir::kernels::emulation {
namespace {

// The alignment that cudaMalloc guarantees.
constexpr size_t kAlignment = 256;

}  // namespace

// State that the device shares with its allocator and its streams. It lives
// until all of them are destroyed.
class EmulatedDevice::State {
 public:
  explicit State(const EmulatorOptions& options)
      : memory(EmulatedDevice::kReservedBytes, GuardedMemory::Gaps::kClosed),
        emulator(options, &memory) {}

  void Add(EmulatedStream* stream) {
    base::MutexLock lock(&mutex_);
    streams_.push_back(stream);
  }
  void Remove(EmulatedStream* stream) {
    base::MutexLock lock(&mutex_);
    std::erase(streams_, stream);
  }
  // Runs the enqueued work of all streams. Called before memory is freed,
  // because this work may use it.
  void SynchronizeAll();

  // Writes bytes to device memory before any other work runs. Takes ownership
  // of `host`, which comes from malloc. Writes are done in batches, because
  // all device memory must be made accessible before, and inaccessible again
  // afterwards, which takes long.
  void Write(void* to, void* host, size_t bytes) {
    base::MutexLock lock(&writes_mutex_);
    writes_.push_back({to, {static_cast<char*>(host), &std::free}, bytes});
    written_bytes_ += bytes;
    if (written_bytes_ >= kMostWrittenBytes) LandAll();
  }
  void LandWrites() {
    base::MutexLock lock(&writes_mutex_);
    if (!writes_.empty()) LandAll();
  }

  GuardedMemory memory;
  Emulator emulator;

 private:
  static constexpr size_t kMostWrittenBytes = size_t{64} << 20;
  struct HostWrite {
    void* to;
    std::unique_ptr<char, void (*)(void*)> host;
    size_t bytes;
  };

  void LandAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(writes_mutex_) {
    const OpenMemory open(&memory);
    for (const HostWrite& write : writes_) {
      std::memcpy(write.to, write.host.get(), write.bytes);
    }
    writes_.clear();
    written_bytes_ = 0;
  }

  base::Mutex writes_mutex_;
  std::vector<HostWrite> writes_ ABSL_GUARDED_BY(writes_mutex_);
  size_t written_bytes_ ABSL_GUARDED_BY(writes_mutex_) = 0;
  base::Mutex mutex_;
  std::vector<EmulatedStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

class EmulatedDevice::Allocator final : public DeviceAllocator {
 public:
  Allocator(std::shared_ptr<State> state, int64_t limit_bytes)
      : DeviceAllocator(limit_bytes), state_(std::move(state)) {}

 private:
  absl::StatusOr<void*> Acquire(size_t bytes,
                                const AllocationOptions& options) override {
    void* const data = state_->memory.Acquire(
        bytes, std::max(options.alignment_bytes, kAlignment));
    // Fresh memory is filled with 0xff, because on a GPU it is not zero either.
    // Allocations above kMostFilled are not filled, so that a test can use a
    // small part of a large allocation.
    if (data != nullptr && bytes <= kMostFilled) {
      const OpenMemory open(&state_->memory);
      std::memset(data, 0xff, bytes);
    }
    return data;
  }
  void Release(void* data, size_t) override {
    state_->SynchronizeAll();
    state_->LandWrites();
    state_->memory.Release(data);
  }

  static constexpr size_t kMostFilled = size_t{1} << 30;
  const std::shared_ptr<State> state_;
};

class EmulatedDevice::EmulatedStream final : public LaunchStream,
                                             public Launcher,
                                             public HostWork {
 public:
  EmulatedStream(std::shared_ptr<State> state, const DeviceOps& ops)
      : LaunchStream(ops), HostWork{&EnqueueOnHost}, state_(std::move(state)) {
    state_->Add(this);
  }
  ~EmulatedStream() override {
    Drain();
    state_->Remove(this);
  }

  Launcher& launcher() override { return *this; }
  void CheckMemory(const char* op, const void* address) const override {
    state_->memory.Check(op, address);
  }
  absl::Status Synchronize() override {
    KVASIR_RETURN_IF_ERROR(Usable("waited for"));
    Drain();
    return absl::OkStatus();
  }
  absl::Status CopyToDevice(DevicePtr<void> device, const void* host,
                            size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(Usable("copied to"));
    state_->memory.CheckRange("upload", device.device_address(), bytes);
    const auto* const from = static_cast<const char*>(host);
    Add({.bytes = {from, from + bytes}, .upload_to = device.device_address()});
    return absl::OkStatus();
  }
  absl::Status CopyToHost(void* host, DevicePtr<const void> device,
                          size_t bytes) override {
    KVASIR_RETURN_IF_ERROR(Usable("read back from"));
    state_->memory.CheckRange("read_back", device.device_address(), bytes);
    state_->LandWrites();
    const OpenMemory open(&state_->memory);
    Drain();
    std::memcpy(host, device.device_address(), bytes);
    return absl::OkStatus();
  }

  absl::StatusOr<void*> LibraryHandle() override {
    return static_cast<HostWork*>(this);
  }
  absl::StatusOr<std::unique_ptr<StreamMark>> MakeMark() override {
    return std::make_unique<Mark>();
  }
  absl::Status Record(StreamMark* mark) override {
    KVASIR_RETURN_IF_ERROR(Usable("marked"));
    const auto& count = static_cast<Mark*>(mark)->ahead;
    count->fetch_add(1);
    Add({.run = [count] { count->fetch_sub(1); }});
    return absl::OkStatus();
  }

  absl::Status BeginCapture() override {
    KVASIR_RETURN_IF_ERROR(Usable("captured again"));
    captured_ = std::make_unique<Captured>();
    HostWork::capturing = true;
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<CapturedWork>> EndCapture() override {
    if (!capturing()) return LaunchStream::EndCapture();
    HostWork::capturing = false;
    return std::move(captured_);
  }
  bool capturing() const override { return HostWork::capturing; }
  absl::Status Replay(CapturedWork& work) override {
    KVASIR_RETURN_IF_ERROR(Usable("replayed to"));
    for (const Work& each : static_cast<Captured&>(work).work) Add(each);
    return absl::OkStatus();
  }

  void Enqueue(const KernelLaunch& launch) override {
    const auto* const args = static_cast<const char*>(launch.args);
    Add({.bytes = {args, args + launch.args_bytes}, .launch = launch});
  }
  int multiprocessors() const override {
    return state_->emulator.options().multiprocessors;
  }

  void Drain() {
    base::MutexLock lock(&mutex_);
    if (work_.empty()) return;
    state_->LandWrites();
    const OpenMemory open(&state_->memory);
    for (; !work_.empty(); work_.pop_front()) {
      Work& work = work_.front();
      if (work.run) {
        work.run();
      } else if (work.upload_to != nullptr) {
        std::memcpy(work.upload_to, work.bytes.data(), work.bytes.size());
      } else {
        work.launch.args = work.bytes.data();
        state_->emulator.Run(work.launch);
      }
    }
  }

 private:
  // A piece of work: a copy to the device, a launch with its parameters, or a
  // host function.
  struct Work {
    std::vector<char> bytes;
    void* upload_to = nullptr;
    KernelLaunch launch;
    std::function<void()> run;
  };
  struct Captured final : CapturedWork {
    std::vector<Work> work;
  };
  struct Mark final : StreamMark {
    absl::StatusOr<bool> passed() const override { return ahead->load() == 0; }
    // The number of recordings of this mark that streams have not reached yet.
    // Shared with the streams, because their work may outlive the mark.
    const std::shared_ptr<std::atomic<int64_t>> ahead =
        std::make_shared<std::atomic<int64_t>>(0);
  };

  static void EnqueueOnHost(HostWork* stream, void (*run)(void*),
                            void* argument, void (*release)(void*)) {
    const std::shared_ptr<void> owner(
        argument, release != nullptr ? release : [](void*) {});
    static_cast<EmulatedStream*>(stream)->Add(
        {.run = [run, owner] { run(owner.get()); }});
  }
  absl::Status Usable(const char* as) const {
    if (!capturing()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "emulated: a stream cannot be ", as, " while it is capturing"));
  }
  void Add(Work work) {
    if (capturing()) {
      captured_->work.push_back(std::move(work));
      return;
    }
    base::MutexLock lock(&mutex_);
    work_.push_back(std::move(work));
  }

  const std::shared_ptr<State> state_;
  // Needed because any thread that frees device memory runs the work of all
  // streams.
  base::Mutex mutex_;
  std::deque<Work> work_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Captured> captured_;  // null if not capturing
};

void EmulatedDevice::State::SynchronizeAll() {
  base::MutexLock lock(&mutex_);
  for (EmulatedStream* const stream : streams_) stream->Drain();
}

EmulatedDevice::EmulatedDevice(const EmulatedDeviceOptions& options,
                               const DeviceOps& ops)
    : EmulatedDevice(std::make_shared<State>(options.emulator), options, ops) {}

EmulatedDevice::EmulatedDevice(std::shared_ptr<State> state,
                               const EmulatedDeviceOptions& options,
                               const DeviceOps& ops)
    : Device(DeviceKind::kCuda,
             std::make_unique<Allocator>(state, options.memory_limit_bytes)),
      state_(std::move(state)),
      ops_(ops),
      activations_(options.activations) {
  // Kernels are compiled with these instructions (CMakeLists.txt).
  KVASIR_CHECK(__builtin_cpu_supports("fma"));
}

EmulatedDevice::~EmulatedDevice() = default;

Emulator& EmulatedDevice::emulator() { return state_->emulator; }

int64_t EmulatedDevice::cta_shared_bytes() const {
  return state_->emulator.options().shared_bytes;
}

std::unique_ptr<Stream> EmulatedDevice::MakeStream() {
  return std::make_unique<EmulatedStream>(state_, ops_);
}

absl::StatusOr<void*> EmulatedDevice::BeginWrite(DevicePtr<void> memory,
                                                 size_t bytes) {
  state_->memory.CheckRange("write", memory.device_address(), bytes);
  void* const host = std::malloc(bytes);
  if (host == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the system refused ", bytes,
        " bytes of host memory for the copy of data to the device"));
  }
  std::memset(host, 0xff, bytes);
  return host;
}

absl::Status EmulatedDevice::EndWrite(DevicePtr<void> memory, void* host,
                                      size_t bytes) {
  state_->Write(memory.device_address(), host, bytes);
  return absl::OkStatus();
}

void EmulatedDevice::CheckMemory(const char* op,
                                 DevicePtr<const void> pointer) const {
  state_->memory.Check(op, pointer.device_address());
}

}  // namespace kvasir::kernels::emulation
