#include "worker/ranks/nccl/nccl_communicator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace kvasir::worker {

using nccl::CommHandle;
using nccl::Result;

namespace {

// After a failure, the watcher waits this long for a running library call to
// return. If the call has not returned by then, the watcher aborts the
// communicator anyway.
constexpr absl::Duration kGrace = absl::Seconds(1);
// How long the destructor waits for the other ranks if there was no failure.
constexpr absl::Duration kGoodbye = absl::Seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Connect(
    const NcclCommunicatorOptions& options, const nccl::UniqueId& id) {
  if (options.use_device) KVASIR_RETURN_IF_ERROR(options.use_device());
  nccl::Config config;
  config.blocking = 0;
  CommHandle comm = nullptr;
  const Result result = options.library->functions().ncclCommInitRankConfig(
      &comm, static_cast<int>(options.shard.size), id,
      static_cast<int>(options.shard.rank), &config);
  if (result != Result::kOk && result != Result::kInProgress) {
    return options.library->Error("NCCL: ncclCommInitRankConfig", result);
  }
  auto made =
      std::unique_ptr<NcclCommunicator>(new NcclCommunicator(options, comm));
  KVASIR_RETURN_IF_ERROR(
      made->WaitUntilDone("ncclCommInitRankConfig", options.connect_timeout));
  base::MutexLock lock(&made->mutex_);
  made->in_use_ = true;
  return made;
}

NcclCommunicator::NcclCommunicator(const NcclCommunicatorOptions& options,
                                   CommHandle comm)
    : options_(options),
      functions_(options.library->functions()),
      comm_(comm),
      watcher_(&NcclCommunicator::KeepWatching, this) {}

NcclCommunicator::~NcclCommunicator() {
  bool alive = false;
  {
    base::MutexLock lock(&mutex_);
    in_use_ = false;
    alive = failure_.ok();
    // The result is ignored here, because finalization continues in the
    // background; WaitUntilDone returns its error.
    if (alive) (void)functions_.ncclCommFinalize(comm_);
  }
  if (alive && WaitUntilDone("ncclCommFinalize", kGoodbye).ok()) {
    base::MutexLock lock(&mutex_);
    if (failure_.ok()) {
      functions_.ncclCommDestroy(std::exchange(comm_, nullptr));
    }
  }
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.SignalAll();
  }
  watcher_.join();
}

Result NcclCommunicator::AsyncError() {
  Result error = Result::kOk;
  const Result asked = functions_.ncclCommGetAsyncError(comm_, &error);
  return asked == Result::kOk ? error : asked;
}

absl::Status NcclCommunicator::StandsStill(const char* call,
                                           absl::Duration timeout) const {
  return absl::UnavailableError(absl::StrCat(
      "NCCL: rank ", options_.shard.rank, " of ", options_.shard.size,
      " has waited for the others for longer than ",
      absl::FormatDuration(timeout), " in ", call,
      ": another rank is gone, stands still or makes other calls"));
}

absl::Status NcclCommunicator::WaitUntilDone(const char* call,
                                             absl::Duration timeout) {
  const Clock::time_point deadline =
      Clock::now() + absl::ToChronoNanoseconds(timeout);
  constexpr absl::Duration kLongestPause = absl::Milliseconds(1);
  for (absl::Duration pause = absl::Microseconds(10);;
       pause = std::min(2 * pause, kLongestPause)) {
    Result result = Result::kOk;
    {
      base::MutexLock lock(&mutex_);
      if (!failure_.ok()) return failure_;
      result = AsyncError();
    }
    if (result == Result::kOk) return absl::OkStatus();
    if (result != Result::kInProgress) {
      FailAndReport(
          options_.library->Error(absl::StrCat("NCCL: ", call), result));
    } else if (Clock::now() > deadline) {
      FailAndReport(StandsStill(call, timeout));
    }
    absl::SleepFor(pause);
  }
}

absl::Status NcclCommunicator::Enqueue(
    const char* name, kernels::LaunchStream& stream,
    absl::FunctionRef<Result(CommHandle comm, void* stream)> call) {
  KVASIR_ASSIGN_OR_RETURN(void* const handle, stream.LibraryHandle());
  CommHandle comm = nullptr;
  {
    base::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    calling_ = Call{.name = name, .since = Clock::now()};
    comm = comm_;
  }
  const Result result = call(comm, handle);
  {
    base::MutexLock lock(&mutex_);
    calling_ = std::nullopt;
    returned_.SignalAll();
    if (!failure_.ok()) return failure_;
  }
  if (result == Result::kInProgress) {
    KVASIR_RETURN_IF_ERROR(WaitUntilDone(name, options_.call_timeout));
  } else if (result != Result::kOk) {
    absl::Status refused =
        options_.library->Error(absl::StrCat("NCCL: ", name), result);
    if (stream.capturing()) return refused;
    FailAndReport(refused);
    return status();
  }
  return stream.capturing() ? absl::OkStatus() : Watch(name, stream);
}

absl::Status NcclCommunicator::Watch(const char* name,
                                     kernels::LaunchStream& stream) {
  absl::Status marked = Mark(name, stream);
  if (!marked.ok()) FailAndReport(marked);
  return marked;
}

absl::Status NcclCommunicator::Mark(const char* name,
                                    kernels::LaunchStream& stream) {
  Call call = {.name = name};
  {
    base::MutexLock lock(&mutex_);
    if (!free_.empty()) {
      call.mark = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (call.mark == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(call.mark, stream.MakeMark());
  }
  // Called without the lock, because it may block: a collective that hangs may
  // have filled the launch queue.
  KVASIR_RETURN_IF_ERROR(stream.Record(call.mark.get()));
  base::MutexLock lock(&mutex_);
  call.since = Clock::now();
  ahead_.push_back(std::move(call));
  return absl::OkStatus();
}

void NcclCommunicator::Fail(const absl::Status& reason) {
  base::MutexLock lock(&mutex_);
  if (!failure_.ok()) return;
  failure_ = reason;
  wake_.SignalAll();
}

void NcclCommunicator::FailAndReport(const absl::Status& reason) {
  {
    base::MutexLock lock(&mutex_);
    if (!failure_.ok()) return;
    failure_ = reason;
    wake_.SignalAll();
    if (!in_use_ || !options_.on_failure) return;
  }
  options_.on_failure(reason);
}

absl::Status NcclCommunicator::status() const {
  base::MutexLock lock(&mutex_);
  return failure_;
}

void NcclCommunicator::KeepWatching() {
  for (;;) {
    {
      base::MutexLock lock(&mutex_);
      if (!stopping_ && failure_.ok()) {
        wake_.WaitWithTimeout(&mutex_, options_.poll_interval);
      }
      if (!failure_.ok()) break;
      if (stopping_) return;
    }
    absl::Status found = LookAtLibrary();
    if (found.ok()) found = LookAtMarks();
    if (!found.ok()) FailAndReport(found);
  }
  AbortLibrary();
}

void NcclCommunicator::AbortLibrary() {
  CommHandle comm = nullptr;
  {
    base::MutexLock lock(&mutex_);
    const Clock::time_point deadline =
        Clock::now() + absl::ToChronoNanoseconds(kGrace);
    while (calling_.has_value() && Clock::now() < deadline) {
      returned_.WaitWithTimeout(&mutex_, absl::Milliseconds(10));
    }
    comm = std::exchange(comm_, nullptr);
  }
  functions_.ncclCommAbort(comm);
}

absl::Status NcclCommunicator::LookAtLibrary() {
  Result result = Result::kOk;
  {
    base::MutexLock lock(&mutex_);
    if (!failure_.ok() || comm_ == nullptr) return absl::OkStatus();
    if (calling_.has_value()) {
      const bool late = Clock::now() - calling_->since >
                        absl::ToChronoNanoseconds(options_.call_timeout);
      return late ? StandsStill(calling_->name, options_.call_timeout)
                  : absl::OkStatus();
    }
    result = AsyncError();
  }
  if (result == Result::kOk || result == Result::kInProgress) {
    return absl::OkStatus();
  }
  return options_.library->Error("NCCL", result);
}

absl::Status NcclCommunicator::LookAtMarks() {
  for (;;) {
    const kernels::StreamMark* mark = nullptr;
    {
      base::MutexLock lock(&mutex_);
      if (ahead_.empty()) return absl::OkStatus();
      mark = ahead_.front().mark.get();
    }
    KVASIR_ASSIGN_OR_RETURN(const bool passed, mark->passed());
    const Clock::time_point now = Clock::now();
    base::MutexLock lock(&mutex_);
    if (!passed) {
      const bool late = now - ahead_.front().since >
                        absl::ToChronoNanoseconds(options_.call_timeout);
      return late ? StandsStill(ahead_.front().name, options_.call_timeout)
                  : absl::OkStatus();
    }
    free_.push_back(std::move(ahead_.front().mark));
    ahead_.pop_front();
    // The timeout of the next call starts only now, because the stream has only
    // now reached that call.
    if (!ahead_.empty()) ahead_.front().since = now;
  }
}

}  // namespace kvasir::worker
