// SVDq with a calibrated basis: keys in a principal basis of all KV heads, with
// channels coded in fewer bits the smaller their singular values. The basis and
// the channels' ranges come from the calibration and hold for all sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct SvdqOptions {
  // Bits of eight equal groups of channels by falling singular value; each is 0
  // (not stored), 1, 2, 3, 4 or 8.
  std::vector<uint32_t> schedule = {8, 4, 4, 4, 2, 2, 0, 0};
  // For comparison: keys are rotated before they are projected. The basis must
  // then span every position of every pair.
  bool post_rope = false;
  // Bits of values, with a range per token; 0: the request's value_codec.
  uint32_t value_bits = 0;
};

// Keys before their rotation are low_rank over all heads (of a tensor-parallel
// rank), centred and rebuilt. Keys after it are the full space in a basis. The
// request's keep, rank_multiple and key_codec are not read, because the
// schedule decides.
// Errors: INVALID_ARGUMENT for an invalid schedule, for a width that is no
//   multiple of 8, and for post_rope with tp > 1 (its one basis would span the
//   ranks).
absl::StatusOr<kvasir::v1::KvPlan> PlanSvdq(const PlanRequest& request,
                                            const SvdqOptions& options);

// The comparison for SVDq: the channels of keys are coded as they are, with a
// range for each.
struct ChannelCodesOptions {
  // Average bits over all key channels of all layers. Every layer has one bit
  // width; if the average lies between two widths, the first layers get the
  // larger one. The average is met exactly if a whole number of layers gives it
  // (in steps of 1 / L up to 4 bits, of 4 / L above); otherwise the plan stays
  // below it.
  double average_bits = 4;
  bool post_rope = false;
  uint32_t value_bits = 0;  // as in SvdqOptions
};
absl::StatusOr<kvasir::v1::KvPlan> PlanChannelCodes(
    const PlanRequest& request, const ChannelCodesOptions& options);

}  // namespace kvasir::compress
