// The description that a rank gives of itself before the ranks of an NCCL group
// are connected.
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
  int version = 0;                   // NCCL's
  std::optional<nccl::UniqueId> id;  // set only by rank 0
};

// Returns one line of printable ASCII that begins with a version.
std::string FormatNcclAddress(const NcclAddress& address);
// INVALID_ARGUMENT says what is wrong. No error text contains the id.
absl::StatusOr<NcclAddress> ParseNcclAddress(std::string_view text);

// Returns the id that all ranks connect with. addresses[r] is rank r's address,
// `own` this rank's. INVALID_ARGUMENT names the rank with an address that does
// not fit.
absl::StatusOr<nccl::UniqueId> ReadNcclAddresses(
    const NcclAddress& own, absl::Span<const std::string> addresses);

}  // namespace kvasir::worker
