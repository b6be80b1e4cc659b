// Attention over latents in pages. The contract of every op: kernels/README.md.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/device/device.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"

namespace kvasir::kernels {

// Attention over parts that are constant after load.
// Owns: the parts and the host's grid of their launches. Groups, runs, heads,
//   pairs and steps of parts are the caller's and outlive it. Movable.
// Threads: one launch at a time.
class PreparedAttention {
 public:
  PreparedAttention(PreparedAttention&&) noexcept;
  PreparedAttention& operator=(PreparedAttention&&) noexcept;
  ~PreparedAttention();

  const AttentionGrid& grid() const { return *grid_; }
  const AttentionKernels& kernels() const;

  // What launches do to make keys or values of a sequence's slots, where a slot
  // costs head_work[j] for KV head j [Hkv]: the same for any number of threads.
  // The sequence's tables are not looked at.
  double WorkOnSlots(const AttentionSequence& sequence,
                     absl::Span<const double> head_work) const;

 private:
  struct Parts;
  PreparedAttention();
  friend bool Fits(const PagedAttentionParams& shape);
  friend absl::StatusOr<PreparedAttention> Prepare(
      Device& device, const PagedAttentionParams& shape);
  friend absl::Status PagedAttention(Stream& stream,
                                     PreparedAttention& prepared,
                                     const AttentionRows& rows,
                                     const AttentionStep& step,
                                     Workspace& workspace);

  std::unique_ptr<Parts> parts_;
  std::unique_ptr<AttentionGrid> grid_;
  std::unique_ptr<AttentionGrid> one_thread_;  // for WorkOnSlots
};

// `shape`: all but the rows and sequences of PagedAttentionParams. Launches run
// on streams of the device.
absl::StatusOr<PreparedAttention> Prepare(Device& device,
                                          const PagedAttentionParams& shape);
// Whether one row of the parts fits a thread's scratch. Looks at widths, counts
// of runs, dims and windows; lists and data may be null.
bool Fits(const PagedAttentionParams& shape);

// Host arithmetic, once for all launches of a step that are divided alike
// (AttentionGrid::DividesAs) over the same sequences. INVALID_ARGUMENT for
// counts below 0.
absl::StatusOr<AttentionStep> DivideStep(
    const PreparedAttention& prepared,
    absl::Span<const AttentionSequence> sequences);
// Gives sequences of one row that adds mass places in a launch's room for
// weights, as long as there is room; the others are scored twice.
void PlaceWeights(int64_t num_heads, int64_t most_weights, int64_t page_tokens,
                  absl::Span<AttentionSequence> sequences);
// `step`: of the sequences that `rows` has on the device; not looked at while
// the workspace counts.
absl::Status PagedAttention(Stream& stream, PreparedAttention& prepared,
                            const AttentionRows& rows,
                            const AttentionStep& step, Workspace& workspace);

}  // namespace kvasir::kernels
