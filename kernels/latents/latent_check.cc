#include "kernels/latents/latent_check.h"

#include <algorithm>
#include <cmath>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/device/dispatch.h"

namespace kvasir::kernels {
namespace {

// The runs of a group must follow each other from channel 0 to the last one.
absl::Status CheckRuns(const char* op, const LatentPart& part,
                       const LatentGroup& group) {
  if (group.num_runs < 0) return Refuse(op, "runs", 0, group.num_runs);
  if (part.num_levels > 0 && group.num_runs > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": a latent with levels must have a single run of codes, but has ",
        group.num_runs));
  }
  int64_t end = 0;
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    const bool none = run.bits == 0 && part.static_scale != nullptr && r > 0 &&
                      r + 1 == group.num_runs;
    if (!none && run.bits != 8 && (run.bits < 1 || run.bits > 6)) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": run ", r,
                       ": the bits of a code must be 1 to 6 or 8 (or 0 in the "
                       "last of several "
                       "runs with static ranges), not ",
                       run.bits));
    }
    if (part.num_levels > 0 && 1 << run.bits != part.num_levels) {
      return absl::InvalidArgumentError(absl::StrCat(
          op, ": run ", r, " has codes of ", 1 << run.bits,
          " values, but must have one value for each of the part's ",
          part.num_levels, " levels"));
    }
    if (run.begin != end) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": run ", r, " must begin at channel ", end,
                       ", but begins at channel ", run.begin));
    }
    if (run.width < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": run ", r,
                       " must have at least 1 channel, but has ", run.width));
    }
    end += run.width;
  }
  if (group.num_runs > 0 && end != group.width) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": the runs have ", end,
                     " channels in all, but the latent has ", group.width));
  }
  return absl::OkStatus();
}

// A region to be checked: its name, how many bytes a slot has in it, and the
// size of one number. Offsets in the region must be multiples of the size of
// a number.
struct Checked {
  absl::string_view name;
  TileRegion region;
  int64_t slot_bytes = 0;
  int64_t number_bytes = 0;
};

absl::Status CheckRegion(const char* op, const LatentPart& part,
                         const Checked& checked, int64_t device_granule) {
  const auto& [name, region, slot_bytes, number_bytes] = checked;
  if (slot_bytes == 0) return absl::OkStatus();
  const int64_t granule_bytes = region.granule_bytes;
  if (granule_bytes != 0 && granule_bytes != device_granule) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", name,
                     ".granule_bytes must be 0 or the device's granule size, ",
                     device_granule, ", but is ", granule_bytes));
  }
  const auto refuse = [op, name = name](absl::string_view field, int64_t least,
                                        int64_t have) {
    return Refuse(op, absl::StrCat(name, field).c_str(), least, have);
  };
  if (region.offset_bytes < 0) {
    return refuse(".offset_bytes", 0, region.offset_bytes);
  }
  const int64_t piece = granule_bytes > 0 ? granule_bytes : slot_bytes;
  if (region.stride_bytes < piece) {
    return refuse(".stride_bytes", piece, region.stride_bytes);
  }
  for (const int64_t bytes :
       {region.offset_bytes, region.stride_bytes, granule_bytes,
        part.tile_bytes, part.page_bytes}) {
    if (bytes % number_bytes == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": ", name, ": offset, stride, granule, tile and page must be ",
        "multiples of ", number_bytes, " bytes, but one of them is ", bytes,
        " bytes"));
  }
  // The formula of TileRegion works only without gaps: a gap between the
  // granules of two slots would change the place of all later granules.
  if (granule_bytes > 0 && region.stride_bytes != granule_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", name, ".stride_bytes must be the granule size, ",
                     granule_bytes, ", but is ", region.stride_bytes));
  }
  const int64_t granules = (slot_bytes + piece - 1) / piece;
  const int64_t end = region.offset_bytes +
                      (granules * part.tile_slots - 1) * region.stride_bytes +
                      piece;
  return end > part.tile_bytes ? Refuse(op, "tile_bytes", end, part.tile_bytes)
                               : absl::OkStatus();
}

absl::Status CheckGroup(const char* op, const LatentPart& part,
                        const LatentGroup& group, int64_t device_granule) {
  if (group.width < 1) return Refuse(op, "width", 1, group.width);
  if (group.column < 0) return Refuse(op, "column", 0, group.column);
  KVASIR_RETURN_IF_ERROR(CheckRuns(op, part, group));
  const bool codes = group.num_runs > 0;
  KVASIR_RETURN_IF_ERROR(
      CheckRegion(op, part,
                  {"codes", group.codes, CodesBytes(part, group),
                   codes ? 1 : DTypeBytes(part.dtype)},
                  device_granule));
  return CheckRegion(op, part,
                     {"params", group.params, ParamsBytes(part, group),
                      DTypeBytes(part.param_dtype)},
                     std::min(device_granule, kMostParamGranuleBytes));
}

absl::Status CheckTiles(const char* op, const LatentPart& part,
                        int64_t page_tokens) {
  if (part.tile_slots < 1) return Refuse(op, "tile_slots", 1, part.tile_slots);
  if (page_tokens % part.tile_slots != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": the number of slots in a page, ", page_tokens,
                     ", is not a multiple of the number of slots in a tile, ",
                     part.tile_slots));
  }
  const int64_t bytes = page_tokens / part.tile_slots * part.tile_bytes;
  return bytes > part.page_bytes
             ? Refuse(op, "page_bytes", bytes, part.page_bytes)
             : absl::OkStatus();
}

// Levels must be whole multiples of 1/127 of the largest magnitude.
absl::Status CheckLevels(const char* op, const LatentPart& part) {
  float largest = 0.0f;
  for (int i = 0; i < part.num_levels; ++i) {
    largest = std::max(largest, std::fabs(part.levels[i]));
  }
  const float step = largest / 127.0f;
  for (int i = 0; i < part.num_levels; ++i) {
    const float level = part.levels[i];
    if (step > 0.0f && std::nearbyint(level / step) * step == level) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": level ", i, " is ", level,
        ", but must be a whole multiple of 1/127 of the largest magnitude, ",
        largest, ", which must be finite and above 0"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLatentPart(const char* op, const LatentPart& part,
                             int64_t page_tokens, int64_t device_granule) {
  KVASIR_RETURN_IF_ERROR(CheckTiles(op, part, page_tokens));
  if (part.num_groups < 1) return Refuse(op, "groups", 1, part.num_groups);
  if ((part.static_scale == nullptr) != (part.static_minimum == nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        op,
        ": static ranges must have both scales and minima, or neither, but ",
        part.static_scale == nullptr ? "the scales" : "the minima",
        " are missing"));
  }
  if (part.num_levels < 0 || part.num_levels > kMaxNormLevels) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": a part must have from 0 to ", kMaxNormLevels,
                     " levels, but has ", part.num_levels));
  }
  if (part.num_levels > 0 && part.static_scale != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        op, ": a part with static ranges must have 0 levels, but has ",
        part.num_levels));
  }
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    if (part.static_scale != nullptr && group.num_runs == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(op, ": group ", g, " has static ranges, but no codes"));
    }
    KVASIR_RETURN_IF_ERROR(CheckGroup(op, part, group, device_granule));
  }
  return CheckLevels(op, part);
}

absl::Status CheckSlotMetadata(const char* op, const SlotMetadata& metadata,
                               int64_t page_tokens) {
  if (metadata.num_units < 1) {
    return Refuse(op, "units of metadata", 1, metadata.num_units);
  }
  if (metadata.page_tokens != page_tokens || page_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": metadata is for pages of ", metadata.page_tokens,
                     " slots, but the cache has pages of ", page_tokens));
  }
  struct Plane {
    int64_t begin;
    int64_t end;
  };
  absl::InlinedVector<Plane, 4> planes;
  const auto add = [&](int64_t offset, int64_t number_bytes) {
    planes.push_back(
        {offset, offset + metadata.num_units * page_tokens * number_bytes});
    return offset >= 0 && offset % number_bytes == 0 &&
           metadata.page_bytes % number_bytes == 0 &&
           planes.back().end <= metadata.page_bytes;
  };
  bool fit = add(metadata.scores_offset, sizeof(float)) &&
             add(metadata.positions_offset, sizeof(uint32_t));
  for (const int64_t offset : metadata.error_offset) {
    if (offset >= 0) fit = fit && add(offset, 1);
  }
  std::sort(planes.begin(), planes.end(),
            [](Plane a, Plane b) { return a.begin < b.begin; });
  for (size_t i = 1; i < planes.size(); ++i) {
    fit = fit && planes[i].begin >= planes[i - 1].end;
  }
  if (fit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      op, ": the metadata planes of ", metadata.num_units,
      " eviction units overlap, are misaligned or are not inside a page of ",
      metadata.page_bytes, " bytes: scores begin at byte ",
      metadata.scores_offset, ", positions at byte ", metadata.positions_offset,
      ", errors of keys at byte ", metadata.error_offset[0],
      " and of values at byte ", metadata.error_offset[1], " (-1: none)"));
}

}  // namespace kvasir::kernels
