// Running requests by id, for calls that stop them.
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

// Threads: any thread; implementations only post.
class StoppableCall {
 public:
  virtual ~StoppableCall() = default;
  // Ends the call's request of this number.
  virtual void OnStop(uint64_t number) = 0;
};

// Requests by scope (their tenant) and client id. Clients choose ids, which
// need not be unique: a lookup finds all requests with exactly this id in the
// same scope.
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
