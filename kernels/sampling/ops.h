// Ops on rows of logits. kernels/README.md has the contract that all ops
// follow.
#pragma once

#include "absl/status/status.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/sampling/log_softmax.h"
#include "kernels/sampling/sample.h"

namespace kvasir::kernels {

absl::Status LogSoftmax(Stream& stream, const LogSoftmaxParams& params,
                        Workspace& workspace);
absl::Status Sample(Stream& stream, const SampleParams& params,
                    Workspace& workspace);
absl::Status CountTokens(Stream& stream, const CountTokensParams& params,
                         Workspace& workspace);

// Returns UNIMPLEMENTED if `device` is a GPU and a row has more logits than it
// supports.
absl::Status CheckDeviceLogits(const char* op, DeviceKind device,
                               int64_t count);

}  // namespace kvasir::kernels
