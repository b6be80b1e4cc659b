#include "base/net/tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/testing/certificates.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsFilesTest : public ::testing::Test {
 protected:
  TlsFilesTest() {
    Write("ca.pem", authority_.certificate);
    Put("server", {.names = {"DNS:localhost"}});
    Put("client", {.names = {"DNS:router.kvasir"}});
  }

  std::string Path(const std::string& name) const { return folder_.File(name); }
  void Write(const std::string& name, const std::string& text) {
    folder_.Write(name, text);
  }
  void Put(const std::string& name, const TestCertificateOptions& options) {
    const TestCertificate made = MakeCertificate(authority_, options);
    Write(name + ".key", made.key);
    Write(name + ".pem", made.certificate);
  }
  TlsFiles Files(const std::string& name) const {
    TlsFiles files;
    files.certificate = Path(name + ".pem");
    files.key = Path(name + ".key");
    files.authorities = Path("ca.pem");
    return files;
  }
  TlsFiles Authorities(const std::string& text) {
    Write("authorities.pem", text);
    TlsFiles files;
    files.authorities = Path("authorities.pem");
    return files;
  }
  absl::Status Check(const TlsFiles& files) {
    return LoadTlsFiles(files, absl::Now()).status();
  }

  const TestCertificate authority_ = MakeAuthority("an authority");
  const TempFolder folder_;
};

auto Refuses(const ::testing::Matcher<const std::string&>& text) {
  return StatusIs(absl::StatusCode::kInvalidArgument, text);
}

TEST_F(TlsFilesTest, AnErrorInATlsFileNamesTheFlagThatGaveTheFile) {
  KVASIR_EXPECT_OK(Check(Files("server")));
  TlsFiles files = Files("server");
  files.key.clear();
  EXPECT_THAT(Check(files), Refuses(AllOf(HasSubstr("--tls-cert"),
                                          HasSubstr("needs --tls-key"))));
  files = Files("server");
  files.certificate.clear();
  EXPECT_THAT(Check(files), Refuses(HasSubstr("needs --tls-cert")));
  files = Files("server");
  files.key = Path("client.key");
  EXPECT_THAT(Check(files),
              Refuses(AllOf(HasSubstr("--tls-key"), HasSubstr("client.key"),
                            HasSubstr("is not the key of --tls-cert"))));
  EXPECT_THAT(Check(Files("nobody")), Refuses(HasSubstr("No such file")));
  EXPECT_THAT(Check(Authorities("no PEM at all")),
              Refuses(AllOf(HasSubstr("--tls-client-ca"),
                            HasSubstr("has no certificate in PEM"))));
  files = Files("server");
  files.key = Path("ca.pem");
  EXPECT_THAT(Check(files), Refuses(HasSubstr("has no private key")));
  files.key = folder_.path();
  EXPECT_THAT(Check(files), Refuses(HasSubstr("is not a regular file")));
  EXPECT_THAT(Check(Authorities(std::string(5 << 20, 'x'))),
              Refuses(HasSubstr("has more than 4194304 bytes")));
}

// gRPC (1.51) aborts the process if a file is empty.
TEST_F(TlsFilesTest, AnEmptyFileIsRefused) {
  for (const char* file : {"server.pem", "server.key", "ca.pem"}) {
    std::string whole;
    std::getline(std::ifstream(Path(file)), whole, '\0');
    Write(file, "");
    EXPECT_THAT(Check(Files("server")),
                Refuses(AllOf(HasSubstr(file), HasSubstr("in PEM"))));
    Write(file, whole);
  }
  KVASIR_EXPECT_OK(Check(Files("server")));
}

TEST_F(TlsFilesTest, AnExpiredOrNotYetValidCertificateIsRefusedWithItsDate) {
  Put("old", {.names = {},
              .valid_from = -absl::Hours(2),
              .valid_until = -absl::Hours(1)});
  EXPECT_THAT(
      Check(Files("old")),
      Refuses(AllOf(HasSubstr("was valid until 20"), HasSubstr("UTC"))));
  Put("new", {.names = {},
              .valid_from = absl::Hours(1),
              .valid_until = absl::Hours(2)});
  EXPECT_THAT(Check(Files("new")),
              Refuses(HasSubstr("is not valid before 20")));
}

// Regression test: only the first authority of a file was once checked, so the
// result depended on the order of the authorities.
TEST_F(TlsFilesTest, AnExpiredAuthorityIsIgnoredIfAnotherAuthorityIsValid) {
  const std::string old = MakeAuthorityWith({.common_name = "old",
                                             .names = {},
                                             .valid_from = -absl::Hours(2),
                                             .valid_until = -absl::Hours(1)})
                              .certificate;
  const std::string& good = authority_.certificate;
  KVASIR_EXPECT_OK(
      Check(Authorities(good + MakeAuthority("another").certificate)));
  for (const std::string& text : {good + old, old + good}) {
    const auto material = LoadTlsFiles(Authorities(text), absl::Now());
    KVASIR_ASSERT_OK(material.status());
    EXPECT_EQ(material->authorities, good);
    EXPECT_THAT(
        material->left_out,
        AllOf(HasSubstr("--tls-client-ca " + Path("authorities.pem")),
              HasSubstr(text == old + good ? "certificate 1 was valid until"
                                           : "certificate 2 was valid until")));
    EXPECT_GT(material->authorities_dates.until, absl::Now());
  }
  EXPECT_THAT(Check(Authorities(old)), Refuses(HasSubstr("was valid until")));
  EXPECT_THAT(Check(Authorities(old + old)),
              Refuses(HasSubstr("certificate 1 was valid until")));
  // The text of the second certificate is incomplete.
  EXPECT_THAT(Check(Authorities(good + good.substr(0, good.size() / 2))),
              Refuses(HasSubstr("certificate 2 cannot be read")));
}

TEST_F(TlsFilesTest, EveryCertificateOfTheChainIsChecked) {
  const std::string own =
      MakeCertificate(authority_, {.names = {}}).certificate;
  const std::string old = MakeAuthorityWith({.common_name = "old",
                                             .names = {},
                                             .valid_from = -absl::Hours(2),
                                             .valid_until = -absl::Hours(1)})
                              .certificate;
  const TestCertificate made = MakeCertificate(authority_, {.names = {}});
  Write("chain.key", made.key);
  Write("chain.pem", made.certificate + old);
  EXPECT_THAT(Check(Files("chain")),
              Refuses(AllOf(HasSubstr("chain.pem"),
                            HasSubstr("certificate 2 was valid until"))));
  Write("chain.pem", made.certificate + authority_.certificate);
  KVASIR_EXPECT_OK(Check(Files("chain")));
}

// Regression test: with such a certificate every handshake once failed, while
// the server reported that it was serving.
TEST_F(TlsFilesTest, ACertificateWithATooWeakKeyIsRefusedWhenItIsLoaded) {
  for (const int bits : {512, 1024}) {
    Put("weak", {.names = {}, .rsa_bits = bits});
    EXPECT_THAT(Check(Files("weak")),
                Refuses(AllOf(HasSubstr("--tls-cert"), HasSubstr("weak.pem"),
                              HasSubstr("ee key too small"))))
        << bits;
  }
  Put("strong", {.names = {}, .rsa_bits = 2048});
  KVASIR_EXPECT_OK(Check(Files("strong")));
  const std::string weak =
      MakeAuthorityWith({.common_name = "weak", .names = {}, .rsa_bits = 1024})
          .certificate;
  EXPECT_THAT(Check(Authorities(authority_.certificate + weak)),
              Refuses(AllOf(HasSubstr("--tls-client-ca"),
                            HasSubstr("certificate 2 has a key of 80 bits"))));
  // A weak certificate later in the chain is refused as well.
  const TestCertificate made = MakeCertificate(authority_, {.names = {}});
  Write("chain.key", made.key);
  Write("chain.pem", made.certificate + weak);
  EXPECT_THAT(Check(Files("chain")),
              Refuses(HasSubstr("certificate 2 would fail every handshake")));
}

TEST_F(TlsFilesTest,
       LoadingKeepsOnlyKeysAndCertificatesAndReportsTheEarliestExpiry) {
  const TestCertificate made = MakeCertificate(
      authority_, {.names = {}, .valid_until = absl::Minutes(30)});
  // Some people keep key, certificate and other text in one file.
  Write("both.pem", absl::StrCat("a comment\n", made.key, made.certificate,
                                 authority_.certificate, "\nmore\n"));
  TlsFiles files;
  files.certificate = files.key = Path("both.pem");
  files.authorities = Path("ca.pem");
  const absl::Time now = absl::Now();
  const auto material = LoadTlsFiles(files, now);
  KVASIR_ASSERT_OK(material.status());
  EXPECT_EQ(material->key, made.key);
  EXPECT_EQ(material->chain, made.certificate + authority_.certificate);
  EXPECT_EQ(material->authorities, authority_.certificate);
  EXPECT_LE(material->chain_dates.until, now + absl::Minutes(30));
  EXPECT_GT(material->chain_dates.until, now + absl::Minutes(29));
  EXPECT_GT(material->authorities_dates.until, now + absl::Minutes(59));
  // The test certificates began to be valid an hour ago.
  EXPECT_LE(material->chain_dates.from, now - absl::Minutes(59));
  EXPECT_GE(material->chain_dates.from, now - absl::Minutes(61));
  EXPECT_EQ(material->left_out, "");
}

}  // namespace
}  // namespace kvasir::base
