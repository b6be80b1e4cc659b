// One wire protocol as the rest of the server sees it, whatever its calls are.
// A new protocol implements this and adds one line to facades/facades.cc.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "router/base/canonical.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/backend.h"

namespace kvasir::router {

// The same options for every facade; each ignores what it does not need.
struct FacadeOptions {
  Codecs codecs;
  FacadeLimits limits;
  // Null: callers are not asked for credentials.
  std::shared_ptr<const Callers> callers;
  // Counts the facade's open calls.
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // Requests take their bytes from it; null: memory has no limit.
  std::shared_ptr<ByteBudget> budget;
  // The server's version, as the protocol reports it.
  std::string server_version;
  // The folder of the tokenizer's files; empty: there is no tokenizer.
  std::string tokenizer_folder;
  // Every client of this listener may fetch the tokenizer's files.
  bool share_tokenizer = false;
};

// Must outlive the server that its services are registered with: a service's
// calls end with the server.
// Threads: any thread.
class Facade {
 public:
  virtual ~Facade() = default;

  // To be registered with one server.
  virtual std::vector<grpc::Service*> services() = 0;
  // Their full names, for grpc.health.v1: "inference.GRPCInferenceService".
  virtual std::vector<std::string> names() const = 0;

  // A call of one of the services sent bytes that are not its message. Logs and
  // counts a refused request. Returns why the caller itself is refused, or OK
  // if only the bytes are wrong.
  virtual absl::Status RefuseGarbage(
      const grpc::ServerContextBase& context) const = 0;

  // The server announces its end, while calls are still served. Streams that
  // clients keep open end with UNAVAILABLE as soon as none of their requests
  // runs.
  virtual void BeginDrain() {}
  // From now on the same holds for streams that clients open after BeginDrain.
  virtual void EndStreams() {}
};

// Owns: the tokenizer's and the streams' threads of one facade.
class FacadeThreads {
 public:
  explicit FacadeThreads(const FacadeLimits& limits)
      : tokenizer_(limits.num_tokenizer_threads, limits.max_tokenizer_queue),
        streams_(limits.num_stream_threads) {}

  const std::shared_ptr<TaskRunner>& streams() const {
    return streams_.runner();
  }
  // `facade` is the protocol's name in the access log and in metrics.
  void Fill(const FacadeOptions& options, const std::string& facade,
            RequestRouter* router, FacadeBackend* backend) const {
    backend->facade = facade;
    backend->router = router;
    backend->callers = options.callers;
    backend->codecs = options.codecs;
    backend->limits = options.limits;
    backend->server_version = options.server_version;
    backend->calls = options.calls;
    backend->budget = options.budget;
    backend->tokenizer = tokenizer_.runner();
  }

 private:
  TaskPool tokenizer_;
  TaskPool streams_;
};

}  // namespace kvasir::router
