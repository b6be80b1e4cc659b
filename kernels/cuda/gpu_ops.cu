#include "kernels/cuda/gpu_ops.h"
#include "kernels/op_table/op_table.h"

namespace kvasir::kernels {

DeviceOps GpuOps() { return KVASIR_SIMT_TARGET::Ops(); }

}  // namespace kvasir::kernels
