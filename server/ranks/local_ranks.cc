#include "server/ranks/local_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace kvasir::cli {
namespace {

constexpr char kProgram[] = "kvasir";  // the name that ps and top show
// The descriptor number of the pipe in a child.
constexpr int kChildFd = 3;
// A child reads at most this many bytes. An address and a secret take
// far fewer.
constexpr size_t kMaxJoinInfoBytes = 16 << 10;
// How long End waits for children to finish their step before it kills them.
constexpr absl::Duration kGrace = absl::Seconds(2);

// Returns the environment without the variables KVASIR_*.
std::vector<char*> OthersEnvironment() {
  std::vector<char*> variables;
  for (char** each = environ; *each != nullptr; ++each) {
    if (!absl::StartsWith(*each, "KVASIR_")) variables.push_back(*each);
  }
  variables.push_back(nullptr);
  return variables;
}

absl::Status SystemError(absl::string_view what, int error) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
}

std::string HowItEnded(int status) {
  if (WIFSIGNALED(status)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(status));
  }
  return absl::StrCat("ended with exit code ", WEXITSTATUS(status));
}

absl::StatusOr<pid_t> Spawn(const LocalRanks::Child& child, int pipe_fd) {
  std::vector<std::string> words = {kProgram};
  words.insert(words.end(), child.arguments.begin(), child.arguments.end());
  words.push_back(absl::StrCat("--join-fd=", kChildFd));
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  // Call this even if both descriptors have the same number, because it clears
  // the close-on-exec flag.
  posix_spawn_file_actions_adddup2(&actions, pipe_fd, kChildFd);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, "/proc/self/exe", &actions, nullptr,
                                arguments.data(), OthersEnvironment().data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return SystemError(absl::StrCat("rank ", child.rank, ": cannot start"),
                       error);
  }
  return pid;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalRanks>> LocalRanks::Start(
    const std::vector<Child>& children) {
  std::unique_ptr<LocalRanks> ranks(new LocalRanks());
  ranks->children_.reserve(children.size());
  for (const Child& child : children) {
    int pipe_fds[2];
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) {
      return SystemError("cannot make a pipe for a rank", errno);
    }
    absl::StatusOr<pid_t> pid = Spawn(child, pipe_fds[0]);
    close(pipe_fds[0]);
    if (!pid.ok()) {
      close(pipe_fds[1]);
      return pid.status();
    }
    ranks->children_.push_back(
        {.rank = child.rank, .pid = *pid, .pipe = pipe_fds[1]});
  }
  // Start the watchers only now: they refer to elements of the vector, which
  // must not grow any more.
  for (size_t i = 0; i < ranks->children_.size(); ++i) {
    ranks->children_[i].watcher =
        std::thread([owner = ranks.get(), i] { owner->Watch(i); });
  }
  return ranks;
}

LocalRanks::~LocalRanks() {
  End();
  for (Running& child : children_) {
    if (child.watcher.joinable()) {
      child.watcher.join();
    } else {
      // Start has failed to start a later child, so there are no watchers yet.
      kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
  }
}

absl::Status LocalRanks::Send(const JoinInfo& info, OnFailure on_failure) {
  {
    base::MutexLock reporting_lock(&reporting_mutex_);
    base::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    on_failure_ = std::move(on_failure);
  }
  // The writes never block, because the text fits into a pipe's buffer. If a
  // child has ended, the write fails with EPIPE. This is ignored, because the
  // child's watcher reports the failure.
  for (size_t i = 0; i < children_.size(); ++i) {
    Running& child = children_[i];
    const std::string text = nlohmann::json{
        {"parent", absl::StrCat(getpid())},
        {"leader", info.leader},
        {"secret", info.secret},
        {"local_index", i + 1},
        {"local_count",
         children_.size() + 1}}.dump();
    const ssize_t written = write(child.pipe, text.data(), text.size());
    const int error = errno;
    close(std::exchange(child.pipe, -1));
    if (written != static_cast<ssize_t>(text.size()) && error != EPIPE) {
      return SystemError(absl::StrCat("rank ", child.rank,
                                      ": cannot send it the leader's address"),
                         error);
    }
  }
  return absl::OkStatus();
}

void LocalRanks::Watch(size_t index) {
  Running& child = children_[index];
  siginfo_t info;
  // With WNOWAIT, the dead child keeps its pid. So while Kill may still send a
  // signal to this pid, no other process can have it. waitpid below, under the
  // lock, releases it.
  while (waitid(P_PID, static_cast<id_t>(child.pid), &info,
                WEXITED | WNOWAIT) != 0 &&
         errno == EINTR) {
  }
  base::MutexLock reporting_lock(&reporting_mutex_);
  absl::Status why;
  {
    base::MutexLock lock(&mutex_);
    int status = 0;
    waitpid(child.pid, &status, 0);
    child.ended = true;
    changed_.SignalAll();
    if (status == 0 || stopping_) return;
    why = absl::UnavailableError(absl::StrCat(
        "rank ", child.rank, " (pid ", child.pid, ") ", HowItEnded(status)));
    failure_ = why;
  }
  base::LogError("a rank has ended", {{"why", std::string(why.message())}});
  if (on_failure_) on_failure_(why);
}

void LocalRanks::StopReporting() {
  base::MutexLock reporting_lock(&reporting_mutex_);
  on_failure_ = nullptr;
}

bool LocalRanks::WaitEnded(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  base::MutexLock lock(&mutex_);
  while (true) {
    bool all = true;
    for (const Running& child : children_) {
      all = all && (child.ended || !child.watcher.joinable());
    }
    if (all) return true;
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitWithTimeout(&mutex_, left);
  }
}

absl::Status LocalRanks::failure() const {
  base::MutexLock lock(&mutex_);
  return failure_;
}

void LocalRanks::End() {
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (Running& child : children_) {
    if (child.pipe >= 0) close(std::exchange(child.pipe, -1));
  }
  if (!WaitEnded(kGrace)) Kill();
}

void LocalRanks::Kill() {
  base::MutexLock lock(&mutex_);
  for (const Running& child : children_) {
    if (!child.ended) kill(child.pid, SIGKILL);
  }
}

absl::StatusOr<JoinInfo> LocalRanks::ReadJoinInfo(int join_fd) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // This process was started from /proc/self/exe, so its name would be "exe".
  prctl(PR_SET_NAME, kProgram);
  std::string text;
  char buffer[1024];
  while (text.size() < kMaxJoinInfoBytes) {
    const ssize_t bytes = read(join_fd, buffer, sizeof buffer);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return SystemError("--join-fd", errno);
    if (bytes == 0) break;
    text.append(buffer, static_cast<size_t>(bytes));
  }
  close(join_fd);
  const auto json =
      nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto text_of = [&json](const char* key) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    return found != json.end() && found->is_string() ? found->get<std::string>()
                                                     : std::string();
  };
  const auto number_of = [&json](const char* key) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    return found != json.end() && found->is_number_integer() ? found->get<int>()
                                                             : 0;
  };
  JoinInfo info{.leader = text_of("leader"),
                .secret = text_of("secret"),
                .local = {.index = number_of("local_index"),
                          .count = number_of("local_count")}};
  // If the parent ended before the call of prctl, this process has another
  // parent now, with another pid.
  if (info.leader.empty() || info.local.count < 1 ||
      text_of("parent") != absl::StrCat(getppid())) {
    return absl::UnavailableError(
        "the process that started this rank is gone, or sent no valid data");
  }
  return info;
}

void LocalRanks::KillStoppedParent() {
  const pid_t parent = getppid();
  std::ifstream stat(absl::StrCat("/proc/", parent, "/stat"));
  const std::string text(std::istreambuf_iterator<char>(stat), {});
  // The text is "pid (name) state ...". The state follows the last ") ",
  // because the name may also contain ") ".
  const size_t end_of_name = text.rfind(") ");
  if (end_of_name == std::string::npos || text[end_of_name + 2] != 'T') return;
  // The first process of a container cannot be killed from inside it.
  base::LogWarning(parent == 1
                       ? "the leader is stopped, and its clients wait for it"
                       : "the leader is stopped and cannot answer: killing it",
                   {{"pid", int64_t{parent}}});
  if (parent != 1) kill(parent, SIGKILL);
}

}  // namespace kvasir::cli
