#include "router/identity/callers.h"

#include <unistd.h>

#include <map>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/base/refusal_reason.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using kvasir::v1::ADMIN;
using kvasir::v1::CLIENT;
using ::testing::HasSubstr;

class CountingObserver final : public CallerObserver {
 public:
  void OnCallerRefused(CallerRefusal why) override {
    ++refused[CallerRefusalName(why)];
  }
  void OnIdentitiesRead(bool ok) override { ++reads[ok]; }

  std::map<std::string, int> refused;
  std::map<bool, int> reads;
};

std::string File(const std::string& tenants) {
  return absl::StrCat(R"({"schema_version": 1, "tenants": [)", tenants, "]}");
}
// Returns the JSON of a tenant whose token is the same text as its name.
// `fields` are further JSON fields.
std::string TenantJson(const std::string& name,
                       const std::string& fields = "") {
  return absl::StrCat(
      R"({"name": ")", name, R"(", "tokens": [{"label": "t", "sha256": ")",
      base::Sha256Hex(name), R"("}])", fields.empty() ? "" : ", ", fields, "}");
}
Credentials Token(const std::string& name) {
  return {.encrypted = true,
          .token = Credentials::Token::kGiven,
          .token_sha256 = base::Sha256Hex(name)};
}

class CallersTest : public ::testing::Test {
 protected:
  void Open(const std::string& text) {
    text_ = text;
    auto opened = Callers::Open({.name = "who.json",
                                 .read = [this] { return text_; },
                                 .proof = proof_,
                                 .clock = &clock_,
                                 .now = [this] { return world_; }},
                                &observer_);
    KVASIR_ASSERT_OK(opened.status());
    callers_ = *std::move(opened);
  }
  absl::StatusOr<Caller> Ask(const std::string& token,
                             const std::string& tenant = "") {
    return callers_->Identify(Token(token), CLIENT, tenant);
  }

  base::ManualClock clock_{absl::FromUnixSeconds(1'800'000'000)};
  absl::Time world_ = absl::FromUnixSeconds(1'800'000'000);
  absl::StatusOr<std::string> text_ = "";
  ListenerProof proof_ = {.tls = true};
  CountingObserver observer_;
  std::shared_ptr<Callers> callers_;
};

TEST_F(CallersTest, TheCredentialsDetermineTheTenant) {
  Open(File(TenantJson("red")));
  const auto caller = Ask("red");
  KVASIR_ASSERT_OK(caller.status());
  EXPECT_EQ(caller->tenant, "red");
  EXPECT_EQ(caller->label, "t");
  EXPECT_EQ(caller->cache_tenant(), "red");
  KVASIR_EXPECT_OK(Ask("red", "red").status());
  EXPECT_THAT(Ask("red", "blue").status(),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       HasSubstr("tenant 'red' may not set another")));
  EXPECT_EQ(observer_.refused["tenant"], 1);
}

TEST_F(CallersTest, AGatewaySetsTheTenantOfItsRequests) {
  Open(File(absl::StrCat(
      TenantJson("gate", R"("may_set_tenant": true, "shared_prefix_cache": true,
                  "quota": {"concurrent_requests": 1})"),
      ",", TenantJson("blue", R"("quota": {"concurrent_requests": 2})"))));
  const auto named = Ask("gate", "blue");
  KVASIR_ASSERT_OK(named.status());
  EXPECT_EQ(named->tenant, "blue");
  EXPECT_EQ(named->label, "t");
  EXPECT_EQ(named->quota, Ask("blue")->quota);
  EXPECT_EQ(named->cache_tenant(), "blue");
  // Tenants that are not in the file share the gateway's quota.
  const auto other = Ask("gate", "green");
  EXPECT_EQ(other->tenant, "green");
  EXPECT_EQ(other->quota, Ask("gate")->quota);
  EXPECT_EQ(other->quota, Ask("gate", "yellow")->quota);
  // The gateway's own calls share cached prefixes, so cache_tenant is empty. A
  // tenant that is not in the file has its own cached prefixes.
  EXPECT_EQ(Ask("gate")->cache_tenant(), "");
  EXPECT_EQ(other->cache_tenant(), "green");
  EXPECT_THAT(
      Ask("gate", "a b").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("'x-tenant-id'")));
  EXPECT_THAT(Ask("gate", std::string(129, 'x')).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
  EXPECT_EQ(observer_.refused["tenant"], 2);
}

TEST_F(CallersTest, ACallerWithoutTheRequiredRoleGetsPermissionDenied) {
  Open(File(absl::StrCat(TenantJson("red"), ",",
                         TenantJson("op", R"("roles": ["ADMIN"])"))));
  EXPECT_THAT(callers_->Identify(Token("red"), ADMIN).status(),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       "tenant 'red' does not have the role ADMIN"));
  KVASIR_EXPECT_OK(callers_->Identify(Token("op"), ADMIN).status());
  EXPECT_THAT(callers_->Identify(Token("op"), CLIENT).status(),
              StatusIs(absl::StatusCode::kPermissionDenied, ::testing::_));
  EXPECT_EQ(observer_.refused["role"], 2);
}

TEST_F(CallersTest, AGatewayCannotActForATenantWithoutTheRequiredRole) {
  Open(File(absl::StrCat(TenantJson("gate", R"("may_set_tenant": true)"), ",",
                         TenantJson("op", R"("roles": ["ADMIN"])"))));
  EXPECT_THAT(Ask("gate", "op").status(),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       "tenant 'op' does not have the role CLIENT"));
  EXPECT_EQ(observer_.refused["role"], 1);
}

TEST_F(CallersTest, ARefusalHasItsReasonAndTheCallersNameIfItIsKnown) {
  Open(File(absl::StrCat(
      TenantJson(
          "red",
          R"("quota": {"requests_per_second": 1, "bytes_in_flight": 9})"),
      R"(, {"name": "old", "tokens": [{"label": "o", "sha256": ")",
      base::Sha256Hex("old"), R"(", "not_after": "2026-01-01T00:00:00Z"}]})")));
  const auto ask = [this](const char* token, kvasir::v1::Role role,
                          const std::string& tenant) {
    Caller who;
    const auto status =
        callers_->Identify(Token(token), role, tenant, &who).status();
    return absl::StrCat(RefusalReasonOf(status), " ", who.tenant, "/",
                        who.label);
  };
  EXPECT_EQ(ask("red", ADMIN, ""), "role red/t");
  EXPECT_EQ(ask("red", CLIENT, "blue"), "tenant red/t");
  EXPECT_EQ(ask("old", CLIENT, ""), "expired old/o");
  EXPECT_EQ(ask("nobody", CLIENT, "red"), "unknown /");
  const Caller red = *Ask("red");
  KVASIR_EXPECT_OK(callers_->Enter(red).status());
  EXPECT_EQ(RefusalReasonOf(callers_->Enter(red).status()), "rate");
  const auto share = callers_->TakeBytes(red, 5, nullptr);
  KVASIR_ASSERT_OK(share.status());
  EXPECT_EQ(RefusalReasonOf(callers_->TakeBytes(red, 5, nullptr).status()),
            "bytes");
  EXPECT_EQ(RefusalReasonOf(callers_->TakeBytes(red, 10, nullptr).status()),
            "too_large");
}

TEST_F(CallersTest, RefusalsByEachLimitOfAQuotaAreCounted) {
  Open(File(TenantJson("red", R"("quota": {"requests_per_second": 1,
                          "concurrent_requests": 1,
                          "bytes_in_flight": 100})")));
  const Caller red = *Ask("red");
  {
    const auto place = callers_->Enter(red);
    KVASIR_ASSERT_OK(place.status());
    EXPECT_FALSE(callers_->Enter(red).ok());
    EXPECT_EQ(observer_.refused["concurrency"], 1);
  }
  EXPECT_FALSE(callers_->Enter(red).ok());
  EXPECT_EQ(observer_.refused["rate"], 1);
  clock_.Advance(absl::Seconds(1));
  KVASIR_EXPECT_OK(callers_->Enter(red).status());
  EXPECT_FALSE(callers_->TakeBytes(red, 101, nullptr).ok());
  EXPECT_EQ(observer_.refused["too_large"], 1);
  const auto share = callers_->TakeBytes(red, 60, nullptr);
  KVASIR_ASSERT_OK(share.status());
  EXPECT_FALSE(callers_->TakeBytes(red, 60, nullptr).ok());
  EXPECT_EQ(observer_.refused["bytes"], 1);
}

TEST_F(CallersTest, OnlyTokensAndNotQuotasUseTheWallClock) {
  // The test begins at 2027-01-15T08:00:00Z (1'800'000'000 in Unix seconds), an
  // hour before the token expires.
  Open(File(absl::StrCat(
      R"({"name": "red", "tokens": [{"label": "t", "sha256": ")",
      base::Sha256Hex("red"), R"(", "not_after": "2027-01-15T09:00:00Z"}],)",
      R"( "quota": {"requests_per_second": 1}})")));
  // Advance only the wall clock, as a sleep of the machine does.
  world_ += absl::Hours(2);
  EXPECT_THAT(Ask("red").status(),
              StatusIs(absl::StatusCode::kUnauthenticated,
                       HasSubstr("expired at 2027-01-15T09:00:00Z")));
  EXPECT_EQ(observer_.refused["expired"], 1);
  world_ -= absl::Hours(2);
  clock_.Advance(absl::Hours(2));
  const auto red = Ask("red");
  KVASIR_ASSERT_OK(red.status());
  KVASIR_EXPECT_OK(callers_->Enter(*red).status());
  world_ += absl::Minutes(1);
  EXPECT_FALSE(callers_->Enter(*red).ok())
      << "the quota does not use the wall clock";
}

TEST_F(CallersTest, AChangedIdentitiesFileReplacesThePreviousOne) {
  Open(File(absl::StrCat(TenantJson("red"), ",", TenantJson("blue"))));
  callers_->Poll();
  EXPECT_TRUE(observer_.reads.empty()) << "the file has not changed";
  text_ = File(absl::StrCat(TenantJson("blue"), ",", TenantJson("green")));
  callers_->Poll();
  EXPECT_EQ(observer_.reads[true], 1);
  EXPECT_THAT(Ask("red").status(),
              StatusIs(absl::StatusCode::kUnauthenticated, ::testing::_));
  KVASIR_EXPECT_OK(Ask("blue").status());
  KVASIR_EXPECT_OK(Ask("green").status());
}

TEST_F(CallersTest,
       AnInvalidIdentitiesFileIsReportedOnceAndThePreviousOneStaysInUse) {
  Open(File(TenantJson("red")));
  const std::string wrong[] = {"{", "", "{}", "{\"schema_version\": 2}",
                               File(TenantJson("red", R"("color": 1)"))};
  int reported = 0;
  for (const std::string& text : wrong) {
    text_ = text;
    callers_->Poll();
    callers_->Poll();
    EXPECT_EQ(observer_.reads[false], ++reported) << text;
    KVASIR_EXPECT_OK(Ask("red").status());
  }
  text_ = absl::NotFoundError("who.json: is gone");
  callers_->Poll();
  callers_->Poll();
  EXPECT_EQ(observer_.reads[false], ++reported);
  KVASIR_EXPECT_OK(Ask("red").status());
  text_ = File(TenantJson("red"));
  callers_->Poll();
  EXPECT_EQ(observer_.reads[true], 1);
}

// Regression test: a changed file was once ignored if a server could not start
// with it. So a token that had been removed from the file stayed valid.
TEST_F(CallersTest, RemovingTheLastCallerFromTheIdentitiesFileEndsItsAccess) {
  proof_.admin_asks = true;
  const std::string op = TenantJson("op", R"("roles": ["ADMIN"])");
  const struct {
    std::string before;
    std::string after;
    const char* warning;
  } changes[] = {
      {File(absl::StrCat(TenantJson("red"), ",", op)), File(""),
       "no caller would be accepted"},
      {File(absl::StrCat(TenantJson("red"), ",", op)),
       File(R"({"name": "red"}, {"name": "op", "roles": ["ADMIN"]})"),
       "no caller would be accepted"},
      // The last tenant with the role ADMIN is removed.
      {File(absl::StrCat(TenantJson("blue"), ",", TenantJson("red"), ",", op)),
       File(TenantJson("blue")), "has the role ADMIN"},
      // The new file has only a certificate, which no port asks for. Still, the
      // removed tokens must become invalid.
      {File(absl::StrCat(TenantJson("red"), ",", op)),
       File(R"({"name": "green", "certificates": ["x"]})"), "'green' has"},
  };
  int taken = 0;
  for (const auto& change : changes) {
    Open(change.before);
    KVASIR_EXPECT_OK(Ask("red").status());
    KVASIR_EXPECT_OK(callers_->Identify(Token("op"), ADMIN).status());
    text_ = change.after;
    ::testing::internal::CaptureStderr();
    callers_->Poll();
    callers_->Poll();
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(Ask("red").status(),
                StatusIs(absl::StatusCode::kUnauthenticated, ::testing::_));
    EXPECT_THAT(callers_->Identify(Token("op"), ADMIN).status(),
                StatusIs(absl::StatusCode::kUnauthenticated, ::testing::_));
    EXPECT_EQ(observer_.reads[true], ++taken);
    EXPECT_EQ(observer_.reads[false], 0);
    const std::string warned =
        "the identities in use would be refused at a start";
    EXPECT_THAT(log, HasSubstr(warned));
    EXPECT_EQ(log.find(warned), log.rfind(warned)) << "once";
    EXPECT_THAT(log, HasSubstr(change.warning));
  }
}

TEST_F(CallersTest, RunningRequestsStayCountedWhenTheIdentitiesFileChanges) {
  const std::string quota = R"("quota": {"concurrent_requests": 1})";
  Open(File(TenantJson("red", quota)));
  auto place = callers_->Enter(*Ask("red"));
  KVASIR_ASSERT_OK(place.status());
  text_ = File(TenantJson("blue"));
  callers_->Poll();
  text_ = File(TenantJson("red", quota));
  callers_->Poll();
  EXPECT_FALSE(callers_->Enter(*Ask("red")).ok())
      << "the first request still runs, although its tenant was removed once";
  (*place)->Leave();
  KVASIR_EXPECT_OK(callers_->Enter(*Ask("red")).status());
}

TEST_F(CallersTest, AnErrorInTheIdentitiesFileFailsTheStart) {
  const auto open = [](const std::string& text, bool tls) {
    return Callers::Open({.name = "who.json",
                          .read = [text] { return text; },
                          .proof = {.tls = tls}},
                         nullptr)
        .status();
  };
  EXPECT_THAT(open("{", true),
              StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
  EXPECT_THAT(
      open(File(TenantJson("red")), false),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("--tls-cert")));
  KVASIR_EXPECT_OK(open(File(TenantJson("red")), true));
}

TEST(ReadIdentitiesFileTest,
     TheErrorForAFileThatCannotBeReadNamesItAndTheReason) {
  const base::TempFolder folder;
  const std::string path =
      folder.Write("identities", std::string(kMaxIdentitiesBytes + 1, ' '));
  EXPECT_THAT(
      ReadIdentitiesFile(path).status(),
      StatusIs(absl::StatusCode::kOutOfRange,
               "--identities " + path +
                   ": the file has more than 1048576 bytes, the limit"));
  EXPECT_THAT(ReadIdentitiesFile(folder.path()).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr(": this is not a regular file")));
  folder.Write("identities", "{}");
  EXPECT_EQ(*ReadIdentitiesFile(path), "{}");
  EXPECT_THAT(ReadIdentitiesFile(path + ".none").status(),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("--identities " + path + ".none: ")));
}

}  // namespace
}  // namespace kvasir::router
