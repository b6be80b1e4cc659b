#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/device/stream.h"
#include "kernels/latents/code_pack.h"
#include "kernels/latents/code_range.h"
#include "kernels/latents/kv_append.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

// One latent, and the slot in which it is stored.
struct Latent {
  const float* from;  // [group.width]
  char* codes;
  char* params;
};

void AppendNumbers(const LatentPartArgs& part, const LatentGroup& group,
                   const Latent& latent) {
  VisitDType(part.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t c = 0; c < group.width; ++c) {
      const T number = FromFloat<T>(latent.from[c]);
      std::memcpy(latent.codes + c * static_cast<int64_t>(sizeof(T)), &number,
                  sizeof(T));
    }
  });
}

template <typename T>
StoredRange<T> RangeOfRun(const CodeRun& run, const float* from) {
  float low = CountedAs(from[run.begin]);
  float high = low;
  for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
    const float x = CountedAs(from[c]);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  return RangeOf<T>(low, high, run.bits);
}

void AppendOwnRanges(const LatentPartArgs& part, const LatentGroup& group,
                     const Latent& latent, uint8_t* codes) {
  VisitDType(part.param_dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t r = 0; r < group.num_runs; ++r) {
      const CodeRun& run = group.runs[r];
      const StoredRange<T> range = RangeOfRun<T>(run, latent.from);
      std::memcpy(latent.params + r * static_cast<int64_t>(sizeof(range)),
                  &range, sizeof(range));
      const float scale = ToFloat(range.scale);
      const auto levels = static_cast<float>((1 << run.bits) - 1);
      for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
        const float x = CountedAs(latent.from[c]);
        codes[c] =
            scale > 0.0f
                ? static_cast<uint8_t>(RoundCode(
                      ExactCode(x, ToFloat(range.minimum), scale), levels))
                : uint8_t{0};
      }
    }
  });
}

// The sum of get(c)^2 over all channels, added in the order of kv_append.h.
template <typename Get>
float SquareSum(int64_t width, const Get& get) {
  float lanes[kLanes] = {};
  for (int64_t c = 0; c < width; ++c) {
    float& lane = lanes[c % kLanes];
    lane = std::fma(get(c), get(c), lane);
  }
  return TreeSum(lanes);
}

void AppendLevels(const LatentPartArgs& part, const LatentGroup& group,
                  const Latent& latent, uint8_t* codes) {
  const auto counted = [&](int64_t c) { return CountedAs(latent.from[c]); };
  const float squares = SquareSum(group.width, counted);
  const float factor = UnitFactor(squares, group.width);
  for (int64_t c = 0; c < group.width; ++c) {
    codes[c] = static_cast<uint8_t>(
        LevelCode(counted(c) * factor, part.levels, part.num_levels));
  }
  const float level_squares =
      SquareSum(group.width, [&](int64_t c) { return part.levels[codes[c]]; });
  VisitDType(part.param_dtype, [&](auto type) {
    const auto scale = LengthScale<decltype(type)>(squares, level_squares);
    std::memcpy(latent.params, &scale, sizeof(scale));
  });
}

// Codes a latent with static ranges. Returns how many codes were clamped.
int64_t AppendStaticRanges(const LatentPartArgs& part, const LatentGroup& group,
                           const Latent& latent, uint8_t* codes) {
  int64_t clamped = 0;
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    if (run.bits == 0) continue;
    const auto levels = static_cast<float>((1 << run.bits) - 1);
    for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
      const float scale = part.static_scale[group.column + c];
      codes[c] = 0;
      if (!(scale > 0.0f)) continue;
      const float exact =
          ExactCode(CountedAs(latent.from[c]),
                    part.static_minimum[group.column + c], scale);
      clamped += IsClamped(exact, levels) ? 1 : 0;
      codes[c] = static_cast<uint8_t>(RoundCode(exact, levels));
    }
  }
  return clamped;
}

bool CodesAreOfFinite(const LatentGroup& group, const float* from) {
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const float* const run = from + group.runs[r].begin;
    if (!std::all_of(run, run + group.runs[r].width,
                     [](float x) { return std::isfinite(x); })) {
      return false;
    }
  }
  return true;
}

// Decodes channel `c` of a latent, in run r.
struct Decoded {
  const LatentPartArgs& part;
  const LatentGroup& group;
  const Latent& latent;

  float At(int64_t r, int64_t c, uint8_t code) const {
    const auto stored = [&](int64_t index) {
      return VisitDType(part.param_dtype, [&](auto type) {
        std::memcpy(&type, latent.params + index * DTypeBytes(part.param_dtype),
                    sizeof(type));
        return ToFloat(type);
      });
    };
    if (part.num_levels > 0) return part.levels[code] * stored(0);
    if (part.static_scale == nullptr) {
      return std::fma(static_cast<float>(code), stored(2 * r),
                      stored(2 * r + 1));
    }
    const float minimum = part.static_minimum[group.column + c];
    return group.runs[r].bits == 0
               ? minimum
               : std::fma(static_cast<float>(code),
                          part.static_scale[group.column + c], minimum);
  }
};

float SquaredError(const LatentPartArgs& part, const LatentGroup& group,
                   const Latent& latent) {
  std::vector<uint8_t> codes(static_cast<size_t>(group.width));
  UnpackCodes(group, reinterpret_cast<const uint8_t*>(latent.codes),
              codes.data());
  const Decoded decoded = {part, group, latent};
  float lanes[kLanes] = {};
  for (int64_t r = 0; r < group.num_runs; ++r) {
    for (int64_t i = 0; i < group.runs[r].width; ++i) {
      const int64_t c = group.runs[r].begin + i;
      const float error =
          CountedAs(latent.from[c]) - decoded.At(r, c, codes[c]);
      lanes[i % kLanes] = std::fma(error, error, lanes[i % kLanes]);
    }
  }
  return TreeSum(lanes);
}

int64_t AppendLatent(const LatentPartArgs& part, const LatentGroup& group,
                     const Latent& latent) {
  if (group.num_runs == 0) {
    AppendNumbers(part, group, latent);
    return 0;
  }
  std::vector<uint8_t> codes(static_cast<size_t>(group.width));
  int64_t clamped = 0;
  if (part.num_levels > 0) {
    AppendLevels(part, group, latent, codes.data());
  } else if (part.static_scale == nullptr) {
    AppendOwnRanges(part, group, latent, codes.data());
  } else {
    clamped = AppendStaticRanges(part, group, latent, codes.data());
  }
  PackCodes(group, codes.data(), reinterpret_cast<uint8_t*>(latent.codes));
  return clamped;
}

void Store(const std::vector<char>& bytes, const LatentPartArgs& part,
           const TileRegion& region, int64_t page, int64_t slot) {
  ForSlotBytes(part, region, page, slot, static_cast<int64_t>(bytes.size()),
               [&](char* to, int64_t first, int64_t count) {
                 std::memcpy(to, bytes.data() + first,
                             static_cast<size_t>(count));
               });
}

}  // namespace

void KvAppendReference(const KvAppendArgs& params, float* scratch, CpuStream&) {
  const bool has_metadata = params.metadata.num_units > 0;
  for (int64_t t = 0; has_metadata && t < params.num_tokens; ++t) {
    StartSlotMetadata(params, t, scratch);
  }
  std::vector<char> codes;
  std::vector<char> ranges;
  for (int64_t p = 0; p < params.num_parts; ++p) {
    const KvAppendPartArgs& side = params.parts[p];
    int64_t clamped = 0;
    for (int64_t t = 0; t < params.num_tokens; ++t) {
      const int64_t to = SlotOfToken(params, t);
      if (to < 0) continue;
      const int64_t page = to / params.page_tokens;
      const int64_t slot = to % params.page_tokens;
      for (int64_t g = 0; g < side.part.num_groups; ++g) {
        const LatentGroup& group = side.part.groups[g];
        const float* const from =
            params.rows + t * params.row_stride + side.column + group.column;
        codes.resize(static_cast<size_t>(CodesBytes(side.part, group)));
        ranges.resize(static_cast<size_t>(ParamsBytes(side.part, group)));
        clamped +=
            AppendLatent(side.part, group, {from, codes.data(), ranges.data()});
        if (side.unit_of_group != nullptr && group.num_runs > 0) {
          const float error = SquaredError(side.part, group,
                                           {from, codes.data(), ranges.data()});
          float* const sums =
              SquaredErrorsOf(params, t, side.unit_of_group[g], scratch);
          for (int s = 0; s < kErrorSides; ++s) {
            if (side.errors_of[s]) sums[s] = sums[s] + error;
          }
        }
        Store(codes, side.part, group.codes, page, slot);
        Store(ranges, side.part, group.params, page, slot);
        if (params.not_finite != nullptr && !CodesAreOfFinite(group, from)) {
          params.not_finite[t] = 1.0f;
        }
      }
    }
    if (side.clamped != nullptr) *side.clamped += clamped;
  }
  for (int64_t t = 0; has_metadata && t < params.num_tokens; ++t) {
    WriteSlotMetadata(params, t, scratch);
  }
}

}  // namespace kvasir::kernels
