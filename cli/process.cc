#include "cli/process.h"

#include <dirent.h>
#include <grpc/support/log.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <cerrno>
#include <ctime>

#include "base/log.h"

namespace kvasir::cli {
namespace {

sigset_t ShutdownSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

void LogFromGrpc(gpr_log_func_args* args) {
  if (args->severity == GPR_LOG_SEVERITY_ERROR) {
    base::LogWarning("grpc", {{"text", args->message}});
  }
}

int CountEntries(const char* path) {
  DIR* dir = opendir(path);
  if (dir == nullptr) return -1;
  int count = 0;
  while (const dirent* entry = readdir(dir)) {
    if (entry->d_name[0] != '.') ++count;
  }
  closedir(dir);
  return count;
}

}  // namespace

void PrepareProcess() {
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  signal(SIGPIPE, SIG_IGN);
  const sigset_t set = ShutdownSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  gpr_set_log_function(LogFromGrpc);
}

bool WaitForShutdownSignal(absl::Duration timeout) {
  const sigset_t set = ShutdownSignals();
  const timespec wait = absl::ToTimespec(timeout);
  return sigtimedwait(&set, nullptr, &wait) > 0;
}

// The descriptor that reads the folder is not counted.
int CountOpenDescriptors() { return CountEntries("/proc/self/fd") - 1; }
int CountThreads() { return CountEntries("/proc/self/task"); }

}  // namespace kvasir::cli
