// Prometheus metrics about the callers of --identities; docs/metrics.md lists
// them. Labels never contain tenants' names, because the readers of metrics
// need not know them.
#pragma once

#include <memory>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/gauge.h"
#include "prometheus/registry.h"
#include "router/identity/callers.h"

namespace kvasir::router {

// Threads: its methods may be called from any thread.
class CallerMetrics final : public CallerObserver {
 public:
  CallerMetrics();

  void OnCallerRefused(CallerRefusal why) override;
  void OnIdentitiesRead(bool ok) override;

  // The metrics server exports this registry.
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Family<prometheus::Counter>& refused_;
  prometheus::Family<prometheus::Counter>& reads_;
  prometheus::Gauge& file_refused_;
};

}  // namespace kvasir::router
