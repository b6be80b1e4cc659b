#include "bench/ceilings.h"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/ceilings.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Reads all numbers. The sum is returned so that the compiler keeps the reads.
float SumAll(const float* from, int64_t count) {
  constexpr int kChains = 8;
  constexpr int kPrefetchFloats = 1024;
  Vec sums[kChains];
  for (Vec& sum : sums) sum = hn::Zero(kFloats);
  const int64_t step = kChains * kVecLanes;
  for (int64_t i = 0; i + step <= count; i += step) {
    for (int c = 0; c < kChains; ++c) {
      // This prefetch raises the measured bandwidth by 3 to 7 % compared with
      // the hardware's own prefetching.
      hwy::Prefetch(from + i + c * kVecLanes + kPrefetchFloats);
      sums[c] = hn::Add(sums[c], hn::LoadU(kFloats, from + i + c * kVecLanes));
    }
  }
  Vec total = hn::Zero(kFloats);
  for (const Vec& sum : sums) total = hn::Add(total, sum);
  return hn::GetLane(total);
}

// Runs independent chains of multiply-adds; returns the number of operations.
double SpinFlops(int64_t rounds, float* sink) {
  constexpr int kChains = 12;  // at least 8: 4 cycles of latency * 2 FMA units
  Vec chains[kChains];
  for (int c = 0; c < kChains; ++c) {
    chains[c] = Broadcast(static_cast<float>(c));
  }
  const Vec factor = Broadcast(0.999f);
  const Vec addend = Broadcast(0.001f);
  for (int64_t i = 0; i < rounds; ++i) {
    for (int c = 0; c < kChains; ++c) {
      chains[c] = hn::MulAdd(chains[c], factor, addend);
    }
  }
  Vec total = hn::Zero(kFloats);
  for (const Vec& chain : chains) total = hn::Add(total, chain);
  *sink = hn::GetLane(total);
  return 2.0 * kChains * kVecLanes * static_cast<double>(rounds);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {

HWY_EXPORT(SumAll);
HWY_EXPORT(SpinFlops);

double SecondsSince(std::chrono::steady_clock::time_point start) {
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  return took.count();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ReadBandwidthProbe>> ReadBandwidthProbe::Create(
    base::ThreadPool* pool, int64_t footprint_bytes) {
  if (footprint_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the read bandwidth must be measured over at least 1 byte, not ",
        footprint_bytes));
  }
  const auto bytes = static_cast<size_t>(footprint_bytes);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the system refused the ", bytes,
        " bytes of memory over which the read bandwidth is measured"));
  }
  // A failure does not matter, because this is only advice to the system.
  (void)::madvise(memory, bytes, MADV_HUGEPAGE);
  // Fills the buffer with random data, because the system can merge or compress
  // pages of zeros.
  auto* const words = static_cast<uint32_t*>(memory);
  pool->ForRanges(footprint_bytes / 4, [&](int64_t begin, int64_t end, int) {
    uint64_t state = static_cast<uint64_t>(begin) + 1;
    for (int64_t i = begin; i < end; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      // The bits of a float in [1, 2), so that sums stay finite.
      words[i] = 0x3f800000u | static_cast<uint32_t>(state >> 41);
    }
  });
  return std::unique_ptr<ReadBandwidthProbe>(
      new ReadBandwidthProbe(pool, footprint_bytes, memory));
}

ReadBandwidthProbe::~ReadBandwidthProbe() {
  ::munmap(memory_, static_cast<size_t>(footprint_bytes_));
}

double ReadBandwidthProbe::BytesPerSecond() const {
  std::vector<float> sinks(static_cast<size_t>(pool_->num_threads()) * 16);
  const auto* floats = static_cast<const float*>(memory_);
  const auto start = std::chrono::steady_clock::now();
  pool_->ForRanges(
      footprint_bytes_ / 4, [&](int64_t begin, int64_t end, int thread) {
        sinks[static_cast<size_t>(thread) * 16] =
            HWY_DYNAMIC_DISPATCH(SumAll)(floats + begin, end - begin);
      });
  const double seconds = SecondsSince(start);
  float sum = 0.0f;
  for (const float value : sinks) sum += value;
  // The sum is used, so that the compiler keeps the reads.
  KVASIR_CHECK(sum >= 0.0f);
  return static_cast<double>(footprint_bytes_) / seconds;
}

double MeasureFlops(base::ThreadPool* pool, int milliseconds) {
  std::vector<float> sinks(static_cast<size_t>(pool->num_threads()) * 16);
  std::vector<double> operations(sinks.size());
  const auto start = std::chrono::steady_clock::now();
  pool->Run([&](int thread) {
    const auto index = static_cast<size_t>(thread) * 16;
    const auto thread_start = std::chrono::steady_clock::now();
    while (SecondsSince(thread_start) * 1e3 < milliseconds) {
      operations[index] +=
          HWY_DYNAMIC_DISPATCH(SpinFlops)(100000, &sinks[index]);
    }
  });
  const double seconds = SecondsSince(start);
  double total = 0.0;
  for (const double value : operations) total += value;
  return total / seconds;
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
