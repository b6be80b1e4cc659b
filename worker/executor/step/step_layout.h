// How large a step is, and where its numbers lie on the way to the device and
// back: addresses that depend on its bucket alone while the blob's memory is
// large enough.
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
};

struct StepSizes {
  int64_t tokens = 0;     // T
  int64_t sequences = 0;  // B
  int64_t samples = 0;
  int64_t targets = 0;
  int64_t top = 0;        // most likely ids reported per sample
  int64_t histories = 0;  // of tokens, counted for penalties

  friend bool operator==(const StepSizes&, const StepSizes&) = default;
};
StepSizes LargestStep(const StepLimits& limits);

// Evictions of one page group that are done side by side, in launches for each
// of its layers.
struct EvictionBatch {
  int64_t page_group = 0;
  int64_t copy_batches = 0;  // of the step's page copies that come before
  int64_t count = 0;

  friend bool operator==(const EvictionBatch&, const EvictionBatch&) = default;
};

// What a step's list of launches depends on, the places of its numbers in blob
// and results, and those of its workspaces. Steps of one bucket differ in the
// numbers that are uploaded, and in which rows of the padded ones are true: the
// host gives a launch their count (and the first row, where it is not 0), and a
// CPU computes these alone.
struct StepBucket {
  StepSizes padded;
  // Launches of page copies for each layer of a group. Their pairs are padded
  // with pairs that copy nothing, and all of them are launched.
  absl::InlinedVector<KvArenas::CopyBatch, 4> copies;
  absl::InlinedVector<EvictionBatch, 2> evictions;
  // Where prompts lift latents, they and output are launched apart: whether
  // there are prompts, and how often rows of output follow others.
  bool has_prompts = false;
  int64_t output_runs = 0;

  friend bool operator==(const StepBucket&, const StepBucket&) = default;
};

// Powers of two, as far as the limits go; more samples than `logits_rows`, the
// rows of logits that are held at a time, are padded to a multiple of it.
StepSizes PadSizes(const StepSizes& sizes, const StepLimits& limits,
                   int64_t logits_rows);

// A step's results, read back together. Offsets in bytes from the first.
struct ResultLayout {
  ResultLayout() = default;
  explicit ResultLayout(const StepSizes& padded);

  int64_t clamped_codes = 0;  // one int64, counts up from step to step
  // Behind what is there in every step.
  int64_t token_ids = sizeof(int64_t);  // [samples] int32
  int64_t logprobs = 0;                 // [samples] float32
  int64_t top_ids = 0;                  // [samples, top] int32
  int64_t top_logprobs = 0;             // [samples, top] float32
  int64_t target_logprobs = 0;          // [targets] float32
  int64_t not_finite = 0;               // [tokens] float32
  int64_t bytes = 0;
};

// Everything of a step that the device needs, written on the host and copied
// there at once. The same code that packs it is run first to count its bytes:
//
//   blob.StartCounting();
//   Pack(&blob);
//   KVASIR_RETURN_IF_ERROR(blob.StartPacking());  // grows if it must
//   Pack(&blob);
//   KVASIR_RETURN_IF_ERROR(blob.Upload(stream));
//
// Owns: its host memory, and the device's of the same size.
// Threads: one at a time.
class StepBlob {
 public:
  // A place in the blob; both null while it is counted.
  template <typename T>
  struct Place {
    T* host = nullptr;
    kernels::DevicePtr<const T> device;
  };

  explicit StepBlob(kernels::DeviceAllocator* allocator)
      : allocator_(allocator) {}

  void StartCounting();
  // RESOURCE_EXHAUSTED when it must grow and cannot.
  absl::Status StartPacking();

  // The next `count` elements, not written.
  template <typename T>
  Place<T> Take(int64_t count) {
    const int64_t offset = TakeBytes(count * static_cast<int64_t>(sizeof(T)));
    if (counting_) return {};
    return {reinterpret_cast<T*>(host_.get() + offset),
            (device_.as<const std::byte>() + offset).template as<const T>()};
  }

  // The same, written: `values`, then `padding` up to `count`.
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
  // Of its memory.
  size_t bytes() const { return device_.bytes(); }
  // How often a step has taken more of it than any before. Only then does it
  // move, and whether it does is this rank's: how often is the plans' alone.
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
