// SVDq with a calibrated basis: keys in a principal basis of all KV heads,
// their channels coded with bits that fall with the singular value. The basis
// and the channels' ranges are the calibration's, for all sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct SvdqOptions {
  // Bits of eight equal groups of channels, by falling singular value; each 0
  // (not stored), 1, 2, 3, 4 or 8.
  std::vector<uint32_t> schedule = {8, 4, 4, 4, 2, 2, 0, 0};
  // Keys rotated before they are projected, for comparison: the basis then has
  // to hold every position of every pair.
  bool post_rope = false;
  // Values as codes of so many bits with a range per token; 0: as the request's
  // value_codec has them.
  uint32_t value_bits = 0;
};

// Keys before their rotation: low_rank over all heads (of a tensor-parallel
// rank), centred, rebuilt; after it: the full space in a basis. The request's
// keep, rank_multiple and key_codec are not read: the schedule decides.
// Errors: INVALID_ARGUMENT for a schedule that is none, a width that 8 does not
// divide, or post_rope with tp > 1 (its one basis spans the ranks).
absl::StatusOr<kvasir::v1::KvPlan> PlanSvdq(const PlanRequest& request,
                                            const SvdqOptions& options);

// What SVDq is compared with: the channels of keys coded as they are, with a
// range each.
struct ChannelCodesOptions {
  // Bits over all key channels of all layers on average. Every layer has one
  // bit width; where the average lies between two, the first layers have the
  // upper one. Met exactly where a whole number of layers comes to it (in steps
  // of 1 / L up to 4 bits, of 4 / L above), from below elsewhere.
  double average_bits = 4;
  bool post_rope = false;
  uint32_t value_bits = 0;  // as SvdqOptions
};
absl::StatusOr<kvasir::v1::KvPlan> PlanChannelCodes(
    const PlanRequest& request, const ChannelCodesOptions& options);

}  // namespace kvasir::compress
