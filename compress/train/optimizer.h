#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "compress/train/named_tensor.h"

namespace kvasir::compress {

struct OptimizerOptions {
  // Muon for the matrices inside the layers (AdamW for the rest), else AdamW
  // for everything.
  bool muon = true;
  double weight_decay = 0.1;  // matrices only, never norms
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double muon_momentum = 0.95;
};

// AdamW, or Muon (momentum whose update is made orthogonal by a Newton-Schulz
// iteration, scaled to AdamW's usual root mean square so that both take the
// same learning rate) for the matrices inside the layers.
// Owns: the moments. The parameters are shared with the decoder.
// Threads: one caller; Step spreads its own work over `threads`.
class Optimizer {
 public:
  Optimizer(std::vector<NamedTensor> parameters,
            const OptimizerOptions& options);

  // `gradients` in the order of the parameters.
  void Step(const std::vector<at::Tensor>& gradients, double learning_rate,
            int threads);

  // Every tensor of the optimizer's state, in a fixed order, for a checkpoint.
  std::vector<NamedTensor> state() const;
  // Steps taken so far: the bias correction depends on it.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    at::Tensor first;   // momentum
    at::Tensor second;  // mean square; undefined for Muon
    bool decays = false;
  };

  void StepAdamW(Slot& slot, const at::Tensor& gradient,
                 double learning_rate) const;
  void StepMuon(Slot& slot, const at::Tensor& gradient,
                double learning_rate) const;

  OptimizerOptions options_;
  std::vector<Slot> slots_;
  int64_t steps_ = 0;
};

}  // namespace kvasir::compress
