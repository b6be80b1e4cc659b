#include "kernels/simt/op_table.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

DeviceOps Ops() {
  static const DeviceOp ops[] = {
      MakeDeviceOp<ComplexLiftParams>("complex_lift", &ComplexLiftCuda),
      MakeDeviceOp<CopyPagesParams>("copy_pages", &CopyPagesCuda),
      MakeDeviceOp<EmbeddingParams>("embedding", &EmbeddingCuda),
      MakeDeviceOp<HadamardParams, DevicePtr<float>>("hadamard", &HadamardCuda),
      MakeDeviceOp<KvAppendParams, DevicePtr<float>>("kv_append",
                                                     &KvAppendCuda),
      MakeDeviceOp<LiftParams, DevicePtr<float>>("lift", &LiftCuda),
      MakeDeviceOp<NormParams>("norm", &NormCuda),
      MakeDeviceOp<RopeParams, DevicePtr<float>>("rope", &RopeCuda),
      MakeDeviceOp<SiluMulParams>("silu_mul", &SiluMulCuda),
  };
  return {ops, sizeof(ops) / sizeof(ops[0])};
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
