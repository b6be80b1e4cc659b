// Makes TLS certificates for tests, so that the repository contains no
// private key.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace kvasir::base {

// A certificate and its private key, as PEM texts.
struct TestCertificate {
  std::string certificate;
  std::string key;
};

struct TestCertificateOptions {
  std::string common_name = "test";
  std::vector<std::string> names;  // "DNS:localhost", "IP:127.0.0.1", "URI:..."
  absl::Duration valid_from = -absl::Hours(1);  // from now
  absl::Duration valid_until = absl::Hours(1);
  int rsa_bits = 0;  // 0: an elliptic-curve key (P-256)
};

// MakeAuthority and MakeAuthorityWith return the certificate of an authority,
// signed with its own key.
TestCertificate MakeAuthority(const std::string& common_name);
TestCertificate MakeAuthorityWith(const TestCertificateOptions& options);
TestCertificate MakeCertificate(const TestCertificate& authority,
                                const TestCertificateOptions& options);

}  // namespace kvasir::base
