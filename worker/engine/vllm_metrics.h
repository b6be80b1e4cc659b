// --metrics-compat=vllm: the families that dashboards, autoscalers and endpoint
// pickers made for vLLM read, under vLLM's names, beside our own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "prometheus/collectable.h"

namespace kvasir::base {

// Copies what `source` collects under vLLM's names, with its base labels
// (model_name, engine). Families that it has no counterpart for are left out.
class VllmMetrics final : public prometheus::Collectable {
 public:
  VllmMetrics(std::shared_ptr<prometheus::Collectable> source,
              std::string model_name);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::shared_ptr<prometheus::Collectable> source_;
  const std::string model_name_;
};

}  // namespace kvasir::base
