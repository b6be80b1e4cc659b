#include "worker/collective/cpu_collective.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "worker/collective/collective_sizes.h"

namespace kvasir::worker {
namespace {

// These structs are the parameters of the ops that run collective calls on a
// CPU stream. Each op calls the transport and writes the resulting status to
// *status.
template <template <typename> class Ptr>
struct ReduceParamsIn {
  Ptr<float> data = nullptr;  // [count]
  int64_t count = 0;
  HostCollective* host = nullptr;
  absl::Status* status = nullptr;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(data);
  }
};

template <template <typename> class Ptr>
struct GatherParamsIn {
  Ptr<float> data = nullptr;  // [num_rows, columns]
  int64_t num_rows = 0;
  const absl::Span<const int64_t>* first_columns = nullptr;
  HostCollective* host = nullptr;
  absl::Status* status = nullptr;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(data);
  }
};

template <template <typename> class Ptr>
struct BroadcastParamsIn {
  Ptr<void> data = nullptr;  // [bytes]
  int64_t bytes = 0;
  HostCollective* host = nullptr;
  absl::Status* status = nullptr;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(data);
  }
};

void ReduceCpu(const ReduceParamsIn<kernels::LaunchPtr>& args,
               kernels::CpuStream&) {
  *args.status = args.host->AllReduceSum(
      absl::MakeSpan(args.data, static_cast<size_t>(args.count)));
}

void GatherCpu(const GatherParamsIn<kernels::LaunchPtr>& args,
               kernels::CpuStream&) {
  *args.status =
      args.host->AllGather(args.data, args.num_rows, *args.first_columns);
}

void BroadcastCpu(const BroadcastParamsIn<kernels::LaunchPtr>& args,
                  kernels::CpuStream&) {
  *args.status = args.host->Broadcast(absl::MakeSpan(
      static_cast<char*>(args.data), static_cast<size_t>(args.bytes)));
}

constexpr kernels::OpKernels<ReduceParamsIn<kernels::DevicePtr>> kAllReduceSum =
    {"all_reduce_sum", &ReduceCpu, &ReduceCpu};
constexpr kernels::OpKernels<GatherParamsIn<kernels::DevicePtr>> kAllGather = {
    "all_gather", &GatherCpu, &GatherCpu};
constexpr kernels::OpKernels<BroadcastParamsIn<kernels::DevicePtr>> kBroadcast =
    {"broadcast", &BroadcastCpu, &BroadcastCpu};

class CpuCollective final : public Collective {
 public:
  explicit CpuCollective(std::unique_ptr<HostCollective> host)
      : host_(std::move(host)) {}

  plan::TpShard shard() const override { return host_->shard(); }

  absl::Status AllReduceSum(kernels::Stream& stream,
                            kernels::DevicePtr<float> data, int64_t count,
                            kernels::DType dtype,
                            kernels::Workspace& workspace) override {
    KVASIR_RETURN_IF_ERROR(
        kernels::CheckActivations(kAllReduceSum.op, stream.device(), dtype));
    KVASIR_ASSIGN_OR_RETURN(const int64_t bytes,
                            CollectiveBytes("AllReduceSum", 1, count));
    absl::Status status;
    return Run(kAllReduceSum, stream, workspace, bytes,
               {data, count, host_.get(), &status});
  }

  absl::Status AllGather(kernels::Stream& stream,
                         kernels::DevicePtr<float> data, int64_t num_rows,
                         absl::Span<const int64_t> first_columns,
                         kernels::Workspace& workspace) override {
    KVASIR_RETURN_IF_ERROR(CheckFirstColumns(shard(), first_columns));
    KVASIR_ASSIGN_OR_RETURN(
        const int64_t bytes,
        CollectiveBytes("AllGather", num_rows, first_columns.back()));
    absl::Status status;
    return Run(kAllGather, stream, workspace, bytes,
               {data, num_rows, &first_columns, host_.get(), &status});
  }

  absl::Status Broadcast(kernels::Stream& stream, kernels::DevicePtr<void> data,
                         int64_t bytes,
                         kernels::Workspace& workspace) override {
    if (bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Broadcast: the size must be at least 0 bytes, but is ", bytes));
    }
    absl::Status status;
    return Run(kBroadcast, stream, workspace, bytes,
               {data, bytes, host_.get(), &status});
  }

  void Abort(const absl::Status& reason) override { host_->Abort(reason); }

  // Always OK: on a CPU, a call is finished when it returns, so the call itself
  // returns any error.
  absl::Status status() const override { return absl::OkStatus(); }

  CollectiveTotals totals() const override {
    return {calls_.load(std::memory_order_relaxed), host_->sent_bytes(),
            host_->waited_seconds()};
  }

 private:
  template <typename Params>
  absl::Status Run(const kernels::OpKernels<Params>& kernels,
                   kernels::Stream& stream, kernels::Workspace& workspace,
                   int64_t bytes, const std::type_identity_t<Params>& params) {
    if (workspace.counting()) return kernels::CheckServed(kernels, stream);
    if (bytes > 0) {
      KVASIR_RETURN_IF_ERROR(kernels::Launch(kernels, stream, params));
      KVASIR_RETURN_IF_ERROR(*params.status);
    }
    calls_.fetch_add(1, std::memory_order_relaxed);
    return absl::OkStatus();
  }

  const std::unique_ptr<HostCollective> host_;
  std::atomic<int64_t> calls_{0};
};

}  // namespace

std::string DescribeCall(CollectiveKind kind, int64_t bytes) {
  const char* name = "an unknown call";
  switch (kind) {
    case CollectiveKind::kAllReduceSum:
      name = "AllReduceSum";
      break;
    case CollectiveKind::kAllGather:
      name = "AllGather";
      break;
    case CollectiveKind::kBroadcast:
      name = "Broadcast";
      break;
  }
  return absl::StrCat(name, " of ", bytes, " bytes");
}

absl::Status RankGaveUp(int64_t rank, const absl::Status& reason) {
  return absl::AbortedError(absl::StrCat("tensor-parallel rank ", rank,
                                         " gave up: ", reason.message()));
}

std::unique_ptr<Collective> MakeCpuCollective(
    std::unique_ptr<HostCollective> host) {
  return std::make_unique<CpuCollective>(std::move(host));
}

}  // namespace kvasir::worker
