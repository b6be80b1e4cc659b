#include "plan/codec.h"

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "plan/normal_levels.h"

namespace kvasir::plan {

using kvasir::v1::Codec;
using kvasir::v1::Part;

namespace {

// The most bits that a code may have if codes stand for levels (PerTokenNorm)
// instead of equally spaced numbers.
constexpr uint32_t kMostLevelBits = 4;

bool KnownBits(uint32_t bits) { return bits <= 6 || bits == 8; }

// A run of channels with the same number of bits. If `channels` is 0, the run
// has an equal share of the latent's channels.
struct BitRun {
  int64_t channels = 0;
  uint32_t bits = 0;
};

std::vector<BitRun> BitRuns(const Codec::Bits& bits) {
  std::vector<BitRun> runs;
  for (const uint32_t entry : bits.schedule()) runs.push_back({0, entry});
  for (const Codec::Bits::Run& run : bits.runs()) {
    runs.push_back({run.channels(), run.bits()});
  }
  return runs;
}

absl::Status CheckBitRuns(const PlanPlace& where, const Codec::Bits& bits,
                          const std::vector<BitRun>& runs) {
  const int schedule = bits.schedule_size();
  if (bits.runs_size() > 0 && schedule > 0) {
    return where.Refuse("bits: want a schedule or runs, have both");
  }
  if (bits.runs_size() == 0 && schedule != 1 && schedule != 8) {
    return where.Refuse("bits: want a schedule of 1 or 8 entries, have ",
                        schedule);
  }
  for (const Codec::Bits::Run& run : bits.runs()) {
    if (run.channels() == 0) return where.Refuse("bits: a run has no channels");
  }
  for (const BitRun& run : runs) {
    if (!KnownBits(run.bits)) {
      return where.Refuse("bits must be 0 to 6 or 8, but are ", run.bits);
    }
  }
  bool none = false;
  for (const Codec::Bits::Run& run : bits.runs()) {
    if (none && run.bits() > 0) {
      return where.Refuse(
          "a run of ", run.bits(),
          " bits follows a run of 0 bits: runs of 0 bits must come last");
    }
    none = none || run.bits() == 0;
  }
  if (std::all_of(runs.begin(), runs.end(),
                  [](const BitRun& run) { return run.bits == 0; })) {
    return where.Refuse(
        "every bit width is 0, so the codec stores nothing: want at least one "
        "above 0");
  }
  return absl::OkStatus();
}

absl::Status CheckLevels(const PlanPlace& where, const Codec& codec,
                         const std::vector<BitRun>& runs) {
  if (!codec.has_per_token_norm()) return absl::OkStatus();
  const auto& levels = codec.per_token_norm().levels();
  for (int i = 0; i < levels.size(); ++i) {
    if (!std::isfinite(levels.Get(i)) ||
        (i > 0 && levels.Get(i) <= levels.Get(i - 1))) {
      return where.Refuse("levels must be finite and increasing, but level ", i,
                          " is ", levels.Get(i));
    }
  }
  const std::vector<float> rounded = RoundedLevels(levels);
  for (size_t i = 1; i < rounded.size(); ++i) {
    if (rounded[i] > rounded[i - 1] && std::isfinite(rounded[i])) continue;
    return where.Refuse(
        "levels must fit a float and differ by at least 1/127 of the largest "
        "magnitude, but levels ",
        i - 1, " and ", i, " are ", levels.Get(static_cast<int>(i) - 1),
        " and ", levels.Get(static_cast<int>(i)));
  }
  for (const BitRun& run : runs) {
    if (run.bits == 0) continue;
    if (run.bits > kMostLevelBits) {
      return where.Refuse("codes with levels may have at most ", kMostLevelBits,
                          " bits, but have ", run.bits);
    }
    if (levels.size() == 1 << run.bits) continue;
    return where.Refuse("codes of ", run.bits, " bits need ", 1 << run.bits,
                        " levels, but the codec has ", levels.size());
  }
  return absl::OkStatus();
}

// Checks that the codec's runs and ranges fit the width of a latent.
absl::Status CheckWidth(const PlanPlace& where, const Codec& codec,
                        const std::vector<BitRun>& runs,
                        const PlannedLatent& latent) {
  const int64_t schedule = codec.bits().schedule_size();
  if (schedule == 8 && latent.width % 8 != 0) {
    return where.Refuse("group ", latent.group,
                        ": a schedule of 8 entries needs a latent whose width "
                        "is a multiple of 8, but the width is ",
                        latent.width);
  }
  int64_t covered = 0;
  for (const BitRun& run : runs) {
    const int64_t channels =
        schedule > 0 ? latent.width / schedule : run.channels;
    const int64_t range = codec.per_token().group();
    if (range > 0 && channels % range != 0) {
      return where.Refuse("group ", latent.group, ": ranges of ", range,
                          " channels do not divide the ", channels,
                          " channels of one bit width");
    }
    covered += channels;
  }
  if (covered == latent.width) return absl::OkStatus();
  return where.Refuse("group ", latent.group, ": the runs of bits have ",
                      covered, " channels, but the latent has ", latent.width);
}

absl::Status CheckBits(const PlanPlace& where, const Codec& codec,
                       const std::vector<PlannedLatent>& latents) {
  const std::vector<BitRun> runs = BitRuns(codec.bits());
  KVASIR_RETURN_IF_ERROR(CheckBitRuns(where, codec.bits(), runs));
  if (codec.range_case() == Codec::RANGE_NOT_SET) {
    return where.Refuse(
        "the codec has bits but no range: want per_token, per_token_norm, "
        "channel_static or channel_sequence");
  }
  const bool stores_params = !codec.has_channel_static();
  if (stores_params && DataTypeBytes(codec.param_dtype()) == 0) {
    return where.Refuse("param_dtype: want F32, F16 or BF16, have ",
                        static_cast<int>(codec.param_dtype()));
  }
  KVASIR_RETURN_IF_ERROR(CheckLevels(where, codec, runs));
  for (const PlannedLatent& latent : latents) {
    KVASIR_RETURN_IF_ERROR(CheckWidth(where, codec, runs, latent));
  }
  return absl::OkStatus();
}

absl::Status CheckHadamard(const PlanPlace& where, const Part& part) {
  const Codec& codec = part.codec();
  if (codec.has_hadamard_online() && part.stored() == kvasir::v1::PRE_ROPE) {
    return where.Refuse(
        "HADAMARD_ONLINE mixes channels after the rotation: "
        "want POST_ROPE or NO_ROPE");
  }
  if (!codec.has_hadamard_fused()) return absl::OkStatus();
  if (part.has_rope_low_rank()) {
    return where.Refuse(
        "HADAMARD_FUSED would mix real and imaginary parts, which the complex "
        "lift of rope_low_rank cannot undo: want HADAMARD_ONLINE");
  }
  if (!part.has_low_rank() || part.stored() == kvasir::v1::POST_ROPE) {
    return where.Refuse(
        "HADAMARD_FUSED is fused into a lift that comes before any rotation: "
        "want a low_rank space stored PRE_ROPE or NO_ROPE");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStorage(const PlanPlace& where, const Codec& codec,
                          const std::vector<PlannedLatent>& latents) {
  switch (codec.storage_case()) {
    case Codec::kDtype:
      if (DataTypeBytes(codec.dtype()) == 0) {
        return where.Refuse("dtype: want F32, F16 or BF16, have ",
                            static_cast<int>(codec.dtype()));
      }
      if (codec.range_case() != Codec::RANGE_NOT_SET) {
        return where.Refuse(
            "the codec has a dtype and a range: numbers of a dtype are not "
            "scaled, so they must have no range");
      }
      return absl::OkStatus();
    case Codec::kBits:
      return CheckBits(where, codec, latents);
    case Codec::STORAGE_NOT_SET:
      break;
  }
  return where.Refuse("codec: want a dtype or bits");
}

absl::Status CheckTransform(const PlanPlace& where, const Part& part) {
  const Codec& codec = part.codec();
  KVASIR_RETURN_IF_ERROR(CheckHadamard(where, part));
  const bool basis = codec.has_basis_static() || codec.has_basis_sequence();
  if (basis && !part.has_full() && !part.has_low_rank()) {
    return where.Refuse(
        "a basis mixes channels across RoPE pairs: want a full or low_rank "
        "space");
  }
  if (codec.has_basis_sequence()) {
    if (part.stored() == kvasir::v1::POST_ROPE) {
      return where.Refuse(
          "BASIS_SEQUENCE is the basis of keys before their "
          "rotation: want PRE_ROPE or NO_ROPE");
    }
    if (codec.has_channel_static()) {
      return where.Refuse(
          "CHANNEL_STATIC ranges do not fit BASIS_SEQUENCE, whose basis is "
          "another for each sequence: want CHANNEL_SEQUENCE or "
          "PER_TOKEN");
    }
  }
  if (codec.bits().schedule_size() == 8 && !basis && !part.has_low_rank()) {
    return where.Refuse(
        "a schedule of 8 needs channels that are sorted by "
        "falling singular value: want a basis or a low_rank "
        "space");
  }
  const bool hadamard =
      codec.has_hadamard_fused() || codec.has_hadamard_online();
  if (hadamard && codec.bits().schedule_size() == 8) {
    return where.Refuse(
        "a Hadamard transform mixes the channels that a "
        "schedule of 8 keeps apart");
  }
  if (hadamard && codec.bits().runs_size() > 1) {
    return where.Refuse(
        "a Hadamard transform mixes the channels that runs of bits keep apart");
  }
  return absl::OkStatus();
}

}  // namespace kvasir::plan
