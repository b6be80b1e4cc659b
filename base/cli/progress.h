// A progress line on standard error for long work. On a terminal it is
// rewritten in place and removed at the end; otherwise one line is printed
// every few seconds. It can be switched off.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace kvasir::cli {

// Estimates the remaining time from observed progress. Work done before the
// first call of See is ignored, because its duration is unknown or includes
// loading and warming up.
class TimeLeft {
 public:
  void See(absl::Time now, int64_t done);
  // Returns nullopt during the first two seconds after the first See, because
  // so short a time predicts the rest badly.
  std::optional<absl::Duration> Estimate(int64_t total) const;

 private:
  absl::Time first_at_ = absl::InfinitePast();
  absl::Time at_ = absl::InfinitePast();
  int64_t first_done_ = 0;
  int64_t done_ = 0;
};

// Prints one progress line.
// Threads: use from one thread only.
class Progress {
 public:
  // `total` is the number of `unit`s; 0 if unknown. Prints nothing if
  // `enabled` is false. `what` may contain any text: control characters are
  // escaped (base::Printable).
  Progress(std::string what, int64_t total, std::string unit, bool enabled);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows the progress `done`; `note` ("loss 3.21") is appended to the line.
  void Update(int64_t done, const std::string& note = "");
  // Clears the line on a terminal, so that the next output does not mix
  // with it.
  void Finish();

 private:
  void Print(int64_t done, const std::string& note);

  const std::string what_;
  const int64_t total_;
  const std::string unit_;
  const bool enabled_;
  const bool terminal_;
  TimeLeft time_left_;
  absl::Time last_print_;
  int64_t last_done_ = -1;
  bool open_line_ = false;
};

}  // namespace kvasir::cli
