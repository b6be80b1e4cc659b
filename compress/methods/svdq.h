// SVDq with a calibrated basis: keys are stored in a principal basis of all KV
// heads. The smaller the singular value of a channel, the fewer bits code it.
// The basis and the channels' ranges come from the calibration and are the same
// for all sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/methods/method.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct SvdqOptions {
  // The bits per channel of eight equal groups of channels, in order of falling
  // singular value: 0 (not stored) to 6, or 8.
  std::vector<uint32_t> schedule = {8, 4, 4, 4, 2, 2, 0, 0};
  // If true, keys are projected after their rotation, for comparison. One basis
  // must then suit the keys at all positions.
  bool post_rope = false;
  // Number of bits in which values are coded, with a range per token; 0: values
  // are stored with the request's value_codec.
  uint32_t value_bits = 0;
};

// Makes a plan. By default keys are low_rank parts over all heads (of a
// tensor-parallel rank), centred, and rebuilt before their rotation. With
// post_rope they are full parts with a basis. The request's keep, rank_multiple
// and key_codec are ignored, because the schedule replaces them.
// Errors: INVALID_ARGUMENT for an invalid schedule, for latents whose width is
//   no multiple of 8, and for post_rope with tp > 1 (one basis would then span
//   several tensor-parallel ranks).
absl::StatusOr<kvasir::v1::KvPlan> PlanSvdq(const PlanRequest& request,
                                            const SvdqOptions& options);

// Options of a baseline for SVDq, which codes the channels of keys without a
// basis. Each channel has its own range.
struct ChannelCodesOptions {
  // Average number of bits over all key channels of all layers. All channels of
  // a layer have the same bit width; if the average lies between two widths,
  // the first layers get the larger width. With L layers, averages that are
  // multiples of 1 / L (up to 4 bits) or of 4 / L (above 4 bits) are met
  // exactly. For other averages the plan stays below the average.
  double average_bits = 4;
  bool post_rope = false;
  uint32_t value_bits = 0;  // same meaning as in SvdqOptions
};
absl::StatusOr<kvasir::v1::KvPlan> PlanChannelCodes(
    const PlanRequest& request, const ChannelCodesOptions& options);

}  // namespace kvasir::compress
