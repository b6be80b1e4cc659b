// Requests that a call of its own can stop: who runs under which id.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvasir::router {

// Threads: any thread; only posts.
class StoppableCall {
 public:
  virtual ~StoppableCall() = default;
  // End this request of yours.
  virtual void OnStop(uint64_t number) = 0;
};

// Requests by scope (whose they are) and client id. Ids are the clients' and
// need not be unique: only requests of the same scope are found, and all of
// them. They match exactly.
// Threads: any thread.
class RunningIds {
 public:
  void Add(const std::string& scope, const std::string& id,
           std::weak_ptr<StoppableCall> call, uint64_t number);
  void Remove(const std::string& scope, const std::string& id, uint64_t number);
  std::vector<std::pair<std::weak_ptr<StoppableCall>, uint64_t>> Find(
      const std::string& scope, const std::string& id) const;

 private:
  struct Entry {
    std::weak_ptr<StoppableCall> call;
    uint64_t number = 0;
  };
  using Key = std::pair<std::string, std::string>;

  mutable base::Mutex mutex_;
  std::multimap<Key, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
