#include "model/shapes/shapes.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {
namespace {

ModelShape Llama2_7b() {
  return {.name = "llama-2-7b",
          .num_layers = 32,
          .hidden_size = 4096,
          .intermediate_size = 11008,
          .num_query_heads = 32,
          .num_kv_heads = 32,
          .head_dim = 128,
          .vocab_size = 32000,
          .max_position = 4096};
}

ModelShape Llama2_13b() {
  ModelShape shape = Llama2_7b();
  shape.name = "llama-2-13b";
  shape.num_layers = 40;
  shape.hidden_size = 5120;
  shape.intermediate_size = 13824;
  shape.num_query_heads = 40;
  shape.num_kv_heads = 40;
  return shape;
}

ModelShape Llama2_70b() {
  ModelShape shape = Llama2_7b();
  shape.name = "llama-2-70b";
  shape.num_layers = 80;
  shape.hidden_size = 8192;
  shape.intermediate_size = 28672;
  shape.num_query_heads = 64;
  shape.num_kv_heads = 8;
  return shape;
}

ModelShape Llama3_8b() {
  return {.name = "llama-3-8b",
          .num_layers = 32,
          .hidden_size = 4096,
          .intermediate_size = 14336,
          .num_query_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 128,
          .vocab_size = 128256,
          .max_position = 8192,
          .rope_theta = 500000.0,
          .bos_token_id = 128000,
          .eos_token_id = 128001};
}

ModelShape Llama3_70b() {
  ModelShape shape = Llama3_8b();
  shape.name = "llama-3-70b";
  shape.num_layers = 80;
  shape.hidden_size = 8192;
  shape.intermediate_size = 28672;
  shape.num_query_heads = 64;
  return shape;
}

RopeScalingShape Llama3Scaling(double factor) {
  return {.kind = RopeScalingKind::kLlama3,
          .factor = factor,
          .low_freq_factor = 1.0,
          .high_freq_factor = 4.0,
          .original_max_position = 8192};
}

ModelShape Llama31_8b() {
  ModelShape shape = Llama3_8b();
  shape.name = "llama-3.1-8b";
  shape.max_position = 131072;
  shape.rope_scaling = Llama3Scaling(8.0);
  return shape;
}

ModelShape Llama31_70b() {
  ModelShape shape = Llama3_70b();
  shape.name = "llama-3.1-70b";
  shape.max_position = 131072;
  shape.rope_scaling = Llama3Scaling(8.0);
  return shape;
}

ModelShape Llama32_1b() {
  ModelShape shape = Llama31_8b();
  shape.name = "llama-3.2-1b";
  shape.num_layers = 16;
  shape.hidden_size = 2048;
  shape.intermediate_size = 8192;
  shape.head_dim = 64;
  shape.rope_scaling = Llama3Scaling(32.0);
  shape.tied_embedding = true;
  return shape;
}

ModelShape TinyLlama() {
  return {.name = "tinyllama-1.1b",
          .num_layers = 22,
          .hidden_size = 2048,
          .intermediate_size = 5632,
          .num_query_heads = 32,
          .num_kv_heads = 4,
          .head_dim = 64,
          .vocab_size = 32000,
          .max_position = 2048};
}

ModelShape Mistral7b() {
  return {.name = "mistral-7b",
          .family = ShapeFamily::kMistral,
          .num_layers = 32,
          .hidden_size = 4096,
          .intermediate_size = 14336,
          .num_query_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 128,
          .vocab_size = 32000,
          .max_position = 32768,
          .sliding_window = 4096};
}

ModelShape Qwen25_05b() {
  return {.name = "qwen2.5-0.5b",
          .family = ShapeFamily::kQwen2,
          .num_layers = 24,
          .hidden_size = 896,
          .intermediate_size = 4864,
          .num_query_heads = 14,
          .num_kv_heads = 2,
          .head_dim = 64,
          .vocab_size = 151936,
          .max_position = 32768,
          .rope_theta = 1000000.0,
          .norm_eps = 1e-6,
          .tied_embedding = true,
          .qkv_bias = true,
          .bos_token_id = 151643,
          .eos_token_id = 151643};
}

ModelShape Qwen25_15b() {
  ModelShape shape = Qwen25_05b();
  shape.name = "qwen2.5-1.5b";
  shape.num_layers = 28;
  shape.hidden_size = 1536;
  shape.intermediate_size = 8960;
  shape.num_query_heads = 12;
  shape.head_dim = 128;
  shape.max_position = 131072;
  return shape;
}

ModelShape Qwen25_7b() {
  ModelShape shape = Qwen25_05b();
  shape.name = "qwen2.5-7b";
  shape.num_layers = 28;
  shape.hidden_size = 3584;
  shape.intermediate_size = 18944;
  shape.num_query_heads = 28;
  shape.num_kv_heads = 4;
  shape.head_dim = 128;
  shape.vocab_size = 152064;
  shape.max_position = 131072;
  shape.tied_embedding = false;
  return shape;
}

ModelShape Pythia160m() {
  return {.name = "pythia-160m",
          .family = ShapeFamily::kNeox,
          .num_layers = 12,
          .hidden_size = 768,
          .intermediate_size = 3072,
          .num_query_heads = 12,
          .num_kv_heads = 12,
          .head_dim = 64,
          .vocab_size = 50304,
          .max_position = 2048,
          .rotary_part = 0.25,
          .qkv_bias = true,
          .bos_token_id = 0,
          .eos_token_id = 0};
}

ModelShape Pythia410m() {
  ModelShape shape = Pythia160m();
  shape.name = "pythia-410m";
  shape.num_layers = 24;
  shape.hidden_size = 1024;
  shape.intermediate_size = 4096;
  shape.num_query_heads = 16;
  shape.num_kv_heads = 16;
  return shape;
}

ModelShape Pythia1b() {
  ModelShape shape = Pythia160m();
  shape.name = "pythia-1b";
  shape.num_layers = 16;
  shape.hidden_size = 2048;
  shape.intermediate_size = 8192;
  shape.num_query_heads = 8;
  shape.num_kv_heads = 8;
  shape.head_dim = 256;
  return shape;
}

ModelShape Opt125m() {
  return {.name = "opt-125m",
          .family = ShapeFamily::kOpt,
          .num_layers = 12,
          .hidden_size = 768,
          .intermediate_size = 3072,
          .num_query_heads = 12,
          .num_kv_heads = 12,
          .head_dim = 64,
          .vocab_size = 50272,
          .max_position = 2048,
          .rotary_part = 0.0,
          .tied_embedding = true,
          .qkv_bias = true,
          .bos_token_id = 2,
          .eos_token_id = 2};
}

ModelShape Opt13b() {
  ModelShape shape = Opt125m();
  shape.name = "opt-1.3b";
  shape.num_layers = 24;
  shape.hidden_size = 2048;
  shape.intermediate_size = 8192;
  shape.num_query_heads = 32;
  shape.num_kv_heads = 32;
  return shape;
}

// The built-in model, models/tiny.
ModelShape KvasirTiny() {
  return {.name = "kvasir-tiny",
          .num_layers = 6,
          .hidden_size = 256,
          .intermediate_size = 640,
          .num_query_heads = 16,
          .num_kv_heads = 8,
          .head_dim = 32,
          .vocab_size = 4096,
          .max_position = 1024,
          .tied_embedding = true,
          .bos_token_id = 0,
          .eos_token_id = 1};
}

std::vector<ModelShape> AllShapes() {
  return {KvasirTiny(), TinyLlama(),  Llama2_7b(),  Llama2_13b(),  Llama2_70b(),
          Llama3_8b(),  Llama3_70b(), Llama31_8b(), Llama31_70b(), Llama32_1b(),
          Mistral7b(),  Qwen25_05b(), Qwen25_15b(), Qwen25_7b(),   Pythia160m(),
          Pythia410m(), Pythia1b(),   Opt125m(),    Opt13b()};
}

struct NamedSize {
  const char* name;
  int64_t value;
};

}  // namespace

int64_t CountParameters(const ModelShape& shape) {
  const int64_t m = shape.hidden_size;
  const int64_t q_size = shape.num_query_heads * shape.head_dim;
  const int64_t kv_size = shape.num_kv_heads * shape.head_dim;
  const bool layer_norm = HasLayerNorm(shape.family);
  const int64_t norm = layer_norm ? 2 * m : m;
  int64_t layer = 2 * norm + 2 * m * (q_size + kv_size);
  if (shape.qkv_bias) layer += q_size + 2 * kv_size;
  layer += (layer_norm ? 2 : 3) * m * shape.intermediate_size;
  // Of o_proj, and of both matrices of the MLP.
  if (layer_norm) layer += 2 * m + shape.intermediate_size;
  const int64_t embedding = shape.vocab_size * m;
  int64_t count = shape.num_layers * layer + norm +
                  embedding * (shape.tied_embedding ? 1 : 2);
  if (shape.family == ShapeFamily::kOpt) {
    count += (shape.max_position + kUnusedOptPositions) * m;
  }
  return count;
}

absl::Status ValidateShape(const ModelShape& shape) {
  // Far above any model; keeps every product of two sizes within int64.
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  const std::array<NamedSize, 8> sizes = {{
      {"layers", shape.num_layers},
      {"hidden", shape.hidden_size},
      {"intermediate", shape.intermediate_size},
      {"query heads", shape.num_query_heads},
      {"KV heads", shape.num_kv_heads},
      {"head dim", shape.head_dim},
      {"vocabulary", shape.vocab_size},
      {"max position", shape.max_position},
  }};
  for (const NamedSize& size : sizes) {
    if (size.value < 1 || size.value > kMaxSize) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", shape.name, ": ", size.name, " is ",
                       size.value, ", want 1 to ", kMaxSize));
    }
  }
  if (shape.num_query_heads % shape.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape ", shape.name, ": ", shape.num_query_heads,
                     " query heads are not a multiple of ", shape.num_kv_heads,
                     " KV heads"));
  }
  if (shape.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape ", shape.name, ": head dim ", shape.head_dim,
                     " is odd; RoPE turns pairs"));
  }
  const auto turned = static_cast<int64_t>(static_cast<double>(shape.head_dim) *
                                           shape.rotary_part);
  if (turned % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shape ", shape.name, ": ", shape.rotary_part, " of a head of ",
        shape.head_dim, " is ", turned, " dims; RoPE turns pairs"));
  }
  if (HasLayerNorm(shape.family) &&
      (shape.num_kv_heads != shape.num_query_heads ||
       shape.num_query_heads * shape.head_dim != shape.hidden_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shape ", shape.name,
        ": want a KV head for every query head, and together as wide as the "
        "model; have ",
        shape.num_kv_heads, " KV and ", shape.num_query_heads,
        " query heads of ", shape.head_dim, " in a width of ",
        shape.hidden_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelShape> FindShape(std::string_view name) {
  for (ModelShape& shape : AllShapes()) {
    if (shape.name == name) return std::move(shape);
  }
  return absl::NotFoundError(
      absl::StrCat("no model shape '", std::string(name),
                   "'; known: ", absl::StrJoin(KnownShapeNames(), ", ")));
}

std::vector<std::string> KnownShapeNames() {
  std::vector<std::string> names;
  for (ModelShape& shape : AllShapes()) names.push_back(std::move(shape.name));
  return names;
}

}  // namespace kvasir::model
