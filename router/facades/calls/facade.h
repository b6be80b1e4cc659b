// The interface between the code of a wire protocol and the rest of the server.
// To add a protocol, implement this and add a line to facades/facades.cc.
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
  // The codec of all models; null if requests must contain token ids.
  std::shared_ptr<const TextCodec> codec;
  FacadeLimits limits;
  // If null, callers need no credentials.
  std::shared_ptr<const Callers> callers;
  // Counts the open calls of all facades.
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // The running requests of all facades, by id, for calls that abort them.
  std::shared_ptr<RunningIds> running_ids = std::make_shared<RunningIds>();
  // The limit of memory for requests; null if there is no limit.
  std::shared_ptr<ByteBudget> budget;
  // The server's version, as the protocol reports it.
  std::string server_version;
  // The folder with the tokenizer's files; empty if there is no tokenizer.
  std::string tokenizer_folder;
  // Returns the tokenizer's files (name and content) if they are not in the
  // folder. If this function is null, the files are in the folder.
  std::function<absl::StatusOr<std::map<std::string, std::string>>()>
      make_tokenizer_files;
  // If true, every client of this server may download the tokenizer's files.
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
  // The full names of the services, for grpc.health.v1, for
  // example "inference.GRPCInferenceService".
  virtual std::vector<std::string> names() const = 0;

  // Call this if the bytes that a client has sent to one of the services cannot
  // be parsed as the call's message. It identifies the caller, and logs and
  // counts a refused request. Returns an error if the caller itself is refused,
  // and OK if only the bytes are wrong.
  virtual absl::Status RefuseGarbage(
      const grpc::ServerContextBase& context) const = 0;

  // Call this when a drain begins. From then on, each stream that is open now
  // ends with UNAVAILABLE as soon as none of its requests runs, even if the
  // client keeps it open. New calls are still served.
  virtual void BeginDrain() {}
  // From now on, streams that clients opened after BeginDrain end in the
  // same way.
  virtual void EndStreams() {}
};

// The threads of one facade. Some tokenize, and some build the responses
// of streams.
// Owns: these threads.
class FacadeThreads {
 public:
  explicit FacadeThreads(const FacadeLimits& limits)
      : tokenizer_(limits.num_tokenizer_threads, limits.max_tokenizer_queue),
        streams_(limits.num_stream_threads) {}

  const std::shared_ptr<TaskRunner>& streams() const {
    return streams_.runner();
  }
  // Fills in `backend`. `facade` is the protocol's name in the access log and
  // in metrics.
  void Fill(const FacadeOptions& options, const std::string& facade,
            RequestRouter* router, FacadeBackend* backend) const {
    backend->facade = facade;
    backend->router = router;
    backend->callers = options.callers;
    backend->codec = options.codec;
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
