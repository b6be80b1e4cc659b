// Exchange between the lanes of a warp. These functions do not order memory;
// SyncWarp (grid.h) does. All lanes of `mask` must make the same call. C++17.
#pragma once

#include "kernels/simt/grid.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// ShuffleXor returns the `value` that lane (caller's index xor `lanes`) passed,
// ShuffleFrom the one that lane `lane` passed. The result is undefined if
// `mask` does not have this lane. T has 4 bytes.
template <typename T>
KVASIR_DEVICE T ShuffleXor(T value, uint32_t lanes, uint32_t mask = kWholeWarp,
                           Site site = Site::Here()) {
  const auto bits = BitsAs<uint32_t>(value);
#ifdef __CUDACC__
  (void)site;
  return BitsAs<T>(__shfl_xor_sync(mask, bits, static_cast<int>(lanes)));
#else
  using emulation::ShuffleKind;
  return BitsAs<T>(
      emulation::Shuffle(ShuffleKind::kXor, mask, bits, lanes, site));
#endif
}
template <typename T>
KVASIR_DEVICE T ShuffleFrom(T value, uint32_t lane, uint32_t mask = kWholeWarp,
                            Site site = Site::Here()) {
  const auto bits = BitsAs<uint32_t>(value);
#ifdef __CUDACC__
  (void)site;
  return BitsAs<T>(__shfl_sync(mask, bits, static_cast<int>(lane)));
#else
  using emulation::ShuffleKind;
  return BitsAs<T>(
      emulation::Shuffle(ShuffleKind::kFrom, mask, bits, lane, site));
#endif
}
// Returns the `value` of lane (caller's index - `lanes`), or the caller's own
// value if there is no such lane.
template <typename T>
KVASIR_DEVICE T ShuffleUp(T value, uint32_t lanes, uint32_t mask = kWholeWarp,
                          Site site = Site::Here()) {
  const auto bits = BitsAs<uint32_t>(value);
#ifdef __CUDACC__
  (void)site;
  return BitsAs<T>(__shfl_up_sync(mask, bits, lanes));
#else
  using emulation::ShuffleKind;
  return BitsAs<T>(
      emulation::Shuffle(ShuffleKind::kUp, mask, bits, lanes, site));
#endif
}
// Returns the `value` of lane (caller's index + `lanes`), or the caller's own
// value if there is no such lane.
template <typename T>
KVASIR_DEVICE T ShuffleDown(T value, uint32_t lanes, uint32_t mask = kWholeWarp,
                            Site site = Site::Here()) {
  const auto bits = BitsAs<uint32_t>(value);
#ifdef __CUDACC__
  (void)site;
  return BitsAs<T>(__shfl_down_sync(mask, bits, lanes));
#else
  using emulation::ShuffleKind;
  return BitsAs<T>(
      emulation::Shuffle(ShuffleKind::kDown, mask, bits, lanes, site));
#endif
}

// Returns the lanes of `mask` for which `yes` is true, one bit for each lane.
KVASIR_DEVICE uint32_t Ballot(bool yes, uint32_t mask = kWholeWarp,
                              Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return __ballot_sync(mask, yes);
#else
  return emulation::Ballot(yes, mask, site);
#endif
}
KVASIR_DEVICE bool Any(bool yes, uint32_t mask = kWholeWarp,
                       Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return __any_sync(mask, yes) != 0;
#else
  return emulation::Ballot(yes, mask, site) != 0;
#endif
}
KVASIR_DEVICE bool All(bool yes, uint32_t mask = kWholeWarp,
                       Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  return __all_sync(mask, yes) != 0;
#else
  return emulation::Ballot(yes, mask, site) == mask;
#endif
}

// Returns how many bits of a word are 1.
KVASIR_DEVICE int32_t CountBits(uint32_t bits) {
#ifdef __CUDACC__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}
// Returns how many lanes of `mask` come before the caller's lane.
KVASIR_DEVICE int32_t LanesBefore(uint32_t mask) {
  return CountBits(mask & ((1u << Lane()) - 1));
}

// The sum or maximum over all lanes, which every lane receives with the same
// bits. Lanes that are 16 apart are combined first, then those 8, 4, 2 and 1
// apart. Maxima are computed by Max (numbers.h).
KVASIR_DEVICE float WarpSum(float value, Site site = Site::Here()) {
  for (uint32_t lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value += ShuffleXor(value, lanes, kWholeWarp, site);
  }
  return value;
}
KVASIR_DEVICE float WarpMax(float value, Site site = Site::Here()) {
  for (uint32_t lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = Max(value, ShuffleXor(value, lanes, kWholeWarp, site));
  }
  return value;
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
