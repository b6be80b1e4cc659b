#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/latents/code_pack.h"
#include "kernels/latents/code_range.h"
#include "kernels/latents/kv_append.h"
#include "kernels/simd/scalar_math.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/latents/kv_append_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/codes-inl.h"
#include "kernels/simd/simd-inl.h"

#ifndef KVASIR_KERNELS_KV_APPEND_ONCE_
#define KVASIR_KERNELS_KV_APPEND_ONCE_
namespace kvasir::kernels {

// The codes of a run are computed in portions of at most this many, one code
// per byte, and then packed.
inline constexpr int64_t kCodesAtOnce = 512;

struct SlotAddresses {
  char* codes;
  char* params;
  // [16], or null if errors are not stored. The squared error of number i of a
  // run is added to errors[i % 16].
  float* errors;
};

// CodeRange is one range for all channels of a run. StaticRanges has a range
// for each channel.
struct CodeRange {
  float minimum;
  float scale;
  float levels;
};
struct StaticRanges {
  const float* minimum;
  const float* scale;
  float levels;
};

}  // namespace kvasir::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

void StoreNumbers(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

void StoreNumbers(const float* from, int64_t count, Bf16* to) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::RebindToUnsigned<Floats> d32;
  const hn::Rebind<uint16_t, Floats> d16;
  const hn::RebindToSigned<Floats> di32;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    const Vec number = LoadFloats(from + i);
    const auto bits = hn::BitCast(d32, number);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
    const auto rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(d32, 0x40u));
    const auto chosen =
        hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(number)), quiet, rounded);
    // The values fit into 16 bits, so the conversion with saturation does not
    // change them.
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di32, chosen)), d16,
               reinterpret_cast<uint16_t*>(to) + i);
  }
#endif
  for (; i < count; ++i) to[i] = ToBf16(from[i]);
}

void StoreNumbers(const float* from, int64_t count, F16* to) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const hn::Rebind<hwy::float16_t, Floats> d16;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    hn::StoreU(hn::DemoteTo(d16, LoadFloats(from + i)), d16,
               reinterpret_cast<hwy::float16_t*>(to) + i);
  }
#endif
  for (; i < count; ++i) to[i] = ToF16(from[i]);
}

void AppendNumbers(DType dtype, const float* from, int64_t count, char* to) {
  switch (dtype) {
    case DType::kF32:
      return StoreNumbers(from, count, reinterpret_cast<float*>(to));
    case DType::kF16:
      return StoreNumbers(from, count, reinterpret_cast<F16*>(to));
    case DType::kBf16:
      return StoreNumbers(from, count, reinterpret_cast<Bf16*>(to));
  }
}

HWY_INLINE Vec LoadCounted(const float* from) {
  const Vec x = LoadFloats(from);
  return hn::Add(hn::IfThenElseZero(hn::IsFinite(x), x), hn::Zero(kFloats));
}

// Stores the lowest byte of each lane.
HWY_INLINE void StoreBytes(Vec rounded, uint8_t* to) {
  const hn::RebindToSigned<Floats> d32;
  const hn::Rebind<uint8_t, Floats> d8;
  const auto bits =
      hn::And(hn::BitCast(d32, rounded), hn::Set(d32, int32_t{0xff}));
  hn::StoreU(hn::DemoteTo(d8, bits), d8, to);
}

// Does the same as RoundCode, for a SIMD vector. Adding 2^23 rounds to an
// integer, because a float32 of this size has no fraction. The code is then the
// lowest byte of its lane.
HWY_INLINE Vec RoundCodes(Vec exact, Vec levels) {
  const Vec below = hn::IfThenElse(hn::Lt(exact, levels), exact, levels);
  const Vec inside =
      hn::IfThenElseZero(hn::Gt(below, hn::Zero(kFloats)), below);
  return hn::Add(inside, Broadcast(8388608.0f));
}

template <typename T>
StoredRange<T> RangeOfRun(const float* from, const CodeRun& run) {
  float low = CountedAs(from[0]);
  float high = low;
  int64_t i = 0;
  if (run.width >= kVecLanes) {
    Vec lows = LoadCounted(from);
    Vec highs = lows;
    for (i = kVecLanes; i + kVecLanes <= run.width; i += kVecLanes) {
      const Vec x = LoadCounted(from + i);
      lows = hn::Min(lows, x);
      highs = hn::Max(highs, x);
    }
    low = hn::GetLane(hn::MinOfLanes(kFloats, lows));
    high = hn::GetLane(hn::MaxOfLanes(kFloats, highs));
  }
  for (; i < run.width; ++i) {
    const float x = CountedAs(from[i]);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  return RangeOf<T>(low, high, run.bits);
}

void MakeCodes(const float* from, int64_t count, const CodeRange& range,
               uint8_t* codes) {
  if (!(range.scale > 0.0f)) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return;
  }
  const Vec levels = Broadcast(range.levels);
  const Vec minimum = Broadcast(range.minimum);
  const Vec scale = Broadcast(range.scale);
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    const Vec exact = hn::Div(hn::Sub(LoadCounted(from + i), minimum), scale);
    StoreBytes(RoundCodes(exact, levels), codes + i);
  }
  for (; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(
        RoundCode(ExactCode(CountedAs(from[i]), range.minimum, range.scale),
                  range.levels));
  }
}

// Returns how many codes were clamped.
int64_t MakeStaticCodes(const float* from, int64_t count,
                        const StaticRanges& ranges, uint8_t* codes) {
  const Vec levels = Broadcast(ranges.levels);
  const Vec least = Broadcast(-0.5f);
  const Vec most = Broadcast(ranges.levels + 0.5f);
  int64_t clamped = 0;
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    const Vec scale = LoadFloats(ranges.scale + i);
    const Vec exact = hn::Div(
        hn::Sub(LoadCounted(from + i), LoadFloats(ranges.minimum + i)), scale);
    const auto coded = hn::Gt(scale, hn::Zero(kFloats));
    const auto outside = hn::Or(hn::Lt(exact, least), hn::Ge(exact, most));
    clamped +=
        static_cast<int64_t>(hn::CountTrue(kFloats, hn::And(outside, coded)));
    StoreBytes(hn::IfThenElseZero(coded, RoundCodes(exact, levels)), codes + i);
  }
  for (; i < count; ++i) {
    codes[i] = 0;
    if (!(ranges.scale[i] > 0.0f)) continue;
    const float exact =
        ExactCode(CountedAs(from[i]), ranges.minimum[i], ranges.scale[i]);
    clamped += IsClamped(exact, ranges.levels) ? 1 : 0;
    codes[i] = static_cast<uint8_t>(RoundCode(exact, ranges.levels));
  }
  return clamped;
}

// Adds the squared errors of `count` numbers to the 16 sums `errors`: that of
// number i to errors[i % 16]. decode(i, code) returns the decoded number i, or
// a vector of numbers from i on.
template <typename Decode>
void AddErrors(const float* from, const uint8_t* codes, int64_t count,
               float* errors, const Decode& decode) {
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    const Vec off =
        hn::Sub(LoadCounted(from + i), decode(i, LoadFloats(codes + i)));
    float* const lanes = errors + i % kLanes;
    hn::StoreU(Fma(off, off, LoadFloats(lanes)), kFloats, lanes);
  }
  for (; i < count; ++i) {
    const float off =
        CountedAs(from[i]) - decode(i, static_cast<float>(codes[i]));
    errors[i % kLanes] = std::fma(off, off, errors[i % kLanes]);
  }
}

struct DecodeRange {
  const CodeRange& range;
  Vec operator()(int64_t, Vec code) const {
    return Fma(code, Broadcast(range.scale), Broadcast(range.minimum));
  }
  float operator()(int64_t, float code) const {
    return std::fma(code, range.scale, range.minimum);
  }
};
struct DecodeStatic {
  const StaticRanges& ranges;
  Vec operator()(int64_t i, Vec code) const {
    return Fma(code, LoadFloats(ranges.scale + i),
               LoadFloats(ranges.minimum + i));
  }
  float operator()(int64_t i, float code) const {
    return std::fma(code, ranges.scale[i], ranges.minimum[i]);
  }
};

// Makes and packs the codes of one run. make(first, count, codes) must write
// the codes of channels [first, first + count) of the run to `codes`.
template <typename Make>
void WriteRun(const CodeRun& run, const CodePlace& place, uint8_t* slot,
              const Make& make) {
  HWY_ALIGN uint8_t codes[kCodesAtOnce];
  for (int64_t i = 0; i < run.width; i += kCodesAtOnce) {
    const int64_t count = std::min(kCodesAtOnce, run.width - i);
    make(i, count, codes);
    WriteCodes(slot, place, i, codes, count);
  }
}

template <typename T>
void AppendOwnRanges(const LatentGroup& group, const float* from,
                     CodeCursor cursor, const SlotAddresses& slot) {
  auto* bytes = reinterpret_cast<uint8_t*>(slot.codes);
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    const StoredRange<T> stored = RangeOfRun<T>(from + run.begin, run);
    std::memcpy(slot.params + r * static_cast<int64_t>(sizeof(stored)), &stored,
                sizeof(stored));
    const CodeRange range = {ToFloat(stored.minimum), ToFloat(stored.scale),
                             static_cast<float>((1 << run.bits) - 1)};
    WriteRun(run, cursor.Next(run), bytes,
             [&](int64_t i, int64_t count, uint8_t* codes) {
               MakeCodes(from + run.begin + i, count, range, codes);
               if (slot.errors == nullptr) return;
               AddErrors(from + run.begin + i, codes, count, slot.errors,
                         DecodeRange{range});
             });
  }
}

int64_t AppendStaticRanges(const LatentPartArgs& part, const LatentGroup& group,
                           const float* from, CodeCursor cursor,
                           const SlotAddresses& slot) {
  auto* bytes = reinterpret_cast<uint8_t*>(slot.codes);
  int64_t clamped = 0;
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const CodeRun& run = group.runs[r];
    if (run.bits == 0) {
      for (int64_t i = 0; slot.errors != nullptr && i < run.width; ++i) {
        const int64_t channel = run.begin + i;
        const float off = CountedAs(from[channel]) -
                          part.static_minimum[group.column + channel];
        float& lane = slot.errors[i % kLanes];
        lane = std::fma(off, off, lane);
      }
      continue;
    }
    const float levels = static_cast<float>((1 << run.bits) - 1);
    WriteRun(run, cursor.Next(run), bytes,
             [&](int64_t i, int64_t count, uint8_t* codes) {
               const int64_t channel = run.begin + i;
               const StaticRanges ranges = {
                   part.static_minimum + group.column + channel,
                   part.static_scale + group.column + channel, levels};
               clamped += MakeStaticCodes(from + channel, count, ranges, codes);
               if (slot.errors == nullptr) return;
               AddErrors(from + channel, codes, count, slot.errors,
                         DecodeStatic{ranges});
             });
  }
  return clamped;
}

float SquareSum(const float* from, int64_t width) {
  Wide sums = MakeWide([](int) { return hn::Zero(kFloats); });
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    for (int v = 0; v < kVecsPerWide; ++v) {
      const Vec x = LoadCounted(from + c + v * kVecLanes);
      sums.part[v] = Fma(x, x, sums.part[v]);
    }
  }
  HWY_ALIGN float lanes[kLanes];
  StoreWide(sums, lanes);
  for (int lane = 0; c < width; ++c, ++lane) {
    const float x = CountedAs(from[c]);
    lanes[lane] = std::fma(x, x, lanes[lane]);
  }
  return TreeSum(lanes);
}

void MakeLevelCodes(const LatentPartArgs& part, const float* from,
                    int64_t count, float factor, uint8_t* codes) {
  float edges[kMaxNormLevels];
  for (int i = 1; i < part.num_levels; ++i) {
    edges[i] = 0.5f * (part.levels[i - 1] + part.levels[i]);
  }
  const Vec one = Broadcast(1.0f);
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    const Vec x = hn::Mul(LoadCounted(from + i), Broadcast(factor));
    Vec code = Broadcast(8388608.0f);
    for (int e = 1; e < part.num_levels; ++e) {
      code = hn::Add(code,
                     hn::IfThenElseZero(hn::Gt(x, Broadcast(edges[e])), one));
    }
    StoreBytes(code, codes + i);
  }
  for (; i < count; ++i) {
    codes[i] = static_cast<uint8_t>(
        LevelCode(CountedAs(from[i]) * factor, part.levels, part.num_levels));
  }
}

// Writes the codes and the scale of a latent with levels. Such a latent has a
// single run.
void AppendLevels(const LatentPartArgs& part, const LatentGroup& group,
                  const float* from, CodeCursor cursor,
                  const SlotAddresses& slot) {
  const float squares = SquareSum(from, group.width);
  const float factor = UnitFactor(squares, group.width);
  float lanes[kLanes] = {};
  WriteRun(group.runs[0], cursor.Next(group.runs[0]),
           reinterpret_cast<uint8_t*>(slot.codes),
           [&](int64_t first, int64_t count, uint8_t* codes) {
             MakeLevelCodes(part, from + first, count, factor, codes);
             for (int64_t i = 0; i < count; ++i) {
               const float level = part.levels[codes[i]];
               lanes[i % kLanes] = std::fma(level, level, lanes[i % kLanes]);
             }
           });
  const float level_squares = TreeSum(lanes);
  VisitDType(part.param_dtype, [&](auto type) {
    const auto scale = LengthScale<decltype(type)>(squares, level_squares);
    std::memcpy(slot.params, &scale, sizeof(scale));
    if (slot.errors == nullptr) return;
    // Errors depend on the scale, which was not known when the codes were made,
    // so the codes are made a second time.
    HWY_ALIGN uint8_t codes[kCodesAtOnce];
    for (int64_t first = 0; first < group.width; first += kCodesAtOnce) {
      const int64_t count = std::min(kCodesAtOnce, group.width - first);
      MakeLevelCodes(part, from + first, count, factor, codes);
      for (int64_t i = 0; i < count; ++i) {
        const float off =
            CountedAs(from[first + i]) - part.levels[codes[i]] * ToFloat(scale);
        float& lane = slot.errors[i % kLanes];
        lane = std::fma(off, off, lane);
      }
    }
  });
}
static_assert(kCodesAtOnce % kLanes == 0);

int64_t AppendCodes(const LatentPartArgs& part, const LatentGroup& group,
                    const float* from, const CodeCursor& cursor,
                    const SlotAddresses& slot) {
  if (part.num_levels > 0) {
    AppendLevels(part, group, from, cursor, slot);
    return 0;
  }
  if (part.static_scale != nullptr) {
    return AppendStaticRanges(part, group, from, cursor, slot);
  }
  switch (part.param_dtype) {
    case DType::kF32:
      AppendOwnRanges<float>(group, from, cursor, slot);
      break;
    case DType::kF16:
      AppendOwnRanges<F16>(group, from, cursor, slot);
      break;
    case DType::kBf16:
      AppendOwnRanges<Bf16>(group, from, cursor, slot);
  }
  return 0;
}

bool CodesAreOfFinite(const LatentGroup& group, const float* from) {
  // Tests whether all numbers are finite: 0 times a finite number is 0, and 0
  // times any other is NaN.
  const Vec zero = hn::Zero(kFloats);
  Vec lanes = zero;
  float rest = 0.0f;
  for (int64_t r = 0; r < group.num_runs; ++r) {
    const float* const run = from + group.runs[r].begin;
    const int64_t width = group.runs[r].width;
    int64_t i = 0;
    for (; i + kVecLanes <= width; i += kVecLanes) {
      lanes = hn::MulAdd(LoadFloats(run + i), zero, lanes);
    }
    for (; i < width; ++i) rest = rest + run[i] * 0.0f;
  }
  return rest == 0.0f && hn::AllTrue(kFloats, hn::Eq(lanes, zero));
}

// Returns how many codes of these rows were clamped.
int64_t AppendRows(const KvAppendArgs& params, const KvAppendPartArgs& side,
                   int64_t begin, int64_t end, float* scratch) {
  const LatentPartArgs& part = side.part;
  int64_t clamped = 0;
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const LatentGroup& group = part.groups[g];
    const CodeCursor cursor(group);
    const auto codes_bytes = static_cast<size_t>(CodesBytes(part, group));
    for (int64_t t = begin; t < end; ++t) {
      const int64_t to = SlotOfToken(params, t);
      if (to < 0) continue;
      const int64_t page = to / params.page_tokens;
      const int64_t in_page = to % params.page_tokens;
      const float* from =
          params.rows + t * params.row_stride + side.column + group.column;
      float errors[kLanes] = {};
      const SlotAddresses slot = {
          SlotAddress(part, group.codes, page, in_page),
          SlotAddress(part, group.params, page, in_page),
          side.unit_of_group != nullptr ? errors : nullptr};
      if (group.num_runs == 0) {
        AppendNumbers(part.dtype, from, group.width, slot.codes);
        continue;
      }
      std::memset(slot.codes, 0, codes_bytes);
      clamped += AppendCodes(part, group, from, cursor, slot);
      if (slot.errors != nullptr) {
        const float error = TreeSum(errors);
        float* const sums =
            SquaredErrorsOf(params, t, side.unit_of_group[g], scratch);
        for (int s = 0; s < kErrorSides; ++s) {
          if (side.errors_of[s]) sums[s] = sums[s] + error;
        }
      }
      if (params.not_finite != nullptr && !CodesAreOfFinite(group, from)) {
        params.not_finite[t] = 1.0f;
      }
    }
  }
  return clamped;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(AppendRows);
}  // namespace

void KvAppendSimd(const KvAppendArgs& params, float* scratch,
                  CpuStream& stream) {
  const bool has_metadata = params.metadata.num_units > 0;
  int64_t numbers = 0;
  for (int64_t p = 0; p < params.num_parts; ++p) {
    numbers += RowWidth(params.parts[p].part);
  }
  ForRows(stream, params.num_tokens, numbers,
          [&](int64_t begin, int64_t end, int /*thread*/) {
            for (int64_t t = begin; has_metadata && t < end; ++t) {
              StartSlotMetadata(params, t, scratch);
            }
            for (int64_t p = 0; p < params.num_parts; ++p) {
              const KvAppendPartArgs& side = params.parts[p];
              const int64_t clamped = HWY_DYNAMIC_DISPATCH(AppendRows)(
                  params, side, begin, end, scratch);
              if (side.clamped == nullptr || clamped == 0) continue;
              // A relaxed atomic suffices: the result of integer additions does
              // not depend on their order.
              std::atomic_ref<int64_t>(*side.clamped)
                  .fetch_add(clamped, std::memory_order_relaxed);
            }
            for (int64_t t = begin; has_metadata && t < end; ++t) {
              WriteSlotMetadata(params, t, scratch);
            }
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
