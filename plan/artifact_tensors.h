// The tensors that attention has in an artifact: the names and shapes of
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

// A tensor that a decoder needs, under its canonical name. That is Llama's name
// in every family (model/checkpoint/family_tensors.h has the names in the
// files).
struct RequiredTensor {
  std::string name;
  std::vector<int64_t> shape;
  // True for ranges of codes: rounding them would change what the codes mean.
  bool f32_only = false;

  friend bool operator==(const RequiredTensor&,
                         const RequiredTensor&) = default;
};

// "model.layers.3.self_attn.q_proj.weight" for "self_attn.q_proj.weight".
std::string LayerTensorName(int64_t layer, absl::string_view name);
// The beginning of the names of a part's tensors, after "model.layers.{l}.":
// "self_attn.k_proj", or "self_attn.k_proj.part1" if the list has several
// parts.
std::string PartPrefix(absl::string_view projection, int part, int num_parts);
// "up.3.weight", which follows a part's prefix and a point; `prefix` is
// ResolvedPart::lift_prefix.
std::string LiftName(absl::string_view prefix, int64_t group);

// Tensors of a layer's attention in addition to those of the parts. Names come
// after "model.layers.{l}."; layers that are alike share them.
struct AttentionTensors {
  std::vector<int64_t> query_rows;  // rows of q_proj for each query head [Hq]
  // columns of o_proj for each query head [Hq]
  std::vector<int64_t> output_columns;
  bool output_bias = false;
  // All tensors, in the order of use.
  std::vector<RequiredTensor> tensors;
};

// Errors: UNIMPLEMENTED if the artifact has no tensors for a part. The text
//   names `layer`, the first of the layers that are alike.
absl::StatusOr<AttentionTensors> TensorsOf(const ResolvedAttention& attention,
                                           const AttentionShape& shape,
                                           int64_t layer);

// The attention tensors of a layer that no plan changes.
std::vector<RequiredTensor> PlainAttentionTensors(const AttentionShape& shape);

}  // namespace kvasir::plan
