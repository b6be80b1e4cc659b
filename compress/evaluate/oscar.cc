#include "compress/evaluate/oscar.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/status_macros.h"
#include "compress/evaluate/cache_transforms.h"
#include "compress/oracle/attention_core.h"
#include "compress/oracle/rotation.h"
#include "compress/runtime/for_each_index.h"
#include "compress/tensors/hadamard_tensor.h"

namespace kvasir::compress {
namespace {

using Seen = CacheTransform::Seen;

void Add(const at::Tensor& added, at::Tensor& sum) {
  sum = sum.defined() ? sum + added : added;
}

// Sums up the outer products of each layer's queries and attention outputs in
// one run of the model.
class SumObserver : public LayerObserver {
 public:
  explicit SumObserver(const ReferenceDecoder& decoder)
      : decoder_(decoder),
        sums_(static_cast<size_t>(decoder.spec().num_layers())) {}

  void OnQuery(int64_t layer, const at::Tensor& query) override {
    query_ = query;
    if (!decoder_.program(layer).rotates) return;
    const Rotation rotation =
        decoder_.RotationOf(query.size(1), layer).Slice(query.size(1));
    query_ =
        Rotate(query, {rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1),
                       decoder_.spec().rope.pairing});
  }
  void OnRotatedKey(int64_t /*layer*/, const at::Tensor& key) override {
    key_ = key;
  }
  void OnValue(int64_t layer, const at::Tensor& value) override {
    const model::DecoderSpec& spec = decoder_.spec();
    const double scale =
        spec.score_scale != 0
            ? spec.score_scale
            : 1.0 / std::sqrt(static_cast<double>(spec.head_dim));
    AttentionInputs inputs;
    inputs.query = query_ * scale;
    inputs.key = key_;
    inputs.value = value;
    inputs.sliding_window = decoder_.program(layer).sliding_window;
    inputs.score_cap = spec.score_cap;
    OscarSums& sums = sums_[static_cast<size_t>(layer)];
    sums.query = Products(query_);
    sums.output = Products(CausalAttention(inputs));
  }

  std::vector<OscarSums> Take() { return std::move(sums_); }

 private:
  // Returns the sums of the outer products of `heads` [B, T, Hq, D], per KV
  // head.
  at::Tensor Products(const at::Tensor& heads) const {
    const int64_t kv_heads = decoder_.spec().num_kv_heads;
    const int64_t dim = heads.size(3);
    const at::Tensor rows =
        heads.reshape({-1, kv_heads, heads.size(2) / kv_heads, dim})
            .transpose(0, 1)
            .reshape({kv_heads, -1, dim})
            .to(at::kDouble);
    return at::bmm(rows.transpose(1, 2), rows).cpu();
  }

  const ReferenceDecoder& decoder_;
  std::vector<OscarSums> sums_;
  // The rotated queries and keys of the current layer.
  at::Tensor query_;
  at::Tensor key_;
};

// Returns the numbers 0 .. n - 1 with their bits in reverse order; n is a power
// of two.
at::Tensor ReversedBits(int64_t n) {
  std::vector<int64_t> reversed(static_cast<size_t>(n), 0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t bit = 1; bit < n; bit *= 2) {
      if ((i & bit) != 0) reversed[static_cast<size_t>(i)] += n / (2 * bit);
    }
  }
  return at::tensor(reversed);
}

// Clips the numbers of each row [..., D] as described at OscarCode.
at::Tensor ClipRows(const at::Tensor& rows, double share) {
  const int64_t width = rows.size(-1);
  const auto largest = std::min(
      width - 1, static_cast<int64_t>(share * static_cast<double>(width)));
  if (largest == width - 1) return rows;
  const at::Tensor limit =
      std::get<0>(rows.abs().kthvalue(largest + 1, -1, /*keepdim=*/true));
  return at::minimum(at::maximum(rows, -limit), limit);
}

class Oscar : public CacheTransform {
 public:
  Oscar(std::vector<OscarRotations> by_layer, const OscarCode& code)
      : by_layer_(std::move(by_layer)), code_(code) {}

  absl::StatusOr<Seen> RotatedKey(int64_t layer, const at::Tensor& key,
                                  const at::Tensor&) const override {
    return Code(key, by_layer_[static_cast<size_t>(layer)].key, code_.key_clip);
  }
  absl::StatusOr<Seen> Value(int64_t layer,
                             const at::Tensor& value) const override {
    return Code(value, by_layer_[static_cast<size_t>(layer)].value,
                code_.value_clip);
  }

 private:
  absl::StatusOr<Seen> Code(const at::Tensor& heads, const at::Tensor& rotation,
                            double clip) const {
    const at::Tensor turn = rotation.to(heads.options());
    at::Tensor turned = at::einsum("bthd,hde->bthe", {heads, turn});
    if (code_.bits != kExactBits) {
      KVASIR_ASSIGN_OR_RETURN(
          turned, CodeRange(ClipRows(turned, clip), code_.bits, code_.group));
    }
    return Seen{at::einsum("bthe,hde->bthd", {turned, turn}), 0};
  }

  std::vector<OscarRotations> by_layer_;
  OscarCode code_;
};

}  // namespace

absl::StatusOr<std::vector<OscarSums>> MeasureOscarSums(
    const ReferenceDecoder& decoder, const at::Tensor& text_ids, int threads) {
  const int64_t sequences = text_ids.size(0);
  std::vector<OscarSums> sums(static_cast<size_t>(decoder.spec().num_layers()));
  // The sums of the sequences are added in the order of the sequences, so that
  // the result does not depend on the number of threads.
  for (int64_t first = 0; first < sequences; first += threads) {
    const int64_t count = std::min<int64_t>(threads, sequences - first);
    std::vector<std::vector<OscarSums>> found(static_cast<size_t>(count));
    std::vector<absl::Status> status(static_cast<size_t>(count));
    ForEachIndex(count, threads, [&](int64_t i) {
      const at::NoGradGuard no_grad;
      SumObserver observer(decoder);
      status[static_cast<size_t>(i)] =
          decoder
              .LastHidden(text_ids.slice(0, first + i, first + i + 1),
                          {.observer = &observer})
              .status();
      found[static_cast<size_t>(i)] = observer.Take();
    });
    for (int64_t i = 0; i < count; ++i) {
      KVASIR_RETURN_IF_ERROR(status[static_cast<size_t>(i)]);
      for (size_t layer = 0; layer < sums.size(); ++layer) {
        Add(found[static_cast<size_t>(i)][layer].query, sums[layer].query);
        Add(found[static_cast<size_t>(i)][layer].output, sums[layer].output);
      }
    }
  }
  return sums;
}

at::Tensor OscarRotation(const at::Tensor& sums) {
  const int64_t width = sums.size(-1);
  // Eigenvalues, and so the columns of eigenvectors, are ascending.
  const at::Tensor basis = std::get<1>(at::linalg_eigh(sums)).flip({-1});
  // Reversing the bits twice changes nothing. So the number of a channel, with
  // its bits reversed, is the number of its column.
  return at::matmul(basis, HadamardTensor(width))
      .index_select(-1, ReversedBits(width));
}

std::unique_ptr<CacheTransform> MakeOscar(std::vector<OscarRotations> by_layer,
                                          const OscarCode& code) {
  return std::make_unique<Oscar>(std::move(by_layer), code);
}

}  // namespace kvasir::compress
