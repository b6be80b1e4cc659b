// Prometheus over HTTP, and whether the process is ready: served on a port of
// their own because gRPC cannot share one with HTTP/1.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/net/listen_address.h"
#include "prometheus/collectable.h"

namespace kvasir::base {

// Histogram buckets, in seconds unless said otherwise: vLLM's, whose
// dashboards and rules then work, with 1-2-5 ms at the low end of the
// inter-token ones.
const std::vector<double>& TimeToFirstTokenBuckets();
const std::vector<double>& InterTokenBuckets();
const std::vector<double>& RequestPhaseBuckets();
// Tokens: 1-2-5 series up to and including the first step >= max_model_len.
std::vector<double> TokenCountBuckets(int64_t max_model_len);
// Seconds of one scheduler step or of router overhead, from 0.1 ms.
const std::vector<double>& FineBuckets();

// Serves GET /metrics, and GET /healthz for probes that speak no gRPC: 200
// where the process is ready, else 503.
//
// Threads: those of the HTTP library; Stop and the destructor end them, within
// milliseconds where no scrape is under way. Add and Stop from one, SetReady
// from any.
class MetricsServer {
 public:
  // `host:port` to listen on; port 0 picks one. UNAVAILABLE names the address
  // and --metrics-port when it is taken; FAILED_PRECONDITION names `host_flag`
  // when that is no address of this machine, or an IPv6 one and the HTTP
  // library was built without.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& host, int port,
      const std::string& host_flag = "--host");
  ~MetricsServer();

  // `source` is asked at every scrape while it lives.
  void Add(const std::shared_ptr<prometheus::Collectable>& source);
  // What /healthz says; at first: not ready.
  void SetReady(bool ready);
  int port() const { return port_; }

  // Serves no more. Returns how many connections it made to itself before the
  // library's threads ended: one wakes them. Nothing but the destructor
  // follows.
  int Stop();

 private:
  class Http;
  MetricsServer(std::unique_ptr<Http> http, const std::string& host, int port);

  std::unique_ptr<Http> http_;
  const int port_;
  const Knocker knocker_;
};

}  // namespace kvasir::base
