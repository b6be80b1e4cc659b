#include "kernels/experts/route.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/device/dispatch.h"
#include "kernels/device/parallel.h"
#include "kernels/experts/ops.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<RouteParams, DevicePtr<int32_t>> kKernels = {
    "route", &RouteReference, &RouteCpu};

// NaN counts as the least logit, because a sort needs a strict order.
float Key(float logit) {
  return logit == logit ? logit : -std::numeric_limits<float>::infinity();
}

// Writes experts and weights of one token. `order` is scratch for num_experts
// numbers.
void RouteToken(const RouteArgs& params, int64_t token, int32_t* order) {
  const float* const logits = params.logits + token * params.num_experts;
  int32_t* const experts = params.experts + token * params.top_k;
  float* const weights = params.weights + token * params.top_k;
  const auto before = [logits](int32_t a, int32_t b) {
    const float of_a = Key(logits[a]);
    const float of_b = Key(logits[b]);
    return of_a != of_b ? of_a > of_b : a < b;
  };
  std::iota(order, order + params.num_experts, 0);
  std::nth_element(order, order + params.top_k - 1, order + params.num_experts,
                   before);
  std::copy_n(order, params.top_k, experts);
  std::sort(experts, experts + params.top_k);

  float largest = logits[0];
  bool is_nan = false;
  for (int64_t i = 0; i < params.num_experts; ++i) {
    largest = std::max(largest, Key(logits[i]));
    is_nan |= logits[i] != logits[i];
  }
  if (is_nan) {
    std::fill_n(weights, params.top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  float sum = 0.0f;
  for (int64_t j = 0; j < params.top_k; ++j) {
    weights[j] = Exp(logits[experts[j]] - largest);
    sum += weights[j];
  }
  if (!params.normalize) {
    sum = 0.0f;
    for (int64_t i = 0; i < params.num_experts; ++i) {
      sum += Exp(logits[i] - largest);
    }
  }
  for (int64_t j = 0; j < params.top_k; ++j) weights[j] /= sum;
}

// Sorts the rows by expert (counting sort).
void SortByExpert(const RouteArgs& params) {
  const int64_t rows = params.num_tokens * params.top_k;
  int32_t* const first = params.first_rows;
  std::fill_n(first, params.num_experts + 1, 0);
  for (int64_t i = 0; i < rows; ++i) ++first[params.experts[i] + 1];
  for (int64_t e = 0; e < params.num_experts; ++e) {
    if (params.load != nullptr) params.load[e] += first[e + 1];
    first[e + 1] += first[e];
  }
  // During the loop, first[e] is the next free row of expert e. After it,
  // first[e] is the first row of expert e + 1, so all entries are moved by
  // one place.
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t row = first[params.experts[i]]++;
    params.places[i] = row;
    params.tokens[row] = static_cast<int32_t>(i / params.top_k);
  }
  std::copy_backward(first, first + params.num_experts,
                     first + params.num_experts + 1);
  first[0] = 0;
}

}  // namespace

absl::Status Route(Stream& stream, const RouteParams& params,
                   Workspace& workspace) {
  if (params.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, params.num_tokens);
  }
  if (params.num_experts < 1) {
    return Refuse(kKernels.op, "experts", 1, params.num_experts);
  }
  if (params.top_k < 1) return Refuse(kKernels.op, "top_k", 1, params.top_k);
  if (params.top_k > params.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": top_k: must be at most the number of experts, ",
        params.num_experts, ", but is ", params.top_k));
  }
  if (params.num_tokens > std::numeric_limits<int32_t>::max() / params.top_k) {
    return absl::InvalidArgumentError(absl::StrCat(
        kKernels.op, ": there must be fewer than 2^31 rows, but there are ",
        params.num_tokens, " tokens with ", params.top_k, " experts each"));
  }
  Workspace::Scope scope(&workspace);
  DevicePtr<int32_t> scratch;  // stays null on a GPU
  if (stream.device() == DeviceKind::kCpu) {
    scratch =
        workspace.Take<int32_t>(params.num_experts * ScratchThreads(stream));
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kKernels, stream, params, scratch);
}

void RouteReference(const RouteArgs& params, int32_t* scratch, CpuStream&) {
  for (int64_t t = 0; t < params.num_tokens; ++t) {
    RouteToken(params, t, scratch);
  }
  SortByExpert(params);
}

void RouteCpu(const RouteArgs& params, int32_t* scratch, CpuStream& stream) {
  // Each logit counts as 16 numbers for ForRows, because a comparison that the
  // CPU predicts wrongly takes about as long as copying 16 numbers.
  ForRows(stream, params.num_tokens, 16 * params.num_experts,
          [&](int64_t begin, int64_t end, int thread) {
            for (int64_t t = begin; t < end; ++t) {
              RouteToken(params, t, scratch + thread * params.num_experts);
            }
          });
  SortByExpert(params);
}

}  // namespace kvasir::kernels
