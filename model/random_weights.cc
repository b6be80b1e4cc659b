#include "model/random_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "base/status_macros.h"
#include "model/plan_tensors.h"

namespace kvasir::model {
namespace {

// Sum of the four 16-bit numbers in two words, about its mean: deviation
// sqrt(4 * (2^32 - 1) / 12).
float CentredSum(uint32_t a, uint32_t b) {
  const uint32_t sum = (a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16);
  return static_cast<float>(static_cast<int32_t>(sum) - 2 * 0xFFFF);
}

constexpr double kCentredSumDeviation = 37837.2;
constexpr double kBiasDeviation = 0.1;

// What adds to the residual stream, 2 L times in all.
double ResidualScale(const ModelShape& shape) {
  return 1.0 / std::sqrt(2.0 * static_cast<double>(shape.num_layers));
}

// Static ranges hold latents of deviation 1 up to here.
constexpr double kRangeDeviations = 3.0;

// By the name of a range tensor: the width of a step.
using RangeSteps = std::map<std::string, double>;

void AddRangeSteps(int64_t layer, KvSide side, const kvasir::v1::SidePlan& plan,
                   RangeSteps* steps) {
  for (int p = 0; p < plan.parts_size(); ++p) {
    uint32_t fewest = 8;
    for (const uint32_t bits : plan.parts(p).codec().bits().schedule()) {
      if (bits > 0) fewest = std::min(fewest, bits);
    }
    (*steps)[LayerTensorName(
        layer,
        absl::StrCat(PartPrefix(side, p, plan.parts_size()), ".range.scale"))] =
        2 * kRangeDeviations / static_cast<double>((1u << fewest) - 1);
  }
}

RandomTensor PlannedTensor(const ModelShape& shape, const RangeSteps& steps,
                           const RequiredTensor& wanted) {
  RandomTensor tensor;
  tensor.name = wanted.name;
  tensor.shape = wanted.shape;
  double columns = 1;
  for (size_t i = 1; i < wanted.shape.size(); ++i) {
    columns *= static_cast<double>(wanted.shape[i]);
  }
  if (const auto step = steps.find(wanted.name); step != steps.end()) {
    tensor.kind = RandomKind::kConstant;
    tensor.value = step->second;
  } else if (absl::EndsWith(wanted.name, ".range.min")) {
    tensor.kind = RandomKind::kConstant;
    tensor.value = -kRangeDeviations;
  } else if (wanted.shape.size() == 1) {
    tensor.deviation = kBiasDeviation;
  } else if (wanted.shape.size() == 3) {
    // A complex lift: a term or two for a pair, however many channels.
    tensor.deviation = std::sqrt(0.5);
  } else {
    tensor.deviation = 1.0 / std::sqrt(columns);
    if (absl::EndsWith(wanted.name, "o_proj.weight")) {
      tensor.deviation *= ResidualScale(shape);
    }
  }
  return tensor;
}

}  // namespace

uint64_t HashName(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  }
  return hash;
}

int64_t RandomTensor::num_elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape) {
  const int64_t model_dim = shape.hidden_size;
  const int64_t q_size = shape.num_query_heads * shape.head_dim;
  const int64_t kv_size = shape.num_kv_heads * shape.head_dim;
  const double residual = ResidualScale(shape);
  // Logits of deviation 2: a sampler has something to choose from.
  const double embedding = 2.0 / std::sqrt(static_cast<double>(model_dim));

  std::vector<RandomTensor> tensors;
  std::string prefix;
  auto matrix = [&](const char* name, int64_t rows, int64_t columns,
                    double scale) {
    tensors.push_back({absl::StrCat(prefix, name, ".weight"),
                       {rows, columns},
                       RandomKind::kNormal,
                       scale / std::sqrt(static_cast<double>(columns))});
  };
  auto vocabulary = [&](const char* name) {
    tensors.push_back({absl::StrCat(name, ".weight"),
                       {shape.vocab_size, model_dim},
                       RandomKind::kNormal,
                       embedding});
  };
  auto norm = [&](const char* name) {
    tensors.push_back({absl::StrCat(prefix, name, ".weight"),
                       {model_dim},
                       RandomKind::kOnes,
                       0.0});
  };
  auto bias = [&](const char* name, int64_t size) {
    if (!shape.qkv_bias) return;
    tensors.push_back({absl::StrCat(prefix, name, ".bias"),
                       {size},
                       RandomKind::kNormal,
                       kBiasDeviation});
  };

  vocabulary("model.embed_tokens");
  for (int64_t i = 0; i < shape.num_layers; ++i) {
    prefix = absl::StrCat("model.layers.", i, ".");
    norm("input_layernorm");
    matrix("self_attn.q_proj", q_size, model_dim, 1.0);
    bias("self_attn.q_proj", q_size);
    matrix("self_attn.k_proj", kv_size, model_dim, 1.0);
    bias("self_attn.k_proj", kv_size);
    matrix("self_attn.v_proj", kv_size, model_dim, 1.0);
    bias("self_attn.v_proj", kv_size);
    matrix("self_attn.o_proj", model_dim, q_size, residual);
    norm("post_attention_layernorm");
    matrix("mlp.gate_proj", shape.intermediate_size, model_dim, 1.0);
    matrix("mlp.up_proj", shape.intermediate_size, model_dim, 1.0);
    matrix("mlp.down_proj", model_dim, shape.intermediate_size, residual);
  }
  prefix = "model.";
  norm("norm");
  if (!shape.tied_embedding) vocabulary("lm_head");
  return tensors;
}

absl::StatusOr<std::vector<RandomTensor>> RandomTensorsOf(
    const ModelShape& shape, const DecoderSpec& spec,
    const kvasir::v1::KvPlan& plan) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<RequiredTensor> wanted,
                          RequiredTensors(spec, plan));
  std::map<std::string, RandomTensor> plain;
  for (RandomTensor& tensor : RandomTensorsOf(shape)) {
    std::string name = tensor.name;
    plain.emplace(std::move(name), std::move(tensor));
  }
  RangeSteps steps;
  for (int l = 0; l < plan.layers_size(); ++l) {
    AddRangeSteps(l, KvSide::kKey, plan.layers(l).key(), &steps);
    AddRangeSteps(l, KvSide::kValue, plan.layers(l).value(), &steps);
  }
  std::vector<RandomTensor> tensors;
  for (const RequiredTensor& tensor : wanted) {
    const auto found = plain.find(tensor.name);
    tensors.push_back(found != plain.end() &&
                              found->second.shape == tensor.shape
                          ? found->second
                          : PlannedTensor(shape, steps, tensor));
  }
  return tensors;
}

void FillRandom(const RandomTensor& tensor, uint64_t seed, int64_t begin,
                std::span<float> out) {
  if (tensor.kind == RandomKind::kOnes) {
    std::fill(out.begin(), out.end(), 1.0F);
    return;
  }
  if (tensor.kind == RandomKind::kConstant) {
    std::fill(out.begin(), out.end(), static_cast<float>(tensor.value));
    return;
  }
  const base::PhiloxKey key = base::PhiloxKeyFromSeed(seed);
  const uint64_t name = HashName(tensor.name);
  const auto scale =
      static_cast<float>(tensor.deviation / kCentredSumDeviation);
  // A Philox block makes two elements, 2 * block and 2 * block + 1.
  const auto first = static_cast<uint64_t>(begin);
  auto value = [&](uint64_t element) {
    const base::PhiloxCounter bits =
        base::Philox4x32(key, base::PhiloxCounterOf(element / 2, name));
    return scale * (element % 2 == 0 ? CentredSum(bits[0], bits[1])
                                     : CentredSum(bits[2], bits[3]));
  };
  size_t i = 0;
  if (first % 2 != 0 && !out.empty()) out[i++] = value(first);
  for (; i + 1 < out.size(); i += 2) {
    const base::PhiloxCounter bits =
        base::Philox4x32(key, base::PhiloxCounterOf((first + i) / 2, name));
    out[i] = scale * CentredSum(bits[0], bits[1]);
    out[i + 1] = scale * CentredSum(bits[2], bits[3]);
  }
  if (i < out.size()) out[i] = value(first + i);
}

}  // namespace kvasir::model
