#include "compress/train/adam_w.h"

#include <cmath>

#include "compress/runtime/for_each_index.h"

namespace kvasir::compress {

AdamW::AdamW(const std::vector<at::Tensor>& parameters,
             const AdamWOptions& options)
    : options_(options) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters) {
    slots_.push_back(
        {parameter, at::zeros_like(parameter), at::zeros_like(parameter)});
  }
}

void AdamW::Step(const std::vector<at::Tensor>& gradients, double learning_rate,
                 int threads) {
  ++steps_;
  const auto steps = static_cast<double>(steps_);
  const double correction1 = 1.0 - std::pow(options_.beta1, steps);
  const double correction2 = 1.0 - std::pow(options_.beta2, steps);
  ForEachIndex(static_cast<int64_t>(slots_.size()), threads, [&](int64_t i) {
    const at::NoGradGuard no_grad;
    Slot& slot = slots_[static_cast<size_t>(i)];
    const at::Tensor& gradient = gradients[static_cast<size_t>(i)];
    if (slot.parameter.dim() == 2) {
      slot.parameter.mul_(1.0 - learning_rate * options_.weight_decay);
    }
    slot.first.mul_(options_.beta1).add_(gradient, 1.0 - options_.beta1);
    slot.second.mul_(options_.beta2)
        .addcmul_(gradient, gradient, 1.0 - options_.beta2);
    const at::Tensor scale =
        slot.second.sqrt().mul_(1.0 / std::sqrt(correction2)) +
        options_.epsilon;
    slot.parameter.addcdiv_(slot.first, scale, -learning_rate / correction1);
  });
}

}  // namespace kvasir::compress
