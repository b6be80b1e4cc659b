#include "model/shapes/shapes.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kvasir::model {
namespace {

// Each of these functions returns the values that all models of a series share.
ModelShape Llama2() { return {}; }
ModelShape Llama3() {
  return {
      .rope_theta = 500000.0, .bos_token_id = 128000, .eos_token_id = 128001};
}
ModelShape Llama31() {
  ModelShape shape = Llama3();
  shape.llama3_rope_factor = 8.0;
  return shape;
}
ModelShape Llama32() {
  ModelShape shape = Llama3();
  shape.llama3_rope_factor = 32.0;
  return shape;
}
ModelShape SmolLm2() { return {.rope_theta = 100000.0}; }
ModelShape Mistral() {
  return {.family = Family::kMistral, .sliding_window = 4096};
}
ModelShape Qwen25() {
  return {.family = Family::kQwen2,
          .rope_theta = 1000000.0,
          .norm_eps = 1e-6,
          .qkv_bias = true,
          .bos_token_id = 151643,
          .eos_token_id = 151643};
}
ModelShape Qwen3() {
  return {.family = Family::kQwen3,
          .rope_theta = 1000000.0,
          .norm_eps = 1e-6,
          .bos_token_id = 151643,
          .eos_token_id = 151645};
}
ModelShape Mixtral() {
  return {.family = Family::kMixtral,
          .num_experts = 8,
          .experts_per_token = 2,
          .rope_theta = 1000000.0};
}
ModelShape Qwen3Moe() {
  ModelShape shape = Qwen3();
  shape.family = Family::kQwen3Moe;
  shape.num_experts = 128;
  shape.experts_per_token = 8;
  return shape;
}
ModelShape SmolLm3() {
  return {.family = Family::kSmolLm3,
          .rope_theta = 5000000.0,
          .norm_eps = 1e-6,
          .bos_token_id = 128000,
          .eos_token_id = 128012};
}
ModelShape Pythia() {
  return {.family = Family::kNeox,
          .rotary_part = 0.25,
          .qkv_bias = true,
          .bos_token_id = 0,
          .eos_token_id = 0};
}
ModelShape Opt() {
  return {.family = Family::kOpt,
          .rotary_part = 0.0,
          .qkv_bias = true,
          .bos_token_id = 2,
          .eos_token_id = 2};
}
// The built-in model in models/tiny.
ModelShape KvasirTiny() { return {.bos_token_id = 0, .eos_token_id = 1}; }

enum class Head { kUntied, kTied };

struct Row {
  std::string_view name;
  ModelShape (*lineage)();
  int64_t layers, hidden, intermediate;
  int64_t query_heads, kv_heads, head_dim;
  int64_t vocab, context;
  Head head = Head::kUntied;
};
constexpr Row kRows[] = {
    {"kvasir-tiny", KvasirTiny, 6, 256, 640, 16, 8, 32, 4096, 1024,
     Head::kTied},
    {"smollm2-135m", SmolLm2, 30, 576, 1536, 9, 3, 64, 49152, 8192,
     Head::kTied},
    {"tinyllama-1.1b", Llama2, 22, 2048, 5632, 32, 4, 64, 32000, 2048},
    {"llama-2-7b", Llama2, 32, 4096, 11008, 32, 32, 128, 32000, 4096},
    {"llama-2-13b", Llama2, 40, 5120, 13824, 40, 40, 128, 32000, 4096},
    {"llama-2-70b", Llama2, 80, 8192, 28672, 64, 8, 128, 32000, 4096},
    {"llama-3-8b", Llama3, 32, 4096, 14336, 32, 8, 128, 128256, 8192},
    {"llama-3-70b", Llama3, 80, 8192, 28672, 64, 8, 128, 128256, 8192},
    {"llama-3.1-8b", Llama31, 32, 4096, 14336, 32, 8, 128, 128256, 131072},
    {"llama-3.1-70b", Llama31, 80, 8192, 28672, 64, 8, 128, 128256, 131072},
    {"llama-3.2-1b", Llama32, 16, 2048, 8192, 32, 8, 64, 128256, 131072,
     Head::kTied},
    {"mistral-7b", Mistral, 32, 4096, 14336, 32, 8, 128, 32000, 32768},
    {"qwen2.5-0.5b", Qwen25, 24, 896, 4864, 14, 2, 64, 151936, 32768,
     Head::kTied},
    {"qwen2.5-1.5b", Qwen25, 28, 1536, 8960, 12, 2, 128, 151936, 131072,
     Head::kTied},
    {"qwen2.5-7b", Qwen25, 28, 3584, 18944, 28, 4, 128, 152064, 131072},
    {"qwen3-0.6b", Qwen3, 28, 1024, 3072, 16, 8, 128, 151936, 40960,
     Head::kTied},
    {"qwen3-4b", Qwen3, 36, 2560, 9728, 32, 8, 128, 151936, 40960, Head::kTied},
    {"qwen3-8b", Qwen3, 36, 4096, 12288, 32, 8, 128, 151936, 40960},
    {"qwen3-30b-a3b", Qwen3Moe, 48, 2048, 768, 32, 4, 128, 151936, 40960},
    {"mixtral-8x7b", Mixtral, 32, 4096, 14336, 32, 8, 128, 32000, 32768},
    {"smollm3-3b", SmolLm3, 36, 2048, 11008, 16, 4, 128, 128256, 65536,
     Head::kTied},
    {"pythia-160m", Pythia, 12, 768, 3072, 12, 12, 64, 50304, 2048},
    {"pythia-410m", Pythia, 24, 1024, 4096, 16, 16, 64, 50304, 2048},
    {"pythia-1b", Pythia, 16, 2048, 8192, 8, 8, 256, 50304, 2048},
    {"opt-125m", Opt, 12, 768, 3072, 12, 12, 64, 50272, 2048, Head::kTied},
    {"opt-1.3b", Opt, 24, 2048, 8192, 32, 32, 64, 50272, 2048, Head::kTied},
};

ModelShape ShapeOf(const Row& row) {
  ModelShape shape = row.lineage();
  shape.name = row.name;
  shape.num_layers = row.layers;
  shape.hidden_size = row.hidden;
  shape.intermediate_size = row.intermediate;
  shape.num_query_heads = row.query_heads;
  shape.num_kv_heads = row.kv_heads;
  shape.head_dim = row.head_dim;
  shape.vocab_size = row.vocab;
  shape.max_position = row.context;
  shape.tied_embedding = row.head == Head::kTied;
  return shape;
}

}  // namespace

absl::StatusOr<ModelShape> FindShape(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return ShapeOf(row);
  }
  return absl::NotFoundError(absl::StrCat(
      "there is no model shape '", std::string(name),
      "'; the known shapes are ", absl::StrJoin(KnownShapeNames(), ", ")));
}

std::vector<std::string> KnownShapeNames() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.emplace_back(row.name);
  return names;
}

}  // namespace kvasir::model
