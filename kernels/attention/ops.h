// The op paged_attention: attention over latents that are stored in pages of
// the KV cache. kernels/README.md has the rules that every op follows.
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

// The attention of one layer, with everything that is constant after load.
// Owns: the parts and the grid by which the host divides launches. The arrays
// that the parts point to (groups, runs, heads, rotation pairs) belong to the
// caller and must outlive this object. Movable.
// Threads: only one thread at a time may use it for a launch.
class PreparedAttention {
 public:
  PreparedAttention(PreparedAttention&&) noexcept;
  PreparedAttention& operator=(PreparedAttention&&) noexcept;
  ~PreparedAttention();

  const AttentionGrid& grid() const { return *grid_; }
  const AttentionKernels& kernels() const;

  // Returns the cost of rebuilding the keys or lifting the values of a
  // sequence's slots in one launch. head_work[j] is the cost of one slot for KV
  // head j [Hkv]. The result is for a launch on one thread, so it does not
  // depend on the real number of threads. The sequence's block table and
  // positions are not read.
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
  // A grid for one thread, which WorkOnSlots reads.
  std::unique_ptr<AttentionGrid> one_thread_;
};

// `shape` sets all parameters except q, out and the sequences, which change
// with every step. Launches must use streams of `device`.
absl::StatusOr<PreparedAttention> Prepare(Device& device,
                                          const PagedAttentionParams& shape);
// Returns whether the scratch of one thread has room for one row of q. Reads
// only sizes (widths, counts of runs, dims and windows), so the pointers to
// data in `shape` may be null.
bool Fits(const PagedAttentionParams& shape);

// Decides on the host how a step is divided among threads. Layers of a step can
// share one result if they have the same sequences and if
// AttentionGrid::DividesAs holds for their grids. Returns INVALID_ARGUMENT if a
// sequence has a negative count or more than kAttentionMostSlots slots.
absl::StatusOr<AttentionStep> DivideStep(
    const PreparedAttention& prepared,
    absl::Span<const AttentionSequence> sequences);
// Sets weights_at of all sequences, for layers with attention mass. A sequence
// of one row that adds mass gets memory to keep the row's attention weights,
// until the `most_weights` floats are used up. For other sequences that add
// mass, the keys are scored a second time instead.
void PlaceWeights(int64_t num_heads, int64_t most_weights, int64_t page_tokens,
                  absl::Span<AttentionSequence> sequences);
// `step` must come from DivideStep for the same sequences that `rows` has on
// the device. It is not read if the workspace is only counting bytes.
absl::Status PagedAttention(Stream& stream, PreparedAttention& prepared,
                            const AttentionRows& rows,
                            const AttentionStep& step, Workspace& workspace);

}  // namespace kvasir::kernels
