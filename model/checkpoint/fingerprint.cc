#include "model/checkpoint/fingerprint.h"

// On x86, this xxHash header chooses the widest instruction set at run time.
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"

namespace kvasir::model {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::string FingerprintText(const Fingerprint& fingerprint) {
  return absl::StrFormat("%016x%016x", fingerprint.high, fingerprint.low);
}

struct TileHasher::State {
  State() : state(XXH3_createState()) { XXH3_128bits_reset(state); }
  ~State() { XXH3_freeState(state); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* state;
};

TileHasher::TileHasher(uint64_t row_bytes)
    : row_bytes_(static_cast<int64_t>(row_bytes)) {
  columns_.resize(static_cast<size_t>(CeilDiv(row_bytes_, kTileRowBytes)));
  for (auto& column : columns_) column = std::make_unique<State>();
}

TileHasher::~TileHasher() = default;

void TileHasher::Add(std::span<const std::byte> rows) {
  if (rows.empty()) return;
  const auto row_bytes = static_cast<size_t>(row_bytes_);
  KVASIR_CHECK(row_bytes > 0 && rows.size() % row_bytes == 0);
  while (!rows.empty()) {
    const size_t count =
        std::min(rows.size() / row_bytes,
                 static_cast<size_t>(kTileRows - rows_in_tile_));
    if (columns_.size() == 1) {
      XXH3_128bits_update(columns_[0]->state, rows.data(), count * row_bytes);
    } else {
      for (size_t row = 0; row < count; ++row) {
        std::span<const std::byte> rest =
            rows.subspan(row * row_bytes, row_bytes);
        for (const auto& column : columns_) {
          const size_t size =
              std::min(rest.size(), static_cast<size_t>(kTileRowBytes));
          XXH3_128bits_update(column->state, rest.data(), size);
          rest = rest.subspan(size);
        }
      }
    }
    rows = rows.subspan(count * row_bytes);
    rows_in_tile_ += static_cast<int64_t>(count);
    if (rows_in_tile_ < kTileRows) continue;
    CloseTiles(&done_);
    for (const auto& column : columns_) XXH3_128bits_reset(column->state);
    rows_in_tile_ = 0;
  }
}

void TileHasher::CloseTiles(std::vector<Fingerprint>* out) const {
  for (const auto& column : columns_) {
    const XXH128_hash_t hash = XXH3_128bits_digest(column->state);
    out->push_back({hash.high64, hash.low64});
  }
}

Tiles TileHasher::tiles() const {
  Tiles tiles;
  tiles.columns = static_cast<int64_t>(columns_.size());
  tiles.hashes = done_;
  if (rows_in_tile_ > 0) CloseTiles(&tiles.hashes);
  if (tiles.columns > 0) {
    tiles.rows = static_cast<int64_t>(tiles.hashes.size()) / tiles.columns;
  }
  return tiles;
}

std::string OutputsText(const DecoderSpec& spec) {
  std::string text = absl::StrFormat(
      "%s heads %d/%d x %d eps %a", spec.architecture, spec.num_heads,
      spec.num_kv_heads, spec.head_dim, spec.norm_eps);
  absl::StrAppendFormat(&text, " rope %d %d %a", spec.rope.rotary_dim,
                        static_cast<int>(spec.rope.pairing),
                        spec.rope.attention_factor);
  absl::StrAppendFormat(&text, " tied %d biases %d%d%d", spec.tied_head,
                        spec.qkv_bias, spec.o_bias, spec.mlp_bias);
  if (spec.norm != NormKind::kRmsNorm || spec.mlp != MlpKind::kGatedSilu ||
      spec.parallel_residual || spec.learned_positions) {
    absl::StrAppendFormat(&text, " norm %d mlp %d parallel %d positions %d",
                          static_cast<int>(spec.norm),
                          static_cast<int>(spec.mlp), spec.parallel_residual,
                          spec.learned_positions);
  }
  if (spec.qk_norm != QkNorm::kNone) {
    absl::StrAppendFormat(&text, " qk norm %d", static_cast<int>(spec.qk_norm));
  }
  if (spec.experts.count > 0) {
    absl::StrAppendFormat(&text, " experts %d of %d normalize %d",
                          spec.experts.top_k, spec.experts.count,
                          spec.experts.normalize);
  }
  if (!spec.norm_inputs || spec.norm_outputs || spec.norm_weight_offset != 0 ||
      spec.embedding_scale != 1 || spec.score_scale != 0) {
    absl::StrAppendFormat(&text, " norms %d%d offset %a embedding %a scores %a",
                          spec.norm_inputs, spec.norm_outputs,
                          spec.norm_weight_offset, spec.embedding_scale,
                          spec.score_scale);
  }
  if (spec.score_cap != 0 || spec.logit_cap != 0) {
    absl::StrAppendFormat(&text, " caps %a %a", spec.score_cap, spec.logit_cap);
  }
  const auto add_rope = [&text](const std::vector<double>& frequencies) {
    for (const double frequency : frequencies) {
      absl::StrAppendFormat(&text, " %a", frequency);
    }
  };
  add_rope(spec.rope.frequencies);
  if (!spec.rope.long_frequencies.empty()) {
    absl::StrAppendFormat(&text, " beyond %d", spec.rope.short_positions);
    add_rope(spec.rope.long_frequencies);
  }
  if (spec.window_rope.has_value()) {
    absl::StrAppendFormat(&text, " in windows %a",
                          spec.window_rope->attention_factor);
    add_rope(spec.window_rope->frequencies);
  }
  for (const LayerSpec& layer : spec.layers) {
    absl::StrAppendFormat(&text, " window %d", layer.sliding_window);
    if (!layer.rope) text += " no rope";
    if (layer.experts) text += " experts";
  }
  return text;
}

TensorTiles TensorTiles::Of(const TensorInfo& info) {
  TensorTiles tiles;
  tiles.type_and_shape = absl::StrFormat("%s %s", TensorTypeName(info.type),
                                         ShapeText(info.shape));
  tiles.columns =
      CeilDiv(static_cast<int64_t>(info.row_bytes()), kTileRowBytes);
  tiles.rows = CeilDiv(info.num_rows(), kTileRows);
  tiles.hashes.resize(static_cast<size_t>(tiles.rows * tiles.columns));
  tiles.known.resize(tiles.hashes.size());
  return tiles;
}

std::string WeightsIdOf(const TilesByName& tensors, std::string_view outputs) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    KVASIR_CHECK(std::find(tensor.known.begin(), tensor.known.end(), false) ==
                 tensor.known.end());
    absl::StrAppend(&text, name, " ", tensor.type_and_shape);
    for (const Fingerprint& hash : tensor.hashes) {
      absl::StrAppend(&text, " ", FingerprintText(hash));
    }
    text += "\n";
  }
  text += outputs;
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return FingerprintText({hash.high64, hash.low64});
}

TensorTiles& WeightsIdBuilder::Find(std::string_view name,
                                    const TensorInfo& info) {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  return tensors_.emplace(name, TensorTiles::Of(info)).first->second;
}

void WeightsIdBuilder::AddTensor(std::string_view name,
                                 const TensorInfo& info) {
  Find(name, info);
}

void WeightsIdBuilder::Add(std::string_view name, const TensorInfo& info,
                           const Tiles& tiles, int64_t first_row,
                           int64_t first_column) {
  TensorTiles& tensor = Find(name, info);
  KVASIR_CHECK(first_row >= 0 && first_row + tiles.rows <= tensor.rows);
  KVASIR_CHECK(first_column >= 0 &&
               first_column + tiles.columns <= tensor.columns);
  size_t next = 0;
  for (int64_t row = first_row; row < first_row + tiles.rows; ++row) {
    for (int64_t column = first_column; column < first_column + tiles.columns;
         ++column) {
      const auto at = static_cast<size_t>(row * tensor.columns + column);
      const Fingerprint& hash = tiles.hashes[next++];
      KVASIR_CHECK(!tensor.known[at] || tensor.hashes[at] == hash);
      tensor.hashes[at] = hash;
      tensor.known[at] = true;
    }
  }
}

std::string WeightsIdBuilder::Finish(const DecoderSpec& spec) const {
  return WeightsIdOf(tensors_, OutputsText(spec));
}

}  // namespace kvasir::model
