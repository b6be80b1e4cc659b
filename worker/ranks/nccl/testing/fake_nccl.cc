// A fake libnccl.so.2 that needs no GPU. It implements the functions of
// nccl_abi.h for ranks that are threads or processes of one machine. Ranks
// exchange data through a memfd: shared memory without a name, which disappears
// with the last process that has it open. A `stream` is a kernels::HostWork.
//
// The environment variable KVASIR_FAKE_NCCL injects faults: a list of
// RANK:CALL:FAULT, separated by commas. CALL 0 is the connection; the
// collective calls of each rank are numbered from 1. The faults are:
//   hang     the rank never executes the call
//   error    like hang, and NCCL reports an asynchronous error on this rank
//   refuse   the function returns an error
//   late     the function returns "in progress" and continues for a while
//   stuck    the function returns only after the communicator is aborted
//   notify   the rank notices when other ranks abort or end
// The fault stuck simulates a full launch queue. The fault notify, only for
// call 0, simulates a connection over a network. Without it, a rank does not
// notice that others end. If calls are captured into graphs, CALL counts their
// captures for refuse, late and stuck, and their replays for hang and error.
// KVASIR_FAKE_NCCL_VERSION sets the version.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/device/dtype.h"
#include "kernels/device/host_work.h"
#include "worker/ranks/nccl/nccl_abi.h"

namespace kvasir::worker::nccl {
namespace {

constexpr int kMaxRanks = 8;
constexpr size_t kChunkBytes = 64 << 10;
constexpr int kLatePolls = 20;

std::atomic<int> live{0};
std::atomic<int> aborts{0};
thread_local std::string last_error;

Result Refuse(Result result, std::string why) {
  last_error = "fake: " + std::move(why);
  return result;
}

enum class Kind : int { kAllReduce, kAllGather, kBroadcast };

// The properties of a collective call. All of them must be equal on all ranks.
struct Call {
  // Number of the call. Calls are counted when streams reach them.
  uint64_t number = 0;
  // NCCL requires that either all ranks capture a call or none does.
  bool captured = false;
  Kind kind = Kind::kAllReduce;
  DataType type = DataType::kUint8;
  size_t bytes = 0;  // bytes that each rank contributes
  size_t at = 0;     // offset of the chunk being exchanged

  bool operator==(const Call&) const = default;
};

// The memory that the ranks share. In each call a rank posts a chunk, reads the
// chunks of all ranks, and marks them as read.
struct Segment {
  struct Rank {
    std::atomic<uint64_t> posted;
    std::atomic<uint64_t> read;
    std::atomic<pid_t> process;
    std::atomic<bool> aborted;
    std::atomic<bool> finalized;
    Call call;
    alignas(16) char data[kChunkBytes];
  };
  Rank ranks[kMaxRanks];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct Fault {
  int rank = 0;
  uint64_t call = 0;
  std::string what;
};

std::vector<Fault> ReadFaults() {
  std::vector<Fault> faults;
  const char* text = std::getenv("KVASIR_FAKE_NCCL");
  while (text != nullptr && *text != '\0') {
    Fault fault;
    unsigned long long call = 0;
    char what[16] = "";
    if (std::sscanf(text, "%d:%llu:%15[a-z]", &fault.rank, &call, what) != 3) {
      std::fprintf(stderr, "KVASIR_FAKE_NCCL: want RANK:CALL:FAULT, have: %s\n",
                   text);
      std::abort();
    }
    fault.call = call;
    fault.what = what;
    faults.push_back(fault);
    text = std::strchr(text, ',');
    if (text != nullptr) ++text;
  }
  return faults;
}

// The state of a communicator. Held by shared_ptr, because enqueued work may
// outlive an aborted communicator.
class State {
 public:
  State(Segment* segment, int rank, int size, int owned_file)
      : segment_(segment),
        rank_(rank),
        size_(size),
        owned_file_(owned_file),
        faults_(ReadFaults()) {
    ++live;
    if (Has(0, "hang")) return;
    own().process = getpid();
  }
  ~State() {
    CloseFile();
    munmap(segment_, sizeof(Segment));
    --live;
  }

  bool Has(uint64_t call, const char* what) const {
    for (const Fault& fault : faults_) {
      if (fault.rank == rank_ && fault.call == call && fault.what == what) {
        return true;
      }
    }
    return false;
  }

  Result AsyncError() {
    if (late_ != nullptr) {
      if (++polls_ < kLatePolls) return Result::kInProgress;
      polls_ = 0;
      std::exchange(late_, nullptr)();
    }
    if (!connected_) {
      for (int rank = 0; rank < size_; ++rank) {
        if (segment_->ranks[rank].process == 0) return Result::kInProgress;
      }
      connected_ = true;
      CloseFile();
    }
    if (error_ != Result::kOk) return error_;
    if (own().finalized) {
      bool all = jobs_ == 0;
      for (int rank = 0; rank < size_; ++rank) {
        all = all && segment_->ranks[rank].finalized;
      }
      return all ? Result::kOk : Result::kInProgress;
    }
    for (int rank = 0; Has(0, "notify") && rank < size_; ++rank) {
      const Segment::Rank& other = segment_->ranks[rank];
      if (other.aborted || (kill(other.process, 0) != 0 && errno == ESRCH)) {
        return Refuse(Result::kRemoteError,
                      "rank " + std::to_string(rank) + " is gone");
      }
    }
    return Result::kOk;
  }

  Result Finalize() {
    own().finalized = true;
    return Result::kInProgress;
  }
  void Abort() {
    own().aborted = true;
    aborted_ = true;
  }

  // Enqueues a job on the stream. The job calls Run.
  Result Enqueue(const std::shared_ptr<State>& self, Call call,
                 const void* from, void* to, int root, void* stream) {
    if (!connected_ || late_ != nullptr) {
      return Refuse(Result::kInvalidUsage, "the call before is in progress");
    }
    if (stream == nullptr) return Refuse(Result::kInvalidArgument, "no stream");
    auto* const work = static_cast<kernels::HostWork*>(stream);
    call.captured = work->capturing;
    const uint64_t number = ++calls_;
    if (Has(number, "refuse")) {
      return Refuse(Result::kInternalError, "refused");
    }
    if (Has(number, "stuck")) {
      WaitFor([] { return false; });
      return Result::kOk;
    }
    auto enqueue = [self, work, call, from, to, root] {
      ++self->jobs_;
      work->enqueue(
          work, [](void* job) { static_cast<Job*>(job)->Run(); },
          new Job{self, call, from, to, root},
          [](void* job) {
            const std::unique_ptr<Job> owner(static_cast<Job*>(job));
            --owner->state->jobs_;
          });
    };
    if (Has(number, "late")) {
      late_ = std::move(enqueue);
      return Result::kInProgress;
    }
    enqueue();
    return Result::kOk;
  }

  std::atomic<bool> used{false};

 private:
  struct Job {
    std::shared_ptr<State> state;
    Call call;
    const void* from;
    void* to;
    int root;
    void Run() const {
      state->Run(call, static_cast<const char*>(from), static_cast<char*>(to),
                 root);
    }
  };

  Segment::Rank& own() { return segment_->ranks[rank_]; }

  void CloseFile() {
    if (owned_file_ >= 0) close(std::exchange(owned_file_, -1));
  }

  // Waits until `condition` is true. Returns false if this rank was aborted.
  template <typename Condition>
  bool WaitFor(const Condition& condition) {
    for (int spins = 0; !condition(); ++spins) {
      if (aborted_) return false;
      if (spins < 50) {
        std::this_thread::yield();
      } else {
        usleep(50);
      }
    }
    return !aborted_;
  }

  void Run(Call call, const char* from, char* to, int root) {
    call.number = ++came_;
    if (Has(call.number, "error")) error_ = Result::kSystemError;
    if (Has(call.number, "error") || Has(call.number, "hang")) {
      WaitFor([] { return false; });
      return;
    }
    for (call.at = 0; call.at < call.bytes; call.at += kChunkBytes) {
      const size_t bytes = std::min(kChunkBytes, call.bytes - call.at);
      const uint64_t step = ++steps_;
      own().call = call;
      std::memcpy(own().data, from + call.at, bytes);
      own().posted = step;
      for (int rank = 0; rank < size_; ++rank) {
        const Segment::Rank& other = segment_->ranks[rank];
        if (!WaitFor([&] { return other.posted >= step; })) return;
        if (other.call == call) continue;
        // The ranks make different calls. NCCL does not notice that and may
        // hang, so this fake hangs.
        WaitFor([] { return false; });
        return;
      }
      Take(call, bytes, to, root);
      own().read = step;
      for (int rank = 0; rank < size_; ++rank) {
        const Segment::Rank& other = segment_->ranks[rank];
        if (!WaitFor([&] { return other.read >= step; })) return;
      }
    }
  }

  void Take(const Call& call, size_t bytes, char* to, int root) const {
    switch (call.kind) {
      case Kind::kAllGather:
        for (int rank = 0; rank < size_; ++rank) {
          std::memcpy(to + static_cast<size_t>(rank) * call.bytes + call.at,
                      segment_->ranks[rank].data, bytes);
        }
        return;
      case Kind::kBroadcast:
        std::memcpy(to + call.at, segment_->ranks[root].data, bytes);
        return;
      case Kind::kAllReduce:
        switch (call.type) {
          case DataType::kFloat16:
            return Sum<kernels::F16>(call.at, bytes, to);
          case DataType::kBfloat16:
            return Sum<kernels::Bf16>(call.at, bytes, to);
          default:
            return Sum<float>(call.at, bytes, to);
        }
    }
  }

  // Adds in the order of a ring, as NCCL does. The sum of each part of the data
  // begins at a different rank, and every addition is rounded to T.
  template <typename T>
  void Sum(size_t at, size_t bytes, char* to) const {
    constexpr size_t kPart = 64;
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
      const auto first = static_cast<int>((at / sizeof(T) + i) / kPart + 1);
      T sum = {};
      for (int step = 0; step < size_; ++step) {
        T number;
        std::memcpy(
            &number,
            segment_->ranks[(first + step) % size_].data + i * sizeof(T),
            sizeof(T));
        sum = step == 0 ? number
                        : kernels::FromFloat<T>(kernels::ToFloat(sum) +
                                                kernels::ToFloat(number));
      }
      std::memcpy(to + at + i * sizeof(T), &sum, sizeof(T));
    }
  }

  Segment* const segment_;
  const int rank_;
  const int size_;
  int owned_file_;
  const std::vector<Fault> faults_;
  bool connected_ = false;
  uint64_t calls_ = 0;
  int polls_ = 0;
  std::function<void()> late_;  // work to continue after a call (fault `late`)
  // How many calls the stream has reached. Only the stream's thread uses this.
  uint64_t came_ = 0;
  uint64_t steps_ = 0;  // chunks exchanged (only the stream's thread uses this)
  std::atomic<int> jobs_{0};  // enqueued jobs, and jobs in captured graphs
  std::atomic<bool> aborted_{false};
  std::atomic<Result> error_{Result::kOk};
};

}  // namespace

struct CommTag {
  std::shared_ptr<State> state;
};

namespace {

// Checks that only one call uses a communicator at a time.
class Use {
 public:
  explicit Use(CommHandle comm) : state(comm->state) {
    if (state->used.exchange(true)) {
      std::fprintf(stderr, "fake NCCL: two threads use a communicator\n");
      std::abort();
    }
  }
  ~Use() { state->used = false; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  // Held by shared_ptr, because the communicator may be aborted during the
  // call.
  const std::shared_ptr<State> state;
};

size_t BytesOf(DataType type) {
  switch (type) {
    case DataType::kUint8:
      return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kFloat32:
      break;
  }
  return 4;
}

Result Enqueue(CommHandle comm, const Call& call, const void* from, void* to,
               int root, void* stream) {
  const Use use(comm);
  return use.state->Enqueue(use.state, call, from, to, root, stream);
}

}  // namespace
}  // namespace kvasir::worker::nccl

using namespace kvasir::worker::nccl;  // NOLINT: the functions have C names

extern "C" {

// For tests. KvasirFakeNcclLive returns the number of communicators that exist;
// an aborted one counts until its enqueued work has ended. KvasirFakeNcclAborts
// returns the number of aborts so far.
int KvasirFakeNcclLive() { return live; }
int KvasirFakeNcclAborts() { return aborts; }

Result ncclGetVersion(int* version) {
  const char* const text = std::getenv("KVASIR_FAKE_NCCL_VERSION");
  *version = text == nullptr ? 22809 : std::atoi(text);
  return Result::kOk;
}

const char* ncclGetErrorString(Result result) {
  switch (result) {
    case Result::kOk:
      return "no error";
    case Result::kSystemError:
      return "unhandled system error";
    case Result::kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "another error";
  }
}

const char* ncclGetLastError(CommHandle) { return last_error.c_str(); }

Result ncclGetUniqueId(UniqueId* id) {
  const int file = memfd_create("kvasir-fake-nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Segment)) != 0) {
    return Refuse(Result::kSystemError, std::strerror(errno));
  }
  std::snprintf(id->bytes, sizeof(id->bytes), "/proc/%d/fd/%d", getpid(), file);
  return Result::kOk;
}

Result ncclCommInitRankConfig(CommHandle* comm, int size, UniqueId id, int rank,
                              Config* config) {
  if (config->size != sizeof(Config) || config->magic != 0xcafebeef ||
      config->version < 21800 || config->blocking != 0) {
    return Refuse(
        Result::kInvalidArgument,
        "the size, magic, version or blocking of the config is wrong");
  }
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    return Refuse(Result::kInvalidArgument,
                  "the rank or the number of ranks is out of range");
  }
  int owner = 0, owned = -1;
  if (std::sscanf(id.bytes, "/proc/%d/fd/%d", &owner, &owned) != 2) {
    return Refuse(Result::kInvalidArgument,
                  "the id is not one of ncclGetUniqueId");
  }
  if (rank != 0 || owner != getpid()) owned = -1;
  const int file = open(id.bytes, O_RDWR | O_CLOEXEC);
  if (file < 0) return Refuse(Result::kSystemError, std::strerror(errno));
  void* const memory = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE,
                            MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) {
    return Refuse(Result::kSystemError, std::strerror(errno));
  }
  auto state =
      std::make_shared<State>(static_cast<Segment*>(memory), rank, size, owned);
  if (state->Has(0, "refuse")) return Refuse(Result::kInternalError, "refused");
  *comm = new CommTag{std::move(state)};
  return Result::kInProgress;
}

Result ncclCommGetAsyncError(CommHandle comm, Result* error) {
  const Use use(comm);
  *error = use.state->AsyncError();
  return Result::kOk;
}

Result ncclCommFinalize(CommHandle comm) {
  const Use use(comm);
  return use.state->Finalize();
}

Result ncclCommDestroy(CommHandle comm) {
  delete comm;
  return Result::kOk;
}

Result ncclCommAbort(CommHandle comm) {
  ++aborts;
  comm->state->Abort();
  // Another thread may still hang in a call. It copied comm->state before it
  // set `used`, so after this read of `used` that thread no longer needs
  // `comm`.
  (void)comm->state->used.load();
  delete comm;
  return Result::kOk;
}

Result ncclAllReduce(const void* from, void* to, size_t count, DataType type,
                     RedOp, CommHandle comm, void* stream) {
  return Enqueue(
      comm,
      {.kind = Kind::kAllReduce, .type = type, .bytes = count * BytesOf(type)},
      from, to, 0, stream);
}

Result ncclAllGather(const void* from, void* to, size_t count, DataType type,
                     CommHandle comm, void* stream) {
  return Enqueue(
      comm,
      {.kind = Kind::kAllGather, .type = type, .bytes = count * BytesOf(type)},
      from, to, 0, stream);
}

Result ncclBroadcast(const void* from, void* to, size_t count, DataType type,
                     int root, CommHandle comm, void* stream) {
  return Enqueue(
      comm,
      {.kind = Kind::kBroadcast, .type = type, .bytes = count * BytesOf(type)},
      from, to, root, stream);
}

}  // extern "C"
