// What all calls of the KServe facade share.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "router/canonical.h"
#include "router/core/client_calls.h"
#include "router/core/task_runner.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

struct KserveLimits {
  size_t max_requests_per_stream = 1024;
  // Samples of one request: nothing is sized by `n` before this is checked.
  uint32_t max_n = 128;
  // The operator's, for requests that do not say: how large their answers can
  // get.
  uint32_t default_max_tokens = 256;
  // Streamed output that waits because the client does not read. Over it (or
  // over max_response_bytes of one answer) the stream is reset.
  size_t max_waiting_bytes_per_stream = 16 << 20;
  // Clients refuse messages of 4 MiB by default; a part is left for framing.
  size_t max_response_bytes = (4 << 20) - (64 << 10);
  // Requests whose text waits for a tokenizer thread.
  size_t max_tokenizer_queue = 4096;
  int num_tokenizer_threads = 2;
  // Threads that turn events into responses.
  int num_stream_threads = 2;
};

// Counts for ModelStatistics.
// Threads: any thread.
class KserveStatistics {
 public:
  struct Outcome {
    bool ok = false;
    absl::Duration total;
    // From the engine; zero where it did not say.
    absl::Duration queue;
    absl::Duration compute;
    absl::Time end;
  };
  void Record(const std::string& model, const Outcome& outcome);
  // Zeros for a model without requests.
  inference::ModelStatistics Of(const std::string& model) const;

 private:
  mutable base::Mutex mutex_;
  std::map<std::string, inference::ModelStatistics> models_
      ABSL_GUARDED_BY(mutex_);
};

class KserveStream;

// Requests by scope (address and tenant) and client id, so that a stop
// request that comes in a call of its own finds what it is to stop. Ids are the
// clients' and need not be unique: only requests of the same scope are found.
// Threads: any thread.
class KserveStopIndex {
 public:
  void Add(const std::string& scope, const std::string& id,
           std::weak_ptr<KserveStream> stream, uint64_t number);
  void Remove(const std::string& scope, const std::string& id, uint64_t number);
  std::vector<std::pair<std::weak_ptr<KserveStream>, uint64_t>> Find(
      const std::string& scope, const std::string& id) const;

 private:
  struct Entry {
    std::weak_ptr<KserveStream> stream;
    uint64_t number = 0;
  };
  using Key = std::pair<std::string, std::string>;

  mutable base::Mutex mutex_;
  std::multimap<Key, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// The open calls of ModelStreamInfer, so that a drain can end them.
// Threads: any thread.
class KserveStreams {
 public:
  void Add(const std::shared_ptr<KserveStream>& stream);
  void Remove(const KserveStream* stream);
  // Tells those that are open. The clients' next ones are served as calls of
  // their own are, until EndAll: from then on each is told as it opens.
  void BeginDrain();
  void EndAll();

 private:
  void TellAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const KserveStream*, std::weak_ptr<KserveStream>> streams_
      ABSL_GUARDED_BY(mutex_);
};

// Threads: any thread; constant but for what synchronizes itself.
struct KserveBackend {
  RequestRouter* router = nullptr;
  // By served model name; a model without one takes only token ids.
  std::map<std::string, std::shared_ptr<const TextCodec>> codecs;
  KserveLimits limits;
  const base::Clock* clock = &base::Clock::Real();
  std::shared_ptr<TaskRunner> tokenizer;
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // Null: memory has no limit.
  std::shared_ptr<ByteBudget> budget;
  KserveStatistics statistics;
  KserveStopIndex stop_index;
  KserveStreams streams;
  // Unique within the process.
  std::atomic<uint64_t> next_number{1};
};

}  // namespace kvasir::router
