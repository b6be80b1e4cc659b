// Implements Collective on CPU streams, over any transport that moves bytes
// between ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"
#include "worker/collective/collective.h"

namespace kvasir::worker {

// Do not change these numbers, because they are sent over the network.
enum class CollectiveKind : uint32_t {
  kAllReduceSum = 1,
  kAllGather = 2,
  kBroadcast = 3,
};

// Returns a text like "AllReduceSum of 64 bytes".
std::string DescribeCall(CollectiveKind kind, int64_t bytes);

absl::Status RankGaveUp(int64_t rank, const absl::Status& reason);

// The interface of a transport. It has the calls of Collective, on host memory,
// with the same rules for ranks and errors. Callers must check that all sizes
// are valid and above 0.
class HostCollective {
 public:
  virtual ~HostCollective() = default;
  virtual plan::TpShard shard() const = 0;
  virtual absl::Status AllReduceSum(absl::Span<float> data) = 0;
  virtual absl::Status AllGather(float* data, int64_t num_rows,
                                 absl::Span<const int64_t> first_columns) = 0;
  virtual absl::Status Broadcast(absl::Span<char> data) = 0;
  virtual void Abort(const absl::Status& reason) = 0;
  // May be called from any thread.
  virtual int64_t sent_bytes() const = 0;
  virtual double waited_seconds() const = 0;
};

// Returns a Collective that uses the transport. A call of size 0 returns at
// once without sending anything or waiting for another rank. A call on a stream
// of a device other than the CPU returns UNIMPLEMENTED with the call's name.
std::unique_ptr<Collective> MakeCpuCollective(
    std::unique_ptr<HostCollective> host);

}  // namespace kvasir::worker
