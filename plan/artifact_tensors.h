// Which tensors attention has in an artifact: the names and shapes of
// docs/artifact.md, in one place for the loader, the writers and the engine.
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

// A tensor that a decoder needs, under our name: Llama's own, in every family
// (model/checkpoint/family_tensors.h has those of the files).
struct RequiredTensor {
  std::string name;
  std::vector<int64_t> shape;
  // Ranges of codes: rounded ones would be other codes.
  bool f32_only = false;

  friend bool operator==(const RequiredTensor&,
                         const RequiredTensor&) = default;
};

// "model.layers.3.self_attn.q_proj.weight" of "self_attn.q_proj.weight".
std::string LayerTensorName(int64_t layer, absl::string_view name);
// What a part's tensor names begin with, after "model.layers.{l}.":
// "self_attn.k_proj", or "self_attn.k_proj.part1" of a list of several parts.
std::string PartPrefix(absl::string_view projection, int part, int num_parts);
// "up.3.weight", after a part's prefix and a point; `prefix` is
// ResolvedPart::lift_prefix.
std::string LiftName(absl::string_view prefix, int64_t group);

// Beside the parts' own: tensors of a layer's attention, by names after
// "model.layers.{l}.", which layers that are alike share.
struct AttentionTensors {
  std::vector<int64_t> query_rows;      // of q_proj, for each query head [Hq]
  std::vector<int64_t> output_columns;  // of o_proj, for each query head [Hq]
  bool output_bias = false;
  // All of them, in the order of use.
  std::vector<RequiredTensor> tensors;
};

// Errors: UNIMPLEMENTED for a part that the artifact has no tensors for. It
// names `layer`, the first of those that are alike.
absl::StatusOr<AttentionTensors> TensorsOf(const ResolvedAttention& attention,
                                           const AttentionShape& shape,
                                           int64_t layer);

// The same of a layer that no plan changes.
std::vector<RequiredTensor> PlainAttentionTensors(const AttentionShape& shape);

}  // namespace kvasir::plan
