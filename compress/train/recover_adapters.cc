#include "compress/train/recover_adapters.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/philox.h"

namespace kvasir::compress {
namespace {

// The `draw` of the initial values. Draws during training are counted from 0.
constexpr uint64_t kInitialDraw = ~uint64_t{0};

// Returns `count` random numbers in [0, 1) that depend only on seed, draw and
// stream.
at::Tensor Uniform(int64_t count, uint64_t seed, uint64_t draw,
                   uint64_t stream) {
  const base::PhiloxKey key = base::PhiloxKeyFromSeed(seed);
  at::Tensor values = at::empty({count}, at::kFloat);
  float* data = values.data_ptr<float>();
  base::PhiloxCounter bits{};
  for (int64_t i = 0; i < count; ++i) {
    const auto lane = static_cast<size_t>(i % 4);
    if (lane == 0) {
      const uint64_t low = (stream << 32) | static_cast<uint64_t>(i / 4);
      bits = base::Philox4x32(key, base::PhiloxCounterOf(low, draw));
    }
    data[i] = static_cast<float>(bits[lane] >> 8) * 0x1p-24f;
  }
  return values;
}

std::string ProjectionOf(const ProgramPart& part) {
  const bool down = part.space == plan::Space::kLowRank ||
                    part.space == plan::Space::kRopeLowRank;
  return absl::StrCat(part.prefix, down ? ".down" : "", ".weight");
}

}  // namespace

std::vector<std::string> AdaptedWeights(const LayerProgram& program) {
  std::vector<std::string> names = {"self_attn.q_proj.weight"};
  for (const ProgramPart& part : program.key) {
    names.push_back(ProjectionOf(part));
  }
  if (!program.joint) names.push_back(ProjectionOf(program.value));
  names.push_back("self_attn.o_proj.weight");
  return names;
}

AdapterSet::AdapterSet(const ReferenceDecoder& decoder,
                       const AdapterOptions& options)
    : decoder_(decoder), options_(options) {
  const at::NoGradGuard no_grad;
  uint64_t index = 0;
  for (int64_t l = 0; l < decoder.spec().num_layers(); ++l) {
    std::vector<Adapter>& layer = layers_.emplace_back();
    for (std::string& name : AdaptedWeights(decoder.program(l))) {
      Adapter adapter;
      adapter.weight = decoder.layer(l).at(name);
      const int64_t outputs = adapter.weight.size(0);
      const int64_t inputs = adapter.weight.size(1);
      // A rank above that of the matrix would have no effect.
      const int64_t rank = std::min({options.rank, outputs, inputs});
      adapter.scale = options.alpha / static_cast<double>(options.rank);
      adapter.index = index++;
      const double bound = 1.0 / std::sqrt(static_cast<double>(inputs));
      adapter.a =
          Uniform(rank * inputs, options.seed, kInitialDraw, adapter.index)
              .mul_(2.0 * bound)
              .sub_(bound)
              .view({rank, inputs})
              .to(decoder.device());
      adapter.b = at::zeros({outputs, rank}, adapter.a.options());
      for (const at::Tensor& tensor : {adapter.a, adapter.b}) {
        tensor.set_requires_grad(true);
        parameters_.push_back(tensor);
      }
      adapter.name = std::move(name);
      layer.push_back(std::move(adapter));
    }
  }
}

at::Tensor AdapterSet::KeptInputs(const Adapter& adapter, uint64_t draw) const {
  const at::NoGradGuard no_grad;
  const double kept = 1.0 - options_.dropout;
  return Uniform(adapter.a.size(1), options_.seed, draw, adapter.index)
      .lt(kept)
      .to(at::kFloat)
      .div_(kept)
      .to(decoder_.device());
}

TensorMap AdapterSet::AdaptLayer(int64_t layer, uint64_t draw) const {
  TensorMap tensors = decoder_.layer(layer);
  for (const Adapter& adapter : layers_[static_cast<size_t>(layer)]) {
    const at::Tensor a = options_.dropout > 0.0
                             ? adapter.a * KeptInputs(adapter, draw)
                             : adapter.a;
    tensors.find(adapter.name)->second =
        at::addmm(adapter.weight, adapter.b, a, 1.0, adapter.scale);
  }
  return tensors;
}

TensorMap AdapterSet::MergeLayer(int64_t layer) const {
  const at::NoGradGuard no_grad;
  TensorMap merged;
  for (const Adapter& adapter : layers_[static_cast<size_t>(layer)]) {
    merged.emplace(adapter.name, at::addmm(adapter.weight, adapter.b, adapter.a,
                                           1.0, adapter.scale));
  }
  return merged;
}

int64_t AdapterSet::num_parameters() const {
  int64_t count = 0;
  for (const at::Tensor& parameter : parameters_) count += parameter.numel();
  return count;
}

}  // namespace kvasir::compress
