// Test support: a decoder with a few thousand random weights.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/check.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

inline model::DecoderSpec TestSpec() {
  model::DecoderSpec spec;
  spec.hidden_size = 24;
  spec.num_heads = 4;
  spec.num_kv_heads = 2;
  spec.head_dim = 8;
  spec.intermediate_size = 20;
  spec.vocab_size = 31;
  spec.max_position_embeddings = 64;
  spec.rope.rotary_dim = spec.head_dim;
  for (int64_t f = 0; f < spec.head_dim / 2; ++f) {
    spec.rope.frequencies.push_back(std::pow(0.3, static_cast<double>(f)));
  }
  spec.layers.resize(2);
  return spec;
}

// Makes the parts of the decoder. The weights depend only on the seed.
inline ReferenceDecoder::Parts TestParts(const model::DecoderSpec& spec,
                                         uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto random = [&](at::IntArrayRef shape) {
    return at::randn(shape, generator, at::TensorOptions()) * 0.3;
  };
  ReferenceDecoder::Parts parts;
  parts.spec = spec;
  parts.outer.embedding = random({spec.vocab_size, spec.hidden_size}) * 3.0;
  parts.outer.final_norm = at::ones({spec.hidden_size});
  parts.outer.head = random({spec.vocab_size, spec.hidden_size});
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    const auto program = MakeLayerProgram(spec, nullptr, layer);
    KVASIR_CHECK(program.ok());
    TensorMap tensors;
    for (const model::RequiredTensor& tensor : LayerTensors(*program)) {
      tensors[tensor.name] = random(tensor.shape);
    }
    parts.layers.push_back(std::move(tensors));
  }
  return parts;
}

inline ReferenceDecoder TestDecoder(
    uint64_t seed = 1, std::optional<kvasir::v1::KvPlan> plan = std::nullopt,
    const model::DecoderSpec& spec = TestSpec()) {
  ReferenceDecoder::Parts parts = TestParts(spec, seed);
  parts.plan = std::move(plan);
  auto decoder = ReferenceDecoder::FromTensors(std::move(parts));
  KVASIR_CHECK(decoder.ok());
  return *std::move(decoder);
}

}  // namespace kvasir::compress
