// kv_append on a GPU. A CTA appends one token of one part; each of its warps
// appends one latent at a time. The warp first writes the codes of its latent
// to shared memory, one per byte. Then it packs them into the words of the
// slot. Each lane collects the bits of one 32-bit word from all planes. So no
// two threads write the same byte of a page.
//
// Rows have the type args.dtype, whatever the type of their pointer. All
// operations are those of kv_append.h, in the same order. So float32
// activations give the same bytes as on the CPU, except for the bits of a
// stored NaN.
//
// Layout: every layout that latent_view.h allows. If a slot's bytes begin at
// multiples of 4, and granules are multiples of 4, whole words are written;
// otherwise pairs of bytes or single bytes.
//
// Each latent is read from memory once. Later reads, for ranges, levels and
// errors, come from the first-level cache. The codes (or numbers) and ranges
// are written once.
//
// Operations per code: about 25, because its division must be correctly
// rounded. If codes stand for levels, 2 per level instead. Lower bound of the
// time: the bytes divided by the bandwidth of the memory.
#include <cmath>

#include "kernels/latents/code_range.h"
#include "kernels/latents/kv_append.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kMostWarps = 8;
constexpr uint32_t kMetadataThreads = 32;

struct AppendLaunch {
  KvAppendArgs args;
  // [T, groups of all parts]: the sums of squared errors of each latent, if the
  // layer has slot metadata.
  float* errors = nullptr;
  uint32_t code_bytes = 0;  // bytes of shared memory per warp
};

// Gives access by index to the bytes that a slot has in a region, as if they
// were contiguous.
class SlotBytes {
 public:
  KVASIR_DEVICE SlotBytes(const LatentPartArgs& part, const TileRegion& region,
                          int64_t page, int64_t slot)
      : first_(SlotAddress(part, region, page, slot)),
        granule_(static_cast<uint32_t>(region.granule_bytes)),
        next_(static_cast<int64_t>(granule_) * part.tile_slots) {}

  // Stores the lowest `count` bytes of `word` as bytes b, b + 1, ... of the
  // slot. The caller must ensure that these bytes are in the same aligned group
  // of 4.
  KVASIR_DEVICE void Store(uint32_t b, uint32_t word, int count) const {
    if (granule_ % 4 == 0) {
      char* const to = At(b);
      const auto begin = reinterpret_cast<uintptr_t>(to);
      if (count == 4 && begin % 4 == 0) {
        simt::StoreGlobal(reinterpret_cast<uint32_t*>(to), word);
        return;
      }
      if (count % 2 == 0 && begin % 2 == 0) {
        for (int i = 0; i < count; i += 2) {
          simt::StoreGlobal(reinterpret_cast<uint16_t*>(to + i),
                            static_cast<uint16_t>(word >> (8 * i)));
        }
        return;
      }
    }
    for (int i = 0; i < count; ++i) {
      simt::StoreGlobal(
          reinterpret_cast<uint8_t*>(At(b + static_cast<uint32_t>(i))),
          static_cast<uint8_t>(word >> (8 * i)));
    }
  }

  // Stores `number` as element `index` of an array of P in the slot. P has 2 or
  // 4 bytes.
  template <typename P>
  KVASIR_DEVICE void StoreNumber(uint32_t index, P number) const {
    if constexpr (sizeof(P) == 4) {
      Store(4 * index, simt::BitsAs<uint32_t>(number), 4);
    } else {
      Store(2 * index, number.bits, 2);
    }
  }

 private:
  KVASIR_DEVICE char* At(uint32_t b) const {
    if (granule_ == 0) return first_ + b;
    return first_ + b / granule_ * next_ + b % granule_;
  }

  char* first_;
  uint32_t granule_;
  int64_t next_;  // distance in bytes between a slot's granules
};

// A latent, and the slot in which it is stored.
template <typename T>
struct Latent {
  const LatentPartArgs& part;
  const LatentGroup& group;
  const T* from;   // [group.width]
  uint8_t* codes;  // [group.width] in shared memory of this warp
  SlotBytes params;
  bool wants_error;

  // int32_t suffices, because a latent has far fewer than 2^31 channels.
  KVASIR_DEVICE int32_t width() const {
    return static_cast<int32_t>(group.width);
  }
  KVASIR_DEVICE float At(int32_t c) const {
    return simt::ToFloat(simt::LoadGlobal(from + c));
  }
};

// The results that a lane collects while it codes its numbers: clamped codes,
// non-finite numbers, and its part of the errors.
struct Found {
  uint32_t clamped = 0;
  bool not_finite = false;
  // This thread's part of the sum of squared errors. kv_append.h sums in 16
  // lanes: lanes i and i + 16 of the warp both compute lane i of the sum.
  float error = 0.0f;

  // Returns x; or 0 if x is not finite, which is recorded in not_finite.
  KVASIR_DEVICE float Take(float x) {
    if (std::isfinite(x)) return x + 0.0f;
    not_finite = true;
    return 0.0f;
  }
};

KVASIR_DEVICE int32_t LaneIndex() { return static_cast<int32_t>(simt::Lane()); }
constexpr int32_t kStep = int32_t{simt::kWarp};

// Computes the TreeSum of lanes 0 to 15 and that of lanes 16 to 31. Each lane
// receives the sum of its own half.
KVASIR_DEVICE float SumOfLanes(float value) {
  for (uint32_t lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value += simt::ShuffleXor(value, lanes);
  }
  return value;
}

template <typename T>
KVASIR_DEVICE void AppendNumbers(const LatentPartArgs& part,
                                 const LatentGroup& group, const T* from,
                                 const SlotBytes& to) {
  const auto width = static_cast<int32_t>(group.width);
  if (part.dtype == DType::kF32) {
    for (int32_t c = LaneIndex(); c < width; c += kStep) {
      to.StoreNumber(static_cast<uint32_t>(c),
                     simt::ToFloat(simt::LoadGlobal(from + c)));
    }
    return;
  }
  using Pair = simt::Pack<T, 2>;
  const bool paired = reinterpret_cast<uintptr_t>(from) % sizeof(Pair) == 0;
  for (int32_t c = 2 * LaneIndex(); c < width; c += 2 * kStep) {
    const bool both = c + 1 < width;
    Pair pair = {};
    if (both && paired) {
      pair = simt::LoadGlobal(reinterpret_cast<const Pair*>(from + c));
    } else {
      pair.number[0] = simt::LoadGlobal(from + c);
      if (both) pair.number[1] = simt::LoadGlobal(from + c + 1);
    }
    const float first = simt::ToFloat(pair.number[0]);
    const float second = simt::ToFloat(pair.number[1]);
    const uint32_t word = part.dtype == DType::kF16
                              ? simt::MakePair<F16>(first, second)
                              : simt::MakePair<Bf16>(first, second);
    to.Store(2 * static_cast<uint32_t>(c), word, both ? 4 : 2);
  }
}

// Adds the squared errors of a run to the lanes' sums. decode(channel, code)
// returns the decoded number.
template <typename T, typename Decode>
KVASIR_DEVICE void AddErrors(const Latent<T>& latent, const CodeRun& run,
                             const Decode& decode, Found* found) {
  const auto begin = static_cast<int32_t>(run.begin);
  for (int32_t i = LaneIndex() % kLanes; i < run.width; i += kLanes) {
    const int32_t c = begin + i;
    const float off =
        CountedAs(latent.At(c)) - decode(c, simt::LoadShared(latent.codes + c));
    found->error = simt::Fma(off, off, found->error);
  }
}

// The range of a run, after rounding to the type in which a slot stores it.
struct CodeRange {
  float minimum;
  float scale;
};

template <typename P>
KVASIR_DEVICE CodeRange StoreRange(float low, float high, int bits,
                                   uint32_t run, const SlotBytes& params) {
  const StoredRange<P> range = RangeOf<P>(low, high, bits);
  if (simt::Lane() == 0) {
    params.StoreNumber(2 * run, range.scale);
    params.StoreNumber(2 * run + 1, range.minimum);
  }
  return {ToFloat(range.minimum), ToFloat(range.scale)};
}

KVASIR_DEVICE CodeRange StoreRange(DType dtype, float low, float high, int bits,
                                   uint32_t run, const SlotBytes& params) {
  switch (dtype) {
    case DType::kF16:
      return StoreRange<F16>(low, high, bits, run, params);
    case DType::kBf16:
      return StoreRange<Bf16>(low, high, bits, run, params);
    case DType::kF32:
      break;
  }
  return StoreRange<float>(low, high, bits, run, params);
}

template <typename T>
KVASIR_DEVICE void MakeOwnRanges(const Latent<T>& latent, Found* found) {
  for (int64_t r = 0; r < latent.group.num_runs; ++r) {
    const CodeRun run = latent.group.runs[r];
    const auto begin = static_cast<int32_t>(run.begin);
    const auto end = static_cast<int32_t>(run.begin + run.width);
    float low = CountedAs(latent.At(begin));
    float high = low;
    for (int32_t c = begin + LaneIndex(); c < end; c += kStep) {
      const float x = found->Take(latent.At(c));
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    low = -simt::WarpMax(-low);
    high = simt::WarpMax(high);
    const CodeRange range =
        StoreRange(latent.part.param_dtype, low, high, run.bits,
                   static_cast<uint32_t>(r), latent.params);
    const auto levels = static_cast<float>((1 << run.bits) - 1);
    for (int32_t c = begin + LaneIndex(); c < end; c += kStep) {
      unsigned code = 0;
      if (range.scale > 0.0f) {
        code = RoundCode(
            ExactCode(CountedAs(latent.At(c)), range.minimum, range.scale),
            levels);
      }
      simt::StoreShared(latent.codes + c, static_cast<uint8_t>(code));
    }
    if (!latent.wants_error) continue;
    simt::SyncWarp();
    AddErrors(
        latent, run,
        [&](int32_t, uint8_t code) {
          return simt::Fma(static_cast<float>(code), range.scale,
                           range.minimum);
        },
        found);
  }
  simt::SyncWarp();
}

template <typename T>
KVASIR_DEVICE void MakeStaticRanges(const Latent<T>& latent, Found* found) {
  const float* const scales = latent.part.static_scale + latent.group.column;
  const float* const minima = latent.part.static_minimum + latent.group.column;
  int64_t r = 0;
  CodeRun run = latent.group.runs[0];
  for (int32_t c = LaneIndex(); c < latent.width(); c += kStep) {
    while (c >= run.begin + run.width) run = latent.group.runs[++r];
    const float x = found->Take(latent.At(c));
    unsigned code = 0;
    const float scale = run.bits > 0 ? simt::LoadGlobal(scales + c) : 0.0f;
    if (scale > 0.0f) {
      const auto levels = static_cast<float>((1 << run.bits) - 1);
      const float exact = ExactCode(x, simt::LoadGlobal(minima + c), scale);
      found->clamped += IsClamped(exact, levels) ? 1 : 0;
      code = RoundCode(exact, levels);
    }
    simt::StoreShared(latent.codes + c, static_cast<uint8_t>(code));
  }
  simt::SyncWarp();
  if (!latent.wants_error) return;
  for (r = 0; r < latent.group.num_runs; ++r) {
    run = latent.group.runs[r];
    AddErrors(
        latent, run,
        [&](int32_t c, uint8_t code) {
          const float minimum = simt::LoadGlobal(minima + c);
          return run.bits == 0
                     ? minimum
                     : simt::Fma(static_cast<float>(code),
                                 simt::LoadGlobal(scales + c), minimum);
        },
        found);
  }
}

// Stores the scale that LengthScale computes, and returns it as stored: rounded
// to the type P.
template <typename P>
KVASIR_DEVICE float StoreScale(float squares, float level_squares,
                               const SlotBytes& params) {
  const P scale = LengthScale<P>(squares, level_squares);
  if (simt::Lane() == 0) params.StoreNumber(0, scale);
  return ToFloat(scale);
}

// Makes the codes of a latent with levels, which always has a single run.
template <typename T>
KVASIR_DEVICE void MakeLevels(const Latent<T>& latent, Found* found) {
  const LatentPartArgs& part = latent.part;
  float squares = 0.0f;
  for (int32_t c = LaneIndex() % kLanes; c < latent.width(); c += kLanes) {
    const float x = found->Take(latent.At(c));
    squares = simt::Fma(x, x, squares);
  }
  squares = SumOfLanes(squares);
  const float factor = UnitFactor(squares, latent.group.width);
  for (int32_t c = LaneIndex(); c < latent.width(); c += kStep) {
    const unsigned code = LevelCode(CountedAs(latent.At(c)) * factor,
                                    part.levels, part.num_levels);
    simt::StoreShared(latent.codes + c, static_cast<uint8_t>(code));
  }
  simt::SyncWarp();
  float level_squares = 0.0f;
  for (int32_t c = LaneIndex() % kLanes; c < latent.width(); c += kLanes) {
    const float level = part.levels[simt::LoadShared(latent.codes + c)];
    level_squares = simt::Fma(level, level, level_squares);
  }
  level_squares = SumOfLanes(level_squares);
  float scale = 0.0f;
  switch (part.param_dtype) {
    case DType::kF32:
      scale = StoreScale<float>(squares, level_squares, latent.params);
      break;
    case DType::kF16:
      scale = StoreScale<F16>(squares, level_squares, latent.params);
      break;
    case DType::kBf16:
      scale = StoreScale<Bf16>(squares, level_squares, latent.params);
  }
  if (!latent.wants_error) return;
  AddErrors(
      latent, latent.group.runs[0],
      [&](int32_t, uint8_t code) { return part.levels[code] * scale; }, found);
}

// Returns bits [shift, shift + bits) of each of four bytes, packed side by
// side. `bits` is below 8.
KVASIR_DEVICE uint32_t SqueezeFour(uint32_t four, int shift, int bits) {
  const uint32_t one = (1u << bits) - 1;
  const uint32_t two = (1u << (2 * bits)) - 1;
  const uint32_t all = (1u << (4 * bits)) - 1;
  four = four >> shift & one * 0x01010101u;
  four = (four | four >> (8 - bits)) & two * 0x00010001u;
  return (four | four >> (16 - 2 * bits)) & all;
}

// Returns bits [begin, begin + 32) of a slot's codes. `codes` has one code per
// byte.
KVASIR_DEVICE uint32_t PackWord(const LatentGroup& group,
                                const CodePlanes& planes, const uint8_t* codes,
                                int32_t begin) {
  const int32_t end = begin + 32;
  uint32_t word = 0;
  KVASIR_UNROLL
  for (int plane = 0; plane < 4; ++plane) {
    const int bits = PlaneBits(plane);
    auto run_begin = static_cast<int32_t>(planes.begin_bits[plane]);
    const auto plane_end = static_cast<int32_t>(
        plane < 3 ? planes.begin_bits[plane + 1] : planes.total_bits);
    if (run_begin >= end || plane_end <= begin) continue;
    for (int64_t r = 0; r < group.num_runs && run_begin < end; ++r) {
      const CodeRun& run = group.runs[r];
      if ((run.bits & bits) == 0) continue;
      const int32_t run_end =
          run_begin + static_cast<int32_t>(run.width) * bits;
      // Skips the lower bits of the code, which are in other planes.
      const int shift = run.bits & ~(2 * bits - 1);
      // No code is cut at `begin`, because codes begin at multiples of their
      // bits and `begin` is a multiple of 32.
      int32_t at = run_begin > begin ? run_begin : begin;
      const int32_t last = run_end < end ? run_end : end;
      int32_t c = static_cast<int32_t>(run.begin) + (at - run_begin) / bits;
      while (at < last) {
        if (c % 4 == 0 && at + 4 * bits <= last) {
          const uint32_t four =
              simt::LoadShared(reinterpret_cast<const uint32_t*>(codes + c));
          word |= (bits == 8 ? four : SqueezeFour(four, shift, bits))
                  << (at - begin);
          at += 4 * bits;
          c += 4;
        } else {
          const uint32_t code = simt::LoadShared(codes + c);
          word |= (code >> shift & ((1u << bits) - 1)) << (at - begin);
          at += bits;
          ++c;
        }
      }
      run_begin = run_end;
    }
  }
  return word;
}

template <typename T>
KVASIR_DEVICE void AppendCodes(const Latent<T>& latent, const SlotBytes& to,
                               Found* found) {
  if (latent.part.num_levels > 0) {
    MakeLevels(latent, found);
  } else if (latent.part.static_scale != nullptr) {
    MakeStaticRanges(latent, found);
  } else {
    MakeOwnRanges(latent, found);
  }
  const CodePlanes planes = PlanesOf(latent.group);
  const auto bytes = static_cast<int32_t>((planes.total_bits + 7) / 8);
  for (int32_t b = 4 * LaneIndex(); b < bytes; b += 4 * kStep) {
    to.Store(static_cast<uint32_t>(b),
             PackWord(latent.group, planes, latent.codes, 8 * b),
             bytes - b < 4 ? bytes - b : 4);
  }
}

template <typename T>
KVASIR_KERNEL(kMostWarps* simt::kWarp)
AppendKernel(AppendLaunch launch) {
  const KvAppendArgs& args = launch.args;
  const int64_t token = simt::CtaX();
  const int64_t to = SlotOfToken(args, token);
  if (to < 0) return;
  const int64_t page = to / args.page_tokens;
  const int64_t slot = to - page * args.page_tokens;
  const KvAppendPartArgs& side = args.parts[simt::CtaY()];
  const LatentPartArgs& part = side.part;
  auto* const codes = reinterpret_cast<uint8_t*>(simt::Shared()) +
                      simt::Warp() * launch.code_bytes;
  for (int64_t g = simt::Warp(); g < part.num_groups;
       g += simt::Threads() / simt::kWarp) {
    const LatentGroup& group = part.groups[g];
    const T* const from = reinterpret_cast<const T*>(args.rows) +
                          token * args.row_stride + side.column + group.column;
    const SlotBytes bytes(part, group.codes, page, slot);
    if (group.num_runs == 0) {
      AppendNumbers(part, group, from, bytes);
      continue;
    }
    Found found;
    AppendCodes(Latent<T>{part, group, from, codes,
                          SlotBytes(part, group.params, page, slot),
                          side.unit_of_group != nullptr},
                bytes, &found);
    if (side.unit_of_group != nullptr) {
      const float error = SumOfLanes(found.error);
      int64_t latents_before = 0;
      for (uint32_t p = 0; p < simt::CtaY(); ++p) {
        latents_before += args.parts[p].part.num_groups;
      }
      if (simt::Lane() == 0) {
        simt::StoreGlobal(
            launch.errors + token * args.num_groups + latents_before + g,
            error);
      }
    }
    if (args.not_finite != nullptr && simt::Any(found.not_finite) &&
        simt::Lane() == 0) {
      // An atomic, because warps of other latents of the token may write the
      // same value at the same time.
      simt::StoreAtomic(args.not_finite + token, 1.0f);
    }
    if (side.clamped != nullptr) {
      uint32_t clamped = found.clamped;
      for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
        clamped += simt::ShuffleXor(clamped, lanes);
      }
      if (clamped > 0 && simt::Lane() == 0) {
        simt::AtomicAdd(reinterpret_cast<uint64_t*>(side.clamped),
                        uint64_t{clamped});
      }
    }
    simt::SyncWarp();  // waits until all lanes have read the codes
  }
}

// Writes the metadata of the tokens, after another kernel has stored the errors
// of all latents. A thread handles one unit of a token, and adds the errors of
// the unit's latents in the order of unit_latents.
KVASIR_KERNEL(kMetadataThreads)
MetadataKernel(AppendLaunch launch) {
  const KvAppendArgs& args = launch.args;
  const SlotMetadataArgs& metadata = args.metadata;
  const int64_t token = simt::CtaX();
  const int64_t to = SlotOfToken(args, token);
  if (to < 0) return;
  const int64_t page = to / args.page_tokens;
  const int64_t slot = to - page * args.page_tokens;
  for (int64_t unit = simt::Thread(); unit < metadata.num_units;
       unit += simt::Threads()) {
    float squares[kErrorSides] = {};
    const float* const errors_of_token =
        launch.errors + token * args.num_groups;
    const int32_t end = args.unit_ends[unit];
    for (int32_t i = unit > 0 ? args.unit_ends[unit - 1] : 0; i < end; ++i) {
      const UnitLatent latent = simt::LoadGlobal(args.unit_latents + i);
      const float square = simt::LoadGlobal(errors_of_token + latent.index);
      KVASIR_UNROLL
      for (int s = 0; s < kErrorSides; ++s) {
        if ((latent.sides >> s & 1) != 0) squares[s] = squares[s] + square;
      }
    }
    simt::StoreGlobal(ScoresOf(metadata, page, unit) + slot, 0.0f);
    simt::StoreGlobal(PositionsOf(metadata, page, unit) + slot,
                      static_cast<uint32_t>(args.positions[token]));
    KVASIR_UNROLL
    for (int s = 0; s < kErrorSides; ++s) {
      uint8_t* const errors = ErrorsOf(metadata, s, page, unit);
      if (errors != nullptr) {
        simt::StoreGlobal(errors + slot, EncodeError(simt::Sqrt(squares[s])));
      }
    }
  }
}

}  // namespace

void KvAppendCuda(const KvAppendArgs& args, float* scratch,
                  Launcher& launcher) {
  AppendLaunch append;
  append.args = args;
  append.errors = scratch;
  append.code_bytes = static_cast<uint32_t>((args.most_codes + 15) / 16 * 16);
  KernelLaunch launch;
  launch.name = "kv_append";
  launch.grid_x = simt::Ctas(args.num_tokens);
  launch.grid_y = simt::Ctas(args.num_parts, 1, simt::kMostCtasY);
  uint32_t warps = kMostWarps;
  while (warps > 1 && (warps > args.most_groups ||
                       warps * append.code_bytes > kCudaAppendCodes)) {
    --warps;
  }
  launch.threads = warps * simt::kWarp;
  launch.shared_bytes = warps * append.code_bytes;
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, AppendKernel<decltype(type)>, append);
  });
  if (args.metadata.num_units == 0) return;
  KernelLaunch metadata;
  metadata.name = "kv_append_metadata";
  metadata.grid_x = simt::Ctas(args.num_tokens);
  metadata.threads = kMetadataThreads;
  simt::Launch(launcher, metadata, MetadataKernel, append);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
