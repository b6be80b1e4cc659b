// Reads RoPE frequencies from config.json, with default, linear, llama3, YaRN
// or (only Phi-3) LongRoPE scaling. Both the older form (rope_theta and
// rope_scaling) and the newer one (rope_parameters) are read. If a config has
// both, they must agree.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "model/files/json.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// The most positions that a config.json may state.
inline constexpr int64_t kMaxPositions = int64_t{1} << 30;

struct RopeContext {
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double default_theta = 10000.0;
  // True for GPT-NeoX: only a part of each head rotates, and the fields have
  // older names.
  bool neox = false;
  // True for Phi-3: a part of each head may rotate, and LongRoPE is served.
  bool phi3 = false;
  // For Gemma 3: the kind of layers whose RoPE is read, "full_attention" or
  // "sliding_attention". Each kind may have its own object in rope_parameters.
  // If not, rope_theta and rope_scaling apply to full attention, and
  // rope_local_base_freq is the base of sliding attention.
  std::string_view layer_type;
};

struct RopeConfig {
  RopeSpec rope;
  // max_position_embeddings. With YaRN, at least the original context length
  // times the scaling factor.
  int64_t max_positions = 0;

  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

// `root` is the whole config. UNIMPLEMENTED for scalings that depend on the
// sequence's length ("dynamic"; also "longrope", except in Phi-3), and for
// partly rotated heads in families other than GPT-NeoX and Phi-3.
absl::StatusOr<RopeConfig> ParseRope(const JsonFields& root,
                                     const RopeContext& context);

}  // namespace kvasir::model
