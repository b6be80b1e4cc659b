#include "base/cli/process.h"

#include <grpc/support/log.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/net/grpc_server.h"
#include "base/net/tls_refusals.h"

namespace kvasir::cli {
namespace {

volatile sig_atomic_t g_shutdown_signals = 0;

void OnShutdownSignal(int signal_number) {
  // A second signal ends the process without waiting for the drain.
  if (g_shutdown_signals > 0) _exit(128 + signal_number);
  g_shutdown_signals = 1;
}

void EndAtOnce(int signal_number) { _exit(128 + signal_number); }

void LogFromGrpc(gpr_log_func_args* args) {
  if (args->severity == GPR_LOG_SEVERITY_ERROR &&
      !base::TlsRefusals::OfProcess()->AddGrpcLine(args->message)) {
    base::LogWarning("grpc", {{"text", args->message}});
  }
}

}  // namespace

void PrepareProcess() {
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  signal(SIGPIPE, SIG_IGN);
  // The first process of a container has no default actions for signals.
  // Without these handlers it could only be killed while it loads.
  if (getpid() == 1) {
    signal(SIGTERM, EndAtOnce);
    signal(SIGINT, EndAtOnce);
  }
  base::RaiseDescriptorLimit();
  gpr_set_log_function(LogFromGrpc);
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
  std::string pattern = parent + std::string(kPrivateFolderName);
  if (mkdtemp(pattern.data()) == nullptr) {
    return absl::UnavailableError(
        absl::StrCat(pattern, ": cannot create: ", std::strerror(errno)));
  }
  return pattern;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

}  // namespace kvasir::cli
