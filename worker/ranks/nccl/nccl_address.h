// What a rank tells of itself before the ranks of an NCCL group are connected.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/tp_shard.h"
#include "worker/ranks/nccl/nccl_abi.h"

namespace kvasir::worker {

inline constexpr int64_t kMaxNcclRanks = 256;

struct NcclAddress {
  plan::TpShard shard;
  int version = 0;                   // of NCCL
  std::optional<nccl::UniqueId> id;  // rank 0 alone has it
};

// One line of printable ASCII, beginning with a version.
std::string FormatNcclAddress(const NcclAddress& address);
// INVALID_ARGUMENT with what is wrong; the id is in no text.
absl::StatusOr<NcclAddress> ParseNcclAddress(std::string_view text);

// The id that all of them connect with. addresses[r] is what rank r calls its
// own, `own` this rank's. INVALID_ARGUMENT by the rank that does not fit.
absl::StatusOr<nccl::UniqueId> ReadNcclAddresses(
    const NcclAddress& own, absl::Span<const std::string> addresses);

}  // namespace kvasir::worker
