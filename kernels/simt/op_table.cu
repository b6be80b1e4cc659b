#include "kernels/simt/op_table.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

DeviceOps Ops() {
  static const DeviceOp ops[] = {
      MakeDeviceOp<EmbeddingParams>("embedding", &EmbeddingCuda),
      MakeDeviceOp<NormParams>("norm", &NormCuda),
      MakeDeviceOp<AttentionLaunch, DevicePtr<float>>("paged_attention",
                                                      &PagedAttentionCuda),
      MakeDeviceOp<RopeParams, DevicePtr<float>>("rope", &RopeCuda),
      MakeDeviceOp<SiluMulParams>("silu_mul", &SiluMulCuda),
  };
  return {ops, sizeof(ops) / sizeof(ops[0])};
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
