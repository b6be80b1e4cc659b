// --metrics-compat=vllm: exports families under vLLM's names as well, for
// dashboards, autoscalers and endpoint pickers that were made for vLLM.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "prometheus/collectable.h"

namespace kvasir::base {

// Copies the families of `source` under vLLM's names, with vLLM's base labels
// model_name and engine. Families without a counterpart are left out.
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
