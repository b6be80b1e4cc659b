// Describes the rows of one step, for the executor, attention and graphs. Plain
// data.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/device/device_ptr.h"

namespace kvasir::worker {

// Where the tokens of a step lie in one page group. T is the number of tokens,
// B the number of sequences.
struct AttentionBatch {
  // For each token, the slot that it is written to: page * P + slot in the
  // page. [T]
  kernels::DevicePtr<const int64_t> slots;
  // Each token's slot number within its sequence. Layers whose eviction
  // renumbers positions (ResolvedEviction::rolling) use this number as the
  // position for RoPE. [T]
  kernels::DevicePtr<const int64_t> slot_positions;
  // The sequences, prompts first. [B] on the device and on the host. The host's
  // copy is used to divide attention into blocks, and is not read if the
  // workspace is counting().
  kernels::DevicePtr<const kernels::AttentionSequence> sequences;
  absl::Span<const kernels::AttentionSequence> on_host;
  // A second copy of the sequences that decode, on the device. Set only if
  // prompts have a separate launch.
  kernels::DevicePtr<const kernels::AttentionSequence> output_sequences;
};

// The rows that one sequence has in a step. Host memory.
struct SequenceRows {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  bool prompt = false;  // whether the tokens are prompt, not output
};

// The sequences of a step that one launch of attention covers: all, only
// prompts, or only those that decode.
enum class LaunchedRows : uint8_t { kAll, kPrompts, kOutput };

}  // namespace kvasir::worker
