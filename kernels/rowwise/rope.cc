#include "kernels/rowwise/rope.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "base/status_macros.h"
#include "kernels/device/dispatch.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::kernels {
namespace {

constexpr OpKernels<RopeParams, DevicePtr<float>> kKernels = {
    "rope", &RopeReference, &RopeSimd};

absl::Status WrongPairs(const char* what, int64_t most, int64_t have) {
  return absl::InvalidArgumentError(absl::StrCat(kKernels.op, ": ", what,
                                                 ": must be from 0 to ", most,
                                                 ", but is ", have));
}

// Checks one head. `known` is a list of pairs that has already been checked, or
// null. If the head has this list, its entries are not checked again.
absl::Status CheckHead(const RopeHead& head, const int32_t* known,
                       const RopeTensor& tensor, int64_t angles) {
  if (head.num_pairs < 0) {
    return Refuse(kKernels.op, "pairs", 0, head.num_pairs);
  }
  if (head.begin < 0) {
    return Refuse(kKernels.op, "begin of a head", 0, head.begin);
  }
  if (tensor.row_stride < head.begin + 2 * head.num_pairs) {
    return Refuse(kKernels.op, "row_stride", head.begin + 2 * head.num_pairs,
                  tensor.row_stride);
  }
  if (head.pairs == nullptr) {
    return head.num_pairs > angles
               ? WrongPairs("pairs of a head without a list of angles", angles,
                            head.num_pairs)
               : absl::OkStatus();
  }
  for (int64_t i = 0; head.pairs != known && i < head.num_pairs; ++i) {
    if (head.pairs[i] < 0 || head.pairs[i] >= angles) {
      return WrongPairs("angle of a pair", angles - 1, head.pairs[i]);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTensor(const RopeTensor& tensor,
                         absl::Span<const RopeHead> heads, int64_t rotary_dim) {
  if (tensor.num_heads < 0) {
    return Refuse(kKernels.op, "heads", 0, tensor.num_heads);
  }
  // The previous head's list of pairs. Neighbouring heads often share a list,
  // which is then checked only once.
  const int32_t* known = nullptr;
  for (size_t h = 0; h < heads.size(); ++h) {
    const bool same = h > 0 && heads[h].num_pairs <= heads[h - 1].num_pairs;
    KVASIR_RETURN_IF_ERROR(
        CheckHead(heads[h], same ? known : nullptr, tensor, rotary_dim / 2));
    known = heads[h].pairs;
  }
  if (!heads.empty() || tensor.num_heads == 0) return absl::OkStatus();
  if (tensor.head_dim < rotary_dim) {
    return Refuse(kKernels.op, "head_dim", rotary_dim, tensor.head_dim);
  }
  if (tensor.row_stride < tensor.num_heads * tensor.head_dim) {
    return Refuse(kKernels.op, "row_stride", tensor.num_heads * tensor.head_dim,
                  tensor.row_stride);
  }
  return absl::OkStatus();
}

// Adds the heads and their lists of pairs to the tables; the lists are stored
// one after the other.
absl::Status AddHeads(absl::Span<const RopeHead> heads, DeviceTables* tables,
                      RopeTensor* tensor) {
  if (heads.empty()) return absl::OkStatus();
  // Maps each list to its length. The second loop below replaces the length by
  // the list's offset in `pairs`.
  std::map<const int32_t*, int64_t> lists;
  for (const RopeHead& head : heads) {
    if (head.pairs == nullptr) continue;
    int64_t& length = lists[head.pairs];
    length = std::max(length, head.num_pairs);
  }
  std::vector<int32_t> pairs;
  for (auto& [list, length] : lists) {
    const auto begin = static_cast<int64_t>(pairs.size());
    pairs.insert(pairs.end(), list, list + length);
    length = begin;
  }
  KVASIR_ASSIGN_OR_RETURN(const DevicePtr<const int32_t> device_pairs,
                          tables->Add<int32_t>(pairs));
  std::vector<RopeHead> moved(heads.begin(), heads.end());
  for (RopeHead& head : moved) {
    if (head.pairs == nullptr) continue;
    head.pairs = (device_pairs + lists[head.pairs]).device_address();
  }
  tensor->num_heads = static_cast<int64_t>(heads.size());
  KVASIR_ASSIGN_OR_RETURN(tensor->heads, tables->Add<RopeHead>(moved));
  return absl::OkStatus();
}

}  // namespace

uint64_t RopeStep(double radians_per_position) {
  // Converts the fraction of a turn to an integer in two halves of 32 bits. If
  // rounding gives 2^64, the sum of the halves wraps to 0, while converting
  // 2^64 itself to uint64_t would be undefined.
  constexpr long double kTwoPi = 6.283185307179586476925286766559L;
  long double turns = static_cast<long double>(radians_per_position) / kTwoPi;
  turns -= std::floor(turns);
  const long double scaled = turns * 4294967296.0L;
  const long double high = std::floor(scaled);
  const long double low = std::nearbyint((scaled - high) * 4294967296.0L);
  return (static_cast<uint64_t>(high) << 32) + static_cast<uint64_t>(low);
}

absl::StatusOr<PreparedRope> Prepare(Device& device, const RopeParams& shape,
                                     const RopeTables& tables) {
  KVASIR_RETURN_IF_ERROR(
      CheckActivations(kKernels.op, device.kind(), shape.dtype));
  if (shape.rotary_dim < 2 || shape.rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: rotary_dim must be even and above 0, but is ",
                     shape.rotary_dim));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckTensor(shape.q, tables.q_heads, shape.rotary_dim));
  KVASIR_RETURN_IF_ERROR(
      CheckTensor(shape.k, tables.k_heads, shape.rotary_dim));
  const auto angles = static_cast<int64_t>(tables.steps.size());
  if (shape.steps == nullptr && angles < shape.rotary_dim / 2) {
    return Refuse(kKernels.op, "steps", shape.rotary_dim / 2, angles);
  }
  PreparedRope prepared(&device);
  prepared.params = shape;
  KVASIR_RETURN_IF_ERROR(
      AddHeads(tables.q_heads, &prepared.tables, &prepared.params.q));
  KVASIR_RETURN_IF_ERROR(
      AddHeads(tables.k_heads, &prepared.tables, &prepared.params.k));
  if (shape.steps == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(prepared.params.steps,
                            prepared.tables.Add(tables.steps));
  }
  return prepared;
}

absl::Status Rope(Stream& stream, const PreparedRope& prepared,
                  const RopeRows& rows, Workspace& workspace) {
  if (rows.num_tokens < 0) {
    return Refuse(kKernels.op, "tokens", 0, rows.num_tokens);
  }
  RopeParams params = prepared.params;
  params.q.data = rows.q;
  params.k.data = rows.k;
  params.positions = rows.positions;
  params.num_tokens = rows.num_tokens;
  Workspace::Scope scope(&workspace);
  DevicePtr<float> scratch;  // only for a CPU; a GPU uses shared memory
  if (stream.device() == DeviceKind::kCpu) {
    scratch = workspace.Take<float>(RopeScratch(params.rotary_dim) *
                                    ScratchThreads(stream));
  }
  if (workspace.counting()) return CheckServed(kKernels, stream);
  if (!workspace.status().ok()) return workspace.status();
  return Launch(kKernels, stream, params, scratch);
}

}  // namespace kvasir::kernels
