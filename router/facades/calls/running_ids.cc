#include "router/facades/calls/running_ids.h"

namespace kvasir::router {

void RunningIds::Add(const std::string& scope, const std::string& id,
                     std::weak_ptr<StoppableCall> call, uint64_t number) {
  base::MutexLock lock(&mutex_);
  entries_.emplace(Key(scope, id), Entry{std::move(call), number});
}

void RunningIds::Remove(const std::string& scope, const std::string& id,
                        uint64_t number) {
  base::MutexLock lock(&mutex_);
  const auto [begin, end] = entries_.equal_range(Key(scope, id));
  for (auto it = begin; it != end; ++it) {
    if (it->second.number == number) {
      entries_.erase(it);
      return;
    }
  }
}

std::vector<std::pair<std::weak_ptr<StoppableCall>, uint64_t>> RunningIds::Find(
    const std::string& scope, const std::string& id) const {
  std::vector<std::pair<std::weak_ptr<StoppableCall>, uint64_t>> found;
  base::MutexLock lock(&mutex_);
  const auto [begin, end] = entries_.equal_range(Key(scope, id));
  for (auto it = begin; it != end; ++it) {
    found.emplace_back(it->second.call, it->second.number);
  }
  return found;
}

}  // namespace kvasir::router
