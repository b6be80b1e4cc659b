#include "compress/calibrate/shrunk_information.h"

namespace kvasir::compress {

at::Tensor Shrunk(const at::Tensor& information, double epsilon) {
  at::Tensor shrunk = information.to(at::kDouble, /*non_blocking=*/false,
                                     /*copy=*/true);
  at::Tensor diagonal = shrunk.diagonal();
  diagonal += epsilon * diagonal.mean();
  return shrunk;
}

}  // namespace kvasir::compress
