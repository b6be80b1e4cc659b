// The state that all calls of the KServe facade share.
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

// The statistics of requests, by model, that the RPC ModelStatistics reports.
// Threads: its methods may be called from any thread.
class KserveStatistics {
 public:
  struct Outcome {
    bool ok = false;
    absl::Duration total;
    // The time from the arrival of the request to its submission to the router.
    absl::Duration input;
    // Times that the engine has reported; zero if it has reported none.
    absl::Duration queue;
    absl::Duration compute;
    absl::Time end;
  };
  void Record(const std::string& model, const Outcome& outcome);
  // Returns the statistics of a model; all are zero if it has had no requests.
  inference::ModelStatistics StatisticsOf(const std::string& model) const;

 private:
  mutable base::Mutex mutex_;
  std::map<std::string, inference::ModelStatistics> models_
      ABSL_GUARDED_BY(mutex_);
};

class KserveStream;

// The open calls of ModelStreamInfer, listed so that a drain can end them.
// Threads: its methods may be called from any thread.
class KserveStreams {
 public:
  void Add(const std::shared_ptr<KserveStream>& stream);
  void Remove(const KserveStream* stream);
  // BeginDrain ends the streams that are open at that moment. Streams that
  // clients open later are served until EndAll ends them. After EndAll, a new
  // stream ends as soon as it opens.
  void BeginDrain();
  void EndAll();

 private:
  void DrainAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const KserveStream*, std::weak_ptr<KserveStream>> streams_
      ABSL_GUARDED_BY(mutex_);
};

// State that all calls of the KServe facade share.
// Threads: any thread may use it, because its members are constant or
// protect themselves.
struct KserveBackend : FacadeBackend {
  KserveStatistics statistics;
  KserveStreams streams;
};

}  // namespace kvasir::router
