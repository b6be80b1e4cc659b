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
  double deviation = 0.0;  // only for kNormal
  double value = 0.0;      // only for kConstant
  // The numbers are some rows of the stored tensor of this name. Empty: the
  // tensor's own name.
  std::string stored_name;
  RowBlocks rows;

  int64_t num_elements() const;
};

// Every tensor of the shape's checkpoint under the family's names, in file
// order. The deviations keep activations near 1 at any depth, and attention
// scores and logits spread. So the model behaves numerically like a trained
// one.
std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape);

// The number of weights of the shape, biases and norms included.
int64_t CountParameters(const ModelShape& shape);

// The same numbers under canonical names (family_tensors.h): those tensors of
// the shape that `spec` asks for.
std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape,
                                          const DecoderSpec& spec);

// The tensors under a plan that was resolved for the shape's spec. Attention
// has the plan's tensors, on a scale that keeps latents and lifted vectors
// near 1. Tensors that the plan does not change have the same numbers. Returns
// the errors of RequiredTensors.
absl::StatusOr<std::vector<RandomTensor>> RandomTensorsOf(
    const ModelShape& shape, const DecoderSpec& spec,
    const plan::ResolvedPlan& plan);

// Elements [begin, begin + out.size()) of the tensor under `seed`, row-major.
// They are a pure function of (seed, tensor name, element) and exact on every
// machine. The normal distribution is the sum of four uniform 16-bit numbers,
// cut at 3.46 deviations, so no rounding of a math library changes it.
void FillRandom(const RandomTensor& tensor, uint64_t seed, int64_t begin,
                std::span<float> out);

}  // namespace kvasir::model
