// Reads certificates, keys and authorities from PEM files, and checks at load
// what would otherwise make every handshake fail.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvasir::base {

// Paths of PEM files, and the flags that set them.
struct TlsFiles {
  // This side's certificate chain, its own certificate first, and the key.
  std::string certificate;
  std::string key;
  // Authorities that this side trusts to sign the peer's certificate.
  std::string authorities;

  std::string certificate_flag = "--tls-cert";
  std::string key_flag = "--tls-key";
  std::string authorities_flag = "--tls-client-ca";

  bool empty() const {
    return certificate.empty() && key.empty() && authorities.empty();
  }
};

// The files' contents, unparsed; empty for files that are not set.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string authorities;

  bool operator==(const TlsTexts&) const = default;
};

// The contents that have passed all checks, written anew in PEM without any
// other text of the files.
struct TlsMaterial {
  std::string chain;
  std::string key;
  std::string authorities;
  // The validity period of one certificate: the one that expires first.
  struct Dates {
    absl::Time from = absl::InfinitePast();
    absl::Time until = absl::InfiniteFuture();
  };
  Dates chain_dates;
  Dates authorities_dates;
  // A text with flag and path that names the expired authorities, which are
  // left out; empty if there are none.
  std::string left_out;
};

// Reads the files. If they change meanwhile, they are read again a few times
// until they stay the same, so that key and certificate belong together.
// INVALID_ARGUMENT, with flag and path, if only one of certificate and key is
// set, or if a file cannot be read or is too large for certificates.
absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files);

// Checks the contents. INVALID_ARGUMENT, with flag, path and cause, for text
// that is not PEM, a key that does not belong to the certificate, a certificate
// or authority that has expired or is not yet valid, and one that OpenSSL
// considers too weak. If some authorities have expired and others have not, the
// expired ones are left out.
absl::StatusOr<TlsMaterial> JudgeTlsTexts(const TlsFiles& files,
                                          const TlsTexts& texts,
                                          absl::Time now);

// Calls ReadTlsFiles, then JudgeTlsTexts.
absl::StatusOr<TlsMaterial> LoadTlsFiles(const TlsFiles& files, absl::Time now);

}  // namespace kvasir::base
