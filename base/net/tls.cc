#include "base/net/tls.h"

#include <arpa/inet.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/net/memory_file.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

namespace tls = grpc::experimental;

// The interval in seconds at which gRPC checks our copies of the files for
// changes; gRPC allows no shorter one.
constexpr unsigned kGrpcSeconds = 1;
// Error texts show at most this many bytes of the peer's names.
constexpr size_t kMaxNamesBytes = 200;

// Runs after the certificate chain has been verified. Checks that the
// certificate has one of the allowed names or, if there is no list of names,
// the name of the dialled host.
class OneOfNames final : public tls::ExternalCertificateVerifier {
 public:
  explicit OneOfNames(const TlsOptions& options)
      : names_(options.names),
        flag_(options.names_flag),
        role_(options.role),
        refusals_(options.refusals) {}

  bool Verify(tls::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)>,
              grpc::Status* sync_status) override {
    if (names_.empty()) {
      // A verifier of host names returns its result immediately and does not
      // use the callback.
      host_.Verify(request, nullptr, sync_status);
      if (sync_status->ok()) return true;
      const grpc::string_ref host = request->target_name();
      *sync_status =
          Refuse(NamesOf(*request),
                 absl::StrCat("'", std::string(host.data(), host.size()),
                              "' was dialled"),
                 "is the name that was dialled");
      return true;
    }
    const std::vector<std::string> found = NamesOf(*request);
    for (const std::string& name : found) {
      if (std::find(names_.begin(), names_.end(), name) != names_.end()) {
        *sync_status = grpc::Status::OK;
        return true;
      }
    }
    *sync_status = Refuse(
        found, absl::StrCat(flag_, " has [", absl::StrJoin(names_, ", "), "]"),
        absl::StrCat("is allowed by ", flag_));
    return true;
  }
  void Cancel(tls::TlsCustomVerificationCheckRequest*) override {}

 private:
  static std::vector<std::string> NamesOf(
      const tls::TlsCustomVerificationCheckRequest& request) {
    std::vector<std::string> found;
    for (const auto& kind :
         {request.dns_names(), request.uri_names(), request.ip_names()}) {
      for (const grpc::string_ref& name : kind) {
        found.emplace_back(name.data(), name.size());
      }
    }
    return found;
  }

  // `want` goes only to our log, so that the peer does not learn the
  // allowed names.
  grpc::Status Refuse(const std::vector<std::string>& found,
                      const std::string& want, const std::string& none) const {
    const std::string has =
        absl::StrJoin(found, ", ").substr(0, kMaxNamesBytes);
    refusals_->Add(TlsRefusal::kNames,
                   absl::StrCat(role_, ": the certificate has the names [", has,
                                "], ", want));
    return grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                        absl::StrCat("none of the certificate's names ", none,
                                     " (its names: ", has, ")"));
  }

  const std::vector<std::string> names_;
  const std::string flag_;
  const std::string role_;
  const std::shared_ptr<TlsRefusals> refusals_;
  tls::HostNameCertificateVerifier host_;
};

std::shared_ptr<tls::CertificateVerifier> Verifier(const TlsOptions& options) {
  return tls::ExternalCertificateVerifier::Create<OneOfNames>(options);
}

absl::Status CheckServer(const TlsOptions& options) {
  const TlsFiles& files = options.files;
  if (!options.names.empty() && files.authorities.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.names_flag, " ", options.names.front(), ": without ",
        files.authorities_flag,
        ", the names in client certificates cannot be verified; give ",
        files.authorities_flag, ", too"));
  }
  if (files.certificate.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(files.authorities_flag, " ", files.authorities, ": needs ",
                     files.certificate_flag, " and ", files.key_flag));
  }
  return absl::OkStatus();
}

absl::Status CheckChannel(const TlsOptions& options) {
  const TlsFiles& files = options.files;
  if (!files.authorities.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(files.certificate.empty() ? "allowed names of servers"
                                             : files.certificate_flag,
                   " without ", files.authorities_flag,
                   ": the server's certificate cannot be verified; give ",
                   files.authorities_flag, ", too"));
}

std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(
    const TlsOptions& options,
    std::shared_ptr<tls::CertificateProviderInterface> provider) {
  tls::TlsChannelCredentialsOptions made;
  made.set_certificate_provider(std::move(provider));
  made.watch_root_certs();
  if (!options.files.certificate.empty()) made.watch_identity_key_cert_pairs();
  made.set_certificate_verifier(Verifier(options));
  // If there is a list of names, do not also require the dialled host's name.
  if (!options.names.empty()) made.set_check_call_host(false);
  return tls::TlsCredentials(made);
}

void WarnOfExpired(const std::string& role, const TlsMaterial& material) {
  if (material.left_out.empty()) return;
  LogWarning("expired authorities are left out",
             {{"role", role}, {"which", material.left_out}});
}

// Returns key and certificate chain as one text, so that gRPC cannot combine
// the key of one version with the chain of another.
std::string Identity(const TlsMaterial& material) {
  return absl::StrCat(material.key, material.chain);
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(
    const TlsOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const TlsMaterial material,
                          LoadTlsFiles(options.files, absl::Now()));
  KVASIR_RETURN_IF_ERROR(CheckChannel(options));
  WarnOfExpired(options.role, material);
  std::vector<tls::IdentityKeyCertPair> own;
  if (!material.chain.empty()) own.push_back({material.key, material.chain});
  return ChannelCredentialsOf(
      options, std::make_shared<tls::StaticDataCertificateProvider>(
                   material.authorities, own));
}

// The files of one set of credentials.
// Threads: Look runs on one thread at a time; TlsWatch::mutex_ guards numbers_.
class TlsWatch::Watched {
 public:
  explicit Watched(const TlsOptions& options)
      : files_(options.files), role_(options.role) {}

  absl::Status Start(absl::Time now) {
    KVASIR_ASSIGN_OR_RETURN(in_use_, ReadTlsFiles(files_));
    KVASIR_ASSIGN_OR_RETURN(const TlsMaterial material,
                            JudgeTlsTexts(files_, in_use_, now));
    if (!material.chain.empty()) {
      KVASIR_ASSIGN_OR_RETURN(identity_,
                              MemoryFile::Create(Identity(material)));
    }
    if (!material.authorities.empty()) {
      KVASIR_ASSIGN_OR_RETURN(authorities_,
                              MemoryFile::Create(material.authorities));
    }
    numbers_.chain = material.chain_dates;
    numbers_.authorities = material.authorities_dates;
    WarnOfExpired(role_, material);
    return absl::OkStatus();
  }

  std::shared_ptr<tls::FileWatcherCertificateProvider> Provider() const {
    const std::string identity = identity_ ? identity_->path() : "";
    return std::make_shared<tls::FileWatcherCertificateProvider>(
        identity, identity, authorities_ ? authorities_->path() : "",
        kGrpcSeconds);
  }

  // The state of the files at the last check, for metrics.
  struct Numbers {
    TlsMaterial::Dates chain;
    TlsMaterial::Dates authorities;
    uint64_t taken = 0;
    uint64_t refused = 0;
    // True if the files on disk differ from those in use and are refused.
    bool refusing = false;
  };
  const Numbers& numbers() const { return numbers_; }
  void SetNumbers(const Numbers& numbers) { numbers_ = numbers; }
  const std::string& role() const { return role_; }

  // The result of a check. It is logged later, when no lock is held.
  struct Looked {
    Numbers numbers;
    // Set if changed files are in use now.
    std::optional<TlsMaterial> taken;
    // Why changed files were refused; empty if they were not, or if the reason
    // is the same as last time.
    std::string refused;
  };
  Looked Look(absl::Time now) {
    Looked looked;
    looked.numbers = numbers_;
    Numbers& numbers = looked.numbers;
    absl::Status status = absl::OkStatus();
    const absl::StatusOr<TlsTexts> texts = ReadTlsFiles(files_);
    if (!texts.ok()) {
      status = texts.status();
    } else if (*texts != in_use_ || numbers_.authorities.until <= now) {
      // Take leaves out authorities that have expired.
      absl::StatusOr<TlsMaterial> taken = Take(*texts, now);
      status = taken.status();
      if (taken.ok()) {
        numbers.chain = taken->chain_dates;
        numbers.authorities = taken->authorities_dates;
        ++numbers.taken;
        looked.taken = *std::move(taken);
      }
    }
    numbers.refusing = !status.ok();
    // Report a problem only when it is first found, not at every check.
    if (!status.ok() && status.message() != refusal_) {
      ++numbers.refused;
      looked.refused = std::string(status.message());
    }
    refusal_ = std::string(status.message());
    return looked;
  }
  void Log(const Looked& looked) const {
    if (!looked.refused.empty()) {
      LogWarning("TLS files refused, the old ones stay in use",
                 {{"role", role_}, {"why", looked.refused}});
    }
    if (!looked.taken.has_value()) return;
    WarnOfExpired(role_, *looked.taken);
    LogInfo("changed TLS files are in use",
            {{"role", role_},
             {"valid_until",
              absl::FormatTime(absl::RFC3339_sec,
                               std::min(looked.taken->chain_dates.until,
                                        looked.taken->authorities_dates.until),
                               absl::UTCTimeZone())}});
  }

 private:
  // Checks the texts and starts to use them. On an error, the old ones stay
  // in use.
  absl::StatusOr<TlsMaterial> Take(const TlsTexts& texts, absl::Time now) {
    KVASIR_ASSIGN_OR_RETURN(TlsMaterial material,
                            JudgeTlsTexts(files_, texts, now));
    std::vector<MemoryFile::Change> changes;
    // Replace the authorities first, because the peer may already show a
    // certificate that only a new authority has signed.
    if (authorities_ != nullptr) {
      changes.push_back({authorities_.get(), material.authorities});
    }
    if (identity_ != nullptr) {
      changes.push_back({identity_.get(), Identity(material)});
    }
    KVASIR_RETURN_IF_ERROR(MemoryFile::ReplaceAll(changes));
    in_use_ = texts;
    return material;
  }

  const TlsFiles files_;
  const std::string role_;
  std::unique_ptr<MemoryFile> identity_;
  std::unique_ptr<MemoryFile> authorities_;
  TlsTexts in_use_;
  std::string refusal_;
  Numbers numbers_;
};

TlsWatch::TlsWatch(Options options) : options_(std::move(options)) {}

TlsWatch::~TlsWatch() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    stopped_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<TlsWatch::Watched*> TlsWatch::Add(const TlsOptions& options,
                                                 const absl::Status& flags) {
  auto made = std::make_unique<Watched>(options);
  KVASIR_RETURN_IF_ERROR(made->Start(options_.now()));
  KVASIR_RETURN_IF_ERROR(flags);
  Watched* const raw = made.get();
  MutexLock look(&look_mutex_);
  {
    MutexLock lock(&mutex_);
    watched_.push_back(std::move(made));
  }
  if (!thread_.joinable() && options_.refresh != absl::InfiniteDuration()) {
    thread_ = std::thread([this] { Loop(); });
  }
  return raw;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsWatch::Server(
    const TlsOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const Watched* const watched,
                          Add(options, CheckServer(options)));
  tls::TlsServerCredentialsOptions made(watched->Provider());
  made.watch_identity_key_cert_pairs();
  if (!options.files.authorities.empty()) {
    made.watch_root_certs();
    made.set_cert_request_type(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  if (!options.names.empty()) {
    made.set_certificate_verifier(Verifier(options));
  }
  return tls::TlsServerCredentials(made);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsWatch::Channel(
    const TlsOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(const Watched* const watched,
                          Add(options, CheckChannel(options)));
  return ChannelCredentialsOf(options, watched->Provider());
}

void TlsWatch::Look() {
  std::vector<std::pair<const Watched*, Watched::Looked>> all;
  {
    MutexLock look(&look_mutex_);
    std::vector<Watched*> watched;
    {
      MutexLock lock(&mutex_);
      for (const auto& each : watched_) watched.push_back(each.get());
    }
    for (Watched* each : watched) {
      // Look is called without mutex_, because it may read files slowly, and a
      // scrape needs mutex_.
      all.emplace_back(each, each->Look(options_.now()));
      MutexLock lock(&mutex_);
      each->SetNumbers(all.back().second.numbers);
    }
  }
  for (const auto& [watched, looked] : all) watched->Log(looked);
}

void TlsWatch::Loop() {
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_) stopped_.WaitWithTimeout(&mutex_, options_.refresh);
      if (stopping_) return;
    }
    Look();
  }
}

std::vector<prometheus::MetricFamily> TlsWatch::Collect() const {
  using prometheus::MetricType;
  prometheus::MetricFamily until{"kvasir_tls_certificate_not_after_seconds",
                                 "When the first certificate of a file in use "
                                 "expires, in seconds since 1970",
                                 MetricType::Gauge,
                                 {}};
  prometheus::MetricFamily from{
      "kvasir_tls_certificate_not_before_seconds",
      "When the certificate that expires first became valid, in seconds since "
      "1970",
      MetricType::Gauge,
      {}};
  prometheus::MetricFamily reloads{
      "kvasir_tls_reloads_total",
      "Changes of TLS files, by whether the new files are used",
      MetricType::Counter,
      {}};
  prometheus::MetricFamily refusing{
      "kvasir_tls_files_refused",
      "1 while changed files are refused and the old ones stay in use",
      MetricType::Gauge,
      {}};
  const auto add = [](prometheus::MetricFamily* family,
                      std::vector<prometheus::ClientMetric::Label> labels,
                      double value) {
    prometheus::ClientMetric metric;
    metric.label = std::move(labels);
    metric.gauge.value = value;
    metric.counter.value = value;
    family->metric.push_back(std::move(metric));
  };
  MutexLock lock(&mutex_);
  for (const auto& watched : watched_) {
    const Watched::Numbers& numbers = watched->numbers();
    const prometheus::ClientMetric::Label role{"role", watched->role()};
    const std::pair<const char*, TlsMaterial::Dates> all[] = {
        {"certificate", numbers.chain}, {"authorities", numbers.authorities}};
    for (const auto& [file, dates] : all) {
      if (dates.until == absl::InfiniteFuture()) continue;
      add(&until, {role, {"file", file}},
          static_cast<double>(absl::ToUnixSeconds(dates.until)));
      add(&from, {role, {"file", file}},
          static_cast<double>(absl::ToUnixSeconds(dates.from)));
    }
    add(&reloads, {role, {"result", "ok"}}, static_cast<double>(numbers.taken));
    add(&reloads, {role, {"result", "refused"}},
        static_cast<double>(numbers.refused));
    add(&refusing, {role}, numbers.refusing ? 1 : 0);
  }
  return {std::move(until), std::move(from), std::move(reloads),
          std::move(refusing)};
}

bool IsLocal(const ListenAddress& listen) {
  in_addr address;
  return !listen.unix_path.empty() || listen.host == "localhost" ||
         listen.host == "::1" || listen.host == "[::1]" ||
         (inet_pton(AF_INET, listen.host.c_str(), &address) == 1 &&
          absl::StartsWith(listen.host, "127."));
}

bool IsLocalTarget(const std::string& target) {
  if (absl::StartsWith(target, "unix:")) return true;
  ListenAddress listen;
  listen.host = target.substr(0, target.rfind(':'));
  return IsLocal(listen);
}

absl::Status CheckPlaintext(const ListenAddress& listen, bool allowed,
                            const std::string& remedy) {
  if (allowed || IsLocal(listen)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      listen.host_flag, " ", listen.host,
      " would accept unencrypted connections from other machines: ", remedy,
      ", or --insecure if something else protects them (a service mesh, a "
      "NetworkPolicy), or listen on 127.0.0.1 only"));
}

}  // namespace kvasir::base
