#include "base/net/testing/certificates.h"

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/rsa.h>
#include <openssl/x509v3.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/strings/str_join.h"

namespace kvasir::base {
namespace {

void Must(bool good) {
  if (!good) std::abort();
}

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Memory = std::unique_ptr<BIO, decltype(&BIO_free)>;

std::string TextOf(BIO* memory) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(memory, &data);
  return std::string(data, static_cast<size_t>(size));
}

Memory MemoryOf(const std::string& text) {
  return Memory(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())),
                &BIO_free);
}

TestCertificate Texts(X509* certificate, EVP_PKEY* key) {
  const Memory first(BIO_new(BIO_s_mem()), &BIO_free);
  const Memory second(BIO_new(BIO_s_mem()), &BIO_free);
  Must(PEM_write_bio_X509(first.get(), certificate) == 1);
  Must(PEM_write_bio_PrivateKey(second.get(), key, nullptr, nullptr, 0, nullptr,
                                nullptr) == 1);
  return {TextOf(first.get()), TextOf(second.get())};
}

void Extend(X509* certificate, X509* issuer, int kind,
            const std::string& text) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const made =
      X509V3_EXT_conf_nid(nullptr, &context, kind, text.c_str());
  Must(made != nullptr && X509_add_ext(certificate, made, -1) == 1);
  X509_EXTENSION_free(made);
}

// Makes a certificate. It is signed by `authority`, or with its own key if
// `authority` is empty.
TestCertificate Make(const TestCertificate& authority,
                     const TestCertificateOptions& options) {
  const Key key(options.rsa_bits == 0
                    ? EVP_EC_gen("P-256")
                    : EVP_RSA_gen(static_cast<unsigned>(options.rsa_bits)),
                &EVP_PKEY_free);
  const Certificate made(X509_new(), &X509_free);
  Must(key != nullptr && made != nullptr);
  uint32_t serial = 0;
  Must(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) ==
       1);
  X509_set_version(made.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), serial >> 1 | 1);
  X509_gmtime_adj(X509_getm_notBefore(made.get()),
                  absl::ToInt64Seconds(options.valid_from));
  X509_gmtime_adj(X509_getm_notAfter(made.get()),
                  absl::ToInt64Seconds(options.valid_until));
  X509_set_pubkey(made.get(), key.get());
  X509_NAME* const name = X509_get_subject_name(made.get());
  X509_NAME_add_entry_by_txt(
      name, "CN", MBSTRING_ASC,
      reinterpret_cast<const unsigned char*>(options.common_name.c_str()), -1,
      -1, 0);
  const bool own = authority.certificate.empty();
  Certificate issuer(nullptr, &X509_free);
  Key issuer_key(nullptr, &EVP_PKEY_free);
  if (!own) {
    issuer.reset(PEM_read_bio_X509(MemoryOf(authority.certificate).get(),
                                   nullptr, nullptr, nullptr));
    issuer_key.reset(PEM_read_bio_PrivateKey(MemoryOf(authority.key).get(),
                                             nullptr, nullptr, nullptr));
    Must(issuer != nullptr && issuer_key != nullptr);
  }
  X509* const by = own ? made.get() : issuer.get();
  X509_set_issuer_name(made.get(), X509_get_subject_name(by));
  Extend(made.get(), by, NID_basic_constraints,
         own ? "critical,CA:TRUE" : "CA:FALSE");
  if (!options.names.empty()) {
    Extend(made.get(), by, NID_subject_alt_name,
           absl::StrJoin(options.names, ","));
  }
  Must(X509_sign(made.get(), own ? key.get() : issuer_key.get(), EVP_sha256()) >
       0);
  return Texts(made.get(), key.get());
}

}  // namespace

TestCertificate MakeAuthority(const std::string& common_name) {
  return MakeAuthorityWith({.common_name = common_name, .names = {}});
}

TestCertificate MakeAuthorityWith(const TestCertificateOptions& options) {
  return Make({}, options);
}

TestCertificate MakeCertificate(const TestCertificate& authority,
                                const TestCertificateOptions& options) {
  return Make(authority, options);
}

}  // namespace kvasir::base
