// The operators' interface to every long-running program: the metrics, health
// and admin ports, the ready line, the ready file, and the drain.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/net/grpc_server.h"
#include "base/net/metrics_server.h"
#include "base/net/tls.h"
#include "model/tokenizer/tokenizer.h"
#include "prometheus/collectable.h"
#include "router/identity/callers.h"
#include "server/flags/options.h"
#include "server/runtime/admin_service.h"
#include "server/runtime/node.h"

namespace kvasir::cli {

struct SurfaceOptions {
  std::string program;  // "serve", "router", "worker" or "rank"
  std::string config_toml;
  ListenFlags listen;
  CommonFlags common;
  // The callers that may use the admin port. If null, anybody who can connect
  // may use it.
  std::shared_ptr<const router::Callers> callers;
  // The TLS files of this program's ports and channels.
  std::shared_ptr<base::TlsWatch> tls;
  // If true, only the metrics port is opened, and no ready line is printed.
  // Used for a rank that another program starts and drains.
  bool metrics_only = false;
};

// Threads: only the main thread, except for Fail, RequestDrain, serving and
// SetServing, which any thread may call.
class OperatorSurface {
 public:
  // Opens the ports. Call it before any slow work. The health port reports
  // NOT_SERVING until Ready.
  static absl::StatusOr<std::unique_ptr<OperatorSurface>> Start(
      SurfaceOptions options);

  // Makes the program report NOT_SERVING and end with a failure.
  void Fail(const std::string& why);
  // Makes the program drain and end. May be called from any thread.
  void RequestDrain() { latch_.Request(options_.listen.drain_timeout); }

  // The address of the metrics port: HOST:PORT.
  std::string metrics_target() const;

  // The state that the health port and /healthz of the metrics port report. May
  // be called from any thread.
  bool serving() const ABSL_LOCKS_EXCLUDED(health_mutex_);
  // Sets whether the health port reports SERVING between Ready and the
  // program's end. May be called from any thread.
  void SetServing(bool serving) ABSL_LOCKS_EXCLUDED(health_mutex_);

  // Serves the node's metrics and `more` (with --metrics-compat vllm also under
  // vLLM's names), and reports SERVING. Then writes the ready file and prints
  // the ready line, unless Fail was called.
  absl::Status Ready(const Node& node, const Node::MetricsSources& more = {});

  // Waits for SIGTERM, SIGINT, a Drain call or Fail, then drains the node.
  // Returns the exit code.
  int WaitAndDrain(Node* node);

 private:
  explicit OperatorSurface(SurfaceOptions options);
  const std::string& metrics_host() const;
  bool Serves() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(health_mutex_) {
    return ready_ && serving_ && !failed_;
  }
  void PublishHealth() ABSL_EXCLUSIVE_LOCKS_REQUIRED(health_mutex_);

  const SurfaceOptions options_;
  DrainLatch latch_;
  AdminService admin_;
  std::atomic<bool> failed_{false};
  std::unique_ptr<base::MetricsServer> metrics_server_;
  std::unique_ptr<base::GrpcServer> admin_server_;   // null: metrics_only
  std::unique_ptr<base::GrpcServer> health_server_;  // null: metrics_only
  mutable base::Mutex health_mutex_;
  bool serving_ ABSL_GUARDED_BY(health_mutex_) = false;
  bool ready_ ABSL_GUARDED_BY(health_mutex_) = false;
};

}  // namespace kvasir::cli
