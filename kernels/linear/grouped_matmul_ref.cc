#include "kernels/linear/grouped_matmul.h"

namespace kvasir::kernels {

void GroupedMatmulReference(const GroupedMatmulArgs& params, float* scratch,
                            int64_t*, CpuStream& stream) {
  for (int64_t group = 0; group < params.num_groups; ++group) {
    MatmulReference(params.Group(group, params.first_rows[group],
                                 params.first_rows[group + 1]),
                    scratch, stream);
  }
}

}  // namespace kvasir::kernels
