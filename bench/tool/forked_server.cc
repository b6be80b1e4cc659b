#include "bench/tool/forked_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/cli/process.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

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

// Reports to the parent how `start` ended, and serves until the parent closes
// its end of the pipe `lifeline`.
[[noreturn]] void ServeInChild(
    const std::function<absl::StatusOr<ForkedServer::Running>()>& start,
    int report, int lifeline) {
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere >= 0) dup2(nowhere, STDERR_FILENO);
  absl::StatusOr<ForkedServer::Running> running = start();
  const bool reported = WriteAll(
      report, running.ok()
                  ? kStarted + running->target
                  : kRefused + std::string(running.status().message()));
  close(report);
  if (running.ok() && reported) ReadAll(lifeline);
  // Ends without destructors: the objects that fork copied are the parent's.
  _exit(0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForkedServer>> ForkedServer::Start(
    const std::string& name, std::function<absl::StatusOr<Running>()> start) {
  if (HasThreads()) {
    return absl::FailedPreconditionError(absl::StrCat(
        name, ": this process has several threads, so it cannot fork"));
  }
  int report[2];
  int lifeline[2];
  if (pipe2(report, O_CLOEXEC) != 0 || pipe2(lifeline, O_CLOEXEC) != 0) {
    return absl::UnavailableError(
        absl::StrCat(name, ": cannot make a pipe: ", std::strerror(errno)));
  }
  const pid_t child = fork();
  if (child < 0) {
    return absl::UnavailableError(
        absl::StrCat(name, ": cannot fork: ", std::strerror(errno)));
  }
  if (child == 0) {
    close(report[0]);
    close(lifeline[1]);
    ServeInChild(start, report[1], lifeline[0]);
  }
  close(report[1]);
  close(lifeline[0]);
  const std::string said = ReadAll(report[0]);
  close(report[0]);
  auto server = std::unique_ptr<ForkedServer>(new ForkedServer(name, child));
  server->lifeline_ = lifeline[1];
  if (said.empty()) {
    return absl::InternalError(
        absl::StrCat(name, ": the process ended before it was ready"));
  }
  if (said.front() == kRefused) {
    return absl::InternalError(absl::StrCat(name, ": ", said.substr(1)));
  }
  server->target_ = said.substr(1);
  return server;
}

absl::StatusOr<std::unique_ptr<ForkedServer>> ForkedServer::StartKvasir(
    const std::string& name, std::vector<std::string> arguments) {
  KVASIR_ASSIGN_OR_RETURN(const std::string folder, MakePrivateFolder());
  const std::string ready = folder + "/ready.json";
  const std::string log = folder + "/log";
  const std::string program = ProgramBeside("kvasir");
  arguments.insert(arguments.begin(), program);
  arguments.push_back("--ready-file=" + ready);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    // Until exec, the child may make only async-signal-safe calls, because this
    // process may have threads.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execvp(program.c_str(), argv.data());
    _exit(127);
  }
  if (child < 0) {
    return absl::UnavailableError(
        absl::StrCat(name, ": cannot fork: ", std::strerror(errno)));
  }
  auto server = std::unique_ptr<ForkedServer>(new ForkedServer(name, child));
  server->folder_ = folder;
  for (;;) {
    std::ifstream file(ready);
    const auto json = nlohmann::json::parse(file, nullptr, false);
    if (json.is_object() && json.contains("grpc")) {
      server->target_ = json["grpc"].get<std::string>();
      return server;
    }
    int status = 0;
    siginfo_t ended = {};
    if (waitid(P_PID, static_cast<id_t>(child), &ended,
               WEXITED | WNOHANG | WNOWAIT) == 0 &&
        ended.si_pid == child) {
      std::ifstream lines(log);
      std::string line, last;
      while (std::getline(lines, line)) last = line.empty() ? last : line;
      status = ended.si_status;
      return absl::InternalError(
          absl::StrCat(name, ": ", program, " ended with status ", status,
                       " before it was ready", last.empty() ? "" : ": ", last));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
}

ForkedServer::~ForkedServer() {
  if (lifeline_ >= 0) close(lifeline_);
  if (!folder_.empty()) {
    // The first signal makes the program drain; the second one ends it at once.
    kill(child_, SIGTERM);
    kill(child_, SIGINT);
  }
  int status = 0;
  while (waitpid(child_, &status, 0) < 0 && errno == EINTR) {
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

absl::StatusOr<double> ForkedServer::CpuSeconds() const {
  clockid_t clock;
  timespec time;
  if (clock_getcpuclockid(child_, &clock) != 0 ||
      clock_gettime(clock, &time) != 0) {
    return absl::InternalError(absl::StrCat(
        name_,
        ": cannot read the CPU time of the process, which no longer exists"));
  }
  return static_cast<double>(time.tv_sec) +
         1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace kvasir::cli
