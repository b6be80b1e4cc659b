// mix_experts: adds up the outputs of the experts of each token. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"
#include "kernels/device/dtype.h"

namespace kvasir::kernels {

// out[t, :] = sum over j of weights[t, j] * y[places[t, j], :], added in
// the order of j. Each product and each sum is rounded to float32.
// `weights` and `places` are outputs of route (route.h), so experts are
// added in ascending order.
template <template <typename> class Ptr>
struct MixExpertsParamsIn {
  Ptr<const float> y = nullptr;         // [T * K, N]
  Ptr<const float> weights = nullptr;   // [T, K]
  Ptr<const int32_t> places = nullptr;  // [T, K]
  Ptr<float> out = nullptr;             // [T, N]
  int64_t num_tokens = 0;               // T
  int64_t top_k = 0;                    // K
  int64_t columns = 0;                  // N
  DType dtype = DType::kF32;            // the type of y and out

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(y, weights, places, out);
  }
};
using MixExpertsParams = MixExpertsParamsIn<DevicePtr>;
using MixExpertsArgs = MixExpertsParamsIn<LaunchPtr>;

class CpuStream;
// Both functions do the same operations; the reference uses one thread.
void MixExpertsReference(const MixExpertsArgs& params, CpuStream& stream);
void MixExpertsCpu(const MixExpertsArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
