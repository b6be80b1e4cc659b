// Collectives on CPU streams, over whatever moves bytes between the memories of
// ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"
#include "worker/collective/collective.h"

namespace kvasir::worker {

// On the wire: do not renumber.
enum class CollectiveKind : uint32_t {
  kAllReduceSum = 1,
  kAllGather = 2,
  kBroadcast = 3,
};

// "AllReduceSum of 64 bytes"
std::string DescribeCall(CollectiveKind kind, int64_t bytes);

absl::Status RankGaveUp(int64_t rank, const absl::Status& reason);

// What Collective says of ranks and errors, over host memory. Sizes are checked
// by whoever calls, and above 0.
class HostCollective {
 public:
  virtual ~HostCollective() = default;
  virtual plan::TpShard shard() const = 0;
  virtual absl::Status AllReduceSum(absl::Span<float> data) = 0;
  virtual absl::Status AllGather(float* data, int64_t num_rows,
                                 absl::Span<const int64_t> first_columns) = 0;
  virtual absl::Status Broadcast(absl::Span<char> data) = 0;
  virtual void Abort(const absl::Status& reason) = 0;
  // Both from any thread.
  virtual int64_t sent_bytes() const = 0;
  virtual double waited_seconds() const = 0;
};

// Calls of no numbers are done at once: nothing is sent, nobody is waited for.
// On a stream that is not the CPU's: UNIMPLEMENTED by the op's name.
std::unique_ptr<Collective> MakeCpuCollective(
    std::unique_ptr<HostCollective> host);

}  // namespace kvasir::worker
