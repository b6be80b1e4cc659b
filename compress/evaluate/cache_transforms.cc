#include "compress/evaluate/cache_transforms.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "compress/oracle/attention_core.h"
#include "compress/oracle/fake_quant.h"

namespace kvasir::compress {
namespace {

using Seen = CacheTransform::Seen;

kvasir::v1::Codec BitsCodec(int64_t bits) {
  kvasir::v1::Codec codec;
  codec.mutable_bits()->add_schedule(static_cast<uint32_t>(bits));
  codec.set_param_dtype(kvasir::v1::F16);
  return codec;
}

// --------------------------------------------- rows coded one by one

class CodedRows : public CacheTransform {
 public:
  CodedRows(RowCode key, RowCode value)
      : key_(std::move(key)), value_(std::move(value)) {}
  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor&) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, key_(key));
    return Seen{std::move(coded), 0};
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, value_(value));
    return Seen{std::move(coded), 0};
  }

 private:
  RowCode key_;
  RowCode value_;
};

// ----------------------------------------------------------------------- KIVI

class Kivi : public CacheTransform {
 public:
  Kivi(int64_t bits, int64_t group, int64_t residual)
      : bits_(bits), group_(group), residual_(residual) {}

  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor&) const override {
    const int64_t whole = key.size(1) / group_ * group_;
    if (whole == 0) return Seen{key, residual_};
    // Shape [B, blocks, H, D, group]: each row holds the numbers of one channel
    // in one block of tokens.
    const at::Tensor blocks = key.slice(1, 0, whole)
                                  .reshape({key.size(0), whole / group_, group_,
                                            key.size(2), key.size(3)})
                                  .permute({0, 1, 3, 4, 2});
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor coded, CodeRange(blocks, bits_));
    const at::Tensor old =
        coded.permute({0, 1, 4, 2, 3})
            .reshape({key.size(0), whole, key.size(2), key.size(3)});
    return Seen{at::cat({old, key.slice(1, whole)}, 1), residual_};
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRange(value, bits_, group_));
    return Seen{std::move(coded), residual_};
  }

 private:
  int64_t bits_;
  int64_t group_;
  int64_t residual_;
};

// ---------------------------------------------------------------- per channel

// Finds the minimum and maximum of each key channel on the calibration text.
class KeyRanges : public LayerObserver {
 public:
  KeyRanges(int64_t num_layers, bool before_rotation)
      : before_(before_rotation),
        low_(static_cast<size_t>(num_layers)),
        high_(static_cast<size_t>(num_layers)) {}

  void OnKey(int64_t layer, const at::Tensor& key) override {
    if (before_) Add(layer, key);
  }
  void OnRotatedKey(int64_t layer, const at::Tensor& key) override {
    if (!before_) Add(layer, key);
  }
  StaticRange Range(int64_t layer, int64_t bits) const {
    const auto at = static_cast<size_t>(layer);
    const double levels = static_cast<double>((1 << bits) - 1);
    return {low_[at], (high_[at] - low_[at]) / levels};
  }

 private:
  void Add(int64_t layer, const at::Tensor& key) {
    const auto at = static_cast<size_t>(layer);
    const at::Tensor rows = key.reshape({-1, key.size(2) * key.size(3)});
    const at::Tensor low = rows.amin(0).cpu();
    const at::Tensor high = rows.amax(0).cpu();
    low_[at] = low_[at].defined() ? at::minimum(low_[at], low) : low;
    high_[at] = high_[at].defined() ? at::maximum(high_[at], high) : high;
  }

  bool before_;
  std::vector<at::Tensor> low_;  // the minimum of each channel, [Hkv * D]
  std::vector<at::Tensor> high_;
};

class PerChannel : public CacheTransform {
 public:
  PerChannel(bool before_rotation, LatentCodec codec,
             std::vector<StaticRange> ranges, int64_t value_bits)
      : before_(before_rotation),
        codec_(std::move(codec)),
        ranges_(std::move(ranges)),
        value_bits_(value_bits) {}

  absl::StatusOr<Seen> Key(int64_t layer,
                           const at::Tensor& key) const override {
    if (!before_) return Seen{key, 0};
    return Code(layer, key);
  }
  absl::StatusOr<Seen> RotatedKey(int64_t layer, const at::Tensor& key,
                                  const at::Tensor&) const override {
    if (before_) return Seen{key, 0};
    return Code(layer, key);
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRange(value, value_bits_));
    return Seen{std::move(coded), 0};
  }

 private:
  absl::StatusOr<Seen> Code(int64_t layer, const at::Tensor& key) const {
    const at::Tensor rows = key.reshape({key.size(0), key.size(1), -1});
    KVASIR_ASSIGN_OR_RETURN(
        const CodedLatent coded,
        CodeLatent(codec_, rows,
                   {.range = &ranges_[static_cast<size_t>(layer)]}));
    return Seen{.values = coded.values.view_as(key),
                .codes = rows.numel(),
                .clamped = coded.num_clamped};
  }

  bool before_;
  LatentCodec codec_;
  std::vector<StaticRange> ranges_;
  int64_t value_bits_;
};

// ---------------------------------------------------------------------- ThinK

class Think : public CacheTransform {
 public:
  Think(int64_t kept_channels, int64_t key_bits, int64_t value_bits)
      : kept_(kept_channels), key_bits_(key_bits), value_bits_(value_bits) {}

  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor& query) const override {
    // q_c and k_c are channel c of all queries and keys. The channel's score is
    // |q_c k_cT| = |q_c| |k_c|, summed over the query heads of a KV head.
    const int64_t share = query.size(2) / key.size(2);
    const at::Tensor query_norm =
        query.norm(2, {1})
            .view({key.size(0), key.size(2), share, key.size(3)})
            .sum(2);
    const at::Tensor score = query_norm * key.norm(2, {1});  // [B, Hkv, D]
    const at::Tensor kept = std::get<0>(
        // The kept channels, ascending.
        std::get<1>(score.topk(kept_, -1)).sort(-1));
    const at::Tensor index = kept.unsqueeze(1).expand(
        {key.size(0), key.size(1), key.size(2), kept_});
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor coded,
                            CodeRange(key.gather(-1, index), key_bits_));
    return Seen{at::zeros_like(key).scatter(-1, index, coded), 0};
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRange(value, value_bits_));
    return Seen{std::move(coded), 0};
  }

 private:
  int64_t kept_;
  int64_t key_bits_;
  int64_t value_bits_;
};

// ------------------------------------------------------------------- low rank

class LowRankKeys : public CacheTransform {
 public:
  explicit LowRankKeys(int64_t rank) : rank_(rank) {}

  // Returns the best approximation of each sequence's keys [T, Hkv * D]: their
  // projection onto the leading eigenvectors of their Gram matrix.
  absl::StatusOr<Seen> Key(int64_t, const at::Tensor& key) const override {
    const at::Tensor rows =
        key.reshape({key.size(0), key.size(1), -1}).to(at::kDouble);
    const at::Tensor vectors =
        std::get<1>(at::linalg_eigh(at::matmul(rows.transpose(1, 2), rows)));
    const at::Tensor basis = vectors.slice(2, vectors.size(2) - rank_);
    return Seen{at::matmul(at::matmul(rows, basis), basis.transpose(1, 2))
                    .to(key.scalar_type())
                    .view_as(key),
                0};
  }

 private:
  int64_t rank_;
};

// --------------------------------------------------------------- exact rows

class ExactRowsKept : public CacheTransform {
 public:
  ExactRowsKept(std::unique_ptr<CacheTransform> coded, const ExactRows& exact,
                int64_t num_layers)
      : coded_(std::move(coded)), exact_(exact), num_layers_(num_layers) {}

  absl::StatusOr<Seen> Key(int64_t layer,
                           const at::Tensor& key) const override {
    if (Skips(layer)) return Seen{key, 0};
    KVASIR_ASSIGN_OR_RETURN(Seen seen, coded_->Key(layer, key));
    return KeepSinks(key, std::move(seen));
  }
  absl::StatusOr<Seen> RotatedKey(int64_t layer, const at::Tensor& key,
                                  const at::Tensor& query) const override {
    if (Skips(layer)) return Seen{key, 0};
    KVASIR_ASSIGN_OR_RETURN(Seen seen, coded_->RotatedKey(layer, key, query));
    return KeepSinks(key, std::move(seen));
  }
  absl::StatusOr<Seen> Value(int64_t layer,
                             const at::Tensor& value) const override {
    if (Skips(layer)) return Seen{value, 0};
    KVASIR_ASSIGN_OR_RETURN(Seen seen, coded_->Value(layer, value));
    return KeepSinks(value, std::move(seen));
  }

 private:
  bool Skips(int64_t layer) const {
    return layer < exact_.skip || layer >= num_layers_ - exact_.skip;
  }
  Seen KeepSinks(const at::Tensor& exact, Seen seen) const {
    seen.values = WithSinks(seen.values, exact, exact_.sinks);
    seen.exact_window = std::max(seen.exact_window, exact_.window);
    return seen;
  }

  std::unique_ptr<CacheTransform> coded_;
  ExactRows exact_;
  int64_t num_layers_;
};

}  // namespace

absl::StatusOr<at::Tensor> CodeRange(const at::Tensor& rows, int64_t bits,
                                     int64_t group) {
  if (bits == kExactBits) return rows;
  kvasir::v1::Codec plan = BitsCodec(bits);
  plan.mutable_per_token()->set_group(static_cast<uint32_t>(group));
  KVASIR_ASSIGN_OR_RETURN(const LatentCodec codec,
                          MakeLatentCodec(plan, rows.size(-1)));
  KVASIR_ASSIGN_OR_RETURN(CodedLatent coded, CodeLatent(codec, rows));
  return std::move(coded.values);
}

std::unique_ptr<CacheTransform> MakeCodedRows(RowCode key, RowCode value) {
  return std::make_unique<CodedRows>(std::move(key), std::move(value));
}

std::unique_ptr<CacheTransform> MakeKiviBlocks(int64_t bits, int64_t group,
                                               int64_t residual) {
  return std::make_unique<Kivi>(bits, group, residual);
}

absl::StatusOr<std::unique_ptr<CacheTransform>> MakeCalibratedKeys(
    const ReferenceDecoder& decoder, const at::Tensor& text_ids,
    bool before_rotation, int64_t key_bits, int64_t value_bits) {
  const model::DecoderSpec& spec = decoder.spec();
  KeyRanges ranges(spec.num_layers(), before_rotation);
  const at::NoGradGuard no_grad;
  for (int64_t i = 0; i < text_ids.size(0); ++i) {
    KVASIR_RETURN_IF_ERROR(
        decoder.LastHidden(text_ids.slice(0, i, i + 1), {.observer = &ranges})
            .status());
  }
  kvasir::v1::Codec plan = BitsCodec(key_bits);
  plan.mutable_channel_static();
  KVASIR_ASSIGN_OR_RETURN(
      LatentCodec codec,
      MakeLatentCodec(plan, spec.num_kv_heads * spec.head_dim));
  std::vector<StaticRange> by_layer;
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    by_layer.push_back(ranges.Range(layer, key_bits));
  }
  return std::make_unique<PerChannel>(before_rotation, std::move(codec),
                                      std::move(by_layer), value_bits);
}

std::unique_ptr<CacheTransform> MakeQueryDrivenChannels(int64_t kept,
                                                        int64_t key_bits,
                                                        int64_t value_bits) {
  return std::make_unique<Think>(kept, key_bits, value_bits);
}

std::unique_ptr<CacheTransform> MakeLowRankKeys(int64_t rank) {
  return std::make_unique<LowRankKeys>(rank);
}

std::unique_ptr<CacheTransform> WithExactRows(
    std::unique_ptr<CacheTransform> coded, const ExactRows& exact,
    int64_t num_layers) {
  return std::make_unique<ExactRowsKept>(std::move(coded), exact, num_layers);
}

}  // namespace kvasir::compress
