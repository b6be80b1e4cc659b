#include "kernels/simt/op_table.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

DeviceOps Ops() {
  static const DeviceOp ops[] = {
      MakeDeviceOp<CountTokensParams>("count_tokens", &CountTokensCuda),
      MakeDeviceOp<EmbeddingParams>("embedding", &EmbeddingCuda),
      MakeDeviceOp<LogSoftmaxParams>("log_softmax", &LogSoftmaxCuda),
      MakeDeviceOp<MatmulParams, DevicePtr<float>>("matmul", &MatmulCuda),
      MakeDeviceOp<NormParams>("norm", &NormCuda),
      MakeDeviceOp<RopeParams, DevicePtr<float>>("rope", &RopeCuda),
      MakeDeviceOp<SampleParams, DevicePtr<void>>("sample", &SampleCuda),
      MakeDeviceOp<SiluMulParams>("silu_mul", &SiluMulCuda),
  };
  return {ops, sizeof(ops) / sizeof(ops[0])};
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
