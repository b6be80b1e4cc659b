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

// Returns the FNV-1a hash of a name. Unlike std::hash, it is the same on all
// machines and in all versions.
uint64_t HashName(std::string_view name);

struct RandomTensor {
  std::string name;
  std::vector<int64_t> shape;  // [rows, columns], or [length]
  RandomKind kind = RandomKind::kNormal;
  double deviation = 0.0;  // only for kNormal
  double value = 0.0;      // only for kConstant
  // The stored tensor that contains this tensor as some of its rows. Empty: the
  // tensor is stored under its own name.
  std::string stored_name;
  RowBlocks rows;

  int64_t num_elements() const;
};

// Every tensor of a checkpoint of this shape, with the names that the family
// uses, in file order. The standard deviations keep activations near 1 at any
// depth, and spread attention scores and logits as in a trained model.
std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape);

// The number of weights of a model of this shape, including biases and norms.
int64_t CountParameters(const ModelShape& shape);

// Like RandomTensorsOf(shape), but only the tensors that `spec` needs, under
// their canonical names (family_tensors.h). Their elements are the same.
std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape,
                                          const DecoderSpec& spec);

// The tensors for a compression plan that was resolved for the shape's spec.
// Attention has the plan's tensors, scaled so that latents and lifted vectors
// stay near 1. Tensors that the plan does not change have the same elements as
// without the plan. Returns the errors of RequiredTensors.
absl::StatusOr<std::vector<RandomTensor>> RandomTensorsOf(
    const ModelShape& shape, const DecoderSpec& spec,
    const plan::ResolvedPlan& plan);

// Fills `out` with the elements of the tensor from `begin` on, in row-major
// order. An element depends only on the seed, the tensor's name and the
// element's index, and is the same on every machine. A normal number is
// approximated by the sum of four uniform 16-bit numbers, so it is at most 3.46
// standard deviations away from 0.
void FillRandom(const RandomTensor& tensor, uint64_t seed, int64_t begin,
                std::span<float> out);

}  // namespace kvasir::model
