#include "router/identity/identities.h"

#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "base/sha256.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);

// Replaces every "#word" in the text by the word's hash.
std::string WithHashes(std::string text) {
  for (const char* word : {"one", "two", "old", "three"}) {
    text = absl::StrReplaceAll(
        text, {{absl::StrCat("#", word), base::Sha256Hex(word)}});
  }
  return text;
}

absl::StatusOr<Identities> Parse(const std::string& text) {
  return Identities::Parse(WithHashes(text), "who.json");
}

// Returns the JSON of a file with one tenant, 'red', and these further fields
// of the tenant.
std::string Red(const std::string& fields) {
  return absl::StrCat(R"({"schema_version": 1, "tenants": [{"name": "red")",
                      fields.empty() ? "" : ", ", fields, "}]}");
}

constexpr char kFile[] = R"({
  "schema_version": 1,
  "tenants": [
    {"name": "red", "certificates": ["red.example", "spiffe://red"],
     "tokens": [{"label": "laptop", "sha256": "#one"},
                {"label": "old", "sha256": "#old",
                 "not_after": "2026-01-01T00:00:00Z"}]},
    {"name": "blue", "certificates": ["blue.example"], "roles": ["ADMIN"],
     "tokens": [{"label": "ci", "sha256": "#two"}]}
  ]})";

Credentials WithToken(const std::string& token) {
  return {.encrypted = true,
          .token = Credentials::Token::kGiven,
          .token_sha256 = base::Sha256Hex(token)};
}
Credentials WithCertificate(const std::vector<std::string>& names) {
  return {.encrypted = true, .certificate_names = names};
}

struct WrongFile {
  const char* text;
  const char* error;
};
class WrongFileTest : public ::testing::TestWithParam<WrongFile> {};

TEST_P(WrongFileTest, TheErrorNamesTheFileTheEntryAndTheField) {
  const auto read = Parse(GetParam().text);
  EXPECT_THAT(read.status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                      AllOf(::testing::StartsWith("who.json: "),
                                            HasSubstr(GetParam().error))))
      << GetParam().text;
  for (const char* word : {"one", "two"}) {
    EXPECT_THAT(std::string(read.status().message()),
                Not(HasSubstr(base::Sha256Hex(word).substr(0, 24))));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Identities, WrongFileTest,
    ::testing::Values(
        WrongFile{"", "is not a valid Identities message"},
        WrongFile{"[]", "is not a valid Identities message"},
        WrongFile{"{\"schema_version\": 1",
                  "is not a valid Identities message"},
        WrongFile{R"({"tenants": [{"name": "a"}]})",
                  "schema_version: want 1, have 0"},
        WrongFile{R"({"schema_version": 2})", "schema_version: want 1, have 2"},
        WrongFile{R"({"schema_version": 1, "tenant": []})", "tenant"},
        // The parser's own message would quote this line with its secret.
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "red",
                   "tokens": [{"label": "a", "sha256": "#one" "x": 1}]}]})",
                  "is not a valid Identities message"},
        WrongFile{R"({"schema_version": "#one"})",
                  "is not a valid Identities message"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": ""}]})",
                  "tenants[0].name: want 1 to 128 letters, digits and "
                  "-_.:@/, have 0 bytes"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "a b"}]})",
                  "tenants[0].name: want letters, digits and -_.:@/, but "
                  "byte 1 is none of them"},
        WrongFile{R"({"schema_version": 1, "tenants":
                   [{"name": "a"}, {"name": "b"}, {"name": "a"}]})",
                  "tenants[2] ('a'): tenants[0] already has this name"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "red",
                   "tokens": [{"sha256": "#one"}]}]})",
                  "tenants[0] ('red').tokens[0].label: want 1 to 64"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "red",
                   "tokens": [{"label": "a", "sha256": "one"}]}]})",
                  "tenants[0] ('red').tokens[0].sha256: want 64 hex digits"},
        WrongFile{
            R"({"schema_version": 1, "tenants": [{"name": "red",
                   "tokens": [{"label": "a", "sha256": "#one"},
                              {"label": "a", "sha256": "#two"}]}]})",
            "tenants[0] ('red').tokens[1].label: 'a' is already the label of "
            "another token"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "red",
                   "tokens": [{"label": "a", "sha256": "#one"}]},
                   {"name": "blue",
                   "tokens": [{"label": "b", "sha256": "#one"}]}]})",
                  "tenants[1] ('blue').tokens[0].sha256: is also the hash of "
                  "token 'a' of tenants[0]"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "red",
                   "tokens": [{"label": "a", "sha256": "#one",
                   "not_after": "soon"}]}]})",
                  "is not a valid Identities message"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "certificates": ["x"]},
                   {"name": "blue", "certificates": ["y", "x"]}]})",
                  "tenants[1] ('blue').certificates[1]: already belongs to "
                  "tenants[0]"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "certificates": ["*.x"]}]})",
                  "certificates[0]: want a whole name"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "certificates": ["a b"]}]})",
                  "certificates[0]: want the DNS or URI name"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "roles": ["KING"]}]})",
                  "is not a valid Identities message"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "roles": [0]}]})",
                  "tenants[0] ('red').roles: want only CLIENT or ADMIN, have "
                  "the number 0"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "quota": {"requests_per_second": -1}}]})",
                  "tenants[0] ('red').quota.requests_per_second: want 0 (no "
                  "limit), or 1e-05 to 1e+06, have -1"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "quota": {"requests_per_second": "NaN"}}]})",
                  "quota.requests_per_second"},
        WrongFile{R"({"schema_version": 1, "tenants": [
                   {"name": "red", "quota": {"burst": 3}}]})",
                  "quota.burst: requires a requests_per_second above 0"},
        WrongFile{R"({"schema_version": 1, "tenants": [{"name": "red",
                   "quota": {"requests_per_second": 1, "burst": 1000001}}]})",
                  "quota.burst: want at most 1000000"},
        WrongFile{
            R"({"schema_version": 1, "anonymous":
                   {"tokens": [{"label": "a", "sha256": "#one"}]}})",
            "anonymous ('anonymous'): is for callers without credentials"},
        WrongFile{R"({"schema_version": 1, "anonymous":
                   {"may_set_tenant": true}})",
                  "anonymous ('anonymous').may_set_tenant: anonymous callers"},
        WrongFile{
            R"({"schema_version": 1, "anonymous": {"least_priority": -1}})",
            "anonymous ('anonymous').least_priority: want 0, have -1"},
        WrongFile{R"({"schema_version": 1, "anonymous": {},
                   "tenants": [{"name": "a", "least_priority": 1}]})",
                  "tenants[0] ('a').least_priority: want at most 0, have 1"},
        WrongFile{R"({"schema_version": 1, "anonymous": {"roles": ["ADMIN"]}})",
                  "anonymous ('anonymous').roles: want only CLIENT"},
        WrongFile{
            R"({"schema_version": 1, "tenants": [{"name": "anonymous"}],
                   "anonymous": {}})",
            "anonymous ('anonymous'): tenants[0] already has this name"}));

TEST(IdentitiesTest, TheErrorForTooManyEntriesOrBytesNamesTheLimit) {
  EXPECT_THAT(Parse(std::string(kMaxIdentitiesBytes + 1, ' ')).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("want at most 1048576 bytes, have 1048577")));
  std::string tenants;
  for (int i = 0; i <= kMaxTenants; ++i) {
    absl::StrAppend(&tenants, i == 0 ? "" : ",", R"({"name": "t)", i, "\"}");
  }
  EXPECT_THAT(Parse(absl::StrCat(R"({"schema_version": 1, "tenants": [)",
                                 tenants, "]}"))
                  .status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tenants: want at most 1024, have 1025")));
  std::string tokens;
  for (size_t i = 0; i <= kMaxTokens; ++i) {
    absl::StrAppend(&tokens, i == 0 ? "" : ",", R"({"label": "t)", i,
                    R"(", "sha256": ")", base::Sha256Hex(std::to_string(i)),
                    "\"}");
  }
  EXPECT_THAT(Parse(Red(absl::StrCat(R"("tokens": [)", tokens, "]"))).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tokens[4096]: want at most 4096 tokens")));
  std::string names;
  for (int i = 0; i <= kMaxCertificatesOfTenant; ++i) {
    absl::StrAppend(&names, i == 0 ? "" : ",", "\"n", i, "\"");
  }
  EXPECT_THAT(
      Parse(Red(absl::StrCat(R"("certificates": [)", names, "]"))).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("certificates: want at most 64, have 65")));
}

class IdentitiesFindTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto read = Parse(kFile);
    KVASIR_ASSERT_OK(read.status());
    identities_ = *std::move(read);
  }
  std::string TenantOf(const Credentials& credentials) {
    const auto found = identities_.Find(credentials, kNow, &refused_);
    if (!found.ok()) return std::string(found.status().message());
    return absl::StrCat(identities_.tenant(found->tenant_idx).name(), "/",
                        found->label);
  }

  Identities identities_;
  Identities::Refused refused_;
};

TEST_F(IdentitiesFindTest, FindsCallersByTokenByCertificateOrByBoth) {
  EXPECT_EQ(TenantOf(WithToken("one")), "red/laptop");
  EXPECT_EQ(TenantOf(WithToken("two")), "blue/ci");
  EXPECT_EQ(TenantOf(WithCertificate({"other", "spiffe://red"})),
            "red/spiffe://red");
  Credentials both = WithToken("one");
  both.certificate_names = {"red.example"};
  EXPECT_EQ(TenantOf(both), "red/laptop");
  // A certificate whose names are all unknown has no effect.
  both.certificate_names = {"other.example"};
  EXPECT_EQ(TenantOf(both), "red/laptop");
}

TEST_F(IdentitiesFindTest,
       TheErrorOfAnUnknownCallerNamesTheAcceptedCredentials) {
  EXPECT_EQ(TenantOf({.encrypted = true}),
            "no credentials: want metadata 'authorization: Bearer TOKEN', or a "
            "certificate that is known here");
  EXPECT_EQ(refused_.why, CallerRefusal::kNoCredentials);
  TenantOf(WithCertificate({"other.example"}));
  EXPECT_EQ(refused_.why, CallerRefusal::kNoCredentials);
  EXPECT_EQ(TenantOf(WithToken("three")),
            "metadata 'authorization': the token is unknown");
  EXPECT_EQ(refused_.why, CallerRefusal::kUnknown);
  EXPECT_FALSE(refused_.known.has_value());
  Credentials malformed{.encrypted = true,
                        .token = Credentials::Token::kMalformed};
  EXPECT_EQ(TenantOf(malformed),
            "metadata 'authorization': want one value, 'Bearer TOKEN' with a "
            "token of 1 to 512 letters, digits and -._~+/=");
  EXPECT_EQ(refused_.why, CallerRefusal::kMalformed);
  EXPECT_THAT(identities_.Find(malformed, kNow, &refused_).status(),
              StatusIs(absl::StatusCode::kUnauthenticated, ::testing::_));
}

TEST_F(IdentitiesFindTest, AWrongTokenIsRefusedEvenWithAValidCertificate) {
  Credentials both = WithToken("three");
  both.certificate_names = {"red.example"};
  TenantOf(both);
  EXPECT_EQ(refused_.why, CallerRefusal::kUnknown);
}

TEST_F(IdentitiesFindTest, NoTokenIsAcceptedWithoutTls) {
  Credentials plain = WithToken("one");
  plain.encrypted = false;
  EXPECT_THAT(TenantOf(plain), HasSubstr("no token is accepted without TLS"));
  EXPECT_EQ(refused_.why, CallerRefusal::kNoTls);
}

TEST_F(IdentitiesFindTest, ATokenIsValidUpToAndIncludingItsExpiryTime) {
  const absl::Time last = absl::FromCivil(
      absl::CivilSecond(2026, 1, 1, 0, 0, 0), absl::UTCTimeZone());
  const Credentials old = WithToken("old");
  KVASIR_EXPECT_OK(identities_.Find(old, last, &refused_).status());
  EXPECT_THAT(
      identities_.Find(old, last + absl::Nanoseconds(1), &refused_).status(),
      StatusIs(absl::StatusCode::kUnauthenticated,
               HasSubstr("the token expired at 2026-01-01T00:00:00Z")));
  EXPECT_EQ(refused_.why, CallerRefusal::kExpired);
  ASSERT_TRUE(refused_.known.has_value());
  EXPECT_EQ(refused_.known->label, "old");
}

TEST_F(IdentitiesFindTest, CredentialsOfDifferentTenantsAreRefused) {
  Credentials both = WithToken("one");
  both.certificate_names = {"blue.example"};
  EXPECT_EQ(TenantOf(both),
            "the certificate and the token belong to different tenants");
  EXPECT_EQ(refused_.why, CallerRefusal::kDisagree);
  ASSERT_TRUE(refused_.known.has_value());
  EXPECT_EQ(refused_.known->label, "blue.example");
  EXPECT_EQ(TenantOf(WithCertificate({"red.example", "blue.example"})),
            "the certificate has names of two tenants");
  EXPECT_EQ(refused_.why, CallerRefusal::kDisagree);
  ASSERT_TRUE(refused_.known.has_value());
  EXPECT_EQ(refused_.known->label, "red.example");
}

TEST_F(IdentitiesFindTest, TheDefaultRoleIsClient) {
  EXPECT_TRUE(HasRole(identities_.tenant(0), kvasir::v1::CLIENT));
  EXPECT_FALSE(HasRole(identities_.tenant(0), kvasir::v1::ADMIN));
  EXPECT_FALSE(HasRole(identities_.tenant(1), kvasir::v1::CLIENT));
  EXPECT_TRUE(HasRole(identities_.tenant(1), kvasir::v1::ADMIN));
}

TEST(IdentitiesTest, ACallerWithoutKnownCredentialsIsAnonymous) {
  const auto read = Parse(R"({"schema_version": 1, "anonymous": {},
      "tenants": [{"name": "red",
                   "tokens": [{"label": "a", "sha256": "#one"}]}]})");
  KVASIR_ASSERT_OK(read.status());
  Identities::Refused refused;
  for (const Credentials& shown :
       {Credentials{}, WithCertificate({"other.example"})}) {
    const auto found = read->Find(shown, kNow, &refused);
    KVASIR_ASSERT_OK(found.status());
    EXPECT_EQ(read->tenant(found->tenant_idx).name(), "anonymous");
    EXPECT_EQ(found->label, "");
  }
  // A caller with a wrong token is refused, and not accepted as anonymous.
  EXPECT_FALSE(read->Find(WithToken("three"), kNow, &refused).ok());
}

TEST(IdentitiesTest, TheHashOfATokenMayHaveUpperOrLowerCaseHexDigits) {
  std::string upper = base::Sha256Hex("one");
  for (char& c : upper) c = absl::ascii_toupper(static_cast<unsigned char>(c));
  const auto read = Parse(Red(
      absl::StrCat(R"("tokens": [{"label": "a", "sha256": ")", upper, "\"}]")));
  KVASIR_ASSERT_OK(read.status());
  Identities::Refused refused;
  KVASIR_EXPECT_OK(read->Find(WithToken("one"), kNow, &refused).status());
}

TEST(IdentitiesTest,
     TheErrorForAListenerThatCannotSeeCredentialsNamesTheFlags) {
  const auto tokens =
      Parse(Red(R"("tokens": [{"label": "a", "sha256": "#one"}])"));
  const auto certificates = Parse(Red(R"("certificates": ["x"])"));
  EXPECT_THAT(tokens->CheckListener({}, "who.json"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("who.json: has tokens"),
                             HasSubstr("--tls-cert and --tls-key"))));
  KVASIR_EXPECT_OK(tokens->CheckListener({.tls = true}, "who.json"));
  EXPECT_THAT(certificates->CheckListener({.tls = true}, "who.json"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("--tls-client-ca")));
  KVASIR_EXPECT_OK(certificates->CheckListener(
      {.tls = true, .client_certificates = true}, "who.json"));
}

// A server does not start if its file has no callers. But a running server
// accepts such a file (Callers::Poll).
TEST(IdentitiesTest, AFileThatWouldAcceptNoCallerIsRefusedAtStart) {
  for (const char* text :
       {R"({"schema_version": 1})",
        R"({"schema_version": 1, "tenants": [{"name": "a"}]})"}) {
    const auto read = Parse(text);
    KVASIR_ASSERT_OK(read.status());
    EXPECT_THAT(
        read->CheckListener({.tls = true}, "who.json"),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 HasSubstr("who.json: tenants: no caller would be accepted")));
    Identities::Refused refused;
    EXPECT_THAT(read->Find({.encrypted = true}, kNow, &refused).status(),
                StatusIs(absl::StatusCode::kUnauthenticated,
                         "no credentials: no caller is accepted now"));
  }
}

TEST(IdentitiesTest,
     ATenantsCertificateIsRefusedIfNoPortOfItsRoleAsksForCertificates) {
  // Here the admin port is only on the loopback interface, so it does not ask
  // for certificates.
  const ListenerProof client = {.tls = true, .client_certificates = true};
  const ListenerProof asks = {
      .tls = true, .client_certificates = true, .admin_asks = true};
  const ListenerProof admin = {
      .tls = true, .admin_certificates = true, .admin_asks = true};
  const ListenerProof both = {.tls = true,
                              .client_certificates = true,
                              .admin_certificates = true,
                              .admin_asks = true};
  const auto check = [](const std::string& fields, const ListenerProof& proof) {
    return Parse(Red(R"("certificates": ["x"])" + fields))
        ->CheckListener(proof, "who.json");
  };
  const auto refused = [](const char* role, const char* flag) {
    return StatusIs(absl::StatusCode::kFailedPrecondition,
                    AllOf(HasSubstr(role), HasSubstr(flag)));
  };
  KVASIR_EXPECT_OK(check("", client));
  EXPECT_THAT(check("", {.tls = true, .admin_certificates = true}),
              refused("CLIENT", "--tls-client-ca"));
  const std::string is_admin = R"(, "roles": ["ADMIN"])";
  KVASIR_EXPECT_OK(check(is_admin, admin));
  EXPECT_THAT(check(is_admin, client), refused("ADMIN", "--admin-client-ca"));
  const std::string is_both = R"(, "roles": ["CLIENT", "ADMIN"])";
  KVASIR_EXPECT_OK(check(is_both, both));
  EXPECT_THAT(check(is_both, admin), refused("CLIENT", "--tls-client-ca"));
  EXPECT_THAT(check(is_both, asks), refused("ADMIN", "--admin-client-ca"));
  KVASIR_EXPECT_OK(check(is_both, client));
  // The tenant also has a token, which it can use at the port that does not ask
  // for certificates.
  const std::string token = R"(, "tokens": [{"label": "a", "sha256": "#one"}])";
  KVASIR_EXPECT_OK(check(is_both + token, admin));
  KVASIR_EXPECT_OK(check(is_both + token, asks));
  EXPECT_THAT(check(token, {.tls = true, .admin_certificates = true}),
              refused("CLIENT", "--tls-client-ca"));
}

TEST(IdentitiesTest, AnAdminPortThatNoTenantMayUseIsRefusedAtStart) {
  const ListenerProof proof = {.tls = true, .admin_asks = true};
  const std::string token = R"("tokens": [{"label": "a", "sha256": "#one"}])";
  EXPECT_THAT(Parse(Red(token))->CheckListener(proof, "who.json"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("has the role ADMIN, which the admin "
                                       "port asks for"),
                             HasSubstr("--admin-host"))));
  // The tenant with the role ADMIN has no credentials, so no caller can belong
  // to it.
  EXPECT_THAT(
      Parse(R"({"schema_version": 1, "tenants": [
                {"name": "red", "tokens": [{"label": "a", "sha256": "#one"}]},
                {"name": "op", "roles": ["ADMIN"]}]})")
          ->CheckListener(proof, "who.json"),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("no tenant with a token or a certificate has the "
                         "role ADMIN")));
  KVASIR_EXPECT_OK(Parse(Red(token + R"(, "roles": ["ADMIN"])"))
                       ->CheckListener(proof, "who.json"));
}

TEST(FindHashTest, ComparesWithEveryHashEvenAfterOneHasMatched) {
  const std::vector<std::string> hashes = {"a", "b", "c", "d"};
  for (const char* wanted : {"a", "c", "d", "x"}) {
    std::vector<std::string> compared;
    const auto found =
        FindHash(hashes, wanted, [&](std::string_view a, std::string_view b) {
          compared.emplace_back(a);
          return a == b;
        });
    EXPECT_EQ(compared, hashes) << wanted;
    EXPECT_EQ(found.has_value(), std::string(wanted) != "x");
    EXPECT_EQ(found.has_value() ? hashes[*found] : "x", wanted);
  }
}

}  // namespace
}  // namespace kvasir::router
