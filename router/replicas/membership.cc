#include "router/replicas/membership.h"

#include <map>

namespace kvasir::router {

void Membership::OnAnswer(
    const std::vector<WorkerAddress>& answer,
    const std::function<bool(const std::string& target)>& alive) {
  std::map<std::string, const WorkerAddress*> found;
  for (const WorkerAddress& address : answer) {
    found.emplace(address.target, &address);
  }
  const bool keep_live = rules_.empty_keeps_live && found.empty();
  std::erase_if(known_, [&](Known& known) {
    if (found.erase(known.address.target) > 0) {
      known.missing = 0;
      return false;
    }
    if (keep_live && alive(known.address.target)) return false;
    ++known.missing;
    return known.missing >= rules_.answers_to_remove;
  });
  for (const WorkerAddress& address : answer) {
    if (found.erase(address.target) > 0) known_.push_back({address});
  }
}

std::vector<WorkerAddress> Membership::workers() const {
  std::vector<WorkerAddress> workers;
  for (const Known& known : known_) workers.push_back(known.address);
  return workers;
}

}  // namespace kvasir::router
