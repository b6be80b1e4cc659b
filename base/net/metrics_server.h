// Serves Prometheus metrics and readiness over HTTP, on a port of its own
// because gRPC cannot share a port with HTTP/1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/net/acceptor.h"
#include "prometheus/collectable.h"

namespace kvasir::base {

// Histogram buckets in seconds. The first three have all of vLLM's buckets, so
// that dashboards and alert rules made for vLLM work. In addition, inter-token
// buckets begin with 1, 2 and 5 ms, and request-phase buckets with 1 to 100 ms.
const std::vector<double>& TimeToFirstTokenBuckets();
const std::vector<double>& InterTokenBuckets();
const std::vector<double>& RequestPhaseBuckets();
// Buckets for numbers of tokens: 1, 2, 5, 10, 20, ... up to the first that is
// at least max_model_len.
std::vector<double> TokenCountBuckets(int64_t max_model_len);
// Buckets for one scheduler step or the router's overhead, from 0.1 ms.
const std::vector<double>& FineBuckets();

// Serves GET /metrics, and GET /healthz for probes that do not speak gRPC.
// /healthz answers 200 if the process is ready, else 503. HEAD gives the same
// answer without its body. Each connection serves one request.
//
// A client may take 2 s to send its request and 10 s to read the answer. The
// 65th connection closes the oldest one, so that clients which keep
// connections open cannot block a scrape.
//
// Owns: its listener, its connections and its thread, which collects from
// the sources.
// Threads: its methods may be called from any thread.
class MetricsServer {
 public:
  // Listens on `host:port`; port 0 picks a free one. UNAVAILABLE names the
  // address and --metrics-port if the port is taken; FAILED_PRECONDITION names
  // `host_flag` if the host is not an address of this machine.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& host, int port,
      const std::string& host_flag = "--host");
  // Closes all connections without waiting for clients.
  ~MetricsServer();

  // Collects from `source` at every scrape, as long as the server exists.
  void Add(const std::shared_ptr<prometheus::Collectable>& source)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Sets the state that /healthz reports; at first: not ready.
  void SetReady(bool ready) { ready_ = ready; }
  int port() const { return acceptor_->port(); }

 private:
  struct OwnMetrics;
  struct Connection {
    int socket = -1;
    // The connection is closed at this time.
    absl::Time end;
    std::string request;
    // Empty until the request is complete.
    std::string answer;
    size_t sent = 0;
  };

  MetricsServer(std::unique_ptr<Acceptor> acceptor, int wake);
  void Wake();
  void Loop() ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeAccepted(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reads and writes as far as possible without blocking. Returns false if the
  // connection has ended.
  bool Advance(Connection* connection);
  std::string Answer(absl::string_view request);
  std::string Scrape() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::unique_ptr<Acceptor> acceptor_;
  const int wake_;
  const std::unique_ptr<OwnMetrics> own_;
  std::atomic<bool> ready_ = false;
  std::atomic<bool> stopping_ = false;
  Mutex mutex_;
  std::vector<std::shared_ptr<prometheus::Collectable>> sources_
      ABSL_GUARDED_BY(mutex_);
  std::vector<int> accepted_ ABSL_GUARDED_BY(mutex_);
  // Used only by the server's thread. The oldest connection comes first.
  std::vector<Connection> connections_;
  std::thread thread_;
};

}  // namespace kvasir::base
