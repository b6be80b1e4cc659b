#include "bench/random_latents.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "kernels/device/activations.h"
#include "kernels/latents/ops.h"
#include "model/checkpoint/random_weights.h"

namespace kvasir::bench {
namespace {

// One launch fills this many rows. All launches use the same random numbers,
// but start at different offsets (below kShiftNumbers) in them, so that no two
// pages are alike.
constexpr int64_t kRows = 256;
constexpr int64_t kShiftNumbers = 4093;
constexpr float kSpan = 6.0f;  // ranges span -3 to 3 standard deviations

// The static ranges of channels. Codes use them if slots do not store ranges.
struct StaticRanges {
  std::vector<float> scale;
  std::vector<float> minimum;
};

StaticRanges RangesOf(const kernels::LatentPart& part) {
  StaticRanges ranges;
  for (int64_t g = 0; g < part.num_groups; ++g) {
    const kernels::LatentGroup& group = part.groups[g];
    if (group.num_runs == 0 || group.params.stride_bytes > 0) return {};
    for (int64_t r = 0; r < group.num_runs; ++r) {
      const auto levels = static_cast<float>((1 << group.runs[r].bits) - 1);
      ranges.scale.insert(ranges.scale.end(),
                          static_cast<size_t>(group.runs[r].width),
                          levels > 0.0f ? kSpan / levels : 0.0f);
    }
  }
  ranges.minimum.assign(ranges.scale.size(), -kSpan / 2);
  return ranges;
}

// Fills the slots `all_slots` of one part of a layer's latents with random
// numbers. `shape` describes the slots.
absl::Status FillPart(const kernels::LatentPart& latents,
                      kernels::KvAppendShape shape,
                      const std::vector<int64_t>& all_slots, uint64_t seed,
                      kernels::Device& device) {
  const int64_t width = kernels::RowWidth(latents);
  std::vector<float> numbers(
      static_cast<size_t>(kRows * width + kShiftNumbers));
  model::FillRandom({.name = "latents",
                     .shape = {static_cast<int64_t>(numbers.size())},
                     .deviation = 1.0},
                    seed, 0, numbers);
  const StaticRanges ranges = RangesOf(latents);
  kernels::DeviceTables tables(&device);
  kernels::KvAppendPart part;
  part.part = latents;
  if (!ranges.scale.empty()) {
    KVASIR_ASSIGN_OR_RETURN(part.part.static_scale,
                            tables.Add<float>(ranges.scale));
    KVASIR_ASSIGN_OR_RETURN(part.part.static_minimum,
                            tables.Add<float>(ranges.minimum));
  }
  const auto num_slots = static_cast<int64_t>(all_slots.size());
  const kernels::Activations activations{device.activations()};
  shape.row_stride = width;
  shape.dtype = activations.dtype;
  KVASIR_ASSIGN_OR_RETURN(const auto rows, tables.Add<std::byte>(StoredNumbers(
                                               numbers, activations.dtype)));
  KVASIR_ASSIGN_OR_RETURN(const auto slots, tables.Add<int64_t>(all_slots));
  KVASIR_ASSIGN_OR_RETURN(
      const kernels::PreparedKvAppend append,
      kernels::Prepare(device, shape, absl::MakeConstSpan(&part, 1)));
  const std::unique_ptr<kernels::Stream> stream = device.MakeStream();
  const auto append_at = [&](int64_t first, int64_t shift,
                             kernels::Workspace& workspace) {
    return kernels::KvAppend(
        *stream, append,
        {activations.At(rows.as<const float>(), shift), slots + first,
         std::min(kRows, num_slots - first)},
        workspace);
  };
  kernels::Workspace counter = kernels::Workspace::Counting();
  KVASIR_RETURN_IF_ERROR(append_at(0, 0, counter));
  KVASIR_ASSIGN_OR_RETURN(
      const kernels::DeviceBuffer memory,
      device.allocator().Allocate(counter.peak_bytes(),
                                  kernels::MemoryTag::kWorkspace));
  int64_t shift = 0;
  for (int64_t first = 0; first < num_slots; first += kRows) {
    kernels::Workspace workspace(memory.data(), memory.bytes());
    KVASIR_RETURN_IF_ERROR(append_at(first, shift, workspace));
    shift = (shift + 1) % kShiftNumbers;
  }
  KVASIR_RETURN_IF_ERROR(stream->Synchronize());
  return absl::OkStatus();
}

// Returns the byte offset of every row of the segment in every page, because
// any page may become a side page (a page for exact rows).
std::vector<int64_t> RowsOfSegment(const kernels::ExactSegment& segment,
                                   int64_t row_bytes, int64_t num_pages) {
  std::vector<int64_t> rows;
  for (int64_t page = 0; page < num_pages; ++page) {
    for (int64_t row = 0; row < segment.rows_per_page; ++row) {
      rows.push_back(segment.arena_bytes + page * segment.page_bytes +
                     segment.offset_bytes + row * row_bytes);
    }
  }
  return rows;
}

}  // namespace

std::vector<std::byte> StoredNumbers(absl::Span<const float> numbers,
                                     kernels::DType dtype) {
  std::vector<std::byte> stored(
      numbers.size() * static_cast<size_t>(kernels::DTypeBytes(dtype)));
  kernels::VisitDType(dtype, [&](auto type) {
    using T = decltype(type);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const T number = kernels::FromFloat<T>(numbers[i]);
      std::memcpy(stored.data() + i * sizeof(T), &number, sizeof(T));
    }
  });
  return stored;
}

absl::Status FillWithRandomLatents(const worker::KvArenas::Layer& layer,
                                   int64_t num_pages, int64_t page_tokens,
                                   uint64_t seed, kernels::Device& device) {
  std::vector<int64_t> slots(static_cast<size_t>(num_pages * page_tokens));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  for (const auto* side : {&layer.key, &layer.value}) {
    for (const worker::KvArenas::Part& part : *side) {
      KVASIR_RETURN_IF_ERROR(FillPart(
          part.latents, {.page_tokens = page_tokens}, slots, seed++, device));
    }
  }
  return absl::OkStatus();
}

absl::Status FillWithRandomExactRows(const worker::KvArenas& arenas,
                                     const worker::KvArenas::Layer& layer,
                                     uint64_t seed, kernels::Device& device) {
  const int64_t pages =
      arenas.num_pages()[static_cast<size_t>(layer.page_group)];
  for (const bool keys : {true, false}) {
    const int64_t index = keys ? layer.key_ring : layer.value_ring;
    if (index < 0) continue;
    const worker::KvArenas::Ring& ring =
        arenas.rings()[static_cast<size_t>(index)];
    for (const worker::KvArenas::Part& part : keys ? layer.key : layer.value) {
      // Rows of two segments may overlap in a page, so each segment has its own
      // launch.
      for (const kernels::ExactSegment& segment : ring.segments) {
        KVASIR_RETURN_IF_ERROR(FillPart(
            part.exact, {.page_tokens = 1, .slots_are_bytes = true},
            RowsOfSegment(segment, ring.row_bytes, pages), seed++, device));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::bench
