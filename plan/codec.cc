#include "plan/codec.h"

#include <algorithm>

#include "base/status_macros.h"

namespace kvasir::cache {

using kvasir::v1::Codec;
using kvasir::v1::Part;

namespace {

bool KnownBits(uint32_t bits) { return bits <= 4 || bits == 8; }

absl::Status CheckBits(const PlanPlace& where, const Codec& codec,
                       const std::vector<PlannedLatent>& latents) {
  const auto& schedule = codec.bits().schedule();
  if (schedule.size() != 1 && schedule.size() != 8) {
    return where.Refuse("bits: want a schedule of 1 or 8 entries, have ",
                        schedule.size());
  }
  for (uint32_t bits : schedule) {
    if (!KnownBits(bits)) {
      return where.Refuse("bits must be 0, 1, 2, 3, 4 or 8, have ", bits);
    }
  }
  if (std::all_of(schedule.begin(), schedule.end(),
                  [](uint32_t bits) { return bits == 0; })) {
    return where.Refuse("a schedule of zeros stores nothing: leave it out");
  }
  if (codec.range_case() == Codec::RANGE_NOT_SET) {
    return where.Refuse("codes of bits need a range");
  }
  const bool stores_params = !codec.has_channel_static();
  if (stores_params && DataTypeBytes(codec.param_dtype()) == 0) {
    return where.Refuse("param_dtype: want F32, F16 or BF16, have ",
                        static_cast<int>(codec.param_dtype()));
  }
  for (const PlannedLatent& latent : latents) {
    if (schedule.size() == 8 && latent.width % 8 != 0) {
      return where.Refuse("group ", latent.group,
                          ": a schedule of 8 needs a width that 8 divides, "
                          "have ",
                          latent.width);
    }
    const int64_t range_group =
        codec.has_per_token() ? codec.per_token().group() : 0;
    const int64_t run = latent.width / schedule.size();
    if (range_group > 0 && run % range_group != 0) {
      return where.Refuse("group ", latent.group, ": a range per ", range_group,
                          " channels does not divide the ", run,
                          " channels of one bit width");
    }
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
        "HADAMARD_FUSED needs a linear lift before any rotation to be fused "
        "into: want a low_rank space stored PRE_ROPE or NO_ROPE");
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
        return where.Refuse("numbers of a dtype have no range to scale by");
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
          "CHANNEL_STATIC ranges belong to another basis than "
          "BASIS_SEQUENCE's: want CHANNEL_SEQUENCE or "
          "PER_TOKEN");
    }
  }
  if (codec.bits().schedule_size() == 8 && !basis && !part.has_low_rank()) {
    return where.Refuse(
        "a schedule of 8 goes by falling singular value: want "
        "a basis or a low_rank space");
  }
  if (codec.bits().schedule_size() == 8 &&
      (codec.has_hadamard_fused() || codec.has_hadamard_online())) {
    return where.Refuse(
        "a Hadamard transform mixes the channels that a "
        "schedule of 8 keeps apart");
  }
  return absl::OkStatus();
}

}  // namespace kvasir::cache
