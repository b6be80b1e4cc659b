// Lists the tensors of attention in an artifact, with the names and shapes of
// docs/artifact.md. The loader, the writers and the engine use this list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/attention_shape.h"
#include "plan/plan.h"
#include "plan/resolved_plan.h"

namespace kvasir::plan {

// A tensor that a decoder needs. `name` follows Llama's naming for all
// families; model/checkpoint/family_tensors.h maps it to the name in the file.
struct RequiredTensor {
  std::string name;
  std::vector<int64_t> shape;
  // True for the scales and minimums of codes. Rounding them to a shorter type
  // would change the numbers that the codes stand for.
  bool f32_only = false;

  friend bool operator==(const RequiredTensor&,
                         const RequiredTensor&) = default;
};

// Returns "model.layers.3.self_attn.q_proj.weight" for layer 3 and the
// name "self_attn.q_proj.weight".
std::string LayerTensorName(int64_t layer, absl::string_view name);
// The prefix of a part's tensor names after "model.layers.{l}.":
// "self_attn.k_proj", or "self_attn.k_proj.part1" if the side has
// several parts.
std::string PartPrefix(absl::string_view projection, int part, int num_parts);
// The name of the tensor with a group's lift, without the part's prefix:
// "up.3.weight" for group 3. `prefix` is ResolvedPart::lift_prefix.
std::string LiftName(absl::string_view prefix, int64_t group);

// The tensors of a layer's attention. Their names omit the prefix
// "model.layers.{l}.", so that layers with equal attention share one list.
struct AttentionTensors {
  std::vector<int64_t>
      query_rows;  // number of rows of q_proj, for each query head [Hq]
  // number of columns of o_proj, for each query head [Hq]
  std::vector<int64_t> output_columns;
  bool output_bias = false;
  // in the order in which a decoder uses them
  std::vector<RequiredTensor> tensors;
};

// Lists the attention tensors of a layer. UNIMPLEMENTED if the artifact format
// has no tensors for a part; the error names `layer`.
absl::StatusOr<AttentionTensors> TensorsOf(const ResolvedAttention& attention,
                                           const AttentionShape& shape,
                                           int64_t layer);

// The attention tensors of a layer that is not compressed.
std::vector<RequiredTensor> PlainAttentionTensors(const AttentionShape& shape);

}  // namespace kvasir::plan
