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
  // Aborted meanwhile, if need be: only this thread takes it away.
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
  // Without the lock: a thread that it waits for may be about to abort it.
}

}  // namespace kvasir::cli
