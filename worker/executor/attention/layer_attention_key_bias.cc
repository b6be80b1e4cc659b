// Prepares how a layer's attention applies the bias or the mean of its keys,
// and reads the keys with which means are measured.
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/read_back.h"
#include "worker/executor/attention/key_bias_split.h"
#include "worker/executor/attention/layer_attention.h"

namespace kvasir::worker {

absl::Status LayerAttention::PrepareKeyBias() {
  const LayerWeights& weights = *parts_.weights;
  row_columns_ = program().row_columns;
  qkv_bias_ = weights.qkv_bias;
  const bool has_mean = weights.key_mean != nullptr;
  if (program().key_bias == KeyBias::kCached ||
      (!has_mean && !parts_.spec->qkv_bias)) {
    return absl::OkStatus();
  }
  const auto dims = static_cast<size_t>(program().head_dim);
  std::vector<float> projection(
      static_cast<size_t>(program().projection_columns));
  if (weights.host_qkv_bias != nullptr) projection = *weights.host_qkv_bias;
  const std::vector<size_t> first = KeyColumns();
  std::vector<float> bias;  // the mean takes the place of the bias
  if (has_mean) {
    bias = *weights.key_mean;
  } else {
    for (const size_t column : first) {
      const float* const own = projection.data() + column;
      bias.insert(bias.end(), own, own + dims);
    }
  }
  std::vector<float> cached(bias.size(), 0.0f);
  if (program().key_bias == KeyBias::kRebuilt) {
    KVASIR_ASSIGN_OR_RETURN(rebuilt_key_bias_,
                            tables_.Add<float>(absl::MakeConstSpan(bias)));
  } else {
    KVASIR_RETURN_IF_ERROR(LeaveKeyBiasToScores(bias, &cached));
  }
  for (size_t i = 0; i < bias.size(); ++i) {
    projection[first[i / dims] + i % dims] -= bias[i] - cached[i];
  }
  KVASIR_ASSIGN_OR_RETURN(qkv_bias_,
                          tables_.Add<float>(absl::MakeConstSpan(projection)));
  return absl::OkStatus();
}

std::vector<size_t> LayerAttention::KeyColumns() const {
  const KeyProgram& key = program().key[0];
  std::vector<size_t> columns;
  for (const int32_t group : key.group_of_head) {
    const LatentProgram& latent = key.latents[static_cast<size_t>(group)];
    KVASIR_CHECK(latent.width == program().head_dim);
    columns.push_back(static_cast<size_t>(key.latent_column + latent.column));
  }
  return columns;
}

absl::Status LayerAttention::TapKeys(kernels::Stream& stream,
                                     const Rows& rows) const {
  const auto dims = static_cast<size_t>(program().head_dim);
  const auto stride = static_cast<size_t>(rows.stride);
  const std::vector<size_t> columns = KeyColumns();
  const int64_t numbers = rows.num_tokens * rows.stride;
  std::vector<std::byte> bytes(
      static_cast<size_t>(activations_.Bytes(numbers)));
  KVASIR_RETURN_IF_ERROR(
      kernels::ReadBack(stream, bytes.data(), rows.row, bytes.size()));
  std::vector<float> keys;
  keys.reserve(static_cast<size_t>(rows.num_tokens) * columns.size() * dims);
  const auto add_keys = [&]<typename T>(T) {
    for (size_t t = 0; t < static_cast<size_t>(rows.num_tokens); ++t) {
      for (const size_t column : columns) {
        for (size_t i = 0; i < dims; ++i) {
          T number;
          const size_t at = t * stride + column + i;
          std::memcpy(&number, bytes.data() + at * sizeof(T), sizeof(T));
          keys.push_back(kernels::ToFloat(number));
        }
      }
    }
  };
  switch (activations_.dtype) {
    case kernels::DType::kF32:
      add_keys(float{});
      break;
    case kernels::DType::kF16:
      add_keys(kernels::F16{});
      break;
    case kernels::DType::kBf16:
      add_keys(kernels::Bf16{});
      break;
  }
  (*parts_.key_tap)(parts_.layer, keys);
  return absl::OkStatus();
}

absl::Status LayerAttention::LeaveKeyBiasToScores(absl::Span<const float> bias,
                                                  std::vector<float>* cached) {
  const KeyProgram& key = program().key[0];
  KeyTurns turns;
  if (program().rotates) turns.steps = parts_.rope_steps;
  turns.pairing = pairing_;
  turns.attention_factor =
      static_cast<float>(parts_.spec->rope_of(parts_.layer).attention_factor);
  KeyBiasSplit split = SplitKeyBias(bias, program().head_dim, turns);
  *cached = std::move(split.cached);
  if (split.pairs.empty()) return absl::OkStatus();
  key_bias_ = std::make_unique<ScoredKeyBias>();
  const int64_t num_heads = program().heads.query.count;
  const int64_t columns =
      kernels::KeyBiasColumns(split.tile_pairs, split.exact_pairs);
  for (int64_t h = 0; h < num_heads; ++h) {
    key_bias_->query_column.push_back(row_columns_);
    row_columns_ += columns;
  }
  // GPU kernels copy rows in pieces of 16 bytes. A multiple of 16 columns
  // suffices for every type of activations.
  row_columns_ = (row_columns_ + 15) / 16 * 16;
  for (const kernels::KeyBiasPair& pair : split.pairs) {
    key_bias_->steps.push_back(pair.step);
  }
  float unit = 1.0f;
  if (activations_.dtype == kernels::DType::kF16) {
    unit = ScaleToUnits(&split.pairs);
  }
  key_bias_->read = {split.tile_pairs, split.exact_pairs,
                     key_bias_->steps.data(), key_bias_->query_column.data(),
                     unit};
  std::vector<int64_t> key_column;
  for (const int32_t group : key.group_of_head) {
    key_column.push_back(key.latent_column +
                         key.latents[static_cast<size_t>(group)].column);
  }
  kernels::KeyBiasParams shape;
  shape.row_stride = row_columns_;
  shape.num_heads = num_heads;
  shape.num_kv_heads = program().heads.kv.count;
  shape.tile_pairs = split.tile_pairs;
  shape.exact_pairs = split.exact_pairs;
  shape.unit = unit;
  shape.dtype = activations_.dtype;
  KVASIR_ASSIGN_OR_RETURN(
      key_bias_->op, kernels::Prepare(*parts_.device, shape,
                                      {key_column, key.projected.column,
                                       key_bias_->query_column, split.pairs}));
  return absl::OkStatus();
}

}  // namespace kvasir::worker
