#include "kernels/latents/latent_check.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"

namespace kvasir::kernels {
namespace {

// The runs of a group follow each other from channel 0 to the last one.
absl::Status CheckRuns(const char* op, const LatentGroup& group) {
  if (group.num_runs < 0) return Refuse(op, "runs", 0, group.num_runs);
  int64_t end = 0;
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    if (run.bits != 8 && (run.bits < 1 || run.bits > 4)) {
      return absl::InvalidArgumentError(absl::StrCat(
          op, ": run ", r, ": want 1, 2, 3, 4 or 8 bits, have ", run.bits));
    }
    if (run.begin != end || run.width < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": run ", r, ": want channels from ", end,
                       " on, have ", run.width, " from ", run.begin));
    }
    end += run.width;
  }
  if (group.num_runs > 0 && end != group.width) {
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": runs of ", end, " channels in a latent of ", group.width));
  }
  return absl::OkStatus();
}

// What a group has of each slot, one region of a page.
struct Region {
  const char* offset_name;
  const char* stride_name;
  int64_t offset_bytes;
  int64_t stride_bytes;
  int64_t slot_bytes;
  int64_t number_bytes;  // what offset and stride are multiples of
};

absl::Status CheckRegion(const char* op, const Region& region,
                         int64_t page_tokens, int64_t page_bytes) {
  if (region.slot_bytes == 0) return absl::OkStatus();
  if (region.offset_bytes < 0) {
    return Refuse(op, region.offset_name, 0, region.offset_bytes);
  }
  if (region.stride_bytes < region.slot_bytes) {
    return Refuse(op, region.stride_name, region.slot_bytes,
                  region.stride_bytes);
  }
  for (const int64_t bytes : {region.offset_bytes, region.stride_bytes}) {
    if (bytes % region.number_bytes == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": ", region.offset_name, " and ", region.stride_name,
        ": want multiples of ", region.number_bytes, ", have ", bytes));
  }
  const int64_t end = region.offset_bytes +
                      (page_tokens - 1) * region.stride_bytes +
                      region.slot_bytes;
  return end > page_bytes ? Refuse(op, "page_bytes", end, page_bytes)
                          : absl::OkStatus();
}

absl::Status CheckGroup(const char* op, const LatentPart& part,
                        const LatentGroup& group, int64_t page_tokens) {
  if (group.width < 1) return Refuse(op, "width", 1, group.width);
  if (group.column < 0) return Refuse(op, "column", 0, group.column);
  KVASIR_RETURN_IF_ERROR(CheckRuns(op, group));
  const bool codes = group.num_runs > 0;
  KVASIR_RETURN_IF_ERROR(
      CheckRegion(op,
                  {"codes_offset_bytes", "codes_stride_bytes",
                   group.codes_offset_bytes, group.codes_stride_bytes,
                   CodesBytes(part, group), codes ? 1 : DTypeBytes(part.dtype)},
                  page_tokens, part.page_bytes));
  return CheckRegion(op,
                     {"params_offset_bytes", "params_stride_bytes",
                      group.params_offset_bytes, group.params_stride_bytes,
                      ParamsBytes(part, group), DTypeBytes(part.param_dtype)},
                     page_tokens, part.page_bytes);
}

}  // namespace

absl::Status CheckLatentPart(const char* op, const LatentPart& part,
                             int64_t page_tokens) {
  if (part.num_groups < 1) return Refuse(op, "groups", 1, part.num_groups);
  if ((part.static_scale == nullptr) != (part.static_minimum == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": static ranges: want scales and minima, or neither"));
  }
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    if (part.static_scale != nullptr && group.num_runs == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": group ", g, " has static ranges, but no codes"));
    }
    KVASIR_RETURN_IF_ERROR(CheckGroup(op, part, group, page_tokens));
  }
  return absl::OkStatus();
}

}  // namespace kvasir::kernels
