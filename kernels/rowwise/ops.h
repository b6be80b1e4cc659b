// Ops on rows of activations. kernels/README.md has the contract that all ops
// follow.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/rowwise/activation.h"
#include "kernels/rowwise/embedding.h"
#include "kernels/rowwise/norm.h"
#include "kernels/rowwise/rope.h"
#include "kernels/rowwise/rows.h"
#include "kernels/rowwise/silu_mul.h"

namespace kvasir::kernels {

absl::Status Embedding(Stream& stream, const EmbeddingParams& params,
                       Workspace& workspace);
absl::Status Norm(Stream& stream, const NormParams& params,
                  Workspace& workspace);
absl::Status SiluMul(Stream& stream, const SiluMulParams& params,
                     Workspace& workspace);
absl::Status Activation(Stream& stream, const ActivationParams& params,
                        Workspace& workspace);
absl::Status AddRows(Stream& stream, const AddRowsParams& params,
                     Workspace& workspace);
absl::Status SumRows(Stream& stream, const SumRowsParams& params,
                     Workspace& workspace);
absl::Status GatherRows(Stream& stream, const GatherRowsParams& params,
                        Workspace& workspace);

using PreparedRope = Prepared<RopeParams>;
// Tables that Prepare copies from host memory to the device.
struct RopeTables {
  // empty: in all heads, pair f uses angle f
  absl::Span<const RopeHead> q_heads;
  absl::Span<const RopeHead> k_heads;
  // [rotary_dim / 2]: each angle per position, as RopeStep returns it. Ignored
  // if `shape.steps` already points to such a table on the device.
  absl::Span<const uint64_t> steps;
};
// `shape` must have all fields of RopeParams except rows and heads. Returns
// INVALID_ARGUMENT if a head does not fit into a row, or if a pair's angle is
// not below rotary_dim / 2.
absl::StatusOr<PreparedRope> Prepare(Device& device, const RopeParams& shape,
                                     const RopeTables& tables);
absl::Status Rope(Stream& stream, const PreparedRope& prepared,
                  const RopeRows& rows, Workspace& workspace);

}  // namespace kvasir::kernels
