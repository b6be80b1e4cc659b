#include "kernels/rowwise/rope.h"

#include <cmath>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<const RopeParams&, float*> kKernels = {
    "rope", &RopeReference, &RopeSimd};

absl::Status WrongPairs(const char* what, int64_t most, int64_t have) {
  return absl::InvalidArgumentError(absl::StrCat(
      kKernels.op, ": ", what, ": want 0 to ", most, ", have ", have));
}

// `known`: a list that was looked at already.
absl::Status CheckHead(const RopeHead& head, const int32_t* known,
                       const RopeTensor& tensor, int64_t angles) {
  if (head.num_pairs < 0) {
    return Refuse(kKernels.op, "pairs", 0, head.num_pairs);
  }
  if (head.begin < 0) return Refuse(kKernels.op, "begin", 0, head.begin);
  if (tensor.row_stride < head.begin + 2 * head.num_pairs) {
    return Refuse(kKernels.op, "row_stride", head.begin + 2 * head.num_pairs,
                  tensor.row_stride);
  }
  if (head.pairs == nullptr) {
    return head.num_pairs > angles
               ? WrongPairs("pairs without a list", angles, head.num_pairs)
               : absl::OkStatus();
  }
  for (int64_t i = 0; head.pairs != known && i < head.num_pairs; ++i) {
    if (head.pairs[i] < 0 || head.pairs[i] >= angles) {
      return WrongPairs("angle of a pair", angles - 1, head.pairs[i]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHeads(const RopeTensor& tensor, int64_t angles) {
  for (int64_t h = 0; h < tensor.num_heads; ++h) {
    const RopeHead& head = tensor.heads[h];
    // Heads that share a list follow each other.
    const bool same = h > 0 && head.num_pairs <= tensor.heads[h - 1].num_pairs;
    KVASIR_RETURN_IF_ERROR(CheckHead(
        head, same ? tensor.heads[h - 1].pairs : nullptr, tensor, angles));
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(const RopeTensor& tensor, int64_t rotary_dim) {
  if (tensor.num_heads < 0) {
    return Refuse(kKernels.op, "heads", 0, tensor.num_heads);
  }
  if (tensor.num_heads == 0) return absl::OkStatus();
  if (tensor.heads != nullptr) return CheckHeads(tensor, rotary_dim / 2);
  if (tensor.head_dim < rotary_dim) {
    return Refuse(kKernels.op, "head_dim", rotary_dim, tensor.head_dim);
  }
  if (tensor.row_stride < tensor.num_heads * tensor.head_dim) {
    return Refuse(kKernels.op, "row_stride", tensor.num_heads * tensor.head_dim,
                  tensor.row_stride);
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t RopeStep(double radians_per_position) {
  // The fraction of a turn as two exact halves of 32 bits: a double's 53 bits
  // times 2^64 do not fit an integer conversion.
  constexpr long double kTwoPi = 6.283185307179586476925286766559L;
  long double turns = static_cast<long double>(radians_per_position) / kTwoPi;
  turns -= std::floor(turns);
  const long double scaled = turns * 4294967296.0L;
  const long double high = std::floor(scaled);
  const long double low = std::nearbyint((scaled - high) * 4294967296.0L);
  return (static_cast<uint64_t>(high) << 32) + static_cast<uint64_t>(low);
}

absl::Status Rope(Stream& stream, const RopeParams& params,
                  Workspace& workspace) {
  if (params.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, params.num_tokens);
  }
  if (params.rotary_dim < 2 || params.rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: rotary_dim: want an even number above 0, have ",
                     params.rotary_dim));
  }
  KVASIR_RETURN_IF_ERROR(CheckTensor(params.q, params.rotary_dim));
  KVASIR_RETURN_IF_ERROR(CheckTensor(params.k, params.rotary_dim));
  Workspace::Scope scope(&workspace);
  float* scratch =
      workspace.Take<float>(RopeScratch(params) * ScratchThreads(stream));
  if (workspace.counting()) return absl::OkStatus();
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
