// Limits the rate of log lines that peers can cause: one line a minute for each
// cause. Also counts the lines that were left out.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace kvasir::base {

// Threads: its methods may be called from any thread.
class LogLimit {
 public:
  // `clock` must outlive this object.
  explicit LogLimit(const Clock& clock = Clock::Real()) : clock_(clock) {}

  // Returns nullopt if no line about `cause` should be written now. Otherwise
  // returns how many lines about it were left out since the last written line.
  // This object never forgets a cause, so causes must be constant texts of this
  // program, not data from a peer.
  std::optional<uint64_t> Take(std::string_view cause)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    auto found = causes_.find(cause);
    if (found == causes_.end()) {
      found = causes_.emplace(std::string(cause), Cause()).first;
    }
    Cause& known = found->second;
    const absl::Time now = clock_.Now();
    if (now - known.logged_at < kSilence) {
      ++known.unlogged;
      return std::nullopt;
    }
    known.logged_at = now;
    return std::exchange(known.unlogged, 0);
  }

 private:
  static constexpr absl::Duration kSilence = absl::Minutes(1);
  struct Cause {
    uint64_t unlogged = 0;
    absl::Time logged_at = absl::InfinitePast();
  };

  const Clock& clock_;
  Mutex mutex_;
  std::map<std::string, Cause, std::less<>> causes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::base
