#include "cli/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace kvasir::cli {

Progress::Progress(std::string what, int64_t total, std::string unit,
                   bool enabled)
    : what_(std::move(what)),
      total_(total),
      unit_(std::move(unit)),
      enabled_(enabled),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(absl::Now()),
      last_print_(absl::InfinitePast()) {}

Progress::~Progress() { Finish(); }

void Progress::Update(int64_t done, const std::string& note) {
  if (!enabled_) return;
  const absl::Time now = absl::Now();
  const absl::Duration every =
      terminal_ ? absl::Milliseconds(200) : absl::Seconds(5);
  // The end is told, but once: rounding may reach it long before.
  const bool at_end = done == total_ && done != last_done_;
  if (now - last_print_ < every && !at_end) return;
  last_print_ = now;
  last_done_ = done;
  Print(done, note);
}

void Progress::Print(int64_t done, const std::string& note) {
  std::string line = absl::StrCat(what_, ": ", done);
  if (total_ > 0) absl::StrAppend(&line, "/", total_);
  absl::StrAppend(&line, " ", unit_);
  const absl::Duration spent = absl::Now() - start_;
  if (total_ > 0 && done > 0 && done < total_) {
    const double left = absl::ToDoubleSeconds(spent) *
                        static_cast<double>(total_ - done) /
                        static_cast<double>(done);
    absl::StrAppend(&line, absl::StrFormat(", %.0f s left", left));
  }
  if (!note.empty()) absl::StrAppend(&line, ", ", note);
  if (terminal_) {
    std::fprintf(stderr, "\r\x1b[K%s", line.c_str());
    open_line_ = true;
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

void Progress::Finish() {
  if (!open_line_) return;
  std::fputc('\n', stderr);
  open_line_ = false;
}

}  // namespace kvasir::cli
