// Every op of the engine. Each is enqueued on a stream with plain parameters
// and caller-owned workspace, and returns nothing that the host reads
// (read_back.h does). What an op computes stands beside its parameters.
//
// All of them, in addition:
//   Errors: INVALID_ARGUMENT for sizes that have no meaning (naming op, value
//     and limit), RESOURCE_EXHAUSTED when the workspace is too small,
//     UNIMPLEMENTED for a device that the build has no back end for. Nothing is
//     enqueued then.
//   Counting: with Workspace::Counting() only the workspace is counted; data
//     pointers may be null.
//   Empty: zero rows are fine and do nothing.
//   Indices are 64-bit throughout.
#pragma once

#include "absl/status/status.h"
#include "kernels/activation.h"
#include "kernels/copy_pages.h"
#include "kernels/embedding.h"
#include "kernels/hadamard.h"
#include "kernels/kv_append.h"
#include "kernels/layer_norm.h"
#include "kernels/lift.h"
#include "kernels/log_softmax.h"
#include "kernels/matmul.h"
#include "kernels/paged_attention.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/rows.h"
#include "kernels/sample.h"
#include "kernels/silu_mul.h"
#include "kernels/stream.h"
#include "kernels/workspace.h"

namespace kvasir::kernels {

absl::Status Embedding(Stream& stream, const EmbeddingParams& params,
                       Workspace& workspace);
absl::Status RmsNorm(Stream& stream, const RmsNormParams& params,
                     Workspace& workspace);
absl::Status LayerNorm(Stream& stream, const LayerNormParams& params,
                       Workspace& workspace);
absl::Status Matmul(Stream& stream, const MatmulParams& params,
                    Workspace& workspace);
absl::Status Rope(Stream& stream, const RopeParams& params,
                  Workspace& workspace);
absl::Status Lift(Stream& stream, const LiftParams& params,
                  Workspace& workspace);
absl::Status ComplexLift(Stream& stream, const ComplexLiftParams& params,
                         Workspace& workspace);
absl::Status Hadamard(Stream& stream, const HadamardParams& params,
                      Workspace& workspace);
absl::Status SiluMul(Stream& stream, const SiluMulParams& params,
                     Workspace& workspace);
absl::Status Activation(Stream& stream, const ActivationParams& params,
                        Workspace& workspace);
absl::Status AddRows(Stream& stream, const AddRowsParams& params,
                     Workspace& workspace);
absl::Status GatherRows(Stream& stream, const GatherRowsParams& params,
                        Workspace& workspace);
absl::Status KvAppend(Stream& stream, const KvAppendParams& params,
                      Workspace& workspace);
absl::Status PagedAttention(Stream& stream, const PagedAttentionParams& params,
                            Workspace& workspace);
absl::Status LogSoftmax(Stream& stream, const LogSoftmaxParams& params,
                        Workspace& workspace);
absl::Status Sample(Stream& stream, const SampleParams& params,
                    Workspace& workspace);
absl::Status CountTokens(Stream& stream, const CountTokensParams& params,
                         Workspace& workspace);
absl::Status CopyPages(Stream& stream, const CopyPagesParams& params,
                       Workspace& workspace);

}  // namespace kvasir::kernels
