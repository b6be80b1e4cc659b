// Attention over latents in pages. kernels/README.md has the contract of every
// op.
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
//   pairs and steps of parts are the caller's and must outlive it. Movable.
// Threads: one launch at a time.
class PreparedAttention {
 public:
  PreparedAttention(PreparedAttention&&) noexcept;
  PreparedAttention& operator=(PreparedAttention&&) noexcept;
  ~PreparedAttention();

  const AttentionGrid& grid() const { return *grid_; }
  const AttentionKernels& kernels() const;

  // The work of making the keys or values of a sequence's slots, if a slot
  // costs head_work[j] for KV head j [Hkv]. It is computed as for one thread,
  // so it is the same for any number of threads. The sequence's tables are not
  // read.
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
  std::unique_ptr<AttentionGrid> one_thread_;  // used by WorkOnSlots
};

// `shape` has everything but the rows and sequences. Launches run on streams of
// the device.
absl::StatusOr<PreparedAttention> Prepare(Device& device,
                                          const PagedAttentionParams& shape);
// Whether the scratch of one thread has room for one row. Reads only widths,
// counts of runs, dims and windows, so lists and data may be null.
bool Fits(const PagedAttentionParams& shape);

// Divides a step among threads, by host arithmetic. One result serves all
// launches of a step over the same sequences that are divided alike
// (AttentionGrid::DividesAs). INVALID_ARGUMENT for counts below 0.
absl::StatusOr<AttentionStep> DivideStep(
    const PreparedAttention& prepared,
    absl::Span<const AttentionSequence> sequences);
// Reserves room for the weights of each sequence whose only row adds mass,
// until the room is used up. The keys of such sequences without room are scored
// twice.
void PlaceWeights(int64_t num_heads, int64_t most_weights, int64_t page_tokens,
                  absl::Span<AttentionSequence> sequences);
// `step` must be made from the same sequences that `rows` has on the device. It
// is not read while the workspace counts.
absl::Status PagedAttention(Stream& stream, PreparedAttention& prepared,
                            const AttentionRows& rows,
                            const AttentionStep& step, Workspace& workspace);

}  // namespace kvasir::kernels
