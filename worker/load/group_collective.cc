#include "worker/load/group_collective.h"

#include <utility>

#include "base/status_macros.h"

namespace kvasir::cli {

void GroupCollective::Begin(std::unique_ptr<CollectiveGroup> joining) {
  base::MutexLock lock(&mutex_);
  joining_ = std::move(joining);
}

absl::Status GroupCollective::Connect(absl::Span<const std::string> addresses) {
  CollectiveGroup* joining = nullptr;
  {
    base::MutexLock lock(&mutex_);
    if (!ended_.ok()) return ended_;
    joining = joining_.get();
  }
  // Connect is called without the lock, so that Abort can interrupt it.
  // `joining` stays valid, because only this thread resets `joining_`.
  auto collective = joining->Connect(addresses);
  base::MutexLock lock(&mutex_);
  joining_ = nullptr;
  if (!ended_.ok()) return ended_;
  KVASIR_RETURN_IF_ERROR(collective.status());
  collective_ = *std::move(collective);
  return absl::OkStatus();
}

void GroupCollective::Abort(const absl::Status& why) {
  base::MutexLock lock(&mutex_);
  if (!ended_.ok()) return;
  ended_ = why;
  if (joining_ != nullptr) joining_->Abort(why);
  if (collective_ != nullptr) collective_->Abort(why);
}

worker::Collective* GroupCollective::get() const {
  base::MutexLock lock(&mutex_);
  return collective_.get();
}

void GroupCollective::Reset() {
  std::unique_ptr<worker::Collective> collective;
  {
    base::MutexLock lock(&mutex_);
    collective = std::move(collective_);
  }
  // The collective is destroyed here, without the lock, because its destructor
  // may wait for a thread that is about to call Abort.
}

}  // namespace kvasir::cli
