#include "router/identity/identities.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "google/protobuf/util/json_util.h"

namespace kvasir::router {
namespace {

using kvasir::v1::Quota;
using kvasir::v1::Tenant;
using kvasir::v1::Token;

constexpr uint32_t kSchemaVersion = 1;
constexpr size_t kMaxNameBytes = 128;
constexpr size_t kMaxLabelBytes = 64;
constexpr size_t kMaxCertificateNameBytes = 255;
constexpr size_t kHashBytes = 64;
// The allowed range of requests_per_second. The largest value is more than any
// router serves. The smallest is about one request a day.
constexpr double kMaxPerSecond = 1e6;
constexpr double kMinPerSecond = 1e-5;
constexpr uint32_t kMaxBurst = 1'000'000;
constexpr char kAnonymous[] = "anonymous";

bool IsNameCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
         absl::StrContains("-_.:@/", c);
}

absl::Status Wrong(absl::string_view at, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(at, ": ", what));
}

absl::Status CheckName(absl::string_view name, size_t most,
                       absl::string_view at) {
  if (name.empty() || name.size() > most) {
    return Wrong(at, absl::StrCat("want 1 to ", most,
                                  " letters, digits and -_.:@/, have ",
                                  name.size(), " bytes"));
  }
  const auto* const other =
      std::find_if_not(name.begin(), name.end(), IsNameCharacter);
  if (other == name.end()) return absl::OkStatus();
  // The byte itself is not shown, because it may be a control character.
  return Wrong(at, absl::StrCat("want letters, digits and -_.:@/, but byte ",
                                other - name.begin(), " is none of them"));
}

// Returns the first line of a parser's message without its long words. The
// message quotes the file, so a long word may be a secret.
std::string WithoutSecrets(absl::string_view text) {
  constexpr size_t kLongestWord = 24;
  std::string shown;
  size_t run = 0;
  for (const char c : text.substr(0, text.find('\n')).substr(0, 300)) {
    run = absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  absl::StrContains("-_+/=~", c)
              ? run + 1
              : 0;
    if (run == kLongestWord) {
      shown.resize(shown.size() - (kLongestWord - 1));
      shown += "...";
    }
    if (run < kLongestWord) shown.push_back(c);
  }
  return shown;
}

absl::Status CheckQuota(const Quota& quota, const std::string& at) {
  const double rate = quota.requests_per_second();
  // This form of the condition also refuses NaN.
  if (rate != 0 && !(rate >= kMinPerSecond && rate <= kMaxPerSecond)) {
    return Wrong(absl::StrCat(at, ".requests_per_second"),
                 absl::StrCat("want 0 (no limit), or ", kMinPerSecond, " to ",
                              kMaxPerSecond, ", have ", rate));
  }
  if (quota.burst() > 0 && rate == 0) {
    return Wrong(absl::StrCat(at, ".burst"),
                 "requires a requests_per_second above 0");
  }
  if (quota.burst() > kMaxBurst) {
    return Wrong(
        absl::StrCat(at, ".burst"),
        absl::StrCat("want at most ", kMaxBurst, ", have ", quota.burst()));
  }
  return absl::OkStatus();
}

absl::Status Unauthenticated(absl::string_view text) {
  return absl::UnauthenticatedError(text);
}

}  // namespace

const char* CallerRefusalName(CallerRefusal refusal) {
  switch (refusal) {
    case CallerRefusal::kNoCredentials:
      return "no_credentials";
    case CallerRefusal::kMalformed:
      return "malformed";
    case CallerRefusal::kNoTls:
      return "no_tls";
    case CallerRefusal::kUnknown:
      return "unknown";
    case CallerRefusal::kExpired:
      return "expired";
    case CallerRefusal::kDisagree:
      return "disagree";
    case CallerRefusal::kTenant:
      return "tenant";
    case CallerRefusal::kRole:
      return "role";
    case CallerRefusal::kRate:
      return "rate";
    case CallerRefusal::kConcurrency:
      return "concurrency";
    case CallerRefusal::kBytes:
      return "bytes";
    case CallerRefusal::kTooLarge:
      return "too_large";
  }
  return "";
}

absl::Status CheckTenantName(absl::string_view name) {
  if (name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata 'x-tenant-id': want at most ", kMaxNameBytes,
                     " bytes, have ", name.size()));
  }
  if (std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "metadata 'x-tenant-id': want one value of letters, digits and "
      "-_.:@/ only");
}

absl::Status CheckTokenLabel(absl::string_view label) {
  return CheckName(label, kMaxLabelBytes, "label");
}

std::optional<size_t> FindHash(const std::vector<std::string>& hashes,
                               const std::string& hash, const Equal& equal) {
  std::optional<size_t> found;
  for (size_t i = 0; i < hashes.size(); ++i) {
    if (equal(hashes[i], hash)) found = i;
  }
  return found;
}

bool HasRole(const Tenant& tenant, kvasir::v1::Role role) {
  if (tenant.roles().empty()) return role == kvasir::v1::CLIENT;
  return std::find(tenant.roles().begin(), tenant.roles().end(), role) !=
         tenant.roles().end();
}

absl::StatusOr<Identities> Identities::Parse(absl::string_view text,
                                             absl::string_view name) {
  if (text.size() > kMaxIdentitiesBytes) {
    return Wrong(name, absl::StrCat("want at most ", kMaxIdentitiesBytes,
                                    " bytes, have ", text.size()));
  }
  Identities made;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = false;
  const auto parsed = google::protobuf::util::JsonStringToMessage(
      google::protobuf::StringPiece(text.data(), text.size()), &made.file_,
      options);
  if (!parsed.ok()) {
    const std::string said(parsed.message());
    return Wrong(name, absl::StrCat("is not a valid Identities message: ",
                                    WithoutSecrets(said)));
  }
  if (const absl::Status status = made.Read(); !status.ok()) {
    return Wrong(name, status.message());
  }
  return made;
}

absl::Status Identities::Read() {
  if (file_.schema_version() != kSchemaVersion) {
    return Wrong("schema_version",
                 absl::StrCat("want ", kSchemaVersion, ", have ",
                              file_.schema_version()));
  }
  if (file_.tenants_size() > kMaxTenants) {
    return Wrong("tenants", absl::StrCat("want at most ", kMaxTenants,
                                         ", have ", file_.tenants_size()));
  }
  for (int idx = 0; idx < file_.tenants_size(); ++idx) {
    KVASIR_RETURN_IF_ERROR(ReadTenant(idx));
  }
  if (!file_.has_anonymous()) return absl::OkStatus();
  Tenant* anonymous = file_.mutable_anonymous();
  if (anonymous->name().empty()) anonymous->set_name(kAnonymous);
  return ReadTenant(-1);
}

absl::Status Identities::ReadTenant(int idx) {
  const bool anonymous = idx < 0;
  const Tenant& tenant = this->tenant(idx);
  std::string at = anonymous ? "anonymous" : absl::StrCat("tenants[", idx, "]");
  KVASIR_RETURN_IF_ERROR(
      CheckName(tenant.name(), kMaxNameBytes, absl::StrCat(at, ".name")));
  absl::StrAppend(&at, " ('", tenant.name(), "')");
  if (const auto [same, is_new] = by_name_.emplace(tenant.name(), idx);
      !is_new) {
    return Wrong(
        at, absl::StrCat("tenants[", same->second, "] already has this name"));
  }
  for (const int role : tenant.roles()) {
    if (role == kvasir::v1::CLIENT || role == kvasir::v1::ADMIN) continue;
    return Wrong(
        absl::StrCat(at, ".roles"),
        absl::StrCat("want only CLIENT or ADMIN, have the number ", role));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckQuota(tenant.quota(), absl::StrCat(at, ".quota")));
  if (tenant.least_priority() > 0 ||
      (anonymous && tenant.least_priority() != 0)) {
    return Wrong(absl::StrCat(at, ".least_priority"),
                 absl::StrCat(anonymous ? "want 0" : "want at most 0",
                              ", have ", tenant.least_priority()));
  }
  if (anonymous) {
    // Every client can be an anonymous caller, so the anonymous tenant must not
    // have further rights.
    if (!tenant.tokens().empty() || !tenant.certificates().empty()) {
      return Wrong(
          at,
          "is for callers without credentials: want neither tokens nor "
          "certificates");
    }
    if (tenant.may_set_tenant()) {
      return Wrong(absl::StrCat(at, ".may_set_tenant"),
                   "anonymous callers could then act for any tenant: set this "
                   "only for a tenant with a token or a certificate");
    }
    if (HasRole(tenant, kvasir::v1::ADMIN)) {
      return Wrong(absl::StrCat(at, ".roles"), "want only CLIENT");
    }
  }
  std::map<std::string, int> labels;
  for (int i = 0; i < tenant.tokens_size(); ++i) {
    const std::string token_at = absl::StrCat(at, ".tokens[", i, "]");
    KVASIR_RETURN_IF_ERROR(ReadToken(idx, tenant.tokens(i), token_at));
    if (!labels.emplace(tenant.tokens(i).label(), i).second) {
      return Wrong(absl::StrCat(token_at, ".label"),
                   absl::StrCat("'", tenant.tokens(i).label(),
                                "' is already the label of another token"));
    }
  }
  if (tenant.certificates_size() > kMaxCertificatesOfTenant) {
    return Wrong(absl::StrCat(at, ".certificates"),
                 absl::StrCat("want at most ", kMaxCertificatesOfTenant,
                              ", have ", tenant.certificates_size()));
  }
  for (int i = 0; i < tenant.certificates_size(); ++i) {
    KVASIR_RETURN_IF_ERROR(
        ReadCertificate(idx, tenant.certificates(i),
                        absl::StrCat(at, ".certificates[", i, "]")));
  }
  return absl::OkStatus();
}

absl::Status Identities::ReadToken(int idx, const Token& token,
                                   const std::string& at) {
  KVASIR_RETURN_IF_ERROR(
      CheckName(token.label(), kMaxLabelBytes, absl::StrCat(at, ".label")));
  std::string hash = token.sha256();
  absl::AsciiStrToLower(&hash);
  if (hash.size() != kHashBytes ||
      !std::all_of(hash.begin(), hash.end(), [](char c) {
        return absl::ascii_isxdigit(static_cast<unsigned char>(c));
      })) {
    return Wrong(absl::StrCat(at, ".sha256"),
                 absl::StrCat("want ", kHashBytes,
                              " hex digits, the SHA-256 of a token (kvasir "
                              "token makes both), have ",
                              hash.size(), " bytes"));
  }
  for (size_t i = 0; i < hashes_.size(); ++i) {
    if (hashes_[i] != hash) continue;
    return Wrong(absl::StrCat(at, ".sha256"),
                 absl::StrCat("is also the hash of token '", owners_[i].label,
                              "' of tenants[", owners_[i].tenant_idx, "]"));
  }
  if (hashes_.size() == kMaxTokens) {
    return Wrong(at, absl::StrCat("want at most ", kMaxTokens,
                                  " tokens in the whole file"));
  }
  hashes_.push_back(std::move(hash));
  const absl::Time not_after =
      token.has_not_after()
          ? absl::FromUnixSeconds(token.not_after().seconds()) +
                absl::Nanoseconds(token.not_after().nanos())
          : absl::InfiniteFuture();
  owners_.push_back({idx, token.label(), not_after});
  return absl::OkStatus();
}

absl::Status Identities::ReadCertificate(int idx,
                                         const std::string& certificate,
                                         const std::string& at) {
  if (certificate.empty() || certificate.size() > kMaxCertificateNameBytes ||
      !std::all_of(certificate.begin(), certificate.end(), [](char c) {
        return absl::ascii_isgraph(static_cast<unsigned char>(c));
      })) {
    return Wrong(
        at, absl::StrCat("want the DNS or URI name of a certificate, "
                         "1 to ",
                         kMaxCertificateNameBytes, " printable characters"));
  }
  if (absl::StrContains(certificate, '*')) {
    return Wrong(at, "want a whole name: wildcards are not implemented");
  }
  if (const auto [same, is_new] = by_certificate_.emplace(certificate, idx);
      !is_new) {
    return Wrong(
        at, absl::StrCat("already belongs to tenants[", same->second, "]"));
  }
  return absl::OkStatus();
}

absl::Status Identities::CheckListener(const ListenerProof& proof,
                                       absl::string_view name) const {
  if (hashes_.empty() && by_certificate_.empty() && !file_.has_anonymous()) {
    return absl::FailedPreconditionError(absl::StrCat(
        name,
        ": tenants: no caller would be accepted: give at least one tenant a "
        "token or a certificate, or set 'anonymous'"));
  }
  if (!hashes_.empty() && !proof.tls) {
    return absl::FailedPreconditionError(absl::StrCat(
        name,
        ": has tokens, which are accepted only over TLS: give --tls-cert and "
        "--tls-key, or remove the tokens and set 'anonymous'"));
  }
  bool has_admin = false;
  for (const Tenant& tenant : file_.tenants()) {
    has_admin |= HasRole(tenant, kvasir::v1::ADMIN) &&
                 (!tenant.tokens().empty() || !tenant.certificates().empty());
    KVASIR_RETURN_IF_ERROR(CheckProof(tenant, proof, name));
  }
  if (proof.admin_asks && !has_admin) {
    return absl::FailedPreconditionError(absl::StrCat(
        name,
        ": no tenant with a token or a certificate has the role ADMIN, which "
        "the admin port asks for: give a tenant this role, or restrict the "
        "port to this machine (--admin-host 127.0.0.1)"));
  }
  return absl::OkStatus();
}

absl::Status Identities::CheckProof(const Tenant& tenant,
                                    const ListenerProof& proof,
                                    absl::string_view name) const {
  if (tenant.certificates().empty()) return absl::OkStatus();
  // True if the tenant's certificates must work at the admin port. This is so
  // if the port requires the role ADMIN, or if the tenant cannot use the
  // clients' port because it lacks the role CLIENT.
  const bool as_admin =
      proof.admin_asks || !HasRole(tenant, kvasir::v1::CLIENT);
  const struct {
    kvasir::v1::Role role;
    bool judged;
    bool asked;
    const char* flag;
  } ports[] = {
      {kvasir::v1::CLIENT, true, proof.client_certificates, "--tls-client-ca"},
      {kvasir::v1::ADMIN, as_admin, proof.admin_certificates,
       "--admin-client-ca"}};
  // True if at least one of the tenant's ports asks for certificates. If the
  // tenant also has a token, it can use the token at the other port.
  const bool any = std::any_of(
      std::begin(ports), std::end(ports), [&tenant](const auto& port) {
        return port.asked && HasRole(tenant, port.role);
      });
  for (const auto& port : ports) {
    if (port.asked || !port.judged || !HasRole(tenant, port.role)) continue;
    if (any && !tenant.tokens().empty()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": tenant '", tenant.name(),
                     "' has certificates, but the port for its role ",
                     kvasir::v1::Role_Name(port.role),
                     " does not ask clients for certificates: give ", port.flag,
                     any ? ", give the tenant a token" : "",
                     ", or remove its certificates"));
  }
  return absl::OkStatus();
}

std::string Identities::Wanted() const {
  std::string wanted;
  if (!hashes_.empty()) wanted = "metadata 'authorization: Bearer TOKEN'";
  if (!by_certificate_.empty()) {
    absl::StrAppend(&wanted, wanted.empty() ? "" : ", or ",
                    "a certificate that is known here");
  }
  return wanted;
}

absl::StatusOr<std::optional<Identities::Found>> Identities::FindCertificate(
    const std::vector<std::string>& names, Refused* refused) const {
  std::optional<Found> found;
  for (const std::string& each : names) {
    const auto entry = by_certificate_.find(each);
    if (entry == by_certificate_.end()) continue;
    if (found.has_value() && found->tenant_idx != entry->second) {
      *refused = {CallerRefusal::kDisagree, found};
      return Unauthenticated("the certificate has names of two tenants");
    }
    if (!found.has_value()) found = Found{entry->second, each};
  }
  return found;
}

absl::StatusOr<Identities::Found> Identities::Find(
    const Credentials& credentials, absl::Time now, Refused* refused) const {
  KVASIR_ASSIGN_OR_RETURN(
      const std::optional<Found> by_certificate,
      FindCertificate(credentials.certificate_names, refused));
  if (credentials.token == Credentials::Token::kNone) {
    if (by_certificate.has_value()) return *by_certificate;
    if (file_.has_anonymous()) return Found{-1, ""};
    *refused = {CallerRefusal::kNoCredentials, std::nullopt};
    const std::string wanted = Wanted();
    return Unauthenticated(absl::StrCat(
        "no credentials: ",
        wanted.empty() ? "no caller is accepted now" : "want " + wanted));
  }
  // Without TLS, an eavesdropper may have read the token, so refuse it.
  if (!credentials.encrypted) {
    *refused = {CallerRefusal::kNoTls, by_certificate};
    return Unauthenticated(
        "metadata 'authorization': no token is accepted without TLS. Replace "
        "this one: it may have been read on the way");
  }
  if (credentials.token == Credentials::Token::kMalformed) {
    *refused = {CallerRefusal::kMalformed, by_certificate};
    return Unauthenticated(
        absl::StrCat("metadata 'authorization': want one value, 'Bearer TOKEN' "
                     "with a token of 1 to ",
                     kMaxBearerTokenBytes, " letters, digits and -._~+/="));
  }
  const std::optional<size_t> token =
      FindHash(hashes_, credentials.token_sha256, base::EqualInConstantTime);
  if (!token.has_value()) {
    *refused = {CallerRefusal::kUnknown, by_certificate};
    return Unauthenticated("metadata 'authorization': the token is unknown");
  }
  const TokenOwner& owner = owners_[*token];
  const Found found = {owner.tenant_idx, owner.label};
  if (now > owner.not_after) {
    *refused = {CallerRefusal::kExpired, found};
    return Unauthenticated(
        absl::StrCat("metadata 'authorization': the token expired at ",
                     absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", owner.not_after,
                                      absl::UTCTimeZone())));
  }
  if (by_certificate.has_value() &&
      by_certificate->tenant_idx != owner.tenant_idx) {
    *refused = {CallerRefusal::kDisagree, by_certificate};
    return Unauthenticated(
        "the certificate and the token belong to different tenants");
  }
  return found;
}

std::optional<int> Identities::Named(const std::string& tenant) const {
  const auto found = by_name_.find(tenant);
  if (found == by_name_.end()) return std::nullopt;
  return found->second;
}

}  // namespace kvasir::router
