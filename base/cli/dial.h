// The flags of a command that calls a server of ours.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/net/tls.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

// The longest token that a server takes.
inline constexpr size_t kMaxTokenBytes = 512;

// FAILED_PRECONDITION where a call without TLS would leave the machine and is
// not `insecure`; `remedy`: the flag that gives it TLS.
absl::Status CheckPlainCall(const std::string& target, const char* remedy,
                            bool insecure);
// INVALID_ARGUMENT, without what is in it, for a file that holds no secret or
// more than one.
absl::StatusOr<std::string> ReadSecretFile(const char* flag,
                                           const std::string& path);

// TLS of a client of ours. Its flags are no server's: both may stand in one
// pod's environment.
struct DialTlsFlags {
  std::string ca;  // empty: plain text
  std::string certificate;
  std::string key;
  bool insecure = false;  // plain text may leave the machine
  // Of a token that each call shows; empty: none.
  std::string token_file;
};
void AddDialTlsFlags(CLI::App* app, DialTlsFlags* options);
// Of a client of `target`; plain text's where no flag is set. The errors of
// base::TlsChannelCredentials; INVALID_ARGUMENT for a file without a token;
// FAILED_PRECONDITION where plain text would leave the machine, or a token
// would go without TLS.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> DialCredentials(
    const DialTlsFlags& flags, const std::string& target);

}  // namespace kvasir::cli
