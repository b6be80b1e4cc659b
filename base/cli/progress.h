// A progress line on standard error for long work: rewritten in place on a
// terminal and gone at its end, one line every few seconds elsewhere, nothing
// when it is off.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace kvasir::cli {

// How long work takes that was seen to advance. What was done before the first
// sight is not counted: loading and warming up are in it, or all of its time
// was before anybody looked.
class TimeLeft {
 public:
  void See(absl::Time now, int64_t done);
  // None before two seconds of sight: the first units say little.
  std::optional<absl::Duration> Estimate(int64_t total) const;

 private:
  absl::Time first_at_ = absl::InfinitePast();
  absl::Time at_ = absl::InfinitePast();
  int64_t first_done_ = 0;
  int64_t done_ = 0;
};

// Threads: one.
class Progress {
 public:
  // `total` in `unit`s; 0 if unknown. Quiet when `enabled` is false. `what` may
  // be any name: it is shown as base::Printable.
  Progress(std::string what, int64_t total, std::string unit, bool enabled);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is appended ("loss 3.21").
  void Update(int64_t done, const std::string& note = "");
  // Takes the line off a terminal: what is printed next begins on a clean one.
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
