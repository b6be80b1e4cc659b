// TLS for gRPC (1.51): certificates and keys come from PEM files and are read
// again when they change; who may connect is a list of names.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/net/listen_address.h"

namespace kvasir::base {

// Paths of PEM files, and the flags that named them.
struct TlsFiles {
  // What this side shows: a chain, its own certificate first, and its key.
  std::string certificate;
  std::string key;
  // Whom this side believes: authorities of the other's certificate.
  std::string authorities;

  std::string certificate_flag = "--tls-cert";
  std::string key_flag = "--tls-key";
  std::string authorities_flag = "--tls-client-ca";

  bool empty() const {
    return certificate.empty() && key.empty() && authorities.empty();
  }
};

struct TlsOptions {
  TlsFiles files;
  // Subject alternative names (DNS, URI, IP) of which the other's certificate
  // has one at least. Empty: a server takes whomever `authorities` have
  // signed, a client the host that it dials.
  std::vector<std::string> names;
  // How often the files are looked at; whole seconds, 1 at least.
  absl::Duration refresh = absl::Seconds(5);
};

// INVALID_ARGUMENT for a certificate without its key, a file that cannot be
// read or has no PEM, a key of another certificate, one that is over or not yet
// valid: the text names flag, file and date.
absl::Status CheckTlsFiles(const TlsFiles& files, absl::Time now);

// For a listener: certificate and key are needed. With `authorities` a client
// without a certificate of theirs is not let in (mutual TLS). The errors of
// CheckTlsFiles; INVALID_ARGUMENT for names without authorities.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsServerCredentials(
    const TlsOptions& options);

// For a client: `authorities` are needed, certificate and key where the server
// asks for them. The errors of CheckTlsFiles.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(
    const TlsOptions& options);

// Whether only programs of this machine reach a listener: a Unix socket, or a
// loopback address.
bool IsLocal(const ListenAddress& listen);
// The same of what a client dials: "127.0.0.1:8100", "unix:/path".
bool IsLocalTarget(const std::string& target);

// FAILED_PRECONDITION where a listener that speaks no TLS would be reached by
// other machines and nobody said that it may; names the ways out.
absl::Status CheckPlaintext(const ListenAddress& listen, bool allowed,
                            const std::string& remedy);

}  // namespace kvasir::base
