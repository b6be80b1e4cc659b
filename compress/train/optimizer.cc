#include "compress/train/optimizer.h"

#include <algorithm>
#include <cmath>

#include "compress/runtime/for_each_index.h"

namespace kvasir::compress {
namespace {

bool IsLayerMatrix(const NamedTensor& parameter) {
  return parameter.tensor.dim() == 2 &&
         parameter.name.find(".layers.") != std::string::npos;
}

// Nearest orthogonal matrix, roughly: singular values end within about 30 % of
// 1, which is enough here. The coefficients are those of the published quintic
// iteration, chosen for a steep slope at 0.
at::Tensor Orthogonalize(const at::Tensor& matrix) {
  constexpr double kA = 3.4445;
  constexpr double kB = -4.7750;
  constexpr double kC = 2.0315;
  constexpr int kIterations = 5;
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t().contiguous() : matrix;
  x = x / (x.norm() + 1e-7);
  for (int i = 0; i < kIterations; ++i) {
    const at::Tensor gram = at::mm(x, x.t());
    const at::Tensor polynomial = at::addmm(gram, gram, gram, kB, kC);
    x = at::addmm(x, polynomial, x, kA, 1.0);
  }
  return tall ? x.t() : x;
}

}  // namespace

Optimizer::Optimizer(std::vector<NamedTensor> parameters,
                     const OptimizerOptions& options)
    : options_(options) {
  at::NoGradGuard no_grad;
  for (NamedTensor& parameter : parameters) {
    Slot slot;
    slot.first = at::zeros_like(parameter.tensor);
    if (!options_.muon || !IsLayerMatrix(parameter)) {
      slot.second = at::zeros_like(parameter.tensor);
    }
    slot.decays = parameter.tensor.dim() == 2;
    slot.name = std::move(parameter.name);
    slot.parameter = std::move(parameter.tensor);
    slots_.push_back(std::move(slot));
  }
}

void Optimizer::Step(const std::vector<at::Tensor>& gradients,
                     double learning_rate, int threads) {
  ++steps_;
  ForEachIndex(static_cast<int64_t>(slots_.size()), threads, [&](int64_t i) {
    at::NoGradGuard no_grad;
    const auto index = static_cast<size_t>(i);
    Slot& slot = slots_[index];
    if (slot.decays) {
      slot.parameter.mul_(1.0 - learning_rate * options_.weight_decay);
    }
    if (slot.second.defined()) {
      StepAdamW(slot, gradients[index], learning_rate);
    } else {
      StepMuon(slot, gradients[index], learning_rate);
    }
  });
}

void Optimizer::StepAdamW(Slot& slot, const at::Tensor& gradient,
                          double learning_rate) const {
  const auto steps = static_cast<double>(steps_);
  const double correction1 = 1.0 - std::pow(options_.beta1, steps);
  const double correction2 = 1.0 - std::pow(options_.beta2, steps);
  slot.first.mul_(options_.beta1).add_(gradient, 1.0 - options_.beta1);
  slot.second.mul_(options_.beta2)
      .addcmul_(gradient, gradient, 1.0 - options_.beta2);
  const at::Tensor scale =
      slot.second.sqrt().mul_(1.0 / std::sqrt(correction2)) + options_.epsilon;
  slot.parameter.addcdiv_(slot.first, scale, -learning_rate / correction1);
}

void Optimizer::StepMuon(Slot& slot, const at::Tensor& gradient,
                         double learning_rate) const {
  slot.first.mul_(options_.muon_momentum)
      .add_(gradient, 1.0 - options_.muon_momentum);
  const at::Tensor ahead = at::add(gradient * (1.0 - options_.muon_momentum),
                                   slot.first, options_.muon_momentum);
  // An orthogonal [r, c] matrix has root mean square 1 / sqrt(max(r, c));
  // AdamW's updates have about 0.2.
  const double longest = static_cast<double>(
      std::max(slot.parameter.size(0), slot.parameter.size(1)));
  slot.parameter.add_(Orthogonalize(ahead),
                      -learning_rate * 0.2 * std::sqrt(longest));
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> all;
  for (const Slot& slot : slots_) {
    all.push_back({slot.name + ".first", slot.first});
    if (slot.second.defined()) {
      all.push_back({slot.name + ".second", slot.second});
    }
  }
  return all;
}

}  // namespace kvasir::compress
