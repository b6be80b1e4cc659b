// What every facade's service is made of, whatever its protocol.
#pragma once

#include <memory>
#include <string>

#include "router/base/canonical.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/backend.h"

namespace kvasir::router {

struct FacadeOptions {
  Codecs codecs;
  // Null: nobody is asked who he is.
  std::shared_ptr<const Callers> callers;
  // Its calls are counted there.
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // Its requests are taken from it; null: memory has no limit.
  std::shared_ptr<ByteBudget> budget;
  // For what the protocol says of its server.
  std::string server_version;
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
  void Fill(const FacadeOptions& options, const std::string& facade,
            RequestRouter* router, FacadeBackend* backend) const {
    backend->facade = facade;
    backend->router = router;
    backend->callers = options.callers;
    backend->codecs = options.codecs;
    backend->calls = options.calls;
    backend->budget = options.budget;
    backend->tokenizer = tokenizer_.runner();
  }

 private:
  TaskPool tokenizer_;
  TaskPool streams_;
};

}  // namespace kvasir::router
