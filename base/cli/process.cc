#include "base/cli/process.h"

#include <fcntl.h>
#include <grpc/support/log.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/net/grpc_server.h"
#include "base/net/tls_refusals.h"

namespace kvasir::cli {
namespace {

volatile sig_atomic_t g_shutdown_signals = 0;

constexpr char kLockName[] = "/.kvasir-private-folder";

// Returns an id that changes with every boot. Each lock file contains the id.
// IsAbandoned ignores folders with another id. They may belong to another
// machine that shares the file system, and its locks are invisible here.
std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// Creates and locks a folder's lock file. The file gets its final name only
// after it is locked. So no other process finds it unlocked while this process
// runs. The descriptor is never closed: the system unlocks the file when the
// process ends. On a file system without locks there is no lock file, and
// IsAbandoned is always false.
void HoldLock(const std::string& folder) {
  const std::string lock = folder + kLockName;
  const std::string unlocked = lock + "-";
  const std::string id = BootId();
  const int descriptor =
      ::open(unlocked.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) return;
  if (::write(descriptor, id.data(), id.size()) ==
          static_cast<ssize_t>(id.size()) &&
      ::flock(descriptor, LOCK_EX | LOCK_NB) == 0 &&
      ::rename(unlocked.c_str(), lock.c_str()) == 0) {
    return;
  }
  ::unlink(unlocked.c_str());
  ::close(descriptor);
}

// True if the folder was made by MakePrivateFolder, in a process of this user
// since the last boot, and this process has ended.
bool IsAbandoned(const std::filesystem::directory_entry& folder) {
  const std::string name = folder.path().filename();
  if (name.size() + 1 != kPrivateFolderName.size() ||
      !name.starts_with(kPrivateFolderName.substr(1, 7))) {
    return false;
  }
  struct stat found = {};
  if (::lstat(folder.path().c_str(), &found) != 0 || !S_ISDIR(found.st_mode) ||
      (found.st_mode & 0777) != 0700 || found.st_uid != ::geteuid()) {
    return false;
  }
  const int descriptor = ::open((folder.path().string() + kLockName).c_str(),
                                O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return false;
  char id[64] = {};
  const ssize_t size = ::read(descriptor, id, sizeof id);
  const bool abandoned =
      size > 0 && std::string(id, static_cast<size_t>(size)) == BootId() &&
      ::flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  ::close(descriptor);
  return abandoned;
}

void RemoveAbandonedFolders(const std::string& parent) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (fs::directory_iterator folder(parent, error), end;
       !error && folder != end; folder.increment(error)) {
    std::error_code ignored;  // another process may remove it as well
    if (IsAbandoned(*folder)) fs::remove_all(folder->path(), ignored);
  }
}

void OnShutdownSignal(int signal_number) {
  // The second signal ends the process at once, without waiting for the drain.
  if (g_shutdown_signals > 0) _exit(128 + signal_number);
  g_shutdown_signals = 1;
}

void EndAtOnce(int signal_number) { _exit(128 + signal_number); }

// False if the user has switched off gRPC's log (GRPC_VERBOSITY=NONE).
bool g_log_grpc = true;

void LogFromGrpc(gpr_log_func_args* args) {
  if (args->severity == GPR_LOG_SEVERITY_ERROR &&
      !base::TlsRefusals::OfProcess()->AddGrpcLine(args->message)) {
    if (g_log_grpc) base::LogWarning("grpc", {{"text", args->message}});
  }
}

}  // namespace

void PrepareProcess() {
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  signal(SIGPIPE, SIG_IGN);
  // If this is the first process of a container (process id 1), signals have no
  // default action. Without these handlers, only SIGKILL could end the process
  // while it loads a model.
  if (getpid() == 1) {
    signal(SIGTERM, EndAtOnce);
    signal(SIGINT, EndAtOnce);
  }
  base::RaiseDescriptorLimit();
  gpr_set_log_function(LogFromGrpc);
  // AddGrpcLine counts refused TLS handshakes from gRPC's log lines. So gRPC
  // must create them even if the user has switched off its log.
  const char* const verbosity = std::getenv("GRPC_VERBOSITY");
  if (verbosity != nullptr && absl::EqualsIgnoreCase(verbosity, "NONE")) {
    g_log_grpc = false;
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  }
}

void HoldShutdownSignals() {
  struct sigaction action = {};
  action.sa_handler = OnShutdownSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

bool ShutdownRequested() { return g_shutdown_signals > 0; }

std::string ProgramPath() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return "kvasir";
  const fs::path here = fs::current_path(error);
  if (error) return program.string();
  const fs::path relative = program.lexically_relative(here);
  return relative.empty() || *relative.begin() == ".." ? program.string()
                                                       : relative.string();
}

std::string ProgramBeside(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self =
      std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return name;
  const std::filesystem::path beside = self.parent_path() / name;
  return std::filesystem::exists(beside, error) ? beside.string() : name;
}

std::string TemporaryFolder() {
  const char* const folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

absl::StatusOr<std::string> MakePrivateFolder(const std::string& parent) {
  RemoveAbandonedFolders(parent);
  std::string pattern = parent + std::string(kPrivateFolderName);
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::UnavailableError(
        absl::StrCat(pattern, ": cannot create: ", std::strerror(errno)));
  }
  HoldLock(pattern);
  return pattern;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

}  // namespace kvasir::cli
