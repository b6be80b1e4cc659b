// The address that each rank of an NCCL group sends to the other ranks before
// they are connected.
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
  int version = 0;                   // NCCL's version number
  std::optional<nccl::UniqueId> id;  // set only by rank 0
};

// Returns the address as one line of printable ASCII that begins with a format
// version.
std::string FormatNcclAddress(const NcclAddress& address);
// INVALID_ARGUMENT if the text is not a valid address. No error text contains
// the id, which is a secret.
absl::StatusOr<NcclAddress> ParseNcclAddress(std::string_view text);

// Returns rank 0's id, with which all ranks connect. addresses[r] is rank r's
// address, and `own` describes this rank. INVALID_ARGUMENT, naming the rank, if
// an address is from another group or another release of NCCL.
absl::StatusOr<nccl::UniqueId> ReadNcclAddresses(
    const NcclAddress& own, absl::Span<const std::string> addresses);

}  // namespace kvasir::worker
