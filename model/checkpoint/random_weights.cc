#include "model/checkpoint/random_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/philox.h"
#include "base/status_macros.h"
#include "model/checkpoint/family_tensors.h"
#include "model/checkpoint/plan_tensors.h"

namespace kvasir::model {
namespace {

// Returns the sum of the four 16-bit numbers in two 32-bit words, minus the
// sum's mean. The standard deviation is sqrt(4 * (2^32 - 1) / 12).
float CentredSum(uint32_t a, uint32_t b) {
  const uint32_t sum = (a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (b >> 16);
  return static_cast<float>(static_cast<int32_t>(sum) - 2 * 0xFFFF);
}

constexpr double kCentredSumDeviation = 37837.2;
constexpr double kBiasDeviation = 0.1;

// The scale of matrices whose results are added to the residual stream. A model
// of L layers adds 2 L such results.
double ResidualScale(const ModelShape& shape) {
  return 1.0 / std::sqrt(2.0 * static_cast<double>(shape.num_layers));
}

// Static ranges reach from minus this number to plus this number, for latents
// with standard deviation 1.
constexpr double kRangeDeviations = 3.0;

// Maps the name of each tensor with scales of static ranges to its
// quantization step.
using RangeSteps = std::map<std::string, double>;

void AddRangeSteps(int64_t layer, const plan::ResolvedSide& side,
                   RangeSteps* steps) {
  for (const plan::ResolvedPart& part : side.parts) {
    int fewest = 8;
    for (const int bits : part.bits) {
      if (bits > 0) fewest = std::min(fewest, bits);
    }
    (*steps)[LayerTensorName(layer,
                             absl::StrCat(part.prefix, ".range.scale"))] =
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
    // In a complex lift, one or two terms contribute to each RoPE pair,
    // independently of the number of channels.
    tensor.deviation = std::sqrt(0.5);
  } else {
    tensor.deviation = 1.0 / std::sqrt(columns);
    if (absl::EndsWith(wanted.name, "o_proj.weight")) {
      tensor.deviation *= ResidualScale(shape);
    }
  }
  return tensor;
}

// Collects a checkpoint's tensors in file order.
struct TensorLister {
  std::vector<RandomTensor> tensors;
  std::string prefix;  // put before the names of the next tensors
  bool bias = false;   // true: projections have biases
  bool layer_norm = false;

  void Table(const char* module, int64_t rows, int64_t columns,
             double deviation) {
    Add(module, ".weight", {rows, columns}, RandomKind::kNormal, deviation);
  }
  void Matrix(const char* module, int64_t rows, int64_t columns, double scale) {
    Table(module, rows, columns,
          scale / std::sqrt(static_cast<double>(columns)));
  }
  void Bias(const char* module, int64_t size) {
    Add(module, ".bias", {size}, RandomKind::kNormal, kBiasDeviation);
  }
  // Adds the tensor, and its bias if the model has such biases.
  void Projection(const char* module, int64_t rows, int64_t columns,
                  double scale) {
    Matrix(module, rows, columns, scale);
    if (bias) Bias(module, rows);
  }
  void Norm(const char* module, int64_t size) {
    Add(module, ".weight", {size}, RandomKind::kOnes, 0.0);
    if (layer_norm) Bias(module, size);
  }

 private:
  void Add(const char* module, const char* leaf, std::vector<int64_t> shape,
           RandomKind kind, double deviation) {
    tensors.push_back({.name = absl::StrCat(prefix, module, leaf),
                       .shape = std::move(shape),
                       .kind = kind,
                       .deviation = deviation});
  }
};

// Lists the router and the experts of one layer, under the family's names.
void ListExperts(const ModelShape& shape, double residual, TensorLister& list) {
  const int64_t m = shape.hidden_size;
  const int64_t f = shape.intermediate_size;
  const bool mixtral = shape.family == Family::kMixtral;
  const std::string layer = list.prefix;
  list.prefix = absl::StrCat(layer, mixtral ? "block_sparse_moe." : "mlp.");
  list.Matrix("gate", shape.num_experts, m, 1.0);
  const std::string experts = absl::StrCat(list.prefix, "experts.");
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    list.prefix = absl::StrCat(experts, expert, ".");
    list.Matrix(mixtral ? "w1" : "gate_proj", f, m, 1.0);
    list.Matrix(mixtral ? "w3" : "up_proj", f, m, 1.0);
    list.Matrix(mixtral ? "w2" : "down_proj", m, f, residual);
  }
  list.prefix = layer;
}

void ListLlama(const ModelShape& shape, double residual, double embedding,
               TensorLister& list) {
  const int64_t m = shape.hidden_size;
  const int64_t f = shape.intermediate_size;
  const int64_t q_size = shape.num_query_heads * shape.head_dim;
  const int64_t kv_size = shape.num_kv_heads * shape.head_dim;
  list.Table("model.embed_tokens", shape.vocab_size, m, embedding);
  for (int64_t i = 0; i < shape.num_layers; ++i) {
    list.prefix = absl::StrCat("model.layers.", i, ".");
    const bool olmo2 = shape.family == Family::kOlmo2;
    if (!olmo2) list.Norm("input_layernorm", m);
    list.Projection("self_attn.q_proj", q_size, m, 1.0);
    list.Projection("self_attn.k_proj", kv_size, m, 1.0);
    list.Projection("self_attn.v_proj", kv_size, m, 1.0);
    list.Matrix("self_attn.o_proj", m, q_size, residual);
    if (olmo2) {
      list.Norm("self_attn.q_norm", q_size);
      list.Norm("self_attn.k_norm", kv_size);
      list.Norm("post_feedforward_layernorm", m);
    }
    if (HasQkNorm(shape.family)) {
      list.Norm("self_attn.q_norm", shape.head_dim);
      list.Norm("self_attn.k_norm", shape.head_dim);
    }
    list.Norm("post_attention_layernorm", m);
    if (HasExperts(shape.family)) {
      ListExperts(shape, residual, list);
      continue;
    }
    list.Matrix("mlp.gate_proj", f, m, 1.0);
    list.Matrix("mlp.up_proj", f, m, 1.0);
    list.Matrix("mlp.down_proj", m, f, residual);
  }
  list.prefix.clear();
  list.Norm("model.norm", m);
  if (!shape.tied_embedding) {
    list.Table("lm_head", shape.vocab_size, m, embedding);
  }
}

void ListNeox(const ModelShape& shape, double residual, double embedding,
              TensorLister& list) {
  const int64_t m = shape.hidden_size;
  const int64_t f = shape.intermediate_size;
  list.Table("gpt_neox.embed_in", shape.vocab_size, m, embedding);
  for (int64_t i = 0; i < shape.num_layers; ++i) {
    list.prefix = absl::StrCat("gpt_neox.layers.", i, ".");
    list.Norm("input_layernorm", m);
    list.Norm("post_attention_layernorm", m);
    list.Projection("attention.query_key_value", 3 * m, m, 1.0);
    list.Projection("attention.dense", m, m, residual);
    list.Matrix("mlp.dense_h_to_4h", f, m, 1.0);
    list.Bias("mlp.dense_h_to_4h", f);
    list.Matrix("mlp.dense_4h_to_h", m, f, residual);
    list.Bias("mlp.dense_4h_to_h", m);
  }
  list.prefix.clear();
  list.Norm("gpt_neox.final_layer_norm", m);
  if (!shape.tied_embedding) {
    list.Table("embed_out", shape.vocab_size, m, embedding);
  }
}

void ListOpt(const ModelShape& shape, double residual, double embedding,
             TensorLister& list) {
  const int64_t m = shape.hidden_size;
  const int64_t f = shape.intermediate_size;
  list.prefix = "model.decoder.";
  list.Table("embed_tokens", shape.vocab_size, m, embedding);
  list.Table("embed_positions", shape.max_position + kUnusedOptPositions, m,
             embedding);
  list.Norm("final_layer_norm", m);
  for (int64_t i = 0; i < shape.num_layers; ++i) {
    list.prefix = absl::StrCat("model.decoder.layers.", i, ".");
    list.Projection("self_attn.k_proj", m, m, 1.0);
    list.Projection("self_attn.v_proj", m, m, 1.0);
    list.Projection("self_attn.q_proj", m, m, 1.0);
    list.Projection("self_attn.out_proj", m, m, residual);
    list.Norm("self_attn_layer_norm", m);
    list.Projection("fc1", f, m, 1.0);
    list.Projection("fc2", m, f, residual);
    list.Norm("final_layer_norm", m);
  }
  list.prefix.clear();
  if (!shape.tied_embedding) {
    list.Table("lm_head", shape.vocab_size, m, embedding);
  }
}

// Fills `out` with the elements of the stored tensor from `begin` on.
void FillStored(const RandomTensor& tensor, uint64_t seed, int64_t begin,
                std::span<float> out) {
  const base::PhiloxKey key = base::PhiloxKeyFromSeed(seed);
  const uint64_t name =
      HashName(tensor.stored_name.empty() ? tensor.name : tensor.stored_name);
  const auto scale =
      static_cast<float>(tensor.deviation / kCentredSumDeviation);
  // Philox block number b gives the two elements 2 b and 2 b + 1.
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
  const double residual = ResidualScale(shape);
  // With this deviation, the logits have standard deviation 2. So several
  // tokens are likely enough to be sampled.
  const double embedding =
      2.0 / std::sqrt(static_cast<double>(shape.hidden_size));
  TensorLister list;
  list.bias = shape.qkv_bias;
  list.layer_norm = HasLayerNorm(shape.family);
  switch (shape.family) {
    case Family::kNeox:
      ListNeox(shape, residual, embedding, list);
      break;
    case Family::kOpt:
      ListOpt(shape, residual, embedding, list);
      break;
    default:
      ListLlama(shape, residual, embedding, list);
  }
  return std::move(list.tensors);
}

int64_t CountParameters(const ModelShape& shape) {
  int64_t count = 0;
  for (const RandomTensor& tensor : RandomTensorsOf(shape)) {
    count += tensor.num_elements();
  }
  return count;
}

std::vector<RandomTensor> RandomTensorsOf(const ModelShape& shape,
                                          const DecoderSpec& spec) {
  std::map<std::string, RandomTensor> stored;
  for (RandomTensor& tensor : RandomTensorsOf(shape)) {
    std::string name = tensor.name;
    stored.emplace(std::move(name), std::move(tensor));
  }
  std::vector<RandomTensor> tensors;
  for (RequiredTensor& wanted : RequiredTensors(spec)) {
    const StoredTensor from = StoredTensorOf(spec, wanted.name);
    const auto found = stored.find(from.name);
    if (found == stored.end()) continue;
    if (from.rows.all() && found->second.shape != wanted.shape) continue;
    RandomTensor tensor = found->second;
    tensor.stored_name = from.name;
    tensor.name = std::move(wanted.name);
    tensor.shape = std::move(wanted.shape);
    tensor.rows = from.rows;
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

absl::StatusOr<std::vector<RandomTensor>> RandomTensorsOf(
    const ModelShape& shape, const DecoderSpec& spec,
    const plan::ResolvedPlan& plan) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<RequiredTensor> wanted,
                          RequiredTensors(spec, plan));
  std::map<std::string, RandomTensor> plain;
  for (RandomTensor& tensor : RandomTensorsOf(shape, spec)) {
    std::string name = tensor.name;
    plain.emplace(std::move(name), std::move(tensor));
  }
  RangeSteps steps;
  for (int64_t layer = 0; layer < plan.num_layers(); ++layer) {
    AddRangeSteps(layer, plan.attention_of(layer).key, &steps);
    AddRangeSteps(layer, plan.attention_of(layer).value, &steps);
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
  if (tensor.rows.all()) return FillStored(tensor, seed, begin, out);
  const int64_t columns = tensor.num_elements() / tensor.shape[0];
  const int64_t block = tensor.rows.block_rows * columns;
  while (!out.empty()) {
    const int64_t inside = begin % block;
    const size_t count =
        std::min(out.size(), static_cast<size_t>(block - inside));
    const int64_t row = tensor.rows.first + begin / block * tensor.rows.stride;
    FillStored(tensor, seed, row * columns + inside, out.first(count));
    out = out.subspan(count);
    begin += static_cast<int64_t>(count);
  }
}

}  // namespace kvasir::model
