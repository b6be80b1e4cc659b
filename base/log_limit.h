// Lines of the log that others cause as often as they like: one a minute of
// each cause, which says how many there were.
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

// Threads: any.
class LogLimit {
 public:
  // `clock` lives as long.
  explicit LogLimit(const Clock& clock = Clock::Real()) : clock_(clock) {}

  // nullopt: no line now. Otherwise how many of the cause had none since its
  // last one. Causes are kept: words of ours, never of a peer's.
  std::optional<uint64_t> Take(std::string_view cause)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    auto found = causes_.find(cause);
    if (found == causes_.end()) {
      found = causes_.emplace(std::string(cause), Cause()).first;
    }
    Cause& of = found->second;
    const absl::Time now = clock_.Now();
    if (now - of.logged_at < kSilence) {
      ++of.unlogged;
      return std::nullopt;
    }
    of.logged_at = now;
    return std::exchange(of.unlogged, 0);
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
