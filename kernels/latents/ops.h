// Host functions of the ops that store, rotate, lift and copy latents.
// kernels/README.md has the contract of every op.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/latents/copy_pages.h"
#include "kernels/latents/hadamard.h"
#include "kernels/latents/hadamard_tables.h"
#include "kernels/latents/key_bias.h"
#include "kernels/latents/kv_append.h"
#include "kernels/latents/lift.h"

namespace kvasir::kernels {

using PreparedLift = Prepared<LiftParams>;
using PreparedComplexLift = Prepared<ComplexLiftParams>;
using PreparedHadamard = Prepared<HadamardParams>;
using PreparedKeyBias = Prepared<KeyBiasParams>;
using PreparedKvAppend = Prepared<KvAppendParams>;

// The columns at which the input and the output of each query head begin.
struct LiftColumns {
  absl::Span<const int64_t> in;
  absl::Span<const int64_t> out;
};

// Prepares lift with one matrix per KV head. The caller sets the strides
// in `shape`.
absl::StatusOr<PreparedLift> Prepare(Device& device, const LiftParams& shape,
                                     absl::Span<const PackedMatrix> matrices,
                                     const LiftColumns& columns);
absl::Status Lift(Stream& stream, const PreparedLift& prepared,
                  const LiftRows& rows, Workspace& workspace);

// Prepares complex_lift with one set of channels per KV head. The caller sets
// the strides, the number of pairs and the pairings in `shape`.
absl::StatusOr<PreparedComplexLift> Prepare(
    Device& device, const ComplexLiftParams& shape,
    absl::Span<const ComplexChannels> channels, const LiftColumns& columns);
absl::Status ComplexLift(Stream& stream, const PreparedComplexLift& prepared,
                         const LiftRows& rows, Workspace& workspace);

// A latent of `width` channels that begins at `column` of a row.
struct HadamardPlace {
  int64_t width = 0;
  int64_t column = 0;
};
// Prepares hadamard for latents at these places. The caller sets the strides
// and `transposed` in `shape`. `shared` must outlive the result.
absl::StatusOr<PreparedHadamard> Prepare(Device& device,
                                         const HadamardParams& shape,
                                         absl::Span<const HadamardPlace> places,
                                         HadamardTables* shared);
absl::Status Hadamard(Stream& stream, const PreparedHadamard& prepared,
                      const HadamardRows& rows, Workspace& workspace);

struct KvAppendShape {
  int64_t row_stride = 0;      // in elements
  int64_t page_tokens = 0;     // P
  DType dtype = DType::kF32;   // type of activations
  SlotMetadata metadata = {};  // metadata of the layer, if the layer may evict
  // If set, each entry of `slots` is the byte offset of a page in the parts'
  // arenas, so a token may be stored at any address. page_tokens must be 1, and
  // there must be no metadata.
  bool slots_are_bytes = false;
};
// Prepares kv_append for these parts. Their groups, runs and units are in host
// memory and are copied.
absl::StatusOr<PreparedKvAppend> Prepare(Device& device,
                                         const KvAppendShape& shape,
                                         absl::Span<const KvAppendPart> parts);
absl::Status KvAppend(Stream& stream, const PreparedKvAppend& prepared,
                      const KvAppendRows& rows, Workspace& workspace);

// Tables that Prepare copies from host memory to the device. The columns and
// pairs are those of KeyBiasParams.
struct KeyBiasTables {
  absl::Span<const int64_t> key_column;    // [Hkv]
  absl::Span<const int64_t> query_column;  // [Hq]
  absl::Span<const int64_t> out_column;    // [Hq]
  absl::Span<const KeyBiasPair> pairs;     // [Hkv, tile_pairs + exact_pairs]
};
// The caller sets the stride, the type and the numbers of heads and pairs
// in `shape`.
absl::StatusOr<PreparedKeyBias> Prepare(Device& device,
                                        const KeyBiasParams& shape,
                                        const KeyBiasTables& tables);
absl::Status KeyBias(Stream& stream, const PreparedKeyBias& prepared,
                     const KeyBiasRows& rows, Workspace& workspace);

absl::Status CopyPages(Stream& stream, const CopyPagesParams& params,
                       Workspace& workspace);

}  // namespace kvasir::kernels
