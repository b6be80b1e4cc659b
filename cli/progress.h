// A progress line on standard error for long work: rewritten in place on a
// terminal, one line every few seconds elsewhere, nothing when it is off.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace kvasir::cli {

// Threads: one.
class Progress {
 public:
  // `total` in `unit`s; 0 if unknown. Quiet when `enabled` is false.
  Progress(std::string what, int64_t total, std::string unit, bool enabled);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is appended ("loss 3.21").
  void Update(int64_t done, const std::string& note = "");
  // Ends the line.
  void Finish();

 private:
  void Print(int64_t done, const std::string& note);

  const std::string what_;
  const int64_t total_;
  const std::string unit_;
  const bool enabled_;
  const bool terminal_;
  const absl::Time start_;
  absl::Time last_print_;
  int64_t last_done_ = -1;
  bool open_line_ = false;
};

}  // namespace kvasir::cli
