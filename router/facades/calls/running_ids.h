// Finds running requests by their ids, for calls that stop them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace kvasir::router {

// A call whose requests can be stopped by another call.
// Threads: OnStop may be called from any thread. It must only post a task to
// the strand of the call.
class StoppableCall {
 public:
  virtual ~StoppableCall() = default;
  // Ends the request that has this number (RunningIds::NextNumber).
  virtual void OnStop(uint64_t number) = 0;
};

// A table of the running requests. The key is a scope, which contains the
// tenant's name, and the id that the client chose. Ids need not be unique: Find
// returns all requests of the scope with this id.
// Threads: its methods may be called from any thread.
class RunningIds {
 public:
  // Returns the number of a new request, which identifies it within
  // this process.
  uint64_t NextNumber() { return next_number_.fetch_add(1); }
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

  std::atomic<uint64_t> next_number_{1};
  mutable base::Mutex mutex_;
  std::multimap<Key, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
