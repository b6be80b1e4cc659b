#include "base/net/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/read_file.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

// The largest file that is read, in bytes: far larger than any bundle
// of authorities.
constexpr size_t kMaxBytes = 4 << 20;
constexpr int kReads = 5;

template <typename T, auto kFree>
struct Free {
  void operator()(T* owned) const { kFree(owned); }
};
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using Memory = std::unique_ptr<BIO, Free<BIO, BIO_free>>;
using Context = std::unique_ptr<SSL_CTX, Free<SSL_CTX, SSL_CTX_free>>;

// A file's path with the flag that sets it, for error texts.
struct Named {
  const std::string& flag;
  const std::string& path;

  absl::Status Wrong(absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", path, ": ", what));
  }
};

absl::StatusOr<std::string> ReadText(const Named& named) {
  if (named.path.empty()) return std::string();
  absl::StatusOr<std::string> text = ReadFile(named.path, kMaxBytes);
  if (!text.ok()) return named.Wrong(text.status().message());
  return text;
}

absl::StatusOr<TlsTexts> ReadOnce(const TlsFiles& files) {
  TlsTexts texts;
  KVASIR_ASSIGN_OR_RETURN(texts.key, ReadText({files.key_flag, files.key}));
  KVASIR_ASSIGN_OR_RETURN(
      texts.certificate, ReadText({files.certificate_flag, files.certificate}));
  KVASIR_ASSIGN_OR_RETURN(
      texts.authorities, ReadText({files.authorities_flag, files.authorities}));
  return texts;
}

Memory MemoryOf(const std::string& text) {
  return Memory(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

std::string TextOf(BIO* memory) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(memory, &data);
  return std::string(data, static_cast<size_t>(size));
}

// Refuses keys with a passphrase, because nobody could enter it when the file
// is read again.
int NoPassphrase(char*, int, int, void*) { return -1; }

// Returns OpenSSL's last error and clears its queue.
std::string Reason() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "no reason given" : reason;
}

// Reads all certificates; at least one is required.
absl::StatusOr<std::vector<Certificate>> ReadCertificates(
    const Named& named, const std::string& text) {
  const Memory memory = MemoryOf(text);
  std::vector<Certificate> read;
  ERR_clear_error();
  while (X509* const next =
             PEM_read_bio_X509(memory.get(), nullptr, NoPassphrase, nullptr)) {
    read.emplace_back(next);
  }
  const bool at_end =
      ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  const std::string reason = Reason();
  if (!at_end) {
    return named.Wrong(absl::StrCat("certificate ", read.size() + 1,
                                    " cannot be read: ", reason));
  }
  if (read.empty()) return named.Wrong("has no certificate in PEM");
  return read;
}

absl::StatusOr<Key> ReadKey(const Named& named, const std::string& text) {
  Key read(PEM_read_bio_PrivateKey(MemoryOf(text).get(), nullptr, NoPassphrase,
                                   nullptr));
  ERR_clear_error();
  if (read == nullptr) {
    return named.Wrong(
        "has no private key in PEM that opens without a passphrase");
  }
  return read;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm parts = {};
  // Treat a date that cannot be parsed as infinitely past, so that the
  // certificate counts as expired.
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::string Shown(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
}

// Returns "certificate 2 " if there are several certificates, otherwise "".
std::string Which(const std::vector<Certificate>& all, size_t at) {
  return all.size() == 1 ? "" : absl::StrCat("certificate ", at + 1, " ");
}

TlsMaterial::Dates DatesOf(const X509& certificate) {
  return {TimeOf(X509_get0_notBefore(&certificate)),
          TimeOf(X509_get0_notAfter(&certificate))};
}

// Returns "certificate 2 was valid until ...".
std::string Over(const std::vector<Certificate>& all, size_t at) {
  return absl::StrCat(Which(all, at), "was valid until ",
                      Shown(DatesOf(*all[at]).until));
}

// Checks the dates of all certificates. Returns the dates of the certificate
// that expires first.
absl::StatusOr<TlsMaterial::Dates> CheckDates(
    const Named& named, const std::vector<Certificate>& all, absl::Time now) {
  TlsMaterial::Dates first;
  for (size_t at = 0; at < all.size(); ++at) {
    const TlsMaterial::Dates dates = DatesOf(*all[at]);
    if (dates.until <= now) return named.Wrong(Over(all, at));
    if (dates.from > now) {
      return named.Wrong(absl::StrCat(Which(all, at), "is not valid before ",
                                      Shown(dates.from)));
    }
    if (dates.until < first.until) first = dates;
  }
  return first;
}

// Removes the expired certificates if others are still valid. Returns a text
// that names the removed ones.
std::string LeaveOut(std::vector<Certificate>* all, absl::Time now) {
  std::vector<std::string> over;
  std::vector<Certificate> stay;
  for (size_t at = 0; at < all->size(); ++at) {
    if (DatesOf(*(*all)[at]).until <= now) over.push_back(Over(*all, at));
  }
  if (over.size() == all->size()) return "";
  for (Certificate& each : *all) {
    if (DatesOf(*each).until > now) stay.push_back(std::move(each));
  }
  *all = std::move(stay);
  return absl::StrJoin(over, ", ");
}

// Returns an empty context like those that gRPC creates. It has the security
// level of this machine's OpenSSL configuration.
absl::StatusOr<Context> NewContext() {
  Context context(SSL_CTX_new(TLS_method()));
  if (context == nullptr) {
    return absl::InternalError(
        absl::StrCat("OpenSSL cannot create a TLS context: ", Reason()));
  }
  return context;
}

absl::Status TooWeak(const Named& named, const std::string& which) {
  return named.Wrong(absl::StrCat(
      which, "would fail every handshake: ", Reason(),
      " (an RSA key with 2048 bits or a P-256 key, signed with SHA-256, is "
      "enough)"));
}

// Checks that OpenSSL accepts certificate and key at its security level.
// Otherwise every handshake would fail, and no error would state the cause.
absl::Status CheckStrength(const Named& certificate,
                           const std::vector<Certificate>& chain,
                           const Named& key_file, EVP_PKEY* key) {
  KVASIR_ASSIGN_OR_RETURN(const Context context, NewContext());
  ERR_clear_error();
  if (SSL_CTX_use_certificate(context.get(), chain.front().get()) != 1) {
    return TooWeak(certificate, Which(chain, 0));
  }
  for (size_t at = 1; at < chain.size(); ++at) {
    if (SSL_CTX_add1_chain_cert(context.get(), chain[at].get()) != 1) {
      return TooWeak(certificate, Which(chain, at));
    }
  }
  if (SSL_CTX_use_PrivateKey(context.get(), key) != 1) {
    return TooWeak(key_file, "");
  }
  return absl::OkStatus();
}

// Checks that each authority's key is strong enough, because OpenSSL applies
// its security level also to the key that has signed a certificate. An
// authority's own signature is not checked.
absl::Status CheckAuthorities(const Named& named,
                              const std::vector<Certificate>& authorities) {
  constexpr std::array<int, 6> kLeastBits = {0, 80, 112, 128, 192, 256};
  KVASIR_ASSIGN_OR_RETURN(const Context context, NewContext());
  const int level = std::clamp(SSL_CTX_get_security_level(context.get()), 0, 5);
  const int least = kLeastBits[static_cast<size_t>(level)];
  for (size_t at = 0; at < authorities.size(); ++at) {
    EVP_PKEY* const key = X509_get0_pubkey(authorities[at].get());
    const int bits = key == nullptr ? 0 : EVP_PKEY_get_security_bits(key);
    if (bits >= least) continue;
    return named.Wrong(absl::StrCat(
        Which(authorities, at), "has a key of ", bits,
        " bits of security, but OpenSSL requires ", least,
        ": it accepts no certificate ", "that such a key has signed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Written(const std::vector<Certificate>& all) {
  const Memory memory(BIO_new(BIO_s_mem()));
  for (const Certificate& each : all) {
    if (PEM_write_bio_X509(memory.get(), each.get()) != 1) {
      return absl::InternalError(
          absl::StrCat("OpenSSL cannot write a certificate: ", Reason()));
    }
  }
  return TextOf(memory.get());
}

absl::StatusOr<std::string> Written(EVP_PKEY* key) {
  const Memory memory(BIO_new(BIO_s_mem()));
  if (PEM_write_bio_PrivateKey(memory.get(), key, nullptr, nullptr, 0, nullptr,
                               nullptr) != 1) {
    return absl::InternalError(
        absl::StrCat("OpenSSL cannot write a key: ", Reason()));
  }
  return TextOf(memory.get());
}

}  // namespace

absl::StatusOr<TlsTexts> ReadTlsFiles(const TlsFiles& files) {
  const Named certificate{files.certificate_flag, files.certificate};
  const Named key_file{files.key_flag, files.key};
  if (files.certificate.empty() != files.key.empty()) {
    const bool no_key = files.key.empty();
    return (no_key ? certificate : key_file)
        .Wrong(absl::StrCat("needs ",
                            no_key ? files.key_flag : files.certificate_flag,
                            ", too"));
  }
  KVASIR_ASSIGN_OR_RETURN(TlsTexts last, ReadOnce(files));
  for (int i = 1; i < kReads; ++i) {
    KVASIR_ASSIGN_OR_RETURN(TlsTexts again, ReadOnce(files));
    if (again == last) break;
    last = std::move(again);
  }
  return last;
}

absl::StatusOr<TlsMaterial> JudgeTlsTexts(const TlsFiles& files,
                                          const TlsTexts& texts,
                                          absl::Time now) {
  const Named certificate{files.certificate_flag, files.certificate};
  const Named key_file{files.key_flag, files.key};
  const Named authorities{files.authorities_flag, files.authorities};
  TlsMaterial material;
  if (!files.certificate.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                            ReadCertificates(certificate, texts.certificate));
    KVASIR_ASSIGN_OR_RETURN(material.chain_dates,
                            CheckDates(certificate, chain, now));
    KVASIR_ASSIGN_OR_RETURN(const Key key, ReadKey(key_file, texts.key));
    const bool fits =
        X509_check_private_key(chain.front().get(), key.get()) == 1;
    ERR_clear_error();
    if (!fits) {
      return key_file.Wrong(absl::StrCat("is not the key of ",
                                         files.certificate_flag, " ",
                                         files.certificate));
    }
    KVASIR_RETURN_IF_ERROR(
        CheckStrength(certificate, chain, key_file, key.get()));
    KVASIR_ASSIGN_OR_RETURN(material.chain, Written(chain));
    KVASIR_ASSIGN_OR_RETURN(material.key, Written(key.get()));
  }
  if (!files.authorities.empty()) {
    KVASIR_ASSIGN_OR_RETURN(std::vector<Certificate> all,
                            ReadCertificates(authorities, texts.authorities));
    const std::string over = LeaveOut(&all, now);
    if (!over.empty()) {
      material.left_out = absl::StrCat(files.authorities_flag, " ",
                                       files.authorities, ": ", over);
    }
    KVASIR_ASSIGN_OR_RETURN(material.authorities_dates,
                            CheckDates(authorities, all, now));
    KVASIR_RETURN_IF_ERROR(CheckAuthorities(authorities, all));
    KVASIR_ASSIGN_OR_RETURN(material.authorities, Written(all));
  }
  return material;
}

absl::StatusOr<TlsMaterial> LoadTlsFiles(const TlsFiles& files,
                                         absl::Time now) {
  KVASIR_ASSIGN_OR_RETURN(const TlsTexts texts, ReadTlsFiles(files));
  return JudgeTlsTexts(files, texts, now);
}

}  // namespace kvasir::base
