#include "base/sha256.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "base/check.h"

namespace kvasir::base {

std::string Sha256Hex(std::string_view bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  KVASIR_CHECK(EVP_Digest(bytes.data(), bytes.size(), digest, &size,
                          EVP_sha256(), nullptr) == 1);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), size));
}

bool EqualInConstantTime(std::string_view a, std::string_view b) {
  return a.size() == b.size() &&
         CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace kvasir::base
