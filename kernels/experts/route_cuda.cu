// route on a GPU has four kernels. First, one warp per token chooses the
// token's experts. Then one warp per expert counts the expert's rows, a single
// warp adds up the counts, and one warp per expert lists the expert's rows in
// the order of tokens.
//
// The chosen experts are found in K passes over the logits. Each pass finds the
// expert that follows the one found before, in the order of logits and indices.
// Passes are short: a lane has E / 32 logits.
//
// Sums of exponentials are added by lane (expert e by lane e % 32) and then by
// WarpSum, so a token's weights have the same bits in every step. They may
// differ in the last bits from those of a CPU.
//
// Layout: all arrays are contiguous.
//
// Bytes: the logits of a token (4 E bytes) are read K + 2 times: once from
// memory, then from caches. The T K chosen experts are read 2 E times from the
// second-level cache. Operations: about 10 for each logit and pass. The lower
// bound of the time is that of four small launches.
#include "kernels/experts/route.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kTokensPerCta = 4;  // one warp for each token

// Returns a key by which experts are ordered: a smaller key comes first. NaN is
// ordered like -infinity, the least logit.
KVASIR_DEVICE uint64_t KeyOf(float logit, uint32_t expert) {
  const auto bits = simt::BitsAs<uint32_t>(logit + 0.0f);
  uint32_t order = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
  constexpr uint32_t kLeast = 0x007fffffu;  // the order of -infinity
  if (logit != logit) order = kLeast;
  return uint64_t{~order} << 32 | expert;
}

KVASIR_DEVICE uint64_t WarpLeast(uint64_t key) {
  for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
    const uint64_t high =
        simt::ShuffleXor(static_cast<uint32_t>(key >> 32), lanes);
    const uint64_t low = simt::ShuffleXor(static_cast<uint32_t>(key), lanes);
    const uint64_t other = high << 32 | low;
    if (other < key) key = other;
  }
  return key;
}

KVASIR_KERNEL(kTokensPerCta* simt::kWarp)
ChooseKernel(RouteArgs args) {
  const int64_t token = int64_t{simt::CtaX()} * kTokensPerCta + simt::Warp();
  if (token >= args.num_tokens) return;
  const auto experts = static_cast<uint32_t>(args.num_experts);
  const float* const logits = args.logits + token * args.num_experts;
  uint64_t first = 0;
  uint64_t last = 0;
  bool is_nan = false;
  for (int64_t pass = 0; pass < args.top_k; ++pass) {
    uint64_t best = ~uint64_t{0};
    for (uint32_t e = simt::Lane(); e < experts; e += simt::kWarp) {
      const float logit = simt::LoadGlobal(logits + e);
      const uint64_t key = KeyOf(logit, e);
      is_nan = is_nan || logit != logit;
      if (key < best && (pass == 0 || key > last)) best = key;
    }
    last = WarpLeast(best);
    if (pass == 0) first = last;
  }
  is_nan = simt::Any(is_nan);
  const float largest = simt::LoadGlobal(logits + static_cast<uint32_t>(first));
  const auto share_of = [&](uint32_t e) {
    return simt::Exp2((simt::LoadGlobal(logits + e) - largest) * simt::kLog2E);
  };
  const auto is_chosen = [&](uint32_t e) {
    return KeyOf(simt::LoadGlobal(logits + e), e) <= last;
  };
  float sum = 0.0f;
  for (uint32_t e = simt::Lane(); e < experts; e += simt::kWarp) {
    if (!args.normalize || is_chosen(e)) sum += share_of(e);
  }
  sum = simt::WarpSum(sum);
  if (is_nan) sum = simt::BitsAs<float>(uint32_t{0x7fffffff});
  int64_t at = token * args.top_k;
  for (uint32_t begin = 0; begin < experts; begin += simt::kWarp) {
    const uint32_t e = begin + simt::Lane();
    const bool chosen = e < experts && is_chosen(e);
    const uint32_t mask = simt::Ballot(chosen);
    if (chosen) {
      const int64_t place = at + simt::LanesBefore(mask);
      simt::StoreGlobal(args.experts + place, static_cast<int32_t>(e));
      simt::StoreGlobal(args.weights + place, share_of(e) / sum);
    }
    at += simt::CountBits(mask);
  }
}

// Writes the number of rows of expert e to first_rows[e + 1].
KVASIR_KERNEL(simt::kWarp)
CountRowsKernel(RouteArgs args) {
  const auto expert = static_cast<int32_t>(simt::CtaX());
  const int64_t rows = args.num_tokens * args.top_k;
  int32_t count = 0;
  for (int64_t row = simt::Lane(); row < rows; row += simt::kWarp) {
    if (simt::LoadGlobal(args.experts + row) == expert) ++count;
  }
  for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
    count += simt::ShuffleXor(count, lanes);
  }
  if (simt::Lane() != 0) return;
  simt::StoreGlobal(args.first_rows + expert + 1, count);
  if (expert == 0) simt::StoreGlobal(args.first_rows, 0);
  if (args.load != nullptr) {
    int64_t* const load = args.load + expert;
    simt::StoreGlobal(load, simt::LoadGlobal(load) + count);
  }
}

// Replaces the experts' numbers of rows by their running sums, which are the
// experts' first rows.
KVASIR_KERNEL(simt::kWarp)
AddUpRowsKernel(RouteArgs args) {
  int32_t before = 0;
  for (int64_t begin = 0; begin < args.num_experts; begin += simt::kWarp) {
    const int64_t expert = begin + simt::Lane();
    const bool valid = expert < args.num_experts;
    int32_t* const place = args.first_rows + expert + 1;
    int32_t sum = valid ? simt::LoadGlobal(place) : 0;
    for (uint32_t lanes = 1; lanes < simt::kWarp; lanes *= 2) {
      const int32_t more = simt::ShuffleUp(sum, lanes);
      if (simt::Lane() >= lanes) sum += more;
    }
    if (valid) simt::StoreGlobal(place, before + sum);
    before += simt::ShuffleFrom(sum, simt::kWarp - 1);
  }
}

// Lists the rows of one expert, in the order of tokens.
KVASIR_KERNEL(simt::kWarp)
PlaceRowsKernel(RouteArgs args) {
  const auto expert = static_cast<int32_t>(simt::CtaX());
  const int64_t rows = args.num_tokens * args.top_k;
  int32_t next = simt::LoadGlobal(args.first_rows + expert);
  for (int64_t begin = 0; begin < rows; begin += simt::kWarp) {
    const int64_t row = begin + simt::Lane();
    const bool own =
        row < rows && simt::LoadGlobal(args.experts + row) == expert;
    const uint32_t mask = simt::Ballot(own);
    if (own) {
      const int32_t place = next + simt::LanesBefore(mask);
      simt::StoreGlobal(args.places + row, place);
      simt::StoreGlobal(args.tokens + place,
                        static_cast<int32_t>(row / args.top_k));
    }
    next += simt::CountBits(mask);
  }
}

}  // namespace

void RouteCuda(const RouteArgs& args, int32_t*, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "route_choose";
  launch.grid_x = simt::Ctas(args.num_tokens, kTokensPerCta);
  launch.threads = kTokensPerCta * simt::kWarp;
  simt::Launch(launcher, launch, ChooseKernel, args);
  launch.threads = simt::kWarp;
  launch.name = "route_count";
  launch.grid_x = simt::Ctas(args.num_experts);
  simt::Launch(launcher, launch, CountRowsKernel, args);
  launch.name = "route_add_up";
  launch.grid_x = 1;
  simt::Launch(launcher, launch, AddUpRowsKernel, args);
  launch.name = "route_place";
  launch.grid_x = simt::Ctas(args.num_experts);
  simt::Launch(launcher, launch, PlaceRowsKernel, args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
