// Certificates, keys and authorities of TLS as they lie in PEM files: read, and
// judged as a handshake would judge them.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

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

// What lies in the files, unread; empty where there is none.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string authorities;

  bool operator==(const TlsTexts&) const = default;
};

// What of it is used, in PEM, written anew from what was judged.
struct TlsMaterial {
  std::string chain;
  std::string key;
  std::string authorities;
  // Of the first certificate to end of the chain, or of the authorities.
  struct Dates {
    absl::Time from = absl::InfinitePast();
    absl::Time until = absl::InfiniteFuture();
  };
  Dates chain_dates;
  Dates authorities_dates;
  // Authorities that are over and left out, by flag and path; empty: none.
  std::string left_out;
};

// INVALID_ARGUMENT by flag and path for a certificate without its key, a file
// that cannot be read or is larger than any certificate's. Files that change
// meanwhile are read until they stay as they are, a few times: key and
// certificate are then of one state.
absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files);

// INVALID_ARGUMENT, by flag, path and cause, for what is no PEM, a key of
// another certificate, one that is over or not yet valid, intermediate or
// authority alike, and what OpenSSL thinks too weak. Of several authorities
// those that are over are left out: who is of the others has no part in it.
absl::StatusOr<TlsMaterial> JudgeTlsTexts(const TlsFiles& files,
                                          const TlsTexts& texts,
                                          absl::Time now);

// Both.
absl::StatusOr<TlsMaterial> LoadTlsFiles(const TlsFiles& files, absl::Time now);

}  // namespace kvasir::base
