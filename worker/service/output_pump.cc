#include "worker/service/output_pump.h"

#include <utility>

namespace kvasir::worker {

OutputPump::OutputPump() : thread_([this] { Run(); }) {}

OutputPump::~OutputPump() { Stop(); }

void OutputPump::Push(std::shared_ptr<Pumped> stream) {
  base::MutexLock lock(&mutex_);
  if (stopping_) return;
  ready_.push_back(std::move(stream));
  if (ready_.size() == 1) wake_.Signal();
}

void OutputPump::Stop() {
  std::deque<std::shared_ptr<Pumped>> dropped;
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    dropped.swap(ready_);
    wake_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

void OutputPump::Run() {
  std::deque<std::shared_ptr<Pumped>> batch;
  while (true) {
    {
      base::MutexLock lock(&mutex_);
      while (ready_.empty() && !stopping_) wake_.Wait(&mutex_);
      if (stopping_) return;
      batch.swap(ready_);
    }
    for (std::shared_ptr<Pumped>& stream : batch) {
      stream->Advance();
      stream.reset();
    }
    batch.clear();
  }
}

}  // namespace kvasir::worker
