// TLS for gRPC (1.51). Certificates and keys come from PEM files, which are
// read again regularly. A list of names can restrict the peers.
//
// The TLS versions are 1.2 and 1.3: gRPC supports no others and has no option
// to choose.
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
  // The peer's certificate must have at least one of these subject alternative
  // names (DNS, URI, IP). If there are none, a server accepts every client with
  // a certificate signed by `authorities`, and a client requires the name of
  // the host that it dials.
  std::vector<std::string> names;
  std::string names_flag = "--tls-client-names";
  // The name of these credentials in metrics and the log. For a server it
  // names the port ("listener", "admin"); for a client, the peers
  // ("workers", "server").
  std::string role = "listener";
  // Counts and logs the peers whose names are refused.
  std::shared_ptr<TlsRefusals> refusals = TlsRefusals::OfProcess();
};

// Returns credentials for a short-lived client; the files are read only once.
// `authorities` are required; certificate and key are needed only if the server
// asks for them. Returns the errors of LoadTlsFiles.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(
    const TlsOptions& options);

// Makes credentials, and reads their files again regularly. Changed files are
// used only if all of them together pass the checks of LoadTlsFiles. A refused
// change has no effect; it is logged once, counted, and checked again later.
// Unchanged files are checked again only when one of their authorities expires.
// gRPC's own file watcher aborts the process if a file is empty. So it gets
// only checked copies in memory (MemoryFile).
//
// Owns: the copies of certificates and keys that are in use, and a thread,
// which starts when credentials are first made. Threads: any thread may call
// any method. Must outlive the servers and channels that use its credentials.
class TlsWatch final : public prometheus::Collectable {
 public:
  struct Options {
    // How often the files are read; infinite: only when Look is called.
    absl::Duration refresh = absl::Seconds(5);
    // The wall clock that certificates' dates refer to.
    std::function<absl::Time()> now = [] { return absl::Now(); };
  };
  TlsWatch() : TlsWatch(Options()) {}
  explicit TlsWatch(Options options);
  ~TlsWatch() override;

  // Returns credentials for a listener, which needs a certificate and a key. If
  // `authorities` are set, clients must show a certificate that one of them has
  // signed (mutual TLS). Errors: those of LoadTlsFiles; INVALID_ARGUMENT for
  // names without authorities.
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Server(
      const TlsOptions& options) ABSL_LOCKS_EXCLUDED(look_mutex_);
  // Returns credentials for a client, with the rules of TlsChannelCredentials.
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Channel(
      const TlsOptions& options) ABSL_LOCKS_EXCLUDED(look_mutex_);

  // Reads all files now. gRPC uses a change within a second.
  void Look() ABSL_LOCKS_EXCLUDED(look_mutex_);

  // Exports the kvasir_tls_* metrics of certificate dates and reloads, by role.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  // The files of one set of credentials, with the copies that gRPC reads.
  class Watched;

  // `flags` is the result of checking the combination of flags. If it is an
  // error, it is returned only if the files themselves are correct.
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

// Returns whether only programs of this machine can reach a listener: a Unix
// socket, or a loopback address.
bool IsLocal(const ListenAddress& listen);
// Returns whether a client's target, such as "127.0.0.1:8100" or "unix:/path",
// is on this machine.
bool IsLocalTarget(const std::string& target);

// FAILED_PRECONDITION if other machines can reach a listener that does not
// speak TLS, unless `allowed`. The text contains `remedy`, which names the
// flags to set.
absl::Status CheckPlaintext(const ListenAddress& listen, bool allowed,
                            const std::string& remedy);

}  // namespace kvasir::base
