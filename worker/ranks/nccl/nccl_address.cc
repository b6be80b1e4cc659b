#include "worker/ranks/nccl/nccl_address.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "worker/ranks/nccl/nccl_library.h"

namespace kvasir::worker {
namespace {

constexpr std::string_view kVersion = "kvasir-nccl-1";
constexpr size_t kMaxTextBytes = 1 << 10;
constexpr size_t kIdDigits = 2 * sizeof(nccl::UniqueId);

absl::StatusOr<nccl::UniqueId> ParseId(const std::string& digits) {
  if (digits.size() != kIdDigits ||
      digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("the id is not ", kIdDigits, " lowercase hex digits"));
  }
  nccl::UniqueId id;
  const std::string bytes = absl::HexStringToBytes(digits);
  std::memcpy(id.bytes, bytes.data(), sizeof(id.bytes));
  return id;
}

}  // namespace

std::string FormatNcclAddress(const NcclAddress& address) {
  std::string id = "-";
  if (address.id.has_value()) {
    id = absl::BytesToHexString(
        absl::string_view(address.id->bytes, sizeof(address.id->bytes)));
  }
  return absl::StrCat(base::AbslView(kVersion), " ", address.shard.rank, " ",
                      address.shard.size, " ", address.version, " ", id);
}

absl::StatusOr<NcclAddress> ParseNcclAddress(std::string_view text) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "is ", text.size(), " bytes long, the limit is ", kMaxTextBytes));
  }
  const std::vector<std::string> fields =
      absl::StrSplit(base::AbslView(text), ' ');
  if (fields[0] != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat("does not begin with ", base::AbslView(kVersion)));
  }
  NcclAddress address;
  plan::TpShard& shard = address.shard;
  if (fields.size() != 5 || !absl::SimpleAtoi(fields[1], &shard.rank) ||
      !absl::SimpleAtoi(fields[2], &shard.size) ||
      !absl::SimpleAtoi(fields[3], &address.version)) {
    return absl::InvalidArgumentError(
        "want a rank, the number of ranks and NCCL's version as numbers, then "
        "an id or \"-\", and nothing more");
  }
  if (shard.size < 1 || shard.size > kMaxNcclRanks || shard.rank < 0 ||
      shard.rank >= shard.size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "says rank ", shard.rank, " of ", shard.size, "; want 1 to ",
        kMaxNcclRanks,
        " ranks, and a rank of at least 0 that is less than the number of "
        "ranks"));
  }
  if ((fields[4] == "-") != (shard.rank != 0)) {
    return absl::InvalidArgumentError(
        "rank 0 must have an id, and every other rank must have \"-\"");
  }
  if (shard.rank == 0) {
    KVASIR_ASSIGN_OR_RETURN(address.id, ParseId(fields[4]));
  }
  return address;
}

absl::StatusOr<nccl::UniqueId> ReadNcclAddresses(
    const NcclAddress& own, absl::Span<const std::string> addresses) {
  if (addresses.size() != static_cast<size_t>(own.shard.size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "NCCL: the addresses of ", addresses.size(),
        " ranks were given, but the group has ", own.shard.size, " ranks"));
  }
  nccl::UniqueId id;
  for (int64_t rank = 0; rank < own.shard.size; ++rank) {
    const absl::StatusOr<NcclAddress> address =
        ParseNcclAddress(addresses[static_cast<size_t>(rank)]);
    const auto refuse = [rank](const auto&... why) {
      return absl::InvalidArgumentError(
          absl::StrCat("NCCL: address of rank ", rank, ": ", why...));
    };
    if (!address.ok()) return refuse(address.status().message());
    const plan::TpShard& shard = address->shard;
    if (shard != plan::TpShard{rank, own.shard.size}) {
      return refuse("belongs to rank ", shard.rank, " of ", shard.size,
                    ", not to rank ", rank, " of ", own.shard.size);
    }
    if (address->version != own.version) {
      return refuse("says that it has NCCL ", NcclVersionName(address->version),
                    ", this rank has ", NcclVersionName(own.version),
                    ": all ranks need the same version");
    }
    if (rank == 0) id = *address->id;
  }
  return id;
}

}  // namespace kvasir::worker
