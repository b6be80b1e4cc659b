#include "base/cli/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/log.h"

namespace kvasir::cli {
namespace {

constexpr absl::Duration kLeastSight = absl::Seconds(2);

}  // namespace

void TimeLeft::See(absl::Time now, int64_t done) {
  if (first_at_ == absl::InfinitePast()) {
    first_at_ = now;
    first_done_ = done;
  }
  at_ = now;
  done_ = done;
}

std::optional<absl::Duration> TimeLeft::Estimate(int64_t total) const {
  const int64_t seen = done_ - first_done_;
  if (seen <= 0 || done_ >= total || at_ - first_at_ < kLeastSight) {
    return std::nullopt;
  }
  return (at_ - first_at_) *
         (static_cast<double>(total - done_) / static_cast<double>(seen));
}

Progress::Progress(std::string what, int64_t total, std::string unit,
                   bool enabled)
    : what_(std::move(what)),
      total_(total),
      unit_(std::move(unit)),
      enabled_(enabled),
      terminal_(isatty(STDERR_FILENO) != 0),
      last_print_(absl::InfinitePast()) {}

Progress::~Progress() { Finish(); }

void Progress::Update(int64_t done, const std::string& note) {
  if (!enabled_) return;
  const absl::Time now = absl::Now();
  time_left_.See(now, done);
  const absl::Duration every =
      terminal_ ? absl::Milliseconds(200) : absl::Seconds(5);
  // Print done == total without delay, but only once: `done` may be rounded, so
  // it can reach the total long before the end.
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
  const std::optional<absl::Duration> left = time_left_.Estimate(total_);
  if (left.has_value()) {
    absl::StrAppendFormat(&line, ", %.0f s left", absl::ToDoubleSeconds(*left));
  }
  if (!note.empty()) absl::StrAppend(&line, ", ", note);
  line = base::Printable(line);
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
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  open_line_ = false;
}

}  // namespace kvasir::cli
