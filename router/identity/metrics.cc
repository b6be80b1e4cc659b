#include "router/identity/metrics.h"

namespace kvasir::router {

CallerMetrics::CallerMetrics()
    : registry_(std::make_shared<prometheus::Registry>()),
      refused_(prometheus::BuildCounter()
                   .Name("kvasir_router_callers_refused_total")
                   .Help("Calls refused because of their caller or a quota, by "
                         "reason (--identities)")
                   .Register(*registry_)),
      reads_(prometheus::BuildCounter()
                 .Name("kvasir_router_identities_reads_total")
                 .Help("Changes of the --identities file, by result")
                 .Register(*registry_)),
      file_refused_(prometheus::BuildGauge()
                        .Name("kvasir_router_identities_refused")
                        .Help("1 while the changed --identities file is "
                              "refused and the previous one stays in use")
                        .Register(*registry_)
                        .Add({})) {
  // Create these time series now, with value 0. Otherwise Prometheus would not
  // see their first increment as a change.
  for (const CallerRefusal why : kCallerRefusals) {
    refused_.Add({{"reason", CallerRefusalName(why)}});
  }
  for (const char* result : {"ok", "failed"}) {
    reads_.Add({{"result", result}});
  }
}

void CallerMetrics::OnCallerRefused(CallerRefusal why) {
  refused_.Add({{"reason", CallerRefusalName(why)}}).Increment();
}

void CallerMetrics::OnIdentitiesRead(bool ok) {
  file_refused_.Set(ok ? 0 : 1);
  reads_.Add({{"result", ok ? "ok" : "failed"}}).Increment();
}

}  // namespace kvasir::router
