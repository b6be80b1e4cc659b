#include "worker/ranks/nccl/nccl_group.h"

#include <net/if.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/rowwise/ops.h"
#include "worker/collective/collective_sizes.h"
#include "worker/collective/cpu_collective.h"
#include "worker/ranks/nccl/nccl_communicator.h"

namespace kvasir::worker {
namespace {

using kernels::DevicePtr;
using kernels::DType;
using kernels::LaunchStream;
using kernels::Stream;
using kernels::Workspace;
using nccl::CommHandle;
using nccl::DataType;

DataType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return DataType::kFloat16;
    case DType::kBf16:
      return DataType::kBfloat16;
    case DType::kF32:
      break;
  }
  return DataType::kFloat32;
}

absl::Status CheckStream(const char* call, const Stream& stream) {
  if (stream.device() != kernels::DeviceKind::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(call, ": NCCL needs a stream of a GPU, not of the CPU"));
}

class NcclCollective final : public Collective {
 public:
  NcclCollective(plan::TpShard shard, bool deterministic,
                 std::unique_ptr<Nccl> library,
                 std::unique_ptr<NcclCommunicator> communicator)
      : shard_(shard),
        deterministic_(deterministic),
        library_(std::move(library)),
        communicator_(std::move(communicator)) {}

  plan::TpShard shard() const override { return shard_; }

  absl::Status AllReduceSum(Stream& stream, DevicePtr<float> data,
                            int64_t count, DType dtype,
                            Workspace& workspace) override {
    KVASIR_RETURN_IF_ERROR(CheckStream("AllReduceSum", stream));
    KVASIR_RETURN_IF_ERROR(CollectiveBytes("AllReduceSum", 1, count).status());
    const int64_t bytes = count * kernels::DTypeBytes(dtype);
    if (deterministic_) {
      return SumInOrder(stream, data, count, dtype, workspace);
    }
    if (workspace.counting()) return absl::OkStatus();
    if (count > 0) {
      KVASIR_RETURN_IF_ERROR(Enqueue(
          "ncclAllReduce", stream, data, [&](CommHandle comm, void* handle) {
            return functions().ncclAllReduce(
                data.device_address(), data.device_address(),
                static_cast<size_t>(count), TypeOf(dtype), nccl::RedOp::kSum,
                comm, handle);
          }));
    }
    Count(stream, 2 * (shard_.size - 1) * bytes / shard_.size);
    return absl::OkStatus();
  }

  absl::Status AllGather(Stream& stream, DevicePtr<float> data,
                         int64_t num_rows,
                         absl::Span<const int64_t> first_columns,
                         Workspace& workspace) override {
    KVASIR_RETURN_IF_ERROR(CheckStream("AllGather", stream));
    KVASIR_RETURN_IF_ERROR(CheckFirstColumns(shard_, first_columns));
    const int64_t columns = first_columns.back();
    KVASIR_RETURN_IF_ERROR(
        CollectiveBytes("AllGather", num_rows, columns).status());
    const auto width = [&](int64_t rank) {
      const auto r = static_cast<size_t>(rank);
      return first_columns[r + 1] - first_columns[r];
    };
    int64_t widest = 0;
    for (int64_t rank = 0; rank < shard_.size; ++rank) {
      widest = std::max(widest, width(rank));
    }
    // ncclAllGather needs pieces of the same size from all ranks, so each piece
    // has room for all rows of the widest rank's columns.
    const int64_t piece = num_rows * widest;
    Workspace::Scope scope(&workspace);
    const DevicePtr<float> pieces = workspace.Take<float>(shard_.size * piece);
    KVASIR_RETURN_IF_ERROR(workspace.status());
    // Parameters of the op that copies columns between `data` and the piece of
    // a rank.
    kernels::GatherRowsParams copy;
    copy.num_rows = num_rows;
    copy.columns = width(shard_.rank);
    copy.x = data + first_columns[static_cast<size_t>(shard_.rank)];
    copy.x_row_stride = columns;
    copy.out = pieces + shard_.rank * piece;
    copy.out_row_stride = widest;
    if (workspace.counting() || (piece > 0 && copy.columns > 0)) {
      KVASIR_RETURN_IF_ERROR(kernels::GatherRows(stream, copy, workspace));
    }
    if (workspace.counting()) return absl::OkStatus();
    if (piece > 0) {
      const DevicePtr<float> own = copy.out;
      KVASIR_RETURN_IF_ERROR(Enqueue(
          "ncclAllGather", stream, pieces, [&](CommHandle comm, void* handle) {
            return functions().ncclAllGather(
                own.device_address(), pieces.device_address(),
                static_cast<size_t>(piece), DataType::kFloat32, comm, handle);
          }));
    }
    copy.x_row_stride = widest;
    copy.out_row_stride = columns;
    for (int64_t rank = 0; rank < shard_.size; ++rank) {
      copy.columns = width(rank);
      if (rank == shard_.rank || copy.columns == 0 || piece == 0) continue;
      copy.x = pieces + rank * piece;
      copy.out = data + first_columns[static_cast<size_t>(rank)];
      KVASIR_RETURN_IF_ERROR(kernels::GatherRows(stream, copy, workspace));
    }
    Count(stream,
          (shard_.size - 1) * piece * static_cast<int64_t>(sizeof(float)));
    return absl::OkStatus();
  }

  absl::Status Broadcast(Stream& stream, DevicePtr<void> data, int64_t bytes,
                         Workspace& workspace) override {
    KVASIR_RETURN_IF_ERROR(CheckStream("Broadcast", stream));
    if (bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Broadcast: the size must be at least 0 bytes, but is ", bytes));
    }
    if (workspace.counting()) return absl::OkStatus();
    if (bytes > 0) {
      KVASIR_RETURN_IF_ERROR(Enqueue(
          "ncclBroadcast", stream, data, [&](CommHandle comm, void* handle) {
            return functions().ncclBroadcast(
                data.device_address(), data.device_address(),
                static_cast<size_t>(bytes), DataType::kUint8, 0, comm, handle);
          }));
    }
    Count(stream, shard_.rank + 1 < shard_.size ? bytes : 0);
    return absl::OkStatus();
  }

  void Abort(const absl::Status& reason) override {
    communicator_->Fail(RankGaveUp(shard_.rank, reason));
  }

  absl::Status status() const override { return communicator_->status(); }

  bool can_be_captured() const override { return true; }
  CollectiveTotals TakeCaptured() override {
    return std::exchange(captured_, CollectiveTotals());
  }
  absl::Status Replayed(Stream& stream,
                        const CollectiveTotals& calls) override {
    calls_.fetch_add(calls.calls, std::memory_order_relaxed);
    sent_bytes_.fetch_add(calls.sent_bytes, std::memory_order_relaxed);
    return communicator_->Watch("a captured step",
                                static_cast<LaunchStream&>(stream));
  }

  // Returns as sent_bytes what a ring algorithm would send, because NCCL does
  // not report what it really sends.
  CollectiveTotals totals() const override {
    return {calls_.load(std::memory_order_relaxed),
            sent_bytes_.load(std::memory_order_relaxed)};
  }

 private:
  const nccl::Functions& functions() const { return library_->functions(); }

  // Gathers the data of all ranks on every rank, and adds it there in rank
  // order.
  absl::Status SumInOrder(Stream& stream, DevicePtr<float> data, int64_t count,
                          DType dtype, Workspace& workspace) {
    const int64_t bytes = count * kernels::DTypeBytes(dtype);
    Workspace::Scope scope(&workspace);
    const DevicePtr<char> parts = workspace.Take<char>(shard_.size * bytes);
    KVASIR_RETURN_IF_ERROR(workspace.status());
    if (count > 0 && !workspace.counting()) {
      KVASIR_RETURN_IF_ERROR(Enqueue(
          "ncclAllGather", stream, data, [&](CommHandle comm, void* handle) {
            return functions().ncclAllGather(
                data.device_address(), parts.device_address(),
                static_cast<size_t>(bytes), DataType::kUint8, comm, handle);
          }));
    }
    kernels::SumRowsParams sum;
    sum.x = parts.as<const float>();
    sum.x_row_stride = count;
    sum.out = data;
    sum.num_rows = shard_.size;
    sum.columns = count;
    sum.dtype = dtype;
    if (count > 0 || workspace.counting()) {
      KVASIR_RETURN_IF_ERROR(kernels::SumRows(stream, sum, workspace));
    }
    if (!workspace.counting()) Count(stream, (shard_.size - 1) * bytes);
    return absl::OkStatus();
  }

  absl::Status Enqueue(
      const char* name, Stream& stream, DevicePtr<const void> data,
      absl::FunctionRef<nccl::Result(CommHandle comm, void* handle)> call) {
    auto& launches = static_cast<LaunchStream&>(stream);
    launches.CheckMemory(name, data.device_address());
    return communicator_->Enqueue(name, launches, call);
  }

  void Count(const Stream& stream, int64_t bytes) {
    if (static_cast<const LaunchStream&>(stream).capturing()) {
      ++captured_.calls;
      captured_.sent_bytes += bytes;
      return;
    }
    calls_.fetch_add(1, std::memory_order_relaxed);
    sent_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }

  const plan::TpShard shard_;
  const bool deterministic_;
  const std::unique_ptr<Nccl> library_;
  const std::unique_ptr<NcclCommunicator> communicator_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> sent_bytes_{0};
  CollectiveTotals captured_;
};

// Sets environment variables, because NCCL has no other way to set its network
// interface and its behaviour in graph captures.
absl::Status SetEnvironment(const std::string& interface) {
  // Turn buffer registration off, unless the variable is already set. With
  // registration, ranks of a host wait for each other inside a captured call.
  // They would wait for ever if one of them did not capture the call.
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
  if (interface.empty()) return absl::OkStatus();
  if (if_nametoindex(interface.c_str()) == 0) {
    return absl::NotFoundError(absl::StrCat(
        "NCCL: '", interface, "' is not a network interface of this machine"));
  }
  // "=" selects exactly this interface; without it, NCCL also takes interfaces
  // whose names begin with this name.
  setenv("NCCL_SOCKET_IFNAME", absl::StrCat("=", interface).c_str(), 1);
  return absl::OkStatus();
}

}  // namespace

NcclGroup::NcclGroup(const NcclOptions& options, std::unique_ptr<Nccl> library,
                     const NcclAddress& own)
    : options_(options),
      library_(std::move(library)),
      own_(own),
      address_(FormatNcclAddress(own)) {}

absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::Begin(
    const NcclOptions& options) {
  const plan::TpShard& shard = options.shard;
  if (shard.size < 1 || shard.size > kMaxNcclRanks || shard.rank < 0 ||
      shard.rank >= shard.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("NCCL: there is no rank ", shard.rank, " of ", shard.size,
                     ": want 1 to ", kMaxNcclRanks, " ranks, numbered from 0"));
  }
  KVASIR_RETURN_IF_ERROR(SetEnvironment(options.interface));
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<Nccl> library,
      Nccl::Open(options.libraries.empty() ? Nccl::DefaultFiles()
                                           : options.libraries));
  NcclAddress own = {.shard = shard, .version = library->version()};
  if (shard.rank == 0) {
    const nccl::Result result =
        library->functions().ncclGetUniqueId(&own.id.emplace());
    if (result != nccl::Result::kOk) {
      return library->Error("NCCL: ncclGetUniqueId", result);
    }
  }
  return std::unique_ptr<NcclGroup>(
      new NcclGroup(options, std::move(library), own));
}

absl::StatusOr<std::unique_ptr<Collective>> NcclGroup::Connect(
    absl::Span<const std::string> addresses) && {
  KVASIR_ASSIGN_OR_RETURN(const nccl::UniqueId id,
                          ReadNcclAddresses(own_, addresses));
  KVASIR_ASSIGN_OR_RETURN(
      auto communicator,
      NcclCommunicator::Connect({.shard = options_.shard,
                                 .library = library_.get(),
                                 .use_device = options_.use_device,
                                 .connect_timeout = options_.connect_timeout,
                                 .call_timeout = options_.call_timeout,
                                 .poll_interval = options_.poll_interval,
                                 .on_failure = options_.on_failure},
                                id));
  return std::make_unique<NcclCollective>(
      options_.shard, options_.deterministic, std::move(library_),
      std::move(communicator));
}

}  // namespace kvasir::worker
