// State that all calls of the KServe facade share.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "proto/inference/grpc_service.pb.h"
#include "router/facades/calls/backend.h"

namespace kvasir::router {

// Counts for ModelStatistics.
// Threads: any thread.
class KserveStatistics {
 public:
  struct Outcome {
    bool ok = false;
    absl::Duration total;
    // Time until the request is parsed, tokenized and submitted.
    absl::Duration input;
    // From the engine; zero if it did not report it.
    absl::Duration queue;
    absl::Duration compute;
    absl::Time end;
  };
  void Record(const std::string& model, const Outcome& outcome);
  // Returns zeros for a model without requests.
  inference::ModelStatistics Of(const std::string& model) const;

 private:
  mutable base::Mutex mutex_;
  std::map<std::string, inference::ModelStatistics> models_
      ABSL_GUARDED_BY(mutex_);
};

class KserveStream;

// The open calls of ModelStreamInfer, so that a drain can end them.
// Threads: any thread.
class KserveStreams {
 public:
  void Add(const std::shared_ptr<KserveStream>& stream);
  void Remove(const KserveStream* stream);
  // Ends the open streams. Streams that clients open later are served until
  // EndAll; after that each one ends as it opens.
  void BeginDrain();
  void EndAll();

 private:
  void DrainAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const KserveStream*, std::weak_ptr<KserveStream>> streams_
      ABSL_GUARDED_BY(mutex_);
};

// Threads: any thread; constant except for members that synchronize themselves.
struct KserveBackend : FacadeBackend {
  KserveStatistics statistics;
  KserveStreams streams;
};

}  // namespace kvasir::router
