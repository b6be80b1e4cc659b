// Ops on rows of activations. The contract of every op: kernels/README.md.
#pragma once

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/rowwise/activation.h"
#include "kernels/rowwise/embedding.h"
#include "kernels/rowwise/layer_norm.h"
#include "kernels/rowwise/rms_norm.h"
#include "kernels/rowwise/rope.h"
#include "kernels/rowwise/rows.h"
#include "kernels/rowwise/silu_mul.h"

namespace kvasir::kernels {

absl::Status Embedding(Stream& stream, const EmbeddingParams& params,
                       Workspace& workspace);
absl::Status RmsNorm(Stream& stream, const RmsNormParams& params,
                     Workspace& workspace);
absl::Status LayerNorm(Stream& stream, const LayerNormParams& params,
                       Workspace& workspace);
absl::Status Rope(Stream& stream, const RopeParams& params,
                  Workspace& workspace);
absl::Status SiluMul(Stream& stream, const SiluMulParams& params,
                     Workspace& workspace);
absl::Status Activation(Stream& stream, const ActivationParams& params,
                        Workspace& workspace);
absl::Status AddRows(Stream& stream, const AddRowsParams& params,
                     Workspace& workspace);
absl::Status GatherRows(Stream& stream, const GatherRowsParams& params,
                        Workspace& workspace);

}  // namespace kvasir::kernels
