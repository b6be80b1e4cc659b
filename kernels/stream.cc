#include "kernels/stream.h"

namespace kvasir::kernels {

std::string CpuTargetName() { return "reference"; }

}  // namespace kvasir::kernels
