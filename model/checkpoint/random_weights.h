#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"
#include "model/shapes/shapes.h"
#include "plan/resolved_plan.h"

namespace kvasir::model {

enum class RandomKind { kOnes, kNormal, kConstant };

// FNV-1a: stable across machines and versions, unlike std::hash.
uint64_t HashName(std::string_view name);

// A tensor of a random-weight model.
struct RandomTensor {
  std::string name;
  std::vector<int64_t> shape;  // [rows, columns], or [length]
  RandomKind kind = RandomKind::kNormal;
  double deviation = 0.0;  // of kNormal
  double value = 0.0;      // of kConstant
  // What its numbers come from: some rows of a tensor of this name (or of its
  // own, where this is empty).
  std::string stored_name;
  RowBlocks rows;

  int64_t num_elements() const;
};

// Every tensor of the shape's checkpoint under the family's names, in file
// order. The deviations keep
// activations near 1 through any depth, attention scores and logits spread: a
// model that runs like a trained one, though it knows nothing.
std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape);

// Weights of the shape, biases and norms included.
int64_t CountParameters(const ModelShape& shape);

// The same numbers by our names (family_tensors.h): of the tensors that `spec`
// asks for, those that the shape has.
std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape,
                                          const DecoderSpec& spec);

// The same under a plan that was resolved for the shape's spec: attention has
// the plan's tensors, of a scale that keeps latents and what is lifted from
// them near 1. Tensors that the plan does not change have the same numbers.
// RequiredTensors' errors.
absl::StatusOr<std::vector<RandomTensor>> RandomTensorsOf(
    const ModelShape& shape, const DecoderSpec& spec,
    const plan::ResolvedPlan& plan);

// Elements [begin, begin + out.size()) of the tensor under `seed`, row-major.
// A pure function of (seed, tensor name, element), exact on every machine: the
// normal distribution is the sum of four uniform 16-bit numbers, cut at 3.46
// deviations, so no rounding of a math library is in it.
void FillRandom(const RandomTensor& tensor, uint64_t seed, int64_t begin,
                std::span<float> out);

}  // namespace kvasir::model
