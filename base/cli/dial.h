// The flags of commands that call a Kvasir server as a client.
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

// The longest token that a server accepts.
inline constexpr size_t kMaxTokenBytes = 512;

// Returns FAILED_PRECONDITION if `target` is on another machine and `insecure`
// is false, because the call would not be encrypted. `remedy` is the flag that
// switches TLS on.
absl::Status CheckPlainCall(const std::string& target, const char* remedy,
                            bool insecure);
// Reads a file that contains one secret. INVALID_ARGUMENT if it contains no
// secret or more than one; the error text does not quote the file.
absl::StatusOr<std::string> ReadSecretFile(const char* flag,
                                           const std::string& path);

// The TLS flags of a command that calls a Kvasir server. Their names differ
// from those of the server's own TLS flags, because one pod may set both kinds
// by environment variables.
struct DialTlsFlags {
  std::string ca;  // empty: plain text
  std::string certificate;
  std::string key;
  bool insecure = false;  // allow plain text to other machines
  // The file that contains the token to send with each call. If empty, no token
  // is sent.
  std::string token_file;
};
void AddDialTlsFlags(CLI::App* app, DialTlsFlags* options);
// Returns the credentials for calls to `target`; plain text if no flag is set.
// Errors: those of base::TlsChannelCredentials; INVALID_ARGUMENT for a file
// without a token; FAILED_PRECONDITION if the call would go to another machine
// in plain text, or would send a token without TLS.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> DialCredentials(
    const DialTlsFlags& flags, const std::string& target);

}  // namespace kvasir::cli
