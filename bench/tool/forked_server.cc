#include "bench/tool/forked_server.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvasir::cli {
namespace {

constexpr char kStarted = '+';
constexpr char kRefused = '-';

bool HasThreads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks)) > 1;
}

bool WriteAll(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t wrote = write(fd, text.data() + done, text.size() - done);
    if (wrote < 0 && errno != EINTR) return false;
    done += static_cast<size_t>(std::max<ssize_t>(wrote, 0));
  }
  return true;
}

std::string ReadAll(int fd) {
  std::string text;
  char part[512];
  for (;;) {
    const ssize_t got = read(fd, part, sizeof part);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return text;
    text.append(part, static_cast<size_t>(got));
  }
}

// Tells what it became, serves until its parent lets go.
[[noreturn]] void ServeInChild(
    const std::function<absl::StatusOr<ForkedServer::Running>()>& start,
    int told, int lifeline) {
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere >= 0) dup2(nowhere, STDERR_FILENO);
  absl::StatusOr<ForkedServer::Running> running = start();
  const bool heard = WriteAll(
      told, running.ok() ? kStarted + running->target
                         : kRefused + std::string(running.status().message()));
  close(told);
  if (running.ok() && heard) ReadAll(lifeline);
  // Nothing of what the parent had is to be ended here.
  _exit(0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForkedServer>> ForkedServer::Start(
    const std::string& name, std::function<absl::StatusOr<Running>()> start) {
  if (HasThreads()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": this process has threads, and cannot fork"));
  }
  int told[2];
  int lifeline[2];
  if (pipe2(told, O_CLOEXEC) != 0 || pipe2(lifeline, O_CLOEXEC) != 0) {
    return absl::UnavailableError(
        absl::StrCat(name, ": no pipe: ", std::strerror(errno)));
  }
  const pid_t child = fork();
  if (child < 0) {
    return absl::UnavailableError(
        absl::StrCat(name, ": cannot fork: ", std::strerror(errno)));
  }
  if (child == 0) {
    close(told[0]);
    close(lifeline[1]);
    ServeInChild(start, told[1], lifeline[0]);
  }
  close(told[1]);
  close(lifeline[0]);
  const std::string said = ReadAll(told[0]);
  close(told[0]);
  auto server = std::unique_ptr<ForkedServer>(new ForkedServer(
      name, child, lifeline[1], said.empty() ? "" : said.substr(1)));
  if (said.empty()) {
    return absl::InternalError(absl::StrCat(name, ": it ended at its start"));
  }
  if (said.front() == kRefused) {
    return absl::InternalError(absl::StrCat(name, ": ", said.substr(1)));
  }
  return server;
}

ForkedServer::~ForkedServer() {
  close(lifeline_);
  int status = 0;
  while (waitpid(child_, &status, 0) < 0 && errno == EINTR) {
  }
}

absl::StatusOr<double> ForkedServer::CpuSeconds() const {
  clockid_t clock;
  timespec time;
  if (clock_getcpuclockid(child_, &clock) != 0 ||
      clock_gettime(clock, &time) != 0) {
    return absl::InternalError(absl::StrCat(name_, ": its process is gone"));
  }
  return static_cast<double>(time.tv_sec) +
         1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace kvasir::cli
