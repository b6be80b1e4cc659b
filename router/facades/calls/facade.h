// The interface between a wire protocol and the rest of the server. A new
// protocol implements it and adds one line to facades/facades.cc.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "router/base/canonical.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/backend.h"

namespace kvasir::router {

// Options of a facade. All facades get the same options, and each ignores those
// that it does not need.
struct FacadeOptions {
  Codecs codecs;
  FacadeLimits limits;
  // Null: callers need no credentials.
  std::shared_ptr<const Callers> callers;
  // Counts the open calls of all facades.
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // The requests of all facades that an abort can find.
  std::shared_ptr<RunningIds> running_ids = std::make_shared<RunningIds>();
  // The limit of memory for requests; null: no limit.
  std::shared_ptr<ByteBudget> budget;
  // The server's version, as the protocol reports it.
  std::string server_version;
  // The folder with the tokenizer's files; empty: there is no tokenizer.
  std::string tokenizer_folder;
  // Makes the tokenizer's files, as names and contents, if they are not in the
  // folder. Null: they are there.
  std::function<absl::StatusOr<std::map<std::string, std::string>>()>
      make_tokenizer_files;
  // True: every client that may call this server may fetch the tokenizer's
  // files.
  bool share_tokenizer = false;
};

// A wire protocol that clients use. It must outlive the gRPC server with which
// its services are registered, because calls may run until that server ends.
// Threads: its methods may be called from any thread.
class Facade {
 public:
  virtual ~Facade() = default;

  // The gRPC services of the protocol. Register them with one server only.
  virtual std::vector<grpc::Service*> services() = 0;
  // The full names of the services, for grpc.health.v1, for example
  // "inference.GRPCInferenceService".
  virtual std::vector<std::string> names() const = 0;

  // Call this if a client has called one of the services with bytes that cannot
  // be parsed as the call's message. It identifies the caller, and logs and
  // counts a refused request. Returns an error if the caller itself is refused,
  // and OK if only the bytes are wrong.
  virtual absl::Status RefuseGarbage(
      const grpc::ServerContextBase& context) const = 0;

  // Call this when the server begins to drain and still serves calls. Each open
  // stream then ends with UNAVAILABLE as soon as none of its requests runs,
  // even if its client keeps it open.
  virtual void BeginDrain() {}
  // From now on, streams that clients have opened after BeginDrain end in the
  // same way as those that were open before.
  virtual void EndStreams() {}
};

// The threads of one facade: for its tokenizer, and for the responses of its
// streams.
// Owns: these threads.
class FacadeThreads {
 public:
  explicit FacadeThreads(const FacadeLimits& limits)
      : tokenizer_(limits.num_tokenizer_threads, limits.max_tokenizer_queue),
        streams_(limits.num_stream_threads) {}

  const std::shared_ptr<TaskRunner>& streams() const {
    return streams_.runner();
  }
  // Sets the members of `backend`. `facade` is the protocol's name in the
  // access log and in metrics.
  void Fill(const FacadeOptions& options, const std::string& facade,
            RequestRouter* router, FacadeBackend* backend) const {
    backend->facade = facade;
    backend->router = router;
    backend->callers = options.callers;
    backend->codecs = options.codecs;
    backend->limits = options.limits;
    backend->server_version = options.server_version;
    backend->calls = options.calls;
    backend->running_ids = options.running_ids;
    backend->budget = options.budget;
    backend->tokenizer = tokenizer_.runner();
  }

 private:
  TaskPool tokenizer_;
  TaskPool streams_;
};

}  // namespace kvasir::router
