#include "base/net/tls.h"

#include <arpa/inet.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

namespace tls = grpc::experimental;

template <typename T, void (*kFree)(T*)>
struct Free {
  void operator()(T* owned) const { kFree(owned); }
};
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

absl::Status Wrong(const std::string& flag, const std::string& path,
                   const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(flag, " ", path, ": ", what));
}

absl::StatusOr<File> Open(const std::string& flag, const std::string& path) {
  File file(std::fopen(path.c_str(), "re"));
  if (file == nullptr) return Wrong(flag, path, std::strerror(errno));
  return file;
}

// A key behind a passphrase cannot be read again without anybody there.
int NoPassphrase(char*, int, int, void*) { return -1; }

absl::StatusOr<Certificate> ReadCertificate(const std::string& flag,
                                            const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const File file, Open(flag, path));
  Certificate read(PEM_read_X509(file.get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (read == nullptr) return Wrong(flag, path, "has no certificate in PEM");
  return read;
}

absl::StatusOr<Key> ReadKey(const std::string& flag, const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const File file, Open(flag, path));
  Key read(PEM_read_PrivateKey(file.get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (read == nullptr) {
    return Wrong(flag, path, "has no private key in PEM without a passphrase");
  }
  return read;
}

std::string Shown(const ASN1_TIME* time) {
  std::tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "a time that nobody can read";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC",
                          absl::FromTM(parts, absl::UTCTimeZone()),
                          absl::UTCTimeZone());
}

absl::Status CheckDates(const std::string& flag, const std::string& path,
                        const X509* certificate, absl::Time now) {
  std::time_t at = absl::ToTimeT(now);
  const ASN1_TIME* const from = X509_get0_notBefore(certificate);
  const ASN1_TIME* const until = X509_get0_notAfter(certificate);
  // 0 is an error of the comparison, -1 that the time lies before `at`.
  if (X509_cmp_time(until, &at) != 1) {
    return Wrong(flag, path, absl::StrCat("was valid until ", Shown(until)));
  }
  if (X509_cmp_time(from, &at) != -1) {
    return Wrong(flag, path, absl::StrCat("is valid from ", Shown(from)));
  }
  return absl::OkStatus();
}

std::shared_ptr<tls::FileWatcherCertificateProvider> Watch(
    const TlsOptions& options) {
  const auto seconds = static_cast<unsigned>(
      std::max<int64_t>(1, absl::ToInt64Seconds(options.refresh)));
  return std::make_shared<tls::FileWatcherCertificateProvider>(
      options.files.key, options.files.certificate, options.files.authorities,
      seconds);
}

// Behind a chain that holds: is it one of those who may?
class OneOfNames final : public tls::ExternalCertificateVerifier {
 public:
  explicit OneOfNames(std::vector<std::string> names)
      : names_(std::move(names)) {}

  bool Verify(tls::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)>,
              grpc::Status* sync_status) override {
    std::vector<std::string> found;
    for (const auto& kind :
         {request->dns_names(), request->uri_names(), request->ip_names()}) {
      for (const grpc::string_ref& name : kind) {
        found.emplace_back(name.data(), name.size());
      }
    }
    for (const std::string& name : found) {
      if (std::find(names_.begin(), names_.end(), name) != names_.end()) {
        *sync_status = grpc::Status::OK;
        return true;
      }
    }
    *sync_status = grpc::Status(
        grpc::StatusCode::UNAUTHENTICATED,
        absl::StrCat("none of the certificate's names is allowed: ",
                     absl::StrJoin(found, ", ").substr(0, 200)));
    return true;
  }
  void Cancel(tls::TlsCustomVerificationCheckRequest*) override {}

 private:
  const std::vector<std::string> names_;
};

std::shared_ptr<tls::CertificateVerifier> Verifier(
    const std::vector<std::string>& names) {
  return tls::ExternalCertificateVerifier::Create<OneOfNames>(names);
}

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files, absl::Time now) {
  if (files.certificate.empty() != files.key.empty()) {
    const bool no_key = files.key.empty();
    return absl::InvalidArgumentError(absl::StrCat(
        no_key ? files.certificate_flag : files.key_flag, " ",
        no_key ? files.certificate : files.key, ": needs ",
        no_key ? files.key_flag : files.certificate_flag, ", too"));
  }
  if (!files.certificate.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        const Certificate certificate,
        ReadCertificate(files.certificate_flag, files.certificate));
    KVASIR_RETURN_IF_ERROR(CheckDates(files.certificate_flag, files.certificate,
                                      certificate.get(), now));
    KVASIR_ASSIGN_OR_RETURN(const Key key, ReadKey(files.key_flag, files.key));
    const bool fits = X509_check_private_key(certificate.get(), key.get()) == 1;
    ERR_clear_error();
    if (!fits) {
      return Wrong(files.key_flag, files.key,
                   absl::StrCat("is not the key of ", files.certificate_flag,
                                " ", files.certificate));
    }
  }
  if (!files.authorities.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        const Certificate authority,
        ReadCertificate(files.authorities_flag, files.authorities));
    KVASIR_RETURN_IF_ERROR(CheckDates(files.authorities_flag, files.authorities,
                                      authority.get(), now));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsServerCredentials(
    const TlsOptions& options) {
  const TlsFiles& files = options.files;
  KVASIR_RETURN_IF_ERROR(CheckTlsFiles(files, absl::Now()));
  if (!options.names.empty() && files.authorities.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("names of clients (", options.names.front(), ") without ",
                     files.authorities_flag, ": nobody vouches for them"));
  }
  if (files.certificate.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(files.authorities_flag, " ", files.authorities, ": needs ",
                     files.certificate_flag, " and ", files.key_flag, ", too"));
  }
  tls::TlsServerCredentialsOptions made(Watch(options));
  made.watch_identity_key_cert_pairs();
  if (!files.authorities.empty()) {
    made.watch_root_certs();
    made.set_cert_request_type(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  if (!options.names.empty()) {
    made.set_certificate_verifier(Verifier(options.names));
  }
  return tls::TlsServerCredentials(made);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsChannelCredentials(
    const TlsOptions& options) {
  const TlsFiles& files = options.files;
  KVASIR_RETURN_IF_ERROR(CheckTlsFiles(files, absl::Now()));
  if (files.authorities.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        files.certificate.empty() ? "names of servers" : files.certificate_flag,
        " without ", files.authorities_flag, ": who vouches for the server?"));
  }
  tls::TlsChannelCredentialsOptions made;
  made.set_certificate_provider(Watch(options));
  made.watch_root_certs();
  if (!files.certificate.empty()) made.watch_identity_key_cert_pairs();
  if (!options.names.empty()) {
    made.set_certificate_verifier(Verifier(options.names));
    // The names are what counts, not the host that is dialled.
    made.set_check_call_host(false);
  }
  return tls::TlsCredentials(made);
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
      " would speak to other machines without encryption: ", remedy,
      "; or --insecure, where something else protects it (a mesh, a "
      "NetworkPolicy); or stay on 127.0.0.1"));
}

}  // namespace kvasir::base
