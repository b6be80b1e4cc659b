// route: chooses the experts of each token, and sorts the tokens by expert
// (Shazeer et al., "Outrageously Large Neural Networks", section 2.1). C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

// A token uses the `top_k` experts with the largest logits; of equal logits,
// those with the lower index. NaN counts as the least logit.
//
// Let m be the largest logit and e(i) = exp(logits[t, i] - m). The weight of
// an expert i is e(i) / sum. If `normalize` is true, the sum is over the
// experts that the token uses, otherwise over all experts. The sum starts from
// 0 and adds in ascending order of experts. So the results for a token depend
// only on its own logits. If one of these logits is NaN, all weights of the
// token are NaN.
//
// The pairs of a token and one of its experts then form a list of T * top_k
// rows, sorted by expert, and by token within an expert.
template <template <typename> class Ptr>
struct RouteParamsIn {
  Ptr<const float> logits = nullptr;  // [T, E]
  int64_t num_tokens = 0;             // T
  int64_t num_experts = 0;            // E
  int64_t top_k = 0;                  // K
  bool normalize = false;
  Ptr<int32_t> experts = nullptr;  // [T, K], ascending in each token
  Ptr<float> weights = nullptr;    // [T, K], in the order of `experts`
  Ptr<int32_t> places = nullptr;   // [T, K], the row in the sorted list
  Ptr<int32_t> tokens = nullptr;   // [T * K], the token of each row
  // [E + 1]: the first row of each expert in the list, then the number of rows
  Ptr<int32_t> first_rows = nullptr;
  // [E], or null. The op adds each expert's number of rows to its element.
  Ptr<int64_t> load = nullptr;

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(logits, experts, weights, places, tokens, first_rows, load);
  }
};
using RouteParams = RouteParamsIn<DevicePtr>;
using RouteArgs = RouteParamsIn<LaunchPtr>;

class CpuStream;
// `scratch` has num_experts numbers for each thread. Both functions do the same
// operations; the reference uses one thread.
void RouteReference(const RouteArgs& params, int32_t* scratch,
                    CpuStream& stream);
void RouteCpu(const RouteArgs& params, int32_t* scratch, CpuStream& stream);

}  // namespace kvasir::kernels
