// The sizes of a step, and the layout of the arrays that it uploads to the
// device and reads back. Addresses depend only on the step's bucket
// (StepBucket), unless the uploaded blob grows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device/allocator.h"
#include "kernels/device/stream.h"
#include "worker/executor/pages/kv_arenas.h"

namespace kvasir::worker {

struct StepLimits {
  int64_t max_batched_tokens = 0;
  int64_t max_sequences = 0;
  int64_t vocab_size = 0;
  int64_t max_logprobs = 0;
  int64_t num_experts = 0;  // 0 if the model has no experts
};

struct StepSizes {
  int64_t tokens = 0;     // T in shapes
  int64_t sequences = 0;  // B in shapes
  int64_t samples = 0;
  int64_t targets = 0;
  int64_t top = 0;        // number of most likely ids reported per sample
  int64_t histories = 0;  // lists of tokens to count for penalties

  friend bool operator==(const StepSizes&, const StepSizes&) = default;
};
StepSizes LargestStep(const StepLimits& limits);

// Evictions of one page group that run together, in the same launches.
struct EvictionBatch {
  int64_t page_group = 0;
  int64_t copy_batches = 0;  // how many batches of page copies run first
  int64_t count = 0;

  friend bool operator==(const EvictionBatch&, const EvictionBatch&) = default;
};

// Everything that determines a step's list of launches. Steps of one bucket
// have the same layout of blob, results and workspace. They differ in the
// uploaded data, and in which rows are padding. Each launch receives the range
// of rows that are not padding, and a CPU computes only this range.
struct StepBucket {
  StepSizes padded;
  // Page copies, launched for each layer of their page group. The launch
  // includes the padding, which copies nothing.
  absl::InlinedVector<KvArenas::CopyBatch, 4> copies;
  absl::InlinedVector<EvictionBatch, 2> evictions;
  // See StepBatch::has_prompts and StepBatch::output_runs. Set only if prompts
  // lift latents (prompt_lift.h), because prompts and output then have
  // different launches.
  bool has_prompts = false;
  int64_t output_runs = 0;

  friend bool operator==(const StepBucket&, const StepBucket&) = default;
};

// Rounds sizes up to powers of two within the limits. A number of samples above
// `logits_rows` (the most rows of logits that exist at a time) is rounded up to
// a multiple of `logits_rows` instead.
StepSizes PadSizes(const StepSizes& sizes, const StepLimits& limits,
                   int64_t logits_rows);

// Where a step's results lie in StepState::results(). They are read back
// together. Offsets are in bytes.
struct ResultLayout {
  ResultLayout() = default;
  explicit ResultLayout(const StepSizes& padded);

  int64_t clamped_codes = 0;  // one int64, which counts all steps so far
  int64_t token_ids = sizeof(int64_t);  // [samples] int32
  // The offsets of the arrays below depend on the step's sizes.
  int64_t logprobs = 0;         // [samples] float32
  int64_t top_ids = 0;          // [samples, top] int32
  int64_t top_logprobs = 0;     // [samples, top] float32
  int64_t target_logprobs = 0;  // [targets] float32
  int64_t not_finite = 0;       // [tokens] float32
  int64_t bytes = 0;
};

// Everything that the device needs for a step: written on the host and uploaded
// in one copy. The code that packs it runs twice, the first time only to count
// bytes:
//
//   blob.StartCounting();
//   Pack(&blob);
//   KVASIR_RETURN_IF_ERROR(blob.StartPacking());  // grows if it must
//   Pack(&blob);
//   KVASIR_RETURN_IF_ERROR(blob.Upload(stream));
//
// Owns: its host memory, and device memory of the same size.
// Threads: one at a time.
class StepBlob {
 public:
  // A place in the blob. Both pointers are null while bytes are counted.
  template <typename T>
  struct Place {
    T* host = nullptr;
    kernels::DevicePtr<const T> device;
  };

  explicit StepBlob(kernels::DeviceAllocator* allocator)
      : allocator_(allocator) {}

  void StartCounting();
  // RESOURCE_EXHAUSTED if the blob must grow and there is no memory.
  absl::Status StartPacking();

  // Returns the place of the next `count` elements, without writing them.
  template <typename T>
  Place<T> Take(int64_t count) {
    const int64_t offset = TakeBytes(count * static_cast<int64_t>(sizeof(T)));
    if (counting_) return {};
    return {reinterpret_cast<T*>(host_.get() + offset),
            (device_.as<const std::byte>() + offset).template as<const T>()};
  }

  // Takes the next `count` elements, writes `values`, and fills the rest with
  // `padding`. Returns the device address of the first element.
  template <typename T>
  kernels::DevicePtr<const T> Add(absl::Span<const T> values, int64_t count,
                                  const T& padding) {
    const Place<T> place = Take<T>(count);
    if (!counting_) {
      std::fill(std::copy(values.begin(), values.end(), place.host),
                place.host + count, padding);
    }
    return place.device;
  }
  template <typename T>
  kernels::DevicePtr<const T> Add(absl::Span<const T> values) {
    return Add(values, static_cast<int64_t>(values.size()), T());
  }

  bool counting() const { return counting_; }
  // Bytes of device memory that the blob holds.
  size_t bytes() const { return device_.bytes(); }
  // The number of steps that needed more bytes than every earlier step. Only
  // such a step can move the blob. The number depends only on the plans, so all
  // ranks have the same number.
  int64_t peaks() const { return peaks_; }
  absl::Status Upload(kernels::Stream& stream) const;

 private:
  int64_t TakeBytes(int64_t bytes);

  kernels::DeviceAllocator* const allocator_;
  std::unique_ptr<std::byte[]> host_;
  kernels::DeviceBuffer device_;
  bool counting_ = false;
  int64_t used_bytes_ = 0;
  size_t most_bytes_ = 0;
  int64_t peaks_ = 0;
};

}  // namespace kvasir::worker
