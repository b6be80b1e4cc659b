// TLS for gRPC (1.51): certificates and keys come from PEM files and are read
// again when they change; who may connect is a list of names.
//
// Versions are 1.2 and 1.3: gRPC offers no others, and no way to say so.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/net/listen_address.h"
#include "base/net/tls_files.h"
#include "base/net/tls_refusals.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::base {

struct TlsOptions {
  TlsFiles files;
  // Subject alternative names (DNS, URI, IP) of which the other's certificate
  // has one at least. Empty: a server takes whomever `authorities` have
  // signed, a client the host that it dials.
  std::vector<std::string> names;
  std::string names_flag = "--tls-client-names";
  // What metrics and the log call it: "listener", "admin", "workers";
  // of a client, whom it dials: "server".
  std::string role = "listener";
  // Told of names that are refused.
  std::shared_ptr<TlsRefusals> refusals = TlsRefusals::OfProcess();
};

// For a client of a short life: the files are read once. `authorities` are
// needed, certificate and key where the server asks for them. The errors of
// LoadTlsFiles.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(
    const TlsOptions& options);

// Credentials whose files are read again. What is new is judged as at a start,
// key, certificate and authorities as one, and only then taken; what is refused
// changes nothing, is logged once and counted, and is looked at again. So is
// what is in use when an authority of it ends. gRPC's own watcher of files,
// which ends the process at an empty one, sees memory alone (MemoryFile).
//
// Owns: copies of what is in use, and a thread from the first credentials on.
// Threads: any.
// Lives longer than the servers and channels of its credentials.
class TlsWatch final : public prometheus::Collectable {
 public:
  struct Options {
    // How often the files are looked at; infinite: never but by Look.
    absl::Duration refresh = absl::Seconds(5);
    // Of the dates in certificates: the world's time, not a steady one.
    std::function<absl::Time()> now = [] { return absl::Now(); };
  };
  TlsWatch() : TlsWatch(Options()) {}
  explicit TlsWatch(Options options);
  ~TlsWatch() override;

  // For a listener: certificate and key are needed. With `authorities` a client
  // without a certificate of theirs is not let in (mutual TLS). The errors of
  // LoadTlsFiles; INVALID_ARGUMENT for names without authorities.
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Server(
      const TlsOptions& options) ABSL_LOCKS_EXCLUDED(look_mutex_);
  // As TlsChannelCredentials.
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Channel(
      const TlsOptions& options) ABSL_LOCKS_EXCLUDED(look_mutex_);

  // Looks at all files, once. gRPC takes what is new within a second.
  void Look() ABSL_LOCKS_EXCLUDED(look_mutex_);

  // Families kvasir_tls_*, by role.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  // Files that are in use, with their copies.
  class Watched;

  // `flags`: what else is wrong with them, told behind what the files are.
  absl::StatusOr<Watched*> Add(const TlsOptions& options,
                               const absl::Status& flags)
      ABSL_LOCKS_EXCLUDED(look_mutex_);
  void Loop();

  const Options options_;
  // Held while files are read; taken before mutex_.
  Mutex look_mutex_;
  mutable Mutex mutex_;
  CondVar stopped_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Watched>> watched_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_ ABSL_GUARDED_BY(look_mutex_);
};

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
