#include "kernels/cuda/testing/fake_runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::kernels::cuda {
namespace {

thread_local int used_device = 0;
constexpr auto kAlignment = std::align_val_t(256);

}  // namespace

FakeRuntime::~FakeRuntime() {
  base::MutexLock lock(&mutex_);
  if (!leaks_) {
    EXPECT_EQ(device_memory_.size(), 0u) << "device memory was not freed";
    EXPECT_EQ(pinned_.size(), 0u) << "pinned memory was not freed";
  }
  EXPECT_EQ(streams_.size(), 0u) << "streams were not destroyed";
  EXPECT_EQ(events_.size(), 0u) << "events were not destroyed";
  EXPECT_EQ(graphs_.size(), 0u) << "graphs were not destroyed";
  EXPECT_EQ(execs_.size(), 0u) << "executable graphs were not destroyed";
}

void FakeRuntime::FailNext(const std::string& call, Result result) {
  base::MutexLock lock(&mutex_);
  failures_[call] = result;
}
void FakeRuntime::Break(Result result) {
  base::MutexLock lock(&mutex_);
  broken_ = result;
  for (const auto& [handle, stream] : streams_) {
    stream->work.resize(stream->running ? 1 : 0);
  }
}
void FakeRuntime::AllowLeaks() {
  base::MutexLock lock(&mutex_);
  leaks_ = true;
}
void FakeRuntime::OnRun(std::function<void(const KernelLaunch&)> run) {
  base::MutexLock lock(&mutex_);
  run_ = std::move(run);
}
void FakeRuntime::Enqueue(StreamHandle stream, std::function<void()> run) {
  base::MutexLock lock(&mutex_);
  (void)Add(stream, {.run = std::move(run)});
}
bool FakeRuntime::IsDeviceMemory(const void* at, size_t bytes) const {
  base::MutexLock lock(&mutex_);
  return Holds(device_memory_, at, bytes);
}
std::vector<FakeLaunch> FakeRuntime::launches() const {
  base::MutexLock lock(&mutex_);
  return launches_;
}
int64_t FakeRuntime::calls(const std::string& call) const {
  base::MutexLock lock(&mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}
size_t FakeRuntime::pinned_bytes() const {
  base::MutexLock lock(&mutex_);
  size_t bytes = 0;
  for (const auto& [at, memory] : pinned_) bytes += memory.bytes;
  return bytes;
}
int FakeRuntime::device_in_use() const { return used_device; }
size_t FakeRuntime::waiting() const {
  base::MutexLock lock(&mutex_);
  size_t work = 0;
  for (const auto& [handle, stream] : streams_) work += stream->work.size();
  return work;
}

Result FakeRuntime::Begin(const std::string& call) {
  ++calls_[call];
  const auto found = failures_.find(call);
  if (found == failures_.end()) return broken_;
  const Result result = found->second;
  failures_.erase(found);
  return result;
}

Result FakeRuntime::Add(StreamHandle stream, Work work) {
  Stream* const found = Find(stream);
  if (found == nullptr) return Result::kOk;
  if (!found->capture.has_value()) {
    found->work.push_back(std::move(work));
    return Result::kOk;
  }
  if (found->capture->spoiled) return Result::kCaptureInvalidated;
  found->capture->work.push_back(std::move(work));
  return Result::kOk;
}

Result FakeRuntime::Spoil(Stream* stream) {
  stream->capture->spoiled = true;
  return Result::kCaptureUnsupported;
}

Result FakeRuntime::RefuseCaptures(bool of_any_thread) {
  Result result = Result::kOk;
  for (const auto& [handle, stream] : streams_) {
    if (!stream->capture.has_value() || stream->device != used_device) continue;
    if (!of_any_thread &&
        stream->capture->thread != std::this_thread::get_id()) {
      continue;
    }
    result = Spoil(stream.get());
  }
  return result;
}

FakeRuntime::Stream* FakeRuntime::Find(StreamHandle stream, bool own) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    ADD_FAILURE() << "a call uses a stream that does not exist";
    return nullptr;
  }
  if (own) {
    EXPECT_EQ(used_device, found->second->device)
        << "the stream belongs to a device that the thread has not selected";
  }
  return found->second.get();
}

bool FakeRuntime::Holds(const Memory& memory, const void* at, size_t bytes) {
  const auto* const begin = static_cast<const char*>(at);
  auto found = memory.upper_bound(begin);
  if (found == memory.begin()) return false;
  --found;
  return begin + bytes <= found->first + found->second.bytes;
}

bool FakeRuntime::HoldsHere(const void* at, size_t bytes) const {
  if (!Holds(device_memory_, at, bytes)) return false;
  auto found = device_memory_.upper_bound(static_cast<const char*>(at));
  EXPECT_EQ(used_device, (--found)->second.device)
      << "the memory belongs to a device that the thread has not selected";
  return true;
}

size_t FakeRuntime::Held() const {
  size_t held = context_bytes + (launches_.empty() ? 0 : code_bytes);
  for (const auto& [at, memory] : device_memory_) {
    held += (memory.bytes + kRoundedTo - 1) / kRoundedTo * kRoundedTo;
  }
  return held;
}

bool FakeRuntime::Waits(EventHandle event, const Stream& stream) {
  return std::any_of(stream.work.begin(), stream.work.end(),
                     [event](const Work& work) { return work.event == event; });
}

void FakeRuntime::RunUpTo(EventHandle event, Stream* stream) {
  while (stream->running) idle_.Wait(&mutex_);
  const auto is_there = [&] {
    return event == nullptr ? !stream->work.empty() : Waits(event, *stream);
  };
  stream->running = true;
  for (; is_there(); stream->work.pop_front()) {
    const std::function<void()>& run = stream->work.front().run;
    if (!run) continue;
    mutex_.Unlock();
    run();
    mutex_.Lock();
  }
  stream->running = false;
  idle_.SignalAll();
}

std::string FakeRuntime::Describe(Result result) {
  return absl::StrCat("cudaErrorFake (", static_cast<int>(result), ")");
}
Result FakeRuntime::DriverVersion(int* version) {
  base::MutexLock lock(&mutex_);
  *version = driver_version;
  return Begin("DriverVersion");
}
Result FakeRuntime::DeviceCount(int* count) {
  base::MutexLock lock(&mutex_);
  *count = device_count;
  return Begin("DeviceCount");
}
Result FakeRuntime::Properties(int, DeviceProperties* found) {
  base::MutexLock lock(&mutex_);
  *found = properties;
  return Begin("Properties");
}
Result FakeRuntime::Use(int device) {
  base::MutexLock lock(&mutex_);
  // If Use fails, the thread keeps the device that it selected before. A device
  // that has failed (Break) can still be selected.
  ++calls_["Use"];
  const auto found = failures_.find("Use");
  if (found != failures_.end()) {
    const Result result = found->second;
    failures_.erase(found);
    return result;
  }
  used_device = device;
  return Result::kOk;
}
Result FakeRuntime::MemoryInfo(size_t* free_bytes, size_t* total) {
  base::MutexLock lock(&mutex_);
  *free_bytes = total_bytes - Held();
  *total = total_bytes;
  return Begin("MemoryInfo");
}

void FakeRuntime::GiveBack::operator()(char* memory) const {
  ::operator delete(memory, kAlignment);
}

void* FakeRuntime::Take(Memory* from, size_t bytes) {
  auto* const memory = static_cast<char*>(::operator new(bytes, kAlignment));
  std::memset(memory, 0xff, bytes);
  (*from)[memory] = {std::unique_ptr<char, GiveBack>(memory), bytes,
                     used_device};
  return memory;
}

Result FakeRuntime::Allocate(void** memory, size_t bytes) {
  base::MutexLock lock(&mutex_);
  Result result = Begin("Allocate");
  if (result == Result::kOk) result = RefuseCaptures(false);
  if (result != Result::kOk) return result;
  if (bytes > total_bytes - Held()) return Result::kOutOfMemory;
  *memory = Take(&device_memory_, bytes);
  return Result::kOk;
}
Result FakeRuntime::AllocateHost(void** memory, size_t bytes) {
  base::MutexLock lock(&mutex_);
  Result result = Begin("AllocateHost");
  if (result == Result::kOk) result = RefuseCaptures(false);
  if (result != Result::kOk) return result;
  *memory = Take(&pinned_, bytes);
  return Result::kOk;
}
Result FakeRuntime::Give(Memory* from, void* memory) {
  for (const auto& [handle, stream] : streams_) {
    for (const Work& work : stream->work) {
      for (const void* const end : {work.to, work.from}) {
        if (end == nullptr || !Holds(*from, end, 1)) continue;
        const auto* const begin = static_cast<const char*>(memory);
        const size_t bytes = from->at(begin).bytes;
        EXPECT_FALSE(end >= begin && end < begin + bytes)
            << "memory is freed although an enqueued copy still uses it";
      }
    }
  }
  EXPECT_EQ(from->erase(static_cast<const char*>(memory)), 1u)
      << "the memory to be freed is not allocated";
  return Result::kOk;
}
Result FakeRuntime::Free(void* memory) {
  base::MutexLock lock(&mutex_);
  Result result = Begin("Free");
  if (result == Result::kOk) result = RefuseCaptures(false);
  if (result != Result::kOk && result != broken_) return result;
  Give(&device_memory_, memory);
  return result;
}
Result FakeRuntime::FreeHost(void* memory) {
  base::MutexLock lock(&mutex_);
  Result result = Begin("FreeHost");
  if (result == Result::kOk) result = RefuseCaptures(false);
  if (result != Result::kOk && result != broken_) return result;
  Give(&pinned_, memory);
  return result;
}

Result FakeRuntime::MakeStream(StreamHandle* stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("MakeStream");
  if (result != Result::kOk) return result;
  auto made = std::make_shared<Stream>();
  made->runtime = this;
  made->device = used_device;
  made->enqueue = [](HostWork* work, void (*run)(void*), void* argument,
                     void (*release)(void*)) {
    const std::shared_ptr<void> owner(
        argument, release != nullptr ? release : [](void*) {});
    static_cast<Stream*>(work)->runtime->Enqueue(
        reinterpret_cast<StreamHandle>(work),
        [run, owner] { run(owner.get()); });
  };
  *stream = reinterpret_cast<StreamHandle>(static_cast<HostWork*>(made.get()));
  streams_[*stream] = std::move(made);
  return Result::kOk;
}
Result FakeRuntime::DestroyStream(StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  if (Stream* const found = Find(stream, false); found != nullptr) {
    if (found->capture.has_value()) return Spoil(found);
    EXPECT_TRUE(found->work.empty())
        << "a stream is destroyed before its work has run";
  }
  streams_.erase(stream);
  return Result::kOk;
}
Result FakeRuntime::SynchronizeStream(StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("SynchronizeStream");
  if (Stream* const found = Find(stream, false); found != nullptr) {
    if (found->capture.has_value()) return Spoil(found);
    RunUpTo(nullptr, found);
  }
  return result;
}
Result FakeRuntime::SynchronizeDevice() {
  base::MutexLock lock(&mutex_);
  if (const Result refused = RefuseCaptures(true); refused != Result::kOk) {
    return refused;
  }
  // Shared pointers keep the streams alive. Another thread may destroy a stream
  // while this thread runs the work of a stream or waits for a thread that
  // does.
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : streams_) {
    if (stream->device == used_device) streams.push_back(stream);
  }
  for (const auto& stream : streams) RunUpTo(nullptr, stream.get());
  return Begin("SynchronizeDevice");
}

Result FakeRuntime::MakeEvent(EventHandle* event) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("MakeEvent");
  if (result != Result::kOk) return result;
  *event = NewHandle<EventHandle>();
  events_[*event] = {};
  return Result::kOk;
}
Result FakeRuntime::DestroyEvent(EventHandle event) {
  base::MutexLock lock(&mutex_);
  events_.erase(event);
  return Result::kOk;
}
Result FakeRuntime::RecordEvent(EventHandle event, StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("RecordEvent");
  if (result != Result::kOk) return result;
  Stream* const found = Find(stream);
  if (found == nullptr) return Result::kOk;
  const bool captured = found->capture.has_value();
  if (captured && found->capture->spoiled) return Result::kCaptureInvalidated;
  events_[event] = {stream, captured ? found : nullptr};
  // An event that was recorded during a capture can only order streams, so
  // nothing is enqueued for it.
  if (!captured) found->work.push_back({.event = event});
  return Result::kOk;
}
Result FakeRuntime::WaitForEvent(EventHandle event) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("WaitForEvent");
  if (Stream* const by = events_[event].captured_by; by != nullptr) {
    if (by->capture.has_value()) (void)Spoil(by);
    return Result::kCapturedEvent;
  }
  const auto found = streams_.find(events_[event].stream);
  if (found == streams_.end()) return result;
  RunUpTo(event, found->second.get());
  return result;
}
Result FakeRuntime::QueryEvent(EventHandle event, bool* over) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("QueryEvent");
  if (Stream* const by = events_[event].captured_by; by != nullptr) {
    if (by->capture.has_value()) (void)Spoil(by);
    return Result::kCapturedEvent;
  }
  const auto found = streams_.find(events_[event].stream);
  *over = found == streams_.end() || !Waits(event, *found->second);
  return result;
}

Result FakeRuntime::CopyAsync(void* to, const void* from, size_t bytes,
                              StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("CopyAsync");
  if (result != Result::kOk) return result;
  const bool up = Holds(pinned_, from, bytes) &&
                  (HoldsHere(to, bytes) || Holds(pinned_, to, bytes));
  const bool down = HoldsHere(from, bytes) && Holds(pinned_, to, bytes);
  Stream* const found = Find(stream);
  if (!up && !down && found != nullptr && found->capture.has_value()) {
    return Spoil(found);
  }
  EXPECT_TRUE(up || down) << "a copy of " << bytes
                          << " bytes is not between pinned and device memory";
  if (!up && !down) return Result::kOk;
  return Add(stream,
             {.run = [to, from, bytes] { std::memcpy(to, from, bytes); },
              .to = to,
              .from = from});
}

Result FakeRuntime::BeginCapture(StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("BeginCapture");
  if (result != Result::kOk) return result;
  Stream* const found = Find(stream);
  if (found == nullptr) return Result::kOk;
  if (found->capture.has_value()) return Result::kIllegalState;
  found->capture = Capture{.thread = std::this_thread::get_id()};
  found->capturing = true;
  return Result::kOk;
}
Result FakeRuntime::EndCapture(StreamHandle stream, GraphHandle* graph) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("EndCapture");
  *graph = nullptr;
  Stream* const found = Find(stream);
  if (found == nullptr || !found->capture.has_value()) {
    return Result::kIllegalState;
  }
  if (found->capture->thread != std::this_thread::get_id()) {
    return Result::kCaptureWrongThread;
  }
  const Capture capture = *std::exchange(found->capture, std::nullopt);
  found->capturing = false;
  if (result != Result::kOk) return result;
  if (capture.spoiled) return Result::kCaptureInvalidated;
  *graph = NewHandle<GraphHandle>();
  graphs_[*graph] = std::make_shared<const std::vector<Work>>(capture.work);
  return Result::kOk;
}
Result FakeRuntime::DestroyGraph(GraphHandle graph) {
  base::MutexLock lock(&mutex_);
  EXPECT_EQ(graphs_.erase(graph), 1u)
      << "the graph to be destroyed does not exist";
  return Result::kOk;
}
Result FakeRuntime::InstantiateGraph(GraphHandle graph, StreamHandle stream,
                                     ExecHandle* exec) {
  base::MutexLock lock(&mutex_);
  EXPECT_NE(Find(stream, true), nullptr);
  Result result = Begin("InstantiateGraph");
  // Instantiating a graph allocates device memory, which a capturing thread
  // must not do.
  if (result == Result::kOk) result = RefuseCaptures(false);
  if (result != Result::kOk) return result;
  *exec = NewHandle<ExecHandle>();
  std::vector<Work> work = *graphs_.at(graph);
  for (Work& each : work) each.exec = *exec;
  execs_[*exec] = std::make_shared<const std::vector<Work>>(std::move(work));
  return Result::kOk;
}
Result FakeRuntime::DestroyExec(ExecHandle exec) {
  base::MutexLock lock(&mutex_);
  for (const auto& [handle, stream] : streams_) {
    EXPECT_FALSE(
        std::any_of(stream->work.begin(), stream->work.end(),
                    [exec](const Work& work) { return work.exec == exec; }))
        << "an executable graph is destroyed before its work has run";
  }
  EXPECT_EQ(execs_.erase(exec), 1u)
      << "the executable graph to be destroyed does not exist";
  return Result::kOk;
}
Result FakeRuntime::LaunchGraph(ExecHandle exec, StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("LaunchGraph");
  if (result != Result::kOk) return result;
  for (const Work& work : *execs_.at(exec)) {
    const Result added = Add(stream, work);
    if (added != Result::kOk) return added;
  }
  return Result::kOk;
}

Result FakeRuntime::AllowSharedBytes(const void* function, uint32_t bytes) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("AllowSharedBytes");
  if (result == Result::kOk) shared_[function] = bytes;
  return result;
}

Result FakeRuntime::Launch(const KernelLaunch& launch, StreamHandle stream) {
  base::MutexLock lock(&mutex_);
  const Result result = Begin("Launch");
  if (result != Result::kOk) return result;
  if (launch.shared_bytes > kPlainSharedBytes) {
    EXPECT_LE(launch.shared_bytes, shared_[launch.function])
        << launch.name
        << " has more shared memory than AllowSharedBytes has allowed";
  }
  const auto* const args = static_cast<const char*>(launch.args);
  FakeLaunch made = {launch, {args, args + launch.args_bytes}};
  const Result added = Add(stream, {.run = [run = run_, made] {
                             if (!run) return;
                             KernelLaunch now = made.launch;
                             now.args = made.args.data();
                             run(now);
                           }});
  if (added == Result::kOk) launches_.push_back(std::move(made));
  return added;
}

}  // namespace kvasir::kernels::cuda
