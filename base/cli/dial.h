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

// The longest token that a server accepts.
inline constexpr size_t kMaxTokenBytes = 512;

// FAILED_PRECONDITION if a call without TLS would leave the machine and
// `insecure` is false. `remedy` is the flag that switches TLS on.
absl::Status CheckPlainCall(const std::string& target, const char* remedy,
                            bool insecure);
// Reads a file with one secret. INVALID_ARGUMENT, without the file's content,
// if it holds none or more than one.
absl::StatusOr<std::string> ReadSecretFile(const char* flag,
                                           const std::string& path);

// The TLS flags of a client of ours. They differ from a server's flags, because
// both may be in the environment of one pod.
struct DialTlsFlags {
  std::string ca;  // empty: plain text
  std::string certificate;
  std::string key;
  bool insecure = false;  // plain text may leave the machine
  // The file of a token that each call sends; empty: none.
  std::string token_file;
};
void AddDialTlsFlags(CLI::App* app, DialTlsFlags* options);
// The credentials of a client of `target`; plain text if no flag is set.
// Errors: those of base::TlsChannelCredentials; INVALID_ARGUMENT for a file
// without a token; FAILED_PRECONDITION if plain text would leave the machine or
// a token would be sent without TLS.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> DialCredentials(
    const DialTlsFlags& flags, const std::string& target);

}  // namespace kvasir::cli
