// Implements --metrics-compat=vllm: exports metrics also under vLLM's names,
// for dashboards, autoscalers and endpoint pickers that were made for vLLM.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "prometheus/collectable.h"

namespace kvasir::base {

// Exports those metric families of `source` that vLLM also has, with vLLM's
// names and labels (model_name and engine). Omits all other families.
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
